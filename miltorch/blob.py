"""Weight blobs of an ML Program (`weight.bin`, storage version 2): bytes in, NumPy
arrays out.

Layout (coremltools' MILBlob storage format): a 64-byte file header (u32 count, u32
version), then per blob a 64-byte record (u32 sentinel, u32 dtype, u64 size in bytes,
u64 payload offset, u64 padding bits) and its payload. Every offset is checked against
the file before it is followed."""

from pathlib import Path

import numpy as np

from miltorch.errors import InputError

SENTINEL = 0xDEADBEEF
# MIL DataType name → NumPy dtype of one element (sub-byte integers are held one per
# byte)
NUMPY = {
    "FLOAT16": np.float16,
    "FLOAT32": np.float32,
    "FLOAT64": np.float64,
    "BOOL": np.bool_,
    "STRING": np.str_,
    "INT4": np.int8,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    **{f"UINT{bits}": np.uint8 for bits in (1, 2, 3, 4, 6, 8)},
}
DTYPE_BITS = {"UINT1": 1, "UINT2": 2, "UINT3": 3, "UINT4": 4, "UINT6": 6, "INT4": 4}
# dtypes in the order of their codes in a blob's record; the first has code 1. BFLOAT16
# has no NumPy dtype
CODES = """FLOAT16 FLOAT32 UINT8 INT8 BFLOAT16 INT16 UINT16 INT4 UINT1 UINT2 UINT4 UINT3
UINT6 INT32 UINT32""".split()


def unpack_bits(packed: np.ndarray, bits: int, count: int, signed: bool) -> np.ndarray:
    """`count` integers of `bits` bits each from little-endian packed bytes, as int8 or
    uint8 [count]."""
    if bits == 4:
        values = np.stack([packed & 15, packed >> 4], axis=-1).reshape(-1)[:count]
    else:
        stream = np.unpackbits(packed, bitorder="little")[: count * bits]
        values = stream.reshape(count, bits) @ (1 << np.arange(bits, dtype=np.uint8))
    values = values.astype(np.uint8)
    if not signed:
        return values
    sign = 1 << (bits - 1)
    return ((values ^ sign).astype(np.int8) - sign).astype(np.int8)


class BlobFile:
    """One weight file, mapped copy-on-write: reading touches only the pages of the
    arrays that are asked for."""

    def __init__(self, path: Path):
        self.path = path
        if path.stat().st_size < 64:
            raise self._bad("a file under 64 bytes")
        self.data = np.memmap(path, np.uint8, mode="c")
        if bytes(self.data[:23]) == b"version https://git-lfs":
            raise self._bad("a Git LFS pointer", "run: git lfs pull")

    def _bad(
        self, actual: str, next_step: str = "export or copy the package again"
    ) -> InputError:
        return InputError(
            str(self.path),
            actual,
            "a whole MIL weight file of storage version 2",
            next_step,
        )

    def array(self, offset: int, shape: tuple[int, ...]) -> np.ndarray:
        """The blob whose record starts at `offset`, as an array of `shape`; sub-byte
        types one value per element."""
        if offset % 64 or offset + 64 > len(self.data):
            raise self._bad(
                f"a blob record at offset {offset} of {len(self.data)} bytes"
            )
        record = self.data[offset : offset + 64]
        sentinel, code = record[:8].view(np.uint32).tolist()
        size, start = record[8:24].view(np.uint64).tolist()
        name = CODES[code - 1] if 0 < code <= len(CODES) else ""
        if sentinel != SENTINEL or name not in NUMPY:
            raise self._bad(f"no blob record at offset {offset}")
        if start + size > len(self.data):
            raise self._bad(
                f"a blob of {size} bytes at {start}, past the end of {len(self.data)} bytes "
                "(truncated)"
            )
        dtype, count = np.dtype(NUMPY[name]), int(np.prod(shape, dtype=object))
        bits = DTYPE_BITS.get(name, 8 * dtype.itemsize)
        needed = (count * bits + 7) // 8
        if needed > size:
            raise self._bad(
                f"a blob of {size} bytes where shape {list(shape)} needs {needed}"
            )
        payload = self.data[start : start + needed]
        if bits < 8:
            values = unpack_bits(payload, bits, count, signed=dtype == np.int8)
            return values.reshape(shape)
        return payload.view(dtype).reshape(shape)
