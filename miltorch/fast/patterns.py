"""Patterns of operations that the decode path recognises, and what replaces each. See
`matching.PatternGraph` for what a pattern returns."""

from functools import partial
from operator import methodcaller

import numpy as np

from miltorch.fast import attention, kernels, machine
from miltorch.fast.matching import PatternGraph, need
from miltorch.fast.products import linear_pattern
from miltorch.ops.convolution import FEW_COLUMNS
from miltorch.program import Op, Ref

# the operand x of the last product in the models' `RMSNorm`: y·(1 / √(mean y² + eps)),
# with y = x / peak
NORM = (
    "mul",
    "y",
    (
        "gains:scalars",
        (
            "rsqrt",
            (
                "add",
                ("reduce_mean", ("mul", "y", "y")),
                (
                    "mul",
                    ("factors0:scalars", ("real_div", "eps0", "peak")),
                    ("factors1:scalars", ("real_div", "eps1", "peak")),
                ),
            ),
        ),
    ),
)
PEAK = "clip", ("reduce_max", ("abs", "x"))
# the first two operands of a rotary embedding's concat
ROTATED = (
    ("sub", ("mul", "a", "cos"), ("mul", "b", "sin")),
    ("add", ("mul", "b", "cos"), ("mul", "a", "sin")),
)
ATTENTION = (
    "attended:matmul",
    (
        "reshape?",
        (
            "softmax",
            ("add", ("reshape?", ("matmul", "q", ("key:read_state",))), "mask"),
        ),
    ),
    ("value:read_state",),
)


def reshape_pattern(graph: PatternGraph, op: Op):
    """A reshape to sizes that are known but for one."""
    shape = need(graph.constant(op.inputs["shape"])).tolist()
    need(isinstance(op.inputs["x"], Ref) and 0 not in shape)
    return [(methodcaller("reshape", shape), [op.inputs["x"].name], None)]


def rms_norm_pattern(graph: PatternGraph, op: Op):
    """x over its peak and over the root of its mean square, by weight: `RMSNorm` of the
    models, found at its last product."""
    weight = need(graph.constant(op.inputs["y"]))
    parts = graph.match(op.inputs["x"], NORM, {})
    graph.match(parts["y"], ("real_div", "x", "peak"), parts)
    graph.match(parts["peak"], PEAK, parts)
    x, mean, largest = parts["x"], parts["reduce_mean"], parts["reduce_max"]
    axes = graph.attribute(mean, "axes")
    need(graph.attribute(largest, "axes") == axes and len(axes) == 1)
    need(graph.attribute(largest, "keep_dims") and graph.attribute(mean, "keep_dims"))
    shape, axis = [1] * weight.dim(), axes[0] % weight.dim()
    shape[axis] = weight.numel()
    declared = graph.shape_of(x)
    need(list(weight.shape) == shape and len(declared) == weight.dim())
    need(declared[axis] == weight.numel())
    low = graph.attribute(parts["clip"], "alpha")
    high = graph.attribute(parts["clip"], "beta")
    need(isinstance(x, Ref) and low > 0)
    tiny = graph.attribute(parts["rsqrt"], "epsilon", 1e-12)
    eps0, eps1 = (need(graph.constant(parts[name])) for name in ("eps0", "eps1"))
    constants = [
        np.ascontiguousarray(weight.flatten().numpy()),
        np.float32([low, high, tiny]),
        np.float32([eps0.item(), *parts["factors0"]]),
        np.float32([eps1.item(), *parts["factors1"]]),
        np.float32(parts["gains"]),
    ]
    return [(partial(_rms_norm, axis, constants), [x.name], None)]


def _rms_norm(axis, constants, x):
    width = x.shape[axis]
    if x.numel() == width:
        return kernels.rms_norm_rows(x.reshape(1, -1), *constants).reshape(x.shape)
    rows = x.movedim(axis, -1)
    y = kernels.rms_norm_rows(rows.reshape(-1, width), *constants)
    return y.reshape(rows.shape).movedim(-1, axis)


