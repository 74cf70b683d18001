"""The rules of the Neural Engine, by subject, and `lint`; see `workbench.ane.rule` for what a rule is."""

from math import ceil, prod

import numpy as np

from workbench.ane.rule import FP16_TINY, MIB, ON_ANE, RULES, Finding, LintGraph, results, rule


def lint(graph: LintGraph) -> list[Finding]:
    """Every rule that a graph breaks, with the names of what breaks it."""
    names = {r: tuple(dict.fromkeys(r.find(graph))) for r in RULES.values()}
    return [Finding(r, broken) for r, broken in names.items() if broken]


# --- types and rank


@rule("T1", "results")
def float32(g, t):
    return t.dtype == "FLOAT32"


@rule("T2", "cast")
def islands(g, op):
    dtypes = {t.dtype for o in g.ops for t in results(o)}
    source = getattr(op.inputs["x"], "name", None)
    return "FLOAT16" in dtypes and "FLOAT32" in {
        t.dtype for t in (op.outputs[0][1], g.types.get(source)) if t
    }


@rule("T3", "results")
def integers(g, t):
    return t.dtype not in {
        "FLOAT16",
        "FLOAT32",
        "INT8",
        "UINT8",
        "INT16",
        "UINT16",
        "BOOL",
    }  # float32 is T1's


@rule("T4", "results")
def rank(g, t):
    return len(t.shape) > 5


@rule("T5", "matmul")
def high_matmul(g, op):
    return len(g.shape(op, "x")) >= 5 and "transpose" in _makers(g, op, "x", "y")


@rule("T6", "scaled_dot_product_attention")
def high_attention(g, op):
    return len(g.shape(op, "query")) >= 5


@rule("T7", "gather gather_along_axis")
def wide_gather(g, op):
    shape = g.shape(op, "x")
    return bool(shape) and (shape[int(_scalar(g, op, "axis", 0))] or 0) > 65535


# --- shapes


@rule("S1", "interface")
def narrow_io(g, t):
    return t.dtype == "FLOAT16" and t.shape and (t.shape[-1] or 1) < 32


@rule("S2", "linear conv")
def rank3(g, op):
    return len(g.shape(op, "x")) == 3


@rule("S4", "results")
def long_axis(g, t):
    cap = 16384 if g.generation <= 3 else 65536
    return any(n and n > (65536 if i == 1 else cap) for i, n in enumerate(t.shape))


@rule("S6", "conv")
def wide_kernel(g, op):
    return (g.shape(op, "weight") or (0,))[-1] > (13 if g.generation == 1 else 15)


@rule("S7", "conv")
def depthwise(g, op):
    return 1024 <= g.shape(op, "weight")[0] == int(_scalar(g, op, "groups", 1))


@rule("S9", "conv")
def aliasing_kernel(g, op):
    if not isinstance(g.constant(op, "weight"), np.ndarray):
        return False
    rows, *rest = g.shape(op, "weight")
    tile = ceil(rows / 16) * prod(rest) * 2
    return tile >= MIB - 16384 and abs(tile - round(tile / MIB) * MIB) <= 16384


@rule("S10", "transpose reshape")
def moved_width(g, op):
    shape = g.shape(op, "x")
    if op.kind == "reshape":
        return shape[-1:] != op.outputs[0][1].shape[-1:]
    return int(np.ravel(g.constant(op, "perm"))[-1]) not in (-1, len(shape) - 1)


@rule("S11", "slice_by_index slice_by_size")
def late_slice(g, op):
    return g.generation <= 2 and not g.fixed(op, "begin") and (g.shape(op, "x")[-1] or 0) > 4094


# --- dynamic shapes


@rule("D1", "inputs")
def dynamic(g, t):
    return None in t.shape


@rule("D2")
def enumerated(g):
    features = getattr(g.program.description, "input", [])
    return [f.name for f in features if len(f.type.multiArrayType.enumeratedShapes.shapes) > 128]


@rule("D3", "inputs")
def ranged(g, t):
    return dynamic(g, t)


@rule("D5", "operations")
def control(g, op):
    return op.kind in ("cond", "while_loop", "make_list") or op.kind.startswith("list_")


@rule("D6", "states")
def dynamic_state(g, t):
    return None in t.shape


# --- state


@rule("K1", "states")
def state_type(g, t):
    return t.dtype != "FLOAT16"


@rule("K2", "states")
def state_width(g, t):
    return t.shape and (t.shape[-1] or 0) % 32


@rule("K3", "states")
def states(g, t):
    return len(g.program.states) >= 3


@rule("K4", "states")
def functions(g, t):
    return (
        g.functions > 1
        and "x" in g.program.inputs
        and (g.program.inputs["x"].shape[2:3] or (1,))[0] != 1
    )


@rule("K5", "slice_update")
def loose_update(g, op):
    return op.outputs[0][0] not in {write.inputs["data"].name for write in g.of("write_state")}


