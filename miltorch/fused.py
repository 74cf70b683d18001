"""What the steps that stand for groups of operations compute (see `miltorch.fuse`)."""

import numpy as np
import torch

from miltorch.ops.registry import assign, window

# an additive mask at or below this gives a weight of 0 beside any attended row
BLOCKED = -1e4
# scores of such size come near the mask's: blocked rows may count then
EXTREME = 1e3
ONE = np.float16(1).view(np.uint16)


def write_slice(cell, update, **slices) -> tuple:
    assign(cell.value.numpy(), window(**slices), update)
    return ()


def written(x: torch.Tensor) -> list[np.ndarray] | None:
    """Sequences, rows and columns [n] that a one-hot mask [B, 1, S, T] writes; None for
    any other mask."""
    # bits, because NumPy compares fp16 slowly
    mask = x.numpy().view(np.uint16)[:, 0]
    b, s, t = places = np.nonzero(mask)
    pairs = (set(zip(b.tolist(), each.tolist())) for each in (s, t))
    if (mask[places] != ONE).any() or any(len(each) < len(b) for each in pairs):
        return None
    return list(places)


def write_rows(transposed: bool, rows, mask, cell, places) -> tuple:
    """Writes rows [B, H, T, D] into a state [B, H, S, D]: in place where a mask is
    one-hot, or by its formula, which spreads what is not finite."""
    if transposed:
        rows = rows.mT
    if rows.shape[:2] != cell.value.shape[:2]:
        raise ValueError(f"rows {[*rows.shape]} for a state {[*cell.value.shape]}")
    if places is not None:
        (b, s, t), kept = places, cell.value.numpy()
        old, new = kept[b, :, s], rows.numpy()
        if np.isfinite(old).all() and np.isfinite(new).all():
            kept[b, :, s] = new[b, :, t]
            return ()
    wide = mask.float()
    rest = (1 - wide.sum(-1, keepdim=True).half()).half()
    placed = (wide @ rows.float()).half()
    cell.value = (cell.value.half() * rest).half() + placed
    return ()


def visible(reads: str, x: torch.Tensor) -> slice:
    """The columns of a mask [B, 1, T, S] from the first to the last that some query
    sees, or all."""
    seen = x.flatten(0, 2).numpy() > BLOCKED
    # a query that sees nothing attends to all columns alike
    if reads == "used" and seen.any(1).all():
        columns = np.flatnonzero(seen.any(0))
        return slice(int(columns[0]), int(columns[-1]) + 1)
    return slice(0, x.shape[-1])


def attend(q, mask, key, value, span) -> torch.Tensor:
    """q [B, H_kv, G·T, D], states [B, H_kv, S, D], mask [B, 1, T, S] → [B, H_kv, G·T,
    D]; scores, weights and results are rounded as declared."""
    B, H, N, _ = q.shape
    *_, T, S = mask.shape
    columns = mask[:, :, None, :, span]
    scores = (q.float() @ key.value[:, :, span].float().mT).half()
    if columns.shape[-1] < S and float(scores.abs().amax()) > EXTREME:
        return attend(q, mask, key, value, slice(0, S))
    scores = scores.view(B, H, N // T, T, -1) + columns
    weights = torch.softmax(scores, -1).view(B, H, N, -1)
    return (weights.float() @ value.value[:, :, span].float()).half()


def normed(axis: int, gains: torch.Tensor, eps: float, x: torch.Tensor):
    rows = x.movedim(axis, -1).contiguous().float()
    return torch.rms_norm(rows, gains.shape, gains, eps).half().movedim(-1, axis)


def rotated(widths: list[int], x, cos, sin) -> torch.Tensor:
    a, b, *rest = x.split(widths, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, *rest), -1)
