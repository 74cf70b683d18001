"""The rules themselves, by subject; see `workbench.ane.rule` for what a rule is."""

from math import ceil, prod

import numpy as np

from workbench.ane.rule import EXPERIMENT_30, FP16_TINY, MIB, ON_ANE, results, rule

# --- types and rank


@rule("T1", "cpu", "H", "CT NER", "float32 results", "export in fp16")
def float32(g):
    return [op for op in g.ops if any(t.dtype == "FLOAT32" for t in results(op))]


@rule("T2", "slow", "H", "NER SMP", "casts to or from float32 cut the graph into segments", "keep constants and masks in fp16")
def islands(g):
    half = any(t.dtype == "FLOAT16" for op in g.ops for t in results(op))
    return [op for op in g.of("cast") if half and "FLOAT32" in {op.outputs[0][1].dtype, _dtype(g, op, "x")}]


@rule("T3", "cpu", "H", "NER AF", "results that are neither fp16, int8, int16 nor bool", "compute addresses on the host")
def integers(g):
    fine = {"FLOAT16", "FLOAT32", "INT8", "UINT8", "INT16", "UINT16", "BOOL"}  # float32 is T1's
    return [op for op in g.ops if any(t.dtype not in fine for t in results(op))]


@rule("T4", "cpu", "H", "NER AF", "rank above 5", "merge axes")
def rank(g):
    return [op for op in g.ops if any(len(t.shape) > 5 for t in results(op))]


@rule("T5", "fails", "M", "AF", "transpose into matmul at rank 5 or more", "merge axes before the product")
def high_matmul(g):
    return [op for op in g.of("matmul") if len(g.shape(op, "x")) >= 5 and "transpose" in _makers(g, op, "x", "y")]


@rule("T6", "wrong", "M", "ET", "attention at rank 5: slow, and inf or NaN on iOS 26", "repeat heads at rank 4")
def high_attention(g):
    return [op for op in g.of("scaled_dot_product_attention") if len(g.shape(op, "query")) >= 5]


@rule("T7", "wrong", "M", "ET#7616 JR", "indices above 65535 pass through uint16", "look embeddings up on the host")
def wide_gather(g):
    return [op for op in g.of("gather", "gather_along_axis") if _axis(g, op, "x", int(_scalar(g, op, "axis", 0))) > 65535]


# --- shapes


@rule("S1", "slow", "H", "AP NER", "inputs or outputs whose last axis is shorter than 32: padded to 64 bytes per row",
      "layout bc1t keeps T last; more columns per call fill the row")  # fmt: skip
def narrow_io(g):
    made = {name: g.types[name] for name in g.program.outputs if name in g.types}
    return [n for n, t in (g.program.inputs | made).items() if t.dtype == "FLOAT16" and t.shape and (t.shape[-1] or 1) < 32]


@rule("S2", "slow", "H", "AP NER", "a product over [B, T, C] activations", "keep (B, C, 1, T), channels on axis 1")
def rank3(g):
    return [op for op in g.of("linear", "conv") if len(g.shape(op, "x")) == 3]


@rule("S4", "fails", "M", "AF ANM CT#1260", "an axis beyond 16384 (M1 to M3) or 65536 (channels, M4 on)", "cut the tensor",
      "JR ran a convolution 2304 → 262144 on an A19 Pro (S5)")  # fmt: skip
def long_axis(g):
    cap = 16384 if g.generation <= 3 else 65536
    return [op for op in g.ops for t in results(op) if any(n and n > (65536 if i == 1 else cap) for i, n in enumerate(t.shape))]


@rule("S6", "fails", "M", "AF", "a convolution kernel wider than 13 (M1) or 15", "split the kernel")
def wide_kernel(g):
    return [op for op in g.of("conv") if (g.shape(op, "weight") or (0,))[-1] > (13 if g.generation == 1 else 15)]


@rule("S7", "cpu", "M", "JR", "a depthwise convolution of 1024 channels or more", "write it as shifted products")
def depthwise(g):
    return [op for op in g.of("conv") if 1024 <= g.shape(op, "weight")[0] == int(_scalar(g, op, "groups", 1))]


@rule("S9", "slow", "M", "STB#110", "an fp16 kernel whose tile is within 16 KiB of whole MiB: a third of the bandwidth (M4)",
      "split the input channels")  # fmt: skip
