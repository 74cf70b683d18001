"""The loaded shards of a bundle, and the calls that run them: from token ids to the inputs
of the first shard, through one shard after another, to logits. No sequence is held here:
callers pass the positions and states."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Self

import numpy as np

from workbench import runtime as runtimes
from workbench.bundle import Bundle, Shard
from workbench.bundle.names import (
    HIDDEN,
    IDS,
    K_ROWS,
    LOGITS,
    MATRIX_STATE,
    PER_LAYER,
    ROUTER_STATE,
    ROUTER_STATE_OUT,
    V_ROWS,
    X0,
    X,
)
from workbench.decode.experts import RoutedExperts
from workbench.decode.hooks import ShardHook, model_hook
from workbench.decode.inputs import HostInputs
from workbench.decode.snapshot import snapshot_identity
from workbench.decode.times import Times, clock
from workbench.runtime import Model, Settings, State
from workbench.runtime.base import OnCall


@dataclass(frozen=True, eq=False)
class ShardCall:
    """One call of a layer shard.

    Args:
        values: what the call has computed so far, by name; the shard's inputs are among
            them.
        counts: [B] valid columns, from column 0 on; the others are dummies.
        state: of the shard; the call advances it.
        hook: see `ShardHook`.
    """

    values: dict[str, np.ndarray]
    counts: np.ndarray
    state: State
    hook: ShardHook | None = None


class LoadedShards:
    """The loaded shards of a bundle.

    Args:
        bundle: an opened bundle or its path.
        runtime: `auto`, `portable`, `coreml`, `stand-in` or a plug-in's.
        precision: arithmetic of the portable runtime (`declared`, `exact`, `narrow`);
            a plug-in's target has its own.
        fast: whether the portable runtime runs groups of operations as one step each in
            `declared`; by default every operation runs as the program states it. For
            another exporter's packages, on any runtime: whether logits that a prefill
            function does not output stay nan, see `ForeignModel`.
        reads: with `fast`, the rows of a cache that attention reads: `used`, those that
            hold tokens, or `all`, as the program does.
        compute_units: Core ML's compute units.
        hints: Core ML's optimization hints, such as {"reshapeFrequency": "Infrequent"}.
        keeps_head: whether the portable runtime keeps the weights of the head between
            calls; otherwise each slice is read whenever logits are computed, which
            suits few calls of many tokens.

    Attributes:
        host: computes the inputs that depend on positions alone.
        layer_shards: the models of layer and router shards, in the order of the layers.
        heads: the models of the slices of the vocabulary, in its order; none where
            `layers_give_logits`.
        experts: the expert shards, from which the host picks for each router shard.
        settings: how the shards were loaded. Each of its fields but `keeps_head` is an
            attribute, too.

    Raises:
        InputError: no whole bundle, no such runtime here, a shard that does not load.
    """

    def __init__(
        self,
        bundle: Bundle | str | Path,
        runtime: str = "auto",
        precision: str = "declared",
        fast: bool = False,
        reads: str = "used",
        compute_units: str = "CPU_AND_NE",
        hints: dict | None = None,
        keeps_head: bool = True,
    ):
        bundle = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
        bundle.check_contents()
        self.bundle = bundle
        self.manifest = bundle.manifest
        self.options = bundle.manifest.options
        self.host = HostInputs(bundle.manifest)
        self.to_layout = self.host.to_layout
        plugin = self.options.plugin
        self.runtime = runtimes.resolve(runtime, plugin)
        self.is_device = runtimes.is_device(self.runtime)
        self.precision = plugin.precision if plugin else precision
        self.fast = fast
        self.reads = reads
        self.compute_units = compute_units
        self.hints = hints or {}
        self.settings = Settings(
            runtime=self.runtime,
            precision=self.precision,
            fast=fast,
            reads=reads,
            compute_units=compute_units,
            hints=self.hints,
            keeps_head=keeps_head,
        )
        # Nothing here may refer to this object itself, so that dropping a decoder frees its
        # memory at once, without the garbage collector.
        load = partial(runtimes.load_shard, bundle, settings=self.settings)
        kinds = "layers", "router"
        self.layer_shards = [load(s) for s in self.manifest.shards if s.kind in kinds]
        self.heads = [load(s) for s in bundle.shards("head")]
        self.experts = RoutedExperts(bundle, load, self.to_layout)
        # experts load when they are picked; they are packages like the others
        models = [*self.layer_shards, *self.heads]
        self.shows_inner_layers = all(m.shows_inner_layers for m in models)

    @property
    def arithmetic(self) -> str:
        """Whose tolerances apply to the results: `coreml` for every device, a plug-in's,
        or the precision."""
        if self.is_device:
            return "coreml"
        plugin = self.options.plugin
        return plugin.arithmetic if plugin else self.precision

    @cached_property
    def identity(self) -> str:
        """The identity that snapshots of this decoder carry; see `snapshot_identity`."""
        # Unlike `arithmetic` it tells devices apart: a snapshot has the values that one of
        # them rounded, however near those of the others are.
        rounded_by = self.runtime if self.is_device else self.precision
        return snapshot_identity(self.manifest, rounded_by)

    @property
    def layers_give_logits(self) -> bool:
        """Whether the packages of the layers contain the head, as those of another
        exporter do. What has the name of hidden states [B, C, T] is then logits [B, V, T]
        already."""
        return not self.heads

    @property
    def plain(self) -> Self:
        """The same shards with nothing fused: itself, unless it is `fast`."""
        return self._unfused if self.settings.fast else self

    @cached_property
    def _unfused(self) -> Self:
        return type(self)(self.bundle, **asdict(replace(self.settings, fast=False)))

    def inputs(
        self, offsets: np.ndarray, chunk: Sequence[Sequence[int]], T: int
    ) -> dict[str, np.ndarray]:
        """The inputs of the first shard in a call of T columns: those that the host
        computes, and the embeddings of the tokens as `x`."""
        ids = np.array([[*tokens, *[0] * (T - len(tokens))] for tokens in chunk])
        counts = np.array([len(tokens) for tokens in chunk])
        x = self.to_layout(self.bundle.embed(ids).transpose(0, 2, 1))
        values = self.host.inputs(offsets, counts, T) | {X: x, IDS: ids}
        if self.manifest.dims.P:
            rows = self.bundle.embed_per_layer(ids)
            values[X0] = x
            values[PER_LAYER] = self.to_layout(rows.transpose(0, 2, 1))
        return values

    def select_inputs(
        self, shard: Shard, values: dict[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """The inputs of a shard among `values`; of `per_layer` only the channels of its
        own layers."""
        inputs = {name: values[name] for name in shard.inputs}
        if PER_LAYER in inputs:
            start, stop = (layer * self.manifest.dims.P for layer in shard.layers)
            inputs[PER_LAYER] = np.ascontiguousarray(values[PER_LAYER][:, start:stop])
        return inputs

    def run_calls(
        self, model: Model, calls: Sequence[ShardCall], on_call: OnCall | None = None
    ) -> list[dict[str, np.ndarray]]:
        """Runs a layer shard, routed experts included, for one call after another.

        The portable runtime reads each weight once for all calls, except where a state
        is a matrix: a matrix accumulates the rounding of all tokens, so that every call
        must add up in the order of decoding.

        Args:
            on_call: called before every call of a package, those of experts and of the
                parts of another exporter's shard included. The calls then run one by
                one, so that it sees the states from which every call starts.

        Returns:
            The `values` of each call for the next shard: `x` is this shard's hidden
            output, `router_state` its router state where the family has one; cache rows
            that later layers copy have their names; all others are passed on.
        """
        shard = model.shard
        outputs_of_calls = self._predict(model, calls, on_call)
        if shard.kind == "router":
            for call, outputs in zip(calls, outputs_of_calls, strict=True):
                outputs[HIDDEN] = self.experts.run(
                    shard.layers[0], outputs, call.counts, call.hook, on_call
                )
        return [
            call.values | _values_for_next_shard(outputs)
            for call, outputs in zip(calls, outputs_of_calls, strict=True)
        ]

    def _predict(
        self, model: Model, calls: Sequence[ShardCall], on_call: OnCall | None
    ) -> list[dict[str, np.ndarray]]:
        """The outputs of one shard for each call; see `run_calls`."""
        shard = model.shard
        inputs = [self.select_inputs(shard, call.values) for call in calls]
        states = [call.state for call in calls]
        hooks = [model_hook(call.hook, shard) for call in calls]
        # calls of several tokens at once would add up a matrix in another order
        has_matrices = any(name.endswith(MATRIX_STATE) for name in shard.states)
        if not (on_call or has_matrices):
            return model.predict_calls(inputs, states, hooks)
        outputs = []
        for arguments in zip(inputs, states, hooks, strict=True):
            if on_call:
                outputs.append(model.predict_observed(*arguments, on_call))
            else:
                outputs.append(model.predict(*arguments))
        return outputs

    def logits(
        self,
        hidden: np.ndarray,
        times: Times | None = None,
        hook: ShardHook | None = None,
    ) -> np.ndarray:
        """Hidden states [B, C, T] → logits [B, T, V], t_max columns a call; adds the
        head's times to `times`. Where `layers_give_logits`, `hidden` has them already."""
        start = clock()
        if self.layers_give_logits:
            by_token = hidden.transpose(0, 2, 1)
            native_ms = [None]  # Core ML has no time of a head by itself
        else:
            slices, native_ms = zip(*self.run_heads([hidden], hook))
            joined = np.concatenate([logits for (logits,) in slices], axis=1)
            by_token = joined.transpose(0, 2, 1)
        if times:
            times.end_part(start, [*native_ms])
        return np.ascontiguousarray(by_token)

    def logit_slices(self, hidden: Sequence[np.ndarray]) -> Iterator[list[np.ndarray]]:
        """The logits [B, T, rows] of each of `hidden` [B, C, T], one slice of the
        vocabulary after another, so that no array has all of it; see `logits`."""
        if self.layers_give_logits:
            yield [values.transpose(0, 2, 1) for values in hidden]
            return
        for logits, _ in self.run_heads(hidden):
            yield [values.transpose(0, 2, 1) for values in logits]

    def run_heads(
        self, hidden: Sequence[np.ndarray], hook: ShardHook | None = None
    ) -> Iterator[tuple[list[np.ndarray], float | None]]:
        """For every slice of the vocabulary the logits [B, rows, T] of each of `hidden`
        [B, C, T], and Core ML's own time."""
        # the hidden states of each call, for each array of `hidden`
        chunks_of_arrays = [self._cut_into_calls(array) for array in hidden]
        inputs = [
            self._head_inputs(chunk) for chunks in chunks_of_arrays for chunk in chunks
        ]
        no_states = [None] * len(inputs)
        for model in self.heads:
            hooks = [model_hook(hook, model.shard)] * len(inputs)
            results = iter(model.predict_calls(inputs, no_states, hooks))
            logits = []
            for chunks in chunks_of_arrays:
                columns = [
                    _logits_of_call(next(results)[LOGITS], chunk.shape[2])
                    for chunk in chunks
                ]
                logits.append(np.concatenate(columns, axis=2))
            yield logits, model.last_native_ms

    def _cut_into_calls(self, hidden: np.ndarray) -> list[np.ndarray]:
        """Hidden states [B, C, T] cut into chunks of at most t_max columns."""
        t_max = self.options.t_max
        return np.split(hidden, range(t_max, hidden.shape[2], t_max), axis=2)

    def _head_inputs(self, hidden: np.ndarray) -> dict[str, np.ndarray]:
        """The inputs of a head for hidden states [B, C, T]. A head of fixed sizes takes
        columns of zeros behind these."""
        T = hidden.shape[2]
        dummies = self.options.tiling.width(T) - T
        return {X: self.to_layout(np.pad(hidden, ((0, 0), (0, 0), (0, dummies))))}


def _logits_of_call(output: np.ndarray, T: int) -> np.ndarray:
    """Logits [B, rows, T] from a head's output [B, rows, columns, 1] or [B, rows, 1,
    columns], whose columns behind the first T are dummies."""
    return output.reshape(*output.shape[:2], -1)[:, :, :T]


def _values_for_next_shard(outputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What later shards read of a layer shard's outputs, by the names of their inputs."""
    values = {
        name: value
        for name, value in outputs.items()
        if name.startswith((K_ROWS, V_ROWS))
    }
    if HIDDEN in outputs:
        values[X] = outputs[HIDDEN]
    # packages that contain the head: see `LoadedShards.layers_give_logits`
    if LOGITS in outputs:
        values[X] = outputs[LOGITS]
    if ROUTER_STATE_OUT in outputs:
        values[ROUTER_STATE] = outputs[ROUTER_STATE_OUT]
    return values
