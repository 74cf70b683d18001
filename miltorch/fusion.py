"""Groups of operations of a program as one operation each: see `fuse`."""

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
    Matcher,
    OperationPattern,
    OrFirstOperand,
    Scaled,
    Value,
    one_of,
    operation,
    resembling,
)
from miltorch.program import Op, Program, Ref, Type, operation_errors
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
    that resemble the last one of a group. `docs/runtime.md` bounds the distance of each
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
        return replace(program, unfused={"program": "it has nested blocks"})
    fusion, unfused = Fusion(program, reads), {}
    for op in fusion.graph.ops:
        if op.kind in GROUPS:
            with operation_errors(program, op):
                try:
                    GROUPS[op.kind](fusion, op)
                except Unfused as reason:
                    unfused[op.name] = f"{op.kind}: {reason}"
    fusion.join_convolutions()
    block = replace(program.block, ops=fusion.ops())
    return replace(program, block=block, unfused=unfused)


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

    def match(self, pattern: OperationPattern, op: Op, fault: str) -> dict:
        """Returns the argument or operation that each part of a pattern stands for;
        raises `Unfused` with `fault` where `op` does not match the pattern."""
        match = self.matcher.match(pattern, op)
        require(match is not None, fault)
        return match

    def require_fp16(self, source) -> Ref:
        """Returns an argument; raises `Unfused` unless it is a value that is declared
        fp16, which a literal is not."""
        is_value = isinstance(source, Ref) and source.name in self.graph.types
        require(
            is_value and self.graph.types[source.name].dtype == "FLOAT16",
            "a value that is not fp16",
        )
        return source

    def require_shape(self, source, rank: int = 4) -> tuple[int | None, ...]:
        """Returns the declared shape of an fp16 value; raises `Unfused` for another
        rank."""
        shape = self.graph.types[self.require_fp16(source).name].shape
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

    def ops(self) -> list[Op]:
        """The operations of the fused program, those left out whose results nothing
        reads any more."""
        ops = []
        for op in self.program.block.ops:
            ops += self.mask_ops.get(op.key, [])
            ops += self.replacements.get(op.key, [op])
        # the value that a read gives must not change under its readers
        changed = {op.inputs["state"] for op in ops if op.kind in IN_PLACE}
        for index, op in enumerate(ops):
            if op.kind == "read_state" and op.inputs.get("input") in changed:
                ops[index] = replace(op, kind="copy_state")
        needed, live = set(self.program.outputs), []
        for op in reversed(ops):
            names = {name for name, _ in op.outputs}
            if not names or names & needed or op.kind in WRITES:
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
    stored = stored_weight(match[WEIGHT], fusion.graph, fusion.constants)
    require(stored is not None, "its weight is no constant matrix of fp16 values")
    bias = np.zeros(len(stored), np.float32)
    if "bias" in op.inputs:
        constant = fusion.constants.value_or_none(op.inputs["bias"])
        require(
            constant is not None and constant.shape == bias.shape,
            "its bias is no constant vector",
        )
        bias = constant.float().numpy()
    fusion.require_shape(match[X])
    fusion.require_fp16(Ref(op.key))
    group = match[X].name, stored.form
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


