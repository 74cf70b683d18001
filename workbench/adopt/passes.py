"""Runs a prompt through adopted packages, and through Hugging Face's model with the
same weights: keys, values and logits of every position."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from workbench.adopt.adapter import EMBEDDING, Adapter
from workbench.check import golden, metrics
from workbench.check.golden import Golden, WeightReader
from workbench.models.checkpoint import Checkpoint


@dataclass
class Pass:
    """The results of a prompt of n tokens.

    Attributes:
        k, v: [L, H_kv, n, D], read from the cache after the call that wrote them; nan
            for rows that the same call overwrote.
        T, function: [n], tokens and function of each position's call.
        logits: [n, V], nan for positions without logits; None if no call gives logits.
        top, value: [n], the top token and its logit; −1 and nan for positions without.
    """

    k: np.ndarray
    v: np.ndarray
    T: np.ndarray
    function: list[str]
    logits: np.ndarray | None
    top: np.ndarray
    value: np.ndarray

    def vectors(self, name: str, layer: int) -> np.ndarray:
        """Rows [n, H_kv · D] of `k` or `v`."""
        rows = getattr(self, name)[layer]
        return rows.transpose(1, 0, 2).reshape(rows.shape[1], -1)


def run(
    adapter: Adapter,
    ids: Sequence[int],
    T: int,
    state: dict | None = None,
    start: int = 0,
):
    """Runs `ids` in calls of T tokens, or fewer if no function takes T, from a fresh
    state or as the continuation of `state`, which has `start` tokens.

    Raises:
        InputError: no function takes some tokens.
    """
    state, n = state or adapter.begin(), len(ids)
    sizes, rows = np.zeros(n, int), {}
    functions, logits, top = [""] * n, None, np.full(n, -1)
    value = np.full(n, np.nan)
    done = 0
    for size in adapter.plan(n, T, start, logits="last"):
        span, first = slice(done, done + size), start + done
        result = adapter.advance(state, ids[span], first)
        name = adapter.functions(size, first)[0].name or "main"
        sizes[span], functions[span] = size, [name] * size
        if result.logits is not None:
            if logits is None:
                logits = np.full((n, result.logits.shape[1]), np.nan, np.float32)
            logits[span] = result.logits
        if result.top is not None:
            top[span] = result.top
        if result.value is not None:
            value[span] = result.value
        for layer in adapter.layers:
            for name, cache in zip("kv", adapter.kv(state, layer), strict=True):
                positions = adapter.positions(layer, cache.shape[1], first + size)
                new = np.flatnonzero(positions >= first)
                empty = np.full((cache.shape[0], n, cache.shape[2]), np.nan, np.float32)
                target = rows.setdefault((name, layer), empty)
                target[:, positions[new] - start] = cache[:, new]
        done += size
    k, v = (np.stack([rows[name, layer] for layer in adapter.layers]) for name in "kv")
    return Pass(k, v, sizes, functions, logits, top, value)


def run_tiles(adapter: Adapter, ids: Sequence[int]) -> dict[int, Pass]:
    """`run` in calls of every tile that is not longer than the prompt."""
    return {T: run(adapter, ids, T) for T in adapter.tiles if T <= len(ids)}


def reference(
    checkpoint: Checkpoint,
    ids: Sequence[int],
    weights: WeightReader | None,
    model=None,
    embedding: float = 1.0,
    head: bool = True,
) -> Golden:
    """Hugging Face's model on `weights` (None: the checkpoint's own), with embeddings
    from the table `EMBEDDING` times the factor `embedding`."""
    model = model or golden.empty_model(checkpoint.config)
    fed = None
    if weights is not None:
        table = weights(EMBEDDING).numpy()
        scale = float(getattr(model.model.embed_tokens, "embed_scale", 1.0)) * embedding
        fed = (table[np.asarray(ids)] * np.float32(scale))[None]
    label = "source" if weights is None else "stored"
    return golden.make_golden(
        checkpoint, ids, weights, label, fed, model=model, head=head
    )


def prompt(adapter: Adapter) -> list[int]:
    """Seeded random ids, more than twice the largest window and tile unless the context
    is shorter."""
    config = adapter.checkpoint and adapter.checkpoint.config
    window = getattr(config, "sliding_window", None) or 0
    window = window if window < adapter.context else 0
    count = min(adapter.context, max(24, 2 * window + 8, 2 * max(adapter.tiles) + 1))
    if 1 not in adapter.tiles:
        count -= count % max(adapter.tiles)
    return random_ids(adapter, np.random.default_rng(0), count).tolist()


def vocabulary(adapter: Adapter) -> int:
    """The size of the vocabulary; 16 if it is unknown."""
    return adapter.adopted.vocabulary or 16


def random_ids(adapter: Adapter, rng, count: int) -> np.ndarray:
    """Random ids [count] of the vocabulary."""
    return rng.integers(0, vocabulary(adapter), count)


def compare(own: Pass, other: Golden) -> pd.DataFrame:
    """Rows of the log's `fidelity` table: layer × position of k and v, and of the
    logits; `distance` is 1 − cosine, 1 where a value is not finite."""
    parts = []
    n = len(own.T)
    for layer in range(len(own.k)):
        for name in "kv":
            flat = getattr(other, name)[layer].transpose(1, 0, 2).reshape(n, -1)
            parts.append(_rows(layer, name, flat, own.vectors(name, layer), own))
    if own.logits is not None:
        there = np.isfinite(own.logits).any(-1)
        parts.append(_rows(-1, "logits", other.logits, own.logits, own)[there])
    return pd.concat(parts, ignore_index=True)


def _rows(layer: int, tensor: str, expected, actual, own: Pass) -> pd.DataFrame:
    cosine = metrics.cosine(expected, actual)
    columns = {
        "layer": layer,
        "position": np.arange(len(actual)),
        "T": own.T,
        "function": own.function,
        "tensor": tensor,
        "mode": "chained",
        "cosine": cosine,
        "psnr_db": metrics.psnr_db(expected, actual),
        "max_abs": metrics.max_abs(expected, actual),
        "finite": np.isfinite(actual).all(-1),
        "distance": 1 - np.nan_to_num(cosine, nan=0.0),
    }
    return pd.DataFrame(columns)
