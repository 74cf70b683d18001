"""Groups of operations of a program as one step each. An operation that fits no group
keeps its own step; `docs/runtime.md` bounds the distance of each group from its plain
steps.

    linear       1×1 convolutions of one input read their weights as they are stored
    cache write  rows are written in place, by a one-hot mask or by a position
    attention    over the rows that some query sees, or over all
    norm         a root mean square norm in float32, rounded once
    rotation     a rotary embedding, rounded as its plain steps"""

from functools import partial

import numpy as np
import torch

from miltorch.fused import (
    attend,
    normed,
    rotated,
    visible,
    write_rows,
    write_slice,
    written_runs,
)
from miltorch.groups import Groups, NoMatch, need
from miltorch.ops.indexing import is_flipped
from miltorch.program import Op, Program, Ref
from miltorch.steps import Constants, Step, python_value
from miltorch.stored import Linear, stored_weight, together

# the last products of the models' RMSNorm: y·(1 / √(mean y² + eps)), y = x / peak
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
# state·(1 − Σ mask) + mask @ rows
PLACED = (
    "add",
    ("mul", ("read_state",), ("sub", "one", ("reduce_sum", "mask"))),
    ("matmul", "mask", "rows"),
)


def fusions(
    program: Program, constants: Constants, reads: str = "used"
) -> tuple[dict[str | int, list[Step]], dict[str, str]]:
    """(key of an operation → the steps that stand in its place, name of an operation
    that looks like part of a group → why it is none).

    Args:
        reads: rows of a cache that attention reads, `all` or `used`.
    """
    if any(op.blocks for op in program.block.ops):
        return {}, {"program": "it has nested blocks"}
    groups = Groups(program, constants, reads)
    for op in groups.ops:
        try:
            if op.kind in PATTERNS:
                PATTERNS[op.kind](groups, op)
        except NoMatch as reason:
            if str(reason):
                groups.unfused[op.name] = f"{op.kind}: {reason}"
    join_linears(groups)
    return groups.steps, groups.unfused


# ---- products


def join_linears(groups: Groups) -> None:
    """Makes one step of all convolutions that read one input, in the place of the
    first."""
    for (x, _), members in groups.linears.items():
        ops, weights, biases = zip(*members, strict=True)
        outputs = [(op.key, torch.float16) for op in ops]
        widths = [len(weight) for weight in weights]
        function = Linear(together(weights), np.concatenate(biases), widths)
        step = Step(ops[0], function, outputs, operands=[("x", x, False)])
        groups.steps |= {op.key: [] for op in ops} | {ops[0].key: [step]}


def linear(groups: Groups, op: Op) -> None:
    x = groups.given(op.inputs.get("x"))
    plain = [
        groups.number(op, "pad_type", "valid") in ("valid", "custom", "same"),
        not any(groups.numbers(op, "pad", [])),
        max(groups.numbers(op, "strides", [1])) == 1,
        groups.number(op, "groups", 1) == 1,
    ]
    need(all(plain), "it has strides, pads or groups")
    weight = need(
        stored_weight(op.inputs.get("weight"), groups.producers, groups.constants),
        "its weight is no matrix of fp16 values",
    )
    bias = np.zeros(len(weight), np.float32)
    if "bias" in op.inputs:
        given = need(groups.constants.of(op.inputs["bias"]), "its bias is computed")
        need(given.shape == bias.shape, "its bias has another shape")
        bias = given.float().numpy()
    groups.shape(x, 4)
    for name in (x.name, op.key):
        need(groups.types[name].dtype == "FLOAT16", "its values are not fp16")
    groups.linears.setdefault((x.name, weight.form), []).append((op, weight, bias))


# ---- caches


