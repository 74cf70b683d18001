"""Groups of operations of a program as one step each. An operation that fits no group
keeps its own step; `docs/runtime.md` bounds the distance of each group from its plain
steps.

    linear       1×1 convolutions of one input read their weights as they are stored
    cache write  rows are written in place, by a one-hot mask or by a position
    attention    over the rows that some query sees, or over all
    norm         a root mean square norm in float32, rounded once
    rotation     a rotary embedding, rounded as its plain steps"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from miltorch import fused
from miltorch.graph import Graph
from miltorch.ops import OPERATIONS
from miltorch.ops.registry import window
from miltorch.program import Op, Program, Ref
from miltorch.steps import Constants, Step, python_value, refusing
from miltorch.stored import Linear, stored_weight

WRITES = "write_state", "coreml_update_state"


class NoMatch(Exception):
    """Operations do not form a group."""


def need(condition) -> None:
    if not condition:
        raise NoMatch


def made_by(kind: str, *operands, **attributes) -> tuple:
    """A pattern of an operation, see `Groups.match`."""
    return kind, operands, attributes


def like(kind: str, *operands) -> tuple:
    """A pattern of an operation of any attributes."""
    return kind, operands, dict.fromkeys(OPERATIONS[kind].attributes, object)


class Groups(Graph):
    """A flat program's operations, and the steps of the groups found so far.

    Attributes:
        steps: key of an operation → the steps that stand in its place.
    """

    def __init__(self, program: Program, constants: Constants, reads: str):
        super().__init__(program)
        self.constants, self.reads = constants, reads
        self.order = {op.key: i for i, op in enumerate(self.ops)}
        self.steps: dict[str | int, list[Step]] = {}
        # of convolutions, by their input and the form of their weight
        self.linears: dict[tuple, list[tuple]] = {}

    def add(self, op: Op, function: Callable, halves: dict, **others: str) -> None:
        """A step in place of `op`, of fp16 values by parameter and the names of
        others."""
        names = {name: self.half(source) for name, source in halves.items()} | others
        outputs = [(self.half(Ref(name)), torch.float16) for name, _ in op.outputs]
        operands = [(parameter, name, False) for parameter, name in names.items()]
        step = Step(op, function, outputs, operands=operands)
        self.steps.setdefault(op.key, []).append(step)

    def shared(self, op: Op, what: str, function: Callable, mask: Ref) -> str:
        """The name of what a function makes of a mask, an input of the program; it is
        computed once, before `op`."""
        need(self.half(mask) in self.program.inputs)
        name = f"{mask.name}.{what}"
        if name not in self.types:
            self.types[name] = self.types[mask.name]
            step = Step(op, function, [(name, None)], operands=[("x", mask.name, 0)])
            self.steps.setdefault(op.key, []).insert(0, step)
        return name

    def half(self, source) -> str:
        """The name of a value that is declared fp16; no literal's."""
        need(isinstance(source, Ref) and source.name in self.types)
        need(self.types[source.name].dtype == "FLOAT16")
        return source.name

    def shape(self, source, rank: int = 4) -> tuple[int | None, ...]:
        """The declared shape of an fp16 value, which must be of a rank."""
        shape = self.types[self.half(source)].shape
        need(len(shape) == rank)
        return shape

    def scalar(self, source) -> float:
        """The value of a constant of one element."""
        value = self.constants.of(source)
        need(isinstance(value, torch.Tensor) and value.numel() == 1)
        return value.item()

    def computed(self, source, kind: str) -> Op | None:
        """The operation of a kind that computes an argument, all of it in fp16."""
        op = self.producer(source)
        if op is None or op.kind != kind or op.constant:
            return None
        return op if all(t.dtype == "FLOAT16" for _, t in op.outputs) else None

    def match(self, source, pattern, parts: dict) -> dict:
        """Binds the parts of `pattern` to the operations that compute `source`.

        A pattern is the name of a value, which stands for one value wherever it occurs;
        a list of patterns, for the first values of a list; or `made_by(kind, patterns of
        operands, attributes)`, for an operation on fp16 values. That is bound to its
        kind or, written `label:kind`, to its label. Two kinds may be absent: `reshape?`,
        and `label:scalars`, the products with constant scalars of one value, bound to
        their product.

        Raises:
            NoMatch: they are other operations.
        """
        if isinstance(pattern, str):
            bound = parts.setdefault(pattern, source)
            need(bound is source or (isinstance(bound, Ref) and bound == source))
            return parts
        if isinstance(pattern, list):
            need(isinstance(source, list) and len(source) >= len(pattern))
            for each, inner in zip(source, pattern):
                self.match(each, inner, parts)
            return parts
        label, _, kind = pattern[0].rpartition(":")
        if kind == "scalars":
            source, parts[label] = self.scaled(source)
            return self.match(source, *pattern[1], parts)
        op = self.computed(source, kind.removesuffix("?"))
        if op is None and kind == "reshape?":
            return self.match(source, *pattern[1], parts)
        need(op is not None)
        return self.match_op(op, pattern, parts)

    def match_op(self, op: Op, pattern: tuple, parts: dict) -> dict:
        """Binds an operation, its attributes and the parts of its operands.

        An attribute in a pattern is a tuple of the constants that it may be, or their
        type (`Ref`: one that is computed); one that the pattern does not name must have
        MIL's default. All are bound as `label.attribute`."""
        named, operands, wanted = pattern
        rule, label = OPERATIONS[op.kind], named.rpartition(":")[0] or op.kind
        parts[label] = op
        need(op.inputs.keys() <= {*rule.operands, *rule.attributes})
        for name, default in rule.attributes.items():
            value, fits = default, wanted.get(name, (default,))
            if name in op.inputs:
                value = python_value(self.constants.of(op.inputs[name]))
                if value is None:  # computed
                    value = op.inputs[name]
                    need(isinstance(value, Ref))
            need(value in fits if isinstance(fits, tuple) else isinstance(value, fits))
            parts[f"{label}.{name}"] = value
        for name, inner in zip(rule.operands, operands):
            self.match(op.inputs.get(name), inner, parts)
        return parts

    def scaled(self, source) -> tuple:
        """`source` without the constant scalars that multiply it one after another, and
        their product."""
        gain = 1.0
        while (product := self.computed(source, "mul")) is not None:
            try:
                gain *= self.scalar(product.inputs.get("y"))
            except NoMatch:
                break
            source = product.inputs.get("x")
        return source, gain


