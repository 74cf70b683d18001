"""What a bundle computes for a golden's tokens, by the names of the golden's values.

Isolated: each layer is fed the golden's input, so its error is its own; one pass per T.
Chained: each layer is fed the one before, so errors add up as they do in use; one pass
whose calls take every T in turn. Inner layers of a multi-layer shard are fed and read
through the portable runtime's hook; Core ML exposes only their K/V rows, so their other
values are absent.

The choice of an expert is discontinuous: rounding that changes the order of two scores
changes the layer's whole update. The portable runtime therefore records each choice and
goes on with the golden's."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
import pandas as pd
import torch

from workbench.bundle import Options, Shard
from workbench.bundle.names import K_STATE, ROUTER_SCORES, ROUTER_STATE, V_STATE, X
from workbench.check.compare import compare
from workbench.check.golden import Golden
from workbench.check.hf import Values, updates
from workbench.check.states import callable_ts
from workbench.decode import Decoder
from workbench.errors import InputError
from workbench.runtime import Model, State


def default_ts(options: Options) -> list[int]:
    """T values worth comparing with a golden: `callable_ts`, or the one T of shards
    that have a single fixed shape."""
    if len(options.shapes) == 1:
        return [options.t_max]
    return callable_ts(options)


def run_golden(
    decoder: Decoder,
    golden: Golden,
    T: int | Sequence[int],
    mode: str = "isolated",
    *,
    forced: bool = True,
) -> Values:
    """Runs the golden's tokens through every layer in chunks of T (last chunk partial),
    from an empty cache; see `Pass` for the values.

    Args:
        T: tokens a call; several are taken in turn.
        mode: `isolated` or `chained`.
        forced: use the golden's choice of experts in place of the program's own
            (portable only).
    """
    n, C = golden["x.0"].shape
    dims, L, V = decoder.manifest.dims, golden.layers, decoder.manifest.dims.V
    if "logits" in golden:
        V = golden["logits"].shape[1]
    if n > decoder.options.max_seq_len:
        raise InputError(
            "golden",
            f"{n} tokens",
            f"at most max_seq_len = {decoder.options.max_seq_len}",
            "validate with a shorter prompt, or export with a larger --max-seq-len",
        )
    if (L, C, V) != (dims.L, dims.C, dims.V):
        raise InputError(
            "golden",
            f"{L} layers of width {C}, vocabulary {V}",
            f"the bundle's {dims.L} layers of width {dims.C}, vocabulary {dims.V}",
            f"make the golden of {decoder.manifest.checkpoint['name']}",
        )
    goldens = [golden] * decoder.options.batch
    return Pass(decoder.plain, goldens, mode == "isolated", forced).run(T)[0]


class Pass:
    """One pass over the goldens' tokens, one golden of n positions per sequence: which
    of their values replace the program's own, and the record of what was computed.
    Before it run `starts` [B] tokens.

    `values` of each sequence: `T` [n], the tokens of the call that each position was
    in; by layer `x`, the golden's input, isolated as the program read it; where they can
    be seen `hidden`, the `update` that it adds to `x`, and the program's own choice of
    an `expert`; `k` and `v`, the last rows where a ring has lost the first; the `router`
    state that the last layer of a shard hands on. `handed`: what a shard hands on that
    shows no hidden state; chained, the `logits`."""

    def __init__(
        self,
        decoder: Decoder,
        goldens: Sequence[Golden],
        isolated: bool,
        forced: bool,
        starts: Sequence[int] | None = None,
    ):
        self.decoder = decoder
        self.goldens = goldens
        self.isolated = isolated
        self.forced = forced
        self.starts = np.array(starts or [0] * len(goldens))
        self.scale = decoder.manifest.stream_scale  # the bundle holds hidden / scale
        self.handed = "hidden" if decoder.manifest.shows_hidden else "handed"
        rounded = isolated and decoder.precision != "exact"
        self.inputs = []  # [n, C] of every layer, for each golden
        for golden in goldens:
            layers = [golden[f"x.{i}"] / self.scale for i in range(golden.layers)]
            if rounded:
                with np.errstate(over="ignore"):
                    layers = [x.astype(np.float16).astype(np.float32) for x in layers]
            self.inputs.append(layers)
        self.values: list[Values] = []
        for layers in self.inputs:
            own = {f"x.{i}": x * self.scale for i, x in enumerate(layers)}
            self.values.append(own | {"T": np.zeros(len(layers[0]), int)})

    def run(self, T: int | Sequence[int]) -> list[Values]:
        """All positions in calls of T tokens, several T in turn."""
        self.begin(T)
        for model in self.decoder.layers:
            run_shard(self.decoder, model, [self], [model.make_state()])
        return self.finish()

    def begin(
        self, T: int | Sequence[int], ragged: bool = False, columns: int = 0
    ) -> None:
        """Makes the host's inputs of all calls: of T tokens, several T in turn, in so
        many `columns` at least; `ragged`: every sequence begins with another T."""
        self.least = columns
        self.calls = list(self._calls(T, ragged))
        self.counts = [np.array([s.stop - s.start for s in c]) for c in self.calls]
        pairs = zip(self.calls, self.counts, strict=True)
        self.ios = [self._inputs(*call) for call in pairs]

    def finish(self) -> list[Values]:
        """The values after the last shard."""
        if not self.isolated:
            name = f"{self.handed}.{len(self.inputs[0]) - 1}"
            last = [values[name].T / self.scale for values in self.values]
            every = self.decoder.logits(np.stack(last))
            if self.decoder.gives_logits:
                for values, logits in zip(self.values, every, strict=True):
                    values["logits"] = logits
        self.values = [values | updates(values) for values in self.values]
        return self.values

    def _calls(self, T: int | Sequence[int], ragged: bool) -> Iterator[list[slice]]:
        """The positions of each call, a span for every sequence."""
        n = len(self.inputs[0][0])
        sizes = [T] if isinstance(T, int) else list(T)
        stops = [0] * len(self.goldens)
        turn = 0
        while min(stops) < n:
            spans = []
            for seq, start in enumerate(stops):
                size = min(sizes[(turn + seq * ragged) % len(sizes)], n - start)
                stops[seq] = start + self.decoder.options.taken(size)
                spans.append(slice(start, stops[seq]))
            yield spans
            turn += 1

    def hooks(self, shard: Shard) -> list:
        """The hook of every call of a shard, which isolated reads the goldens' input
        of its first layer."""
        calls = list(zip(self.calls, self.ios, strict=True))
        if self.isolated:
            for spans, io in calls:
                self._feed(shard.layers[0], spans, io)
        return [self.hook(shard, spans, io) for spans, io in calls]

    def after(self, shard: Shard, ios: list[dict[str, np.ndarray]], state: State):
        """Records what a shard's calls computed, `ios`, and left in `state`."""
        self.ios = ios
        last = shard.layers[1] - 1
        for spans, io in zip(self.calls, ios, strict=True):
            self.record(self.handed, last, spans, io[X] * self.scale)
            if ROUTER_STATE in io:
                self.record("router", last, spans, io[ROUTER_STATE])
        layers = self.decoder.manifest.layers
        attending = [i for i in range(*shard.layers) if layers[i].attends]
        for seq, (values, start) in enumerate(zip(self.values, self.starts)):
            values |= _cached_rows(attending, state, len(values["T"]), seq, int(start))

    def _inputs(self, spans: list[slice], counts: np.ndarray) -> dict[str, np.ndarray]:
        """The host's inputs of a call and the tokens' embeddings."""
        decoder, T = self.decoder, int(counts.max())
        width = decoder.options.width(max(T, self.least))
        for values, span in zip(self.values, spans, strict=True):
            values["T"][span] = T
        offsets = self.starts + [span.start for span in spans]
        pairs = zip(self.goldens, spans, strict=True)
        chunk = [golden.ids[span].tolist() for golden, span in pairs]
        return decoder.inputs(offsets, chunk, width)

    def _feed(self, layer: int, spans: list[slice], io: dict[str, np.ndarray]) -> None:
        """Puts the goldens' input of a layer into the inputs of a call."""
        longest = max(span.stop - span.start for span in spans)
        width = self.decoder.options.width(longest)
        io[X] = self.columns([x[layer] for x in self.inputs], spans, width)
        if (name := f"router.{layer - 1}") in self.goldens[0]:
            routers = [golden[name] for golden in self.goldens]
            io[ROUTER_STATE] = self.columns(routers, spans, width)

    def hook(self, shard, spans: list[slice], io: dict[str, np.ndarray]):
        """Records the hidden output of a shard's inner layers and its choices of
        experts, and replaces them by the goldens'. `io`: the call's masks and
        tables."""
        last = shard.layers[1] - 1
        inner = {name: layer for layer, name in shard.taps.items() if layer < last}
        if shard.kind not in ("layers", "router") or (
            not inner and "expert.0" not in self.goldens[0]
        ):
            return None

        def record_and_replace(own, op, outputs):
            if own is not shard:  # an expert of this layer
                return None
            name = op.outputs[0][0] if op.outputs else ""
            if name in inner:
                return self.inner_hidden(inner[name], spans, outputs[0])
            if op.kind == "reduce_argmax" or name == ROUTER_SCORES:
                layer = int(shard.modules[name].split(".")[1])
                return self.expert_choice(layer, spans, outputs[0])
            return None

        return record_and_replace

    def inner_hidden(
        self, layer: int, spans: list[slice], hidden: torch.Tensor
    ) -> list[torch.Tensor] | None:
        """Records an inner layer's output; isolated, the next layer reads the golden's
        input instead, as its shard holds it."""
        self.record("hidden", layer, spans, hidden.numpy() * self.scale)
        if not self.isolated:
            return None
        width = hidden.shape[2:].numel()
        inputs = [layers[layer + 1] for layers in self.inputs]
        return [torch.from_numpy(self.columns(inputs, spans, width))]

    def expert_choice(
        self, layer: int, spans: list[slice], scores: torch.Tensor
    ) -> list[torch.Tensor] | None:
        """Records the expert that an argmax picked, or that the host will pick from
        scores; forced, both become the golden's."""
        own = scores
        count = scores.shape[1]
        if count > 1:
            own = scores.argmax(1, keepdim=True)
        self.record("expert", layer, spans, own.numpy())
        if not self.forced:
            return None
        replaced = scores.clone().flatten(2)
        for columns, golden, span in zip(replaced, self.goldens, spans, strict=True):
            experts = torch.from_numpy(golden[f"expert.{layer}"][span, 0]).long()
            forced = experts[None]
            if count > 1:
                forced = torch.nn.functional.one_hot(experts, count).T
            columns[:, : len(experts)] = forced.to(scores.dtype)
        return [replaced.reshape(scores.shape)]

    def record(
        self, name: str, layer: int, spans: list[slice], plane: np.ndarray
    ) -> None:
        """Copies the valid columns of a plane [B, W, T, 1] to rows `spans` of the
        layer's [n, W] of each sequence."""
        flat = plane.reshape(*plane.shape[:2], -1)
        for values, columns, span in zip(self.values, flat, spans, strict=True):
            rows = columns[:, : span.stop - span.start].T
            empty = np.zeros((len(values["T"]), rows.shape[1]), rows.dtype)
            values.setdefault(f"{name}.{layer}", empty)[span] = rows

    def columns(
        self, arrays: Sequence[np.ndarray], spans: list[slice], width: int
    ) -> np.ndarray:
        """Positions `spans` of each sequence's [n, C] → the bundle's plane [B, C,
        width, 1], zero beyond each span."""
        planes = np.zeros((len(spans), arrays[0].shape[1], width), np.float32)
        for plane, array, span in zip(planes, arrays, spans, strict=True):
            plane[:, : span.stop - span.start] = array[span].T
        return self.decoder.plane(planes)


