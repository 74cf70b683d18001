"""Packages of a few operations of a program: the first ones, as they were exported, or
some of them alone, built again for given arrays."""

import copy
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
import torch

import miltorch
from miltorch.program import NUMPY, Op, Ref, read_spec, spec_path
from miltorch.quiet import coremltools, frozen, no_progress, quiet
from miltorch.steps import Constants
from workbench.files import link

SHOWN = {"FLOAT16", "FLOAT32", "INT32"}  # what an output may be
# dtype of values that are inputs in int32 → what an operation `cast` calls it
CASTS = {"BOOL": "bool", "INT8": "int8", "UINT8": "uint8", "INT16": "int16"}
MAX_RANK = 5  # of an output
WRITERS = "write_state", "coreml_update_state"
IOS16 = 7  # the first version of packages with inputs in fp16


class Flow:
    """A program, and what its operations make of what.

    Attributes:
        computed: indices of the operations that are no constants.
        types: of inputs, states and results.
        constants: by name.
    """

    def __init__(self, program: miltorch.Program):
        self.program = program
        self.ops = program.block.ops
        self.computed = [i for i, op in enumerate(self.ops) if not op.constant]
        self.types = program.inputs | program.states
        for op in self.ops:
            self.types.update(op.outputs)
        self.constants = Constants(program)

    def results(self, index: int) -> list[str]:
        """The values that an operation makes, and the state that it writes."""
        op = self.ops[index]
        names = [name for name, _ in op.outputs]
        if op.kind in WRITERS:
            names += [name for name in op.reads() if name in self.program.states]
        return names

    def before(self, ops: Collection[int]) -> set[int]:
        """The operations whose results, or state, each of some operations reads."""
        found = set()
        for index in ops:
            read = {*reads(self.ops[index])}
            earlier = [i for i in self.computed if i < index]
            found |= {i for i in earlier if not read.isdisjoint(self.results(i))}
        return found

    def showable(self, index: int) -> list[str]:
        """The results of an operation that can be outputs of a package."""
        return [
            name
            for name, kind in self.ops[index].outputs
            if kind.dtype in SHOWN and 0 < len(kind.shape) <= MAX_RANK
        ]


def reads(op: Op) -> list[str]:
    """Names that an operation reads, its blocks included."""
    inner = [name for block in op.blocks for o in block.walk() for name in o.reads()]
    return [*op.reads(), *inner]


def first(flow: Flow, last: int, target: Path) -> Path:
    """Writes a package of the operations up to the one of index `last`, which shows
    every value that none of them reads. Weights are shared with the original."""
    used: set[str] = set()
    kept = []
    shown = []
    for index in reversed(range(last + 1)):
        op = flow.ops[index]
        if op.constant and used.isdisjoint(flow.results(index)):
            continue
        if not op.constant:
            few = flow.showable(index)
            shown += [name for name in few if name not in used or not shown]
        kept.insert(0, index)
        used.update(reads(op))
    name = flow.program.function
    spec = read_spec(flow.program.package)
    functions = spec.mlProgram.functions
    for other in functions.keys() - {name}:
        del functions[other]
    program = functions[name]
    about = spec.description
    if about.functions:
        _keep(about.functions, [f for f in about.functions if f.name == name])
        about.defaultFunctionName = name
        (about,) = about.functions
    for features in (about.input, about.state, program.inputs):
        _keep(features, [feature for feature in features if feature.name in used])
    del about.output[:]
    for name in shown:
        array = about.output.add(name=name).type.multiArrayType
        array.dataType = array.ArrayDataType.Value(flow.types[name].dtype)
    block = program.block_specializations[program.opset]
    _keep(block.operations, [block.operations[index] for index in kept])
    block.outputs[:] = shown
    shutil.copytree(flow.program.package, target, copy_function=link)
    model = spec_path(target)
    model.unlink()
    model.write_bytes(spec.SerializeToString(deterministic=True))
    return target


def _keep(field, items: list) -> None:
    """Leaves these messages alone in a repeated field."""
    items = copy.deepcopy(items)
    del field[:]
    field.extend(items)


def alone(
    flow: Flow, ops: Collection[int], arrays: Mapping[str, np.ndarray], target: Path
) -> Path:
    """Builds a package of some operations, in order, which shows what none of them
    reads.

    Args:
        arrays: what they read and do not make: inputs and states, of these shapes, and
            the constants that are not as in the program.

    Raises:
        Exception: of coremltools, for arrays that do not fit.
    """
    ct = coremltools()
    from coremltools.converters.mil.mil import Builder, Function, Program, types

    Builder.name_count.clear()  # the same program has the same names
    values = {}
    inputs = {}
    for name, array in arrays.items():
        declared = flow.types[name].dtype
        array = np.asarray(array, NUMPY[declared])
        if name in flow.constants.ops:
            values[name] = array
            continue
        own = np.int32 if declared in CASTS else array.dtype.type
        placeholder = Builder.placeholder
        if name in flow.program.states:
            placeholder = Builder.state_tensor_placeholder
        dtype = types.numpy_type_to_builtin_type(own)
        inputs[name] = placeholder(array.shape, dtype)

    def argument(source):
        if isinstance(source, list):
            return [argument(each) for each in source]
        if isinstance(source, Ref) and source.name in values:
            return values[source.name]
        value = flow.constants.of(source)
        return value.numpy()[()] if isinstance(value, torch.Tensor) else value

    spec = read_spec(flow.program.package)
    version = ct.target(max(spec.specificationVersion, IOS16))
    with Function(inputs, opset_version=version) as function:
        for name, value in function.inputs.items():
            dtype = CASTS.get(flow.types[name].dtype)
            values[name] = Builder.cast(x=value, dtype=dtype) if dtype else value
        shown = {}
        for index in ops:
            op = flow.ops[index]
            given = {name: argument(source) for name, source in op.inputs.items()}
            if op.kind == "write_state":
                state = given["input"]
                update = Builder.coreml_update_state
                made = [update(state=state, value=given["data"])]
                names = [f"{state.name}_written"]
            else:
                made = getattr(Builder, op.kind)(**given, name=op.name)
                made = made if isinstance(made, (list, tuple)) else [made]
                names = flow.results(index)
            for name in reads(op):
                shown.pop(name, None)
            for name, value in zip(names, made):
                value.name = name
                values[name] = shown[name] = value
                if value.dtype not in (types.fp16, types.fp32, types.int32):
                    shown[name] = Builder.cast(x=value, dtype="int32")
        function.set_outputs([*shown.values()])
    program = Program()
    program.add_function("main", function)
    how = {"skip_model_load": True, "minimum_deployment_target": version}
    with quiet(), no_progress(), frozen():
        made = ct.convert(program, pass_pipeline=ct.PassPipeline.EMPTY, **how)
    made.save(str(target))
    return target
