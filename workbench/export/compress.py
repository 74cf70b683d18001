"""Compresses fp16 weights to the bytes that coremltools 9.0 stores for them, bit for
bit, one cache-sized piece at a time.

Linear presets: scale = fp16(fp16(2·amax) / (2^bits − 2)) for each tensor, output
channel or block of 32 inputs; q = clip(rne(fp16(w / scale))), 0 / 0 = 0. Lookup tables:
k-means over the distinct values, weighted by how often they occur, by coremltools'
exact solver, for tensors of every size. By default coremltools passes tensors below
10,000 values to scikit-learn, whose tables had 5% to 23% more squared error on normal
draws of 1,024 to 8,192 values (five sizes, three seeds, 4 and 6 bits).
tests/export/test_compress.py compares the bytes with
coremltools' own."""

import numpy as np
import torch

from workbench.export.weights import Scratch, WeightSource, load_values
from workbench.models.checkpoint import Checkpoint

PIECE = 1 << 16
MINUS_ZERO = 0x8000


def stored(
    weight: WeightSource, source: Checkpoint, scratch: Scratch
) -> dict[str, np.ndarray]:
    """`stored_arrays` of a weight, read from the checkpoint."""
    values, peak = load_values(weight, source, scratch)
    return stored_arrays(weight, values, peak, scratch)


def stored_arrays(
    weight: WeightSource, values: torch.Tensor, peak: float, scratch: Scratch
) -> dict[str, np.ndarray]:
    """Role in the program (`val`; `data`, `scale`; `indices`, `lut`) → values as
    stored, one array element per weight.

    Args:
        values: fp16, flat. The arrays may lie in `scratch`.
        peak: largest magnitude of `values`.
    """
    preset = weight.preset
    if not weight.compressed:
        return {"val": values.numpy()}
    if not preset.is_integer:
        return palettize(values.numpy(), preset.bits)
    rows = weight.shape[0] if preset.granularity == "per_channel" else 1
    row = preset.block or len(values) // rows
    return quantize_weight(values.reshape(-1, row), peak, preset.bits, scratch)


def quantize_weight(
    values: torch.Tensor, peak: float, bits: int, scratch: Scratch
) -> dict[str, np.ndarray]:
    """Symmetric linear quantization with one scale for each row of `values` [rows,
    n]."""
    rows, n = values.shape
    limit = 2 ** (bits - 1) - 1
    amax = torch.full((1, 1), peak)
    if rows > 1:
        amax = torch.maximum(values.amax(1), -values.amin(1)).float()[:, None]
    amax.abs_()  # 0, never -0
    scale = (amax * 2 / (2 * limit)).half()
    zero = bool((scale == 0).any())
    data = scratch.take(rows * n, torch.int8).reshape(rows, n)
    height = max(1, PIECE // n)
    width = min(n, PIECE)
    rounded = torch.empty(height, width, dtype=torch.float16)
    for r in range(0, rows, height):
        for c in range(0, n, width):
            piece = values[r : r + height, c : c + width]
            half = rounded[: piece.shape[0], : piece.shape[1]]
            wide = scratch.wide[: piece.numel()].reshape(piece.shape)
            torch.div(wide.copy_(piece), scale[r : r + height].float(), out=wide)
            wide.copy_(half.copy_(wide)).round_()
            if zero:
                wide.nan_to_num_(0.0, torch.inf, -torch.inf)
            data[r : r + height, c : c + width] = wide.clamp_(-limit, limit)
    return {"data": data.reshape(-1).numpy(), "scale": scale.reshape(-1).numpy()}


def palettize(values: np.ndarray, bits: int) -> dict[str, np.ndarray]:
    """A table of 2^bits values for the whole tensor, and an index into it for each
    weight."""
    from coremltools._deps import kmeans1d

    codes = values.view(np.uint16)
    counts = np.bincount(codes, minlength=1 << 16)
    counts[0] += counts[MINUS_ZERO]
    counts[MINUS_ZERO] = 0
    present = np.flatnonzero(counts).astype(np.uint16)
    present = present[np.argsort(present.view(np.float16))]
    distinct = present.view(np.float16)
    count = min(len(distinct), 1 << bits)
    clusters = kmeans1d.cluster(distinct, count, weights=counts[present])
    lut = np.zeros(1 << bits)
    table = np.zeros(1 << 16, np.uint8)
    lut[:count] = clusters.centroids
    table[present] = clusters.clusters
    table[MINUS_ZERO] = table[0]
    return {"indices": table[codes], "lut": lut.astype(np.float16)}


def packed(array: np.ndarray, bits: int) -> np.ndarray:
    """Values as bytes; those of 4 or 6 bits lie bit after bit, the lowest first."""
    if bits >= 8:
        return array.view(np.uint8)
    values = array.view(np.uint8) & ((1 << bits) - 1)
    group = 8 // np.gcd(8, bits)  # values that fill whole bytes: 2 of 4 bits, 4 of 6
    values = np.pad(values, (0, -len(values) % group)).reshape(-1, group)
    word = np.zeros(len(values), np.uint32)
    for i in range(group):
        word |= values[:, i].astype(np.uint32) << np.uint32(bits * i)
    groups = np.ascontiguousarray(word[:, None].view(np.uint8)[:, : group * bits // 8])
    return groups.reshape(-1)[: (len(array) * bits + 7) // 8]