def fusions(
    program: Program, constants: Constants, reads: str
) -> tuple[dict[str | int, list[Step]], dict[str, str]]:
    """(key of an operation → the steps that stand in its place, name of an operation
    that looks like part of a group → why it is none).

    Args:
        reads: rows of a cache that attention reads, `all` or `used`.
    """
    if any(op.blocks for op in program.block.ops):
        return {}, {"program": "it has nested blocks"}
    groups, unfused = Groups(program, constants, reads), {}
    for op in groups.ops:
        if op.kind not in GROUPS:
            continue
        look, group, why = GROUPS[op.kind]
        with refusing(program, op):
            try:
                parts = groups.match_op(op, look, {})
            except NoMatch:
                continue
            try:
                group(groups, op, parts)
            except NoMatch:
                if why:
                    unfused[op.name] = f"{op.kind}: {why}"
    join_linears(groups)
    return groups.steps, unfused


# ---- products

CONV = made_by(
    "conv",
    "x",
    "weight",
    pad_type=("valid", "custom", "same"),
    pad=(None, [0] * 4),
    strides=(None, [1, 1]),
    dilations=list | None,
)


def linear(groups: Groups, op: Op, parts: dict) -> None:
    groups.match_op(op, CONV, parts)
    weight = stored_weight(parts["weight"], groups, groups.constants)
    need(weight is not None)
    bias = np.zeros(len(weight), np.float32)
    if "bias" in op.inputs:
        given = groups.constants.of(op.inputs["bias"])
        need(given is not None and given.shape == bias.shape)
        bias = given.float().numpy()
    groups.shape(parts["x"])
    groups.half(Ref(op.key))
    form = parts["x"].name, weight.form
    groups.linears.setdefault(form, []).append((op, weight, bias))