def fuse_cache_write(fusion: Fusion, op: Op) -> None:
    """Replaces a write of rows by a mask, or of a slice at a computed position."""
    fault = "it writes no rows by a mask or a position"
    require(op.inputs.keys() == {"input", "data"}, fault)
    source, inner = op.inputs["data"], [op]
    if slice_update := fusion.matcher.computed(source, "slice_update"):
        if fusion.constants.value_or_none(slice_update.inputs.get("begin")) is None:
            match = fusion.match(WRITE_AT_POSITION, slice_update, fault)
            return fuse_slice_write(fusion, op, match)
        # coremltools writes all of a state as an update of a slice that is the whole
        match = fusion.match(WRITE_OF_ALL, slice_update, fault)
        sizes = fusion.require_shape(op.inputs["input"])
        whole = [(0, size) for size in sizes]
        require(bounds(match, sizes) == whole, fault)
        source = match[UPDATE]
        inner.append(slice_update)
    placed = fusion.matcher.computed(source, "add")
    require(placed is not None, fault)
    match = fusion.match(WRITE_BY_MASK, placed, fault)
    check_only_access(fusion, op, match[READ_STATE], [*inner, match[OLD_ROWS]])
    B, H, S, D = fusion.require_shape(op.inputs["input"])
    heads = list(fusion.require_shape(match[ROWS]))
    width = heads[2 if match[IS_TRANSPOSED] else 3]
    require((*heads[:2], width) == (B, H, D), "rows of another shape than the state's")
    require(
        fusion.require_shape(match[WRITE_MASK])[:3] == (B, 1, S),
        "a mask of another shape",
    )
    fusion.replace_operation(
        op,
        "write_cache_rows",
        state=op.inputs["input"],
        rows=fusion.require_fp16(match[ROWS]),
        mask=fusion.require_fp16(match[WRITE_MASK]),
        places=fusion.add_mask_operation(op, "one_hot_places", match[WRITE_MASK]),
        transposed=match[IS_TRANSPOSED],
    )


def bounds(match: dict, sizes) -> list[tuple[int, int | None]]:
    """The first index of a slice and the one behind its last, on every axis of a value
    of some sizes. Raises `Unfused` unless they are constant and the slice has no steps."""
    fault = "a slice at a computed position, or one with steps"
    parameters = [match[pattern] for pattern in WINDOW.values()]
    require(all(isinstance(value, list) for value in parameters[:2]), fault)
    for value in parameters:
        require(not isinstance(value, Ref), fault)
        require(value is None or len(value) == len(sizes), fault)
    pairs = []
    for piece, size in zip(window(*parameters), sizes):
        require(isinstance(piece, slice) and piece.step in (None, 1), fault)
        pairs.append((piece.start or 0, size if piece.stop is None else piece.stop))
    return pairs


def fuse_slice_write(fusion: Fusion, op: Op, match: dict) -> None:
    """Replaces a write of a slice at a computed position."""
    slice_update = match[WRITE_AT_POSITION]
    check_only_access(fusion, op, match[READ_STATE], [slice_update])
    only = fusion.graph.readers(slice_update.key) == [op]
    require(only, "another operation reads what it writes")
    stride = match[WINDOW["stride"]]
    is_forward = not isinstance(stride, Ref) and min(stride or [1]) > 0
    require(is_forward, "a slice that runs backwards")
    inputs = {
        name: slice_update.inputs[name]
        for name in WINDOW
        if name in slice_update.inputs
    }
    inputs |= {
        "state": op.inputs["input"],
        "update": fusion.require_fp16(match[UPDATE]),
    }
    fusion.replace_operation(op, "write_cache_slice", **inputs)


