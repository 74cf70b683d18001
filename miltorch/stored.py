"""Weights of 1×1 convolutions as they are stored, and their products: fp16, symmetric
int8, int4 in blocks, indices of lookup tables. A weight of any other form becomes fp16."""

import numpy as np
import torch

from miltorch.graph import Graph
from miltorch.ops.sums import panel_product

# rows of activations for which a kernel reads stored weights; more meet panels of
# float32
FEW = 8


class Stored:
    """A weight [R, K]: its arrays, which a product of `kernels` takes."""

    def __init__(self, kernel: str, *arrays: np.ndarray):
        self.kernel, self.arrays = kernel, arrays
        # weights of equal forms can be joined
        self.form = kernel, *[(each.dtype, each.shape[1:]) for each in arrays]

    def __len__(self) -> int:
        return len(self.arrays[0])

    @property
    def columns(self) -> int:
        return self.arrays[0].shape[1] * (2 if self.kernel == "int4" else 1)

    @classmethod
    def joined(cls, weights: list["Stored"]) -> "Stored":
        """Weights of one form as one, in memory of its own."""
        arrays = zip(*(each.arrays for each in weights), strict=True)
        return cls(weights[0].kernel, *map(np.concatenate, arrays))

    def __getitem__(self, rows: slice) -> torch.Tensor:
        """Rows of the weight as floats."""
        if self.kernel == "fp16":
            return torch.from_numpy(self.arrays[0][rows].view(np.float16))
        values, scale = (torch.from_numpy(each[rows]) for each in self.arrays)
        if self.kernel == "int4":
            values = torch.cat([values & 15, values >> 4], 1).float().sub_(8)
        blocks = values.float().unflatten(1, (scale.shape[1], -1))
        return blocks.mul_(scale[..., None]).flatten(1)

    def product(self, x: torch.Tensor, bias: np.ndarray) -> torch.Tensor:
        """x [N, K] fp16 → fp16 [N, R]: summed with the bias in float32, rounded once."""
        x = x.float().contiguous()
        if len(x) > FEW:
            return panel_product(x, self).add_(torch.from_numpy(bias)).half()
        from miltorch import kernels  # numba takes a moment to import

        out = np.empty((len(x), len(self)), np.uint16)
        kernel = getattr(kernels, self.kernel)
        kernels.run(kernel, *self.arrays, x.numpy(), bias, out)
        return torch.from_numpy(out.view(np.float16))


class Codes(Stored):
    """Codes [R, bytes] of 4 bits (two a byte) or of up to 8 (one a byte), the table of
    each row, and the tables; see `kernels.dense`."""

    @classmethod
    def joined(cls, weights):
        codes, which, tables = zip(*(each.arrays for each in weights), strict=True)
        firsts = np.cumsum([0, *map(len, tables)])
        which = [each + first for each, first in zip(which, firsts)]
        return cls("lookup", *map(np.concatenate, (codes, which, tables)))

    @property
    def columns(self) -> int:
        codes, _, tables = self.arrays
        return codes.shape[1] * (tables.dtype.itemsize // 4)  # two codes a byte, or one

    def __getitem__(self, rows):
        from miltorch import kernels  # numba takes a moment to import

        codes, which, tables = self.arrays
        out = np.empty((len(codes[rows]), self.columns), np.float32)
        kernels.run(kernels.dense, codes[rows], which[rows], tables, out)
        return torch.from_numpy(out)


class Linear:
    """x [B, K, T, 1] or [B, K, 1, T] fp16 → one plane [B, R, …] for each of the
    `weights` [R, K], which are of one form."""

    def __init__(self, weights: list[Stored], biases: list[np.ndarray]):
        self.widths = list(map(len, weights))
        self.weight = weights[0].joined(weights)
        self.bias = np.concatenate(biases)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        B, K, *plane = x.shape
        if K != self.weight.columns:  # a kernel would read beyond x
            raise ValueError(f"{K} channels for a weight of {self.weight.columns}")
        rows = x if x.numel() == B * K else x.flatten(2).mT
        y = self.weight.product(rows.reshape(-1, K), self.bias)
        y = y.view(B, -1, len(self.weight)).mT
        return y.reshape(B, -1, *plane).split(self.widths, 1)


def stored_weight(source, graph: Graph, constants) -> Stored | None:
    """The constant fp16 weight [R, K, 1, 1] that an argument names; None for anything
    else."""
    op, weight = graph.producer(source), None
    if op is None or not op.constant or op.outputs[0][1].dtype != "FLOAT16":
        return None
    if op.kind in FORMS:
        operands = {name: graph.literal(each) for name, each in op.inputs.items()}
        if all(isinstance(each, np.ndarray) for each in operands.values()):
            weight = FORMS[op.kind](**operands)
    if weight is None:
        half = constants[source.name]
        del constants.values[source.name]  # the weight is kept as a product reads it
        if half.dim() == 4 and half.shape[2:] == (1, 1):
            weight = Stored("fp16", half.flatten(1).numpy().view(np.uint16))
    return weight


def integers(data: np.ndarray, scale: np.ndarray, **others) -> Stored | None:
    """Symmetric integers scaled per tensor or row, or int4 in blocks along K."""
    if others or data.ndim != 4 or data.shape[2:] != (1, 1) or scale.ndim != 4:
        return None
    (R, K), (parts, blocks) = data.shape[:2], scale.shape[:2]
    if data.dtype != np.int8 or scale.dtype != np.float16 or parts not in (1, R):
        return None
    scale = np.broadcast_to(np.float32(scale.reshape(parts, -1)), (R, blocks)).copy()
    data = data.reshape(R, K)
    if blocks == 1:
        return Stored("int8", data, scale)
    if K % 2 or K % blocks or data.min() < -8 or data.max() > 7:
        return None
    codes = (data + 8).view(np.uint8)
    return Stored("int4", codes[:, : K // 2] | codes[:, K // 2 :] << 4, scale)


def indices(indices: np.ndarray, lut: np.ndarray, **others) -> Codes | None:
    """Indices of tables [P, 1, 1, 1, entries, 1] for equal parts of R."""
    if others or indices.ndim != 4 or indices.shape[2:] != (1, 1):
        return None
    if lut.dtype != np.float16 or lut.ndim != 6 or not lut.size:
        return None
    parts, entries, R = len(lut), lut.shape[4], len(indices)
    if lut.size != parts * entries or entries > 256 or R % parts:
        return None
    if indices.max(initial=0) >= entries:  # the operation refuses them
        return None
    values = np.zeros((parts, 256), np.float32)
    values[:, :entries] = lut.reshape(parts, entries)
    which = np.repeat(np.arange(parts, dtype=np.int32), R // parts)
    codes = indices.reshape(R, -1).astype(np.uint8)
    if entries > 16 or codes.shape[1] % 2:
        return Codes("lookup", codes, which, values.view(np.uint32))
    byte = np.arange(256)
    pairs = np.stack([values[:, byte & 15], values[:, byte >> 4]], -1)
    codes = codes[:, ::2] | codes[:, 1::2] << 4
    return Codes("lookup", codes, which, pairs.view(np.uint64)[..., 0])


FORMS = {"constexpr_blockwise_shift_scale": integers, "constexpr_lut_to_dense": indices}