def join_linears(groups: Groups) -> None:
    """Makes one step of all convolutions that read one input, in the place of the
    first."""
    for (x, _), members in groups.linears.items():
        ops, weights, biases = zip(*members)
        outputs = [(op.key, torch.float16) for op in ops]
        step = Step(ops[0], Linear(weights, biases), outputs, operands=[("x", x, 0)])
        groups.steps |= {op.key: [] for op in ops} | {ops[0].key: [step]}


# ---- caches

# state·(1 − Σ mask) + mask @ rows
PLACED = made_by(
    "add",
    made_by(
        "kept:mul",
        made_by("read_state"),
        made_by(
            "sub",
            "one",
            made_by("reduce_sum", "mask", axes=([-1], [3]), keep_dims=(True,)),
        ),
    ),
    made_by("matmul", "mask", "rows", transpose_y=bool),
)
MASKS = "begin_mask", "end_mask", "squeeze_mask"
WINDOW = dict.fromkeys(("begin", "end", "stride", *MASKS), list | Ref | None)
SLICED = made_by("slice_update", made_by("read_state"), "update", **WINDOW)
WHOLE = made_by("slice_update", "before", "update", **WINDOW)


def cache_write(groups: Groups, op: Op, parts: dict) -> None:
    """A write of a slice at a computed position, or of rows by a mask."""
    source, inside = parts["data"], [op]
    if update := groups.computed(source, "slice_update"):
        if groups.constants.of(update.inputs.get("begin")) is None:
            return slice_write(groups, op, groups.match(source, SLICED, parts))
        groups.match_op(update, WHOLE, parts)
        sizes = groups.shape(parts["input"])
        need(taken(parts, "slice_update", sizes) == [(0, size) for size in sizes])
        source = parts["update"]
        inside.append(update)
    groups.match(source, PLACED, parts)
    check_only_read(groups, op, parts["read_state"], [*inside, parts["kept"]])
    need(groups.scalar(parts["one"]) == 1)
    B, H, S, D = groups.shape(parts["input"])
    heads = list(groups.shape(parts["rows"]))
    transposed = parts["matmul.transpose_y"]
    need((*heads[:2], heads[2 if transposed else 3]) == (B, H, D))
    need(groups.shape(parts["mask"])[:3] == (B, 1, S))
    halves = {"rows": parts["rows"], "mask": parts["mask"]}
    places = groups.shared(op, "places", fused.written, parts["mask"])
    write = partial(fused.write_rows, transposed)
    groups.add(op, write, halves, cell=parts["input"].name, places=places)


def taken(parts: dict, label: str, sizes) -> list[tuple[int, int | None]]:
    """First and last + 1 on every axis of what a slice takes of a value."""
    given = [parts[f"{label}.{name}"] for name in WINDOW]
    need(all(isinstance(each, list) for each in given[:2]))
    need(not any(isinstance(each, Ref) for each in given))
    need(all(each is None or len(each) == len(sizes) for each in given))
    places = window(*given)
    need(all(isinstance(p, slice) and p.step in (None, 1) for p in places))
    return [
        (p.start or 0, size if p.stop is None else p.stop)
        for p, size in zip(places, sizes)
    ]


