"""Faults of the programs in a bundle's packages."""

import numpy as np

from faults.copies import (
    Copy,
    LayerPlant,
    Plant,
    find_source,
    list_arguments,
    rename_arguments,
)
from faults.fault import Fault

# Constants


def scale_constants(copy: Copy, shard: dict, name: str, factor: float) -> None:
    """Scales the fp16 constants of a program whose names contain `name`; fails if there is none."""
    names = [
        op.outputs[0].name
        for op in copy.block(shard).operations
        if op.type == "const" and name in op.outputs[0].name
    ]
    assert names, name
    for constant in names:
        array = copy.constant(shard, constant).arrays["val"]
        if array.dtype == "FLOAT16":
            array.write(array.read() * np.float16(factor))


# The epsilon of a norm is the product of two constants, …eps0 and …eps1. Both times 10 make it 100
# times as large.


def scale_both_epsilon_factors_of_all_norms(copy):
    for layer in range(4):
        scale_constants(copy, copy.shard(layer), "layernorm_eps", 10)


def scale_epsilon(name: str, factor: float) -> LayerPlant:
    """Scales one of the two factors of an epsilon of a layer."""
    return lambda copy, layer: scale_constants(copy, copy.shard(layer), name, factor)


def scale_both_epsilon_factors_of_head(copy):
    scale_constants(copy, copy.shard(kind="head"), "eps", 10)


def scale_scores(factor: float, prefix: str = "") -> LayerPlant:
    """Scales the constant that attention multiplies its scores by. `prefix` chooses among
    constants by the beginning of the name."""

    def plant(copy, layer):
        shard = copy.shard(layer)
        products = copy.operations(shard, "mul", "self_attn")
        factors = [find_source(op, "y") for op in products]
        # products with constants, not with the sines and cosines of rope
        constants = [name for name in factors if name.endswith("_to_fp16")]
        constant = next(name for name in constants if name.startswith(prefix))
        scale_constants(copy, shard, constant, factor)

    return plant


def set_softmax_axis(axis: int) -> LayerPlant:
    def plant(copy, layer):
        (op,) = copy.operations(copy.shard(layer), "softmax")
        argument = op.inputs["axis"].arguments[0]
        constant = copy.find_operation_returning(copy.shard(layer), argument.name)
        argument.value.CopyFrom(constant.attributes["val"])
        argument.value.immediateValue.tensor.ints.values[:] = [axis]

    return plant


def change_gelu_mode(copy, layer):
    (op,) = copy.operations(copy.shard(layer), "gelu")
    constant = copy.find_operation_returning(copy.shard(layer), find_source(op, "mode"))
    mode = constant.attributes["val"].immediateValue.tensor.strings.values
    mode[:] = ["EXACT" if mode[0] != "EXACT" else "SIGMOID_APPROXIMATION"]


# Operations


def replace_silu(kind: str) -> LayerPlant:
    """Puts another activation in the place of a layer's silu."""

    def plant(copy, layer):
        copy.operations(copy.shard(layer), "silu")[0].type = kind

    return plant


def replace_gelu_in_router(copy, layer):
    op = copy.operations(copy.shard(layer), "gelu")[0]
    op.type = "silu"
    del op.inputs["mode"]


def insert_after(
    kind: str, module: str, index: int, inserted: str, number: float
) -> LayerPlant:
    """Puts the operation `inserted`, which takes one fp16 number as its `y`, behind an operation of
    this kind and module; `index` chooses among several."""

    def plant(copy, layer):
        shard = copy.shard(layer)
        op = copy.operations(shard, kind, module)[index]
        copy.insert(shard, op, inserted, y=np.float16(number))

    return plant


def scale_logits(copy):
    shard = copy.shard(kind="head")
    product = copy.operations(shard, "conv")[-1]
    normed = copy.find_operation_returning(shard, find_source(product, "x"))
    copy.insert(shard, normed, "mul", y=np.float16(1.01))


def halve_router_state(copy):
    shard = copy.shard(2)
    reader = next(
        op
        for op in copy.block(shard).operations
        if "router_state" in [argument.name for argument in list_arguments(op)]
    )
    copy.insert(shard, reader, "mul", y=np.float16(0.5))


