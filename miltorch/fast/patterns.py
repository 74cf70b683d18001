"""Forms that the decode path recognises in a program, and what stands for each. See `graph.Graph` for what a form returns."""

from dataclasses import dataclass
from functools import partial
from operator import methodcaller

import numpy as np
import torch
import torch.nn.functional as F

from miltorch.fast import kernels
from miltorch.graph import Graph, need
from miltorch.ops.convolution import FEW_COLUMNS
from miltorch.ops.state import StateCell
from miltorch.program import Op, Ref

BLOCKED = -1e4  # an additive mask at or below this gives a weight of exactly 0 beside any attended column


def linear_pattern(graph: Graph, op: Op):
    """A 1×1 convolution, over [B, K, T, 1] or [B, K, 1, T], with constant fp16 or int8 weights."""
    padded = graph.attribute(op, "pad_type", "valid") not in ("valid", "custom") or any(graph.attribute(op, "pad", []))
    strided = max(graph.attribute(op, "strides", [1])) != 1 or graph.attribute(op, "groups", 1) != 1
    need(_is_half(op) and isinstance(op.inputs["x"], Ref) and not padded and not strided)
    bias = need(graph.constant(op.inputs["bias"])) if "bias" in op.inputs else None
    weight, scale = _int8_weight(graph, op.inputs["weight"]) or _half_weight(graph, op.inputs["weight"])
    need(bias is None or bias.shape == (len(weight),))
    need(len(graph.types[op.inputs["x"].name].shape) == 4)
    return [(Linear(weight, scale, bias), [op.inputs["x"].name], None)]


@dataclass
class Linear:
    """x [B, K, T, 1] or [B, K, 1, T] → [B, R, ...] by a weight [R, K] as `kernels.product` takes it; in pieces of R where
    `widths` are given."""

    weight: np.ndarray
    scale: np.ndarray
    bias: torch.Tensor | None
    widths: list[int] | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        y = self._product(x)
        return y if self.widths is None else y.split(self.widths, 1)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() == x.shape[1]:
            y = kernels.product(self.weight, self.scale, x.reshape(1, -1))
            return self._biased(y).reshape(1, -1, 1, 1)
        rows = x.flatten(2).transpose(1, 2).reshape(-1, x.shape[1])
        if self.weight.dtype == np.uint16 and len(rows) >= FEW_COLUMNS:
            y = F.linear(rows.float(), torch.from_numpy(self.weight.view(np.float16)).float())
        else:
            y = kernels.product(self.weight, self.scale, rows)
        y = self._biased(y)
        return y.reshape(x.shape[0], -1, y.shape[-1]).transpose(1, 2).reshape(x.shape[0], -1, *x.shape[2:])

    def _biased(self, y: torch.Tensor) -> torch.Tensor:
        return (y if self.bias is None else y + self.bias).half()


def together(linears: list[Linear]) -> Linear:
    """Products of one input as one, weights out of their file: a larger matrix in large pages is read faster, and one call
    costs less than several."""
    biases, widths = [one.bias for one in linears], [len(one.weight) for one in linears]
    return Linear(*(np.concatenate([getattr(one, part) for one in linears]) for part in ("weight", "scale")),
                  None if biases[0] is None else torch.cat(biases), widths if len(widths) > 1 else None)  # fmt: skip


def _half_weight(graph: Graph, source) -> tuple[np.ndarray, np.ndarray]:
    """A constant [R, K, 1, 1] as fp16."""
    op = graph.producer(source)
    stored = op.inputs["val"] if op is not None and op.kind == "const" else source
    if not isinstance(stored, np.ndarray) or stored.dtype != np.float16:
        stored = need(graph.constant(source)).half().numpy()
        graph.folded.pop(getattr(source, "name", None), None)
    need(stored.shape[2:] == (1, 1))
    return stored.reshape(len(stored), -1).view(np.uint16), np.ones(len(stored), np.float32)


def _int8_weight(graph: Graph, source) -> tuple[np.ndarray, np.ndarray] | None:
    """Symmetric int8 data [R, K, 1, 1] scaled per tensor or per row; None for any other compression."""
    op = graph.producer(source, "constexpr_blockwise_shift_scale")
    if op is None or op.inputs.keys() != {"data", "scale"} or not _is_half(op):
        return None
    stored = [graph.made[s.name].inputs["val"] if isinstance(s, Ref) else s for s in (op.inputs["data"], op.inputs["scale"])]
    data, scale = (np.asarray(s) for s in stored)
    if data.dtype != np.int8 or data.shape[2:] != (1, 1) or scale.shape not in ((1, 1, 1, 1), (len(data), 1, 1, 1)):
        return None
    graph.dense[source.name] = torch.Size(data.shape)
    scale = np.ascontiguousarray(np.broadcast_to(scale.reshape(-1).astype(np.float32), len(data)))
    return data.reshape(len(data), -1), scale


