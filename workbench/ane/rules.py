"""The rules of the Neural Engine, by subject, and `lint`; see `workbench.ane.rule` for what a rule is."""

from math import ceil, prod

import numpy as np

from workbench.ane.rule import (
    EXPERIMENT_30,
    FP16_TINY,
    MIB,
    ON_ANE,
    RULES,
    Finding,
    LintGraph,
    results,
    rule,
)


def lint(graph: LintGraph) -> list[Finding]:
    """Every rule that a graph breaks, with the names of what breaks it."""
    names = {r: tuple(dict.fromkeys(r.find(graph))) for r in RULES.values()}
    return [Finding(r, broken) for r, broken in names.items() if broken]


# --- types and rank


@rule("T1", "cpu", "H", "CT NER", "float32 results", "export in fp16", of="results")
def float32(g, t):
    return t.dtype == "FLOAT32"


@rule(
    "T2",
    "slow",
    "H",
    "NER SMP",
    "casts to or from float32 cut the graph into segments",
    "keep constants and masks in fp16",
    of="cast",
)
def islands(g, op):
    dtypes = {t.dtype for o in g.ops for t in results(o)}
    source = getattr(op.inputs["x"], "name", None)
    return "FLOAT16" in dtypes and "FLOAT32" in {
        t.dtype for t in (op.outputs[0][1], g.types.get(source)) if t
    }


@rule(
    "T3",
    "cpu",
    "H",
    "NER AF",
    "results that are neither fp16, int8, int16 nor bool",
    "compute addresses on the host",
    of="results",
)
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


@rule("T4", "cpu", "H", "NER AF", "rank above 5", "merge axes", of="results")
def rank(g, t):
    return len(t.shape) > 5


@rule(
    "T5",
    "fails",
    "M",
    "AF",
    "transpose into matmul at rank 5 or more",
    "merge axes before the product",
    of="matmul",
)
def high_matmul(g, op):
    return len(g.shape(op, "x")) >= 5 and "transpose" in _makers(g, op, "x", "y")


@rule(
    "T6",
    "wrong",
    "M",
    "ET",
    "attention at rank 5: slow, and inf or NaN on iOS 26",
    "repeat heads at rank 4",
    of="scaled_dot_product_attention",
)
def high_attention(g, op):
    return len(g.shape(op, "query")) >= 5


@rule(
    "T7",
    "wrong",
    "M",
    "ET#7616 JR",
    "indices above 65535 pass through uint16",
    "look embeddings up on the host",
    of="gather gather_along_axis",
)
def wide_gather(g, op):
    shape = g.shape(op, "x")
    return bool(shape) and (shape[int(_scalar(g, op, "axis", 0))] or 0) > 65535


# --- shapes


@rule(
    "S1",
    "slow",
    "H",
    "AP NER",
    "inputs or outputs whose last axis is shorter than 32: padded to 64 bytes per row",
    "layout bc1t keeps T last; more columns per call fill the row",
    of="interface",
)
def narrow_io(g, t):
    return t.dtype == "FLOAT16" and t.shape and (t.shape[-1] or 1) < 32


@rule(
    "S2",
    "slow",
    "H",
    "AP NER",
    "a product over [B, T, C] activations",
    "keep (B, C, 1, T), channels on axis 1",
    of="linear conv",
)
def rank3(g, op):
    return len(g.shape(op, "x")) == 3


@rule(
    "S4",
    "fails",
    "M",
    "AF ANM CT#1260",
    "an axis beyond 16384 (M1 to M3) or 65536 (channels, M4 on)",
    "cut the tensor",
    "JR ran a convolution 2304 → 262144 on an A19 Pro (S5)",
    of="results",
)
def long_axis(g, t):
    cap = 16384 if g.generation <= 3 else 65536
    return any(n and n > (65536 if i == 1 else cap) for i, n in enumerate(t.shape))


@rule(
    "S6",
    "fails",
    "M",
    "AF",
    "a convolution kernel wider than 13 (M1) or 15",
    "split the kernel",
    of="conv",
)
def wide_kernel(g, op):
    return (g.shape(op, "weight") or (0,))[-1] > (13 if g.generation == 1 else 15)