def reverse_after(kind: str, index: int, axis: int) -> LayerPlant:
    """Reverses an axis of the result of an operation in attention; `index` chooses among those of
    this kind."""

    def plant(copy, layer):
        shard = copy.shard(layer)
        op = copy.operations(shard, kind, "self_attn")[index]
        copy.insert(shard, op, "reverse", axes=np.array([axis], np.int32))

    return plant


def scale_rows_read(rows: slice, factor: float) -> LayerPlant:
    """Multiplies some rows of the first head of V where the program reads V to attend."""

    def plant(copy, layer):
        shard = copy.shard(layer)
        reads = copy.operations(shard, "read_state")
        read = [op for op in reads if find_source(op, "input") == "v_state"][-1]
        S = copy.manifest["options"]["max_seq_len"]
        scale = np.ones((1, copy.manifest["dims"]["H_kv"], S, 1), np.float16)
        scale[:, 0, rows] = factor
        copy.insert(shard, read, "mul", y=scale)

    return plant


# What operations read


def turn_queries_the_other_way(copy, layer):
    # a half of the queries is a difference, the other one a sum
    sub = copy.operations(copy.shard(layer), "sub", "self_attn")[0]
    add = copy.operations(copy.shard(layer), "add", "self_attn")[0]
    sub.type, add.type = "add", "sub"


def exchange_sine_and_cosine(copy, layer):
    names = {"rope_cos": "rope_sin", "rope_sin": "rope_cos"}
    for op in copy.operations(copy.shard(layer), "mul", "self_attn"):
        source = find_source(op, "y")
        copy.feed(op, "y", names.get(source, source))


def write_keys_before_rotation(copy, layer):
    shard = copy.shard(layer)
    products = copy.operations(shard, "matmul", "self_attn")
    write = next(op for op in products if find_source(op, "x") == "kv_write_mask")
    rows = copy.find_operation_returning(shard, find_source(write, "y"))
    concat = copy.find_operation_returning(shard, find_source(rows, "values"))
    # a half of the rotated keys is k · cos − k' · sin
    half = copy.find_operation_returning(shard, find_source(concat, "x"))
    product = copy.find_operation_returning(shard, find_source(half, "x"))
    copy.feed(write, "y", find_source(product, "x"))


def exchange_states(copy, layer):
    names = {"k_state": "v_state", "v_state": "k_state"}
    for op in copy.block(copy.shard(layer)).operations:
        if op.type in ("read_state", "write_state"):
            copy.feed(op, "input", names[find_source(op, "input")])


def find_masking(copy: Copy, shard: dict):
    """The operation that adds the mask to the scores."""
    sums = copy.operations(shard, "add", "self_attn")
    return next(op for op in sums if find_source(op, "y") == "attn_mask")


def skip_mask(copy, layer):
    shard = copy.shard(layer)
    scores = find_source(find_masking(copy, shard), "x")
    copy.feed(copy.operations(shard, "softmax")[0], "x", scores)


def enlarge_scores_before_mask(copy, layer):
    shard = copy.shard(layer)
    name = find_source(find_masking(copy, shard), "x")
    scores = copy.find_operation_returning(shard, name)
    copy.insert(shard, scores, "mul", y=np.float16(3e3))


def skip_attention(copy, layer):
    copy.feed(copy.operations(copy.shard(layer), "add")[-1], "x", "x")


def norm_layer_input_before_mlp(copy, layer):
    shard = copy.shard(layer)
    for kind in ("abs", "real_div"):
        copy.feed(copy.operations(shard, kind, "post_attention_layernorm")[0], "x", "x")


def exchange_gate_and_up(copy, layer):
    shard = copy.shard(layer)
    copy.move_first(shard)
    gate = copy.operations(shard, "conv", "gate_proj")[0]
    up = copy.operations(shard, "conv", "up_proj")[0]
    gate_weight, up_weight = find_source(gate, "weight"), find_source(up, "weight")
    copy.feed(gate, "weight", up_weight)
    copy.feed(up, "weight", gate_weight)


def skip_key_norm(copy, layer):
    shard = copy.shard(layer)
    last = copy.operations(shard, "mul", "k_norm")[-1].outputs[0].name
    divisions = copy.operations(shard, "real_div", "k_norm")
    first = next(op for op in divisions if op.inputs["x"].arguments)
    rename_arguments(copy.block(shard).operations, {last: find_source(first, "x")})


