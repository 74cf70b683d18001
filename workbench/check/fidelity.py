"""Every layer × position × T of a bundle against a golden, as rows of the log's `fidelity` table.

Isolated: each layer is fed the golden's input, so its error is its own; one pass per T. Chained: each layer is fed the
one before, so errors add up as they do in use; one pass whose calls take every T in turn. Inner layers of a multi-layer
shard are fed and read through the portable runtime's hook; Core ML shows them only by their K/V rows, and what it cannot
show is absent.

Choosing an expert is a jump: rounding that moves two scores past each other changes the layer's whole update. So the
portable runtime notes each choice and goes on with the golden's; choices are judged for themselves.
"""

import itertools
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import torch

from workbench.bundle.manifest import K_STATE, ROUTER_SCORES, ROUTER_STATE, V_STATE, X
from workbench.check import gates, metrics
from workbench.check.golden import Golden
from workbench.decode import Decoder
from workbench.errors import InputError


@dataclass
class ForwardPass:
    """What one pass over the golden's tokens produced: `hidden` [n, C] per layer (where it can be seen), cache rows
    `k`, `v` [H_kv, n, D] per layer, `logits` [n, V] (chained); `chosen` [n] per layer, the expert it would have picked (where
    that can be seen). `T` [n]: tokens of the call that each position was in. `x` [L, n, C]: what an update is counted from,
    the golden's input; isolated as the program was given it, rounded to fp16. `held` per layer: positions whose cache rows
    were there at the end, all but those that a ring buffer has overwritten."""

    T: np.ndarray
    x: np.ndarray
    hidden: dict[int, np.ndarray] = field(default_factory=dict)
    k: dict[int, np.ndarray] = field(default_factory=dict)
    v: dict[int, np.ndarray] = field(default_factory=dict)
    held: dict[int, np.ndarray] = field(default_factory=dict)
    logits: np.ndarray | None = None
    chosen: dict[int, np.ndarray] = field(default_factory=dict)


def default_ts(t_max: int, fixed: bool = False) -> list[int]:
    """T values worth testing: 1, 2, 3, 4, t_max − 1, t_max."""
    return [t_max] if fixed else sorted({t for t in (1, 2, 3, 4, t_max - 1, t_max) if 1 <= t <= t_max})


def run_golden(decoder: Decoder, golden: Golden, T: int | Sequence[int], mode: str = "isolated", *, forced: bool = True) -> ForwardPass:
    """Runs the golden's tokens through every layer in chunks of T (last chunk partial), from an empty cache.

    Args:
        T: tokens a call; several are taken in turn.
        mode: `isolated` or `chained`.
        forced: go on with the golden's choice of experts, whatever the program's own is (portable only).
    """
    n, dims = len(golden.ids), decoder.manifest.dims
    if n > decoder.options.max_seq_len:
        raise InputError("golden", f"{n} tokens", f"at most max_seq_len = {decoder.options.max_seq_len}",
                         "validate with a shorter prompt, or export with a larger --max-seq-len")  # fmt: skip
    if golden.x.shape[::2] != (dims.L, dims.C) or golden.logits.shape[1] != dims.V:
        raise InputError("golden", "{} layers of width {}".format(*golden.x.shape[::2]) + f", vocabulary {golden.logits.shape[1]}",
                         f"the bundle's {dims.L} layers of width {dims.C}, vocabulary {dims.V}",
                         f"make the golden of {decoder.manifest.checkpoint['name']}")  # fmt: skip
    with decoder.set_aside():
        return _Pass(decoder, golden, mode == "isolated", forced).run(T)