def cache_write(groups: Groups, op: Op) -> None:
    """A write of a slice, or of state·(1 − Σ mask) + mask @ rows."""
    update = groups.half(op.inputs.get("data"), "slice_update")
    source = op.inputs.get("data")
    if update is not None:
        if _sliced(groups, op, update):
            return
        source = update.inputs.get("update")
    why = "it writes no rows by a mask or a position"
    try:
        parts = groups.match(source, PLACED, {})
    except NoMatch:
        raise NoMatch(why) from None
    mask, rows, total = parts["mask"], parts["rows"], parts["reduce_sum"]
    inside = [parts["mul"], op, *([update] if update else [])]
    groups.check_only_read(parts["read_state"], op, inside)
    need(mask.name in groups.program.inputs, why)
    one = groups.constants.of(parts["one"])
    need(isinstance(one, torch.Tensor) and one.numel() == 1 and one.item() == 1, why)
    need(groups.numbers(total, "axes") in ([-1], [3]), why)
    need(groups.number(total, "keep_dims"), why)
    need(not groups.number(parts["matmul"], "transpose_x", False), why)
    transposed = groups.number(parts["matmul"], "transpose_y", False)
    B, H, S, D = groups.shape(op.inputs["input"], 4)
    need(groups.shape(mask, 4)[:3] == (B, 1, S), why)
    heads = groups.shape(rows, 4)
    need(heads[:2] == (B, H), why)
    need(heads[2 if transposed else 3] == D, why)
    runs = groups.shared(op, "runs", written_runs, mask)
    write = partial(write_rows, bool(transposed))
    groups.add(op, write, rows=rows, mask=mask)
    *_, step = groups.steps[op.key]
    step.operands += [
        ("cell", op.inputs["input"].name, False),
        ("runs", runs.name, False),
    ]


def _sliced(groups: Groups, op: Op, update: Op) -> bool:
    """Whether a write is one of a slice at a computed position, which then becomes a
    step."""
    if groups.constants.of(update.inputs.get("begin")) is not None:
        return False
    read = need(groups.half(update.inputs.get("x"), "read_state"), "it reads no state")
    groups.check_only_read(read, op, [update])
    need(len(groups.readers(update.key)) == 1, "what it writes is read beside")
    names = ("stride", "begin_mask", "end_mask", "squeeze_mask")
    fixed = {name: groups.numbers(update, name) for name in names}
    need(not is_flipped(fixed["stride"]), "its slice goes backwards")
    rows = groups.given(update.inputs.get("update"))
    groups.add(op, partial(write_slice, **fixed), update=rows)
    (step,) = groups.steps[op.key]
    step.operands.append(("cell", op.inputs["input"].name, False))
    for name in ("begin", "end"):
        value = groups.constants.of(update.inputs.get(name))
        if value is None:
            own = groups.given(update.inputs[name]).name
            step.operands.append((name, own, True))
        else:
            step.constants[name] = python_value(value)
    return True


def attention(groups: Groups, op: Op) -> None:
    """softmax(q @ kᵀ + mask) @ v over two states, heads of a group side by side."""
    weights = op.inputs.get("x")
    if shaped := groups.half(weights, "reshape"):
        weights = shaped.inputs.get("x")
    need(
        groups.half(weights, "softmax")
        and groups.half(op.inputs.get("y"), "read_state")
    )
    why = "no attention over a cache with an additive mask"
    try:
        parts = groups.match(Ref(op.key), ATTENTION, {})
    except NoMatch:
        raise NoMatch(why) from None
    q, mask = groups.given(parts["q"]), groups.given(parts["mask"])
    scores = parts["matmul"]
    for product, flags in ((op, (False, False)), (scores, (False, True))):
        names = ("transpose_x", "transpose_y")
        found = tuple(bool(groups.number(product, n, False)) for n in names)
        need(found == flags, why)
    need(groups.number(parts["softmax"], "axis", -1) in (-1, 3), why)
    need(mask.name in groups.program.inputs, why)
    settled = groups.settled(parts["key"]) and groups.settled(parts["value"])
    need(settled, "a state is written after it is read")
    key, value = (parts[n].inputs.get("input") for n in ("key", "value"))
    B, H, S, D = groups.shape(key, 4)
    heads, columns = groups.shape(q, 4), groups.shape(mask, 4)
    need(groups.shape(value) == (B, H, S, D), why)
    need(heads[:2] == (B, H) and heads[3] == D, why)
    need(columns[:2] + columns[3:] == (B, 1, S), why)
    span = groups.shared(op, "span", partial(visible, groups.reads), mask)
    groups.add(op, attend, q=q, mask=mask)
    *_, step = groups.steps[op.key]
    for parameter, source in (("key", key), ("value", value), ("span", span)):
        step.operands.append((parameter, source.name, False))


# ---- norms and rotations


