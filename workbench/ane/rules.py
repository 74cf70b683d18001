"""The tests of the Neural Engine's rules, by subject, and `lint` (see
`workbench.ane.rule`)."""

from math import prod

import numpy as np

from miltorch.program import Op
from workbench.ane.rule import (
    FP16_TINY,
    ON_ANE,
    RULES,
    Finding,
    LintGraph,
    results,
    rule,
)


def lint(graph: LintGraph) -> list[Finding]:
    """Every rule that a graph breaks, with the names of the subjects that break it."""
    findings = []
    for each in RULES.values():
        if names := tuple(dict.fromkeys(each.find(graph))):
            findings.append(Finding(each, names))
    return findings


# --- types and rank


@rule
def T1_float32(g, t):
    return t.dtype == "FLOAT32"


@rule
def T2_islands(g, op):
    dtypes = {t.dtype for other in g.ops for t in results(other)}
    source = g.types.get(getattr(op.inputs["x"], "name", None))
    cast = {op.outputs[0][1].dtype, source and source.dtype}
    return "FLOAT16" in dtypes and "FLOAT32" in cast


@rule
def T3_integers(g, t):
    floats = ("FLOAT16", "FLOAT32")  # float32 breaks T1
    return t.dtype not in (*floats, "INT8", "UINT8", "INT16", "UINT16", "BOOL")


@rule
def T4_rank(g, t):
    return len(t.shape) > 5


# --- shapes


@rule
def S1_narrow_io(g, t):
    return t.dtype == "FLOAT16" and t.shape and (t.shape[-1] or 1) < 32


@rule
def S2_rank3(g, op):
    return len(g.shape(op, "x")) == 3


@rule
def S4_long_axis(g, t):
    cap = 16384 if g.generation <= 3 else 65536
    return any(n and n > (65536 if i == 1 else cap) for i, n in enumerate(t.shape))


@rule
def S10_moved_width(g, op):
    shape = g.shape(op, "x")
    if op.kind == "reshape":
        return shape[-1:] != op.outputs[0][1].shape[-1:]
    return int(np.ravel(g.constant(op, "perm"))[-1]) not in (-1, len(shape) - 1)


@rule
def S12_spilled(g, t):
    limit = 2e6 if g.generation < 5 else 4.7e6
    return t.dtype == "FLOAT16" and 2 * _elements(t.shape) > limit


# --- dynamic shapes


@rule
def D1_dynamic(g, t):
    return None in t.shape


@rule
def D3_ranged(g, t):
    return None in t.shape


@rule
def D7_ranged_with_state(g, t):
    return g.program.states and None in t.shape


@rule
def D8_fixed_beside_range(g, t):
    a_range = any(None in other.shape for other in g.program.inputs.values())
    return g.program.states and a_range and None not in t.shape


# --- state


@rule
def K2_state_width(g, t):
    return t.shape and (t.shape[-1] or 0) % 32


@rule
def K3_states(g, t):
    return len(g.program.states) >= 3


@rule
def K4_functions(g, t):
    columns = {_columns(g, op) for op in g.of("conv", "linear")}
    return g.functions > 1 and bool(columns - {1})


@rule
def K5_loose_update(g, op):
    written = {write.inputs["data"].name for write in g.of("write_state")}
    return op.outputs[0][0] not in written


@rule
def K6_shifted(g, op):
    """A shift is a concat of rows of the cache itself."""
    slices = ("slice_by_index", "slice_by_size", "concat")
    for concat in _views(g, op, (*slices, "slice_update")):
        if concat.kind != "concat":
            continue
        for read in _views(g, concat, slices):
            if read.kind == "read_state" and read.inputs["input"] == op.inputs["input"]:
                return True
    return False


@rule
def K10_four_bit_state(g, op):
    return g.program.states and _entries(g, op) == 16


@rule
def K12_long_cache(g, t):
    return len(t.shape) == 4 and (t.shape[2] or 0) > 1024


@rule
def K14_blended(g, op):
    for total in _views(g, op, ("slice_update", "concat")):
        if total.kind != "add":
            continue
        for product in (g.source(total, "x"), g.source(total, "y")):
            if product is not None and product.kind == "mul":
                makers = _views(g, product, ("slice_by_index",))
                if "read_state" in [maker.kind for maker in makers]:
                    return True
    return False


# --- operations


@rule
def O1_unknown(g, op):
    return op.kind not in ON_ANE


@rule
def O3_late_ops(g, op):
    return g.generation < (2 if op.kind == "topk" else 3)


