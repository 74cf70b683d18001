"""Operations that `miltorch.fuse` puts in the place of groups of MIL's operations.

They take and return fp16. Each docstring says what the operation rounds that its group
does not, or the reverse; `docs/runtime.md` bounds the difference.

Every function without an underscore is a rule, see `registry`.
"""

import numpy as np
import torch

from miltorch.ops.registry import assign, window

# an additive mask at or below this gives a weight of 0 beside any attended row
BLOCKED = -1e4
# scores of such size come near the mask's: blocked rows may count then
EXTREME = 1e3
ONE = np.float16(1).view(np.uint16)


def stored_linear(x, bias, *, weight, sizes):
    """1×1 convolutions of one input, as one product with their weights as they are
    stored.

    The bias is added before the one rounding; sums run in another order.

    Args:
        x: [B, K, T, 1] or [B, K, 1, T].
        bias: float32 [R], of all convolutions one after another.
        weight: `stored.StoredWeight` [R, K], of all convolutions one after another.
        sizes: rows of R that belong to each convolution; one result for each.
    """
    B, K, *plane = x.shape
    # the compiled kernels check no bounds
    if K != weight.columns:
        raise ValueError(f"{K} channels for a weight of {weight.columns}")
    rows = x if x.numel() == B * K else x.flatten(2).mT
    y = weight.product(rows.reshape(-1, K), bias.numpy())
    y = y.view(B, -1, len(weight)).mT
    return y.reshape(B, -1, *plane).split(sizes, 1)


def copy_state(input):
    """A copy of a state's value, in place of `read_state` where an operation of this
    file writes the state in place."""
    return input.value.clone()


def one_hot_places(mask):
    """The places that a one-hot mask [B, 1, S, T] writes: indices of sequences, rows and
    columns, each [n], for `write_cache_rows`; None for any other mask."""
    # bits, because NumPy compares fp16 slowly
    bits = mask.numpy().view(np.uint16)[:, 0]
    sequence, row, column = places = np.nonzero(bits)
    if (bits[places] != ONE).any():
        return None
    for index in (row, column):
        # one row takes one column, and one column goes to one row
        if len(set(zip(sequence.tolist(), index.tolist()))) < len(sequence):
            return None
    return list(places)


def write_cache_rows(state, rows, mask, places, *, transposed=False):
    """state·(1 − Σ mask) + mask @ rows, written into the state [B, H, S, D].

    Where the mask is one-hot and all values are finite, the rows are copied into their
    places; the formula gives the same bits. It spreads what is not finite.

    Args:
        rows: [B, H, T, D], `transposed` [B, H, D, T].
        mask: [B, 1, S, T].
        places: what `one_hot_places` returned for the mask.
    """
    if transposed:
        rows = rows.mT
    if rows.shape[:2] != state.value.shape[:2]:
        raise ValueError(f"rows {[*rows.shape]} for a state {[*state.value.shape]}")
    if places is not None:
        (sequence, row, column), cache = places, state.value.numpy()
        before, new = cache[sequence, :, row], rows.numpy()
        if np.isfinite(before).all() and np.isfinite(new).all():
            cache[sequence, :, row] = new[sequence, :, column]
            return ()
    wide = mask.float()
    rest = (1 - wide.sum(-1, keepdim=True).half()).half()
    placed = (wide @ rows.float()).half()
    state.value = (state.value.half() * rest).half() + placed
    return ()


def write_cache_slice(
    state,
    update,
    *,
    begin,
    end,
    stride=None,
    begin_mask=None,
    end_mask=None,
    squeeze_mask=None,
):
    """`slice_update` of a state, written in place; the same bits."""
    index = window(begin, end, stride, begin_mask, end_mask, squeeze_mask)
    assign(state.value.numpy(), index, update)
    return ()


def visible_columns(mask):
    """[first, last + 1] of the columns of a mask [B, 1, T, S] that some query sees."""
    sees = mask.flatten(0, 2).numpy() > BLOCKED
    # a query that sees nothing attends to all columns alike
    if not sees.any(1).all():
        return [0, mask.shape[-1]]
    columns = np.flatnonzero(sees.any(0))
    return [int(columns[0]), int(columns[-1]) + 1]


def cached_attention(q, mask, key, value, columns=None):
    """softmax(q @ keyᵀ + mask) @ value over two states; scores, weights and results are
    rounded as in the group, sums run in another order.

    Args:
        q: [B, H_kv, G·T, D], G query heads for each key head.
        mask: additive, [B, 1, T, S].
        key, value: states [B, H_kv, S, D].
        columns: the rows of the states to attend to, as `visible_columns` returns them
            (default: all). The rows left out have a weight of 0.
    """
    B, H, N, _ = q.shape
    *_, T, S = mask.shape
    first, last = columns or (0, S)
    scores = (q.float() @ key.value[:, :, first:last].float().mT).half()
    if last - first < S and float(scores.abs().amax()) > EXTREME:
        return cached_attention(q, mask, key, value)
    scores = scores.view(B, H, N // T, T, -1) + mask[:, :, None, :, first:last]
    weights = torch.softmax(scores, -1).view(B, H, N, -1)
    return (weights.float() @ value.value[:, :, first:last].float()).half()


def rms_norm(x, gains, *, axis, epsilon):
    """x / √(mean(x²) + epsilon) · gains along `axis`, in float32, rounded once; its group
    rounds six times. `gains`: float32 [width]."""
    rows = x.movedim(axis, -1).contiguous().float()
    return torch.rms_norm(rows, gains.shape, gains, epsilon).half().movedim(-1, axis)


def rotary_embedding(x, cos, sin, *, sizes):
    """x [B, H, T, D], cut into a, b and what follows them, of `sizes` channels → (a·cos −
    b·sin, b·cos + a·sin, the rest); the same bits as its group."""
    a, b, *rest = x.split(sizes, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, *rest), -1)