def reshape_pattern(graph: Graph, op: Op):
    """A reshape to sizes that are known but for one."""
    shape = need(graph.constant(op.inputs["shape"])).tolist()
    need(isinstance(op.inputs["x"], Ref) and 0 not in shape)
    return [(methodcaller("reshape", shape), [op.inputs["x"].name], None)]


def rms_norm_pattern(graph: Graph, op: Op):
    """x over its peak and over the root of its mean square, by weight: `RMSNorm` of the models, found at its last product."""
    weight, scaled = need(graph.constant(op.inputs["y"])), graph.maker(op.inputs["x"], "mul")
    root, gains = _factors(graph, scaled.inputs["y"])
    total = graph.maker(graph.maker(root, "rsqrt").inputs["x"], "add")
    mean, eps = graph.maker(total.inputs["x"], "reduce_mean"), graph.maker(total.inputs["y"], "mul")
    square, y = graph.maker(mean.inputs["x"], "mul"), graph.maker(scaled.inputs["x"], "real_div")
    clip = graph.maker(y.inputs["y"], "clip")
    largest = graph.maker(clip.inputs["x"], "reduce_max")
    x, axes = graph.maker(largest.inputs["x"], "abs").inputs["x"], graph.attribute(mean, "axes")
    bounds = [graph.attribute(clip, name) for name in ("alpha", "beta")]
    same = square.inputs["x"] == square.inputs["y"] == scaled.inputs["x"] and x == y.inputs["x"] and isinstance(x, Ref)
    need(same and _is_half(op) and graph.attribute(largest, "axes") == axes and len(axes) == 1)
    need(graph.attribute(largest, "keep_dims") and graph.attribute(mean, "keep_dims"))
    shape, axis = [1] * weight.dim(), axes[0] % weight.dim()
    shape[axis] = weight.numel()
    need(list(weight.shape) == shape and bounds[0] > 0)
    declared = graph.types[x.name].shape
    need(len(declared) == weight.dim() and declared[axis] == weight.numel())
    parts = []
    for side in (eps.inputs["x"], eps.inputs["y"]):
        quotient, factors = _factors(graph, side)
        quotient = graph.maker(quotient, "real_div")
        need(quotient.inputs["y"] == y.inputs["y"])
        parts.append(np.float32([need(graph.constant(quotient.inputs["x"])).item(), *factors]))
    tiny = graph.attribute(graph.maker(root, "rsqrt"), "epsilon", 1e-12)
    constants = np.ascontiguousarray(weight.flatten().numpy()), np.float32([*bounds, tiny]), *parts, np.float32(gains)
    return [(partial(_rms_norm, axis, constants), [x.name], None)]


def _rms_norm(axis, constants, x):
    whole = x.numel() == x.shape[axis]
    rows = x.reshape(1, -1) if whole else x.movedim(axis, -1)
    made = kernels.rms_norm_rows(rows.reshape(-1, x.shape[axis]), *constants)
    return made.reshape(x.shape) if whole else made.reshape(rows.shape).movedim(-1, axis)


def rotation(graph: Graph, op: Op):
    """Rotary embedding: (a·cos − b·sin, b·cos + a·sin, rest) for the slices a, b, rest of x [B, H, T, D]."""
    parts = [graph.maker(source, kind) for source, kind in zip(op.inputs["values"], ("sub", "add", "slice_by_index"), strict=False)]
    need(len(op.inputs["values"]) == len(parts) in (2, 3) and _is_half(op) and graph.attribute(op, "axis") in (-1, 3))
    need(not graph.attribute(op, "interleave", False))
    (a, cos), (b, sin) = (_scalar_product(graph, source) for source in (parts[0].inputs["x"], parts[0].inputs["y"]))
    need([_scalar_product(graph, parts[1].inputs[s]) for s in "xy"] == [(b, cos), (a, sin)])
    slices = [graph.maker(source, "slice_by_index") for source in (a, b)] + parts[2:]
    x, first = slices[0].inputs["x"], 0
    for piece in slices:
        width = graph.types[piece.outputs[0][0]].shape[-1]
        need(piece.inputs["x"] == x and _columns(graph, piece, graph.types[x.name].shape[-1]) == (first, first + width))
        first += width
    half = graph.types[a.name].shape[-1]
    need(first == graph.types[x.name].shape[-1] and graph.types[b.name].shape[-1] == half)
    batch = need(graph.types[x.name].shape[0])
    for name in (cos.name, sin.name):
        need(name in graph.program.inputs and graph.types[name].shape[:2] + graph.types[name].shape[3:] == (batch, 1, half))
    return [(kernels.rotate, [x.name, cos.name, sin.name], None)]


