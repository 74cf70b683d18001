"""Every layer × position × T of a bundle against a golden, as rows of the log's `fidelity` table.

Isolated: each layer is fed the golden's input, so its error is its own; one pass per T. Chained: each layer is fed the
one before, so errors add up as they do in use; one pass whose calls take every T in turn. Inner layers of a multi-layer
shard are fed and read through the portable runtime's hook; Core ML exposes only their K/V rows, so their other rows are absent.

Choosing an expert is discontinuous: rounding that changes the order of two scores changes the layer's whole update. The
portable runtime therefore records each choice and goes on with the golden's; choices have a gate of their own.
"""

import itertools
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import torch

from workbench.bundle import Options
from workbench.bundle.names import K_STATE, ROUTER_SCORES, ROUTER_STATE, V_STATE, X
from workbench.check import gates, metrics
from workbench.check.golden import Golden
from workbench.decode import Decoder
from workbench.errors import InputError


@dataclass
class ForwardPass:
    """What one pass over the golden's tokens computed: `hidden` [n, C] per layer (where it can be seen), cache rows
    `k`, `v` [H_kv, n, D] per layer, `logits` [n, V] (chained); `experts` [n, 1] per layer, the program's own choice (where
    that can be seen). `T` [n]: tokens of the call that each position was in. `x` [L, n, C]: what an update is counted from,
    the golden's input; isolated as the program read it, rounded to fp16. `cached` per layer: positions whose cache rows
    were there at the end, all but those that a ring buffer has overwritten."""

    T: np.ndarray
    x: np.ndarray
    hidden: dict[int, np.ndarray] = field(default_factory=dict)
    k: dict[int, np.ndarray] = field(default_factory=dict)
    v: dict[int, np.ndarray] = field(default_factory=dict)
    cached: dict[int, np.ndarray] = field(default_factory=dict)
    logits: np.ndarray | None = None
    experts: dict[int, np.ndarray] = field(default_factory=dict)


def default_ts(options: Options) -> list[int]:
    """T values worth comparing with a golden: `callable_ts`, or the one T of shards that have a
    single fixed shape."""
    return callable_ts(options) if len(options.shapes) != 1 else [options.t_max]


def callable_ts(options: Options) -> list[int]:
    """T values worth testing: 1, 2, 3, 4, t_max − 1, t_max and that of every function; of fixed
    shapes whose slice write takes no dummy columns, those alone."""
    shapes, t_max = options.shapes, options.t_max
    if shapes and options.kv_write == "slice":
        return list(shapes)
    return sorted({1, 2, 3, 4, t_max - 1, t_max, *shapes} & {*range(1, t_max + 1)})


def run_golden(
    decoder: Decoder,
    golden: Golden,
    T: int | Sequence[int],
    mode: str = "isolated",
    *,
    forced: bool = True,
) -> ForwardPass:
    """Runs the golden's tokens through every layer in chunks of T (last chunk partial), from an empty cache.

    Args:
        T: tokens a call; several are taken in turn.
        mode: `isolated` or `chained`.
        forced: go on with the golden's choice of experts, whatever the program's own is (portable only).
    """
    (L, n, C), (_, V), dims = golden.x.shape, golden.logits.shape, decoder.manifest.dims
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
    with decoder.set_aside():
        return _Pass(decoder, golden, mode == "isolated", forced).run(T)


