"""Faults planted in a copy of a bundle on disk, hashes in bundle.json redone: what an exporter, a
copy or an editor gets wrong.

A fault names the bundle it is planted in (see `cases.BASES`) and the gate that must see it at the
latest; `plant(copy)` edits a `copies.Copy`. Each is tried in every preset. Those of a decoder in
memory are in `faults`.
"""

import json
from collections.abc import Callable

import numpy as np
from copies import Copy
from faults import registry

PLANTED, planted = registry()


def weight(name: str, tensor: str, change: Callable, bundle: str = "llama") -> None:
    """A fault of one stored weight, of every layer where `tensor` has a `{}`:
    change(weight)."""

    @planted("weights", bundle, name)
    def plant(copy):
        for i in range(copy.manifest["dims"]["L"] if "{}" in tensor else 1):
            change(copy.weight(tensor.format(i)))


def values(name: str, tensor: str, change: Callable, bundle: str = "llama") -> None:
    """A fault of the values of such a weight: change(values) gives others."""
    weight(name, tensor, lambda w: w.write(change(w.read())), bundle)


def exchanged(name: str, one: str, other: str) -> None:
    @planted("weights", name=name)
    def plant(copy):
        copy.weight(one).swap(copy.weight(other))


# Values of weights, by what scales, tables and codes can do


def step(weight) -> int:
    return 2 if weight.codes == "val" else 1


weight(
    "values_of_one_layer_times_0_9",
    "layers.1.self_attn.v_proj.weight",
    lambda w: w.scale(0.9),
)
weight(
    "values_of_the_last_layer_times_1_01",
    "layers.3.self_attn.v_proj.weight",
    lambda w: w.scale(1.01),
)
weight("keys_times_1_2", "layers.{}.self_attn.k_proj.weight", lambda w: w.scale(1.2))
weight(
    "queries_halved_in_the_first_layer",
    "layers.0.self_attn.q_proj.weight",
    lambda w: w.scale(0.5),
)
weight(
    "one_output_channel_times_1_2",
    "layers.1.self_attn.o_proj.weight",
    lambda w: w.scale_row(7, 1.2),
)
weight(
    "one_output_channel_of_down_proj_times_0_8",
    "layers.3.mlp.down_proj.weight",
    lambda w: w.scale_row(100, 0.8),
)
weight(
    "zero_point_plus_one", "layers.{}.mlp.up_proj.weight", lambda w: w.shift(step(w))
)
weight(
    "zero_point_minus_one_in_one_tensor",
    "layers.2.self_attn.q_proj.weight",
    lambda w: w.shift(-step(w)),
)


@planted("weights")
def updates_of_one_layer_times_1_1(copy):
    for tensor in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        copy.weight(f"layers.2.{tensor}").scale(1.1)


def of_another_sign(values):
    values[np.unravel_index(np.abs(values).argmax(), values.shape)] *= -1
    return values


def first_rows_zero(values):
    values[:16] = 0
    return values


def heads(values, D: int = 32):
    return values.reshape(-1, D, *values.shape[1:])


def halves_interleaved(values):
    """The other convention of rotary weights: pairs side by side instead of halves."""
    return heads(values)[:, np.arange(32).reshape(2, -1).T.ravel()]


def shuffled(values):
    rng = np.random.default_rng(0)
    return rng.permutation(values.ravel()).reshape(values.shape)


def one_channel_larger(values):
    values.ravel()[5] *= 1.02
    return values


def two_rows_exchanged(values):
    values[[250, 251]] = values[[251, 250]]
    return values


def coarser(values):
    step = np.abs(values).max() / 3
    return np.rint(values / step) * step


def dropped(values):
    assert values.any()
    return np.zeros_like(values)


