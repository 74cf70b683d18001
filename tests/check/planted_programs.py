"""Faults planted in the programs of a bundle on disk and in their descriptions: see `planted`."""

from functools import partial

import numpy as np
from copies import Copy, arguments, renamed, source
from registry import FAULTS, on_disk

program, interface = partial(on_disk, "program"), partial(on_disk, "interface")

# Constants


def scalar(copy: Copy, shard: dict, name: str, factor: float) -> None:
    """Scales the fp16 constants of a program whose names contain `name`."""
    names = [
        op.outputs[0].name
        for op in copy.block(shard).operations
        if op.type == "const" and name in op.outputs[0].name
    ]
    assert names, name
    for each in names:
        array = copy.constant(shard, each).arrays["val"]
        if array.dtype == "FLOAT16":
            array.write(array.read() * np.float16(factor))


@program()
def rms_epsilon_times_100(copy):
    for layer in range(4):
        scalar(copy, copy.shard(layer), "layernorm_eps", 10)


@program(
    rms_epsilon_times_10_in_one_norm=("input_layernorm_eps0", 10),
    rms_epsilon_left_out=("input_layernorm_eps1", 0),
    final_norm_s_epsilon_times_100=("eps", 10, "head"),
)
def epsilon(copy, name, factor, kind="layers"):
    scalar(copy, copy.shard(kind=kind), name, factor)


@program(score_scale_times_1_05=(2, 1.05, ""))
# Gemma divides by the root of query_pre_attn_scalar, not by that of the width of a head
@program("gemma", query_scale_of_the_head_width=(1, (24 / 32) ** 0.5, "var_"))
def score_scale(copy, layer, factor, prefix):
    shard = copy.shard(layer)
    scales = [source(op, "y") for op in copy.operations(shard, "mul", "self_attn")]
    stored = [name for name in scales if name.endswith("_to_fp16")]
    scalar(copy, shard, next(n for n in stored if n.startswith(prefix)), factor)


@program(softmax_over_heads=(1, 1), softmax_over_the_queries=(3, 2))
def softmax_axis(copy, layer, value):
    (op,) = copy.operations(copy.shard(layer), "softmax")
    bound = op.inputs["axis"].arguments[0]
    made = copy.making(copy.shard(layer), bound.name)
    bound.value.CopyFrom(made.attributes["val"])
    bound.value.immediateValue.tensor.ints.values[:] = [value]


@program("gemma")
def gelu_without_its_approximation(copy):
    (op,) = copy.operations(copy.shard(0), "gelu")
    made = copy.making(copy.shard(0), source(op, "mode"))
    mode = made.attributes["val"].immediateValue.tensor.strings.values
    mode[:] = ["EXACT" if mode[0] != "EXACT" else "SIGMOID_APPROXIMATION"]


# Operations


@program(
    silu_become_sigmoid=(1, "sigmoid"),
    silu_become_relu=(3, "relu"),
    silu_become_softplus=(0, "softplus"),
)
def activation(copy, layer, kind):
    copy.operations(copy.shard(layer), "silu")[0].type = kind


@program("zaya")
def another_activation_in_the_router(copy):
    op = copy.operations(copy.shard(1), "gelu")[0]
    op.type = "silu"
    del op.inputs["mode"]


def after(copy, layer, kind, module, which, made, value):
    """Puts an operation with one fp16 number behind one of a kind and module."""
    shard = copy.shard(layer)
    op = copy.operations(shard, kind, module)[which]
    copy.insert(shard, op, made, y=np.float16(value))


program(
    score_scale_of_the_hidden_size=(0, "matmul", "self_attn", 2, "mul", 0.5),
    a_constant_added_to_the_stream=(2, "conv", "down_proj", 0, "add", 1e-3),
)(after)


@program()
def logits_times_1_01(copy):
    shard = copy.shard(kind="head")
    normed = copy.making(shard, source(copy.operations(shard, "conv")[-1], "x"))
    copy.insert(shard, normed, "mul", y=np.float16(1.01))