@rule(
    "S7",
    "cpu",
    "M",
    "JR",
    "a depthwise convolution of 1024 channels or more",
    "write it as shifted products",
    of="conv",
)
def depthwise(g, op):
    return 1024 <= g.shape(op, "weight")[0] == int(_scalar(g, op, "groups", 1))


@rule(
    "S9",
    "slow",
    "M",
    "STB#110",
    "an fp16 kernel whose tile is within 16 KiB of whole MiB: a third of the bandwidth (M4)",
    "split the input channels",
    of="conv",
)
def aliasing_kernel(g, op):
    if not isinstance(g.constant(op, "weight"), np.ndarray):
        return False
    rows, *rest = g.shape(op, "weight")
    tile = ceil(rows / 16) * prod(rest) * 2
    return tile >= MIB - 16384 and abs(tile - round(tile / MIB) * MIB) <= 16384


@rule(
    "S10",
    "slow",
    "H",
    "NER AP",
    "reshapes and transposes that move the last axis",
    "keep the last axis in place",
    of="transpose reshape",
)
def moved_width(g, op):
    shape = g.shape(op, "x")
    if op.kind == "reshape":
        return shape[-1:] != op.outputs[0][1].shape[-1:]
    return int(np.ravel(g.constant(op, "perm"))[-1]) not in (-1, len(shape) - 1)


@rule(
    "S11",
    "wrong",
    "M",
    "AF",
    "a run-time slice of a last axis beyond 4094 (M1, M2): ±inf",
    "slice another axis, or mask",
    of="slice_by_index slice_by_size",
)
def late_slice(g, op):
    return g.generation <= 2 and not g.fixed(op, "begin") and (g.shape(op, "x")[-1] or 0) > 4094


# --- dynamic shapes


@rule(
    "D1",
    "slow",
    "H",
    "NER",
    "sizes known only at run time",
    "fixed shapes, one function each, are the safe way (--t fixed)",
    of="inputs",
)
def dynamic(g, t):
    return None in t.shape


@rule(
    "D2", "fails", "H", "CT", "more than 128 enumerated shapes", "enumerate fewer, or use a range"
)
def enumerated(g):
    features = getattr(g.program.description, "input", [])
    return [f.name for f in features if len(f.type.multiArrayType.enumeratedShapes.shapes) > 128]


@rule(
    "D3",
    "stays",
    "M",
    "ET CT#2370",
    "a RangeDim: off the Neural Engine at all but its default shape",
    "time each T; a plan alone is no proof",
    f"CT#1909 and AB saw it there; {EXPERIMENT_30}",
    of="inputs",
)
def ranged(g, t):
    return dynamic(g, t)


@rule("D5", "cpu", "H", "SMP AF", "control flow and lists", "unroll it", of="")
def control(g, op):
    return op.kind in ("cond", "while_loop", "make_list") or op.kind.startswith("list_")


@rule(
    "D6",
    "fails",
    "H",
    "CT#2537",
    "a state of a size known only at run time",
    "give states fixed sizes",
    of="states",
)
def dynamic_state(g, t):
    return None in t.shape


# --- state


@rule("K1", "fails", "H", "CT", "a state that is not fp16", "hold it in fp16", of="states")
def state_type(g, t):
    return t.dtype != "FLOAT16"


@rule(
    "K2",
    "fails",
    "M",
    "CT#2631",
    "a state whose last axis is no multiple of 32",
    "pad it",
    of="states",
)
def state_width(g, t):
    return t.shape and (t.shape[-1] or 0) % 32


@rule(
    "K3",
    "fails",
    "M",
    "JR",
    "three or more states: status 0x1d on an iPhone",
    "--states packed holds them in two tensors",
    of="states",
)
def states(g, t):
    return len(g.program.states) >= 3


@rule(
    "K4",
    "fails",
    "M",
    "JR",
    "several functions with state and T above 1 (iPhone)",
    "one package per function",
    of="states",
)
def functions(g, t):
    return (
        g.functions > 1
        and "x" in g.program.inputs
        and (g.program.inputs["x"].shape[2:3] or (1,))[0] != 1
    )