def aliasing_kernel(g):
    def near(weight):
        tile = ceil(weight[0] / 16) * prod(weight[1:]) * 2
        return tile >= MIB - 16384 and abs(tile - round(tile / MIB) * MIB) <= 16384

    return [op for op in g.of("conv") if isinstance(g.constant(op, "weight"), np.ndarray) and near(g.shape(op, "weight"))]


@rule("S10", "slow", "H", "NER AP", "reshapes and transposes that move the last axis", "keep the last axis in place")
def moved_width(g):
    turned = [op for op in g.of("transpose") if int(np.ravel(g.constant(op, "perm"))[-1]) not in (-1, len(g.shape(op, "x")) - 1)]
    return turned + [op for op in g.of("reshape") if g.shape(op, "x")[-1:] != op.outputs[0][1].shape[-1:]]


@rule("S11", "wrong", "M", "AF", "a run-time slice of a last axis beyond 4094 (M1, M2): ±inf", "slice another axis, or mask")
def late_slice(g):
    sliced = (op for op in g.of("slice_by_index", "slice_by_size") if not g.fixed(op, "begin"))
    return [op for op in sliced if g.generation <= 2 and (g.shape(op, "x")[-1] or 0) > 4094]


# --- dynamic shapes


@rule("D1", "slow", "H", "NER", "sizes known only at run time", "fixed shapes, one function each, are the safe way (--t fixed)")
def dynamic(g):
    return [n for n, t in g.program.inputs.items() if None in t.shape]


@rule("D2", "fails", "H", "CT", "more than 128 enumerated shapes", "enumerate fewer, or use a range")
def enumerated(g):
    features = getattr(g.program.description, "input", [])
    return [f.name for f in features if len(f.type.multiArrayType.enumeratedShapes.shapes) > 128]


@rule("D3", "stays", "M", "ET CT#2370", "a RangeDim: off the Neural Engine at all but its default shape",
      "time each T; a plan alone is no proof", f"CT#1909 and AB saw it there; {EXPERIMENT_30}")  # fmt: skip
def ranged(g):
    return dynamic(g)


@rule("D5", "cpu", "H", "SMP AF", "control flow and lists", "unroll it")
def control(g):
    return [op for op in g.ops if op.kind in ("cond", "while_loop", "make_list") or op.kind.startswith("list_")]


@rule("D6", "fails", "H", "CT#2537", "a state of a size known only at run time", "give states fixed sizes")
def dynamic_state(g):
    return [n for n, t in g.program.states.items() if None in t.shape]


# --- state


@rule("K1", "fails", "H", "CT", "a state that is not fp16", "hold it in fp16")
def state_type(g):
    return [n for n, t in g.program.states.items() if t.dtype != "FLOAT16"]


@rule("K2", "fails", "M", "CT#2631", "a state whose last axis is no multiple of 32", "pad it")
def state_width(g):
    return [n for n, t in g.program.states.items() if t.shape and (t.shape[-1] or 0) % 32]


@rule("K3", "fails", "M", "JR", "three or more states: status 0x1d on an iPhone", "--states packed holds them in two tensors")
def states(g):
    return list(g.program.states) if len(g.program.states) >= 3 else []


@rule("K4", "fails", "M", "JR", "several functions with state and T above 1 (iPhone)", "one package per function")
def functions(g):
    wide = any((t.shape[2:3] or (1,))[0] != 1 for n, t in g.program.inputs.items() if n == "x")
    return list(g.program.states) if g.functions > 1 and wide else []


@rule("K5", "cpu", "M", "AF", "a slice_update that feeds no state", "write straight into the state")
def loose_update(g):
    fed = {op.inputs["data"].name for op in g.of("write_state")}
    return [op for op in g.of("slice_update") if not fed & {name for name, _ in op.outputs}]


@rule("K6", "fails", "M", "JR", "a cache shifted by concatenation: error −14", "write k·(1−m) + k_new·m")
def shifted_rule(g):
    through = {"slice_by_index": "x", "slice_update": "update"}
    return [op for op in g.of("write_state") if _past_casts(g, op, "data", through) == "concat"]