@program("zaya")
def router_state_of_the_layer_before_halved(copy):
    shard = copy.shard(2)
    reader = next(
        op
        for op in copy.block(shard).operations
        if "router_state" in [bound.name for bound in arguments(op)]
    )
    copy.insert(shard, reader, "mul", y=np.float16(0.5))


@program(
    heads_in_reverse_after_attention=(2, "matmul", -1, 1),
    query_heads_in_reverse=(1, "concat", 0, 1),
    tokens_in_reverse_after_attention=(1, "matmul", -1, 2),
)
def reversed_axis(copy, layer, kind, which, axis):
    shard = copy.shard(layer)
    op = copy.operations(shard, kind, "self_attn")[which]
    copy.insert(shard, op, "reverse", axes=np.array([axis], np.int32))


@program(
    a_head_of_the_cache_halved_past_row_48=(1, slice(48, None), 0.5),
    one_row_in_the_middle_of_the_cache_damaged=(3, slice(37, 38), 0.9),
    the_last_row_of_the_cache_is_lost=(0, slice(63, 64), 0.0),
)
def damaged_rows(copy, layer, rows, factor):
    """Multiplies some rows of one head of what is read of V."""
    shard = copy.shard(layer)
    reads = copy.operations(shard, "read_state")
    read = [op for op in reads if source(op, "input") == "v_state"][-1]
    S = copy.manifest["options"]["max_seq_len"]
    scale = np.ones((1, copy.manifest["dims"]["H_kv"], S, 1), np.float16)
    scale[:, 0, rows] = factor
    copy.insert(shard, read, "mul", y=scale)


# What operations read


@program()
def rope_turns_the_other_way_for_queries(copy):
    sub = copy.operations(copy.shard(1), "sub", "self_attn")[0]
    add = copy.operations(copy.shard(1), "add", "self_attn")[0]
    sub.type, add.type = "add", "sub"


@program()
def sine_and_cosine_exchanged_in_one_layer(copy):
    names = {"rope_cos": "rope_sin", "rope_sin": "rope_cos"}
    for op in copy.operations(copy.shard(2), "mul", "self_attn"):
        copy.feed(op, "y", names.get(source(op, "y"), source(op, "y")))


@program()
def keys_written_before_their_rotation(copy):
    shard = copy.shard(3)
    products = copy.operations(shard, "matmul", "self_attn")
    write = next(op for op in products if source(op, "x") == "kv_write_mask")
    half = write
    for parameter in ("y", "values", "x", "x"):  # rows, halves, a turn, a product
        half = copy.making(shard, source(half, parameter))
    copy.feed(write, "y", source(half, "x"))


@program()
def states_exchanged(copy):
    names = {"k_state": "v_state", "v_state": "k_state"}
    for op in copy.block(copy.shard(2)).operations:
        if op.type in ("read_state", "write_state"):
            copy.feed(op, "input", names[source(op, "input")])


def adding_the_mask(copy: Copy, shard: dict):
    adds = copy.operations(shard, "add", "self_attn")
    return next(op for op in adds if source(op, "y") == "attn_mask")


@program()
def mask_not_added_to_scores(copy):
    shard = copy.shard(1)
    scores = source(adding_the_mask(copy, shard), "x")
    copy.feed(copy.operations(shard, "softmax")[0], "x", scores)


@program()
def mask_a_thousand_times_too_weak(copy):
    shard = copy.shard(0)
    scores = copy.making(shard, source(adding_the_mask(copy, shard), "x"))
    copy.insert(shard, scores, "mul", y=np.float16(3e3))


@program()
def attention_not_added_to_the_stream(copy):
    copy.feed(copy.operations(copy.shard(1), "add")[-1], "x", "x")


@program()
def norm_before_the_mlp_takes_the_layer_s_input(copy):
    shard = copy.shard(2)
    for kind in ("abs", "real_div"):
        copy.feed(copy.operations(shard, kind, "post_attention_layernorm")[0], "x", "x")