def run_shard(
    decoder: Decoder, model: Model, passes: Sequence[Pass], states: Sequence[State]
) -> None:
    """A layer shard for the calls of all passes, each on a state of its own; calls
    are padded with dummy columns where a sequence has fewer tokens."""
    ios, counts, hooks, own_states = [], [], [], []
    for one, state in zip(passes, states, strict=True):
        hooks += one.hooks(model.shard)
        ios += one.ios
        counts += one.counts
        own_states += [state] * len(one.ios)
    if not decoder.shows_inner_layers:
        hooks = [None] * len(hooks)
    results = iter(decoder.run_calls(model, ios, counts, own_states, hooks))
    for one, state in zip(passes, states, strict=True):
        one.after(model.shard, list(islice(results, len(one.ios))), state)


def _cached_rows(
    layers: Sequence[int], state: State, n: int, seq: int, start: int
) -> Values:
    """A sequence's cache rows [n, W] of `layers`, from position `start` on; of a ring
    buffer the last ones."""
    values = {}
    for layer in layers:
        for leaf, name in ((K_STATE, "k"), (V_STATE, "v")):
            place = f"layers.{layer}.{leaf}"
            cache = np.asarray(state.read(place), np.float32)[seq]
            S = state.shard.states[place].ring or cache.shape[1]
            rows = (start + np.arange(max(0, n - S), n)) % S
            own = cache[:, rows].transpose(1, 0, 2)
            values[f"{name}.{layer}"] = own.reshape(len(rows), -1)
    return values


