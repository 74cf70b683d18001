"""Faults planted in a copy of a bundle on disk, hashes in bundle.json redone: what an exporter, a
copy or an editor gets wrong.

A fault names the bundle it is planted in (see `cases.BASES`) and the gate that must see it at the
latest; `plant(copy)` edits a `copies.Copy`. Each is tried in every preset. Those of a decoder in
memory are in `faults`.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from copies import Copy

PLANTED: dict[str, "Planted"] = {}


@dataclass(frozen=True)
class Planted:
    """`gate` is the one that is made for this kind of fault; others may be RED as well."""

    gate: str
    plant: Callable[[Copy], None]
    bundle: str


def planted(gate: str, bundle: str = "llama"):
    def register(plant):
        assert plant.__name__ not in PLANTED
        PLANTED[plant.__name__] = Planted(gate, plant, bundle)
        return plant

    return register


def each_layer(copy: Copy, tensor: str):
    return [
        copy.weight(f"layers.{i}.{tensor}") for i in range(copy.manifest["dims"]["L"])
    ]


# Values of weights, by what scales, tables and codes can do


@planted("weights")
def values_of_one_layer_times_0_9(copy):
    copy.weight("layers.1.self_attn.v_proj.weight").scale(0.9)


@planted("weights")
def values_of_the_last_layer_times_1_01(copy):
    copy.weight("layers.3.self_attn.v_proj.weight").scale(1.01)


@planted("weights")
def keys_times_1_2(copy):
    for weight in each_layer(copy, "self_attn.k_proj.weight"):
        weight.scale(1.2)


@planted("weights")
def queries_halved_in_the_first_layer(copy):
    copy.weight("layers.0.self_attn.q_proj.weight").scale(0.5)


@planted("weights")
def updates_of_one_layer_times_1_1(copy):
    for tensor in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        copy.weight(f"layers.2.{tensor}").scale(1.1)


@planted("weights")
def one_output_channel_times_1_2(copy):
    copy.weight("layers.1.self_attn.o_proj.weight").scale_row(7, 1.2)


@planted("weights")
def one_output_channel_of_down_proj_times_0_8(copy):
    copy.weight("layers.3.mlp.down_proj.weight").scale_row(100, 0.8)


@planted("weights")
def zero_point_plus_one(copy):
    for i in range(copy.manifest["dims"]["L"]):
        copy.weight(f"layers.{i}.mlp.up_proj.weight").shift(
            2 if copy.compress == "fp16" else 1
        )


@planted("weights")
def zero_point_minus_one_in_one_tensor(copy):
    copy.weight("layers.2.self_attn.q_proj.weight").shift(
        -2 if copy.compress == "fp16" else -1
    )


@planted("weights")
def one_weight_of_another_sign(copy):
    weight = copy.weight("layers.2.mlp.gate_proj.weight")
    values = weight.read()
    at = np.unravel_index(np.abs(values).argmax(), values.shape)
    values[at] *= -1
    weight.write(values)


@planted("weights")
def a_block_of_weights_zero(copy):
    weight = copy.weight("layers.0.mlp.down_proj.weight")
    values = weight.read()
    values[:16] = 0
    weight.write(values)


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
    for name in ("weights", "states", "taps"):
        swapped = [
            {k.replace("layers.2.", "layers.1."): v for k, v in other[name].items()},
            {k.replace("layers.1.", "layers.2."): v for k, v in one[name].items()},
        ]
        if name == "taps":
            swapped = [one[name], other[name]]
        one[name], other[name] = swapped


@planted("weights")
def gate_and_up_exchanged(copy):
    copy.weight("layers.3.mlp.gate_proj.weight").swap(
        copy.weight("layers.3.mlp.up_proj.weight")
    )


@planted("weights")
def keys_and_values_exchanged(copy):
    copy.weight("layers.1.self_attn.k_proj.weight").swap(
        copy.weight("layers.1.self_attn.v_proj.weight")
    )


@planted("weights")
def a_square_matrix_transposed(copy):
    weight = copy.weight("layers.2.self_attn.o_proj.weight")
    weight.write(np.swapaxes(weight.read(), 0, 1))


@planted("weights")
def query_heads_in_another_order(copy):
    weight = copy.weight("layers.1.self_attn.q_proj.weight")
    values, D = weight.read(), copy.manifest["dims"]["D"]
    weight.write(
        np.roll(values.reshape(-1, D, *values.shape[1:]), 1, 0).reshape(values.shape)
    )


@planted("weights")
def heads_and_their_width_transposed(copy):
    weight = copy.weight("layers.0.self_attn.k_proj.weight")
    values, D = weight.read(), copy.manifest["dims"]["D"]
    weight.write(
        values.reshape(-1, D, *values.shape[1:])
        .swapaxes(0, 1)
        .reshape(values.shape)
        .copy()
    )


@planted("weights")
def rope_halves_interleaved_in_the_key_weights(copy):
    # the other convention of rotary weights: pairs side by side instead of halves
    weight = copy.weight("layers.2.self_attn.k_proj.weight")
    values, D = weight.read(), copy.manifest["dims"]["D"]
    order = np.arange(D).reshape(2, -1).T.ravel()
    weight.write(
        values.reshape(-1, D, *values.shape[1:])[:, order].reshape(values.shape)
    )


@planted("weights")
def norm_weight_of_ones(copy):
    weight = copy.weight("layers.2.post_attention_layernorm.weight")
    weight.write(np.ones_like(weight.read()))


@planted("weights")
def one_channel_of_a_norm_times_1_02(copy):
    weight = copy.weight("layers.0.input_layernorm.weight")
    values = weight.read()
    values.ravel()[5] *= 1.02
    weight.write(values)


@planted("weights")
def norms_of_a_layer_exchanged(copy):
    copy.weight("layers.1.input_layernorm.weight").swap(
        copy.weight("layers.1.post_attention_layernorm.weight")
    )


@planted("weights")
def final_norm_times_1_05(copy):
    copy.weight("model.norm.weight").scale(1.05)


@planted("weights")
def head_rows_moved_by_one(copy):
    weight = copy.weight("embed_tokens.weight")
    weight.write(np.roll(weight.read(), 1, axis=0))


@planted("weights")
def two_head_rows_exchanged(copy):
    weight = copy.weight("embed_tokens.weight")
    values = weight.read()
    values[[250, 251]] = values[[251, 250]]
    weight.write(values)


@planted("weights")
def mlp_weights_shuffled(copy):
    for i in range(copy.manifest["dims"]["L"]):
        for tensor in ("mlp.gate_proj.weight", "mlp.up_proj.weight"):
            weight = copy.weight(f"layers.{i}.{tensor}")
            values = weight.read()
            weight.write(
                np.random.default_rng(i)
                .permutation(values.ravel())
                .reshape(values.shape)
            )


@planted("weights")
def coarser_than_declared(copy):
    weight = copy.weight("layers.1.mlp.up_proj.weight")
    values = weight.read()
    step = np.abs(values).max() / 3
    weight.write(np.rint(values / step) * step)


@planted("weights", "qwen2")
def bias_of_the_keys_dropped(copy):
    drop(copy, "layers.1.self_attn.k_proj.bias")


@planted("weights", "qwen2")
def bias_of_the_queries_dropped(copy):
    drop(copy, "layers.0.self_attn.q_proj.bias")


@planted("weights", "qwen2")
def bias_of_the_values_doubled(copy):
    copy.weight("layers.1.self_attn.v_proj.bias").scale(2)


def drop(copy: Copy, tensor: str) -> None:
    weight = copy.weight(tensor)
    assert weight.read().any()
    weight.write(np.zeros_like(weight.read()))


@planted("weights", "qwen3")
def query_norm_of_ones(copy):
    weight = copy.weight("layers.1.self_attn.q_norm.weight")
    weight.write(np.ones_like(weight.read()) * 1.125)


@planted("weights", "qwen3")
def query_and_key_norm_exchanged(copy):
    a, b = (copy.weight(f"layers.0.self_attn.{n}_norm.weight") for n in "qk")
    b.write(b.read() + np.linspace(0, 0.25, b.read().size).reshape(b.read().shape))
    a.swap(b)


@planted("weights", "gemma")
def one_added_to_the_norms_twice(copy):
    weight = copy.weight("layers.1.pre_feedforward_layernorm.weight")
    weight.write(weight.read() + 1)


@planted("weights", "gemma")
def the_one_of_a_norm_forgotten(copy):
    weight = copy.weight("layers.2.post_feedforward_layernorm.weight")
    weight.write(weight.read() - 1)


@planted("weights", "gemma")
def offsets_of_norms_undeclared(copy):
    copy.shard(1)["offsets"] = {}


@planted("weights", "zaya")
def taps_of_a_convolution_reversed(copy):
    weight = copy.weight("layers.1.self_attn.qkv_proj.conv_qk_depthwise.weight")
    weight.write(weight.read()[..., ::-1])


@planted("weights", "zaya")
def balancing_biases_dropped(copy):
    weight = copy.weight("layers.1.mlp.gate.balancing_biases")
    weight.write(weight.read() * 0 + np.float32(0.01))


@planted("weights", "zaya")
def experts_in_another_order(copy):
    weight = copy.weight("layers.2.mlp.experts.down_proj")
    values = weight.read()
    axis = next(i for i, n in enumerate(values.shape) if n > 1)
    weight.write(np.roll(values, values.shape[axis] // 4, axis))


@planted("weights", "zaya")
def temperature_times_1_1(copy):
    copy.weight("layers.0.self_attn.qk_norm.temp").scale(1.1)


@planted("weights", "zaya")
def scale_of_router_states_dropped(copy):
    weight = copy.weight("layers.1.mlp.gate.router_states_scale")
    weight.write(np.ones_like(weight.read()) * 0.75)


@planted("weights", "zaya")
def residual_scale_of_ones(copy):
    weight = copy.weight("layers.2.post_attention_residual_scale.residual_scale")
    weight.write(np.ones_like(weight.read()) * 1.125)


@planted("weights", "wide")
def rows_of_the_second_head_slice_moved_by_one(copy):
    shard = next(
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


@planted("program")
def score_scale_times_1_05(copy):
    shard = copy.shard(2)
    op = next(
        op
        for op in copy.operations(shard, "mul", "self_attn")
        if op.inputs["y"].arguments[0].name.endswith("_to_fp16")
    )
    array = copy.constant(shard, op.inputs["y"].arguments[0].name).arrays["val"]
    array.write(array.read() * np.float16(1.05))


@planted("program")
def score_scale_of_the_hidden_size(copy):
    shard = copy.shard(0)
    op = copy.operations(shard, "matmul", "self_attn")[2]
    copy.insert(shard, op, "mul", y=np.float16(0.5).reshape(()))


@planted("program")
def softmax_over_heads(copy):
    axis(copy, 1, 1)


@planted("program")
def softmax_over_the_queries(copy):
    axis(copy, 3, 2)


def axis(copy: Copy, layer: int, value: int) -> None:
    shard = copy.shard(layer)
    (op,) = copy.operations(shard, "softmax")
    (other,) = copy.operations(shard, "concat", "self_attn")[:1]
    bound = op.inputs["axis"].arguments[0]
    held = next(
        o
        for o in copy.block(shard).operations
        if o.type == "const" and o.outputs[0].name == bound.name
    )
    assert other.inputs["axis"].arguments[0].name == bound.name
    bound.value.CopyFrom(held.attributes["val"])
    bound.value.immediateValue.tensor.ints.values[:] = [value]


@planted("program")
def heads_in_reverse_after_attention(copy):
    shard = copy.shard(2)
    op = copy.operations(shard, "matmul", "self_attn")[-1]
    copy.insert(shard, op, "reverse", axes=np.array([1], np.int32))


@planted("program")
def query_heads_in_reverse(copy):
    shard = copy.shard(1)
    copy.insert(
        shard,
        copy.operations(shard, "concat", "self_attn")[0],
        "reverse",
        axes=np.array([1], np.int32),
    )


@planted("program")
def tokens_in_reverse_after_attention(copy):
    shard = copy.shard(1)
    op = copy.operations(shard, "matmul", "self_attn")[-1]
    copy.insert(shard, op, "reverse", axes=np.array([2], np.int32))


@planted("program")
def silu_become_sigmoid(copy):
    copy.operations(copy.shard(1), "silu")[0].type = "sigmoid"


@planted("program")
def silu_become_relu(copy):
    copy.operations(copy.shard(3), "silu")[0].type = "relu"


@planted("program")
def silu_become_softplus(copy):
    copy.operations(copy.shard(0), "silu")[0].type = "softplus"


@planted("program")
def rope_turns_the_other_way_for_queries(copy):
    sub = copy.operations(copy.shard(1), "sub", "self_attn")[0]
    add = copy.operations(copy.shard(1), "add", "self_attn")[0]
    sub.type, add.type = "add", "sub"


@planted("program")
def sine_and_cosine_exchanged_in_one_layer(copy):
    for op in copy.operations(copy.shard(2), "mul", "self_attn"):
        name = op.inputs["y"].arguments[0].name
        if name in ("rope_cos", "rope_sin"):
            copy.feed(op, "y", "rope_sin" if name == "rope_cos" else "rope_cos")


@planted("program")
def keys_written_before_their_rotation(copy):
    shard = copy.shard(3)
    write = next(
        op
        for op in copy.operations(shard, "matmul", "self_attn")
        if op.inputs["x"].arguments[0].name == "kv_write_mask"
    )
    rotated = write.inputs["y"].arguments[0].name
    halves = next(
        o for o in copy.block(shard).operations if o.outputs[0].name == rotated
    )
    first = halves.inputs["values"].arguments[0].name
    turn = next(
        o
        for o in copy.block(shard).operations
        if o.outputs and o.outputs[0].name == first
    )
    product = next(
        o
        for o in copy.block(shard).operations
        if o.outputs and o.outputs[0].name == turn.inputs["x"].arguments[0].name
    )
    half = next(
        o
        for o in copy.block(shard).operations
        if o.outputs and o.outputs[0].name == product.inputs["x"].arguments[0].name
    )
    copy.feed(write, "y", half.inputs["x"].arguments[0].name)


@planted("program")
def states_exchanged(copy):
    for op in copy.block(copy.shard(2)).operations:
        if op.type in ("read_state", "write_state"):
            name = op.inputs["input"].arguments[0].name
            copy.feed(op, "input", {"k_state": "v_state", "v_state": "k_state"}[name])


@planted("program")
def states_exchanged_in_the_manifest(copy):
    states = copy.shard(1)["states"]
    k, v = states["layers.1.k_state"], states["layers.1.v_state"]
    k["tensor"], v["tensor"] = v["tensor"], k["tensor"]


@planted("program")
def mask_not_added_to_scores(copy):
    shard = copy.shard(1)
    masked = next(
        op
        for op in copy.operations(shard, "add", "self_attn")
        if op.inputs["y"].arguments[0].name == "attn_mask"
    )
    copy.feed(
        copy.operations(shard, "softmax")[0], "x", masked.inputs["x"].arguments[0].name
    )


@planted("program")
def mask_a_thousand_times_too_weak(copy):
    shard = copy.shard(0)
    masked = next(
        op
        for op in copy.operations(shard, "add", "self_attn")
        if op.inputs["y"].arguments[0].name == "attn_mask"
    )
    scores = next(
        o
        for o in copy.block(shard).operations
        if o.outputs and o.outputs[0].name == masked.inputs["x"].arguments[0].name
    )
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
    a, b = (op.inputs["weight"].arguments[0].name for op in (gate, up))
    copy.feed(gate, "weight", b)
    copy.feed(up, "weight", a)


# One function of a package of two: the other one, and the weights that both read, are sound


@planted("program", "functions")
def silu_become_sigmoid_in_the_function_of_t_4(copy):
    copy.function = "t4"
    silu_become_sigmoid(copy)


@planted("program", "functions")
def rope_turns_the_other_way_in_the_function_of_t_1(copy):
    copy.function = "t1"
    rope_turns_the_other_way_for_queries(copy)


@planted("program", "functions")
def rms_epsilon_times_100_in_the_function_of_t_1(copy):
    copy.function = "t1"
    rms_epsilon_times_100(copy)


@planted("program", "functions")
def mask_not_added_to_scores_in_the_function_of_t_4(copy):
    copy.function = "t4"
    mask_not_added_to_scores(copy)


@planted("program", "functions")
def states_exchanged_in_the_function_of_t_4(copy):
    copy.function = "t4"
    states_exchanged(copy)


@planted("program", "functions")
def gate_and_up_read_in_exchange_in_the_function_of_t_4(copy):
    copy.function = "t4"
    gate_and_up_read_in_exchange(copy)


@planted("interface", "functions")
def the_function_of_t_4_described_for_t_3(copy):
    descriptions = copy.spec(copy.shard(1)).description.functions
    inputs = next(f for f in descriptions if f.name == "t4").input
    next(v for v in inputs if v.name == "x").type.multiArrayType.shape[2] = 3


@planted("program")
def a_head_of_the_cache_halved_past_row_48(copy):
    damage_rows(copy, 1, slice(48, None), 0.5)


@planted("program")
def one_row_in_the_middle_of_the_cache_damaged(copy):
    damage_rows(copy, 3, slice(37, 38), 0.9)


@planted("program")
def the_last_row_of_the_cache_is_lost(copy):
    damage_rows(copy, 0, slice(63, 64), 0.0)


def damage_rows(copy: Copy, layer: int, rows: slice, factor: float) -> None:
    """Multiplies some rows of one head of what is read of V."""
    shard, d = copy.shard(layer), copy.manifest["dims"]
    read = [
        op
        for op in copy.operations(shard, "read_state")
        if op.inputs["input"].arguments[0].name == "v_state"
    ][-1]
    scale = np.ones(
        (1, d["H_kv"], copy.manifest["options"]["max_seq_len"], 1), np.float16
    )
    scale[:, 0, rows] = factor
    copy.insert(shard, read, "mul", y=scale)


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
    source = next(
        o
        for o in copy.block(shard).operations
        if o.outputs and o.outputs[0].name == op.inputs["x"].arguments[0].name
    )
    copy.insert(shard, source, "mul", y=np.float16(1.01).reshape(()))


@planted("program")
def a_constant_added_to_the_stream(copy):
    shard = copy.shard(2)
    op = copy.operations(shard, "conv", "down_proj")[0]
    copy.insert(shard, op, "add", y=np.float16(1e-3).reshape(()))


@planted("program", "gemma")
def query_scale_of_the_head_width(copy):
    # Gemma divides by the root of query_pre_attn_scalar, not by that of the width of a head
    shard = copy.shard(1)
    op = next(
        op
        for op in copy.operations(shard, "mul", "self_attn")
        if op.inputs["y"].arguments[0].name.endswith("_to_fp16")
        and op.inputs["y"].arguments[0].name.startswith("var_")
    )
    array = copy.constant(shard, op.inputs["y"].arguments[0].name).arrays["val"]
    array.write(array.read() * np.float16((24 / 32) ** 0.5))


@planted("program", "gemma")
def gelu_without_its_approximation(copy):
    (op,) = copy.operations(copy.shard(0), "gelu")
    name = op.inputs["mode"].arguments[0]
    held = next(
        o
        for o in copy.block(copy.shard(0)).operations
        if o.type == "const" and o.outputs[0].name == name.name
    )
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
        for argument in op.inputs.values():
            for bound in argument.arguments:
                if bound.name in names:
                    bound.name = names[bound.name]
    shard["inputs"] = {names.get(n, n): v for n, v in shard["inputs"].items()}


@planted("program", "qwen3")
def norm_of_the_keys_left_out(copy):
    shard = copy.shard(0)
    last = copy.operations(shard, "mul", "k_norm")[-1]
    first = next(
        op
        for op in copy.operations(shard, "real_div", "k_norm")
        if op.inputs["x"].arguments
    )
    source = first.inputs["x"].arguments[0].name
    for op in copy.block(shard).operations:
        for argument in op.inputs.values():
            for bound in argument.arguments:
                if (
                    bound.WhichOneof("binding") == "name"
                    and bound.name == last.outputs[0].name
                ):
                    bound.name = source


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
        if "router_state" in [b.name for a in op.inputs.values() for b in a.arguments]
    )
    copy.insert(shard, reader, "mul", y=np.float16(0.5).reshape(()))


# bundle.json: rope, windows, embedding, tokens


def frequencies(copy: Copy, change: Callable[[np.ndarray], np.ndarray]) -> None:
    for rope in copy.manifest["rope"]:
        inv = np.array(rope["inv_freq"])
        rope["inv_freq"] = [float(v) for v in change(inv)]


@planted("host")
def inv_freq_rounded_to_fp16(copy):
    frequencies(copy, lambda inv: inv.astype(np.float16).astype(float))


@planted("host")
def inv_freq_rounded_to_bf16(copy):
    frequencies(
        copy,
        lambda inv: (inv.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(
            np.float32
        ),
    )


@planted("host")
def slowest_quarter_of_rope_is_zero(copy):
    frequencies(copy, lambda inv: inv * (np.arange(len(inv)) < 3 * len(inv) / 4))


@planted("host")
def one_frequency_off_by_a_hundredth(copy):
    frequencies(copy, lambda inv: inv * np.where(np.arange(len(inv)) == 3, 1.01, 1))


@planted("host")
def rope_scaling_of_the_configuration_ignored(copy):
    frequencies(copy, lambda inv: 500000.0 ** (-np.arange(len(inv)) / len(inv)))


@planted("host")
def rope_of_another_base(copy):
    frequencies(copy, lambda inv: inv**1.02)


@planted("host")
def rope_scale_of_1_01(copy):
    copy.manifest["rope"][0]["scale"] = 1.01


@planted("host", "ministral3")
def factor_of_yarn_halved(copy):
    import tiny
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.AutoConfig.for_model("ministral3", **tiny.DIMS["ministral3"])
    config.rope_parameters["factor"] /= 2
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


@planted("weights")
def two_embedding_rows_exchanged(copy):
    def swap(table):
        table[[240, 241]] = table[[241, 240]]

    copy.embedding(swap)


@planted("weights")
def one_channel_of_the_embedding_times_1_02(copy):
    def scale(table):
        table[:, 17] *= np.float16(1.02)

    copy.embedding(scale)


@planted("weights")
def last_embedding_row_zero(copy):
    def zero(table):
        table[-1] = 0

    copy.embedding(zero)


@planted("weights")
def embedding_rows_moved_by_one(copy):
    def roll(table):
        table[:] = np.roll(table, 1, axis=0)

    copy.embedding(roll)


@planted("program")
def stream_declared_half_as_large(copy):
    copy.manifest["residual_exponent"] = 1


@planted("interface")
def end_of_sequence_of_another_model(copy):
    copy.manifest["tokens"]["eos"] = [0]


@planted("interface")
def one_end_of_sequence_too_many(copy):
    copy.manifest["tokens"]["eos"].append(5)


@planted("interface")
def begin_of_sequence_of_another_model(copy):
    copy.manifest["tokens"]["bos"] = 3


@planted("interface")
def begin_of_sequence_dropped(copy):
    copy.manifest["tokens"]["bos"] = None


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
def tokenizer_left_out(copy):
    copy.manifest["tokens"]["files"] = []


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


@planted("interface")
def range_of_t_ends_at_2(copy):
    for layer in range(4):
        for value in copy.spec(copy.shard(layer)).description.input:
            for bounds in value.type.multiArrayType.shapeRange.sizeRanges:
                if bounds.lowerBound != bounds.upperBound:
                    bounds.upperBound = 2


@planted("interface")
def range_of_t_ends_at_3_in_one_input(copy):
    for bounds in described(
        copy, "attn_mask"
    ).type.multiArrayType.shapeRange.sizeRanges:
        if bounds.lowerBound != bounds.upperBound:
            bounds.upperBound = 3


@planted("interface")
def range_of_t_begins_at_2(copy):
    for bounds in described(copy, "x").type.multiArrayType.shapeRange.sizeRanges:
        if bounds.lowerBound != bounds.upperBound:
            bounds.lowerBound = 2


@planted("interface")
def range_of_t_without_an_end(copy):
    for bounds in described(copy, "x").type.multiArrayType.shapeRange.sizeRanges:
        if bounds.lowerBound != bounds.upperBound:
            bounds.upperBound = -1


@planted("interface")
def a_shape_range_removed(copy):
    described(copy, "x").type.multiArrayType.ClearField("shapeRange")


@planted("interface")
def the_range_of_the_head_removed(copy):
    for value in copy.spec(copy.shard(kind="head")).description.input:
        value.type.multiArrayType.ClearField("shapeRange")


@planted("interface")
def an_input_described_as_int32(copy):
    described(copy, "rope_cos").type.multiArrayType.dataType = 0x20000 | 32


@planted("interface")
def an_input_described_as_float32(copy):
    described(copy, "kv_write_mask", 2).type.multiArrayType.dataType = 0x10000 | 32


@planted("interface")
def an_output_described_as_double(copy):
    described(copy, "hidden", 3).type.multiArrayType.dataType = 0x10000 | 64


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


@planted("interface")
def a_state_described_as_float32(copy):
    described(copy, "k_state", 3).type.stateType.arrayType.dataType = 0x10000 | 32


@planted("interface")
def t_max_of_60_over_a_range_of_4(copy):
    copy.manifest["options"]["tokens"] = "1-60"


@planted("interface")
def t_max_of_2_over_a_range_of_4(copy):
    copy.manifest["options"]["tokens"] = "1-2"


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
def taps_of_another_value(copy):
    shard = copy.shard(1)
    shard["taps"] = {
        "1": next(n for n, m in shard["modules"].items() if m.endswith("self_attn"))
    }
