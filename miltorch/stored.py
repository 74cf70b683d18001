"""Weights of 1×1 convolutions as they are stored, and their products: fp16, symmetric
int8, int4 in blocks, indices of lookup tables. A weight of any other form becomes fp16."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from miltorch.ops.linear import PANEL, wide_linear
from miltorch.program import Op

# rows of activations for which a kernel reads stored weights; more meet panels of
# float32
FEW = 8


@dataclass
class Stored:
    """A weight [R, K]: its arrays in the order in which `kernels.NAME` takes them."""

    arrays: tuple[np.ndarray, ...]
    kernel: ClassVar[str]

    def __len__(self) -> int:
        return len(self.arrays[0])

    @property
    def form(self) -> tuple:
        """Weights of equal forms can be joined."""
        return self.kernel, *[(each.dtype, each.shape[1:]) for each in self.arrays]

    @classmethod
    def joined(cls, parts: list["Stored"]) -> "Stored":
        return cls(tuple(map(np.concatenate, zip(*(each.arrays for each in parts)))))

    def dense(self, own: slice) -> torch.Tensor:
        """Rows of the weight as float32."""
        raise NotImplementedError

    def product(self, x: torch.Tensor, bias: np.ndarray) -> torch.Tensor:
        """x [N, K] fp16 → fp16 [N, R]: summed with the bias in float32, rounded once."""
        if len(x) <= FEW:
            from miltorch import kernels  # numba takes a moment to import

            out = np.empty((len(x), len(self)), np.uint16)
            wide = x.float().contiguous().numpy()
            kernels.product(self.kernel, *self.arrays, wide, bias, out)
            return torch.from_numpy(out.view(np.float16))
        x, rows = x.float().contiguous(), -(-PANEL // x.shape[1])
        y = x.new_empty(len(x), len(self))
        for start in range(0, len(self), rows):
            own = slice(start, start + rows)
            y[:, own] = wide_linear(x, self.dense(own))
        return y.add_(torch.from_numpy(bias)).half()


class Half(Stored):
    """fp16 as bits."""

    kernel = "fp16"

    def dense(self, own):
        return torch.from_numpy(self.arrays[0][own].view(np.float16)).float()


class Int8(Stored):
    """int8 [R, K] by scale [R] float32."""

    kernel = "int8"

    def dense(self, own):
        weight, scale = (torch.from_numpy(each[own]) for each in self.arrays)
        return weight.float().mul_(scale[:, None])


class Int4(Stored):
    """Codes [R, K / 2] and scale [R, blocks], see `kernels.int4`."""

    kernel = "int4"

    def dense(self, own):
        codes, scale = (torch.from_numpy(each[own]) for each in self.arrays)
        values = torch.cat([codes & 15, codes >> 4], 1).float().sub_(8)
        blocks = values.view(*scale.shape, -1)
        return blocks.mul_(scale[..., None]).view(values.shape)


class Codes(Stored):
    """Codes [R, bytes] of 4 bits (two a byte) or of up to 8 (one a byte), the table of
    each row, and the tables; see `kernels.dense`."""

    kernel = "lookup"

    @classmethod
    def joined(cls, parts):
        codes, which, tables = zip(*(each.arrays for each in parts))
        firsts = np.cumsum([0, *map(len, tables)])
        which = [each + first for each, first in zip(which, firsts)]
        return cls(tuple(map(np.concatenate, (codes, which, tables))))

    def dense(self, own):
        from miltorch import kernels  # numba takes a moment to import

        codes, which, tables = self.arrays
        width = tables.dtype.itemsize // 4 * codes.shape[1]
        out = np.empty((len(codes[own]), width), np.float32)
        arrays = codes[own], which[own], tables, out
        kernels.on_threads(torch.get_num_threads(), kernels.dense, *arrays)
        return torch.from_numpy(out)


def together(weights: list[Stored]) -> Stored:
    """Weights of one form as one, in memory of its own."""
    return type(weights[0]).joined(weights)


class Linear:
    """x [B, K, T, 1] or [B, K, 1, T] fp16 → one plane [B, R, …] for every width R."""

    def __init__(self, weight: Stored, bias: np.ndarray, widths: list[int]):
        self.weight, self.bias, self.widths = weight, bias, widths

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        B, K, *plane = x.shape
        if x.numel() == B * K:
            y = self.weight.product(x.view(B, K), self.bias)
        else:
            rows = x.flatten(2).transpose(1, 2).reshape(-1, K)
            y = self.weight.product(rows, self.bias)
            y = y.view(B, -1, len(self.weight)).transpose(1, 2)
        return y.reshape(B, -1, *plane).split(self.widths, 1)


def stored_weight(source, producers: dict[str, Op], constants):
    """The constant fp16 weight [R, K, 1, 1] that an argument names; None for anything
    else."""
    op = producers.get(getattr(source, "name", None))
    if op is None or not op.constant or op.outputs[0][1].dtype != "FLOAT16":
        return None
    operands = {}
    if op.kind != "const":
        for name, each in op.inputs.items():
            producer = producers.get(getattr(each, "name", None))
            if producer is None or producer.kind != "const":
                operands[name] = each
            else:
                operands[name] = producer.inputs.get("val")
    stored = FORMS.get(op.kind, lambda **_: None)
    weight = None
    if operands.keys() in ({"data", "scale"}, {"indices", "lut"}):
        if all(isinstance(each, np.ndarray) for each in operands.values()):
            weight = stored(**operands)
    if weight is not None:
        return weight
    half = constants.once(source)
    if half.dim() != 4 or half.shape[2:] != (1, 1):
        return None
    return Half((half.flatten(1).numpy().view(np.uint16),))


def _integers(data: np.ndarray, scale: np.ndarray) -> Int8 | Int4 | None:
    """Symmetric integers scaled per tensor or row, or int4 in blocks along K."""
    if data.ndim != 4 or data.shape[2:] != (1, 1) or scale.ndim != 4:
        return None
    (R, K), (parts, blocks) = data.shape[:2], scale.shape[:2]
    if data.dtype != np.int8 or scale.dtype != np.float16 or parts not in (1, R):
        return None
    scale = np.broadcast_to(np.float32(scale.reshape(parts, -1)), (R, blocks))
    data = data.reshape(R, K)
    if blocks == 1:
        return Int8((data, np.ascontiguousarray(scale[:, 0])))
    if K % 2 or K % blocks or data.min() < -8 or data.max() > 7:
        return None
    codes = (data + 8).view(np.uint8)
    return Int4((codes[:, : K // 2] | codes[:, K // 2 :] << 4, scale.copy()))


def _indices(indices: np.ndarray, lut: np.ndarray) -> Codes | None:
    """Indices of tables [P, 1, 1, 1, entries, 1] for equal parts of R."""
    if indices.ndim != 4 or indices.shape[2:] != (1, 1) or lut.dtype != np.float16:
        return None
    parts, entries, R = len(lut), lut.shape[-2], len(indices)
    if lut.shape != (parts, 1, 1, 1, entries, 1) or R % parts:
        return None
    values = np.zeros((parts, 256), np.float32)
    values[:, :entries] = lut.reshape(parts, entries)
    which = np.repeat(np.arange(parts, dtype=np.int32), R // parts)
    codes = indices.reshape(R, -1).astype(np.uint8)
    if entries > 16 or codes.shape[1] % 2:
        return Codes((codes, which, values.view(np.uint32)))
    byte = np.arange(256)
    pairs = np.stack([values[:, byte & 15], values[:, byte >> 4]], -1)
    codes = codes[:, ::2] | codes[:, 1::2] << 4
    return Codes((codes, which, pairs.view(np.uint64)[..., 0]))


FORMS = {
    "constexpr_blockwise_shift_scale": _integers,
    "constexpr_lut_to_dense": _indices,
}