def cache_write(graph: Graph, op: Op):
    """write_state of state·(1 − Σ mask) + mask @ rows, whole or through a slice_update that covers the state."""
    source, update = op.inputs["data"], graph.producer(op.inputs["data"], "slice_update")
    if update is not None:
        need(all(w == (0, None) for w in _slice_window(graph, update, update.outputs[0][1].shape)))
        source = update.inputs["update"]
    kept, placed = _operands(graph, graph.maker(source, "add"), "mul", "matmul")
    old, left = _operands(graph, kept, "read_state", "sub")
    total = graph.maker(left.inputs["y"], "reduce_sum")
    need("x" not in _transposed(graph, placed) and old.inputs["input"] == op.inputs["input"])
    need(_only_read(graph, old, op, {id(o) for o in (kept, update, op)}))
    mask, rows = placed.inputs["x"], placed.inputs["y"]
    need(isinstance(mask, Ref) and isinstance(rows, Ref) and mask.name in graph.program.inputs)
    need(total.inputs["x"] == mask and graph.attribute(total, "axes") in ([-1], [3]) and graph.attribute(total, "keep_dims"))
    need(graph.attribute(left, "x") == 1)
    transposed = bool(_transposed(graph, placed))
    B, H, S, D = graph.program.states[op.inputs["input"].name].shape
    heads = graph.types[rows.name].shape
    need(heads[:2] + (heads[2 if transposed else 3],) == (B, H, D) and len(heads) == 4)
    need(graph.types[mask.name].shape[:3] == (B, 1, S) and len(graph.types[mask.name].shape) == 4)
    slots, write = f"{mask.name}.slots", partial(_write_rows, transposed)
    return [(_write_positions, [mask.name], slots), (write, [op.inputs["input"].name, mask.name, slots, rows.name], None)]


def _only_read(graph: Graph, read: Op, write: Op, inside: set[int]) -> bool:
    """Whether `read` is the one read of a state before `write`, for the operations `inside` alone: rows are written in
    place, where the state's earlier value would change under any other reader."""
    others = [op for op in graph.readers(read.inputs["input"].name) if graph.order[id(op)] < graph.order[id(write)]]
    return all(op is read for op in others) and all(id(op) in inside for op in graph.readers(read.outputs[0][0]))


def _write_positions(mask):
    return kernels.one_hot_rows(mask[:, 0])


def _write_rows(transposed, cell, mask, slots, rows):
    """Writes rows [B, H, T, D] into the state [B, H, S, D]: those the mask names, or by the formula itself."""
    rows = rows.transpose(-1, -2) if transposed else rows
    if slots is not None:
        kernels.write_rows(cell.value.numpy(), slots, rows.float().numpy())
        return ()
    mask = mask.float()
    kept = (cell.value * (1 - mask.sum(-1, keepdim=True).half().float())).half().float()
    cell.value = (kept + (mask @ rows.float()).half().float()).half().float()
    return ()


def attention_pattern(graph: Graph, op: Op):
    """softmax(q @ kᵀ + mask) @ v over two states, heads of a group side by side; found at its last product."""
    value = graph.maker(op.inputs["y"], "read_state")
    weights = graph.maker(_through(graph, op.inputs["x"]), "softmax")
    masked = graph.maker(weights.inputs["x"], "add")
    scores, mask = graph.maker(_through(graph, masked.inputs["x"]), "matmul"), masked.inputs["y"]
    key = graph.maker(scores.inputs["y"], "read_state")
    need(_is_half(op) and not _transposed(graph, op) and _transposed(graph, scores) == "y")
    need(graph.attribute(weights, "axis", -1) in (-1, 3) and getattr(mask, "name", None) in graph.program.inputs)
    need(all(graph.settled(read) for read in (key, value)))
    span, states = f"{mask.name}.span", [read.inputs["input"].name for read in (key, value)]
    (B, H, S, D), other = (graph.program.states[name].shape for name in states)
    need(other == (B, H, S, D))
    q = graph.types[scores.inputs["x"].name].shape
    need(len(q) == 4 and q[:2] + q[3:] == (B, H, D))
    declared = graph.types[mask.name].shape
    need(len(declared) == 4 and declared[:2] + declared[3:] == (B, 1, S))
    return [(_span, [mask.name], span), (_attend_visible, [scores.inputs["x"].name, *states, mask.name, span], None)]