class _Pass:
    """One pass over a golden's tokens: which of its values replace the program's own, and the record of what was computed."""

    def __init__(self, decoder: Decoder, golden: Golden, isolated: bool, forced: bool):
        self.decoder, self.golden, self.isolated, self.forced = decoder, golden, isolated, forced
        self.scale = np.float32(
            2.0**decoder.manifest.residual_exponent
        )  # the bundle holds hidden / scale
        self.inputs = golden.x / self.scale  # [L, n, C]
        if isolated and decoder.precision != "exact":
            with np.errstate(over="ignore"):
                self.inputs = self.inputs.astype(np.float16).astype(np.float32)
        self.trace = ForwardPass(np.zeros(len(golden.ids), int), self.inputs * self.scale)

    def run(self, T: int | Sequence[int]) -> ForwardPass:
        start, sizes = 0, itertools.cycle([T] if isinstance(T, int) else T)
        self.decoder.begin()
        while start < len(self.golden.ids):
            left = len(self.golden.ids) - start
            span = slice(start, start + self.decoder.options.tokens(min(next(sizes), left)))
            self.call(span)
            start = span.stop
        _read_cache(self.decoder, self.trace)
        if not self.isolated:
            last = self.trace.hidden[len(self.golden.x) - 1] / self.scale
            self.trace.logits = self.decoder.logits(
                np.tile(last.T, (self.decoder.options.batch, 1, 1))
            )[0]
        return self.trace

    def call(self, span: slice) -> None:
        """One call of every shard over positions `span`, padded with dummy columns to a fixed T when it is shorter."""
        decoder, golden, T = self.decoder, self.golden, span.stop - span.start
        self.trace.T[span] = T
        io, width = host_inputs(decoder, span.start, T)
        io[X] = self.columns(decoder.bundle.embed(golden.ids[None, span])[0], width)
        hooks = nullcontext()
        if decoder.runtime == "portable":
            hooks = decoder.hooked(lambda shard: self.hook(shard, span))
        with hooks:
            for index, model in enumerate(decoder.layers):
                first, last = model.shard.layers
                if self.isolated:
                    io[X] = self.columns(self.inputs[first, span], width)
                    if golden.router is not None and first:
                        io[ROUTER_STATE] = self.columns(golden.router[first - 1, span], width)
                io = decoder.run_layers(index, io, np.full(decoder.options.batch, T))
                self.record(self.trace.hidden, last - 1, span, io[X] * self.scale)

    def hook(self, shard, span: slice):
        """Records the hidden output of a shard's inner layers and its choices of experts, and replaces them by the golden's."""
        inner = {name: layer for layer, name in shard.taps.items() if layer < shard.layers[1] - 1}
        if shard.kind not in ("layers", "router") or (not inner and self.golden.expert is None):
            return None

        def record_and_replace(op, outputs):
            name = op.outputs[0][0] if op.outputs else ""
            if name in inner:
                return self.inner_hidden(inner[name], span, outputs[0])
            if op.kind == "reduce_argmax" or name == ROUTER_SCORES:
                return self.expert_choice(int(shard.modules[name].split(".")[1]), span, outputs[0])
            return None

        return record_and_replace

    def inner_hidden(
        self, layer: int, span: slice, hidden: torch.Tensor
    ) -> list[torch.Tensor] | None:
        """Records an inner layer's output; isolated, the next layer reads the golden's input instead, as its shard holds it."""
        self.record(self.trace.hidden, layer, span, hidden.numpy() * self.scale)
        if not self.isolated:
            return None
        return [
            torch.from_numpy(self.columns(self.inputs[layer + 1, span], hidden.shape[2:].numel()))
        ]

    def expert_choice(
        self, layer: int, span: slice, scores: torch.Tensor
    ) -> list[torch.Tensor] | None:
        """Records the expert that an argmax picked, or that the host will pick from scores; forced, both become the golden's."""
        count = scores.shape[1]
        self.record(
            self.trace.experts,
            layer,
            span,
            (scores if count == 1 else scores.argmax(1, keepdim=True)).numpy(),
        )
        if not self.forced:
            return None
        experts = torch.from_numpy(self.golden.expert[layer, span])
        columns = experts[None] if count == 1 else torch.nn.functional.one_hot(experts, count).T
        replaced = scores.clone().flatten(2)
        replaced[:, :, : len(experts)] = columns.to(scores.dtype)
        return [replaced.reshape(scores.shape)]

    def record(
        self, layers: dict[int, np.ndarray], layer: int, span: slice, plane: np.ndarray
    ) -> None:
        """Copies the valid columns of the first sequence of a plane [B, W, T, 1] to rows `span` of the layer's [n, W]."""
        rows = plane.reshape(*plane.shape[:2], -1)[0, :, : span.stop - span.start].T
        layers.setdefault(layer, np.zeros((len(self.golden.ids), rows.shape[1]), rows.dtype))[
            span
        ] = rows

    def columns(self, rows: np.ndarray, width: int) -> np.ndarray:
        """[count, C] → the bundle's plane [B, C, width, 1], zero beyond count."""
        padded = np.pad(rows.astype(np.float32), ((0, width - len(rows)), (0, 0)))
        return self.decoder.plane(np.tile(padded.T, (self.decoder.options.batch, 1, 1)))


def host_inputs(decoder: Decoder, position: int, T: int) -> tuple[dict[str, np.ndarray], int]:
    """Masks and tables of a call of T tokens at `position` in every sequence, and the call's width in columns."""
    B, width = decoder.options.batch, decoder.options.width(T)
    return decoder.host.inputs(np.full(B, position), np.full(B, T), width), width


def _read_cache(decoder: Decoder, trace: ForwardPass) -> None:
    """Copies the first sequence's cache rows of every layer; those that a ring buffer has overwritten are zeros."""
    n = len(trace.T)
    for model, state in zip(decoder.layers, decoder.states, strict=True):
        for layer in range(*model.shard.layers):
            for name, rows in ((K_STATE, trace.k), (V_STATE, trace.v)):
                cache = np.asarray(state.read(f"layers.{layer}.{name}"), np.float32)[0]
                H_kv, S, D = cache.shape
                S = model.shard.states[f"layers.{layer}.{name}"].ring or S
                trace.cached[layer] = cached = np.arange(max(0, n - S), n)
                rows[layer] = np.zeros((H_kv, n, D), np.float32)
                rows[layer][:, cached] = cache[:, cached % S]