def slice_write(groups: Groups, op: Op, parts: dict) -> None:
    update = parts["slice_update"]
    check_only_read(groups, op, parts["read_state"], [update])
    need(groups.readers(update.key) == [op])
    stride = parts["slice_update.stride"]
    need(not isinstance(stride, Ref) and min(stride or [1]) > 0)
    cell = parts["input"].name
    groups.add(op, fused.write_slice, {"update": parts["update"]}, cell=cell)
    (step,) = groups.steps[op.key]
    for name in WINDOW:
        value = parts[f"slice_update.{name}"]
        if isinstance(value, Ref):
            step.operands.append((name, value.name, True))
        else:
            step.constants[name] = value


def check_only_read(groups: Groups, write: Op, read: Op, inside: list[Op]) -> None:
    """Needs `read` to be the one access of a state before `write`, for the operations
    `inside` alone: rows are written in place, where the state's earlier value would
    change under any other reader."""
    state = write.inputs.get("input")
    need(isinstance(state, Ref) and read.inputs.get("input") == state)
    for op in groups.readers(state.name):
        need(op is read or groups.order[op.key] >= groups.order[write.key])
    need(all(any(op is each for each in inside) for op in groups.readers(read.key)))
    need(read.key not in groups.program.outputs)


ATTENTION = made_by(
    "attended:matmul",
    made_by(
        "flat:reshape?",
        made_by(
            "softmax",
            made_by(
                "add",
                made_by(
                    "apart:reshape?",
                    made_by(
                        "scores:matmul",
                        "q",
                        made_by("key:read_state"),
                        transpose_y=(True,),
                    ),
                    shape=list | Ref,
                ),
                "mask",
            ),
            axis=(-1, 3),
        ),
        shape=list | Ref,
    ),
    made_by("value:read_state"),
)


def attention(groups: Groups, op: Op, parts: dict) -> None:
    """softmax(q @ kᵀ + mask) @ v over two states, heads of a group side by side."""
    groups.match(Ref(op.key), ATTENTION, parts)
    for name in "apart", "flat":
        if isinstance(shape := parts.get(f"{name}.shape"), list):
            need(groups.types[parts[name].key].allows(shape))
    states = [parts[name].inputs.get("input") for name in ("key", "value")]
    B, H, S, D = groups.shape(states[0])
    heads, columns = groups.shape(parts["q"]), groups.shape(parts["mask"])
    need(groups.shape(states[1]) == (B, H, S, D))
    need((*heads[:2], heads[3]) == (B, H, D))
    need((*columns[:2], columns[3]) == (B, 1, S))
    # beside [B, H, N, S], scores may be [1, H, G, T, S], to which a mask adds alike
    rank = len(groups.types[parts["softmax"].key].shape)
    need(rank == 4 or (B, parts["softmax.axis"]) == (1, -1))
    for name, state in zip(
        ("key", "value"), states
    ):  # nothing writes it after the read
        for other in groups.readers(state.name):
            before = groups.order[other.key] < groups.order[parts[name].key]
            need(other.kind not in WRITES or before)
    look = partial(fused.visible, groups.reads)
    span = groups.shared(op, "span", look, parts["mask"])
    halves = {"q": parts["q"], "mask": parts["mask"]}
    key, value = (state.name for state in states)
    groups.add(op, fused.attend, halves, key=key, value=value, span=span)


# ---- norms and rotations

# the last products of the models' RMSNorm: y·(1 / √(mean y² + eps)), y = x / peak
NORM = made_by(
    "mul",
    "y",
    made_by(
        "gains:scalars",
        made_by(
            "rsqrt",
            made_by(
                "add",
                made_by(
                    "reduce_mean",
                    made_by("mul", "y", "y"),
                    axes=list,
                    keep_dims=(True,),
                ),
                made_by(
                    "mul",
                    made_by("factors0:scalars", made_by("real_div", "eps0", "peak")),
                    made_by("factors1:scalars", made_by("real_div", "eps1", "peak")),
                ),
            ),
            epsilon=float,
        ),
    ),
)
PEAK = made_by(
    "clip",
    made_by("reduce_max", made_by("abs", "x"), axes=list, keep_dims=(True,)),
    alpha=float,
    beta=float,
)


