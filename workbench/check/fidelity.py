"""Every layer × position × T of a bundle against a golden, as rows of the log's
`fidelity` table.

Isolated: each layer is fed the golden's input, so its error is its own; one pass per T.
Chained: each layer is fed the one before, so errors add up as they do in use; one pass
whose calls take every T in turn. Inner layers of a multi-layer shard are fed and read
through the portable runtime's hook; Core ML exposes only their K/V rows, so their other
rows are absent.

The choice of an expert is discontinuous: rounding that changes the order of two scores
changes the layer's whole update. The portable runtime therefore records each choice and
goes on with the golden's; choices have a gate of their own."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import pandas as pd
import torch

from workbench.bundle import Options, Shard
from workbench.bundle.names import K_STATE, ROUTER_SCORES, ROUTER_STATE, V_STATE, X
from workbench.check import metrics
from workbench.check.golden import Golden
from workbench.check.states import callable_ts
from workbench.decode import Decoder
from workbench.errors import InputError
from workbench.runtime import Model, State

NEAR_TIE = 0.1  # of two scores, each a probability plus a bias


@dataclass
class ForwardPass:
    """The values of one pass over the golden's tokens: `hidden` [n, C] per layer (where
    it can be seen), cache rows `k`, `v` [n, W] per layer, `logits` [n, V]
    (chained); `experts` [n, 1] per layer, the program's own choice (where that can be
    seen). `T` [n]: tokens of the call that each position was in. `x` [n, C] per layer: what an
    update is counted from, the golden's input; isolated as the program read it, rounded
    to fp16. `cached` per layer: positions whose cache rows were there at the end, all
    but those that a ring buffer has overwritten. `router` [n, R]: the router state that
    the last layer of each shard hands on. `handed` [n, W]: what a shard hands on that
    shows no hidden state."""

    T: np.ndarray
    x: list[np.ndarray]
    hidden: dict[int, np.ndarray] = field(default_factory=dict)
    handed: dict[int, np.ndarray] = field(default_factory=dict)
    k: dict[int, np.ndarray] = field(default_factory=dict)
    v: dict[int, np.ndarray] = field(default_factory=dict)
    cached: dict[int, np.ndarray] = field(default_factory=dict)
    logits: np.ndarray | None = None
    experts: dict[int, np.ndarray] = field(default_factory=dict)
    router: dict[int, np.ndarray] = field(default_factory=dict)

    def rows(self) -> Iterator[tuple[str, int, np.ndarray, np.ndarray]]:
        """(tensor, layer, positions [m], values [m, W]) of every layer's `hidden` and
        `update`, and of the `k` and `v` that were there at the end."""
        for layer, hidden in self.hidden.items():
            at = np.arange(len(hidden))
            yield "hidden", layer, at, hidden
            yield "update", layer, at, hidden - self.x[layer]
        for tensor, caches in (("k", self.k), ("v", self.v)):
            for layer, cache in caches.items():
                at = self.cached[layer]
                yield tensor, layer, at, cache[at]


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
) -> ForwardPass:
    """Runs the golden's tokens through every layer in chunks of T (last chunk partial),
    from an empty cache.

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
    Before it run `starts` [B] tokens."""

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
        rounded = isolated and decoder.precision != "exact"
        self.inputs = []  # [n, C] of every layer, for each golden
        for golden in goldens:
            layers = [golden[f"x.{i}"] / self.scale for i in range(golden.layers)]
            if rounded:
                with np.errstate(over="ignore"):
                    layers = [x.astype(np.float16).astype(np.float32) for x in layers]
            self.inputs.append(layers)
        self.traces = [
            ForwardPass(np.zeros(len(layers[0]), int), [x * self.scale for x in layers])
            for layers in self.inputs
        ]

    def run(self, T: int | Sequence[int], ragged: bool = False) -> list[ForwardPass]:
        """All positions in calls of T tokens, several T in turn; `ragged`: every
        sequence begins with another one."""
        self.begin(T, ragged)
        for model in self.decoder.layers:
            run_shard(self.decoder, model, [self], [model.make_state()])
        return self.finish()

    def begin(
        self, T: int | Sequence[int], ragged: bool = False, columns: int = 0
    ) -> None:
        """Makes the host's inputs of all calls of `run`, of so many `columns` at
        least."""
        self.least = columns
        self.calls = list(self._calls(T, ragged))
        self.counts = [np.array([s.stop - s.start for s in c]) for c in self.calls]
        pairs = zip(self.calls, self.counts, strict=True)
        self.ios = [self._inputs(*call) for call in pairs]

    def finish(self) -> list[ForwardPass]:
        """The traces after the last shard, with logits where layers were chained."""
        if not self.isolated:
            L = len(self.inputs[0])
            last = [(t.handed or t.hidden)[L - 1].T / self.scale for t in self.traces]
            every = self.decoder.logits(np.stack(last))
            if self.decoder.gives_logits:
                for trace, logits in zip(self.traces, every, strict=True):
                    trace.logits = logits
        return self.traces

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
        name = "hidden" if self.decoder.manifest.shows_hidden else "handed"
        for spans, io in zip(self.calls, ios, strict=True):
            self.record(name, last, spans, io[X] * self.scale)
            if ROUTER_STATE in io:
                self.record("router", last, spans, io[ROUTER_STATE])
        layers = self.decoder.manifest.layers
        attending = [i for i in range(*shard.layers) if layers[i].attends]
        for seq, trace in enumerate(self.traces):
            _read_cache(attending, state, trace, seq, int(self.starts[seq]))

    def _inputs(self, spans: list[slice], counts: np.ndarray) -> dict[str, np.ndarray]:
        """The host's inputs of a call and the tokens' embeddings."""
        decoder, T = self.decoder, int(counts.max())
        width = decoder.options.width(max(T, self.least))
        for trace, span in zip(self.traces, spans, strict=True):
            trace.T[span] = T
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
        self.record("experts", layer, spans, own.numpy())
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
        layer's [n, W] in `name` of each trace."""
        flat = plane.reshape(*plane.shape[:2], -1)
        for trace, columns, span in zip(self.traces, flat, spans, strict=True):
            rows = columns[:, : span.stop - span.start].T
            targets = getattr(trace, name)
            if layer not in targets:
                targets[layer] = np.zeros((len(trace.T), rows.shape[1]), rows.dtype)
            targets[layer][span] = rows

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


