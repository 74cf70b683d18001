"""The rules of the Neural Engine, by subject, and `lint`; see `workbench.ane.rule` for what a rule
is."""

from math import ceil, prod

import numpy as np

from miltorch.program import Op
from workbench.ane.rule import FP16_TINY, MIB, ON_ANE, RULES, Finding, LintGraph, results, rule


def lint(graph: LintGraph) -> list[Finding]:
    """Every rule that a graph breaks, with the names of what breaks it."""
    names = {r: tuple(dict.fromkeys(r.find(graph))) for r in RULES.values()}
    return [Finding(r, broken) for r, broken in names.items() if broken]


# --- types and rank


@rule
def T1_float32(g, t):
    return t.dtype == "FLOAT32"


@rule
def T2_islands(g, op):
    dtypes = set()
    for o in g.ops:
        for t in results(o):
            dtypes.add(t.dtype)
    source = getattr(op.inputs["x"], "name", None)
    return "FLOAT16" in dtypes and "FLOAT32" in {
        t.dtype for t in (op.outputs[0][1], g.types.get(source)) if t
    }


@rule
def T3_integers(g, t):
    return t.dtype not in {
        "FLOAT16",
        "FLOAT32",
        "INT8",
        "UINT8",
        "INT16",
        "UINT16",
        "BOOL",
    }  # float32 is T1's


@rule
def T4_rank(g, t):
    return len(t.shape) > 5


@rule
def T5_high_matmul(g, op):
    return len(g.shape(op, "x")) >= 5 and "transpose" in _makers(g, op, "x", "y")


@rule
def T6_high_attention(g, op):
    return len(g.shape(op, "query")) >= 5


@rule
def T7_wide_gather(g, op):
    shape = g.shape(op, "x")
    return bool(shape) and (shape[int(_scalar(g, op, "axis", 0))] or 0) > 65535


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
def S6_wide_kernel(g, op):
    return (g.shape(op, "weight") or (0,))[-1] > (13 if g.generation == 1 else 15)


@rule
def S7_depthwise(g, op):
    return 1024 <= g.shape(op, "weight")[0] == int(_scalar(g, op, "groups", 1))


@rule
def S9_aliasing_kernel(g, op):
    if not isinstance(g.constant(op, "weight"), np.ndarray):
        return False
    rows, *rest = g.shape(op, "weight")
    tile = ceil(rows / 16) * prod(rest) * 2
    return tile >= MIB - 16384 and abs(tile - round(tile / MIB) * MIB) <= 16384


@rule
def S10_moved_width(g, op):
    shape = g.shape(op, "x")
    if op.kind == "reshape":
        return shape[-1:] != op.outputs[0][1].shape[-1:]
    return int(np.ravel(g.constant(op, "perm"))[-1]) not in (-1, len(shape) - 1)


@rule
def S11_late_slice(g, op):
    return g.generation <= 2 and not g.fixed(op, "begin") and (g.shape(op, "x")[-1] or 0) > 4094


@rule
def S12_spilled(g, t):
    size = 2 * prod(n or 1 for n in t.shape)
    return t.dtype == "FLOAT16" and size > (2e6 if g.generation < 5 else 4.7e6)


# --- dynamic shapes


@rule
def D1_dynamic(g, t):
    return None in t.shape


@rule
def D2_enumerated(g):
    features = getattr(g.program.description, "input", [])
    return [f.name for f in features if len(f.type.multiArrayType.enumeratedShapes.shapes) > 128]


@rule
def D3_ranged(g, t):
    return None in t.shape


@rule
def D6_dynamic_state(g, t):
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
def K1_state_type(g, t):
    return t.dtype != "FLOAT16"


@rule
def K2_state_width(g, t):
    return t.shape and (t.shape[-1] or 0) % 32


@rule
def K3_states(g, t):
    return len(g.program.states) >= 3


@rule
def K4_functions(g, t):
    return g.functions > 1 and any(_columns(g, op) != 1 for op in g.of("conv", "linear"))


@rule
def K5_loose_update(g, op):
    return op.outputs[0][0] not in {write.inputs["data"].name for write in g.of("write_state")}


@rule
def K6_shifted(g, op):
    """A shift joins rows of the cache itself; whatever else a concat joins is no shift."""
    slices = ("slice_by_index", "slice_by_size", "concat")
    concats = [o for o in _views(g, op, (*slices, "slice_update")) if o.kind == "concat"]
    reads = []
    for concat in concats:
        for o in _views(g, concat, slices):
            if o.kind == "read_state":
                reads.append(o)
    return any(read.inputs["input"] == op.inputs["input"] for read in reads)


@rule
def K10_four_bit_state(g, op):
    return g.program.states and _entries(g, op) == 16


