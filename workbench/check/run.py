"""What a bundle computes for a golden's tokens, by the names of the golden's values.

Isolated: each layer is fed the golden's input, so its error is its own; one pass per T.
Chained: each layer is fed the one before, so errors add up as they do in use; one pass
whose calls take every T in turn. Inner layers of a multi-layer shard are fed and read
through the portable runtime's hook; Core ML exposes only their K/V rows, so their other
values are absent.

The choice of an expert is discontinuous: rounding that changes the order of two scores
changes the layer's whole update. The portable runtime therefore records each choice and
goes on with the golden's."""

from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from workbench.bundle import Shard
from workbench.bundle.names import K_STATE, ROUTER_SCORES, ROUTER_STATE, V_STATE, X
from workbench.check.golden import Golden, check_fits
from workbench.check.hf import Values, half, updates
from workbench.decode import Decoder
from workbench.progress import bar
from workbench.runtime import Model, State


def run_golden(
    decoder: Decoder,
    golden: Golden,
    *runs: tuple[int | Sequence[int], str],
    forced: bool = True,
) -> list[Values]:
    """Runs the golden's tokens through every layer in chunks of T (last chunk partial),
    from an empty cache, once for each of `runs`; see `Pass` for the values.

    Args:
        runs: T, tokens a call, of which several are taken in turn, and `isolated` or
            `chained`.
        forced: use the golden's choice of experts in place of the program's own
            (portable only).

    Raises:
        InputError: see `check_fits`.
    """
    check_fits(golden, decoder.bundle)
    decoder, goldens = decoder.plain, [golden] * decoder.options.batch
    passes = [
        Pass(decoder, goldens, T, mode == "isolated", forced=forced) for T, mode in runs
    ]
    run_passes(decoder, passes, "validate")
    return [one.finish()[0] for one in passes]


def run_passes(decoder: Decoder, passes: Sequence["Pass"], title: str) -> None:
    """Runs the calls of all passes, with a bar. All pass a shard before the next one
    begins, so that the portable runtime reads each weight once for all."""
    for model in bar(decoder.layers, title, unit="shard"):
        ios, counts, hooks, states = [], [], [], []
        for one in passes:
            one.state = one.state_before(model)
            hooks += one.hooks(model.shard)
            ios += one.ios
            counts += [call.counts for call in one.calls]
            states += [one.state] * len(one.ios)
        results = iter(decoder.run_calls(model, ios, counts, states, hooks))
        for one in passes:
            one.after(model.shard, list(islice(results, len(one.ios))), one.state)


class Call(NamedTuple):
    """One call: `counts` [B] tokens in `width` columns; of every token its sequence,
    column, and position in the golden."""

    counts: np.ndarray
    width: int
    seq: np.ndarray
    column: np.ndarray
    position: np.ndarray