@rule(
    "K5",
    "cpu",
    "M",
    "AF",
    "a slice_update that feeds no state",
    "write straight into the state",
    of="slice_update",
)
def loose_update(g, op):
    return op.outputs[0][0] not in {write.inputs["data"].name for write in g.of("write_state")}


@rule(
    "K6",
    "fails",
    "M",
    "JR",
    "a cache shifted by concatenation: error −14",
    "write k·(1−m) + k_new·m",
    of="write_state",
)
def shifted_rule(g, op):
    maker = g.source(op, "data")
    while maker is not None and maker.kind in ("slice_by_index", "slice_update"):
        maker = g.source(maker, "x" if maker.kind == "slice_by_index" else "update")
    return maker is not None and maker.kind == "concat"


@rule("K9", "cpu", "H", "CT", "scatter", "write through a mask", of="")
def scatter_rule(g, op):
    return op.kind.startswith("scatter")


@rule(
    "K10",
    "wrong",
    "M",
    "CT#2716",
    "4-bit palettes and state: crashed after 100 to 200 predictions",
    "soak-test it on a Mac",
    of="constexpr_lut_to_dense",
)
def four_bit_state(g, op):
    return (
        g.program.states and (g.shape(op, "lut") or (0, 0))[-2] == 16
    )  # a lut is [groups…, entries, vector]


@rule(
    "K12",
    "slow",
    "M",
    "JR",
    "a cache of more than 1024 rows: each token reads all of them",
    "export the max_seq_len you use",
    of="states",
)
def long_cache(g, t):
    return len(t.shape) == 4 and (t.shape[2] or 0) > 1024


# --- operations


@rule(
    "O1",
    "cpu",
    "H",
    "AF",
    "operations that no sweep found on the Neural Engine",
    "write them with others, or on the host",
    of="",
)
def unknown(g, op):
    return op.kind not in ON_ANE


@rule(
    "O2",
    "cpu",
    "H",
    "NER",
    "rotary tables looked up by gather",
    "pass cos and sin as inputs",
    of="gather_nd gather_along_axis",
)
def lookup(g, op):
    return True


@rule(
    "O3",
    "cpu",
    "M",
    "AF",
    "sin and cos before M3, topk before M2",
    "compute them on the host",
    of="sin cos topk",
)
def late_ops(g, op):
    return g.generation < (2 if op.kind == "topk" else 3)


@rule(
    "O4",
    "slow",
    "H",
    "NER AP",
    "a product with a constant weight",
    "write it as a 1×1 convolution",
    of="linear matmul",
)
def product_rule(g, op):
    return op.kind == "linear" or g.fixed(op, "y") or g.fixed(op, "x")


@rule(
    "O5",
    "fails",
    "M",
    "AF",
    "a convolution whose weight is computed",
    "make the weight a constant",
    of="conv",
)
def computed_weight(g, op):
    return not g.fixed(op, "weight")


@rule(
    "O7",
    "stays",
    "M",
    "STB#89",
    "two fused attentions in one function (macOS 26): all on the CPU, silently",
    "decompose them",
    of="",
)
def two_attentions(g, op):
    return len(g.of("scaled_dot_product_attention")) > 1


@rule(
    "O8",
    "wrong",
    "H",
    "ET#15833",
    "fused attention gives inf and NaN in fp16 (macOS and iOS 26)",
    "decompose it",
    of="scaled_dot_product_attention",
)
def attention_rule(g, op):
    return True


@rule(
    "O11",
    "fails",
    "M",
    "AF",
    "layer_norm over 1024 or more with a gain that varies",
    "multiply by the gain afterwards",
    of="layer_norm",
)
def varied_norm(g, op):
    gain = g.constant(op, "gamma")
    return np.size(gain) >= 1024 and np.ptp(gain) > 0


@rule(
    "O15",
    "slow",
    "H",
    "NER",
    "softmax over an axis other than channels",
    "accept it for attention",
    of="softmax",
)
def spatial_softmax(g, op):
    return int(_scalar(g, op, "axis", -1)) % max(len(g.shape(op, "x")), 1) != 1