@rule
def K12_long_cache(g, t):
    return len(t.shape) == 4 and (t.shape[2] or 0) > 1024


@rule
def K14_blended(g, op):
    sums = [o for o in _views(g, op, ("slice_update", "concat")) if o.kind == "add"]
    products = []
    for s in sums:
        for p in (g.source(s, "x"), g.source(s, "y")):
            if p is not None:
                products.append(p)
    rows = [o for p in products if p.kind == "mul" for o in _views(g, p, ("slice_by_index",))]
    return any(o.kind == "read_state" for o in rows)


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
def O5_computed_weight(g, op):
    return not g.fixed(op, "weight")


@rule
def O7_two_attentions(g, op):
    return len(g.of("scaled_dot_product_attention")) > 1


@rule
def O11_varied_norm(g, op):
    gain = g.constant(op, "gamma")
    return np.size(gain) >= 1024 and np.ptp(gain) > 0


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
def Q1_small_groups(g, op):
    return any(
        groups > 1 and n / groups < 4
        for n, groups in zip(op.outputs[0][1].shape, g.shape(op, "lut"), strict=False)
    )


@rule
def Q2_blocked_int8(g):
    return [
        op.name
        for op, _ in g.weights("constexpr_blockwise_shift_scale")
        if _blocks(g, op) and not _nibbles(g, op)
    ]


@rule
def Q3_blocked_int4(g):
    return [
        reader.name
        for op, reader in g.weights("constexpr_blockwise_shift_scale")
        if _blocks(g, op) and _nibbles(g, op)
    ]


@rule
def Q4_int8(g):
    weights = g.weights("constexpr_blockwise_shift_scale", "constexpr_affine_dequantize")
    return [reader.name for op, reader in weights if not _nibbles(g, op)]


@rule
def Q5_four_bit(g, op):
    return _entries(g, op) == 16


@rule
def Q6_folded_int8(g, op):
    return g.generation == 1 and not _nibbles(g, op)


# --- numerics


@rule
def N1_masks(g, op):
    constants = (g.constant(op, parameter) for parameter in op.inputs)
    return any(
        isinstance(v, np.ndarray) and v.dtype.kind == "f" and v.size and v.min() < -4e4
        for v in constants
    )


@rule
def N3_squares(g, op):
    if op.kind == "mul":
        return op.inputs["x"] == op.inputs["y"] and not _makers(g, op, "x") & {"real_div", "mul"}
    return op.kind != "pow" or _scalar(g, op, "y", 0) == 2


@rule
def N5_epsilon(g, op):
    return 0 < _scalar(g, op, "epsilon", 1) < FP16_TINY and "add" not in _makers(g, op, "x")


@rule
def N8_long_sum(g, op):
    return prod(n or 1 for n in g.shape(op, "x")) > 2048 * prod(
        n or 1 for n in op.outputs[0][1].shape
    )


# --- reading arguments


def _makers(g, op, *parameters) -> set[str]:
    return {maker.kind for p in parameters if (maker := g.source(op, p)) is not None}


def _scalar(g, op, parameter, default):
    value = g.constant(op, parameter)
    if value is not None and np.size(value) == 1:
        return np.ravel(value)[0]
    return default


def _views(g, op, kinds) -> list[Op]:
    """The operations whose results `op` takes, those behind operations of `kinds` included."""
    makers, waiting = {}, [op]
    while waiting:
        for value in waiting.pop().reads():
            maker = g.producers.get(value)
            if maker is not None and value not in makers:
                makers[value] = maker
                waiting += [maker] if maker.kind in kinds else []
    return list(makers.values())


def _columns(g, op) -> int:
    """How many columns, such as tokens, a product by a weight takes at once (a size that varies
    counts as 2); 1 for a convolution over several of them."""
    if op.kind == "linear":
        return prod(n or 2 for n in g.shape(op, "x")[-2:-1])
    pointwise = prod(g.shape(op, "weight")[2:]) == 1
    if pointwise:
        return prod(n or 2 for n in g.shape(op, "x")[2:])
    return 1


def _entries(g, op) -> int:
    """Entries of a palette [groups…, entries, vector]."""
    return (g.shape(op, "lut") or (0, 0))[-2]


def _blocks(g, op) -> bool:
    """Whether a weight's scales vary along more than its output channels."""
    return sum(n > 1 for n in g.shape(op, "scale")) > 1


def _nibbles(g, op) -> bool:
    """Whether a weight is stored in 4 bits: by its values, since the program stores one per
    byte."""
    data = g.constant(op, "data")
    return (
        data is not None
        and data.size > 0
        and -8 <= int(data.min())
        and int(data.max()) <= (15 if data.dtype == np.uint8 else 7)
    )