def _span(mask):
    return kernels.visible(mask.flatten(0, 2), BLOCKED)


def _attend_visible(q, key, value, mask, span):
    """q [B, H_kv, G·T, D], states [B, H_kv, S, D], mask [B, 1, T, S] → [B, H_kv, G·T, D]."""
    (first, last), (B, _, T, S) = span, mask.shape
    key, value = key.value, value.value
    if B == T == 1:
        return kernels.attend(q.reshape(-1, q.shape[-1]), key[0], value[0], mask[0, 0, 0], first, last).half().view(q.shape)
    scores = torch.matmul(q.float(), key[:, :, first:last].transpose(-1, -2)).half()
    masked = scores.view(B, -1, T, last - first) + mask[..., first:last]
    if last - first < S and bool(scores.abs().amax() > kernels.EXTREME.item()):
        return _attend_visible(q, StateCell(key), StateCell(value), mask, (0, S))
    weights = torch.softmax(masked, -1)
    return torch.matmul(weights.view(scores.shape).float(), value[:, :, first:last]).half()


FORMS = (("conv", linear_pattern), ("reshape", reshape_pattern), ("mul", rms_norm_pattern), ("concat", rotation), ("write_state", cache_write),
         ("matmul", attention_pattern))  # fmt: skip


def _is_half(op: Op) -> bool:
    return op.outputs[0][1].dtype == "FLOAT16"


def _factors(graph: Graph, source) -> tuple:
    """`source` without the constant scalars that multiply it one after another, and those, in their order."""
    factors: list[float] = []
    while (product := graph.producer(source, "mul")) is not None:
        factor = graph.constant(product.inputs["y"])
        if not isinstance(factor, torch.Tensor) or factor.numel() != 1:
            break
        factors.insert(0, factor.item())
        source = product.inputs["x"]
    return source, factors


def _scalar_product(graph: Graph, source) -> tuple[Ref, Ref]:
    product = graph.maker(source, "mul")
    need(isinstance(product.inputs["x"], Ref) and isinstance(product.inputs["y"], Ref))
    return product.inputs["x"], product.inputs["y"]


def _operands(graph: Graph, op: Op, first: str, second: str) -> tuple[Op, Op]:
    """The producers of a two-operand operation, in the order of the kinds asked for."""
    made = {p.kind: p for p in (graph.producer(op.inputs["x"]), graph.producer(op.inputs["y"])) if p is not None}
    need(made.keys() == {first, second})
    return made[first], made[second]


def _transposed(graph: Graph, op: Op) -> str:
    return "".join(axis for axis in "xy" if graph.attribute(op, f"transpose_{axis}", False))


def _slice_window(graph: Graph, op: Op, shape) -> list[tuple]:
    """(begin, end) of each axis that a slice with unit strides takes from `shape`; an axis taken whole reads (0, None)."""
    rank = len(shape)
    begin, end = graph.attribute(op, "begin"), graph.attribute(op, "end")
    open_begin, open_end = (graph.attribute(op, f"{side}_mask", [False] * rank) for side in ("begin", "end"))
    need(begin is not None and end is not None and graph.attribute(op, "stride", [1] * rank) == [1] * rank)
    need(not any(graph.attribute(op, "squeeze_mask", [False])))
    return [(0 if o else b, None if p or e == n else e)
            for o, b, p, e, n in zip(open_begin, begin, open_end, end, shape, strict=True)]  # fmt: skip


def _columns(graph: Graph, op: Op, width: int) -> tuple[int, int]:
    """First and last + 1 of the last axis that a slice of nothing else takes."""
    *others, (first, last) = _slice_window(graph, op, graph.types[op.inputs["x"].name].shape)
    need(all(w == (0, None) for w in others))
    return first, width if last is None else last


def _through(graph: Graph, source):
    """What a reshape reshapes, or `source` itself."""
    reshape = graph.producer(source, "reshape")
    return reshape.inputs["x"] if reshape is not None else source
