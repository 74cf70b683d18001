"""Faults planted in a copy of a bundle on disk, hashes in bundle.json redone: what an exporter, a
copy or an editor gets wrong.

A fault names the bundle it is planted in (see `cases.BASES`) and the gate that must see it at the
latest, and edits a `copies.Copy`. Each is tried in every preset. Those of a decoder in memory are in
`faults`. Here: weights, tables of the host, and the manifest; `planted_programs` has programs and
their descriptions.
"""

import json
from collections.abc import Callable
from functools import partial

import numpy as np
from copies import Copy, StoredWeight
from registry import on_disk

weights = partial(on_disk, "weights")
scale, scale_row, shift = StoredWeight.scale, StoredWeight.scale_row, StoredWeight.shift


def weight(copy: Copy, tensor: str, change: Callable, *arguments) -> None:
    """Changes one stored weight, of every layer where `tensor` has a `{}`."""
    for i in range(copy.manifest["dims"]["L"] if "{}" in tensor else 1):
        change(copy.weight(tensor.format(i)), *arguments)


def values(copy: Copy, tensor: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Changes the values of a weight."""
    weight(copy, tensor, lambda stored: stored.write(change(stored.read())))


def exchanged(copy: Copy, one: str, other: str) -> None:
    copy.weight(one).swap(copy.weight(other))


# Weights, by what scales, tables and codes can do

weights(
    values_of_one_layer_times_0_9=("layers.1.self_attn.v_proj.weight", scale, 0.9),
    values_of_the_last_layer_times_1_01=(
        "layers.3.self_attn.v_proj.weight",
        scale,
        1.01,
    ),
    keys_times_1_2=("layers.{}.self_attn.k_proj.weight", scale, 1.2),
    queries_halved_in_the_first_layer=("layers.0.self_attn.q_proj.weight", scale, 0.5),
    one_output_channel_times_1_2=(
        "layers.1.self_attn.o_proj.weight",
        scale_row,
        7,
        1.2,
    ),
    one_output_channel_of_down_proj_times_0_8=(
        "layers.3.mlp.down_proj.weight",
        scale_row,
        100,
        0.8,
    ),
    zero_point_plus_one=("layers.{}.mlp.up_proj.weight", shift, 1),
    zero_point_minus_one_in_one_tensor=("layers.2.self_attn.q_proj.weight", shift, -1),
    final_norm_times_1_05=("model.norm.weight", scale, 1.05),
)(weight)
weights(
    "qwen2", bias_of_the_values_doubled=("layers.1.self_attn.v_proj.bias", scale, 2)
)(weight)
weights("zaya", temperature_times_1_1=("layers.0.self_attn.qk_norm.temp", scale, 1.1))(
    weight
)


@weights()
def updates_of_one_layer_times_1_1(copy):
    for tensor in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        copy.weight(f"layers.2.{tensor}").scale(1.1)


# Values of weights


def of_another_sign(values):
    values[np.unravel_index(np.abs(values).argmax(), values.shape)] *= -1
    return values


def first_rows_zero(values):
    values[:16] = 0
    return values


def heads(change: Callable, D: int = 32) -> Callable:
    """Changes values as [heads, D, …]."""
    return lambda v: change(v.reshape(-1, D, *v.shape[1:])).reshape(v.shape)


def shuffled(values):
    return np.random.default_rng(0).permutation(values.ravel()).reshape(values.shape)


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


def experts_rolled(values):
    axis = next(i for i, n in enumerate(values.shape) if n > 1)
    return np.roll(values, values.shape[axis] // 4, axis)


# the other convention of rotary weights: pairs side by side instead of halves
PAIRS = np.arange(32).reshape(2, -1).T.ravel()
weights(
    one_weight_of_another_sign=("layers.2.mlp.gate_proj.weight", of_another_sign),
    a_block_of_weights_zero=("layers.0.mlp.down_proj.weight", first_rows_zero),
    a_square_matrix_transposed=(
        "layers.2.self_attn.o_proj.weight",
        lambda v: np.swapaxes(v, 0, 1),
    ),
    query_heads_in_another_order=(
        "layers.1.self_attn.q_proj.weight",
        heads(lambda v: np.roll(v, 1, 0)),
    ),
    heads_and_their_width_transposed=(
        "layers.0.self_attn.k_proj.weight",
        heads(lambda v: v.swapaxes(0, 1)),
    ),
    rope_halves_interleaved_in_the_key_weights=(
        "layers.2.self_attn.k_proj.weight",
        heads(lambda v: v[:, PAIRS]),
    ),
    norm_weight_of_ones=("layers.2.post_attention_layernorm.weight", np.ones_like),
    one_channel_of_a_norm_times_1_02=(
        "layers.0.input_layernorm.weight",
        one_channel_larger,
    ),
    head_rows_moved_by_one=("embed_tokens.weight", lambda v: np.roll(v, 1, 0)),
    two_head_rows_exchanged=("embed_tokens.weight", two_rows_exchanged),
    coarser_than_declared=("layers.1.mlp.up_proj.weight", coarser),
)(values)
weights(
    "qwen2",
    bias_of_the_keys_dropped=("layers.1.self_attn.k_proj.bias", dropped),
    bias_of_the_queries_dropped=("layers.0.self_attn.q_proj.bias", dropped),
)(values)
weights(
    "qwen3",
    query_norm_of_ones=(
        "layers.1.self_attn.q_norm.weight",
        lambda v: np.ones_like(v) * 1.125,
    ),
)(values)
weights(
    "gemma",
    one_added_to_the_norms_twice=(
        "layers.1.pre_feedforward_layernorm.weight",
        lambda v: v + 1,
    ),
    the_one_of_a_norm_forgotten=(
        "layers.2.post_feedforward_layernorm.weight",
        lambda v: v - 1,
    ),
)(values)
weights(
    "zaya",
    taps_of_a_convolution_reversed=(
        "layers.1.self_attn.qkv_proj.conv_qk_depthwise.weight",
        lambda v: v[..., ::-1],
    ),
    balancing_biases_dropped=(
        "layers.1.mlp.gate.balancing_biases",
        lambda v: v * 0 + np.float32(0.01),
    ),
    experts_in_another_order=("layers.2.mlp.experts.down_proj", experts_rolled),
    scale_of_router_states_dropped=(
        "layers.1.mlp.gate.router_states_scale",
        lambda v: np.ones_like(v) * 0.75,
    ),
    residual_scale_of_ones=(
        "layers.2.post_attention_residual_scale.residual_scale",
        lambda v: np.ones_like(v) * 1.125,
    ),
)(values)
weights(
    gate_and_up_exchanged=(
        "layers.3.mlp.gate_proj.weight",
        "layers.3.mlp.up_proj.weight",
    ),
    keys_and_values_exchanged=(
        "layers.1.self_attn.k_proj.weight",
        "layers.1.self_attn.v_proj.weight",
    ),
    norms_of_a_layer_exchanged=(
        "layers.1.input_layernorm.weight",
        "layers.1.post_attention_layernorm.weight",
    ),
)(exchanged)


@weights()
def mlp_weights_shuffled(copy):
    for name in ("gate", "up"):
        values(copy, f"layers.{{}}.mlp.{name}_proj.weight", shuffled)


@weights()
def one_tensor_of_another_layer(copy):
    other = copy.weight("layers.3.mlp.down_proj.weight")
    copy.weight("layers.0.mlp.down_proj.weight").copy(other)


def packages_exchanged(one: dict, other: dict) -> None:
    for name in ("path", "files", "bytes", "modules"):
        one[name], other[name] = other[name], one[name]


@weights()
def two_layers_exchanged(copy):
    one, other = copy.shard(1), copy.shard(2)
    packages_exchanged(one, other)
    for name in ("weights", "states"):
        one[name], other[name] = (
            {k.replace("layers.2.", "layers.1."): v for k, v in other[name].items()},
            {k.replace("layers.1.", "layers.2."): v for k, v in one[name].items()},
        )


@weights("qwen3")
def query_and_key_norm_exchanged(copy):
    a, b = (copy.weight(f"layers.0.self_attn.{n}_norm.weight") for n in "qk")
    b.write(b.read() + np.linspace(0, 0.25, b.read().size).reshape(b.read().shape))
    a.swap(b)


@weights("gemma")
def offsets_of_norms_undeclared(copy):
    copy.shard(1)["offsets"] = {}


@weights("wide")
def rows_of_the_second_head_slice_moved_by_one(copy):
    shard = copy.manifest["shards"][-1]
    name = next(v for k, v in shard["weights"].items() if "norm" not in k)
    stored = copy.constant(shard, name)
    stored.write(np.roll(stored.read(), 1, axis=0))


@weights("wide")
def head_slices_in_the_wrong_order(copy):
    a, b = (shard for shard in copy.manifest["shards"] if shard["kind"] == "head")
    packages_exchanged(a, b)
    a["weights"], b["weights"] = b["weights"], a["weights"]


@weights("phi3")
def keys_and_values_of_a_fused_projection_exchanged(copy):
    for array in copy.weight("layers.0.self_attn.qkv_proj.weight").arrays.values():
        rows = array.read()
        if len(rows) == 3 * 96:
            array.write(np.concatenate([rows[:96], rows[192:], rows[96:192]]))


# The host's tables


def frequencies(copy: Copy, change: Callable[[np.ndarray], np.ndarray]) -> None:
    for rope in copy.manifest["rope"]:
        rope["inv_freq"] = [float(v) for v in change(np.array(rope["inv_freq"]))]


def bf16(inv):
    return (inv.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


on_disk(
    "host",
    inv_freq_rounded_to_fp16=(np.float16,),
    inv_freq_rounded_to_bf16=(bf16,),
    slowest_quarter_of_rope_is_zero=(
        lambda inv: inv * (np.arange(len(inv)) < 3 * len(inv) / 4),
    ),
    one_frequency_off_by_a_hundredth=(
        lambda inv: inv * np.where(np.arange(len(inv)) == 3, 1.01, 1),
    ),
    rope_scaling_of_the_configuration_ignored=(
        lambda inv: 500000.0 ** (-np.arange(len(inv)) / len(inv)),
    ),
    rope_of_another_base=(lambda inv: inv**1.02,),
)(frequencies)
on_disk(
    "host",
    "phi3",
    long_table_of_longrope_below_the_original_length=(
        lambda inv: inv * (1 + np.arange(12) / 8) / (2.0 + np.arange(12)),
    ),
)(frequencies)


@on_disk("host", rope_scale_of_1_01=(1.01,))
@on_disk("host", "ministral3", factor_of_yarn_on_cos_and_sin_left_out=(1.0,))
def rope_scale(copy, scale):
    copy.manifest["rope"][0]["scale"] = scale


@on_disk("host", "ministral3")
def factor_of_yarn_halved(copy):
    import tiny
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    dims = tiny.DIMS["ministral3"]
    rope = dims["rope_parameters"] | {"factor": 2.0}
    sizes = dims | {"rope_parameters": rope}
    config = transformers.AutoConfig.for_model("ministral3", **sizes)
    inv_freq, _ = ROPE_INIT_FUNCTIONS["yarn"](config, None)
    frequencies(copy, lambda _: inv_freq.numpy())


@on_disk("host", attention_limited_to_the_last_40_rows=(lambda _: 40,))
@on_disk(
    "host",
    "gemma",
    window_one_token_too_wide=(lambda rows: rows and rows + 1,),
    window_forgotten=(lambda _: None,),
)
def window(copy, change):
    for layer in copy.manifest["layers"]:
        layer["window"] = change(layer["window"])


@on_disk("host", "gemma")
def local_and_global_frequencies_exchanged(copy):
    a, b = copy.manifest["rope"]
    a["inv_freq"], b["inv_freq"] = b["inv_freq"], a["inv_freq"]


def rows_240_and_241_exchanged(table):
    table[[240, 241]] = table[[241, 240]]
    return table


weights(
    two_embedding_rows_exchanged=(rows_240_and_241_exchanged,),
    one_channel_of_the_embedding_times_1_02=(
        lambda table: table * np.where(np.arange(table.shape[1]) == 17, 1.02, 1),
    ),
    last_embedding_row_zero=(
        lambda table: table * (np.arange(len(table)) < len(table) - 1)[:, None],
    ),
    embedding_rows_moved_by_one=(lambda table: np.roll(table, 1, axis=0),),
)(Copy.embedding)


# The manifest


@on_disk("program", embedding_times_1_05=(1.05,))
@on_disk("program", "gemma", embedding_scale_left_out=(1.0,))
def embedding_scale(copy, scale):
    copy.manifest["embedding"]["scale"] = scale


@on_disk("program")
def stream_declared_half_as_large(copy):
    copy.manifest["residual_exponent"] = 1


@on_disk("program")
def states_exchanged_in_the_manifest(copy):
    states = copy.shard(1)["states"]
    k, v = states["layers.1.k_state"], states["layers.1.v_state"]
    k["tensor"], v["tensor"] = v["tensor"], k["tensor"]


interface = partial(on_disk, "interface")


@interface(
    t_max_of_60_over_a_range_of_4=("options", "tokens", "1-60"),
    t_max_of_2_over_a_range_of_4=("options", "tokens", "1-2"),
    one_t_declared_over_a_range=("options", "tokens", "4"),
    experts_declared_routed=("options", "moe", "routed"),
    slice_writes_declared=("options", "kv_write", "slice"),
    two_layers_a_shard_declared=("options", "layers_per_shard", 2),
    other_heads_declared=("dims", "H", 8),
    end_of_sequence_of_another_model=("tokens", "eos", [0]),
    one_end_of_sequence_too_many=("tokens", "eos", [2, 5]),
    begin_of_sequence_of_another_model=("tokens", "bos", 3),
    begin_of_sequence_dropped=("tokens", "bos", None),
    tokenizer_left_out=("tokens", "files", []),
)
def declared(copy, part, field, value):
    copy.manifest[part][field] = value


@interface()
def another_family_declared(copy):
    copy.manifest["family"] = "qwen2"


@interface(
    another_compression_declared=({"fp16": "int8-tensor"}, "fp16"),
    a_finer_compression_declared=(
        {"int8-channel": "int8-tensor", "lut4": "lut6"},
        "int8-channel",
    ),
)
def compression(copy, others, other):
    options = copy.manifest["options"]
    options["compress"] = others.get(options["compress"], other)


@interface(
    a_longer_cache_declared_than_the_program_has=(128,),
    a_shorter_cache_declared_than_the_program_has=(32,),
)
def resized(copy, S):
    options = copy.manifest["options"]
    old, options["max_seq_len"] = options["max_seq_len"], S
    for shard in copy.manifest["shards"]:
        masks = {n: v for n, v in shard["inputs"].items() if "_mask" in n}
        states = shard["states"].values()
        for shape in (*masks.values(), *(state["shape"] for state in states)):
            shape[:] = [S if n == old else n for n in shape]


@interface()
def taps_left_out(copy):
    copy.shard(1)["taps"].clear()


@interface()
def taps_of_another_value(copy):
    modules = copy.shard(1)["modules"].items()
    name = next(name for name, module in modules if module.endswith("self_attn"))
    copy.shard(1)["taps"] = {"1": name}


@interface()
def two_states_in_one_tensor(copy):
    copy.shard(1)["states"]["layers.1.k_state"]["tensor"] = "v_state"


@interface()
def tokenizer_with_two_tokens_exchanged(copy):
    def swap(text):
        fields = json.loads(text)
        vocabulary = fields["model"]["vocab"]
        a, b = list(vocabulary)[-2:]
        vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
        return json.dumps(fields).encode()

    copy.file("tokenizer/tokenizer.json", swap)


@interface()
def chat_template_of_another_model(copy):
    template = {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    copy.file(
        "tokenizer/tokenizer_config.json",
        lambda text: json.dumps(json.loads(text) | template).encode(),
    )