def norm_input_instead_of_output(copy, layer):
    """Makes the norm behind attention one before it: the norm reads the layer's input, the
    projections read the norm, and the residual sum reads attention's output."""
    shard = copy.shard(layer)
    module = f"layers.{layer}.post_attention_layernorm"
    modules = shard["modules"]
    norm = [
        op
        for op in copy.block(shard).operations
        if op.outputs and modules.get(op.outputs[0].name, "").startswith(module)
    ]
    normed = norm[-1].outputs[0].name
    attention = copy.operations(shard, "conv", "o_proj")[0].outputs[0].name
    rename_arguments(copy.operations(shard, "add"), {normed: attention})
    for name in "qkv":
        projections = copy.operations(shard, "conv", f"self_attn.{name}_proj")
        rename_arguments(projections, {"x": normed})
    rename_arguments(norm, {attention: "x"})
    # an operation has to stand behind those whose results it reads: norm and constants come first
    norm_outputs = [op.outputs[0].name for op in norm]
    copy.move_first(shard, lambda op: op.outputs and op.outputs[0].name in norm_outputs)
    copy.move_first(shard)


def rename_inputs(names: dict[str, str]) -> LayerPlant:
    """Gives a shard's inputs other names: in its program, its description and its manifest."""

    def plant(copy, layer):
        shard = copy.shard(layer)
        function = copy.spec(shard).mlProgram.functions["main"]
        for value in [*function.inputs, *copy.spec(shard).description.input]:
            value.name = names.get(value.name, value.name)
        rename_arguments(copy.block(shard).operations, names)
        shard["inputs"] = {
            names.get(name, name): shape for name, shape in shard["inputs"].items()
        }

    return plant


def plant_in_function(T: int, plant: Plant | LayerPlant) -> Plant | LayerPlant:
    """Plants a fault in the program of the function of T alone; the package's other function, and
    the weights that both read, stay sound."""

    def plant_there(copy, *layer):
        copy.function = f"t{T}"
        plant(copy, *layer)

    return plant_there