values("one_weight_of_another_sign", "layers.2.mlp.gate_proj.weight", of_another_sign)
values("a_block_of_weights_zero", "layers.0.mlp.down_proj.weight", first_rows_zero)
values(
    "a_square_matrix_transposed",
    "layers.2.self_attn.o_proj.weight",
    lambda v: np.swapaxes(v, 0, 1),
)
values(
    "query_heads_in_another_order",
    "layers.1.self_attn.q_proj.weight",
    lambda v: np.roll(heads(v), 1, 0).reshape(v.shape),
)
values(
    "heads_and_their_width_transposed",
    "layers.0.self_attn.k_proj.weight",
    lambda v: heads(v).swapaxes(0, 1).reshape(v.shape),
)
values(
    "rope_halves_interleaved_in_the_key_weights",
    "layers.2.self_attn.k_proj.weight",
    lambda v: halves_interleaved(v).reshape(v.shape),
)
values("norm_weight_of_ones", "layers.2.post_attention_layernorm.weight", np.ones_like)
values(
    "one_channel_of_a_norm_times_1_02",
    "layers.0.input_layernorm.weight",
    one_channel_larger,
)
weight("final_norm_times_1_05", "model.norm.weight", lambda w: w.scale(1.05))
values("head_rows_moved_by_one", "embed_tokens.weight", lambda v: np.roll(v, 1, 0))
values("two_head_rows_exchanged", "embed_tokens.weight", two_rows_exchanged)
values("coarser_than_declared", "layers.1.mlp.up_proj.weight", coarser)
exchanged(
    "gate_and_up_exchanged",
    "layers.3.mlp.gate_proj.weight",
    "layers.3.mlp.up_proj.weight",
)
exchanged(
    "keys_and_values_exchanged",
    "layers.1.self_attn.k_proj.weight",
    "layers.1.self_attn.v_proj.weight",
)
exchanged(
    "norms_of_a_layer_exchanged",
    "layers.1.input_layernorm.weight",
    "layers.1.post_attention_layernorm.weight",
)


@planted("weights")
def mlp_weights_shuffled(copy):
    for i in range(copy.manifest["dims"]["L"]):
        for name in ("gate", "up"):
            weight = copy.weight(f"layers.{i}.mlp.{name}_proj.weight")
            weight.write(shuffled(weight.read()))


@planted("weights")
def one_tensor_of_another_layer(copy):
    copy.weight("layers.0.mlp.down_proj.weight").copy(
        copy.weight("layers.3.mlp.down_proj.weight")
    )


@planted("weights")
def two_layers_exchanged(copy):
    one, other = copy.shard(1), copy.shard(2)
    for name in ("path", "files", "bytes", "modules"):
        one[name], other[name] = other[name], one[name]
    for name in ("weights", "states"):
        one[name], other[name] = (
            {k.replace("layers.2.", "layers.1."): v for k, v in other[name].items()},
            {k.replace("layers.1.", "layers.2."): v for k, v in one[name].items()},
        )


values("bias_of_the_keys_dropped", "layers.1.self_attn.k_proj.bias", dropped, "qwen2")
values(
    "bias_of_the_queries_dropped", "layers.0.self_attn.q_proj.bias", dropped, "qwen2"
)
weight(
    "bias_of_the_values_doubled",
    "layers.1.self_attn.v_proj.bias",
    lambda w: w.scale(2),
    "qwen2",
)
values(
    "query_norm_of_ones",
    "layers.1.self_attn.q_norm.weight",
    lambda v: np.ones_like(v) * 1.125,
    "qwen3",
)


@planted("weights", "qwen3")
def query_and_key_norm_exchanged(copy):
    a, b = (copy.weight(f"layers.0.self_attn.{n}_norm.weight") for n in "qk")
    b.write(b.read() + np.linspace(0, 0.25, b.read().size).reshape(b.read().shape))
    a.swap(b)


values(
    "one_added_to_the_norms_twice",
    "layers.1.pre_feedforward_layernorm.weight",
    lambda v: v + 1,
    "gemma",
)
values(
    "the_one_of_a_norm_forgotten",
    "layers.2.post_feedforward_layernorm.weight",
    lambda v: v - 1,
    "gemma",
)


@planted("weights", "gemma")
def offsets_of_norms_undeclared(copy):
    copy.shard(1)["offsets"] = {}


values(
    "taps_of_a_convolution_reversed",
    "layers.1.self_attn.qkv_proj.conv_qk_depthwise.weight",
    lambda v: v[..., ::-1],
    "zaya",
)
values(
    "balancing_biases_dropped",
    "layers.1.mlp.gate.balancing_biases",
    lambda v: v * 0 + np.float32(0.01),
    "zaya",
)


