"""Groups of operations of a program as one operation each: see `fuse`.

`fuse` walks through the operations. At one that may be the last of a group, `GROUPS` names
a function below (`fuse_attention`, …), which matches the group's pattern, checks sizes and
other readers, and notes in `Fusion` what replaces the group; where something differs it
raises `Unfused`. Convolutions are only noted and joined at the end. `Fusion.fused_ops` is
then the list of the fused program's operations."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from miltorch.checks import check_program
from miltorch.constants import Constants
from miltorch.errors import check_choice
from miltorch.graph import Graph
from miltorch.ops.registry import window
from miltorch.patterns import (
    Match,
    Matcher,
    OperationPattern,
    OrFirstOperand,
    Scaled,
    Value,
    one_of,
    operation,
    resembling,
)
from miltorch.program import Argument, Op, Program, Ref, Type, operation_errors
from miltorch.stored import StoredWeight, stored_weight

READS = ("all", "used")
WRITES = ("write_state", "coreml_update_state")
# fused operations that change a state where it lies
IN_PLACE = ("write_cache_rows", "write_cache_slice")
NONE = type(None)


def fuse(program: Program, reads: str = "used") -> Program:
    """The program with each of these groups of operations as one operation of
    `miltorch.ops.fused`:

        stored_linear      1×1 convolutions of one input; weights stay as they are stored
        write_cache_rows   a write of rows into a state, by a one-hot mask
        write_cache_slice  a write of a slice into a state, at a computed position
        cached_attention   over the rows of two states
        rms_norm           a root mean square norm
        rotary_embedding   a rotation by the host's tables

    Operations that belong to no group stay; the result's `unfused` says why for those
    that resemble the last one of a group. A program with nested blocks stays as it is
    (`not_fused_because`). `docs/runtime.md` bounds the distance of each
    group's result from that of its operations.

    Args:
        reads: the rows of a state that attention reads: `all` as the program does, or
            those from the first to the last that some query sees (`used`).

    Raises:
        InputError: a program that cannot run, or another value of `reads`.
    """
    check_choice("reads", reads, READS)
    check_program(program)
    if any(op.blocks for op in program.block.ops):
        return replace(program, not_fused_because="it has nested blocks")
    fusion, unfused = Fusion(program, reads), {}
    for op in fusion.graph.ops:
        if op.kind in GROUPS:
            with operation_errors(program, op):
                try:
                    GROUPS[op.kind](fusion, op)
                except Unfused as reason:
                    unfused[op.name] = f"{op.kind}: {reason}"
    fusion.join_convolutions()
    block = replace(program.block, ops=fusion.fused_ops())
    return replace(program, block=block, is_fused=True, unfused=unfused)


class Unfused(Exception):
    """An operation resembles the last one of a group, and the message says what
    differs."""


def require(condition: bool, fault: str) -> None:
    """Raises `Unfused`, unless the condition holds."""
    if not condition:
        raise Unfused(fault)


class Convolution(NamedTuple):
    """A 1×1 convolution with constant weight and bias."""

    op: Op
    weight: StoredWeight
    bias: np.ndarray
    """float32 [R]."""


class Fusion:
    """The groups of one program that have been recognised so far.

    Attributes:
        replacements: key of an operation → the operations that stand in its place.
        mask_ops: key of an operation → operations on masks that stand before it.
        mask_results: names of the results of these operations.
        convolutions: input and form of the weight → the convolutions.
    """

    def __init__(self, program: Program, reads: str):
        self.program = program
        self.reads = reads
        self.graph = Graph(program)
        self.constants = Constants(program)
        self.matcher = Matcher(self.graph, self.constants)
        self.order = {op.key: index for index, op in enumerate(self.graph.ops)}
        self.replacements: dict[str | int, list[Op]] = {}
        self.mask_ops: dict[str | int, list[Op]] = defaultdict(list)
        self.mask_results: set[str] = set()
        self.convolutions: dict[tuple, list[Convolution]] = defaultdict(list)

    def match(self, pattern: OperationPattern, op: Op, fault: str) -> Match:
        """Returns what each part of a pattern stands for; raises `Unfused` with `fault`
        where `op` does not match the pattern."""
        match = self.matcher.match(pattern, op)
        require(match is not None, fault)
        return match

    def require_fp16(self, argument: Argument | None) -> Ref:
        """Returns an argument; raises `Unfused` unless it is a value that is declared
        fp16, which a literal is not."""
        is_value = isinstance(argument, Ref) and argument.name in self.graph.types
        require(
            is_value and self.graph.types[argument.name].dtype == "FLOAT16",
            "a value that is not fp16",
        )
        return argument

    def require_shape(
        self, argument: Argument | None, rank: int = 4
    ) -> tuple[int | None, ...]:
        """Returns the declared shape of an fp16 value; raises `Unfused` for another
        rank."""
        shape = self.graph.types[self.require_fp16(argument).name].shape
        require(len(shape) == rank, f"a value of rank {len(shape)}")
        return shape

    def replace_operation(self, op: Op, kind: str, **inputs) -> None:
        """Replaces `op` by an operation of `ops.fused` with the same results."""
        for name, _ in op.outputs:
            self.require_fp16(Ref(name))
        self.replacements[op.key] = [Op(kind, op.name, inputs, op.outputs)]

    def add_mask_operation(self, op: Op, kind: str, mask) -> Ref:
        """Adds an operation on a mask that is an input of the program, before `op`, the
        first operation that reads its result. Returns the result; a second call with the
        same mask and kind returns the same one."""
        name = self.require_fp16(mask).name
        require(name in self.program.inputs, "a mask that the program computes")
        result, declared = f"{name}.{kind}", Type("INT32", (None,), "list")
        if result not in self.mask_results:
            require(result not in self.graph.types, f"another value {result!r}")
            self.mask_results.add(result)
            mask_op = Op(kind, result, {"mask": mask}, [(result, declared)])
            self.mask_ops[op.key].append(mask_op)
        return Ref(result)

    def join_convolutions(self) -> None:
        """Makes one operation of all convolutions that read one input through weights of
        one form, in the place of the first."""
        for (x, _), members in self.convolutions.items():
            # Convolution's fields, each for all members
            ops, weights, biases = zip(*members)
            for op in ops:
                self.replacements[op.key] = []
            inputs = {
                "x": Ref(x),
                "bias": np.concatenate(biases),
                "weight": type(weights[0]).concatenated(weights),
                "sizes": [len(weight) for weight in weights],
            }
            outputs = [op.outputs[0] for op in ops]
            fused = Op("stored_linear", ops[0].name, inputs, outputs)
            self.replacements[ops[0].key] = [fused]

    def fused_ops(self) -> list[Op]:
        """The operations of the fused program."""
        ops = []
        for op in self.program.block.ops:
            ops += self.mask_ops.get(op.key, [])
            ops += self.replacements.get(op.key, [op])
        return _without_dead(_with_copied_states(ops), self.program.outputs)


def _with_copied_states(ops: list[Op]) -> list[Op]:
    """The operations with a copy in place of a read wherever a fused operation writes the
    state in place: the value that a read gives must not change under its readers."""
    changed = {op.inputs["state"] for op in ops if op.kind in IN_PLACE}
    return [
        replace(op, kind="copy_state")
        if op.kind == "read_state" and op.inputs.get("input") in changed
        else op
        for op in ops
    ]


def _without_dead(ops: list[Op], outputs: list[str]) -> list[Op]:
    """The operations without those whose results nothing reads any more."""
    needed, live = set(outputs), []
    for op in reversed(ops):
        results = {name for name, _ in op.outputs}
        # an operation without a result writes a state
        if not results or results & needed or op.kind in WRITES:
            needed.update(op.reads())
            live.append(op)
    return live[::-1]


# ---- products

X, WEIGHT = Value(), Value()
CONVOLUTION = operation(
    "conv",
    X,
    WEIGHT,
    pad_type=one_of("valid", "custom", "same"),
    pad=one_of(None, [0] * 4),
    strides=one_of(None, [1, 1]),
    dilations=Value(list, NONE),
)


def fuse_convolution(fusion: Fusion, op: Op) -> None:
    """Adds a 1×1 convolution to `Fusion.convolutions`, which `join_convolutions` reads."""
    match = fusion.match(CONVOLUTION, op, "it has strides, pads or groups")
    stored = stored_weight(match.argument(WEIGHT), fusion.graph, fusion.constants)
    require(stored is not None, "its weight is no constant matrix of fp16 values")
    bias = np.zeros(len(stored), np.float32)
    if "bias" in op.inputs:
        constant = fusion.constants.value_or_none(op.inputs["bias"])
        require(
            constant is not None and constant.shape == bias.shape,
            "its bias is no constant vector",
        )
        bias = constant.float().numpy()
    x = match.argument(X)
    fusion.require_shape(x)
    fusion.require_fp16(Ref(op.key))
    group = x.name, stored.form
    fusion.convolutions[group].append(Convolution(op, stored, bias))


# ---- caches

STATE, ROWS, WRITE_MASK = Value(), Value(), Value()
IS_TRANSPOSED = Value(bool)
READ_STATE = operation("read_state", STATE)
IS_WRITTEN = operation("reduce_sum", WRITE_MASK, axes=one_of([-1], [3]), keep_dims=True)
OLD_ROWS = READ_STATE * (1 - IS_WRITTEN)
NEW_ROWS = operation("matmul", WRITE_MASK, ROWS, transpose_y=IS_TRANSPOSED)
WRITE_BY_MASK = OLD_ROWS + NEW_ROWS
# the parameters of a slice
WINDOW = {
    name: Value(list, Ref, NONE)
    for name in ("begin", "end", "stride", "begin_mask", "end_mask", "squeeze_mask")
}
UPDATE, BEFORE = Value(), Value()
WRITE_AT_POSITION = operation("slice_update", READ_STATE, UPDATE, **WINDOW)
WRITE_OF_ALL = operation("slice_update", BEFORE, UPDATE, **WINDOW)
# beginnings of reasons in `Program.unfused`
NO_CACHE_WRITE = "it writes no rows by a mask or a position"
NO_ATTENTION = "no attention over a cache with an additive mask"
NO_ROTATION = "a rotation of another form"


def fuse_cache_write(fusion: Fusion, op: Op) -> None:
    """Replaces a write of rows by a mask, or of a slice at a computed position."""
    require(op.inputs.keys() == {"input", "data"}, NO_CACHE_WRITE)
    update = fusion.matcher.computed(op.inputs["data"], "slice_update")
    if update and fusion.constants.value_or_none(update.inputs.get("begin")) is None:
        fuse_slice_write(fusion, op, update)
    else:
        fuse_masked_write(fusion, op, update)


def fuse_masked_write(fusion: Fusion, op: Op, update: Op | None) -> None:
    """Replaces a write of rows by a mask. `update` is the slice update whose result the
    operation writes, if there is one: coremltools writes all of a state as an update of a
    slice that is the whole."""
    data = op.inputs["data"]
    # operations of the group, which may read the earlier value of the state
    readers_in_group = [op]
    if update:
        match = fusion.match(WRITE_OF_ALL, update, NO_CACHE_WRITE)
        sizes = fusion.require_shape(op.inputs["input"])
        whole = [(0, size) for size in sizes]
        fault = f"{NO_CACHE_WRITE}: a slice that is not the whole state"
        require(bounds(match, sizes) == whole, fault)
        data = match.argument(UPDATE)
        readers_in_group.append(update)
    addition = fusion.matcher.computed(data, "add")
    require(addition is not None, NO_CACHE_WRITE)
    match = fusion.match(WRITE_BY_MASK, addition, NO_CACHE_WRITE)
    readers_in_group.append(match.operation(OLD_ROWS))
    check_only_access(fusion, op, match.operation(READ_STATE), readers_in_group)
    rows, mask = match.argument(ROWS), match.argument(WRITE_MASK)
    is_transposed = match.attribute(IS_TRANSPOSED)
    B, H, S, D = fusion.require_shape(op.inputs["input"])
    heads = list(fusion.require_shape(rows))
    width = heads[2 if is_transposed else 3]
    require((*heads[:2], width) == (B, H, D), "rows of another shape than the state's")
    mask_sizes = fusion.require_shape(mask)[:3]
    require(mask_sizes == (B, 1, S), "a mask of another shape")
    fusion.replace_operation(
        op,
        "write_cache_rows",
        state=op.inputs["input"],
        rows=fusion.require_fp16(rows),
        mask=fusion.require_fp16(mask),
        places=fusion.add_mask_operation(op, "one_hot_places", mask),
        transposed=is_transposed,
    )


def bounds(match: Match, sizes) -> list[tuple[int, int | None]]:
    """The first index of a slice and the one behind its last, on every axis of a value
    of some sizes. Raises `Unfused` unless they are constant and the slice has no steps."""
    fault = "a slice at a computed position, or one with steps"
    parameters = [match.attribute(pattern) for pattern in WINDOW.values()]
    require(all(isinstance(value, list) for value in parameters[:2]), fault)
    for value in parameters:
        require(not isinstance(value, Ref), fault)
        require(value is None or len(value) == len(sizes), fault)
    pairs = []
    for piece, size in zip(window(*parameters), sizes):
        require(isinstance(piece, slice) and piece.step in (None, 1), fault)
        pairs.append((piece.start or 0, size if piece.stop is None else piece.stop))
    return pairs


def fuse_slice_write(fusion: Fusion, op: Op, slice_update: Op) -> None:
    """Replaces a write of a slice at a computed position, the result of
    `slice_update`."""
    match = fusion.match(WRITE_AT_POSITION, slice_update, NO_CACHE_WRITE)
    check_only_access(fusion, op, match.operation(READ_STATE), [slice_update])
    only = fusion.graph.readers(slice_update.key) == [op]
    require(only, "another operation reads what it writes")
    stride = match.attribute(WINDOW["stride"])
    is_forward = not isinstance(stride, Ref) and min(stride or [1]) > 0
    require(is_forward, "a slice that runs backwards")
    inputs = {
        name: slice_update.inputs[name]
        for name in WINDOW
        if name in slice_update.inputs
    }
    inputs |= {
        "state": op.inputs["input"],
        "update": fusion.require_fp16(match.argument(UPDATE)),
    }
    fusion.replace_operation(op, "write_cache_slice", **inputs)


def check_only_access(
    fusion: Fusion, write: Op, read: Op, readers_in_group: list[Op]
) -> None:
    """Requires that the operation `read` is the only access of a state before `write`, and
    that only operations of the group use its result: a fused write changes the state in
    place, and any other reader would see the new rows."""
    fault = "the state is read by other operations before it is written"
    cell = write.inputs["input"]
    require(isinstance(cell, Ref) and read.inputs.get("input") == cell, fault)
    for op in fusion.graph.readers(cell.name):
        is_later = fusion.order[op.key] >= fusion.order[write.key]
        require(op is read or is_later, fault)
    for op in fusion.graph.readers(read.key):
        require(any(op is reader for reader in readers_in_group), fault)
    require(read.key not in fusion.program.outputs, fault)


# ---- attention

Q, KEY, VALUE, SCORE_MASK = Value(), Value(), Value(), Value()
SCORES_SHAPE, WEIGHTS_SHAPE = Value(list, Ref), Value(list, Ref)
SOFTMAX_AXIS = Value(int)
READ_KEY = operation("read_state", KEY)
READ_VALUE = operation("read_state", VALUE)
# heads of a group stand side by side, [B, H_kv, G·T, D], and each has the same mask
SCORES = operation(
    "reshape", operation("matmul", Q, READ_KEY, transpose_y=True), shape=SCORES_SHAPE
)
SOFTMAX = operation("softmax", OrFirstOperand(SCORES) + SCORE_MASK, axis=SOFTMAX_AXIS)
WEIGHTS = operation("reshape", SOFTMAX, shape=WEIGHTS_SHAPE)
ATTENTION = operation("matmul", OrFirstOperand(WEIGHTS), READ_VALUE)
LIKE_ATTENTION = resembling(
    "matmul",
    OrFirstOperand(resembling("reshape", resembling("softmax"))),
    resembling("read_state"),
)


def fuse_attention(fusion: Fusion, op: Op) -> None:
    """Replaces softmax(q @ keyᵀ + mask) @ value over two states."""
    if fusion.matcher.match(LIKE_ATTENTION, op) is None:
        return
    match = fusion.match(ATTENTION, op, NO_ATTENTION)
    check_reshapes(fusion, match)
    check_attention_shapes(fusion, match)
    check_softmax_axis(fusion, match)
    for state, read in ((KEY, READ_KEY), (VALUE, READ_VALUE)):
        check_not_written_after(fusion, match.argument(state), match.operation(read))
    mask = match.argument(SCORE_MASK)
    inputs = {
        "q": fusion.require_fp16(match.argument(Q)),
        "mask": fusion.require_fp16(mask),
    }
    if fusion.reads == "used":
        inputs["columns"] = fusion.add_mask_operation(op, "visible_columns", mask)
    else:
        fault = f"{NO_ATTENTION}: the program computes the mask"
        require(mask.name in fusion.program.inputs, fault)
    key, value = match.argument(KEY), match.argument(VALUE)
    fusion.replace_operation(op, "cached_attention", key=key, value=value, **inputs)


def check_reshapes(fusion: Fusion, match: Match) -> None:
    """Requires that reshapes of scores and weights, where there are any, have the shape
    that is declared for their result."""
    for pattern, shape in ((SCORES, SCORES_SHAPE), (WEIGHTS, WEIGHTS_SHAPE)):
        sizes = match.attribute(shape)
        if isinstance(sizes, list):
            declared = fusion.graph.types[match.operation(pattern).key]
            fault = f"{NO_ATTENTION}: a reshape to {sizes}, which is not declared"
            require(declared.allows(sizes), fault)


def check_attention_shapes(fusion: Fusion, match: Match) -> None:
    """Requires states [B, H_kv, S, D], queries [B, H_kv, N, D], a mask [B, 1, T, S]."""
    B, H, S, D = fusion.require_shape(match.argument(KEY))
    heads = fusion.require_shape(match.argument(Q))
    columns = fusion.require_shape(match.argument(SCORE_MASK))
    values = fusion.require_shape(match.argument(VALUE))
    fault = f"{NO_ATTENTION}: keys and values of different shapes"
    require(values == (B, H, S, D), fault)
    fault = f"{NO_ATTENTION}: queries {heads} for keys {(B, H, S, D)}"
    require((*heads[:2], heads[3]) == (B, H, D), fault)
    fault = f"{NO_ATTENTION}: a mask {columns} for keys {(B, H, S, D)}"
    require((*columns[:2], columns[3]) == (B, 1, S), fault)


def check_softmax_axis(fusion: Fusion, match: Match) -> None:
    """Requires a softmax over the columns. Beside [B, H, N, S], scores may be [1, H, G, T,
    S], to which a mask adds alike."""
    axis = match.attribute(SOFTMAX_AXIS)
    rank = len(fusion.graph.types[match.operation(SOFTMAX).key].shape)
    B = fusion.require_shape(match.argument(KEY))[0]
    fault = f"{NO_ATTENTION}: a softmax over axis {axis} of {rank}"
    require(axis == -1 or (axis == 3 and rank == 4), fault)
    fault = f"{NO_ATTENTION}: scores of rank {rank} in a batch of {B}"
    require(rank == 4 or B == 1, fault)


def check_not_written_after(fusion: Fusion, state: Ref, read: Op) -> None:
    """Requires that nothing writes a state after the operation `read`: fused attention
    reads the state later than `read` did."""
    for other in fusion.graph.readers(state.name):
        is_before = fusion.order[other.key] < fusion.order[read.key]
        fault = f"{NO_ATTENTION}: {state.name} is written after it is read"
        require(other.kind not in WRITES or is_before, fault)


# ---- norms and rotations

# RMSNorm as it cannot overflow in fp16, where x² may: with y = x / peak and peak the
# largest |x|, x / √(mean x² + eps) = y / √(mean y² + eps / peak²). Where fp16 does not
# hold eps, it is the product of two constants and of powers of two.
NORM_INPUT = Value()
AXES, LOWEST, HIGHEST, EPSILON = Value(list), Value(float), Value(float), Value(float)
EPS0, EPS1 = Value(), Value()
PEAK = operation(
    "clip",
    operation("reduce_max", operation("abs", NORM_INPUT), axes=AXES, keep_dims=True),
    alpha=LOWEST,
    beta=HIGHEST,
)
Y = NORM_INPUT / PEAK
SCALED_EPS0 = Scaled(EPS0 / PEAK)
SCALED_EPS1 = Scaled(EPS1 / PEAK)
MEAN_SQUARE = operation("reduce_mean", Y * Y, axes=AXES, keep_dims=True)
ROOT = operation("rsqrt", MEAN_SQUARE + SCALED_EPS0 * SCALED_EPS1, epsilon=EPSILON)
SCALED_ROOT = Scaled(ROOT)
NORM = Y * SCALED_ROOT


def fuse_rms_norm(fusion: Fusion, op: Op) -> None:
    """Replaces a root mean square norm, whose last product is that by its gains, where
    they are not all 1."""
    last = op
    gains = fusion.constants.value_or_none(op.inputs.get("y"))
    if isinstance(gains, torch.Tensor) and gains.numel() > 1:
        last = fusion.matcher.computed(op.inputs.get("x"), "mul")
    else:
        gains = torch.ones(1)
    match = fusion.matcher.match(NORM, last) if last else None
    if match is None:  # any other product
        return
    fault = "a norm of another form"
    x = fusion.require_fp16(match.argument(NORM_INPUT))
    rank = len(fusion.graph.types[x.name].shape)
    axes = match.attribute(AXES)
    is_one_axis = len(axes) == 1 and axes[0] in range(-rank, rank)
    require(is_one_axis, f"{fault}: over axes {axes}")
    (axis,) = axes
    width = fusion.require_shape(x, rank)[axis]
    require(bool(width), f"{fault}: over an axis of unknown size")
    shape = [1] * rank
    shape[axis] = width
    fits = gains.numel() == 1 or list(gains.shape) == shape
    require(fits, f"{fault}: gains {list(gains.shape)}")
    lowest, highest = match.attribute(LOWEST), match.attribute(HIGHEST)
    # the bounds of normal fp16 values
    is_normal = 0 < lowest < 1e-3 and highest > 6e4
    require(is_normal, f"{fault}: a peak between {lowest} and {highest}")
    eps = match.factor(SCALED_EPS0) * match.factor(SCALED_EPS1)
    factors = [fusion.constants.scalar(match.argument(part)) for part in (EPS0, EPS1)]
    require(None not in factors, f"{fault}: epsilon is no constant")
    eps *= factors[0] * factors[1]
    gains = match.factor(SCALED_ROOT) * gains.flatten().expand(width).float()
    fusion.replace_operation(
        op,
        "rms_norm",
        x=x,
        gains=gains.numpy(),
        axis=axis,
        epsilon=eps + match.attribute(EPSILON),
    )


FIRST, SECOND, COS, SIN = Value(), Value(), Value(), Value()
CONCAT_AXIS, INTERLEAVE = Value(int), Value(bool)
# [B, H, T, D], cut into slices FIRST, SECOND and what follows them
ROTATED = operation(
    "concat",
    [FIRST * COS - SECOND * SIN, SECOND * COS + FIRST * SIN],
    axis=CONCAT_AXIS,
    interleave=INTERLEAVE,
)
SLICED = Value()
SLICE = operation("slice_by_index", SLICED, **WINDOW)


def fuse_rotation(fusion: Fusion, op: Op) -> None:
    """Replaces a rotary embedding."""
    match = fusion.matcher.match(ROTATED, op)
    if match is None:  # any other concat
        return
    is_plain = match.attribute(CONCAT_AXIS) in (-1, 3) and not match.attribute(
        INTERLEAVE
    )
    require(is_plain, f"{NO_ROTATION}: its parts are not one behind the other")
    parts = [match.argument(FIRST), match.argument(SECOND), *op.inputs["values"][2:]]
    x, sizes = require_consecutive_slices(fusion, parts)
    require(sizes[0] == sizes[1], f"{NO_ROTATION}: slices of {sizes} channels")
    cos, sin = match.argument(COS), match.argument(SIN)
    for table in (cos, sin):
        name = fusion.require_fp16(table).name
        is_input = name in fusion.program.inputs
        require(is_input, f"{NO_ROTATION}: the program computes {name}")
        width = fusion.graph.types[name].shape[-1:]
        require(width == (sizes[0],), f"{NO_ROTATION}: {name} has another width")
    fusion.replace_operation(op, "rotary_embedding", x=x, cos=cos, sin=sin, sizes=sizes)


def require_consecutive_slices(
    fusion: Fusion, parts: list[Argument]
) -> tuple[Ref, list[int]]:
    """Returns the value [B, H, T, D] that is cut into `parts` along D, and the size of each.
    Raises `Unfused` unless the parts are slices of one value, one behind the other, that
    together are the whole."""
    whole, sizes = None, []
    for part in parts:
        slicing = fusion.matcher.computed(part, "slice_by_index")
        require(slicing is not None, f"{NO_ROTATION}: a part that is no slice")
        match = fusion.match(SLICE, slicing, f"{NO_ROTATION}: a slice of another form")
        source = fusion.require_fp16(match.argument(SLICED))
        whole = whole or source
        require(source == whole, f"{NO_ROTATION}: slices of two values")
        shape = fusion.require_shape(whole)
        width = fusion.require_shape(part)[-1]
        require(bool(width), f"{NO_ROTATION}: a slice of unknown size")
        start = sum(sizes)
        expected = [*((0, size) for size in shape[:3]), (start, start + width)]
        is_next = bounds(match, shape) == expected
        require(is_next, f"{NO_ROTATION}: slices that leave a gap, or overlap")
        sizes.append(width)
    require(sum(sizes) == shape[-1], f"{NO_ROTATION}: slices of a part")
    return whole, sizes


# kind of the last operation of a group → the function that recognises and replaces it
GROUPS: dict[str, Callable[[Fusion, Op], None]] = {
    "conv": fuse_convolution,
    "write_state": fuse_cache_write,
    "matmul": fuse_attention,
    "mul": fuse_rms_norm,
    "concat": fuse_rotation,
}