@rule
def O4_product(g, op):
    return op.kind == "linear" or g.fixed(op, "y") or g.fixed(op, "x")


@rule
def O15_spatial_softmax(g, op):
    return int(_scalar(g, op, "axis", -1)) % max(len(g.shape(op, "x")), 1) != 1


@rule
def G1_small(g, op):
    return g.weight_bytes < 600_000


@rule
def G2_large(g, op):
    return g.weight_bytes > 2_000_000_000


@rule
def G3_programs(g, op):
    return g.programs > 128


@rule
def G4_large_package(g, op):
    return g.weight_bytes > 1_000_000_000


# --- compression


@rule
def Q2_blocked_int8(g):
    names = []
    for weight, _ in g.weights("constexpr_blockwise_shift_scale"):
        if _blocks(g, weight) and not _nibbles(g, weight):
            names.append(weight.name)
    return names


@rule
def Q3_blocked_int4(g):
    names = []
    for weight, reader in g.weights("constexpr_blockwise_shift_scale"):
        if _blocks(g, weight) and _nibbles(g, weight):
            names.append(reader.name)
    return names


@rule
def Q4_int8(g):
    names = []
    kinds = "constexpr_blockwise_shift_scale", "constexpr_affine_dequantize"
    for weight, reader in g.weights(*kinds):
        if not _nibbles(g, weight):
            names.append(reader.name)
    return names


@rule
def Q5_four_bit(g, op):
    return _entries(g, op) == 16


@rule
def Q6_folded_int8(g, op):
    return g.generation == 1 and not _nibbles(g, op)


# --- numerics


@rule
def N1_masks(g, op):
    for parameter in op.inputs:
        value = g.constant(op, parameter)
        if isinstance(value, np.ndarray) and value.dtype.kind == "f" and value.size:
            if value.min() < -4e4:
                return True
    return False


@rule
def N3_squares(g, op):
    if op.kind == "mul":
        scaled = _makers(g, op, "x") & {"real_div", "mul"}
        return op.inputs["x"] == op.inputs["y"] and not scaled
    return op.kind != "pow" or _scalar(g, op, "y", 0) == 2


@rule
def N5_epsilon(g, op):
    tiny = 0 < _scalar(g, op, "epsilon", 1) < FP16_TINY
    return tiny and "add" not in _makers(g, op, "x")


# --- reading arguments


def _elements(shape) -> int:
    """The number of elements of a shape; a size that varies counts as 1."""
    return prod(n or 1 for n in shape)


def _makers(g, op, *parameters) -> set[str]:
    """The kinds of the operations whose results these arguments are."""
    kinds = set()
    for parameter in parameters:
        if maker := g.source(op, parameter):
            kinds.add(maker.kind)
    return kinds


def _scalar(g, op, parameter, default):
    """The number that is a constant argument, else `default`."""
    value = g.constant(op, parameter)
    if value is not None and np.size(value) == 1:
        return np.ravel(value)[0]
    return default


def _views(g, op, kinds) -> list[Op]:
    """The operations whose results `op` takes, directly or through operations of
    `kinds`."""
    makers, waiting = {}, [op]
    while waiting:
        for value in waiting.pop().reads():
            maker = g.producers.get(value)
            if maker is not None and value not in makers:
                makers[value] = maker
                if maker.kind in kinds:
                    waiting.append(maker)
    return list(makers.values())


def _columns(g, op) -> int:
    """The number of columns, such as tokens, of a product by a weight; 1 for a
    convolution that is not pointwise. A size that varies counts as 2."""
    sizes = g.shape(op, "x")[2:]
    if op.kind == "linear":
        sizes = g.shape(op, "x")[-2:-1]
    elif prod(g.shape(op, "weight")[2:]) != 1:
        return 1
    return prod(n or 2 for n in sizes)


def _entries(g, op) -> int:
    """The number of entries of a palette [groups…, entries, vector]."""
    return (g.shape(op, "lut") or (0, 0))[-2]


def _blocks(g, op) -> bool:
    """Whether a weight's scales vary along more than its output channels."""
    return sum(n > 1 for n in g.shape(op, "scale")) > 1


def _nibbles(g, op) -> bool:
    """Whether a weight is stored in 4 bits, by the range of its values, since the
    program's reader returns one value per byte."""
    data = g.constant(op, "data")
    if data is None or not data.size:
        return False
    largest = 15 if data.dtype == np.uint8 else 7
    return -8 <= int(data.min()) and int(data.max()) <= largest
