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
# dtype code in the record → (storage dtype, bits per element)
DTYPES = {
    1: (np.float16, 16),
    2: (np.float32, 32),
    3: (np.uint8, 8),
    4: (np.int8, 8),
    5: (None, 16),
    6: (np.int16, 16),
    7: (np.uint16, 16),
    8: (np.int8, 4),
    9: (np.uint8, 1),
    10: (np.uint8, 2),
    11: (np.uint8, 4),
    12: (np.uint8, 3),
    13: (np.uint8, 6),
    14: (np.int32, 32),
    15: (np.uint32, 32),
}


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
        if sentinel != SENTINEL or code not in DTYPES or DTYPES[code][0] is None:
            raise self._bad(f"no blob record at offset {offset}")
        if start + size > len(self.data):
            raise self._bad(
                f"a blob of {size} bytes at {start}, past the end of {len(self.data)} bytes "
                "(truncated)"
            )
        dtype, bits = DTYPES[code]
        count = int(np.prod(shape, dtype=object))
        needed = (count * bits + 7) // 8
        if needed > size:
            raise self._bad(
                f"a blob of {size} bytes where shape {list(shape)} needs {needed}"
            )
        payload = self.data[start : start + needed]
        if bits < 8:
            values = unpack_bits(payload, bits, count, signed=dtype is np.int8)
            return values.reshape(shape)
        return payload.view(dtype).reshape(shape)