@rule(
    "G1",
    "stays",
    "H",
    "AF AB",
    "under 0.6 MB of weights: such graphs stay on the CPU (0.3 MB did, 1.2 MB did not)",
    "put more layers into a shard (--layers-per-shard)",
    of="",
)
def small(g, op):
    return g.weight_bytes < 600_000


@rule(
    "G2",
    "stays",
    "H",
    "CT ANM AB",
    "over 2 GB of weights (1 GB on an iPhone)",
    "fewer layers per shard",
    of="",
)
def large(g, op):
    return g.weight_bytes > 2_000_000_000


# --- compression


@rule(
    "Q1",
    "slow",
    "H",
    "CT",
    "palettes for groups of fewer than 4 channels",
    "larger groups",
    of="constexpr_lut_to_dense",
)
def small_groups(g, op):
    return any(
        groups > 1 and n / groups < 4
        for n, groups in zip(op.outputs[0][1].shape, g.shape(op, "lut"), strict=False)
    )


@rule(
    "Q2",
    "slow",
    "H",
    "CT ET",
    "int8 weights with a scale per block, the GPU's form",
    "--compress int8-channel",
)
def blocked_int8(g):
    return [
        op.name
        for op, _ in g.weights("constexpr_blockwise_shift_scale")
        if _blocks(g, op) and not _nibbles(g, op)
    ]


@rule(
    "Q3",
    "stays",
    "H",
    "AB NER",
    "int4 weights with a scale per block: on the CPU, or silently wrong",
    "--compress lut4, or int8-channel",
)
def blocked_int4(g):
    return [
        reader.name
        for op, reader in g.weights("constexpr_blockwise_shift_scale")
        if _blocks(g, op) and _nibbles(g, op)
    ]


@rule(
    "Q4",
    "stays",
    "L",
    "STB#110",
    "int8 weights: CPU only for one user of an M4",
    "measure it",
    f"AB keeps int8 per tensor on the Neural Engine; {EXPERIMENT_30}",
)
def int8(g):
    weights = g.weights("constexpr_blockwise_shift_scale", "constexpr_affine_dequantize")
    return [reader.name for op, reader in weights if not _nibbles(g, op)]


# --- numerics


@rule(
    "N1",
    "wrong",
    "H",
    "NER",
    "constants beyond −40000, such as masks of −inf",
    "block with −1e4",
    of="",
)
def masks(g, op):
    constants = (g.constant(op, parameter) for parameter in op.inputs)
    return any(
        isinstance(v, np.ndarray) and v.dtype.kind == "f" and v.size and v.min() < -4e4
        for v in constants
    )


@rule(
    "N3",
    "wrong",
    "H",
    "CT ANM JR",
    "squares of values that were not scaled: inf from 256 on",
    "scale by a power of two before, and back after",
    of="square reduce_sum_square reduce_l2_norm l2_norm mul pow",
)
def squares(g, op):
    if op.kind == "mul":
        return op.inputs["x"] == op.inputs["y"] and not _makers(g, op, "x") & {"real_div", "mul"}
    return op.kind != "pow" or _scalar(g, op, "y", 0) == 2


@rule(
    "N5",
    "wrong",
    "M",
    "AF",
    "an epsilon below 6.1e-5, which becomes 0, with no other one added before",
    "raise it, or scale around the norm",
    of="",
)
def epsilon(g, op):
    return 0 < _scalar(g, op, "epsilon", 1) < FP16_TINY and "add" not in _makers(g, op, "x")


@rule(
    "N7",
    "wrong",
    "H",
    "CT#2687 CT#2690",
    "softplus falls to 0 near 10.4; reduce_log_sum_exp overflows",
    "write them out",
    of="softplus softplus_parametric reduce_log_sum_exp",
)
def fragile(g, op):
    return True


@rule(
    "N8",
    "wrong",
    "M",
    "AF",
    "a sum over more than 2048 values in fp16",
    "sum by a convolution, which accumulates wide",
    of="reduce_sum reduce_mean",
)
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
