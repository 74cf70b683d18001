"""What both the export and the runtime need of `.aimodel` folders: how weights are
stored in them, and which numbers of tokens their programs take.

`main.mlirb` holds a weight as the same bytes as a Core ML package. The bundle's
manifest says where they are; this text is the *place* of the weight, one part after
another: `data:int8[64,64,1,1]@4096 scale:fp16[64,1,1,1]@512`."""

import importlib
import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np

from miltorch.blob import unpack_bits
from workbench.bundle import Options
from workbench.errors import InputError

PROGRAM = "main.mlirb"
PART = re.compile(r"(\w+):(fp|int|uint)(\d+)\[([\d,]*)\]@(\d+)")
# the other dtypes have fewer than 8 bits and are stored without padding
NUMPY = {"fp16": np.float16, "fp32": np.float32, "int8": np.int8, "uint8": np.uint8}


def import_apple(name: str) -> ModuleType:
    """Imports a module of `coreai-core` or `coreai-torch`.

    Raises:
        InputError: they are not installed, as on platforms that have none.
    """
    try:
        # about the version of torch that it was made for
        with warnings.catch_warnings(action="ignore"):
            return importlib.import_module(name)
    except ImportError as problem:
        raise InputError(
            "Core AI",
            f"no package {problem.name or name}",
            "coreai-core and coreai-torch",
            "install workbench-coreai on Linux (x86-64) or macOS (arm64)",
        ) from problem


def fixed_t(options: Options) -> int | None:
    """The number of tokens of every call of a program; None if its axis T is free.

    With one token a call, too, the axis is free: see `trace.trace`."""
    return options.t_max if options.fixed_sizes and options.t_max > 1 else None


@dataclass(frozen=True)
class StoredPart:
    """One array of a weight in `main.mlirb`, written `data:int8[64,64,1,1]@4096`.

    Attributes:
        role: `val`, or `data` and `scale`, or `indices` and `lut`.
        kind, bits: of one value: fp16 and fp32, or signed (`int`) and unsigned (`uint`)
            integers of at most 8 bits.
        offset: of its first byte in the file.
    """

    role: str
    kind: str
    bits: int
    shape: tuple[int, ...]
    offset: int

    def __str__(self) -> str:
        sizes = ",".join(map(str, self.shape))
        return f"{self.role}:{self.dtype}[{sizes}]@{self.offset}"

    @property
    def dtype(self) -> str:
        return f"{self.kind}{self.bits}"

    def read(self, program: np.ndarray) -> np.ndarray:
        """The values [shape] in the bytes of `main.mlirb`.

        Raises:
            ValueError: the part ends beyond the file.
        """
        count = math.prod(self.shape)
        size = (count * self.bits + 7) // 8
        stored = np.array(program[self.offset :][:size])
        if self.dtype in NUMPY:
            values = stored.view(NUMPY[self.dtype])
        else:
            is_signed = self.kind == "int"
            values = unpack_bits(stored, self.bits, count, signed=is_signed)
        return values.reshape(self.shape)


def parse_place(place: str) -> list[StoredPart]:
    """The parts that a place names; the reverse of `format_place`.

    Raises:
        ValueError: it names none.
    """
    parts = [
        StoredPart(
            role, kind, int(bits), tuple(map(int, sizes.split(","))), int(offset)
        )
        for role, kind, bits, sizes, offset in PART.findall(place)
    ]
    if not parts:
        raise ValueError(f"no part of a program: {place!r}")
    return parts


def format_place(parts: Sequence[StoredPart]) -> str:
    """The place of a weight of these parts, as the manifest holds it."""
    return " ".join(map(str, parts))


def read_weight(package: Path, place: str) -> dict[str, np.ndarray]:
    """Role → the array of that part, one element per stored value.

    Raises:
        ValueError: a place that names no parts, or a part beyond the file.
    """
    program = np.memmap(package / PROGRAM, np.uint8, "r")
    return {part.role: part.read(program) for part in parse_place(place)}


def dense(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """The values of the weight that its stored arrays represent, by role: fp16(integer
    · scale), or entries of the table of each group of rows."""
    if "val" in arrays:
        return arrays["val"]
    if "lut" in arrays:
        indices, lut = arrays["indices"], arrays["lut"]
        tables = lut.reshape(len(lut), -1)
        rows_per_table = len(indices) // len(tables)
        table_of_row = np.arange(len(indices)) // rows_per_table
        table = table_of_row.reshape(-1, *[1] * (indices.ndim - 1))
        return tables[table, indices]
    data, scale = arrays["data"], arrays["scale"]
    # one scale serves a block of this shape
    block = [size // count for size, count in zip(data.shape, scale.shape)]
    return (np.kron(scale, np.ones(block, np.float32)) * data).astype(np.float16)
