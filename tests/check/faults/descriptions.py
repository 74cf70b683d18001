"""Faults of the descriptions that a bundle's packages give of their programs."""

from faults.copies import Copy, LayerPlant
from faults.fault import Fault

INT32, FLOAT32, DOUBLE = 0x20000 | 32, 0x10000 | 32, 0x10000 | 64
"""Codes of Core ML's ArrayFeatureType."""
MIL_FLOAT32 = 11
"""That of MIL's DataType."""


def find_description(copy: Copy, layer: int, name: str):
    """The description of an input, an output or a state of a shard."""
    description = copy.spec(copy.shard(layer)).description
    values = [*description.input, *description.output, *description.state]
    return next(value for value in values if value.name == name)


def find_program_input(copy: Copy, layer: int, name: str):
    inputs = copy.spec(copy.shard(layer)).mlProgram.functions["main"].inputs
    return next(value for value in inputs if value.name == name)


def describe_function_for_another_T(copy, layer):
    functions = copy.spec(copy.shard(layer)).description.functions
    inputs = next(function for function in functions if function.name == "t4").input
    x = next(value for value in inputs if value.name == "x")
    x.type.multiArrayType.shape[2] = 3


def set_range_of_t(names: list[str], end: str, size: int) -> LayerPlant:
    """Changes an end of the range of T, "lowerBound" or "upperBound", in some inputs."""

    def plant(copy, layer):
        for name in names:
            array = find_description(copy, layer, name).type.multiArrayType
            for axis in array.shapeRange.sizeRanges:
                if axis.lowerBound != axis.upperBound:
                    setattr(axis, end, size)

    return plant


def drop_shape_range(copy, layer):
    find_description(copy, layer, "x").type.multiArrayType.ClearField("shapeRange")


def drop_shape_range_of_head(copy):
    for value in copy.spec(copy.shard(kind="head")).description.input:
        value.type.multiArrayType.ClearField("shapeRange")


def enumerate_shapes(copy, layer):
    x = find_description(copy, layer, "x").type.multiArrayType
    x.ClearField("shapeRange")
    for T in (1, 4):
        x.enumeratedShapes.shapes.add().shape.extend([1, 128, T, 1])


def describe_dtype(name: str, code: int) -> LayerPlant:
    """Describes an input, an output or a state with another dtype."""

    def plant(copy, layer):
        type = find_description(copy, layer, name).type
        is_state = type.WhichOneof("Type") == "stateType"
        array = type.stateType.arrayType if is_state else type.multiArrayType
        array.dataType = code

    return plant


def halve_described_shape(copy, layer):
    find_description(copy, layer, "rope_sin").type.multiArrayType.shape[-1] //= 2


def describe_default_shape_out_of_range(copy, layer):
    find_description(copy, layer, "x").type.multiArrayType.shape[2] = 9


def rename_description(name: str, other: str) -> LayerPlant:
    def plant(copy, layer):
        find_description(copy, layer, name).name = other

    return plant


def describe_input_twice(copy, layer):
    inputs = copy.spec(copy.shard(layer)).description.input
    inputs.add().CopyFrom(find_description(copy, layer, "x"))


def drop_description_of_input(copy, layer):
    del copy.spec(copy.shard(layer)).description.input[-1]


def drop_description_of_state(copy, layer):
    del copy.spec(copy.shard(layer)).description.state[1]


def halve_described_state(copy, layer):
    find_description(copy, layer, "v_state").type.stateType.arrayType.shape[2] = 32


def add_function(copy, layer):
    """Adds a function that the manifest does not declare."""
    functions = copy.spec(copy.shard(layer)).mlProgram.functions
    functions["spare"].CopyFrom(functions["main"])


def make_another_function_the_default(copy, layer):
    add_function(copy, layer)
    copy.spec(copy.shard(layer)).description.defaultFunctionName = "spare"


def change_dtype_of_program_input(copy, layer):
    find_program_input(copy, layer, "attn_mask").type.tensorType.dataType = MIL_FLOAT32


def halve_state_of_program(copy, layer):
    state = find_program_input(copy, layer, "v_state").type.stateType.wrappedType
    state.tensorType.dimensions[2].constant.size //= 2


def lower_specification_version(copy, layer):
    copy.spec(copy.shard(layer)).specificationVersion = 7


FAULTS = [
    Fault(
        "the function of T 4 described for T 3",
        gate="interface",
        bundle="functions",
        layer=1,
        plant=describe_function_for_another_T,
    ),
    Fault(
        "range of T ends at 2",
        gate="interface",
        layer=1,
        plant=set_range_of_t(["x", "attn_mask", "rope_cos"], "upperBound", 2),
    ),
    Fault(
        "range of T ends at 3 in one input",
        gate="interface",
        layer=1,
        plant=set_range_of_t(["attn_mask"], "upperBound", 3),
    ),
    Fault(
        "range of T begins at 2",
        gate="interface",
        layer=1,
        plant=set_range_of_t(["x"], "lowerBound", 2),
    ),
    Fault(
        "range of T without an end",
        gate="interface",
        layer=1,
        plant=set_range_of_t(["x"], "upperBound", -1),
    ),
    Fault("a shape range removed", gate="interface", layer=1, plant=drop_shape_range),
    Fault(
        "the range of the head removed",
        gate="interface",
        plant=drop_shape_range_of_head,
    ),
    Fault("shapes enumerated", gate="interface", layer=1, plant=enumerate_shapes),
    Fault(
        "an input described as int32",
        gate="interface",
        layer=1,
        plant=describe_dtype("rope_cos", INT32),
    ),
    Fault(
        "an input described as float32",
        gate="interface",
        layer=2,
        plant=describe_dtype("kv_write_mask", FLOAT32),
    ),
    Fault(
        "an output described as double",
        gate="interface",
        layer=3,
        plant=describe_dtype("hidden", DOUBLE),
    ),
    Fault(
        "a state described as float32",
        gate="interface",
        layer=3,
        plant=describe_dtype("k_state", FLOAT32),
    ),
    Fault(
        "an input described with another shape",
        gate="interface",
        layer=0,
        plant=halve_described_shape,
    ),
    Fault(
        "a default shape out of range",
        gate="interface",
        layer=1,
        plant=describe_default_shape_out_of_range,
    ),
    Fault(
        "an input described under another name",
        gate="interface",
        layer=1,
        plant=rename_description("rope_sin", "rope_sine"),
    ),
    Fault(
        "an output described under another name",
        gate="interface",
        layer=1,
        plant=rename_description("hidden", "x_out"),
    ),
    Fault(
        "an input described twice",
        gate="interface",
        layer=1,
        plant=describe_input_twice,
    ),
    Fault(
        "an input not described",
        gate="interface",
        layer=2,
        plant=drop_description_of_input,
    ),
    Fault(
        "one state described of two",
        gate="interface",
        layer=1,
        plant=drop_description_of_state,
    ),
    Fault(
        "a state described with half its rows",
        gate="interface",
        layer=1,
        plant=halve_described_state,
    ),
    Fault(
        "another function is the default",
        gate="interface",
        layer=1,
        plant=make_another_function_the_default,
    ),
    Fault(
        "a second function that nobody declared",
        gate="interface",
        layer=2,
        plant=add_function,
    ),
    Fault(
        "an input of the program is float32",
        gate="interface",
        layer=1,
        plant=change_dtype_of_program_input,
    ),
    Fault(
        "a state of the program with half its rows",
        gate="interface",
        layer=1,
        plant=halve_state_of_program,
    ),
    Fault(
        "an old specification",
        gate="interface",
        layer=1,
        plant=lower_specification_version,
    ),
]
