"""Products with stored weights: 1×1 convolutions as matrix products that read their
weights as they are stored: fp16, int8, int4 in blocks, or indices of a lookup table."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from miltorch.fast import integers, packed, tiles
from miltorch.fast.integers import LARGEST
from miltorch.fast.kernels import on_threads
from miltorch.fast.matching import PatternGraph, need
from miltorch.fast.packed import ENTRIES, GROUP, INT4, LUT4, LUT6, Packed
from miltorch.ops.convolution import FEW_COLUMNS
from miltorch.ops.linear import PANEL
from miltorch.program import Op, Ref

LARGE_PAGE = 1 << 21  # bytes; numpy asks the operating system for such pages
LINE = 64  # bytes that a processor reads at once
COMPRESSED = {
    "constexpr_blockwise_shift_scale": ("data", "scale"),
    "constexpr_lut_to_dense": ("indices", "lut"),
}


@dataclass
class Linear:
    """x [B, K, T, 1] or [B, K, 1, T] → [B, R, ...] by a weight [R, K] as
    `tiles.product` takes it, or a packed one, which holds its scales itself; in pieces
    of R where `widths` are given."""

    weight: np.ndarray | Packed
    scale: np.ndarray | None
    bias: torch.Tensor | None
    widths: list[int] | None = None

    @property
    def form(self) -> int:
        """How weights are stored: 1 int8, 2 fp16, or the form of packed ones."""
        if isinstance(self.weight, Packed):
            return self.weight.form
        return self.weight.itemsize

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """What a product reads: stored weights, and their scales or tables."""
        if isinstance(self.weight, Packed):
            return self.weight.codes, self.weight.scale
        return self.weight, self.scale

    @cached_property
    def table(self) -> np.ndarray | None:
        """What a product in integers reads beside int8 `arrays`, see
        `integers.table`."""
        if self.form == 1:
            return integers.table(self.weight.shape, self.scale)
        return None

    def __call__(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        rows = x.flatten(2).transpose(1, 2).reshape(-1, x.shape[1])
        if isinstance(self.weight, Packed):
            y = _packed_product(self.weight, rows.float())
        else:
            y = tiles.product(self.weight, self.scale, rows)
        if self.bias is not None:
            y = y + self.bias
        y = y.half().reshape(len(x), -1, self.weight.shape[0]).transpose(1, 2)
        y = y.reshape(len(x), -1, *x.shape[2:])
        if self.widths is None:
            return y
        return y.split(self.widths, 1)


def _packed_product(weight: Packed, rows: torch.Tensor) -> torch.Tensor:
    """rows [N, K] float32 by a packed weight → float32 [N, R]; for many rows some
    weights at a time become dense."""
    if len(rows) < FEW_COLUMNS:
        return packed.product(weight, rows)
    (R, K), N = weight.shape, len(rows)
    step, rows = -(-PANEL // K), tiles.tile_rows(rows)
    out, ones = np.empty((1, R, N), np.float32), np.ones(step, np.float32)
    threads = torch.get_num_threads() > 1
    for start in range(0, R, step):
        panel = packed.dense(weight, start, min(start + step, R)).numpy()
        part = out[:, start : start + step]
        on_threads(tiles.few, panel, ones[: len(panel)], rows, part, threads)
    return torch.from_numpy(out[0].T)


def together(linears: list[Linear]) -> Linear:
    """Products of one input as one, weights out of their file: a larger matrix in large
    pages is read faster, and one call costs less than several."""
    weights = [one.weight for one in linears]
    scale = bias = widths = None
    if isinstance(weights[0], Packed):
        weight = packed.joined(weights)
    else:
        weight = np.concatenate(weights)
        scale = np.concatenate([one.scale for one in linears])
    if linears[0].bias is not None:
        bias = torch.cat([one.bias for one in linears])
    if len(linears) > 1:
        widths = [each.shape[0] for each in weights]
    return Linear(weight, scale, bias, widths)


def in_large_pages(linears: list[Linear]) -> None:
    """Moves the stored weights of a program into one array, where they fill large pages
    of memory: the prefetchers of a processor stop at the end of a page."""
    arrays = [linear.arrays[0] for linear in linears]
    starts = np.cumsum([0, *(-(-array.nbytes // LINE) * LINE for array in arrays)])
    if starts[-1] < LARGE_PAGE:
        return
    memory = np.empty(starts[-1] + LARGE_PAGE, np.uint8)
    memory = memory[-memory.ctypes.data % LARGE_PAGE :]
    for linear, array, start in zip(linears, arrays, starts, strict=False):
        moved = memory[start : start + array.nbytes].view(array.dtype)
        moved = moved.reshape(array.shape)
        moved[...] = array
        if isinstance(linear.weight, Packed):
            linear.weight.codes = moved
        else:
            linear.weight = moved


def linear_pattern(graph: PatternGraph, op: Op):
    """A 1×1 convolution, over [B, K, T, 1] or [B, K, 1, T], with constant weights."""
    x = op.inputs["x"]
    need(graph.attribute(op, "pad_type", "valid") in ("valid", "custom"))
    need(not any(graph.attribute(op, "pad", [])))
    need(max(graph.attribute(op, "strides", [1])) == 1)
    need(graph.attribute(op, "groups", 1) == 1)
    source = op.inputs["weight"]
    weight, scale = (
        _packed_weight(graph, source)
        or _int8_weight(graph, source)
        or _half_weight(graph, source)
    )
    bias = None
    if "bias" in op.inputs:
        bias = need(graph.constant(op.inputs["bias"]))
        need(bias.shape == weight.shape[:1])
    need(isinstance(x, Ref) and len(graph.shape_of(x)) == 4)
    return [(Linear(weight, scale, bias), [x.name], None)]


def _half_weight(graph: PatternGraph, source) -> tuple[np.ndarray, np.ndarray]:
    """A constant [R, K, 1, 1] as fp16."""
    weight = graph.literal(source)
    if not isinstance(weight, np.ndarray) or weight.dtype != np.float16:
        weight = need(graph.constant(source)).half().numpy()
        graph.folded.pop(getattr(source, "name", None), None)
    need(weight.shape[2:] == (1, 1))
    bits = weight.reshape(len(weight), -1).view(np.uint16)
    return bits, np.ones(len(weight), np.float32)


def _int8_weight(graph: PatternGraph, source) -> tuple[np.ndarray, np.ndarray] | None:
    """Symmetric int8 data [R, K, 1, 1] scaled per tensor or per row; None for any other
    compression."""
    stored = _stored_weight(graph, source)
    if stored is None or stored[0] != "constexpr_blockwise_shift_scale":
        return None
    _, data, scale = stored
    if (data.dtype, scale.dtype) != (np.int8, np.float16):
        return None
    if data.shape[2:] != (1, 1):
        return None
    if scale.shape not in ((1, 1, 1, 1), (len(data), 1, 1, 1)):
        return None
    # a product that is infinite in fp16 has no kernel; NaN is not below anything
    if not (np.abs(scale.astype(np.float32)) <= LARGEST / 128).all():
        return None
    graph.dense[source.name] = torch.Size(data.shape)
    scale = np.broadcast_to(scale.reshape(-1).astype(np.float32), len(data))
    return data.reshape(len(data), -1), np.ascontiguousarray(scale)


def _stored_weight(graph: PatternGraph, source) -> tuple | None:
    """Kind, values and factors of a compressed fp16 weight without other operands; None
    for any other source."""
    op = graph.producer(source)
    if op is None or op.kind not in COMPRESSED or op.outputs[0][1].dtype != "FLOAT16":
        return None
    names = COMPRESSED[op.kind]
    if op.inputs.keys() != set(names):
        return None
    values, factors = (np.asarray(graph.literal(op.inputs[name])) for name in names)
    return op.kind, values, factors


def _packed_weight(graph: PatternGraph, source) -> tuple[Packed, None] | None:
    """int4 [R, K, 1, 1] with scales of blocks along K, or indices of up to 6 bits of
    tables for equal parts of R, whose values are scalars; None for any other
    compression, and for a K that is no multiple of what is packed together."""
    stored = _stored_weight(graph, source)
    if stored is None:
        return None
    kind, values, factors = stored
    if values.ndim != 4 or values.shape[2:] != (1, 1) or factors.dtype != np.float16:
        return None
    (R, K), (parts, blocks, *rest) = values.shape[:2], factors.shape
    if rest[:2] != [1, 1]:
        return None
    if kind == "constexpr_blockwise_shift_scale":
        form = INT4
        fits = values.dtype == np.int8 and -8 <= values.min() and values.max() < 8
        fits = fits and parts in (1, R) and K % (blocks * GROUP[INT4]) == 0
    else:
        entries, width = rest[2:]
        form = LUT4
        if entries > ENTRIES[LUT4]:
            form = LUT6
        fits = entries <= ENTRIES[form] and blocks == width == 1
        fits = fits and R % parts == 0 and parts < 1 << 16
    if not fits or K % GROUP[form]:
        return None
    graph.dense[source.name] = torch.Size(values.shape)
    return packed.pack(values.reshape(R, K), factors.reshape(parts, -1), form), None