def rms_norm(groups: Groups, op: Op) -> None:
    """x over its peak and over the root of its mean square, and perhaps by a weight:
    `RMSNorm` of the models, found at its last product."""
    source, weight = Ref(op.key), None
    if groups.half(op.inputs.get("x"), "mul"):
        weight = groups.constants.of(op.inputs.get("y"))
    if isinstance(weight, torch.Tensor) and weight.numel() > 1:
        source = op.inputs["x"]
    else:
        weight = None
    parts = groups.match(source, NORM, {})
    groups.match(parts["y"], ("real_div", "x", "peak"), parts)
    groups.match(parts["peak"], PEAK, parts)
    why = "a norm of another form"
    x, mean, largest = (
        groups.given(parts["x"]),
        parts["reduce_mean"],
        parts["reduce_max"],
    )
    axes, declared = groups.numbers(mean, "axes"), groups.shape(x)
    need(groups.numbers(largest, "axes") == axes and len(axes) == 1, why)
    need(groups.number(largest, "keep_dims"), why)
    need(groups.number(mean, "keep_dims"), why)
    axis = need(range(len(declared))[axes[0]], why)
    width = need(declared[axis], why)
    gains = torch.full((width,), parts["gains"])
    if weight is not None:
        shape = [1] * len(declared)
        shape[axis] = width
        need(list(weight.shape) == shape, why)
        gains *= weight.flatten()
    limits = (
        groups.number(parts["clip"], "alpha"),
        groups.number(parts["clip"], "beta"),
    )
    need(0 < limits[0] < 1e-3 and limits[1] > 6e4, why)
    eps = 1e-12 + parts["factors0"] * parts["factors1"]
    for name in ("eps0", "eps1"):
        factor = groups.constants.of(parts[name])
        need(isinstance(factor, torch.Tensor) and factor.numel() == 1, why)
        eps *= factor.item()
    groups.add(op, partial(normed, axis, gains.numpy(), eps), x=x)


def rotation(groups: Groups, op: Op) -> None:
    """Rotary embedding: (a·cos − b·sin, b·cos + a·sin, rest) for the slices a, b, rest
    of x [B, H, T, D]."""
    values = op.inputs.get("values")
    need(isinstance(values, list) and len(values) in (2, 3))
    parts = groups.match(values[0], ROTATED[0], {})
    parts = groups.match(values[1], ROTATED[1], parts)
    why = "a rotation of another form"
    need(groups.number(op, "axis") in (-1, 3), why)
    need(not groups.number(op, "interleave", False), why)
    x, widths = None, []
    for source in (parts["a"], parts["b"], *values[2:]):
        piece = need(groups.half(source, "slice_by_index"), why)
        x = x or groups.given(piece.inputs.get("x"))
        need(piece.inputs["x"] == x, why)
        width = need(groups.shape(source)[-1], why)
        start = sum(widths)
        need(_last_axis(groups, piece) == (start, start + width), why)
        widths.append(width)
    cos, sin = groups.given(parts["cos"]), groups.given(parts["sin"])
    need(sum(widths) == groups.shape(x)[-1] and widths[0] == widths[1], why)
    for table in (cos, sin):
        need(table.name in groups.program.inputs, why)
        need(groups.shape(table)[-1] == widths[0], why)
    groups.add(op, partial(rotated, widths), x=x, cos=cos, sin=sin)


def _last_axis(groups: Groups, op: Op) -> tuple[int, int]:
    """First and last + 1 of the last axis that a slice of nothing else takes."""
    sizes = groups.shape(op.inputs["x"])
    rank = len(sizes)
    begin, end = groups.numbers(op, "begin"), groups.numbers(op, "end")
    open_begin = groups.numbers(op, "begin_mask", [False] * rank)
    open_end = groups.numbers(op, "end_mask", [False] * rank)
    need(groups.numbers(op, "stride", [1] * rank) == [1] * rank)
    need(not any(groups.numbers(op, "squeeze_mask", [False])))
    for axis in range(rank - 1):
        need(open_begin[axis] or begin[axis] == 0)
        need(open_end[axis] or end[axis] == sizes[axis])
    return (0 if open_begin[-1] else begin[-1], sizes[-1] if open_end[-1] else end[-1])


PATTERNS = {
    "concat": rotation,
    "conv": linear,
    "matmul": attention,
    "mul": rms_norm,
    "write_state": cache_write,
}