@rule("K6", "write_state")
def shifted_rule(g, op):
    maker = g.source(op, "data")
    while maker is not None and maker.kind in ("slice_by_index", "slice_update"):
        maker = g.source(maker, "x" if maker.kind == "slice_by_index" else "update")
    return maker is not None and maker.kind == "concat"


@rule("K9", "operations")
def scatter_rule(g, op):
    return op.kind.startswith("scatter")


@rule("K10", "constexpr_lut_to_dense")
def four_bit_state(g, op):
    return (
        g.program.states and (g.shape(op, "lut") or (0, 0))[-2] == 16
    )  # a lut is [groups…, entries, vector]


@rule("K12", "states")
def long_cache(g, t):
    return len(t.shape) == 4 and (t.shape[2] or 0) > 1024


# --- operations


@rule("O1", "operations")
def unknown(g, op):
    return op.kind not in ON_ANE


@rule("O2", "gather_nd gather_along_axis")
def lookup(g, op):
    return True


@rule("O3", "sin cos topk")
def late_ops(g, op):
    return g.generation < (2 if op.kind == "topk" else 3)


@rule("O4", "linear matmul")
def product_rule(g, op):
    return op.kind == "linear" or g.fixed(op, "y") or g.fixed(op, "x")


@rule("O5", "conv")
def computed_weight(g, op):
    return not g.fixed(op, "weight")


@rule("O7", "operations")
def two_attentions(g, op):
    return len(g.of("scaled_dot_product_attention")) > 1


@rule("O8", "scaled_dot_product_attention")
def attention_rule(g, op):
    return True


@rule("O11", "layer_norm")
def varied_norm(g, op):
    gain = g.constant(op, "gamma")
    return np.size(gain) >= 1024 and np.ptp(gain) > 0


@rule("O15", "softmax")
def spatial_softmax(g, op):
    return int(_scalar(g, op, "axis", -1)) % max(len(g.shape(op, "x")), 1) != 1


@rule("G1", "operations")
def small(g, op):
    return g.weight_bytes < 600_000


@rule("G2", "operations")
def large(g, op):
    return g.weight_bytes > 2_000_000_000


# --- compression


@rule("Q1", "constexpr_lut_to_dense")
def small_groups(g, op):
    return any(
        groups > 1 and n / groups < 4
        for n, groups in zip(op.outputs[0][1].shape, g.shape(op, "lut"), strict=False)
    )


@rule("Q2")
def blocked_int8(g):
    return [
        op.name
        for op, _ in g.weights("constexpr_blockwise_shift_scale")
        if _blocks(g, op) and not _nibbles(g, op)
    ]


@rule("Q3")
def blocked_int4(g):
    return [
        reader.name
        for op, reader in g.weights("constexpr_blockwise_shift_scale")
        if _blocks(g, op) and _nibbles(g, op)
    ]


@rule("Q4")
def int8(g):
    weights = g.weights("constexpr_blockwise_shift_scale", "constexpr_affine_dequantize")
    return [reader.name for op, reader in weights if not _nibbles(g, op)]


# --- numerics


@rule("N1", "operations")
def masks(g, op):
    constants = (g.constant(op, parameter) for parameter in op.inputs)
    return any(
        isinstance(v, np.ndarray) and v.dtype.kind == "f" and v.size and v.min() < -4e4
        for v in constants
    )


@rule("N3", "square reduce_sum_square reduce_l2_norm l2_norm mul pow")
def squares(g, op):
    if op.kind == "mul":
        return op.inputs["x"] == op.inputs["y"] and not _makers(g, op, "x") & {"real_div", "mul"}
    return op.kind != "pow" or _scalar(g, op, "y", 0) == 2


@rule("N5", "operations")
def epsilon(g, op):
    return 0 < _scalar(g, op, "epsilon", 1) < FP16_TINY and "add" not in _makers(g, op, "x")


@rule("N7", "softplus softplus_parametric reduce_log_sum_exp")
def fragile(g, op):
    return True


@rule("N8", "reduce_sum reduce_mean")
def long_sum(g, op):
    return prod(n or 1 for n in g.shape(op, "x")) > 2048 * prod(
        n or 1 for n in op.outputs[0][1].shape
    )


# --- reading arguments


def _makers(g, op, *parameters) -> set[str]:
    return {maker.kind for p in parameters if (maker := g.source(op, p)) is not None}


def _scalar(g, op, parameter, default):
    value = g.constant(op, parameter)
    return np.ravel(value)[0] if value is not None and np.size(value) == 1 else default


def _blocks(g, op) -> bool:
    """Whether a weight's scales vary along more than its output channels."""
    return sum(n > 1 for n in g.shape(op, "scale")) > 1


def _nibbles(g, op) -> bool:
    """Whether a weight is stored in 4 bits: by its values, since the program stores one per byte."""
    data = g.constant(op, "data")
    return (
        data is not None
        and data.size > 0
        and -8 <= int(data.min())
        and int(data.max()) <= (15 if data.dtype == np.uint8 else 7)
    )