class _Pass:
    """One pass over a golden's tokens: what replaces the program's own values, and what is kept of them."""

    def __init__(self, decoder: Decoder, golden: Golden, isolated: bool, forced: bool):
        self.decoder, self.golden, self.isolated, self.forced = decoder, golden, isolated, forced
        self.grow = np.float32(2.0**decoder.manifest.residual_exponent)
        self.given = golden.x / self.grow
        if isolated and decoder.precision != "exact":
            with np.errstate(over="ignore"):
                self.given = self.given.astype(np.float16).astype(np.float32)
        self.trace = ForwardPass(np.zeros(len(golden.ids), int), self.given * self.grow)

    def run(self, T: int | Sequence[int]) -> ForwardPass:
        decoder, n, start = self.decoder, len(self.golden.ids), 0
        decoder.begin()
        for size in itertools.cycle([T] if isinstance(T, int) else T):
            self.chunk(slice(start, min(start + size, n)))
            start += size
            if start >= n:
                break
        _keep_cache(decoder, self.trace)
        if not self.isolated:
            self.trace.logits = decoder.logits(self.batched(self.trace.hidden[len(self.golden.x) - 1].T / self.grow))[0]
        return self.trace

    def chunk(self, span: slice) -> None:
        """One call of every shard over positions `span`, padded with dummy columns to a fixed T when it is shorter."""
        decoder, golden, B = self.decoder, self.golden, self.decoder.options.batch
        counts, self.trace.T[span] = np.full(B, span.stop - span.start), span.stop - span.start
        width = decoder.options.t_max if decoder.options.t == "fixed" else span.stop - span.start
        io = decoder.host.inputs(np.full(B, span.start), counts, width)
        io[X] = self.columns(decoder.bundle.embed(golden.ids[None, span])[0], width)
        hooks = (
            decoder.hooked(lambda shard: self.hook(shard, span))
            if decoder.runtime == "portable"
            else nullcontext()
        )
        with hooks:
            for index, model in enumerate(decoder.layers):
                first, last = model.shard.layers
                if self.isolated:
                    io[X] = self.columns(self.given[first][span], width)
                    if golden.router is not None and first:
                        io[ROUTER_STATE] = self.columns(golden.router[first - 1][span], width)
                io = decoder.run_layers(index, io, counts)
                self.keep(self.trace.hidden, last - 1, span, io[X] * self.grow)

    def hook(self, shard, span: slice):
        """Reads the hidden output of inner layers and the choice of experts; puts the golden's in their place."""
        inner = {name: layer for layer, name in shard.taps.items() if layer < shard.layers[1] - 1}
        if shard.kind not in ("layers", "router") or (not inner and self.golden.expert is None):
            return None

        def look(op, outputs):
            name = op.outputs[0][0] if op.outputs else ""
            if name in inner:
                self.keep(self.trace.hidden, inner[name], span, outputs[0].numpy() * self.grow)
                return self.fed(inner[name], span, outputs[0]) if self.isolated else None
            if op.kind == "reduce_argmax" or name == ROUTER_SCORES:
                layer = int(shard.modules[name].split(".")[1])
                own = outputs[0] if op.kind == "reduce_argmax" else outputs[0].argmax(1, keepdim=True)
                self.keep(self.trace.chosen, layer, span, own.numpy())
                return self.routed(layer, span, outputs[0]) if self.forced else None
            return None

        return look

    def keep(self, kept: dict[int, np.ndarray], layer: int, span: slice, plane: np.ndarray) -> None:
        """Files the valid columns of the first sequence of a plane [B, W, T, 1] under rows `span` of [n, W]."""
        rows = plane.reshape(*plane.shape[:2], -1)[0, :, : span.stop - span.start].T
        kept.setdefault(layer, np.zeros((len(self.golden.ids), rows.shape[1]), rows.dtype))[span] = rows

    def fed(self, layer: int, span: slice, own: torch.Tensor) -> list[torch.Tensor]:
        """The golden's input of the layer after `layer`, as its shard would hold it."""
        return [torch.from_numpy(self.columns(self.given[layer + 1][span], own.shape[2] * own.shape[3]))]

    def routed(self, layer: int, span: slice, own: torch.Tensor) -> list[torch.Tensor]:
        """The golden's choice in the place of an argmax, or of the scores that the host takes it from."""
        chosen = torch.from_numpy(self.golden.expert[layer][span])
        made, count = own.clone().reshape(*own.shape[:2], -1), len(chosen)
        if own.shape[1] == 1:
            made[:, 0, :count] = chosen.to(made.dtype)
        else:
            made[:, :, :count] = torch.nn.functional.one_hot(chosen, own.shape[1]).T.to(made.dtype)
        return [made.reshape(own.shape)]

    def columns(self, rows: np.ndarray, width: int) -> np.ndarray:
        """[count, C] → the bundle's plane [B, C, width, 1], zero beyond count."""
        padded = np.zeros((width, rows.shape[1]), np.float32)
        padded[: len(rows)] = rows
        return self.decoder.plane(self.batched(padded.T))

    def batched(self, row: np.ndarray) -> np.ndarray:
        """One sequence's array as every slot's: [B, ...]."""
        return np.repeat(row[None], self.decoder.options.batch, axis=0)


def _keep_cache(decoder: Decoder, trace: ForwardPass) -> None:
    """Files the cache rows of slot 0 per layer; those that a ring buffer has overwritten are zeros."""
    n = len(trace.T)
    for model, state in zip(decoder.layers, decoder.states, strict=True):
        for layer in range(*model.shard.layers):
            for name, rows in ((K_STATE, trace.k), (V_STATE, trace.v)):
                found = np.asarray(state.read(f"layers.{layer}.{name}"), np.float32)[0]
                slots = model.shard.states[f"layers.{layer}.{name}"].ring or found.shape[1]
                trace.held[layer] = held = np.arange(max(0, n - slots), n)
                rows[layer] = np.zeros((found.shape[0], n, found.shape[2]), np.float32)
                rows[layer][:, held] = found[:, held % slots]