@program()
def gate_and_up_read_in_exchange(copy):
    shard = copy.shard(0)
    copy.first(shard)
    gate, up = (copy.operations(shard, "conv", f"{n}_proj")[0] for n in ("gate", "up"))
    a, b = source(gate, "weight"), source(up, "weight")
    copy.feed(gate, "weight", b)
    copy.feed(up, "weight", a)


@program("qwen3")
def norm_of_the_keys_left_out(copy):
    shard = copy.shard(0)
    last = copy.operations(shard, "mul", "k_norm")[-1].outputs[0].name
    divisions = copy.operations(shard, "real_div", "k_norm")
    first = next(op for op in divisions if op.inputs["x"].arguments)
    renamed(copy.block(shard).operations, {last: source(first, "x")})


@program("olmo2")
def norm_before_attention_instead_of_behind(copy):
    shard = copy.shard(1)
    norm = "layers.1.post_attention_layernorm"
    modules = shard["modules"]
    of_norm = [
        op
        for op in copy.block(shard).operations
        if op.outputs and modules.get(op.outputs[0].name, "").startswith(norm)
    ]
    normed = of_norm[-1].outputs[0].name
    added = copy.operations(shard, "conv", "o_proj")[0].outputs[0].name
    renamed(copy.operations(shard, "add"), {normed: added})
    for name in "qkv":
        projections = copy.operations(shard, "conv", f"self_attn.{name}_proj")
        renamed(projections, {"x": normed})
    renamed(of_norm, {added: "x"})
    made_first = [op.outputs[0].name for op in of_norm]
    copy.first(shard, lambda op: op.outputs and op.outputs[0].name in made_first)
    copy.first(shard)


@program(
    "gemma",
    a_local_layer_given_the_global_mask=(0, {"attn_mask_local": "attn_mask_global"}),
    a_global_layer_given_the_local_rope=(
        1,
        {f"rope_{n}_global": f"rope_{n}_local" for n in ("cos", "sin")},
    ),
)
@program(
    "smollm3",
    a_layer_without_rope_turned=(
        1,
        {f"rope_{n}_nope": f"rope_{n}" for n in ("cos", "sin")},
    ),
)
def other_inputs(copy, layer, names):
    """Gives a shard's inputs other names: in its program, its description and its manifest."""
    shard = copy.shard(layer)
    function = copy.spec(shard).mlProgram.functions["main"]
    for value in [*function.inputs, *copy.spec(shard).description.input]:
        value.name = names.get(value.name, value.name)
    renamed(copy.block(shard).operations, names)
    shard["inputs"] = {names.get(n, n): v for n, v in shard["inputs"].items()}


# One function of a package of two: the other one, and the weights that both read, are sound


@program(
    "functions",
    rope_turns_the_other_way_in_the_function_of_t_1=(
        1,
        "rope_turns_the_other_way_for_queries",
    ),
    rms_epsilon_times_100_in_the_function_of_t_1=(1, "rms_epsilon_times_100"),
    silu_become_sigmoid_in_the_function_of_t_4=(4, "silu_become_sigmoid"),
    mask_not_added_to_scores_in_the_function_of_t_4=(4, "mask_not_added_to_scores"),
    states_exchanged_in_the_function_of_t_4=(4, "states_exchanged"),
    gate_and_up_read_in_exchange_in_the_function_of_t_4=(
        4,
        "gate_and_up_read_in_exchange",
    ),
)
def in_function(copy, T, fault):
    copy.function = f"t{T}"
    FAULTS[f"disk/{fault}"].plant(copy)


@interface("functions")
def the_function_of_t_4_described_for_t_3(copy):
    descriptions = copy.spec(copy.shard(1)).description.functions
    inputs = next(f for f in descriptions if f.name == "t4").input
    next(v for v in inputs if v.name == "x").type.multiArrayType.shape[2] = 3


# Descriptions


