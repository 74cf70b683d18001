"""Weights in the files of `.aimodel` folders.

`main.mlirb` holds a weight as the same bytes as a Core ML package. The manifest names
its parts, `data:int8[64,64,1,1]@4096 scale:fp16[64,1,1,1]@512`: role, dtype, shape and
first byte of each."""

import importlib
import math
import re
import warnings
from pathlib import Path
from types import ModuleType

import numpy as np

from miltorch.blob import unpack_bits
from workbench.bundle import Options
from workbench.errors import InputError

PROGRAM = "main.mlirb"
PART = re.compile(r"(\w+):(\w+)\[([\d,]*)\]@(\d+)")
NUMPY = {"fp16": np.float16, "fp32": np.float32, "int8": np.int8, "uint8": np.uint8}


def apple(name: str) -> ModuleType:
    """A module of `coreai-core` or `coreai-torch`, imported.

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


def size_of_t(options: Options) -> int:
    """The axis T in a program: -1 for a free one, which one token a call needs too (see
    `template`)."""
    return options.t_max if options.fixed_sizes and options.t_max > 1 else -1


def read_weight(package: Path, text: str) -> dict[str, np.ndarray]:
    """Role (`val`; `data`, `scale`; `indices`, `lut`) → array, one element per stored
    value.

    Raises:
        ValueError: a text that names no parts, or a part beyond the file.
    """
    program = np.memmap(package / PROGRAM, np.uint8, "r")
    parts = {}
    for role, dtype, sizes, offset in PART.findall(text):
        shape = tuple(map(int, sizes.split(",")))
        count, bits = math.prod(shape), int(dtype.strip("fpuint"))
        values = np.array(program[int(offset) :][: (count * bits + 7) // 8])
        if dtype in NUMPY:
            values = values.view(NUMPY[dtype])
        else:
            values = unpack_bits(values, bits, count, signed=dtype[0] == "i")
        parts[role] = values.reshape(shape)
    if not parts:
        raise ValueError(f"no part of a program: {text!r}")
    return parts


def dense(parts: dict[str, np.ndarray]) -> np.ndarray:
    """The weight that its parts represent: fp16(integer · scale), or entries of the
    table of each group of rows."""
    if "val" in parts:
        return parts["val"]
    if "lut" in parts:
        indices, lut = parts["indices"], parts["lut"]
        tables = lut.reshape(len(lut), -1)
        rows = np.arange(len(indices)) // (len(indices) // len(tables))
        group = rows.reshape(-1, *[1] * (indices.ndim - 1))
        return tables[group, indices]
    data, scale = parts["data"], parts["scale"]
    block = [size // count for size, count in zip(data.shape, scale.shape)]
    return (np.kron(scale, np.ones(block, np.float32)) * data).astype(np.float16)