def rms_norm(groups: Groups, op: Op, parts: dict) -> None:
    """x over its peak and over the root of its mean square, and perhaps by a weight:
    `RMSNorm` of the models, found at its last product."""
    source, weight = Ref(op.key), groups.constants.of(op.inputs.get("y"))
    if isinstance(weight, torch.Tensor) and weight.numel() > 1:
        source = op.inputs.get("x")
    else:
        weight = torch.ones(1)
    groups.match(source, NORM, parts)
    groups.match(parts["y"], made_by("real_div", "x", "peak"), parts)
    groups.match(parts["peak"], PEAK, parts)
    rank = len(groups.types[groups.half(parts["x"])].shape)
    axis = [*parts["reduce_mean.axes"], None][0]
    need(parts["reduce_mean.axes"] == parts["reduce_max.axes"] == [axis])
    need(axis in range(-rank, rank))
    width = groups.shape(parts["x"], rank)[axis]
    shape = [1] * rank
    shape[axis] = width
    need(width and (weight.numel() == 1 or list(weight.shape) == shape))
    need(0 < parts["clip.alpha"] < 1e-3 and parts["clip.beta"] > 6e4)
    eps = parts["factors0"] * parts["factors1"]
    eps *= groups.scalar(parts["eps0"]) * groups.scalar(parts["eps1"])
    gains = parts["gains"] * weight.flatten().expand(width).float()
    step = partial(fused.normed, axis, gains, eps + parts["rsqrt.epsilon"])
    groups.add(op, step, {"x": parts["x"]})


# the first operands of a rotary embedding's concat
ROTATED = made_by("sub", made_by("mul", "a", "cos"), made_by("mul", "b", "sin"))
TURNED = made_by("add", made_by("mul", "b", "cos"), made_by("mul", "a", "sin"))
PIECE = made_by("slice_by_index", "x", **WINDOW)


def rotation(groups: Groups, op: Op, parts: dict) -> None:
    """Rotary embedding: (a·cos − b·sin, b·cos + a·sin, rest) for the slices a, b, rest
    of x [B, H, T, D]."""
    need(parts["concat.axis"] in (-1, 3) and not parts["concat.interleave"])
    widths, pieces = [], [parts["a"], parts["b"], *op.inputs["values"][2:]]
    for source in pieces:
        groups.match(source, PIECE, parts)
        width, sizes = groups.shape(source)[-1], groups.shape(parts["x"])
        need(width)
        wanted = [*((0, n) for n in sizes[:3]), (sum(widths), sum(widths) + width)]
        need(taken(parts, "slice_by_index", sizes) == wanted)
        widths.append(width)
    need(sum(widths) == sizes[-1] and widths[0] == widths[1])
    for table in parts["cos"], parts["sin"]:
        need(groups.half(table) in groups.program.inputs)
        need(groups.types[table.name].shape[-1:] == (widths[0],))
    halves = {name: parts[name] for name in ("x", "cos", "sin")}
    groups.add(op, partial(fused.rotated, widths), halves)


# kind of the last operation of a group → what it looks like there, what finds the group,
# and why it is none
GROUPS = {
    "conv": (
        like("conv"),
        linear,
        "it has strides, pads or groups, or its weight is no matrix of fp16 values",
    ),
    "write_state": (
        like("write_state", "input", "data"),
        cache_write,
        "it writes no rows by a mask or a position",
    ),
    "matmul": (
        like(
            "matmul",
            made_by("reshape?", like("softmax"), shape=object),
            made_by("read_state"),
        ),
        attention,
        "no attention over a cache with an additive mask",
    ),
    "mul": (like("mul"), rms_norm, ""),
    "concat": (
        like("concat", [ROTATED, TURNED]),
        rotation,
        "a rotation of another form",
    ),
}