@rule("K9", "cpu", "H", "CT", "scatter", "write through a mask")
def scatter_rule(g):
    return [op for op in g.ops if op.kind.startswith("scatter")]


@rule("K10", "wrong", "M", "CT#2716", "4-bit palettes and state: crashed after 100 to 200 predictions", "soak-test it on a Mac")
def four_bit_state(g):
    # a lut is [groups…, entries, vector]
    luts = (op for op in g.maker.values() if op.kind == "constexpr_lut_to_dense" and (g.shape(op, "lut") or (0, 0))[-2] == 16)
    return list(luts) if g.program.states else []


@rule("K12", "slow", "M", "JR", "a cache of more than 1024 rows: each token reads all of them", "export the max_seq_len you use")
def long_cache(g):
    return [n for n, t in g.program.states.items() if len(t.shape) == 4 and (t.shape[2] or 0) > 1024]


# --- operations


@rule("O1", "cpu", "H", "AF", "operations that no sweep found on the Neural Engine", "write them with others, or on the host")
def unknown(g):
    return [op for op in g.ops if op.kind not in ON_ANE]


@rule("O2", "cpu", "H", "NER", "rotary tables looked up by gather", "pass cos and sin as inputs")
def lookup(g):
    return g.of("gather_nd", "gather_along_axis")


@rule("O3", "cpu", "M", "AF", "sin and cos before M3, topk before M2", "compute them on the host")
def late_ops(g):
    return (g.of("sin", "cos") if g.generation < 3 else []) + (g.of("topk") if g.generation < 2 else [])


@rule("O4", "slow", "H", "NER AP", "a product with a constant weight", "write it as a 1×1 convolution")
def product_rule(g):
    return g.of("linear") + [op for op in g.of("matmul") if g.fixed(op, "y") or g.fixed(op, "x")]


@rule("O5", "fails", "M", "AF", "a convolution whose weight is computed", "make the weight a constant")
def computed_weight(g):
    return [op for op in g.of("conv") if not g.fixed(op, "weight")]


@rule("O7", "stays", "M", "STB#89", "two fused attentions in one function (macOS 26): all on the CPU, silently", "decompose them")
def two_attentions(g):
    return g.ops if len(g.of("scaled_dot_product_attention")) > 1 else []


@rule("O8", "wrong", "H", "ET#15833", "fused attention gives inf and NaN in fp16 (macOS and iOS 26)", "decompose it")
def attention_rule(g):
    return g.of("scaled_dot_product_attention")


@rule("O11", "fails", "M", "AF", "layer_norm over 1024 or more with a gain that varies", "multiply by the gain afterwards")
def varied_norm(g):
    gains = ((op, g.constant(op, "gamma")) for op in g.of("layer_norm"))
    return [op for op, gain in gains if np.size(gain) >= 1024 and np.ptp(gain) > 0]


@rule("O15", "slow", "H", "NER", "softmax over an axis other than channels", "accept it for attention")
def spatial_softmax(g):
    return [op for op in g.of("softmax") if int(_scalar(g, op, "axis", -1)) % max(len(g.shape(op, "x")), 1) != 1]


@rule("G1", "stays", "H", "AF AB", "under 0.6 MB of weights: such graphs stay on the CPU (0.3 MB did, 1.2 MB did not)",
      "put more layers into a shard (--layers-per-shard)")  # fmt: skip
def small(g):
    return g.ops if g.weight_bytes < 600_000 else []


@rule("G2", "stays", "H", "CT ANM AB", "over 2 GB of weights (1 GB on an iPhone)", "fewer layers per shard")
def large(g):
    return g.ops if g.weight_bytes > 2_000_000_000 else []


# --- compression


@rule("Q1", "slow", "H", "CT", "palettes for groups of fewer than 4 channels", "larger groups")
def small_groups(g):
    def group(op):
        lut, whole = g.shape(op, "lut"), op.outputs[0][1].shape
        return min((n / groups for n, groups in zip(whole, lut, strict=False) if groups > 1), default=np.inf)

    return [op for op in g.maker.values() if op.kind == "constexpr_lut_to_dense" and group(op) < 4]


@rule("Q2", "slow", "H", "CT ET", "int8 weights with a scale per block, the GPU's form", "--compress int8-channel")
def blocked_int8(g):
    return [op for op, _ in g.weights("constexpr_blockwise_shift_scale") if _blocks(g, op) and not _nibbles(g, op)]