def compare_pass(trace: ForwardPass, golden: Golden, **columns) -> pd.DataFrame:
    """Rows of the `fidelity` table: one per layer, position and tensor. `columns` are constant ones (mode, runtime …); `T`
    is that of each position's call unless it is among them."""
    parts = []
    for layer, hidden in trace.hidden.items():
        parts += [
            _rows(layer, "hidden", golden.hidden[layer], hidden),
            _rows(layer, "update", golden.update[layer], hidden - trace.x[layer]),
        ]
    for name, caches, reference in (("k", trace.k, golden.k), ("v", trace.v, golden.v)):
        for layer, cache in caches.items():
            flat = [a.transpose(1, 0, 2).reshape(a.shape[1], -1) for a in (reference[layer], cache)]
            parts.append(_rows(layer, name, *flat).iloc[trace.cached[layer]])
    if trace.logits is not None:
        parts.append(_rows(-1, "logits", golden.logits, trace.logits))
    rows = pd.concat(parts, ignore_index=True)
    return rows.assign(T=trace.T[rows["position"]]).assign(**columns)


def choices(traces: dict[str, ForwardPass], golden: Golden) -> pd.DataFrame:
    """One row per recorded choice of an expert: layer, position, T, `run` (the trace's name), whether it `differs` from
    the golden's, and the `margin` of the golden's."""
    parts = [
        pd.DataFrame(
            {
                "layer": layer,
                "position": np.arange(len(experts)),
                "T": trace.T,
                "run": name,
                "differs": experts[:, 0] != golden.expert[layer],
                "margin": golden.margin[layer],
            }
        )
        for name, trace in traces.items()
        for layer, experts in trace.experts.items()
    ]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def of_this_checkpoint(decoder: Decoder, golden: Golden) -> gates.Gate:
    """Another checkpoint's golden may have the same dimensions."""
    theirs, ours = golden.meta["checkpoint"], decoder.manifest.checkpoint["sha256"]
    return gates.holds(
        "golden_is_of_this_checkpoint",
        theirs == ours,
        f"golden of checkpoint {theirs[:12]}, bundle of {ours[:12]}",
    )


def near_ties(decoder: Decoder, golden: Golden) -> np.ndarray:
    """Choices of experts [L, n] that the bundle's compression may turn: where a runtime does not show them, a layer's
    update may be another expert's there."""
    if golden.margin is None:
        return np.zeros(golden.x.shape[:2], bool)
    return golden.margin < gates.LIMITS[decoder.options.compress].routing_margin


def worst_row(rows: pd.DataFrame) -> pd.Series:
    """The row with the smallest cosine; one that is no number is worse than any."""
    return rows.loc[rows["cosine"].fillna(-2).idxmin()]


def _rows(layer: int, tensor: str, reference: np.ndarray, actual: np.ndarray) -> pd.DataFrame:
    figures = {
        f.__name__: f(reference, actual) for f in (metrics.cosine, metrics.psnr_db, metrics.max_abs)
    }
    about = {"layer": layer, "position": np.arange(len(actual)), "tensor": tensor}
    return pd.DataFrame(about | figures | {"finite": np.isfinite(actual).all(-1)})


def measure_fidelity(
    decoder: Decoder, golden: Golden, Ts: Iterable[int] | None = None, progress: bool = False
):
    """Runs every T isolated and all of them chained, and compares.

    Returns:
        (fidelity rows, isolated traces by T, the chained trace).
    """
    from tqdm.auto import tqdm

    t_max = decoder.options.t_max
    Ts = list(Ts or default_ts(decoder.options))
    if over := [t for t in Ts if not 1 <= t <= t_max]:
        raise InputError("T", f"{over}", f"1 to t_max = {t_max}", "export with a larger --t-max")
    bar = tqdm([*Ts, Ts], desc="validate", unit="pass", disable=not progress)
    *isolated, chained = [
        run_golden(decoder, golden, T, "chained" if T is Ts else "isolated") for T in bar
    ]
    traces = dict(zip(Ts, isolated, strict=True))
    frames = [compare_pass(trace, golden, T=T, mode="isolated") for T, trace in traces.items()]
    rows = pd.concat([*frames, compare_pass(chained, golden, mode="chained")], ignore_index=True)
    rows = rows.assign(runtime=decoder.runtime, precision=decoder.precision)
    if golden.margin is not None and not chained.experts:
        rows["routing_tie"] = near_ties(decoder, golden)[rows["layer"], rows["position"]] & (
            rows["layer"] >= 0
        )
    names = {layer: m.shard.name for m in decoder.layers for layer in range(*m.shard.layers)}
    return rows.assign(shard=rows["layer"].map(names).fillna("head")), traces, chained
