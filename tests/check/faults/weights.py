"""Faults of the stored weights in a bundle's files."""

from collections.abc import Callable

import numpy as np

from faults.copies import ArrayChange, StoredWeight
from faults.fault import Fault

# The presets of `cases.PRESETS` with a table for each group of rows.
GROUPED = ("lut6-g16",)
# The presets of the bundle `fitted`, and those of them with a table for each group of rows.
FITTED = ("int8-channel", "int4-block32", "lut6-g16", "lut4-g8")
FITTED_TABLES = ("lut6-g16", "lut4-g8")
WeightPlant = Callable[..., None]
"""A function of a `Copy`, and of a layer where the fault has one."""


# Edits of stored weights. The functions with a parameter `tensor` return the `plant` of a row.
# `tensor` is "mlp.up_proj.weight" in a row with `layer=1` and "layers.1.mlp.up_proj.weight" in one
# without: `Copy.weight` finds a tensor by the end of its name.


def full_name(tensor: str, layer: int | None) -> str:
    """The end of a checkpoint tensor's name, by which `Copy.weight` finds it."""
    return tensor if layer is None else f"layers.{layer}.{tensor}"


def edit_stored(tensor: str, change: Callable[[StoredWeight], None]) -> WeightPlant:
    """Changes how a weight is stored."""

    def plant(copy, layer=None):
        change(copy.weight(full_name(tensor, layer)))

    return plant


def in_every_layer(plant: WeightPlant) -> WeightPlant:
    """Plants a fault of a layer in all of them."""

    def plant_everywhere(copy):
        for layer in range(copy.manifest["dims"]["L"]):
            plant(copy, layer)

    return plant_everywhere


def scale(tensor: str, factor: float) -> WeightPlant:
    """Multiplies a weight by way of its scale or table where it has one."""
    return edit_stored(tensor, lambda stored: stored.scale(factor))


def scale_row(tensor: str, row: int, factor: float) -> WeightPlant:
    """Multiplies one output channel, by its own scale where it has one."""
    return edit_stored(tensor, lambda stored: stored.scale_row(row, factor))


def store_scaled_row(tensor: str, row: int, factor: float) -> WeightPlant:
    """Multiplies one output channel, in a table by draws: the entry nearest to a multiple is often
    the weight's own one, so that each weight becomes one of the two entries around its multiple,
    and the mean of the draws is the multiple."""

    def scale_stored(stored: StoredWeight) -> None:
        if stored.role == "indices":
            stored.scale_row_by_draws(row, factor)
        else:
            stored.scale_row(row, factor)

    return edit_stored(tensor, scale_stored)


def shift(tensor: str, steps: int) -> WeightPlant:
    """Moves every weight by steps of its storage, as a wrong zero point does."""
    return edit_stored(tensor, lambda stored: stored.shift(steps))


def edit_values(tensor: str, change: ArrayChange) -> WeightPlant:
    """Changes the values of a weight, which are stored as its preset can express them."""
    return edit_stored(tensor, lambda stored: stored.write(change(stored.read())))


def exchange(tensor: str, other: str) -> WeightPlant:
    """Exchanges two weights of one shape."""

    def plant(copy, layer):
        weight = copy.weight(full_name(tensor, layer))
        weight.swap(copy.weight(full_name(other, layer)))

    return plant


# Changes of values


def negate_largest(values):
    values[np.unravel_index(np.abs(values).argmax(), values.shape)] *= -1
    return values


def zero_first_rows(values):
    values[:16] = 0
    return values


def by_head(change: ArrayChange, D: int = 32) -> ArrayChange:
    """A change of values seen as [heads, D, …]."""

    def change_heads(values):
        return change(values.reshape(-1, D, *values.shape[1:])).reshape(values.shape)

    return change_heads


# the other convention of rotary weights: pairs side by side instead of halves
PAIRS = np.arange(32).reshape(2, -1).T.ravel()


def scale_channel_5(norm):
    norm.ravel()[5] *= 1.02
    return norm


def zero_16_inputs_of_row_20(values):
    values[20, :16] = 0
    return values


