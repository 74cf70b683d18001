"""Traces of a bundle over a prompt, to be compared with a golden's.

Isolated: each layer is fed the golden's input, so that no error of an earlier layer
reaches it; there is one pass for each T. Chained: each layer is fed the output of the
layer before, so errors add up as they do in use; the calls of one pass take every T in
turn. Inner layers of a multi-layer shard are fed and read through the portable runtime's
hook. Core ML exposes only their K/V rows, so their other values are absent.

The choice of an expert is discontinuous: rounding that changes the order of two scores
changes the layer's whole update. The portable runtime therefore records each choice and
continues with the golden's.

Data: `plan_calls` cuts prompts into calls, a `PassPlan` says how one pass runs them through
the layers, and `run_passes` runs several passes shard by shard while a `_Recorder` for each
fills its `Trace`. `trace_bundle` does all of it for a golden."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch

from workbench.bundle import Options, Shard
from workbench.bundle.names import (
    K_STATE,
    PER_LAYER,
    ROUTER_SCORES,
    ROUTER_STATE,
    V_STATE,
    X0,
    X,
    split_layer,
)
from workbench.check.golden import Golden, check_fits
from workbench.check.hf import round_stream
from workbench.check.trace import LayerTrace, Trace, stack, unstack
from workbench.decode import Decoder
from workbench.decode.shards import ShardCall
from workbench.progress import bar
from workbench.runtime import Model, State

Inputs = dict[str, np.ndarray]  # of one call, by name
StateReader = Callable[[Model, State], Any]  # see `PassPlan.read_state`


def trace_bundle(
    decoder: Decoder,
    golden: Golden,
    *runs: tuple[int | Sequence[int], str],
    forced: bool = True,
) -> list[Trace]:
    """Runs the golden's tokens through every layer in chunks of T (the last chunk may
    be shorter), from an empty cache, once for each of `runs`.

    Args:
        runs: pairs of T, the tokens per call (those of a list take turns), and
            `isolated` or `chained`.
        forced: use the golden's choice of experts in place of the program's own
            (portable only).

    Raises:
        InputError: see `check_fits`.
    """
    check_fits(golden, decoder.bundle)
    decoder = decoder.plain
    B = decoder.options.batch
    reference = stack([with_rounded_inputs(decoder, golden.trace)] * B)
    ids = np.tile(golden.ids, (B, 1))
    plans = []
    for T, mode in runs:
        calls = plan_calls(decoder.options, ids.shape, T)
        isolated = mode == "isolated"
        plans.append(PassPlan(ids, calls, reference, isolated, forced))
    # every sequence of the batch has the same tokens
    return [result.traces[0] for result in run_passes(decoder, plans, "validate")]


def with_rounded_inputs(decoder: Decoder, trace: Trace) -> Trace:
    """A trace with the inputs of layers as a program reads them: rounded to fp16, unless
    the arithmetic is `exact`."""
    if decoder.precision == "exact":
        return trace
    rounded = round_stream(decoder.manifest.stream_scale)
    layers = []
    for layer in trace.layers:
        x = rounded(torch.from_numpy(layer.x)).numpy()
        layers.append(replace(layer, x=x))
    return replace(trace, layers=layers)


@dataclass(frozen=True)
class PlannedCall:
    """One call of `width` columns.

    Attributes:
        counts: [B], the tokens of each sequence, in its first columns.
        seq, column, position: of every token, its sequence, its column, and its
            position in the prompt.
    """

    counts: np.ndarray
    width: int
    seq: np.ndarray
    column: np.ndarray
    position: np.ndarray

    def rows(self, plane: np.ndarray) -> np.ndarray:
        """The columns of a plane [B, W, …] that hold tokens, as rows [tokens, W]."""
        flat = plane.reshape(*plane.shape[:2], -1)
        return flat[self.seq, :, self.column]

    def columns(self, rows: np.ndarray) -> np.ndarray:
        """From rows [B, n, W] of all positions, those of this call's tokens as columns
        [B, W, width]. Columns without a token are zeros."""
        columns = np.zeros((len(rows), rows.shape[2], self.width), np.float32)
        columns[self.seq, :, self.column] = rows[self.seq, self.position]
        return columns


def plan_calls(
    options: Options,
    shape: tuple[int, int],
    T: int | Sequence[int],
    *,
    ragged: bool = False,
    columns: int = 0,
) -> list[PlannedCall]:
    """The calls that run B prompts of n tokens; `shape` is (B, n).

    Args:
        T: tokens per call; those of a list take turns.
        ragged: whether every sequence begins with another T of the list.
        columns: the least that a call has.
    """
    sizes = [T] if isinstance(T, int) else list(T)
    B, n = shape
    ends = np.zeros(B, int)
    calls = []
    while ends.min() < n:
        turns = np.full(B, len(calls))
        if ragged:
            turns += np.arange(B)
        limits = np.minimum([sizes[turn % len(sizes)] for turn in turns], n - ends)
        counts = np.array(
            [options.tiling.call_size(limit) for limit in limits.tolist()]
        )
        width = options.tiling.width(max(columns, int(counts.max())))
        seq, column = np.nonzero(np.arange(width) < counts[:, None])
        calls.append(PlannedCall(counts, width, seq, column, ends[seq] + column))
        ends = ends + counts
    return calls


def call_inputs(
    decoder: Decoder,
    ids: np.ndarray,
    calls: Sequence[PlannedCall],
    starts: np.ndarray | None = None,
) -> list[Inputs]:
    """The inputs of the first shard in each call over prompts `ids` [B, n], which follow
    `starts` [B] tokens (default: none)."""
    ends = np.zeros(len(ids), int)
    if starts is None:
        starts = ends
    inputs = []
    for call in calls:
        chunk = [row[i : i + k] for row, i, k in zip(ids, ends, call.counts)]
        inputs.append(decoder.inputs(starts + ends, chunk, call.width))
        ends = ends + call.counts
    return inputs


def empty_state(model: Model) -> State:
    """The state of a shard before its first token."""
    return model.make_state()


@dataclass(frozen=True)
class PassPlan:
    """How one pass runs the prompts of a batch through the layers.

    Attributes:
        ids: [B, n] token ids.
        calls: see `plan_calls`.
        reference: a stacked trace. If `isolated`, its inputs and router states are fed
            to the layers.
        isolated: whether layers are fed; otherwise each reads the output of the layer
            before.
        forced: whether the reference's choice of experts replaces the program's own.
        starts: [B], the number of tokens before the first; None: zeros.
        make_state: gives the state of a shard before the first call.
        shards: names of the shards to run, for an isolated pass; None: all.
        token_scales: [B, n], what multiplies the embeddings of every token that shards
            read beside `x`; None: nothing does.
        read_state: is called with the model and the state of every shard that the pass
            runs, after the shard's last call; `PassResult` keeps what it returns.
    """

    ids: np.ndarray
    calls: list[PlannedCall]
    reference: Trace
    isolated: bool
    forced: bool = True
    starts: np.ndarray | None = None
    make_state: Callable[[Model], State] = empty_state
    shards: Collection[str] | None = None
    token_scales: np.ndarray | None = None
    read_state: StateReader | None = None

    def includes(self, shard: Shard) -> bool:
        """Whether the pass runs a shard."""
        return self.shards is None or shard.name in self.shards


@dataclass
class PassResult:
    """What one pass has recorded.

    Attributes:
        traces: one for each sequence. `x` is the reference's if isolated, and the output of
            the layer before if chained. `hidden` and `expert` (the program's own choice)
            are present where they are visible, `router` for the last layer of a shard,
            `logits` if they were computed. `k` and `v` of a ring are its last rows.
        state_readings: what the plan's `read_state` returned for each shard that the
            pass ran, in the order of the shards; empty without `read_state`.
    """

    traces: list[Trace]
    state_readings: list[Any]


def run_passes(
    decoder: Decoder, plans: Sequence[PassPlan], title: str, head: bool = True
) -> list[PassResult]:
    """Runs the calls of all passes, with a bar. Every pass runs a shard before any moves
    on to the next, so the portable runtime reads each weight once.

    Args:
        head: whether chained passes compute logits.
    """
    recorders = [_begin_recording(decoder, plan) for plan in plans]
    for model in bar(decoder.layer_shards, title, unit="shard"):
        running = [r for r in recorders if r.plan.includes(model.shard)]
        states = [recorder.plan.make_state(model) for recorder in running]
        calls = [
            recorder.plan_shard_calls(model.shard, state)
            for recorder, state in zip(running, states)
        ]
        outputs = _run_shard(decoder, model, calls)
        for recorder, pass_outputs, state in zip(running, outputs, states, strict=True):
            recorder.record_shard(model, pass_outputs, state)
    return [recorder.result(head) for recorder in recorders]


def _run_shard(
    decoder: Decoder, model: Model, calls: list[list[ShardCall]]
) -> list[list[Inputs]]:
    """The outputs of the calls of each pass. The shard runs the calls of all passes
    together."""
    flat = [call for pass_calls in calls for call in pass_calls]
    results = iter(decoder.run_calls(model, flat))
    return [list(islice(results, len(pass_calls))) for pass_calls in calls]


def _begin_recording(decoder: Decoder, plan: PassPlan) -> "_Recorder":
    """The recorder of a pass before the first shard."""
    trace = Trace.empty(len(decoder.manifest.layers))
    trace.T = np.zeros(plan.ids.shape, int)
    inputs = call_inputs(decoder, plan.ids, plan.calls, plan.starts)
    if plan.token_scales is not None:
        inputs = _scaled_embeddings(decoder, plan, inputs)
    recorder = _Recorder(decoder, plan, trace, inputs)
    for call in plan.calls:
        trace.T[call.seq, call.position] = call.counts.max()
    for layer, reference in zip(trace.layers, plan.reference.layers):
        layer.scalar = reference.scalar
    if plan.isolated:
        for layer, fed in zip(trace.layers, plan.reference.layers):
            layer.x = fed.x
    else:
        for call, first in zip(plan.calls, inputs):
            recorder.write_rows(trace.layers[0], "x", call, first[X] * recorder.scale)
    return recorder


def _with_tokens(
    plane: torch.Tensor, call: PlannedCall, values: torch.Tensor
) -> list[torch.Tensor]:
    """What a hook returns: a copy of a plane [B, W, ..] whose columns of tokens hold
    `values` [tokens, W]."""
    replaced = plane.clone().flatten(2)
    replaced[call.seq, :, call.column] = values.to(replaced.dtype)
    return [replaced.reshape(plane.shape)]


def _scaled_embeddings(
    decoder: Decoder, plan: PassPlan, inputs: list[Inputs]
) -> list[Inputs]:
    """The inputs of each call, with `x0` and `per_layer` multiplied by the
    `token_scales` of their tokens; a bundle without them keeps its inputs."""
    scaled = []
    for call, values in zip(plan.calls, inputs, strict=True):
        scales = decoder.to_layout(call.columns(plan.token_scales[..., None]))
        products = {
            name: values[name] * scales for name in (X0, PER_LAYER) if name in values
        }
        scaled.append(values | products)
    return scaled


@dataclass
class _Recorder:
    """Records the stacked trace of a pass while it runs.

    Attributes:
        next_inputs: what the next shard reads in each call, unless it is fed.
        state_readings: see `PassResult`.
    """

    decoder: Decoder
    plan: PassPlan
    trace: Trace
    next_inputs: list[Inputs]
    state_readings: list[Any] = field(default_factory=list)

    @property
    def scale(self) -> float:
        """The bundle holds hidden / scale."""
        return self.decoder.manifest.stream_scale

    def write_rows(
        self,
        trace: Trace | LayerTrace,
        tensor: str,
        call: PlannedCall,
        plane: np.ndarray,
    ) -> None:
        """Copies the columns with tokens of a call's plane [B, W, …] to the field `tensor` of
        a trace, [B, n, W]. The first call of the pass to do so makes the array."""
        rows = call.rows(plane)
        array = getattr(trace, tensor)
        if array is None:
            array = np.zeros((*self.plan.ids.shape, rows.shape[1]), rows.dtype)
            setattr(trace, tensor, array)
        array[call.seq, call.position] = rows

    def plan_shard_calls(self, shard: Shard, state: State) -> list[ShardCall]:
        """The calls of a shard, which all read and write `state`."""
        calls = zip(self.plan.calls, self.fed_inputs(shard), self.hooks(shard))
        return [
            ShardCall(inputs, call.counts, state, hook) for call, inputs, hook in calls
        ]

    def record_shard(self, model: Model, outputs: list[Inputs], state: State) -> None:
        """Records what the calls of a shard have left: its outputs, which the next shard
        reads, its caches, and what the plan reads of its state."""
        self.record_outputs(model.shard, outputs)
        self.record_caches(model.shard, state)
        if self.plan.read_state:
            self.state_readings.append(self.plan.read_state(model, state))
        self.next_inputs = outputs

    def fed_inputs(self, shard: Shard) -> list[Inputs]:
        """The inputs of a shard in each call. If isolated, those of its first layer are
        the reference's."""
        if not self.plan.isolated:
            return self.next_inputs
        first = shard.layers[0]
        reference = self.plan.reference.layers
        x = reference[first].x / self.scale
        router = reference[first - 1].router if first else None
        inputs = []
        for call, outputs in zip(self.plan.calls, self.next_inputs):
            fed = {X: self.plane(call, x)}
            if router is not None:
                fed[ROUTER_STATE] = self.plane(call, router)
            # rows that a shard of this pass has output are left as they are
            inputs.append(self.source_rows(shard, call) | outputs | fed)
        return inputs

    def source_rows(self, shard: Shard, call: PlannedCall) -> Inputs:
        """The reference's cache rows [B, H_kv, width, D] that a shard copies from layers
        of earlier shards, for a pass that does not run these. Where it does, the rows are
        those that these shards output, as they are inside a shard of all layers, and as
        Hugging Face's model has them when its layers are fed."""
        manifest, fed = self.decoder.manifest, {}
        for layer in manifest.layers[slice(*shard.layers)]:
            if layer.source is None or layer.shared_rows[0] not in shard.inputs:
                continue
            source = self.plan.reference.layers[layer.source]
            for name, rows in zip(layer.shared_rows, (source.k, source.v)):
                columns = call.columns(rows)
                shape = len(columns), *layer.heads(manifest.dims), call.width
                heads = columns.reshape(shape).swapaxes(2, 3)
                fed[name] = np.ascontiguousarray(heads)
        return fed

    def plane(self, call: PlannedCall, rows: np.ndarray) -> np.ndarray:
        """The rows of a call's tokens in the bundle's layout."""
        return self.decoder.to_layout(call.columns(rows))

    def hooks(self, shard: Shard) -> list[Callable | None]:
        """The hook of every call of a shard; None if no value inside it is read or
        replaced."""
        last = shard.layer_range[-1]
        inner = {name: layer for layer, name in shard.taps.items() if layer < last}
        routed = self.plan.reference.layers[0].expert is not None
        needs_hook = (inner or routed) and self.decoder.shows_inner_layers
        if not needs_hook:
            return [None] * len(self.plan.calls)
        return [
            partial(self.read_operation, shard, inner, call) for call in self.plan.calls
        ]

    def read_operation(
        self,
        shard: Shard,
        inner: dict[str, int],
        call: PlannedCall,
        running_shard: Shard,
        op,
        outputs,
    ) -> list[torch.Tensor] | None:
        """Hook: records the hidden outputs of the `inner` layers and the choices of
        experts. If isolated, it replaces a hidden output by the reference's input of the
        next layer; if forced, a choice by the reference's. None: the operation's outputs
        stay as they are.

        Args:
            inner: value name → the layer whose hidden output it is.
            running_shard: the shard that the operation belongs to.
        """
        if running_shard is not shard:  # an expert of this layer
            return None
        name = op.outputs[0][0] if op.outputs else ""
        if name in inner:
            return self.replace_hidden(inner[name], call, outputs[0])
        # the program's only argmax picks the expert
        if name == ROUTER_SCORES or op.kind == "reduce_argmax":
            layer, _ = split_layer(shard.modules[name])
            if name == ROUTER_SCORES:
                return self.force_expert_scores(layer, call, outputs[0])
            return self.force_expert_index(layer, call, outputs[0])
        return None

    def replace_hidden(
        self, layer: int, call: PlannedCall, output: torch.Tensor
    ) -> list[torch.Tensor] | None:
        """Records the hidden output of a layer inside a shard. If isolated, returns the
        reference's input of the next layer."""
        hidden = output.numpy() * self.scale
        self.write_rows(self.trace.layers[layer], "hidden", call, hidden)
        if not self.plan.isolated:
            return None
        x = self.plan.reference.layers[layer + 1].x / self.scale
        return [torch.from_numpy(self.plane(call, x))]

    def force_expert_index(
        self, layer: int, call: PlannedCall, index: torch.Tensor
    ) -> list[torch.Tensor] | None:
        """Dense experts: records the index [B, 1, ..] that the program picked. If forced,
        returns the reference's."""
        self.write_rows(self.trace.layers[layer], "expert", call, index.numpy())
        if not self.plan.forced:
            return None
        return _with_tokens(index, call, self._expected_experts(layer, call))

    def force_expert_scores(
        self, layer: int, call: PlannedCall, scores: torch.Tensor
    ) -> list[torch.Tensor] | None:
        """Routed experts: records the one that the host will pick from the router's scores
        [B, E, ..]. If forced, returns scores with which it picks the reference's."""
        picked = scores.argmax(1, keepdim=True)
        self.write_rows(self.trace.layers[layer], "expert", call, picked.numpy())
        if not self.plan.forced:
            return None
        experts = torch.arange(scores.shape[1])
        is_expected = self._expected_experts(layer, call) == experts
        return _with_tokens(scores, call, is_expected)

    def _expected_experts(self, layer: int, call: PlannedCall) -> torch.Tensor:
        """[tokens, 1]: the reference's experts of a call's tokens."""
        expert = self.plan.reference.layers[layer].expert
        return torch.from_numpy(expert[call.seq, call.position]).long()

    def record_outputs(self, shard: Shard, outputs: Sequence[Inputs]) -> None:
        """Records the outputs of each call of a shard."""
        last = self.trace.layers[shard.layer_range[-1]]
        is_last_shard = shard.layers[1] == len(self.trace.layers)
        for call, values in zip(self.plan.calls, outputs, strict=True):
            stream = values[X] * self.scale
            if self.decoder.manifest.shows_hidden:
                self.write_rows(last, "hidden", call, stream)
            if is_last_shard:
                self.write_rows(self.trace, "output", call, stream)
            if ROUTER_STATE in values:
                self.write_rows(last, "router", call, values[ROUTER_STATE])

    def record_caches(self, shard: Shard, state: State) -> None:
        """Records the cache rows that the pass wrote; a ring buffer has only the last."""
        B, n = self.plan.ids.shape
        starts = self.plan.starts
        if starts is None:
            starts = np.zeros(B, int)
        for layer in shard.layer_range:
            for leaf, tensor in ((K_STATE, "k"), (V_STATE, "v")):
                name = f"layers.{layer}.{leaf}"
                # it does not attend, or packages of another exporter have no copy of
                # the cache that it reads
                if name not in state.shard.states:
                    continue
                cache = np.asarray(state.read(name), np.float32).swapaxes(1, 2)
                S = state.shard.states[name].ring or cache.shape[1]
                positions = starts[:, None] + np.arange(max(0, n - S), n)
                rows = cache[np.arange(B)[:, None], positions % S]
                rows = rows.reshape(*positions.shape, -1)
                setattr(self.trace.layers[layer], tensor, rows)

    def result(self, head: bool) -> PassResult:
        """What the pass has recorded, after the last shard; with the logits of a chained
        pass if `head`."""
        layers = self.trace.layers
        if not self.plan.isolated:
            for before, layer in zip(layers, layers[1:]):
                layer.x = before.hidden
            if head and self.decoder.manifest.gives_logits:
                hidden = self.trace.output.swapaxes(1, 2) / self.scale
                self.trace.logits = self.decoder.logits(hidden)
        traces = unstack(self.trace, len(self.plan.ids))
        return PassResult(traces, self.state_readings)