def rotation(graph: PatternGraph, op: Op):
    """Rotary embedding: (a·cos − b·sin, b·cos + a·sin, rest) for the slices a, b, rest
    of x [B, H, T, D]."""
    first, second, *rest = op.inputs["values"]
    need(len(rest) < 2 and graph.attribute(op, "axis") in (-1, 3))
    need(not graph.attribute(op, "interleave", False))
    parts = graph.match(second, ROTATED[1], graph.match(first, ROTATED[0], {}))
    a, b, cos, sin = (parts[name] for name in ("a", "b", "cos", "sin"))
    start, x = 0, need(graph.half(a, "slice_by_index")).inputs["x"]
    *_, width = graph.shape_of(x)
    for source in (a, b, *rest):
        piece = need(graph.half(source, "slice_by_index"))
        end = start + graph.shape_of(source)[-1]
        need(piece.inputs["x"] == x and _columns(graph, piece, width) == (start, end))
        start = end
    batch, half = need(graph.shape_of(x)[0]), graph.shape_of(a)[-1]
    need(start == width and graph.shape_of(b)[-1] == half)
    for table in (cos, sin):
        shape = graph.shape_of(table)
        need(table.name in graph.program.inputs)
        need(shape[:2] + shape[3:] == (batch, 1, half))
    return [(kernels.rotate, [x.name, cos.name, sin.name], None)]


def cache_write(graph: PatternGraph, op: Op):
    """write_state of state·(1 − Σ mask) + mask @ rows, whole or through a slice_update
    that covers the state."""
    source, state = op.inputs["data"], op.inputs["input"]
    update = graph.half(source, "slice_update")
    if update is not None:
        shape = update.outputs[0][1].shape
        need(_slice_window(graph, update, shape) == [(0, None)] * len(shape))
        source = update.inputs["update"]
    rest, placement = _operands(graph, need(graph.half(source, "add")), "mul", "matmul")
    old, left = _operands(graph, rest, "read_state", "sub")
    total = need(graph.half(left.inputs["y"], "reduce_sum"))
    need("x" not in _transposed(graph, placement) and old.inputs["input"] == state)
    need(_only_read(graph, old, op, {id(o) for o in (rest, update, op)}))
    mask, rows = placement.inputs["x"], placement.inputs["y"]
    need(isinstance(mask, Ref) and isinstance(rows, Ref))
    need(mask.name in graph.program.inputs and total.inputs["x"] == mask)
    need(graph.attribute(total, "axes") in ([-1], [3]))
    need(graph.attribute(total, "keep_dims") and graph.attribute(left, "x") == 1)
    transposed = bool(_transposed(graph, placement))
    (B, H, S, D), heads, columns = map(graph.shape_of, (state, rows, mask))
    need(len(heads) == len(columns) == 4 and columns[:3] == (B, 1, S))
    width = heads[2] if transposed else heads[3]
    need(heads[:2] == (B, H) and width == D)
    places, write = f"{mask.name}.rows", partial(_write_rows, transposed)
    return [
        (_write_positions, [mask.name], places),
        (write, [state.name, mask.name, places, rows.name], None),
    ]


def _only_read(graph: PatternGraph, read: Op, write: Op, inside: set[int]) -> bool:
    """Whether `read` is the one read of a state before `write`, for the operations
    `inside` alone: rows are written in place, where the state's earlier value would
    change under any other reader."""
    for op in graph.readers(read.inputs["input"].name):
        if graph.order[op.key] < graph.order[write.key] and op is not read:
            return False
    readers = graph.readers(read.outputs[0][0])
    return all(id(op) in inside for op in readers)


def _write_positions(mask):
    return kernels.one_hot_rows(mask[:, 0])


def _write_rows(transposed, cell, mask, places, rows):
    """Writes rows [B, H, T, D] into the state [B, H, S, D]: at the places that the mask
    names, or by the formula itself."""
    if transposed:
        rows = rows.transpose(-1, -2)
    if places is not None:
        kernels.write_rows(cell.value.numpy(), places, rows.float().numpy())
        return ()
    mask = mask.float()
    rest = (cell.value * (1 - mask.sum(-1, keepdim=True).half().float())).half().float()
    cell.value = (rest + (mask @ rows.float()).half().float()).half().float()
    return ()