def _read_cache(
    layers: Sequence[int], state: State, trace: ForwardPass, seq: int, start: int
) -> None:
    """Copies a sequence's cache rows from position `start` on of `layers`; those that a
    ring buffer has overwritten are zeros."""
    n = len(trace.T)
    for layer in layers:
        for leaf, rows in ((K_STATE, trace.k), (V_STATE, trace.v)):
            name = f"layers.{layer}.{leaf}"
            cache = np.asarray(state.read(name), np.float32)[seq]
            H_kv, S, D = cache.shape
            S = state.shard.states[name].ring or S
            trace.cached[layer] = cached = np.arange(max(0, n - S), n)
            rows[layer] = np.zeros((n, H_kv * D), np.float32)
            own = cache[:, (start + cached) % S].transpose(1, 0, 2)
            rows[layer][cached] = own.reshape(len(cached), -1)


def compare_pass(trace: ForwardPass, golden: Golden, **columns) -> pd.DataFrame:
    """Rows of the `fidelity` table: one per layer, position and tensor. `columns` are
    constant ones (mode, runtime …); `T` is that of each position's call unless it is
    among them."""
    parts = []
    for tensor, layer, at, values in trace.rows():
        parts.append(_rows(layer, tensor, at, golden.rows(tensor, layer)[at], values))
    if trace.logits is not None:
        everywhere = np.arange(len(trace.T))
        parts.append(_rows(-1, "logits", everywhere, golden["logits"], trace.logits))
    rows = table(parts)
    return rows.assign(T=trace.T[rows["position"]]).assign(**columns)


def table(parts: Sequence[dict[str, object]]) -> pd.DataFrame:
    """One table of many parts, each a dict of the same columns: an array, or one value
    for all rows of the part, which has as many as its `position`."""
    columns = {}
    for name in parts[0]:
        pieces = []
        for part in parts:
            dtype = object if isinstance(part[name], str) else None
            value = np.asarray(part[name], dtype)
            pieces.append(np.broadcast_to(value, len(part["position"])))
        columns[name] = np.concatenate(pieces)
    return pd.DataFrame(columns)


def near_ties(decoder: Decoder, golden: Golden) -> np.ndarray:
    """Choices of experts [L, n] whose best two scores lie close: where a runtime does
    not show the choice, a layer's update may be another expert's there."""
    ties = np.zeros((golden.layers, len(golden.ids)), bool)
    for layer, tied in enumerate(ties):
        if f"margin.{layer}" in golden:
            tied[:] = golden[f"margin.{layer}"][:, 0] < NEAR_TIE
    return ties


def _rows(
    layer: int, tensor: str, position, reference, actual: np.ndarray
) -> dict[str, object]:
    """A part of `table`, one row per position."""
    return {
        "layer": layer,
        "position": position,
        "tensor": tensor,
        "cosine": metrics.cosine(reference, actual),
        "psnr_db": metrics.psnr_db(reference, actual),
        "max_abs": metrics.max_abs(reference, actual),
        "finite": np.isfinite(actual).all(-1),
    }


def measure_fidelity(
    decoder: Decoder,
    golden: Golden,
    Ts: Iterable[int] | None = None,
    progress: bool = False,
):
    """Runs every T isolated and all of them chained, and compares.

    Returns:
        (fidelity rows, isolated traces by T, the chained trace).
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
    traces = dict(zip(Ts, isolated, strict=True))
    frames = [
        compare_pass(trace, golden, T=T, mode="isolated") for T, trace in traces.items()
    ]
    frames.append(compare_pass(chained, golden, mode="chained"))
    rows = pd.concat(frames, ignore_index=True)
    rows = rows.assign(runtime=decoder.runtime, precision=None)
    if decoder.shows_inner_layers:  # as in `runs`
        rows["precision"] = decoder.precision
    if "margin.0" in golden and not chained.experts:
        ties = near_ties(decoder, golden)[rows["layer"], rows["position"]]
        rows["routing_tie"] = ties & (rows["layer"] >= 0)
    names = {}
    for model in decoder.layers:
        names |= dict.fromkeys(range(*model.shard.layers), model.shard.name)
    return rows.assign(shard=rows["layer"].map(names).fillna("head")), traces, chained