FAULTS = [
    Fault(
        "RMS epsilon times 100",
        gate="program",
        plant=scale_both_epsilon_factors_of_all_norms,
    ),
    Fault(
        "RMS epsilon times 10 in one norm",
        gate="program",
        layer=0,
        plant=scale_epsilon("input_layernorm_eps0", 10),
    ),
    Fault(
        "RMS epsilon left out",
        gate="program",
        layer=0,
        plant=scale_epsilon("input_layernorm_eps1", 0),
    ),
    Fault(
        "final norm's epsilon times 100",
        gate="program",
        plant=scale_both_epsilon_factors_of_head,
    ),
    # Gemma divides by the root of query_pre_attn_scalar, not by that of the width of a head
    Fault(
        "query scale of the head width",
        gate="program",
        bundle="gemma",
        layer=1,
        plant=scale_scores((24 / 32) ** 0.5, prefix="var_"),
    ),
    Fault("score scale times 1.05", gate="program", layer=2, plant=scale_scores(1.05)),
    Fault("softmax over heads", gate="program", layer=1, plant=set_softmax_axis(1)),
    Fault(
        "softmax over the queries", gate="program", layer=3, plant=set_softmax_axis(2)
    ),
    Fault(
        "gelu without its approximation",
        gate="program",
        bundle="gemma",
        layer=0,
        plant=change_gelu_mode,
    ),
    Fault(
        "silu become sigmoid", gate="program", layer=1, plant=replace_silu("sigmoid")
    ),
    Fault("silu become relu", gate="program", layer=3, plant=replace_silu("relu")),
    Fault(
        "silu become softplus", gate="program", layer=0, plant=replace_silu("softplus")
    ),
    Fault(
        "another activation in the router",
        gate="program",
        bundle="zaya",
        layer=1,
        plant=replace_gelu_in_router,
    ),
    Fault(
        "score scale of the hidden size",
        gate="program",
        layer=0,
        plant=insert_after("matmul", "self_attn", 2, "mul", 0.5),
    ),
    Fault(
        "a constant added to the stream",
        gate="program",
        layer=2,
        plant=insert_after("conv", "down_proj", 0, "add", 1e-3),
    ),
    Fault("logits times 1.01", gate="program", plant=scale_logits),
    Fault(
        "router state of the layer before halved",
        gate="program",
        bundle="zaya",
        plant=halve_router_state,
    ),
    Fault(
        "heads in reverse after attention",
        gate="program",
        layer=2,
        plant=reverse_after("matmul", -1, axis=1),
    ),
    Fault(
        "query heads in reverse",
        gate="program",
        layer=1,
        plant=reverse_after("concat", 0, axis=1),
    ),
    Fault(
        "tokens in reverse after attention",
        gate="program",
        layer=1,
        plant=reverse_after("matmul", -1, axis=2),
    ),
    Fault(
        "a head of the cache halved past row 48",
        gate="program",
        layer=1,
        plant=scale_rows_read(slice(48, None), 0.5),
    ),
    Fault(
        "one row in the middle of the cache damaged",
        gate="program",
        layer=3,
        plant=scale_rows_read(slice(37, 38), 0.9),
    ),
    Fault(
        "the last row of the cache is lost",
        gate="program",
        layer=0,
        plant=scale_rows_read(slice(63, 64), 0.0),
    ),
    Fault(
        "rope turns the other way for queries",
        gate="program",
        layer=1,
        plant=turn_queries_the_other_way,
    ),
    Fault(
        "sine and cosine exchanged in one layer",
        gate="program",
        layer=2,
        plant=exchange_sine_and_cosine,
    ),
    Fault(
        "keys written before their rotation",
        gate="program",
        layer=3,
        plant=write_keys_before_rotation,
    ),
    Fault("states exchanged", gate="program", layer=2, plant=exchange_states),
    Fault("mask not added to scores", gate="program", layer=1, plant=skip_mask),
    Fault(
        "mask a thousand times too weak",
        gate="program",
        layer=0,
        plant=enlarge_scores_before_mask,
    ),
    Fault(
        "attention not added to the stream",
        gate="program",
        layer=1,
        plant=skip_attention,
    ),
    Fault(
        "norm before the MLP takes the layer's input",
        gate="program",
        layer=2,
        plant=norm_layer_input_before_mlp,
    ),
    Fault(
        "gate and up read in exchange",
        gate="program",
        layer=0,
        plant=exchange_gate_and_up,
    ),
    Fault(
        "norm of the keys left out",
        gate="program",
        bundle="qwen3",
        layer=0,
        plant=skip_key_norm,
    ),
    Fault(
        "norm before attention instead of behind",
        gate="program",
        bundle="olmo2",
        layer=1,
        plant=norm_input_instead_of_output,
    ),
    Fault(
        "a layer without rope turned",
        gate="program",
        bundle="smollm3",
        layer=1,
        plant=rename_inputs({"rope_cos_nope": "rope_cos", "rope_sin_nope": "rope_sin"}),
    ),
    Fault(
        "a local layer given the global mask",
        gate="program",
        bundle="gemma",
        layer=0,
        plant=rename_inputs({"attn_mask_local": "attn_mask_global"}),
    ),
    Fault(
        "a global layer given the local rope",
        gate="program",
        bundle="gemma",
        layer=1,
        plant=rename_inputs(
            {"rope_cos_global": "rope_cos_local", "rope_sin_global": "rope_sin_local"}
        ),
    ),
    Fault(
        "rope turns the other way in the function of T 1",
        gate="program",
        bundle="functions",
        layer=1,
        plant=plant_in_function(1, turn_queries_the_other_way),
    ),
    Fault(
        "RMS epsilon times 100 in the function of T 1",
        gate="program",
        bundle="functions",
        plant=plant_in_function(1, scale_both_epsilon_factors_of_all_norms),
    ),
    Fault(
        "silu become sigmoid in the function of T 4",
        gate="program",
        bundle="functions",
        layer=1,
        plant=plant_in_function(4, replace_silu("sigmoid")),
    ),
    Fault(
        "mask not added to scores in the function of T 4",
        gate="program",
        bundle="functions",
        layer=1,
        plant=plant_in_function(4, skip_mask),
    ),
    Fault(
        "states exchanged in the function of T 4",
        gate="program",
        bundle="functions",
        layer=2,
        plant=plant_in_function(4, exchange_states),
    ),
    Fault(
        "gate and up read in exchange in the function of T 4",
        gate="program",
        bundle="functions",
        layer=0,
        plant=plant_in_function(4, exchange_gate_and_up),
    ),
]