def exchange_rows_250_and_251(values):
    values[[250, 251]] = values[[251, 250]]
    return values


def round_to_seven_values(values):
    step = np.abs(values).max() / 3
    return np.rint(values / step) * step


def drop(values):
    assert values.any()
    return np.zeros_like(values)


def roll_experts(values, experts: int = 4):
    """Gives each expert the weights of the one before it; experts are stacked along axis 0."""
    return np.roll(values, len(values) // experts, axis=0)


def shuffle(values):
    return np.random.default_rng(0).permutation(values.ravel()).reshape(values.shape)


# Edits of lookup tables


def edit_tables(tensor: str, change: ArrayChange) -> WeightPlant:
    """Changes the tables [groups, entries] of a weight."""
    return edit_stored(tensor, lambda stored: stored.edit_tables(change))


def exchange_second_and_third(tables):
    tables[[1, 2]] = tables[[2, 1]]
    return tables


def rotate_entries_of_second(tables):
    tables[1] = np.roll(tables[1], 1)
    return tables


def scale_second(tables):
    tables[1] *= np.float16(1.02)
    return tables


# Faults that take more than one edit


def scale_updates(copy, layer):
    for tensor in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        copy.weight(full_name(tensor, layer)).scale(1.1)


def shuffle_mlp(copy):
    for name in ("gate", "up"):
        in_every_layer(edit_values(f"mlp.{name}_proj.weight", shuffle))(copy)


def store_tensor_of_another_layer(copy, layer):
    last = copy.manifest["dims"]["L"] - 1
    other_layer = 0 if layer == last else last
    other = copy.weight(full_name("mlp.down_proj.weight", other_layer))
    copy.weight(full_name("mlp.down_proj.weight", layer)).copy(other)


def exchange_packages(shard: dict, other: dict) -> None:
    for name in ("path", "files", "bytes", "modules"):
        shard[name], other[name] = other[name], shard[name]


def exchange_layers(copy):
    """Exchanges the packages of layers 1 and 2. In the manifest the weights and states of each have
    the names of the layer whose place it takes."""
    shard, other = copy.shard(1), copy.shard(2)
    exchange_packages(shard, other)
    for name in ("weights", "states"):
        shard[name], other[name] = (
            {
                key.replace("layers.2.", "layers.1."): value
                for key, value in other[name].items()
            },
            {
                key.replace("layers.1.", "layers.2."): value
                for key, value in shard[name].items()
            },
        )


def exchange_query_and_key_norm(copy, layer):
    query = copy.weight(f"layers.{layer}.self_attn.q_norm.weight")
    key = copy.weight(f"layers.{layer}.self_attn.k_norm.weight")
    # both are ones in a fresh checkpoint, which an exchange would leave as they are
    values = key.read()
    key.write(values + np.linspace(0, 0.25, values.size).reshape(values.shape))
    query.swap(key)


def drop_offsets(copy, layer):
    copy.shard(layer)["offsets"] = {}


def roll_second_head_slice(copy):
    shard = copy.manifest["shards"][-1]
    name = next(
        stored for tensor, stored in shard["weights"].items() if "norm" not in tensor
    )
    weight = copy.constant(shard, name)
    weight.write(np.roll(weight.read(), 1, axis=0))


def exchange_head_slices(copy):
    first, second = (s for s in copy.manifest["shards"] if s["kind"] == "head")
    exchange_packages(first, second)
    first["weights"], second["weights"] = second["weights"], first["weights"]


def exchange_fused_keys_and_values(copy, layer):
    # 96 rows of queries, 96 of keys, 96 of values
    weight = copy.weight(f"layers.{layer}.self_attn.qkv_proj.weight")
    for array in weight.arrays.values():
        values = array.read()
        # the scale of a whole tensor and the tables of groups of rows stay as they are
        if len(values) == 3 * 96:
            q, k, v = np.split(values, 3)
            array.write(np.concatenate([q, v, k]))


def declare_other_groups(copy, layer):
    """The manifest says that each table of a matrix is for half as many rows as it is."""
    name, group = copy.manifest["options"]["compress"].split("-g")
    for tensor in copy.shard(layer)["weights"]:
        if tensor.endswith("mlp.up_proj.weight"):
            formats = copy.manifest.setdefault("formats", {})
            formats[tensor] = f"{name}-g{int(group) // 2}"


def declare_other_format(copy, layer):
    """The manifest names another preset for a matrix than it is stored in."""
    others = {
        "lut6-g16": "lut6-g8",
        "lut4-g8": "lut4-g4",
        "int8-channel": "lut4-g8",
        "int4-block32": "lut4-g8",
    }
    formats = copy.manifest.setdefault("formats", {})
    for tensor in copy.shard(layer)["weights"]:
        if tensor.endswith("mlp.up_proj.weight"):
            formats[tensor] = others[copy.manifest["options"]["compress"]]


def forget_the_calibration(copy):
    """The manifest no longer names the text that the values were fitted to."""
    copy.manifest["calibration"] = None


FAULTS = [
    Fault(
        "values of one layer times 0.9",
        gate="weights",
        layer=1,
        plant=scale("self_attn.v_proj.weight", 0.9),
    ),
    Fault(
        "values of the last layer times 1.01",
        gate="weights",
        plant=scale("layers.3.self_attn.v_proj.weight", 1.01),
    ),
    Fault(
        "keys times 1.2",
        gate="weights",
        plant=in_every_layer(scale("self_attn.k_proj.weight", 1.2)),
    ),
    Fault(
        "queries halved in the first layer",
        gate="weights",
        plant=scale("layers.0.self_attn.q_proj.weight", 0.5),
    ),
    Fault(
        "one output channel times 1.2",
        gate="weights",
        layer=1,
        plant=scale_row("self_attn.o_proj.weight", 7, 1.2),
    ),
    Fault(
        "one output channel of down_proj times 0.8",
        gate="weights",
        layer=3,
        plant=scale_row("mlp.down_proj.weight", 100, 0.8),
    ),
    Fault(
        "zero point plus one",
        gate="weights",
        plant=in_every_layer(shift("mlp.up_proj.weight", 1)),
    ),
    Fault(
        "zero point minus one in one tensor",
        gate="weights",
        layer=2,
        plant=shift("self_attn.q_proj.weight", -1),
    ),
    Fault(
        "final norm times 1.05", gate="weights", plant=scale("model.norm.weight", 1.05)
    ),
    Fault(
        "bias of the values doubled",
        gate="weights",
        bundle="qwen2",
        layer=1,
        plant=scale("self_attn.v_proj.bias", 2),
    ),
    Fault(
        "temperature times 1.1",
        gate="weights",
        bundle="zaya",
        layer=0,
        plant=scale("self_attn.qk_norm.temp", 1.1),
    ),
    Fault(
        "scalar of a layer times 1.1",
        gate="weights",
        bundle="gemma4",
        layer=3,
        plant=scale("layer_scalar", 1.1),
    ),
    Fault(
        "projection of second embeddings times 1.05",
        gate="weights",
        bundle="gemma4",
        plant=scale("per_layer_model_projection.weight", 1.05),
    ),
    Fault(
        "updates of one layer times 1.1", gate="weights", layer=2, plant=scale_updates
    ),
    Fault(
        "one weight of another sign",
        gate="weights",
        layer=2,
        plant=edit_values("mlp.gate_proj.weight", negate_largest),
    ),
    Fault(
        "a block of weights zero",
        gate="weights",
        layer=0,
        plant=edit_values("mlp.down_proj.weight", zero_first_rows),
    ),
    Fault(
        "a square matrix transposed",
        gate="weights",
        layer=2,
        plant=edit_values(
            "self_attn.o_proj.weight", lambda values: np.swapaxes(values, 0, 1)
        ),
    ),
    Fault(
        "query heads in another order",
        gate="weights",
        layer=1,
        plant=edit_values(
            "self_attn.q_proj.weight", by_head(lambda heads: np.roll(heads, 1, axis=0))
        ),
    ),
    Fault(
        "heads and their width transposed",
        gate="weights",
        layer=0,
        plant=edit_values(
            "self_attn.k_proj.weight", by_head(lambda heads: heads.swapaxes(0, 1))
        ),
    ),
    Fault(
        "rope halves interleaved in the key weights",
        gate="weights",
        layer=2,
        plant=edit_values(
            "self_attn.k_proj.weight", by_head(lambda heads: heads[:, PAIRS])
        ),
    ),
    Fault(
        "norm weight of ones",
        gate="weights",
        layer=2,
        plant=edit_values("post_attention_layernorm.weight", np.ones_like),
    ),
    Fault(
        "one channel of a norm times 1.02",
        gate="weights",
        layer=0,
        plant=edit_values("input_layernorm.weight", scale_channel_5),
    ),
    Fault(
        "head rows moved by one",
        gate="weights",
        plant=edit_values(
            "embed_tokens.weight", lambda values: np.roll(values, 1, axis=0)
        ),
    ),
    Fault(
        "two head rows exchanged",
        gate="weights",
        plant=edit_values("embed_tokens.weight", exchange_rows_250_and_251),
    ),
    Fault(
        "coarser than declared",
        gate="weights",
        layer=1,
        plant=edit_values("mlp.up_proj.weight", round_to_seven_values),
    ),
    Fault(
        "bias of the keys dropped",
        gate="weights",
        bundle="qwen2",
        layer=1,
        plant=edit_values("self_attn.k_proj.bias", drop),
    ),
    Fault(
        "bias of the queries dropped",
        gate="weights",
        bundle="qwen2",
        layer=0,
        plant=edit_values("self_attn.q_proj.bias", drop),
    ),
    Fault(
        "query norm constant at 1.125",
        gate="weights",
        bundle="qwen3",
        layer=1,
        plant=edit_values(
            "self_attn.q_norm.weight", lambda values: np.full_like(values, 1.125)
        ),
    ),
    Fault(
        "one added to the norms twice",
        gate="weights",
        bundle="gemma",
        layer=1,
        plant=edit_values(
            "pre_feedforward_layernorm.weight", lambda values: values + 1
        ),
    ),
    Fault(
        "the one of a norm forgotten",
        gate="weights",
        bundle="gemma",
        layer=2,
        plant=edit_values(
            "post_feedforward_layernorm.weight", lambda values: values - 1
        ),
    ),
    Fault(
        "taps of a convolution reversed",
        gate="weights",
        bundle="zaya",
        layer=1,
        plant=edit_values(
            "self_attn.qkv_proj.conv_qk_depthwise.weight",
            lambda values: values[..., ::-1],
        ),
    ),
    Fault(
        "balancing biases constant at 0.01",
        gate="weights",
        bundle="zaya",
        layer=1,
        plant=edit_values(
            "mlp.gate.balancing_biases", lambda values: np.full_like(values, 0.01)
        ),
    ),
    Fault(
        "experts in another order",
        gate="weights",
        bundle="zaya",
        layer=2,
        plant=edit_values("mlp.experts.down_proj", roll_experts),
    ),
    Fault(
        "scale of router states constant at 0.75",
        gate="weights",
        bundle="zaya",
        layer=1,
        plant=edit_values(
            "mlp.gate.router_states_scale", lambda values: np.full_like(values, 0.75)
        ),
    ),
    Fault(
        "residual scale constant at 1.125",
        gate="weights",
        bundle="zaya",
        layer=2,
        plant=edit_values(
            "post_attention_residual_scale.residual_scale",
            lambda values: np.full_like(values, 1.125),
        ),
    ),
    Fault(
        "gate and up exchanged",
        gate="weights",
        layer=3,
        plant=exchange("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    ),
    Fault(
        "keys and values exchanged",
        gate="weights",
        layer=1,
        plant=exchange("self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    ),
    Fault(
        "norms of a layer exchanged",
        gate="weights",
        layer=1,
        plant=exchange("input_layernorm.weight", "post_attention_layernorm.weight"),
    ),
    Fault("MLP weights shuffled", gate="weights", plant=shuffle_mlp),
    Fault(
        "one tensor of another layer",
        gate="weights",
        layer=0,
        plant=store_tensor_of_another_layer,
    ),
    Fault("two layers exchanged", gate="weights", plant=exchange_layers),
    Fault(
        "query and key norm exchanged",
        gate="weights",
        bundle="qwen3",
        layer=0,
        plant=exchange_query_and_key_norm,
    ),
    Fault(
        "offsets of norms undeclared",
        gate="weights",
        bundle="gemma",
        layer=1,
        plant=drop_offsets,
    ),
    Fault(
        "rows of the second head slice moved by one",
        gate="weights",
        bundle="wide",
        plant=roll_second_head_slice,
    ),
    Fault(
        "head slices in the wrong order",
        gate="weights",
        bundle="wide",
        plant=exchange_head_slices,
    ),
    Fault(
        "keys and values of a fused projection exchanged",
        gate="weights",
        bundle="phi3",
        layer=0,
        plant=exchange_fused_keys_and_values,
    ),
    Fault(
        "tables of two neighbouring groups exchanged",
        gate="weights",
        layer=1,
        plant=edit_tables("mlp.up_proj.weight", exchange_second_and_third),
        presets=GROUPED,
    ),
    Fault(
        "entries of one table rotated by one",
        gate="weights",
        layer=1,
        plant=edit_tables("self_attn.q_proj.weight", rotate_entries_of_second),
        presets=GROUPED,
    ),
    Fault(
        "entries of one table times 1.02",
        gate="weights",
        layer=2,
        plant=edit_tables("self_attn.v_proj.weight", scale_second),
        presets=GROUPED,
    ),
    Fault(
        "one row times 1.05 in the table of its group",
        gate="weights",
        layer=1,
        plant=scale_row("mlp.down_proj.weight", 20, 1.05),
        presets=GROUPED,
    ),
    Fault(
        "sixteen inputs of one row zero",
        gate="weights",
        layer=3,
        plant=edit_values("mlp.down_proj.weight", zero_16_inputs_of_row_20),
        presets=GROUPED,
    ),
    Fault(
        "format of a tensor mislabelled",
        gate="weights",
        layer=1,
        plant=declare_other_groups,
        presets=GROUPED,
    ),
    Fault(
        "tables of two neighbouring groups exchanged after a calibration",
        gate="weights",
        bundle="fitted",
        layer=1,
        plant=edit_tables("mlp.up_proj.weight", exchange_second_and_third),
        presets=FITTED_TABLES,
    ),
    Fault(
        "entries of one table rotated by one after a calibration",
        gate="weights",
        bundle="fitted",
        layer=1,
        plant=edit_tables("self_attn.q_proj.weight", rotate_entries_of_second),
        presets=FITTED_TABLES,
    ),
    Fault(
        "one row times 1.05 after a calibration",
        gate="weights",
        bundle="fitted",
        layer=1,
        plant=store_scaled_row("mlp.down_proj.weight", 20, 1.05),
        # 256 inputs of lut4-g8 are too few to tell such a row from rounding
        presets=("int8-channel", "int4-block32", "lut6-g16"),
    ),
    Fault(
        "one row times 1.02 after a calibration",
        gate="weights",
        bundle="fitted",
        layer=1,
        plant=store_scaled_row("mlp.down_proj.weight", 20, 1.02),
        presets=("int8-channel", "lut6-g16"),
    ),
    Fault(
        "sixteen inputs of one row zero after a calibration",
        gate="weights",
        bundle="fitted",
        layer=3,
        plant=edit_values("mlp.down_proj.weight", zero_16_inputs_of_row_20),
        presets=FITTED,
    ),
    Fault(
        "format of a tensor mislabelled after a calibration",
        gate="weights",
        bundle="fitted",
        layer=1,
        plant=declare_other_format,
        presets=FITTED,
    ),
    Fault(
        "one tensor of another layer after a calibration",
        gate="weights",
        bundle="fitted",
        layer=0,
        plant=store_tensor_of_another_layer,
        presets=FITTED,
    ),
    Fault(
        "calibration forgotten",
        gate="weights",
        bundle="fitted",
        plant=forget_the_calibration,
        presets=FITTED,
    ),
]