def measure_fidelity(
    decoder: Decoder,
    golden: Golden,
    Ts: Iterable[int] | None = None,
    budget: Values | None = None,
    progress: bool = False,
) -> tuple[pd.DataFrame, dict[int, Values], Values]:
    """Runs every T isolated and all of them chained, and compares with the golden and,
    isolated, with the `budget` of `price.measure_budget`.

    Returns:
        (rows of `compare` with mode, runtime, precision and shard; isolated values by
        T; the chained values).
    """
    from tqdm.auto import tqdm

    t_max = decoder.options.t_max
    Ts = list(Ts or default_ts(decoder.options))
    if over := [t for t in Ts if not 1 <= t <= t_max]:
        raise InputError(
            "T", f"{over}", f"1 to t_max = {t_max}", "export with more --tokens"
        )
    calls = [(T, "isolated") for T in Ts] + [(Ts, "chained")]
    bar = tqdm(calls, desc="validate", unit="pass", disable=not progress)
    *isolated, chained = [run_golden(decoder, golden, *call) for call in bar]
    frames = []
    for T, values in zip(Ts, isolated, strict=True):
        rows = compare(golden.values, values, budget)
        frames.append(rows.assign(T=T, mode="isolated"))
    frames.append(compare(golden.values, chained).assign(mode="chained"))
    rows = pd.concat(frames, ignore_index=True)
    rows = rows.assign(runtime=decoder.runtime, precision=None)
    if decoder.shows_inner_layers:  # as in `runs`
        rows["precision"] = decoder.precision
    names = {}
    for model in decoder.layers:
        names |= dict.fromkeys(range(*model.shard.layers), model.shard.name)
    rows["shard"] = rows["layer"].map(names).fillna("head")
    return rows, dict(zip(Ts, isolated, strict=True)), chained
