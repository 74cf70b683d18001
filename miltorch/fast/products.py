"""Products with stored weights: 1×1 convolutions as matrix products that read their fp16 or int8 weights as they are."""

from dataclasses import dataclass

import numpy as np
import torch

from miltorch.fast import tiles
from miltorch.fast.matching import PatternGraph, need
from miltorch.ops.convolution import FEW_COLUMNS
from miltorch.ops.linear import panel_product
from miltorch.program import Op, Ref


@dataclass
class Linear:
    """x [B, K, T, 1] or [B, K, 1, T] → [B, R, ...] by a weight [R, K] as `tiles.product` takes it; in pieces of R where
    `widths` are given."""

    weight: np.ndarray
    scale: np.ndarray
    bias: torch.Tensor | None
    widths: list[int] | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        rows = x.flatten(2).transpose(1, 2).reshape(-1, x.shape[1])
        if len(rows) < FEW_COLUMNS:
            y = tiles.product(self.weight, self.scale, rows)
        elif self.weight.dtype == np.uint16:
            y = panel_product(rows.float(), torch.from_numpy(self.weight.view(np.float16)))
        else:
            scale = torch.from_numpy(self.scale)[:, None]
            y = panel_product(rows.float(), torch.from_numpy(self.weight), scale)
        y = (y if self.bias is None else y + self.bias).half()
        y = (
            y.reshape(x.shape[0], -1, len(self.weight))
            .transpose(1, 2)
            .reshape(x.shape[0], -1, *x.shape[2:])
        )
        return y if self.widths is None else y.split(self.widths, 1)


def together(linears: list[Linear]) -> Linear:
    """Products of one input as one, weights out of their file: a larger matrix in large pages is read faster, and one call
    costs less than several."""
    biases, widths = [one.bias for one in linears], [len(one.weight) for one in linears]
    weight, scale = (
        np.concatenate([getattr(one, part) for one in linears]) for part in ("weight", "scale")
    )
    return Linear(
        weight,
        scale,
        None if biases[0] is None else torch.cat(biases),
        widths if len(widths) > 1 else None,
    )


def linear_pattern(graph: PatternGraph, op: Op):
    """A 1×1 convolution, over [B, K, T, 1] or [B, K, 1, T], with constant fp16 or int8 weights."""
    x = op.inputs["x"]
    need(
        graph.attribute(op, "pad_type", "valid") in ("valid", "custom")
        and not any(graph.attribute(op, "pad", []))
    )
    need(max(graph.attribute(op, "strides", [1])) == graph.attribute(op, "groups", 1) == 1)
    bias = need(graph.constant(op.inputs["bias"])) if "bias" in op.inputs else None
    weight, scale = _int8_weight(graph, op.inputs["weight"]) or _half_weight(
        graph, op.inputs["weight"]
    )
    need(bias is None or bias.shape == (len(weight),))
    need(isinstance(x, Ref) and len(graph.shape_of(x)) == 4)
    return [(Linear(weight, scale, bias), [x.name], None)]


def _half_weight(graph: PatternGraph, source) -> tuple[np.ndarray, np.ndarray]:
    """A constant [R, K, 1, 1] as fp16."""
    weight = graph.literal(source)
    if not isinstance(weight, np.ndarray) or weight.dtype != np.float16:
        weight = need(graph.constant(source)).half().numpy()
        graph.folded.pop(getattr(source, "name", None), None)
    need(weight.shape[2:] == (1, 1))
    return weight.reshape(len(weight), -1).view(np.uint16), np.ones(len(weight), np.float32)


def _int8_weight(graph: PatternGraph, source) -> tuple[np.ndarray, np.ndarray] | None:
    """Symmetric int8 data [R, K, 1, 1] scaled per tensor or per row; None for any other compression."""
    op = graph.producer(source)
    if (
        op is None
        or op.kind != "constexpr_blockwise_shift_scale"
        or op.inputs.keys() != {"data", "scale"}
    ):
        return None
    data, scale = (np.asarray(graph.literal(op.inputs[name])) for name in ("data", "scale"))
    if op.outputs[0][1].dtype != "FLOAT16" or data.dtype != np.int8 or data.shape[2:] != (1, 1):
        return None
    if scale.shape not in ((1, 1, 1, 1), (len(data), 1, 1, 1)):
        return None
    graph.dense[source.name] = torch.Size(data.shape)
    scale = np.ascontiguousarray(np.broadcast_to(scale.reshape(-1).astype(np.float32), len(data)))
    return data.reshape(len(data), -1), scale