@rule("Q3", "stays", "H", "AB NER", "int4 weights with a scale per block: on the CPU, or silently wrong",
      "--compress lut4, or int8-channel")  # fmt: skip
def blocked_int4(g):
    return [reader for op, reader in g.weights("constexpr_blockwise_shift_scale") if _blocks(g, op) and _nibbles(g, op)]


@rule("Q4", "stays", "L", "STB#110", "int8 weights: CPU only for one user of an M4", "measure it",
      f"AB keeps int8 per tensor on the Neural Engine; {EXPERIMENT_30}")  # fmt: skip
def int8(g):
    found = g.weights("constexpr_blockwise_shift_scale", "constexpr_affine_dequantize")
    return [reader for op, reader in found if not _nibbles(g, op)]


# --- numerics


@rule("N1", "wrong", "H", "NER", "constants beyond −40000, such as masks of −inf", "block with −1e4")
def masks(g):
    named = ((op, v) for op in g.ops for k in op.inputs if isinstance(v := g.constant(op, k), np.ndarray) and v.dtype.kind == "f")
    return [op for op, v in named if v.size and v.min() < -4e4]


@rule("N3", "wrong", "H", "CT ANM JR", "squares of values that were not scaled: inf from 256 on",
      "scale by a power of two before, and back after")  # fmt: skip
def squares(g):
    product_ = [op for op in g.of("mul") if op.inputs["x"] == op.inputs["y"] and not _makers(g, op, "x") & {"real_div", "mul"}]
    power = [op for op in g.of("pow") if _scalar(g, op, "y", 0) == 2]
    return g.of("square", "reduce_sum_square", "reduce_l2_norm", "l2_norm") + product_ + power


@rule("N5", "wrong", "M", "AF", "an epsilon below 6.1e-5, which becomes 0, with no other one added before",
      "raise it, or scale around the norm")  # fmt: skip
def epsilon(g):
    return [op for op in g.ops if 0 < _scalar(g, op, "epsilon", 1) < FP16_TINY and "add" not in _makers(g, op, "x")]


@rule("N7", "wrong", "H", "CT#2687 CT#2690", "softplus falls to 0 near 10.4; reduce_log_sum_exp overflows", "write them out")
def fragile(g):
    return g.of("softplus", "softplus_parametric", "reduce_log_sum_exp")


@rule("N8", "wrong", "M", "AF", "a sum over more than 2048 values in fp16", "sum by a convolution, which accumulates wide")
def long_sum(g):
    summed = g.of("reduce_sum", "reduce_mean")
    return [op for op in summed if prod(n or 1 for n in g.shape(op, "x")) > 2048 * prod(n or 1 for n in op.outputs[0][1].shape)]


# --- reading arguments


def _dtype(g, op, parameter) -> str:
    value = op.inputs.get(parameter)
    return g.types[value.name].dtype if hasattr(value, "name") else ""


def _makers(g, op, *parameters) -> set[str]:
    return {maker.kind for p in parameters if (maker := g.source(op, p)) is not None}


def _past_casts(g, op, parameter, kinds) -> str | None:
    """What makes an argument, looked at through operations of some kinds (kind → which argument to follow)."""
    maker = g.source(op, parameter)
    while maker is not None and maker.kind in kinds:
        maker = g.source(maker, kinds[maker.kind])
    return maker.kind if maker is not None else None


def _scalar(g, op, parameter, default):
    value = g.constant(op, parameter)
    return default if value is None or np.size(value) != 1 else np.ravel(value)[0]


def _axis(g, op, parameter, axis: int) -> int:
    shape = g.shape(op, parameter)
    return (shape[axis] or 0) if shape else 0


def _blocks(g, op) -> bool:
    """Whether a weight's scales vary along more than its output channels."""
    return sum(n > 1 for n in g.shape(op, "scale")) > 1


def _nibbles(g, op) -> bool:
    """Whether a weight is stored in 4 bits: by its values, since one is held per byte."""
    data = g.constant(op, "data")
    return data is not None and data.size > 0 and -8 <= int(data.min()) and int(data.max()) <= (15 if data.dtype == np.uint8 else 7)