def check_only_access(fusion: Fusion, write: Op, reading: Op, inner: list[Op]) -> None:
    """Requires that `reading` is the one access of a state before `write`, and that the
    operations `inner` alone read its result: rows are written in place, where the
    state's earlier value would change under any other reader."""
    fault = "the state is read by other operations before it is written"
    cell = write.inputs["input"]
    require(isinstance(cell, Ref) and reading.inputs.get("input") == cell, fault)
    for op in fusion.graph.readers(cell.name):
        is_later = fusion.order[op.key] >= fusion.order[write.key]
        require(op is reading or is_later, fault)
    for op in fusion.graph.readers(reading.key):
        require(any(op is other for other in inner), fault)
    require(reading.key not in fusion.program.outputs, fault)


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
    fault = "no attention over a cache with an additive mask"
    match = fusion.match(ATTENTION, op, fault)
    for pattern, shape in ((SCORES, SCORES_SHAPE), (WEIGHTS, WEIGHTS_SHAPE)):
        if isinstance(match.get(shape), list):
            declared = fusion.graph.types[match[pattern].key]
            require(declared.allows(match[shape]), fault)
    B, H, S, D = fusion.require_shape(match[KEY])
    heads = fusion.require_shape(match[Q])
    columns = fusion.require_shape(match[SCORE_MASK])
    require(fusion.require_shape(match[VALUE]) == (B, H, S, D), fault)
    require((*heads[:2], heads[3]) == (B, H, D), fault)
    require((*columns[:2], columns[3]) == (B, 1, S), fault)
    axis = match[SOFTMAX_AXIS]
    rank = len(fusion.graph.types[match[SOFTMAX].key].shape)
    # beside [B, H, N, S], scores may be [1, H, G, T, S], to which a mask adds alike
    require(axis == -1 or (axis == 3 and rank == 4), fault)
    require(rank == 4 or B == 1, fault)
    for cell, reading in ((match[KEY], READ_KEY), (match[VALUE], READ_VALUE)):
        # attention reads the state itself, so nothing may write it after the read
        for other in fusion.graph.readers(cell.name):
            is_before = fusion.order[other.key] < fusion.order[match[reading].key]
            require(other.kind not in WRITES or is_before, fault)
    inputs = {
        "q": fusion.require_fp16(match[Q]),
        "mask": fusion.require_fp16(match[SCORE_MASK]),
    }
    if fusion.reads == "used":
        inputs["columns"] = fusion.add_mask_operation(
            op, "visible_columns", match[SCORE_MASK]
        )
    else:
        require(match[SCORE_MASK].name in fusion.program.inputs, fault)
    fusion.replace_operation(
        op, "cached_attention", key=match[KEY], value=match[VALUE], **inputs
    )


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
    rank = len(fusion.graph.types[fusion.require_fp16(match[NORM_INPUT]).name].shape)
    require(len(match[AXES]) == 1 and match[AXES][0] in range(-rank, rank), fault)
    (axis,) = match[AXES]
    width = fusion.require_shape(match[NORM_INPUT], rank)[axis]
    shape = [1] * rank
    shape[axis] = width
    require(bool(width), fault)
    require(gains.numel() == 1 or list(gains.shape) == shape, fault)
    # the bounds of normal fp16 values
    require(0 < match[LOWEST] < 1e-3 and match[HIGHEST] > 6e4, fault)
    factors = [fusion.constants.scalar(match[pattern]) for pattern in (EPS0, EPS1)]
    require(None not in factors, fault)
    eps = match[SCALED_EPS0] * match[SCALED_EPS1]
    eps *= factors[0] * factors[1]
    gains = match[SCALED_ROOT] * gains.flatten().expand(width).float()
    fusion.replace_operation(
        op,
        "rms_norm",
        x=match[NORM_INPUT],
        gains=gains.numpy(),
        axis=axis,
        epsilon=eps + match[EPSILON],
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
    fault = "a rotation of another form"
    require(match[CONCAT_AXIS] in (-1, 3) and not match[INTERLEAVE], fault)
    whole = None
    sizes = []
    for source in (match[FIRST], match[SECOND], *op.inputs["values"][2:]):
        slicing = fusion.matcher.computed(source, "slice_by_index")
        require(slicing is not None, fault)
        piece = fusion.match(SLICE, slicing, fault)
        if whole is None:
            whole = fusion.require_fp16(piece[SLICED])
        require(fusion.require_fp16(piece[SLICED]) == whole, fault)
        shape = fusion.require_shape(whole)
        width = fusion.require_shape(source)[-1]
        require(bool(width), fault)
        start = sum(sizes)
        expected = [*((0, size) for size in shape[:3]), (start, start + width)]
        require(bounds(piece, shape) == expected, fault)
        sizes.append(width)
    require(sum(sizes) == shape[-1] and sizes[0] == sizes[1], fault)
    for table in (match[COS], match[SIN]):
        name = fusion.require_fp16(table).name
        require(name in fusion.program.inputs, fault)
        require(fusion.graph.types[name].shape[-1:] == (sizes[0],), fault)
    fusion.replace_operation(
        op, "rotary_embedding", x=whole, cos=match[COS], sin=match[SIN], sizes=sizes
    )


# kind of the last operation of a group → the function that recognises and replaces it
GROUPS: dict[str, Callable[[Fusion, Op], None]] = {
    "conv": fuse_convolution,
    "write_state": fuse_cache_write,
    "matmul": fuse_attention,
    "mul": fuse_rms_norm,
    "concat": fuse_rotation,
}
