"""Products with stored weights: 1×1 convolutions as matrix products that read their
weights as they are stored: fp16, int8, int4 in blocks, or indices of a lookup table."""

from dataclasses import dataclass

import numpy as np
import torch

from miltorch.fast import packed, tiles
from miltorch.fast.matching import PatternGraph, need
from miltorch.fast.packed import ENTRIES, GROUP, INT4, LUT4, LUT6, Packed
from miltorch.fast.rounding import LARGEST
from miltorch.ops.convolution import FEW_COLUMNS
from miltorch.ops.linear import PANEL, _wide_linear, panel_product
from miltorch.program import Op, Ref

LARGE_PAGE = 1 << 21  # bytes; numpy asks the operating system for such pages
LINE = 64  # bytes that a processor reads at once


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
        return (
            self.weight.form
            if isinstance(self.weight, Packed)
            else self.weight.itemsize
        )

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """What a product reads: stored weights, and their scales or tables."""
        if isinstance(self.weight, Packed):
            return self.weight.codes, self.weight.scale
        return self.weight, self.scale

    def __call__(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        rows = x.flatten(2).transpose(1, 2).reshape(-1, x.shape[1])
        if isinstance(self.weight, Packed):
            y = _packed_product(self.weight, rows.float())
        elif len(rows) < FEW_COLUMNS:
            y = tiles.product(self.weight, self.scale, rows)
        elif self.weight.dtype == np.uint16:
            y = panel_product(
                rows.float(), torch.from_numpy(self.weight.view(np.float16))
            )
        else:
            scale = torch.from_numpy(self.scale)[:, None]
            y = panel_product(rows.float(), torch.from_numpy(self.weight), scale)
        y = (y if self.bias is None else y + self.bias).half()
        y = (
            y.reshape(x.shape[0], -1, self.weight.shape[0])
            .transpose(1, 2)
            .reshape(x.shape[0], -1, *x.shape[2:])
        )
        return y if self.widths is None else y.split(self.widths, 1)


def _packed_product(weight: Packed, rows: torch.Tensor) -> torch.Tensor:
    """rows [N, K] float32 by a packed weight → float32 [N, R]; for many rows some
    weights at a time become dense."""
    if len(rows) < FEW_COLUMNS:
        return packed.product(weight, rows)
    (R, K), rows = weight.shape, rows.contiguous()
    step = -(-PANEL // K)
    panels = (
        packed.dense(weight, start, min(start + step, R)) for start in range(0, R, step)
    )
    return torch.cat([_wide_linear(rows, panel) for panel in panels], 1)


def together(linears: list[Linear]) -> Linear:
    """Products of one input as one, weights out of their file: a larger matrix in large
    pages is read faster, and one call costs less than several."""
    biases, widths = (
        [one.bias for one in linears],
        [one.weight.shape[0] for one in linears],
    )
    if isinstance(linears[0].weight, Packed):
        weight, scale = packed.joined([one.weight for one in linears]), None
    else:
        weight, scale = (
            np.concatenate([getattr(one, part) for one in linears])
            for part in ("weight", "scale")
        )
    return Linear(
        weight,
        scale,
        None if biases[0] is None else torch.cat(biases),
        widths if len(widths) > 1 else None,
    )


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
    need(
        graph.attribute(op, "pad_type", "valid") in ("valid", "custom")
        and not any(graph.attribute(op, "pad", []))
    )
    need(
        max(graph.attribute(op, "strides", [1]))
        == graph.attribute(op, "groups", 1)
        == 1
    )
    bias = need(graph.constant(op.inputs["bias"])) if "bias" in op.inputs else None
    source = op.inputs["weight"]
    weight, scale = (
        _packed_weight(graph, source)
        or _int8_weight(graph, source)
        or _half_weight(graph, source)
    )
    need(bias is None or bias.shape == weight.shape[:1])
    need(isinstance(x, Ref) and len(graph.shape_of(x)) == 4)
    return [(Linear(weight, scale, bias), [x.name], None)]


def _half_weight(graph: PatternGraph, source) -> tuple[np.ndarray, np.ndarray]:
    """A constant [R, K, 1, 1] as fp16."""
    weight = graph.literal(source)
    if not isinstance(weight, np.ndarray) or weight.dtype != np.float16:
        weight = need(graph.constant(source)).half().numpy()
        graph.folded.pop(getattr(source, "name", None), None)
    need(weight.shape[2:] == (1, 1))
    return weight.reshape(len(weight), -1).view(np.uint16), np.ones(
        len(weight), np.float32
    )


def _int8_weight(graph: PatternGraph, source) -> tuple[np.ndarray, np.ndarray] | None:
    """Symmetric int8 data [R, K, 1, 1] scaled per tensor or per row; None for any other
    compression."""
    op = graph.producer(source)
    if (
        op is None
        or op.kind != "constexpr_blockwise_shift_scale"
        or op.inputs.keys() != {"data", "scale"}
    ):
        return None
    data, scale = (
        np.asarray(graph.literal(op.inputs[name])) for name in ("data", "scale")
    )
    if (
        op.outputs[0][1].dtype != "FLOAT16"
        or data.dtype != np.int8
        or data.shape[2:] != (1, 1)
    ):
        return None
    if scale.shape not in ((1, 1, 1, 1), (len(data), 1, 1, 1)):
        return None
    # a product that is infinite in fp16 has no kernel; NaN is not below anything
    if not (np.abs(scale.astype(np.float32)) <= LARGEST / 128).all():
        return None
    graph.dense[source.name] = torch.Size(data.shape)
    scale = np.ascontiguousarray(
        np.broadcast_to(scale.reshape(-1).astype(np.float32), len(data))
    )
    return data.reshape(len(data), -1), scale


def _packed_weight(graph: PatternGraph, source) -> tuple[Packed, None] | None:
    """int4 [R, K, 1, 1] with scales of blocks along K, or indices of up to 6 bits of
    tables for equal parts of R, whose values are scalars; None for any other
    compression, and for a K that is no multiple of what is packed together."""
    op = graph.producer(source)
    operands = {
        "constexpr_blockwise_shift_scale": {"data", "scale"},
        "constexpr_lut_to_dense": {"indices", "lut"},
    }.get(op.kind if op else None)
    if (
        op is None
        or op.inputs.keys() != operands
        or op.outputs[0][1].dtype != "FLOAT16"
    ):
        return None
    values, factors = (
        np.asarray(graph.literal(op.inputs[name])) for name in sorted(operands)
    )
    if values.ndim != 4 or values.shape[2:] != (1, 1) or factors.dtype != np.float16:
        return None
    (R, K), (parts, blocks, *rest) = values.shape[:2], factors.shape
    if rest[:2] != [1, 1]:
        return None
    if op.kind == "constexpr_blockwise_shift_scale":
        form = INT4 if -8 <= values.min() and values.max() < 8 else None
        fits = (
            values.dtype == np.int8
            and parts in (1, R)
            and K % (blocks * GROUP[INT4]) == 0
        )
    else:
        entries, width = rest[2:]
        form = next((form for form in (LUT4, LUT6) if entries <= ENTRIES[form]), None)
        fits = blocks == width == 1 and R % parts == 0 and parts < 1 << 16
    if form is None or not fits or K % GROUP[form]:
        return None
    graph.dense[source.name] = torch.Size(values.shape)
    return packed.pack(values.reshape(R, K), factors.reshape(parts, -1), form), None
