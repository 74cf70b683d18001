"""Weights of 1×1 convolutions as a package stores them, and their products: fp16,
symmetric int8, int4 in blocks, codes of lookup tables. A weight of any other form
becomes fp16."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Self

import numpy as np
import torch

from miltorch.constants import Constants
from miltorch.graph import Graph
from miltorch.ops.sums import panel_product
from miltorch.program import Argument

# rows of activations for which a compiled kernel reads stored weights; more rows meet
# panels of float32, which torch multiplies faster
FEW_ROWS = 8
# entries of the smallest table that is stored; codes into it have four bits, and two of them
# fit into a byte
SMALL_TABLE = 16


@cache
def kernels() -> ModuleType:
    """The compiled products; numba takes a moment to import."""
    return import_module("miltorch.kernels")


class StoredWeight:
    """A weight [R, K]."""

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """Its arrays in the order in which its kernel takes them; the first begins with
        an axis of R."""
        raise NotImplementedError

    def __len__(self) -> int:
        """R."""
        return len(self.arrays[0])

    @property
    def columns(self) -> int:
        """K."""
        raise NotImplementedError

    @property
    def form(self) -> tuple:
        """Equal for weights that `concatenated` can join."""
        layouts = [(array.dtype, array.shape[1:]) for array in self.arrays]
        return type(self), *layouts

    @classmethod
    def concatenated(cls, weights: Sequence[Self]) -> Self:
        """The rows of weights of one form as one weight, in memory of its own."""
        arrays = zip(*(weight.arrays for weight in weights), strict=True)
        return cls(*map(np.concatenate, arrays))

    def __getitem__(self, rows: slice) -> torch.Tensor:
        """Some rows of the weight as floating-point values."""
        raise NotImplementedError

    def kernel(self) -> Callable:
        """The compiled product with such a weight."""
        raise NotImplementedError

    def product(self, x: torch.Tensor, bias: np.ndarray) -> torch.Tensor:
        """x [N, K] fp16, bias [R] float32 → fp16 [N, R]: summed with the bias in
        float32, rounded once."""
        x = x.float().contiguous()
        if len(x) > FEW_ROWS:
            return panel_product(x, self).add_(torch.from_numpy(bias)).half()
        out = np.empty((len(x), len(self)), np.uint16)
        kernels().run(self.kernel(), *self.arrays, x.numpy(), bias, out)
        return torch.from_numpy(out.view(np.float16))


@dataclass(frozen=True, eq=False)
class HalfWeight(StoredWeight):
    """fp16 values."""

    bits: np.ndarray  # uint16 [R, K], the bits of fp16 values

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return (self.bits,)

    @property
    def columns(self) -> int:
        return self.bits.shape[1]

    def __getitem__(self, rows: slice) -> torch.Tensor:
        return torch.from_numpy(self.bits[rows].view(np.float16))

    def kernel(self) -> Callable:
        return kernels().multiply_fp16


@dataclass(frozen=True, eq=False)
class Int8Weight(StoredWeight):
    """int8 values with one scale for each row."""

    values: np.ndarray  # int8 [R, K]
    scale: np.ndarray  # float32 [R, 1]

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.values, self.scale

    @property
    def columns(self) -> int:
        return self.values.shape[1]

    def __getitem__(self, rows: slice) -> torch.Tensor:
        values = torch.from_numpy(self.values[rows])
        return scaled_blocks(values, torch.from_numpy(self.scale[rows]))

    def kernel(self) -> Callable:
        return kernels().multiply_int8


@dataclass(frozen=True, eq=False)
class Int4Weight(StoredWeight):
    """Codes hold the values plus 8: byte k of a row has that of column k in its low
    half, that of column k + K / 2 in its high half."""

    codes: np.ndarray  # uint8 [R, K / 2]
    scale: np.ndarray  # float32 [R, blocks]

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.codes, self.scale

    @property
    def columns(self) -> int:
        return 2 * self.codes.shape[1]

    def __getitem__(self, rows: slice) -> torch.Tensor:
        codes = torch.from_numpy(self.codes[rows])
        values = torch.cat([codes & 15, codes >> 4], 1).float().sub_(8)
        return scaled_blocks(values, torch.from_numpy(self.scale[rows]))

    def kernel(self) -> Callable:
        return kernels().multiply_int4


@dataclass(frozen=True, eq=False)
class TableWeight(StoredWeight):
    """Codes of up to 8 bits into lookup tables of groups of rows; see `kernels.dense`.
    A byte has one code or, with tables of `SMALL_TABLE` entries, two."""

    codes: np.ndarray  # uint8 [R, K / codes_per_byte]
    table_of_row: np.ndarray  # int32 [R], an index into `tables`
    tables: np.ndarray  # uint32 [P, entries], the bits of float32 values
    codes_per_byte: int

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.codes, self.table_of_row, self.tables

    @property
    def columns(self) -> int:
        return self.codes.shape[1] * self.codes_per_byte

    @property
    def form(self) -> tuple:
        return *super().form, self.codes_per_byte

    @classmethod
    def concatenated(cls, weights: Sequence[Self]) -> Self:
        codes = np.concatenate([weight.codes for weight in weights])
        tables = np.concatenate([weight.tables for weight in weights])
        first_tables = np.cumsum([0, *(len(weight.tables) for weight in weights)])
        table_of_row = np.concatenate(
            [
                weight.table_of_row + first
                for weight, first in zip(weights, first_tables)
            ]
        )
        return cls(codes, table_of_row, tables, weights[0].codes_per_byte)

    def __getitem__(self, rows: slice) -> torch.Tensor:
        codes = self.codes[rows]
        out = np.empty((len(codes), self.columns), np.float32)
        kernels().run(kernels().dense, codes, self.table_of_row[rows], self.tables, out)
        return torch.from_numpy(out)

    def kernel(self) -> Callable:
        return kernels().multiply_table


def scaled_blocks(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """values [R, K] times scale [R, blocks], one scale for K / blocks columns, float32."""
    blocks = values.float().unflatten(1, (scale.shape[1], -1))
    return blocks.mul_(scale[..., None]).flatten(1)


def stored_weight(
    argument: Argument | None, graph: Graph, constants: Constants
) -> StoredWeight | None:
    """The constant fp16 weight [R, K, 1, 1] that an argument names, as it is stored;
    None for anything else."""
    op, weight = graph.producer(argument), None
    if op is None or not op.is_constant or op.outputs[0][1].dtype != "FLOAT16":
        return None
    if op.kind in FORMS:
        operands = {name: graph.literal(value) for name, value in op.inputs.items()}
        if all(isinstance(operand, np.ndarray) for operand in operands.values()):
            weight = FORMS[op.kind](**operands)
    if weight is None:
        half = constants.compute_uncached(argument.name)
        if half.dim() == 4 and half.shape[2:] == (1, 1):
            weight = HalfWeight(half.flatten(1).numpy().view(np.uint16))
    return weight


def integer_weight(
    data: np.ndarray, scale: np.ndarray, **others
) -> Int8Weight | Int4Weight | None:
    """The weight of a `constexpr_blockwise_shift_scale` of symmetric integers scaled per
    tensor or row, or of int4 in blocks along K; None for one of another form."""
    if others or data.ndim != 4 or data.shape[2:] != (1, 1) or scale.ndim != 4:
        return None
    (R, K), (parts, blocks) = data.shape[:2], scale.shape[:2]
    if data.dtype != np.int8 or scale.dtype != np.float16 or parts not in (1, R):
        return None
    scale = np.broadcast_to(np.float32(scale.reshape(parts, -1)), (R, blocks)).copy()
    data = data.reshape(R, K)
    if blocks == 1:
        return Int8Weight(data, scale)
    if K % 2 or K % blocks or data.min() < -8 or data.max() > 7:
        return None
    codes = (data + 8).view(np.uint8)
    return Int4Weight(codes[:, : K // 2] | codes[:, K // 2 :] << 4, scale)


def table_weight(indices: np.ndarray, lut: np.ndarray, **others) -> TableWeight | None:
    """The weight of a `constexpr_lut_to_dense` whose tables [P, 1, 1, 1, entries, 1]
    stand for equal parts of R; None for one of another form."""
    if others or indices.ndim != 4 or indices.shape[2:] != (1, 1):
        return None
    if lut.dtype != np.float16 or lut.ndim != 6 or not lut.size:
        return None
    parts, entries, R = len(lut), lut.shape[4], len(indices)
    if lut.size != parts * entries or entries > 256 or R % parts:
        return None
    # the operation refuses such indices, the kernels would read past a table
    if indices.max(initial=0) >= entries:
        return None
    table_of_row = np.repeat(np.arange(parts, dtype=np.int32), R // parts)
    # one size for all small tables, so that their weights can be joined
    values = np.zeros((parts, max(entries, SMALL_TABLE)), np.float32)
    values[:, :entries] = lut.reshape(parts, entries)
    codes, codes_per_byte = indices.reshape(R, -1).astype(np.uint8), 1
    if entries <= SMALL_TABLE and codes.shape[1] % 2 == 0:
        # column 2k in the low half of byte k, column 2k + 1 in its high half
        codes, codes_per_byte = codes[:, ::2] | codes[:, 1::2] << 4, 2
    return TableWeight(codes, table_of_row, values.view(np.uint32), codes_per_byte)


# operations that decompress a weight → what reads it as it is stored
FORMS = {
    "constexpr_blockwise_shift_scale": integer_weight,
    "constexpr_lut_to_dense": table_weight,
}