def compare_pass(trace: ForwardPass, golden: Golden, **columns) -> pd.DataFrame:
    """Rows of the `fidelity` table: one per layer, position and tensor. `columns` are constant ones (mode, runtime …); `T`
    is that of each position's call unless it is among them."""
    parts = []
    for layer, hidden in trace.hidden.items():
        parts += [_rows(layer, "hidden", golden.hidden[layer], hidden),
                  _rows(layer, "update", golden.update[layer], hidden - trace.x[layer])]  # fmt: skip
    for name, held, reference in (("k", trace.k, golden.k), ("v", trace.v, golden.v)):
        for layer, rows in held.items():
            flat = [a.transpose(1, 0, 2).reshape(a.shape[1], -1) for a in (reference[layer], rows)]
            parts.append(_rows(layer, name, *flat).iloc[trace.held[layer]])
    if trace.logits is not None:
        parts.append(_rows(-1, "logits", golden.logits, trace.logits))
    rows = pd.concat(parts, ignore_index=True)
    return rows.assign(T=trace.T[rows["position"]]).assign(**columns)


def choices(traces: dict[str, ForwardPass], golden: Golden) -> pd.DataFrame:
    """One row per choice of an expert that a program was seen to make: layer, position, T, `run` (the trace's name),
    whether it `differs` from the golden's, and the `margin` of the golden's."""
    parts = [pd.DataFrame({"layer": layer, "position": np.arange(len(own)), "T": trace.T, "run": name,
                           "differs": own[:, 0] != golden.expert[layer], "margin": golden.margin[layer]})
             for name, trace in traces.items() for layer, own in trace.chosen.items()]  # fmt: skip
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def of_this_checkpoint(decoder: Decoder, golden: Golden) -> gates.Gate:
    """Another checkpoint's golden may have the same dimensions."""
    theirs, ours = golden.meta["checkpoint"], decoder.manifest.checkpoint["sha256"]
    return gates.holds("golden_is_of_this_checkpoint", theirs == ours, f"golden of checkpoint {theirs[:12]}, bundle of {ours[:12]}")


def near_ties(decoder: Decoder, golden: Golden) -> np.ndarray:
    """Choices of experts [L, n] that the bundle's compression may turn: where a runtime does not show them, a layer's
    update may be another expert's there."""
    if golden.margin is None:
        return np.zeros(golden.x.shape[:2], bool)
    return golden.margin < gates.LIMITS[decoder.options.compress].routing_margin


def _rows(layer: int, tensor: str, reference: np.ndarray, found: np.ndarray) -> pd.DataFrame:
    return pd.DataFrame({
        "layer": layer, "position": np.arange(len(found)), "tensor": tensor,
        "cosine": metrics.cosine(reference, found), "psnr_db": metrics.psnr_db(reference, found),
        "max_abs": metrics.max_abs(reference, found), "finite": np.isfinite(found).all(-1),
    })  # fmt: skip


def measure_fidelity(decoder: Decoder, golden: Golden, Ts: Iterable[int] | None = None, progress: bool = False):
    """Runs every T isolated and all of them chained, and compares.

    Returns:
        (fidelity rows, isolated traces by T, the chained trace).
    """
    from tqdm.auto import tqdm

    Ts = list(Ts or default_ts(decoder.options.t_max, decoder.options.t == "fixed"))
    over = [t for t in Ts if not 1 <= t <= decoder.options.t_max]
    if over:
        raise InputError("T", f"{over}", f"1 to t_max = {decoder.options.t_max}", "export with a larger --t-max")
    how = {"runtime": decoder.runtime, "precision": decoder.precision}
    bar = tqdm([*Ts, Ts], desc="validate", unit="pass", disable=not progress)
    *isolated, chained = [run_golden(decoder, golden, T, "chained" if T is Ts else "isolated") for T in bar]
    traces = dict(zip(Ts, isolated, strict=True))
    frames = [compare_pass(trace, golden, T=T, mode="isolated", **how) for T, trace in traces.items()]
    rows = pd.concat([*frames, compare_pass(chained, golden, mode="chained", **how)], ignore_index=True)
    if golden.margin is not None and not chained.chosen:
        rows["routing_tie"] = near_ties(decoder, golden)[rows["layer"], rows["position"]] & (rows["layer"] >= 0)
    names = {layer: m.shard.name for m in decoder.layers for layer in range(*m.shard.layers)}
    return rows.assign(shard=rows["layer"].map(names).fillna("head")), traces, chained
