"""Encodes snapshots as flat tensors with a header, for a file or for memory, and
decodes them.

The format `fp16` stores every array unchanged. The format `q4` stores 4 bits per value
of K and V:

    rows   [H, rows, D]           value ≈ low + code · scale, error ≤ scale / 2 and one rounding
    codes  [H, rows, D / 2]       uint8, two values per byte, the first in the low half
    scale  [H, rows, D / group]   fp16, like `low`; group: the largest divisor of D up to 64

Groups run along head_dim alone, so that no two tokens share a group and any slice of
tokens is exact. Side states are stored unchanged. So is a cache tensor whose q4 error
exceeds a quarter of its deviation from the mean token, since a few large channels use
up the range of its groups."""

from dataclasses import dataclass

import numpy as np

from workbench.bundle.names import MAX_FP16, is_cache
from workbench.decode.snapshot import Snapshot
from workbench.errors import InputError, check_choice

FORMATS = ("fp16", "q4")
FORMAT_VERSION = "2"  # 2: with `floor`
GROUP = 64  # values along head_dim that share one scale
# the largest RMS of a q4 error, relative to the RMS of the deviation from the mean
# token
OUTLIER = 0.25
IDS = "ids"
PARTS = ".codes", ".scale", ".low"
CODES, SCALE, LOW = PARTS


@dataclass(frozen=True, eq=False)
class Encoded:
    """A snapshot's tensors by name, its header, and the relative error (as in
    `OUTLIER`) of each tensor that q4 was tried on."""

    tensors: dict[str, np.ndarray]
    header: dict[str, str]
    errors: dict[str, float]

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in self.tensors.values())


def encode_rows(snapshot: Snapshot, format: str = "fp16") -> Encoded:
    """A snapshot's tensors, copied or quantized; contiguous, since safetensors writes
    others wrongly."""
    check_choice("snapshot format", format, FORMATS, "choose one of these")
    tensors = {IDS: np.array(snapshot.ids, np.int32)}
    errors = {}
    for name, value in snapshot.states.items():
        if format == "q4" and is_cache(name):
            quantized = quantize_groups(value)
            errors[name] = _error(value, dequantize_groups(*quantized))
            if errors[name] <= OUTLIER:
                for part, tensor in zip(PARTS, quantized, strict=True):
                    tensors[name + part] = np.ascontiguousarray(tensor)
                continue
        tensors[name] = np.ascontiguousarray(value.copy())
    dtype = next(iter(snapshot.states.values())).dtype
    header = {
        "format": "workbench-snapshot",
        "version": FORMAT_VERSION,
        "identity": snapshot.identity,
        "values": format,
        "offset": str(snapshot.offset),
        "floor": str(snapshot.floor),
        "dtype": dtype.name,
    }
    return Encoded(tensors, header, errors)


def decode_rows(encoded: Encoded) -> Snapshot:
    """The snapshot of encoded tensors, in new arrays."""
    states = {}
    dtype = np.dtype(encoded.header["dtype"])
    for name, value in encoded.tensors.items():
        if name.endswith(CODES):
            name = name.removesuffix(CODES)
            quantized = [encoded.tensors[name + part] for part in PARTS]
            states[name] = dequantize_groups(*quantized).astype(dtype)
        elif name != IDS and not name.endswith((SCALE, LOW)):
            states[name] = value.copy()
    ids = tuple(encoded.tensors[IDS].tolist())
    header = encoded.header
    return Snapshot(ids, header["identity"], states, int(header["floor"]))


def shapes(
    layout: dict[str, tuple[int, ...]], dtype: str, names: set[str]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of every tensor of a snapshot's states; a cache is quantized if
    `names`, the tensors of a file, contain its codes."""
    tensors = {}
    for name, shape in layout.items():
        if is_cache(name) and name not in names and name + CODES in names:
            *rows, D = shape
            of_groups = "float16", (*rows, D // group(D))
            tensors[name + CODES] = "uint8", (*rows, D // 2)
            tensors[name + SCALE] = of_groups
            tensors[name + LOW] = of_groups
        else:
            tensors[name] = dtype, shape
    return tensors


def group(D: int) -> int:
    """The number of values that share a scale: the largest divisor of head_dim up to
    64."""
    size = min(GROUP, D)
    while D % size:
        size -= 1
    return size


def quantize_groups(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows [..., D] → codes [..., D / 2] uint8, scale and low [..., D / group] fp16
    (see above). A group of equal values has scale 0."""
    D = rows.shape[-1]
    if D % 2 or (rows.size and not np.abs(rows).max() <= MAX_FP16):
        beyond = (~(np.abs(rows) <= MAX_FP16)).sum()
        actual = f"head_dim {D}, {beyond} values beyond fp16"
        needed = "finite values in fp16's range and an even head_dim"
        raise InputError("q4", actual, needed, "save as fp16")
    groups = (*rows.shape[:-1], -1, group(D))
    grouped = rows.astype(np.float32).reshape(groups)
    low = _fp16(grouped.min(-1), -np.inf)
    reach = grouped.max(-1) - low
    scale = _fp16(reach / np.float32(15), np.inf)
    steps = np.where(scale > 0, scale, 1).astype(np.float32)
    codes = np.rint((grouped - low[..., None]) / steps[..., None])
    codes = codes.astype(np.uint8).reshape(rows.shape)
    pairs = codes[..., ::2] | codes[..., 1::2] << 4
    return pairs, scale, low


def dequantize_groups(
    codes: np.ndarray, scale: np.ndarray, low: np.ndarray
) -> np.ndarray:
    """The inverse of `quantize_groups`: rows [..., D] float32, low + code · scale."""
    values = np.stack([codes & 15, codes >> 4], -1)  # [..., D / 2, 2]
    values = values.reshape(*scale.shape, -1)  # [..., D / group, group]
    values = values.astype(np.float32)
    rows = values * scale[..., None] + low[..., None]
    return rows.reshape(*codes.shape[:-1], -1)


def _fp16(value: np.ndarray, towards: float) -> np.ndarray:
    """The nearest fp16 numbers that are not below (`towards` inf) or not above (−inf)
    the values."""
    near = value.astype(np.float16)
    beyond = near > value if towards < 0 else near < value
    # the neighbour of the largest number is inf and is not used
    with np.errstate(over="ignore"):
        return np.where(beyond, np.nextafter(near, np.float16(towards)), near)


def _error(value: np.ndarray, approximation: np.ndarray) -> float:
    """RMS of the error over the RMS of the deviations from each channel's mean over
    tokens."""
    if not value.shape[1]:
        return 0.0
    value = value.astype(np.float32)
    error = _rms(value - approximation)
    deviation = _rms(value - value.mean(1, keepdims=True))
    return float(error / deviation if deviation else error > 0)


def _rms(value: np.ndarray) -> np.floating:
    return np.sqrt((value**2).mean())
