"""Snapshots as flat tensors and a header, ready for a file or for memory, and back.

`fp16` keeps every array as it is. `q4` keeps 4 bits a value of K and V: groups run along head_dim
alone (its largest divisor up to 64), so that no two tokens share a group and any slice of tokens is
exact; value ≈ low + code · scale with `low` and `scale` in fp16, hence an error of at most scale /
2 (and one rounding to the state's dtype). Side states stay as they are, and so does a cache tensor
whose error is more than a quarter of what differs from token to token in it: there, a few large
channels would use up the range of all the others.
"""

from dataclasses import dataclass

import numpy as np

from workbench.bundle.names import MAX_FP16, is_cache
from workbench.decode.snapshot import Snapshot
from workbench.errors import InputError, check_choice

FORMATS = ("fp16", "q4")
FORMAT_VERSION = "2"  # 2: with `floor`
GROUP = 64  # values along head_dim that share one scale
OUTLIER = 0.25  # RMS of a tensor's q4 error over the RMS of its deviation from its mean token: above, it stays fp16
IDS = "ids"
CODES, SCALE, LOW = PARTS = ".codes", ".scale", ".low"


@dataclass(frozen=True, eq=False)
class Encoded:
    """A snapshot's tensors by name, its header (text to text), each quantized tensor's relative
    error (as OUTLIER)."""

    tensors: dict[str, np.ndarray]
    header: dict[str, str]
    errors: dict[str, float]

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in self.tensors.values())


def encode_rows(snapshot: Snapshot, format: str = "fp16") -> Encoded:
    """Detached, contiguous tensors of a snapshot (safetensors writes others wrongly), copied or
    quantized."""
    check_choice("snapshot format", format, FORMATS, "choose one of these")
    tensors = {IDS: np.array(snapshot.ids, np.int32)}
    errors = {}
    for name, value in snapshot.states.items():
        parts = {name: value.copy()}
        if format == "q4" and is_cache(name):
            quantized = quantize_groups(value)
            errors[name] = _error(value, dequantize_groups(*quantized))
            if errors[name] <= OUTLIER:
                parts = {name + part: tensor for part, tensor in zip(PARTS, quantized, strict=True)}
        tensors |= {part: np.ascontiguousarray(tensor) for part, tensor in parts.items()}
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
    """The snapshot again, in fresh arrays."""
    states, dtype = {}, np.dtype(encoded.header["dtype"])
    for name, value in encoded.tensors.items():
        if name.endswith(CODES):
            name = name.removesuffix(CODES)
            states[name] = dequantize_groups(
                *(encoded.tensors[name + part] for part in PARTS)
            ).astype(dtype)
        elif name != IDS and not name.endswith((SCALE, LOW)):
            states[name] = value.copy()
    ids = tuple(encoded.tensors[IDS].tolist())
    header = encoded.header
    return Snapshot(ids, header["identity"], states, int(header["floor"]))


def shapes(
    layout: dict[str, tuple[int, ...]], dtype: str, names: set[str]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of every tensor of a snapshot's states; `names`, those of a file, say which
    caches are quantized."""
    tensors = {}
    for name, shape in layout.items():
        if is_cache(name) and name not in names and name + CODES in names:
            *rows, D = shape
            tensors[name + CODES] = "uint8", (*rows, D // 2)
            tensors[name + SCALE] = tensors[name + LOW] = "float16", (*rows, D // group(D))
        else:
            tensors[name] = dtype, shape
    return tensors


def group(D: int) -> int:
    """Values that share a scale: the largest divisor of head_dim up to 64."""
    return next(n for n in range(min(GROUP, D), 0, -1) if D % n == 0)


def quantize_groups(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows [..., D] → codes [..., D / 2] uint8 (two values a byte, the first in the low half),
    scale and low [..., D / group] fp16. A group of equal values has scale 0."""
    if rows.shape[-1] % 2 or (rows.size and not np.abs(rows).max() <= MAX_FP16):
        raise InputError(
            "q4",
            f"head_dim {rows.shape[-1]}, {(~(np.abs(rows) <= MAX_FP16)).sum()} values beyond fp16",
            "finite values in fp16's range and an even head_dim",
            "save as fp16",
        )
    grouped = rows.astype(np.float32).reshape(*rows.shape[:-1], -1, group(rows.shape[-1]))
    low = _fp16(grouped.min(-1), -np.inf)
    scale = _fp16((grouped.max(-1) - low) / np.float32(15), np.inf)
    steps = np.where(scale > 0, scale, 1).astype(np.float32)[..., None]
    codes = np.rint((grouped - low[..., None]) / steps).astype(np.uint8).reshape(rows.shape)
    return codes[..., ::2] | codes[..., 1::2] << 4, scale, low


def dequantize_groups(codes: np.ndarray, scale: np.ndarray, low: np.ndarray) -> np.ndarray:
    """The inverse: rows [..., D] float32, low + code · scale."""
    values = np.stack([codes & 15, codes >> 4], -1).reshape(*scale.shape, -1).astype(np.float32)
    return (values * scale[..., None] + low[..., None]).reshape(*codes.shape[:-1], -1)


def _fp16(value: np.ndarray, towards: float) -> np.ndarray:
    """The nearest fp16 number on the side of `towards`."""
    near = value.astype(np.float16)
    beyond = near > value if towards < 0 else near < value
    with np.errstate(over="ignore"):  # the neighbour of the largest number is taken for no value
        return np.where(beyond, np.nextafter(near, np.float16(towards)), near)


def _error(value: np.ndarray, approximation: np.ndarray) -> float:
    """RMS of the error over the RMS of what differs from token to token: deviations from the mean
    of each channel."""
    if not value.shape[1]:
        return 0.0
    value = value.astype(np.float32)
    error = _rms(value - approximation)
    deviation = _rms(value - value.mean(1, keepdims=True))
    return float(error / deviation if deviation else error > 0)


def _rms(value: np.ndarray) -> np.floating:
    return np.sqrt((value**2).mean())