def experts_rolled(values):
    axis = next(i for i, n in enumerate(values.shape) if n > 1)
    return np.roll(values, values.shape[axis] // 4, axis)


values(
    "experts_in_another_order", "layers.2.mlp.experts.down_proj", experts_rolled, "zaya"
)
weight(
    "temperature_times_1_1",
    "layers.0.self_attn.qk_norm.temp",
    lambda w: w.scale(1.1),
    "zaya",
)
values(
    "scale_of_router_states_dropped",
    "layers.1.mlp.gate.router_states_scale",
    lambda v: np.ones_like(v) * 0.75,
    "zaya",
)
values(
    "residual_scale_of_ones",
    "layers.2.post_attention_residual_scale.residual_scale",
    lambda v: np.ones_like(v) * 1.125,
    "zaya",
)


@planted("weights", "wide")
def rows_of_the_second_head_slice_moved_by_one(copy):
    (shard,) = (
        s for s in copy.manifest["shards"] if s["kind"] == "head" and s["rows"][0]
    )
    name = next(v for k, v in shard["weights"].items() if "norm" not in k)
    weight = copy.constant(shard, name)
    weight.write(np.roll(weight.read(), 1, axis=0))


@planted("weights", "wide")
def head_slices_in_the_wrong_order(copy):
    a, b = (s for s in copy.manifest["shards"] if s["kind"] == "head")
    for name in ("path", "files", "bytes", "modules", "weights"):
        a[name], b[name] = b[name], a[name]


# Programs


def source(op, parameter: str) -> str:
    """The value that an operation reads."""
    return op.inputs[parameter].arguments[0].name


def scalar(copy: Copy, layer: int, name: str, change: Callable) -> None:
    """Changes the constants of a layer's program whose names contain `name`."""
    shard = copy.shard(layer)
    names = [
        o.outputs[0].name
        for o in copy.block(shard).operations
        if o.type == "const" and name in o.outputs[0].name
    ]
    assert names, name
    for each in names:
        array = copy.constant(shard, each).arrays["val"]
        array.write(change(array.read()))


@planted("program")
def rms_epsilon_times_100(copy):
    for layer in range(4):
        scalar(copy, layer, "layernorm_eps", lambda value: value * np.float16(10))


@planted("program")
def rms_epsilon_times_10_in_one_norm(copy):
    scalar(copy, 0, "input_layernorm_eps0", lambda value: value * np.float16(10))


@planted("program")
def rms_epsilon_left_out(copy):
    scalar(copy, 0, "input_layernorm_eps1", lambda value: value * np.float16(0))


def score_scale(name: str, layer: int, factor: float, bundle: str = "llama") -> None:
    @planted("program", bundle, name)
    def plant(copy):
        shard = copy.shard(layer)
        scales = [source(op, "y") for op in copy.operations(shard, "mul", "self_attn")]
        stored = [name for name in scales if name.endswith("_to_fp16")]
        prefix = "var_" if bundle == "gemma" else ""
        scale = next(name for name in stored if name.startswith(prefix))
        array = copy.constant(shard, scale).arrays["val"]
        array.write(array.read() * np.float16(factor))


score_scale("score_scale_times_1_05", 2, 1.05)
# Gemma divides by the root of query_pre_attn_scalar, not by that of the width of a head
score_scale("query_scale_of_the_head_width", 1, (24 / 32) ** 0.5, "gemma")


@planted("program")
def score_scale_of_the_hidden_size(copy):
    shard = copy.shard(0)
    op = copy.operations(shard, "matmul", "self_attn")[2]
    copy.insert(shard, op, "mul", y=np.float16(0.5).reshape(()))


def softmax_axis(name: str, layer: int, value: int) -> None:
    @planted("program", name=name)
    def plant(copy):
        shard = copy.shard(layer)
        (op,) = copy.operations(shard, "softmax")
        (other,) = copy.operations(shard, "concat", "self_attn")[:1]
        bound = op.inputs["axis"].arguments[0]
        held = copy.making(shard, bound.name)
        assert other.inputs["axis"].arguments[0].name == bound.name
        bound.value.CopyFrom(held.attributes["val"])
        bound.value.immediateValue.tensor.ints.values[:] = [value]


softmax_axis("softmax_over_heads", 1, 1)
softmax_axis("softmax_over_the_queries", 3, 2)


def reversed_axis(name: str, layer: int, kind: str, which: int, axis: int) -> None:
    """A fault of the results of one operation of attention, of its kind the `which`."""

    @planted("program", name=name)
    def plant(copy):
        shard = copy.shard(layer)
        op = copy.operations(shard, kind, "self_attn")[which]
        copy.insert(shard, op, "reverse", axes=np.array([axis], np.int32))


reversed_axis("heads_in_reverse_after_attention", 2, "matmul", -1, 1)
reversed_axis("query_heads_in_reverse", 1, "concat", 0, 1)
reversed_axis("tokens_in_reverse_after_attention", 1, "matmul", -1, 2)


def activation(name: str, layer: int, kind: str) -> None:
    @planted("program", name=name)
    def plant(copy):
        copy.operations(copy.shard(layer), "silu")[0].type = kind


activation("silu_become_sigmoid", 1, "sigmoid")
activation("silu_become_relu", 3, "relu")
activation("silu_become_softplus", 0, "softplus")


@planted("program")
def rope_turns_the_other_way_for_queries(copy):
    sub = copy.operations(copy.shard(1), "sub", "self_attn")[0]
    add = copy.operations(copy.shard(1), "add", "self_attn")[0]
    sub.type, add.type = "add", "sub"


@planted("program")
def sine_and_cosine_exchanged_in_one_layer(copy):
    for op in copy.operations(copy.shard(2), "mul", "self_attn"):
        name = source(op, "y")
        if name in ("rope_cos", "rope_sin"):
            copy.feed(op, "y", "rope_sin" if name == "rope_cos" else "rope_cos")


@planted("program")
def keys_written_before_their_rotation(copy):
    shard = copy.shard(3)
    write = next(
        op
        for op in copy.operations(shard, "matmul", "self_attn")
        if source(op, "x") == "kv_write_mask"
    )
    halves = copy.making(shard, source(write, "y"))
    turn = copy.making(shard, source(halves, "values"))
    product = copy.making(shard, source(turn, "x"))
    half = copy.making(shard, source(product, "x"))
    copy.feed(write, "y", source(half, "x"))


@planted("program")
def states_exchanged(copy):
    for op in copy.block(copy.shard(2)).operations:
        if op.type in ("read_state", "write_state"):
            name = source(op, "input")
            copy.feed(op, "input", {"k_state": "v_state", "v_state": "k_state"}[name])


@planted("program")
def states_exchanged_in_the_manifest(copy):
    states = copy.shard(1)["states"]
    k, v = states["layers.1.k_state"], states["layers.1.v_state"]
    k["tensor"], v["tensor"] = v["tensor"], k["tensor"]


def adding_the_mask(copy: Copy, shard: dict):
    adds = copy.operations(shard, "add", "self_attn")
    return next(op for op in adds if source(op, "y") == "attn_mask")


@planted("program")
def mask_not_added_to_scores(copy):
    shard = copy.shard(1)
    masked = adding_the_mask(copy, shard)
    copy.feed(copy.operations(shard, "softmax")[0], "x", source(masked, "x"))


@planted("program")
def mask_a_thousand_times_too_weak(copy):
    shard = copy.shard(0)
    masked = adding_the_mask(copy, shard)
    scores = copy.making(shard, source(masked, "x"))
    copy.insert(shard, scores, "mul", y=np.float16(3e3).reshape(()))


@planted("program")
def attention_not_added_to_the_stream(copy):
    last = copy.operations(copy.shard(1), "add")[-1]
    copy.feed(last, "x", "x")


@planted("program")
def norm_before_the_mlp_takes_the_layer_s_input(copy):
    shard = copy.shard(2)
    for kind in ("abs", "real_div"):
        copy.feed(copy.operations(shard, kind, "post_attention_layernorm")[0], "x", "x")


@planted("program")
def gate_and_up_read_in_exchange(copy):
    shard = copy.shard(0)
    copy.constants_first(shard)
    gate, up = copy.operations(shard, "conv", "gate_proj") + copy.operations(
        shard, "conv", "up_proj"
    )
    a, b = (source(op, "weight") for op in (gate, up))
    copy.feed(gate, "weight", b)
    copy.feed(up, "weight", a)


# One function of a package of two: the other one, and the weights that both read, are sound


def in_function(T: int, *names: str) -> None:
    for name in names:

        @planted("program", "functions", f"{name}_in_the_function_of_t_{T}")
        def plant(copy, plant=PLANTED[name].plant):
            copy.function = f"t{T}"
            plant(copy)


in_function(1, "rope_turns_the_other_way_for_queries", "rms_epsilon_times_100")
in_function(
    4,
    "silu_become_sigmoid",
    "mask_not_added_to_scores",
    "states_exchanged",
    "gate_and_up_read_in_exchange",
)


@planted("interface", "functions")
def the_function_of_t_4_described_for_t_3(copy):
    descriptions = copy.spec(copy.shard(1)).description.functions
    inputs = next(f for f in descriptions if f.name == "t4").input
    next(v for v in inputs if v.name == "x").type.multiArrayType.shape[2] = 3


def damaged_rows(name: str, layer: int, rows: slice, factor: float) -> None:
    """Multiplies some rows of one head of what is read of V."""

    @planted("program", name=name)
    def plant(copy):
        shard, d = copy.shard(layer), copy.manifest["dims"]
        reads = copy.operations(shard, "read_state")
        read = [op for op in reads if source(op, "input") == "v_state"][-1]
        S = copy.manifest["options"]["max_seq_len"]
        scale = np.ones((1, d["H_kv"], S, 1), np.float16)
        scale[:, 0, rows] = factor
        copy.insert(shard, read, "mul", y=scale)


damaged_rows("a_head_of_the_cache_halved_past_row_48", 1, slice(48, None), 0.5)
damaged_rows("one_row_in_the_middle_of_the_cache_damaged", 3, slice(37, 38), 0.9)
damaged_rows("the_last_row_of_the_cache_is_lost", 0, slice(63, 64), 0.0)


@planted("program")
def final_norm_s_epsilon_times_100(copy):
    shard = copy.shard(kind="head")
    names = [
        o.outputs[0].name for o in copy.block(shard).operations if o.type == "const"
    ]
    for name in (n for n in names if "eps" in n and n.endswith("fp16")):
        array = copy.constant(shard, name).arrays["val"]
        array.write(array.read() * np.float16(10))


@planted("program")
def logits_times_1_01(copy):
    shard = copy.shard(kind="head")
    op = copy.operations(shard, "conv")[-1]
    normed = copy.making(shard, source(op, "x"))
    copy.insert(shard, normed, "mul", y=np.float16(1.01).reshape(()))


@planted("program")
def a_constant_added_to_the_stream(copy):
    shard = copy.shard(2)
    op = copy.operations(shard, "conv", "down_proj")[0]
    copy.insert(shard, op, "add", y=np.float16(1e-3).reshape(()))


@planted("program", "gemma")
def gelu_without_its_approximation(copy):
    (op,) = copy.operations(copy.shard(0), "gelu")
    name = op.inputs["mode"].arguments[0]
    held = copy.making(copy.shard(0), name.name)
    values = held.attributes["val"].immediateValue.tensor.strings.values
    values[:] = ["EXACT" if values[0] != "EXACT" else "SIGMOID_APPROXIMATION"]


@planted("program", "gemma")
def a_local_layer_given_the_global_mask(copy):
    rename(copy, copy.shard(0), {"attn_mask_local": "attn_mask_global"})


@planted("program", "gemma")
def a_global_layer_given_the_local_rope(copy):
    rename(
        copy,
        copy.shard(1),
        {f"rope_{n}_global": f"rope_{n}_local" for n in ("cos", "sin")},
    )


def rename(copy: Copy, shard: dict, names: dict[str, str]) -> None:
    """Gives a shard's inputs other names: in its program, its description and its manifest."""
    function = copy.spec(shard).mlProgram.functions["main"]
    for value in [*function.inputs, *copy.spec(shard).description.input]:
        value.name = names.get(value.name, value.name)
    for op in copy.block(shard).operations:
        for bound in arguments(op):
            bound.name = names.get(bound.name, bound.name)
    shard["inputs"] = {names.get(n, n): v for n, v in shard["inputs"].items()}


@planted("program", "qwen3")
def norm_of_the_keys_left_out(copy):
    shard = copy.shard(0)
    last = copy.operations(shard, "mul", "k_norm")[-1].outputs[0].name
    divisions = copy.operations(shard, "real_div", "k_norm")
    first = next(op for op in divisions if op.inputs["x"].arguments)
    for op in copy.block(shard).operations:
        for bound in arguments(op):
            if bound.name == last:
                bound.name = source(first, "x")


@planted("program", "smollm3")
def a_layer_without_rope_turned(copy):
    rename(copy, copy.shard(1), {f"rope_{n}_nope": f"rope_{n}" for n in ("cos", "sin")})


@planted("program", "olmo2")
def norm_before_attention_instead_of_behind(copy):
    shard = copy.shard(1)
    operations, norm = copy.block(shard).operations, "layers.1.post_attention_layernorm"
    of_norm = [
        op
        for op in operations
        if op.outputs and shard["modules"].get(op.outputs[0].name, "").startswith(norm)
    ]
    normed, added = (
        of_norm[-1].outputs[0].name,
        copy.operations(shard, "conv", "o_proj")[0],
    )
    other = {added.outputs[0].name: "x", "x": normed, normed: added.outputs[0].name}
    (addition,) = [
        op
        for op in copy.operations(shard, "add")
        if normed in [n.name for n in arguments(op)]
    ]
    projections = [
        op
        for n in "qkv"
        for op in copy.operations(shard, "conv", f"self_attn.{n}_proj")
    ]
    for op in [*of_norm, *projections]:
        for bound in arguments(op):
            if bound.name in (added.outputs[0].name, "x"):
                bound.name = other[bound.name]
    copy.feed(addition, "y", added.outputs[0].name)
    first = [
        op for op in operations if op.type == "const" or "constexpr" in op.type
    ] + of_norm
    rest = [op for op in operations if op not in first]
    del operations[:]
    operations.extend([*first, *rest])


def arguments(op) -> list:
    """The values, by name, that an operation reads."""
    bound = [bound for argument in op.inputs.values() for bound in argument.arguments]
    return [each for each in bound if each.WhichOneof("binding") == "name"]


@planted("weights", "phi3")
def keys_and_values_of_a_fused_projection_exchanged(copy):
    weight = copy.weight("layers.0.self_attn.qkv_proj.weight")
    for array in weight.arrays.values():
        values = array.read()
        if len(values) == 3 * 96:
            array.write(np.concatenate([values[:96], values[192:], values[96:192]]))


@planted("program", "zaya")
def another_activation_in_the_router(copy):
    op = copy.operations(copy.shard(1), "gelu")[0]
    op.type = "silu"
    del op.inputs["mode"]


@planted("program", "zaya")
def router_state_of_the_layer_before_halved(copy):
    shard = copy.shard(2)
    reader = next(
        op
        for op in copy.block(shard).operations
        if "router_state" in [bound.name for bound in arguments(op)]
    )
    copy.insert(shard, reader, "mul", y=np.float16(0.5).reshape(()))


# bundle.json: rope, windows, embedding, tokens


def frequencies(copy: Copy, change: Callable[[np.ndarray], np.ndarray]) -> None:
    for rope in copy.manifest["rope"]:
        inv = np.array(rope["inv_freq"])
        rope["inv_freq"] = [float(v) for v in change(inv)]


def frequency(name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    @planted("host", name=name)
    def plant(copy):
        frequencies(copy, change)


def bf16(inv):
    return (inv.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


frequency("inv_freq_rounded_to_fp16", lambda inv: inv.astype(np.float16))
frequency("inv_freq_rounded_to_bf16", bf16)
frequency(
    "slowest_quarter_of_rope_is_zero",
    lambda inv: inv * (np.arange(len(inv)) < 3 * len(inv) / 4),
)
frequency(
    "one_frequency_off_by_a_hundredth",
    lambda inv: inv * np.where(np.arange(len(inv)) == 3, 1.01, 1),
)
frequency(
    "rope_scaling_of_the_configuration_ignored",
    lambda inv: 500000.0 ** (-np.arange(len(inv)) / len(inv)),
)
frequency("rope_of_another_base", lambda inv: inv**1.02)


@planted("host")
def rope_scale_of_1_01(copy):
    copy.manifest["rope"][0]["scale"] = 1.01


@planted("host", "ministral3")
def factor_of_yarn_halved(copy):
    import tiny
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    dims = tiny.DIMS["ministral3"]
    rope = dims["rope_parameters"] | {"factor": 2.0}
    config = transformers.AutoConfig.for_model(
        "ministral3", **(dims | {"rope_parameters": rope})
    )
    inv_freq, _ = ROPE_INIT_FUNCTIONS["yarn"](config, None)
    frequencies(copy, lambda _: inv_freq.numpy())


@planted("host", "ministral3")
def factor_of_yarn_on_cos_and_sin_left_out(copy):
    copy.manifest["rope"][0]["scale"] = 1.0


@planted("host", "phi3")
def long_table_of_longrope_below_the_original_length(copy):
    frequencies(copy, lambda inv: inv * (1 + np.arange(12) / 8) / (2.0 + np.arange(12)))


@planted("host")
def attention_limited_to_the_last_40_rows(copy):
    for layer in copy.manifest["layers"]:
        layer["window"] = 40


@planted("host", "gemma")
def window_one_token_too_wide(copy):
    for layer in copy.manifest["layers"]:
        layer["window"] = layer["window"] and layer["window"] + 1


@planted("host", "gemma")
def window_forgotten(copy):
    for layer in copy.manifest["layers"]:
        layer["window"] = None


@planted("host", "gemma")
def local_and_global_frequencies_exchanged(copy):
    a, b = copy.manifest["rope"]
    a["inv_freq"], b["inv_freq"] = b["inv_freq"], a["inv_freq"]


@planted("program", "gemma")
def embedding_scale_left_out(copy):
    copy.manifest["embedding"]["scale"] = 1.0


@planted("program")
def embedding_times_1_05(copy):
    copy.manifest["embedding"]["scale"] = 1.05


def embedding(name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    @planted("weights", name=name)
    def plant(copy):
        copy.embedding(lambda table: table.__setitem__(..., change(table.copy())))


def rows_240_and_241_exchanged(table):
    table[[240, 241]] = table[[241, 240]]
    return table


embedding("two_embedding_rows_exchanged", rows_240_and_241_exchanged)
embedding(
    "one_channel_of_the_embedding_times_1_02",
    lambda table: table * np.where(np.arange(table.shape[1]) == 17, 1.02, 1),
)
embedding(
    "last_embedding_row_zero",
    lambda table: table * (np.arange(len(table)) < len(table) - 1)[:, None],
)
embedding("embedding_rows_moved_by_one", lambda table: np.roll(table, 1, axis=0))


@planted("program")
def stream_declared_half_as_large(copy):
    copy.manifest["residual_exponent"] = 1


@planted("interface")
def tokenizer_with_two_tokens_exchanged(copy):
    def swap(text):
        fields = json.loads(text)
        vocabulary = fields["model"]["vocab"]
        if isinstance(vocabulary, dict):
            a, b = list(vocabulary)[-2:]
            vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
        else:
            vocabulary[-1], vocabulary[-2] = vocabulary[-2], vocabulary[-1]
        return json.dumps(fields).encode()

    copy.file("tokenizer/tokenizer.json", swap)


@planted("interface")
def chat_template_of_another_model(copy):
    name = "tokenizer/chat_template.jinja"
    if not (copy.root / name).exists():
        name = "tokenizer/tokenizer_config.json"
        template = {
            "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"
        }
        copy.file(name, lambda text: json.dumps(json.loads(text) | template).encode())
    else:
        copy.file(name, lambda text: text + b" ")


@planted("interface")
def another_compression_declared(copy):
    copy.manifest["options"]["compress"] = (
        "int8-tensor" if copy.compress == "fp16" else "fp16"
    )


@planted("interface")
def a_finer_compression_declared(copy):
    copy.manifest["options"]["compress"] = {
        "fp16": "int8-channel",
        "int8-tensor": "int8-channel",
        "int8-channel": "int8-tensor",
        "int4-block32": "int8-channel",
        "lut4": "lut6",
    }[copy.compress]


# Descriptions and ranges


def described(copy: Copy, name: str, layer: int = 1):
    description = copy.spec(copy.shard(layer)).description
    return next(
        v
        for v in [*description.input, *description.output, *description.state]
        if v.name == name
    )


def range_of_t(name: str, values: list[str], **bounds: int) -> None:
    """Other ends of the range of T of inputs of a layer."""

    @planted("interface", name=name)
    def plant(copy):
        for value in values:
            array = described(copy, value).type.multiArrayType
            for each in array.shapeRange.sizeRanges:
                if each.lowerBound != each.upperBound:
                    for end, size in bounds.items():
                        setattr(each, end, size)


range_of_t("range_of_t_ends_at_2", ["x", "attn_mask", "rope_cos"], upperBound=2)
range_of_t("range_of_t_ends_at_3_in_one_input", ["attn_mask"], upperBound=3)
range_of_t("range_of_t_begins_at_2", ["x"], lowerBound=2)
range_of_t("range_of_t_without_an_end", ["x"], upperBound=-1)


@planted("interface")
def a_shape_range_removed(copy):
    described(copy, "x").type.multiArrayType.ClearField("shapeRange")


@planted("interface")
def the_range_of_the_head_removed(copy):
    for value in copy.spec(copy.shard(kind="head")).description.input:
        value.type.multiArrayType.ClearField("shapeRange")


def dtype(name: str, value: str, layer: int, code: int) -> None:
    @planted("interface", name=name)
    def plant(copy):
        type = described(copy, value, layer).type
        array = type.stateType.arrayType if "state" in value else type.multiArrayType
        array.dataType = code


INT32, FLOAT32, DOUBLE = 0x20000 | 32, 0x10000 | 32, 0x10000 | 64
dtype("an_input_described_as_int32", "rope_cos", 1, INT32)
dtype("an_input_described_as_float32", "kv_write_mask", 2, FLOAT32)
dtype("an_output_described_as_double", "hidden", 3, DOUBLE)
dtype("a_state_described_as_float32", "k_state", 3, FLOAT32)


@planted("interface")
def an_input_described_with_another_shape(copy):
    shape = described(copy, "rope_sin", 0).type.multiArrayType.shape
    shape[-1] //= 2


@planted("interface")
def an_input_described_under_another_name(copy):
    described(copy, "rope_sin").name = "rope_sine"


@planted("interface")
def an_output_described_under_another_name(copy):
    described(copy, "hidden").name = "x_out"


@planted("interface")
def an_input_described_twice(copy):
    copy.spec(copy.shard(1)).description.input.add().CopyFrom(described(copy, "x"))


@planted("interface")
def an_input_not_described(copy):
    inputs = copy.spec(copy.shard(2)).description.input
    del inputs[-1]


@planted("interface")
def one_state_described_of_two(copy):
    states = copy.spec(copy.shard(1)).description.state
    del states[1]


@planted("interface")
def a_state_described_with_half_its_rows(copy):
    described(copy, "v_state").type.stateType.arrayType.shape[2] = 32


def declared(name: str, part: str, field: str, value) -> None:
    """Another field of a part of the manifest."""

    @planted("interface", name=name)
    def plant(copy):
        copy.manifest[part][field] = value


declared("t_max_of_60_over_a_range_of_4", "options", "tokens", "1-60")
declared("t_max_of_2_over_a_range_of_4", "options", "tokens", "1-2")
declared("one_t_declared_over_a_range", "options", "tokens", "4")
declared("experts_declared_routed", "options", "moe", "routed")
declared("slice_writes_declared", "options", "kv_write", "slice")
declared("two_layers_a_shard_declared", "options", "layers_per_shard", 2)
declared("other_heads_declared", "dims", "H", 8)
declared("end_of_sequence_of_another_model", "tokens", "eos", [0])
declared("one_end_of_sequence_too_many", "tokens", "eos", [2, 5])
declared("begin_of_sequence_of_another_model", "tokens", "bos", 3)
declared("begin_of_sequence_dropped", "tokens", "bos", None)
declared("tokenizer_left_out", "tokens", "files", [])


@planted("interface")
def a_longer_cache_declared_than_the_program_has(copy):
    resize(copy, 128)


@planted("interface")
def a_shorter_cache_declared_than_the_program_has(copy):
    resize(copy, 32)


def resize(copy: Copy, S: int) -> None:
    old = copy.manifest["options"]["max_seq_len"]
    copy.manifest["options"]["max_seq_len"] = S
    for shard in copy.manifest["shards"]:
        for name, shape in shard["inputs"].items():
            if name.startswith(("attn_mask", "kv_write_mask")):
                shard["inputs"][name] = [S if n == old else n for n in shape]
        for state in shard["states"].values():
            state["shape"] = [S if n == old else n for n in state["shape"]]


@planted("interface")
def another_function_is_the_default(copy):
    spec = copy.spec(copy.shard(1))
    spec.mlProgram.functions["spare"].CopyFrom(spec.mlProgram.functions["main"])
    spec.description.defaultFunctionName = "spare"


@planted("interface")
def a_second_function_that_nobody_declared(copy):
    spec = copy.spec(copy.shard(2))
    spec.mlProgram.functions["spare"].CopyFrom(spec.mlProgram.functions["main"])


@planted("interface")
def an_input_of_the_program_is_float32(copy):
    function = copy.spec(copy.shard(1)).mlProgram.functions["main"]
    value = next(v for v in function.inputs if v.name == "attn_mask")
    value.type.tensorType.dataType = 11


@planted("interface")
def taps_left_out(copy):
    copy.shard(1)["taps"].clear()


@planted("interface")
def shapes_enumerated(copy):
    x = described(copy, "x").type.multiArrayType
    x.ClearField("shapeRange")
    for T in (1, 4):
        x.enumeratedShapes.shapes.add().shape.extend([1, 128, T, 1])


@planted("interface")
def a_default_shape_out_of_range(copy):
    described(copy, "x").type.multiArrayType.shape[2] = 9


@planted("interface")
def a_state_of_the_program_with_half_its_rows(copy):
    inputs = copy.spec(copy.shard(1)).mlProgram.functions["main"].inputs
    state = next(value for value in inputs if value.name == "v_state")
    rows = state.type.stateType.wrappedType.tensorType.dimensions[2]
    rows.constant.size //= 2


@planted("interface")
def an_old_specification(copy):
    copy.spec(copy.shard(1)).specificationVersion = 7


@planted("interface")
def two_states_in_one_tensor(copy):
    copy.shard(1)["states"]["layers.1.k_state"]["tensor"] = "v_state"


@planted("interface")
def another_family_declared(copy):
    copy.manifest["family"] = "qwen2"


@planted("interface")
def taps_of_another_value(copy):
    shard = copy.shard(1)
    shard["taps"] = {
        "1": next(n for n, m in shard["modules"].items() if m.endswith("self_attn"))
    }