class Pass:
    """One pass over the tokens of `goldens`, one of n positions per sequence: which of
    their values replace the program's own, and the record of what was computed.

    `values` by name [B, n, W]: `T` [B, n], the most tokens of a sequence in the call of
    each position; by layer `x`, its input: isolated the golden's, as the program read
    it, chained what the layer before handed on; where they can be seen `hidden`, the
    `update` that it adds to `x`, and the program's own choice of an `expert`; `k` and
    `v`, the last rows where a ring has lost the first; the `router` state that the last
    layer of a shard hands on. `handed`: what a shard hands on that shows no hidden
    state; chained, the `logits`.

    Args:
        T: tokens a call; several are taken in turn.
        starts: [B] tokens that run before.
        ragged: whether every sequence begins with another T.
        columns: those of a call at least.
    """

    def __init__(
        self,
        decoder: Decoder,
        goldens: Sequence[Golden],
        T: int | Sequence[int],
        isolated: bool,
        *,
        forced: bool = True,
        starts: Sequence[int] | None = None,
        ragged: bool = False,
        columns: int = 0,
    ):
        self.decoder, self.isolated, self.forced = decoder, isolated, forced
        self.starts = np.array(starts or [0] * len(goldens))
        self.scale = decoder.manifest.stream_scale  # the bundle holds hidden / scale
        self.handed = "hidden" if decoder.manifest.shows_hidden else "handed"
        self.golden = {
            name: np.stack([golden[name] for golden in goldens])
            for name in goldens[0].values
            if name.startswith(("x.", "router.", "expert."))
        }
        if isolated and decoder.precision != "exact":
            for name in filter(lambda name: name[:2] == "x.", self.golden):
                x = torch.from_numpy(self.golden[name])
                self.golden[name] = half(self.scale)(x).numpy()
        inputs = [name for name in self.golden if isolated and name[:2] == "x."]
        self.values = {name: self.golden[name] for name in inputs}
        ids = np.stack([golden.ids for golden in goldens])
        self.values["T"] = np.zeros(ids.shape, int)
        self.calls, self.ios = [], []
        sizes = [T] if isinstance(T, int) else list(T)
        n, options = ids.shape[1], decoder.options
        stops = np.zeros(len(ids), int)
        while stops.min() < n:
            turns = len(self.calls) + ragged * np.arange(len(ids))
            most = np.minimum([sizes[turn % len(sizes)] for turn in turns], n - stops)
            counts = np.array(
                [options.tiling.call_size(size) for size in most.tolist()]
            )
            width = options.tiling.width(max(columns, int(counts.max())))
            seq, column = np.nonzero(np.arange(width) < counts[:, None])
            call = Call(counts, width, seq, column, stops[seq] + column)
            self.calls.append(call)
            self.values["T"][seq, call.position] = counts.max()
            chunk = [row[i : i + k] for row, i, k in zip(ids, stops, counts)]
            io = decoder.inputs(self.starts + stops, chunk, width)
            if not isolated:
                self.record("x.0", call, io[X] * self.scale)
            self.ios.append(io)
            stops += counts

    def state_before(self, model: Model) -> State:
        """The state of a shard before its first call."""
        return model.make_state()

    def hooks(self, shard: Shard) -> list:
        """The hook of every call of a shard, which isolated reads the goldens' input
        of its first layer."""
        router = f"router.{shard.layers[0] - 1}"
        for call, io in zip(self.calls, self.ios) if self.isolated else ():
            io[X] = self.plane(f"x.{shard.layers[0]}", call)
            if router in self.golden:
                io[ROUTER_STATE] = self.plane(router, call)
        last = shard.layers[1] - 1
        inner = {name: layer for layer, name in shard.taps.items() if layer < last}
        looks = inner or "expert.0" in self.golden
        if not looks or not self.decoder.shows_inner_layers:
            return [None] * len(self.calls)
        return [partial(self.replace, shard, inner, call) for call in self.calls]

    def replace(
        self, shard: Shard, inner: dict[str, int], call: Call, own, op, outputs
    ):
        """Hook: records the hidden output of a shard's `inner` layers and its choices of
        experts, and replaces them by what the next layer reads isolated, and by the
        goldens' choices."""
        name = op.outputs[0][0] if op.outputs else ""
        if own is not shard:  # an expert of this layer
            return None
        if name in inner:
            hidden = outputs[0].numpy() * self.scale
            self.record(f"hidden.{inner[name]}", call, hidden)
            if self.isolated:
                x = self.plane(f"x.{inner[name] + 1}", call)
                return [torch.from_numpy(x)]
        elif op.kind == "reduce_argmax" or name == ROUTER_SCORES:
            expert = f"expert.{shard.modules[name].split('.')[1]}"
            return self.expert_choice(expert, call, outputs[0])
        return None

    def expert_choice(
        self, name: str, call: Call, scores: torch.Tensor
    ) -> list[torch.Tensor] | None:
        """Records the expert that an argmax picked, or that the host will pick from
        scores; forced, both become the golden's."""
        own, count = scores, scores.shape[1]
        if count > 1:
            own = scores.argmax(1, keepdim=True)
        self.record(name, call, own.numpy())
        if not self.forced:
            return None
        experts = torch.from_numpy(self.golden[name][call.seq, call.position]).long()
        if count > 1:
            experts = experts == torch.arange(count)
        replaced = scores.clone().flatten(2)
        replaced[call.seq, :, call.column] = experts.to(replaced.dtype)
        return [replaced.reshape(scores.shape)]

    def after(self, shard: Shard, ios: list[dict[str, np.ndarray]], state: State):
        """Records what a shard's calls computed, `ios`, and left in `state`: of cache
        rows those of the pass, of a ring buffer the last ones."""
        self.ios = ios
        last = shard.layers[1] - 1
        for call, io in zip(self.calls, ios, strict=True):
            self.record(f"{self.handed}.{last}", call, io[X] * self.scale)
            if ROUTER_STATE in io:
                self.record(f"router.{last}", call, io[ROUTER_STATE])
        B, n = self.values["T"].shape
        for layer in range(*shard.layers):
            if not self.decoder.manifest.layers[layer].attends:
                continue
            for leaf, name in ((K_STATE, "k"), (V_STATE, "v")):
                place = f"layers.{layer}.{leaf}"
                cache = np.asarray(state.read(place), np.float32).swapaxes(1, 2)
                S = state.shard.states[place].ring or cache.shape[1]
                places = self.starts[:, None] + np.arange(max(0, n - S), n)
                rows = cache[np.arange(B)[:, None], places % S]
                self.values[f"{name}.{layer}"] = rows.reshape(*places.shape, -1)

    def finish(self) -> list[Values]:
        """The values of every sequence after the last shard."""
        for name in [] if self.isolated else list(self.values):
            tensor, _, layer = name.partition(".")
            if tensor == "hidden":
                self.values[f"x.{int(layer) + 1}"] = self.values[name]
        if not self.isolated and self.decoder.manifest.gives_logits:
            name = f"{self.handed}.{len(self.decoder.manifest.layers) - 1}"
            last = self.values[name].swapaxes(1, 2)
            self.values["logits"] = self.decoder.logits(last / self.scale)
        made = []
        for seq in range(len(self.starts)):
            values = {name: value[seq] for name, value in self.values.items()}
            made.append(values | updates(values))
        return made

    def record(self, name: str, call: Call, plane: np.ndarray) -> None:
        """Copies the valid columns of a plane [B, W, T, 1] to rows of [B, n, W]."""
        flat = plane.reshape(*plane.shape[:2], -1)
        if name not in self.values:
            shape = *self.values["T"].shape, flat.shape[1]
            self.values[name] = np.zeros(shape, flat.dtype)
        self.values[name][call.seq, call.position] = flat[call.seq, :, call.column]

    def plane(self, name: str, call: Call) -> np.ndarray:
        """The goldens' values of a call as the bundle's plane [B, W, width, 1], zero in
        dummy columns; of `x` what the program reads."""
        rows = self.golden[name][call.seq, call.position]
        plane = np.zeros((len(call.counts), rows.shape[1], call.width), np.float32)
        scale = self.scale if name.startswith("x.") else 1.0
        plane[call.seq, :, call.column] = rows / scale
        return self.decoder.plane(plane)