def attention_pattern(graph: PatternGraph, op: Op):
    """softmax(q @ kᵀ + mask) @ v over two states, heads of a group side by side; found
    at its last product."""
    parts = graph.match(Ref(op.key), ATTENTION, {})
    q, mask = parts["q"], parts["mask"]
    need(not _transposed(graph, op) and _transposed(graph, parts["matmul"]) == "y")
    need(graph.attribute(parts["softmax"], "axis", -1) in (-1, 3))
    need(mask.name in graph.program.inputs)
    need(graph.settled(parts["key"]) and graph.settled(parts["value"]))
    key, value = parts["key"].inputs["input"], parts["value"].inputs["input"]
    B, H, S, D = graph.shape_of(key)
    heads, columns = graph.shape_of(q), graph.shape_of(mask)
    need(graph.shape_of(value) == (B, H, S, D) and len(heads) == len(columns) == 4)
    need(heads[:2] + heads[3:] == (B, H, D) and columns[:2] + columns[3:] == (B, 1, S))
    span = f"{mask.name}.span"
    operands = [q.name, key.name, value.name, mask.name, span]
    return [(_span, [mask.name], span), (_attend_visible, operands, None)]


def _span(mask):
    """First and last + 1 of the columns that some query sees, and these columns of the
    mask for many queries."""
    first, last = kernels.visible(mask.flatten(0, 2), kernels.BLOCKED)
    return first, last, _lanes(mask[..., first:last])


def _lanes(mask):
    B, _, T, _ = mask.shape
    if B * T < FEW_COLUMNS:
        return None
    return attention.lanes_of(mask[:, 0])


def _attend_visible(q, key, value, mask, span):
    """q [B, H_kv, G·T, D], states [B, H_kv, S, D], mask [B, 1, T, S] → [B, H_kv, G·T,
    D]."""
    (first, last, lanes), (_, _, T, S) = span, mask.shape
    key, value = key.value, value.value
    if lanes is None:
        return machine.attend(q, key, value, mask[:, 0]).half()
    out, extreme = attention.attend_prompt(q, key, value, lanes, first, T)
    if extreme > kernels.EXTREME and last - first < S:
        out, _ = attention.attend_prompt(q, key, value, _lanes(mask), 0, T)
    return out.half()


def _operands(graph: PatternGraph, op: Op, first: str, second: str) -> tuple[Op, Op]:
    """The producers of a two-operand operation, in the order of the kinds asked for."""
    x, y = need(graph.half(op.inputs["x"])), need(graph.half(op.inputs["y"]))
    if x.kind == second:
        x, y = y, x
    need(x.kind == first and y.kind == second)
    return x, y


def _transposed(graph: PatternGraph, op: Op) -> str:
    """The names of the operands that a product transposes."""
    return "".join(x for x in "xy" if graph.attribute(op, f"transpose_{x}", False))


def _slice_window(graph: PatternGraph, op: Op, shape) -> list[tuple]:
    """(begin, end) of each axis that a slice with unit strides takes from `shape`; an
    axis taken whole reads (0, None)."""
    rank = len(shape)
    begin = list(need(graph.attribute(op, "begin")))
    end = list(need(graph.attribute(op, "end")))
    open_begin = graph.attribute(op, "begin_mask", [False] * rank)
    open_end = graph.attribute(op, "end_mask", [False] * rank)
    need(graph.attribute(op, "stride", [1] * rank) == [1] * rank)
    need(not any(graph.attribute(op, "squeeze_mask", [False])))
    need(len(begin) == len(end) == len(open_begin) == len(open_end) == rank)
    for axis, size in enumerate(shape):
        if open_begin[axis]:
            begin[axis] = 0
        if open_end[axis] or end[axis] == size:
            end[axis] = None
    return list(zip(begin, end))


def _columns(graph: PatternGraph, op: Op, width: int) -> tuple[int, int]:
    """First and last + 1 of the last axis that a slice of nothing else takes."""
    *others, (first, last) = _slice_window(graph, op, graph.shape_of(op.inputs["x"]))
    need(others == [(0, None)] * len(others))
    if last is None:
        last = width
    return first, last


PATTERNS = (
    ("conv", linear_pattern),
    ("reshape", reshape_pattern),
    ("mul", rms_norm_pattern),
    ("concat", rotation),
    ("write_state", cache_write),
    ("matmul", attention_pattern),
)
