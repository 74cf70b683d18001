"""Every layer × position × T of a bundle against a golden, as rows of the log's `fidelity` table.

Isolated: each layer is fed the golden's input, so its error is its own. Chained: each layer is fed the one before, so
errors add up as they do in use. Inner layers of a multi-layer shard are fed and read through the portable runtime's
hook; Core ML shows them only by their K/V rows, and what it cannot show is absent.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

from workbench.bundle.contract import K_STATE, ROUTER_STATE, V_STATE, X
from workbench.decode import Decoder, literal
from workbench.errors import InputError

from . import metrics
from .golden import Golden

TENSORS = ("update", "hidden", "k", "v", "logits")


@dataclass
class Trace:
    """What one pass over the golden's tokens produced: `hidden` [n, C] per layer (where it can be seen), cache rows
    `k`, `v` [H_kv, n, D] per layer, `logits` [n, V]."""

    hidden: dict[int, np.ndarray]
    k: dict[int, np.ndarray]
    v: dict[int, np.ndarray]
    logits: np.ndarray


def default_ts(t_max: int, fixed: bool = False) -> list[int]:
    """T values worth testing: 1, 2, 3, 4, t_max − 1, t_max."""
    return [t_max] if fixed else sorted({t for t in (1, 2, 3, 4, t_max - 1, t_max) if 1 <= t <= t_max})


@literal
def run(decoder: Decoder, golden: Golden, T: int, mode: str = "isolated") -> Trace:
    """Runs the golden's tokens through every layer in chunks of T (last chunk partial), from an empty cache.

    Args:
        mode: `isolated` or `chained`.
    """
    n = len(golden.ids)
    if n > decoder.options.max_seq_len:
        raise InputError("golden", f"{n} tokens", f"at most max_seq_len = {decoder.options.max_seq_len}",
                         "validate with a shorter prompt, or export with a larger --max-seq-len")  # fmt: skip
    decoder.begin()
    hidden = {i: np.zeros_like(golden.x[0]) for i in range(decoder.manifest.dims.L)}
    seen: set[int] = set()
    for start in range(0, n, T):
        span = slice(start, min(start + T, n))
        _run_chunk(decoder, golden, span, T, mode == "isolated", hidden, seen)
    k, v = _cache_rows(decoder, n)
    last = golden.hidden[-1] if mode == "isolated" else hidden[len(hidden) - 1]
    logits = decoder.logits(_batched(decoder, last.T / 2.0**decoder.manifest.residual_exponent))[0]
    return Trace({i: h for i, h in hidden.items() if i in seen}, k, v, logits)


def _batched(decoder: Decoder, row: np.ndarray) -> np.ndarray:
    """One sequence's array as every slot's: [B, ...]."""
    return np.repeat(row[None], decoder.options.batch, axis=0)


def _run_chunk(decoder, golden, span, T, isolated, hidden, seen) -> None:
    """One call of every shard over positions `span`, padded with dummy columns to T when it is shorter on a fixed T."""
    B, count = decoder.options.batch, span.stop - span.start
    counts = np.full(B, count)
    width = decoder.options.t_max if decoder.options.t == "fixed" else count
    grow = np.float32(2.0**decoder.manifest.residual_exponent)
    io = decoder.host.inputs(np.full(B, span.start), counts, width)
    io[X] = _columns(decoder, decoder.bundle.embed(golden.ids[None, span])[0], width)
    for index, model in enumerate(decoder.layers):
        first, last = model.shard.layers
        if isolated:
            io[X] = _columns(decoder, golden.x[first][span] / grow, width)
            if golden.router is not None and first:
                io[ROUTER_STATE] = _columns(decoder, golden.router[first - 1][span], width)
        model.hook = _tap(decoder, model.shard, golden, span, isolated, hidden, seen)
        io = decoder.run_layers(index, io, counts)
        model.hook = None
        hidden[last - 1][span] = io[X].reshape(B, -1, width)[0, :, :count].T * grow
        seen.add(last - 1)


def _columns(decoder: Decoder, rows: np.ndarray, width: int) -> np.ndarray:
    """[count, C] → the bundle's plane [B, C, width, 1], zero beyond count."""
    padded = np.zeros((width, rows.shape[1]), np.float32)
    padded[: len(rows)] = rows
    return decoder.plane(_batched(decoder, padded.T))