def described(copy: Copy, name: str, layer: int = 1):
    description = copy.spec(copy.shard(layer)).description
    values = [*description.input, *description.output, *description.state]
    return next(value for value in values if value.name == name)


@interface(
    range_of_t_ends_at_2=(["x", "attn_mask", "rope_cos"], "upperBound", 2),
    range_of_t_ends_at_3_in_one_input=(["attn_mask"], "upperBound", 3),
    range_of_t_begins_at_2=(["x"], "lowerBound", 2),
    range_of_t_without_an_end=(["x"], "upperBound", -1),
)
def range_of_t(copy, values, end, size):
    for value in values:
        array = described(copy, value).type.multiArrayType
        for each in array.shapeRange.sizeRanges:
            if each.lowerBound != each.upperBound:
                setattr(each, end, size)


@interface()
def a_shape_range_removed(copy):
    described(copy, "x").type.multiArrayType.ClearField("shapeRange")


@interface()
def the_range_of_the_head_removed(copy):
    for value in copy.spec(copy.shard(kind="head")).description.input:
        value.type.multiArrayType.ClearField("shapeRange")


@interface()
def shapes_enumerated(copy):
    x = described(copy, "x").type.multiArrayType
    x.ClearField("shapeRange")
    for T in (1, 4):
        x.enumeratedShapes.shapes.add().shape.extend([1, 128, T, 1])


INT32, FLOAT32, DOUBLE = 0x20000 | 32, 0x10000 | 32, 0x10000 | 64


@interface(
    an_input_described_as_int32=("rope_cos", 1, INT32),
    an_input_described_as_float32=("kv_write_mask", 2, FLOAT32),
    an_output_described_as_double=("hidden", 3, DOUBLE),
    a_state_described_as_float32=("k_state", 3, FLOAT32),
)
def dtype(copy, value, layer, code):
    type = described(copy, value, layer).type
    array = type.stateType.arrayType if "state" in value else type.multiArrayType
    array.dataType = code


@interface()
def an_input_described_with_another_shape(copy):
    described(copy, "rope_sin", 0).type.multiArrayType.shape[-1] //= 2


@interface()
def a_default_shape_out_of_range(copy):
    described(copy, "x").type.multiArrayType.shape[2] = 9


@interface(
    an_input_described_under_another_name=("rope_sin", "rope_sine"),
    an_output_described_under_another_name=("hidden", "x_out"),
)
def name(copy, value, other):
    described(copy, value).name = other


@interface()
def an_input_described_twice(copy):
    copy.spec(copy.shard(1)).description.input.add().CopyFrom(described(copy, "x"))


@interface()
def an_input_not_described(copy):
    del copy.spec(copy.shard(2)).description.input[-1]


@interface()
def one_state_described_of_two(copy):
    del copy.spec(copy.shard(1)).description.state[1]


@interface()
def a_state_described_with_half_its_rows(copy):
    described(copy, "v_state").type.stateType.arrayType.shape[2] = 32


@interface()
def another_function_is_the_default(copy):
    second_function(copy, 1)
    copy.spec(copy.shard(1)).description.defaultFunctionName = "spare"


@interface(a_second_function_that_nobody_declared=(2,))
def second_function(copy, layer):
    functions = copy.spec(copy.shard(layer)).mlProgram.functions
    functions["spare"].CopyFrom(functions["main"])


def program_input(copy: Copy, name: str):
    inputs = copy.spec(copy.shard(1)).mlProgram.functions["main"].inputs
    return next(value for value in inputs if value.name == name)


@interface()
def an_input_of_the_program_is_float32(copy):
    program_input(copy, "attn_mask").type.tensorType.dataType = 11


@interface()
def a_state_of_the_program_with_half_its_rows(copy):
    state = program_input(copy, "v_state").type.stateType.wrappedType
    state.tensorType.dimensions[2].constant.size //= 2


@interface()
def an_old_specification(copy):
    copy.spec(copy.shard(1)).specificationVersion = 7