def _tap(decoder, shard, golden, span, isolated, hidden, seen):
    """A hook that reads the hidden output of a shard's inner layers and, isolated, puts the golden's in its place."""
    inner = {name: layer for layer, name in shard.taps.items() if layer < shard.layers[1] - 1}
    if not inner:
        return None

    def hook(op, outputs):
        layer = inner.get(op.outputs[0][0]) if op.outputs else None
        if layer is None:
            return None
        grow = np.float32(2.0**decoder.manifest.residual_exponent)
        flat = outputs[0].reshape(*outputs[0].shape[:2], -1)
        hidden[layer][span] = flat[0, :, : span.stop - span.start].T.numpy() * grow
        seen.add(layer)
        if not isolated:
            return None
        fed = _columns(decoder, golden.x[layer + 1][span] / grow, flat.shape[2])
        fed = fed if decoder.precision == "exact" else fed.astype(np.float16).astype(np.float32)
        return [torch.from_numpy(fed)]

    return hook


def _cache_rows(decoder: Decoder, n: int) -> tuple[dict, dict]:
    """Cache rows of the first n positions of slot 0, per layer; a ring buffer shows only the last ones it holds."""
    k, v = {}, {}
    for model, state in zip(decoder.layers, decoder.states, strict=True):
        for layer in range(*model.shard.layers):
            for name, rows in ((K_STATE, k), (V_STATE, v)):
                entry = model.shard.states[f"layers.{layer}.{name}"]
                held = np.asarray(state.read(f"layers.{layer}.{name}"), np.float32)[0]
                if entry.ring is None:
                    rows[layer] = held[:, :n]
                else:
                    rows[layer] = np.full((held.shape[0], n, held.shape[2]), np.nan, np.float32)
                    kept = range(max(0, n - entry.ring), n)
                    rows[layer][:, kept] = held[:, [p % entry.ring for p in kept]]
    return k, v


def compare(trace: Trace, golden: Golden, **columns) -> pd.DataFrame:
    """Rows of the `fidelity` table: one per layer, position and tensor. `columns` are constant columns (T, mode …)."""
    parts = []
    for layer, hidden in trace.hidden.items():
        parts.append(_rows(layer, "hidden", golden.hidden[layer], hidden))
        parts.append(_rows(layer, "update", golden.update[layer], hidden - golden.x[layer]))
    for name, held, reference in (("k", trace.k, golden.k), ("v", trace.v, golden.v)):
        for layer, rows in held.items():
            flat = [a.transpose(1, 0, 2).reshape(a.shape[1], -1) for a in (reference[layer], rows)]
            shown = ~np.isnan(flat[1]).all(axis=1) if np.isnan(flat[1]).any() else np.ones(len(flat[1]), bool)
            parts.append(_rows(layer, name, *flat)[shown])
    parts.append(_rows(-1, "logits", golden.logits, trace.logits))
    rows = pd.concat(parts, ignore_index=True).assign(**columns)
    if golden.margin is not None:
        sure = np.stack([golden.sure(layer) for layer in range(len(golden.x))])
        rows["routing_tie"] = ~sure[rows["layer"].clip(lower=0), rows["position"]] & (rows["layer"] >= 0)
    return rows


def _rows(layer: int, tensor: str, reference: np.ndarray, found: np.ndarray) -> pd.DataFrame:
    return pd.DataFrame({
        "layer": layer, "position": np.arange(len(found)), "tensor": tensor,
        "cosine": metrics.cosine(reference, found), "psnr_db": metrics.psnr_db(reference, found),
        "max_abs": metrics.max_abs(reference, found), "finite": np.isfinite(found).all(-1),
    })  # fmt: skip


def measure(decoder: Decoder, golden: Golden, Ts: Iterable[int] | None = None,
            modes: Sequence[str] = ("isolated", "chained"), progress: bool = False):  # fmt: skip
    """Runs every (T, mode) and compares it.

    Returns:
        (fidelity rows, traces by (T, mode)).
    """
    from tqdm.auto import tqdm

    Ts = list(Ts or default_ts(decoder.options.t_max, decoder.options.t == "fixed"))
    over = [t for t in Ts if not 1 <= t <= decoder.options.t_max]
    if over:
        raise InputError("T", f"{over}", f"1 to t_max = {decoder.options.t_max}", "export with a larger --t-max")
    traces, frames = {}, []
    for T, mode in tqdm([(T, m) for T in Ts for m in modes], desc="validate", unit="pass", disable=not progress):
        traces[T, mode] = run(decoder, golden, T, mode)
        frames.append(compare(traces[T, mode], golden, T=T, mode=mode, runtime=decoder.runtime,
                              precision=decoder.precision))  # fmt: skip
    rows = pd.concat(frames, ignore_index=True)
    names = {layer: m.shard.name for m in decoder.layers for layer in range(*m.shard.layers)}
    return rows.assign(shard=rows["layer"].map(names).fillna("head")), traces
