"""Packages of some operations of a program, built again for given arrays."""

from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

import miltorch
from miltorch.graph import Graph
from miltorch.program import Op, Ref, read_spec
from miltorch.quiet import coremltools, frozen, messages, no_progress, quiet
from miltorch.steps import Constants

# dtype of values that are inputs in int32 → what an operation `cast` calls it
CASTS = {"BOOL": "bool", "INT8": "int8", "UINT8": "uint8", "INT16": "int16"}
MAX_RANK = 5  # of an output
WRITERS = "write_state", "coreml_update_state"
IOS16 = 7  # the first version of packages with inputs in fp16


class Flow(Graph):
    """What the operations of a program make of what; each is named by its index in
    `ops`. `constants`: by name."""

    def __init__(self, program: miltorch.Program):
        super().__init__(program)
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
            read = {*self.ops[index].reads()}
            found |= {i for i in range(index) if not read.isdisjoint(self.results(i))}
        return found

    def operands(self, ops: Collection[int]) -> list[str]:
        """Names of what operations read and do not make, constants included."""
        made = {name for index in ops for name, _ in self.ops[index].outputs}
        return sorted({n for index in ops for n in self.ops[index].reads()} - made)

    def held(self, name: str, ops: Collection[int]) -> str:
        """What has the value of an operand of some operations: of a state, the result
        of the first of them if that reads it, which others may have written before."""
        first = next(self.ops[i] for i in ops if name in self.ops[i].reads())
        return first.outputs[0][0] if first.kind == "read_state" else name


def cut(
    flow: Flow, ops: Collection[int], arrays: Mapping[str, np.ndarray], target: Path
) -> Path:
    """Writes a package of some operations, which shows what none of them reads. Weights
    stay compressed.

    Args:
        ops: indices, in order.
        arrays: what they read and do not make: inputs and states, of these shapes, and
            constants that take the place of the program's.

    Raises:
        Exception: of coremltools, for arrays that do not fit and operations with blocks.
    """
    ct = coremltools()
    from coremltools.converters.mil.mil import Builder, Function, Program, types

    Builder.name_count.clear()  # the same program has the same names
    spec = read_spec(flow.program.package)
    version = ct.target(max(spec.specificationVersion, IOS16))
    source = spec.mlProgram.functions[flow.program.function]
    operations = source.block_specializations[source.opset].operations
    stored = {output.name: op for op in operations for output in op.outputs}
    inputs = {}
    values = {}

    def builtin(name: str):
        dtype = messages("MIL_pb2").DataType.Value(flow.types[name].dtype)
        return types.PROTO_TO_BUILTIN_TYPE[dtype]

    def typed(value, builtin):
        """A constant in a dtype of coremltools, which has some of less than a byte."""
        if isinstance(value, (np.ndarray, np.generic)):
            value = value.astype(types.nptype_from_builtin(builtin))[()]
        return value

    def argument(source):
        if isinstance(source, list):
            return [argument(each) for each in source]
        if not isinstance(source, Ref):
            return source[()] if isinstance(source, np.ndarray) else source
        name = source.name
        if name not in values:
            op = flow.producers[name]
            if op.kind == "const":
                values[name] = typed(op.inputs["val"], builtin(name))
            else:
                values[name] = made(op)
        return values[name]

    def made(op: Op):
        given = {name: argument(source) for name, source in op.inputs.items()}
        if op.kind == "write_state":
            state, value = given["input"], given["data"]
            return Builder.coreml_update_state(state=state, value=value)
        for name, bound in stored[op.key].inputs.items() if op.constant else ():
            dtype = bound.arguments[0].value.type.tensorType.dataType
            if dtype:
                given[name] = typed(given[name], types.PROTO_TO_BUILTIN_TYPE[dtype])
        return getattr(Builder, op.kind)(**given, name=op.name)

    for name, array in arrays.items():
        if name in flow.constants.ops:
            values[name] = typed(array, builtin(name))
            continue
        placeholder = Builder.placeholder
        if name in flow.program.states:
            placeholder = Builder.state_tensor_placeholder
        is_cast = flow.types[name].dtype in CASTS
        inputs[name] = placeholder(
            array.shape, types.int32 if is_cast else builtin(name)
        )
    with Function(inputs, opset_version=version) as function:
        for name, value in function.inputs.items():
            dtype = CASTS.get(flow.types[name].dtype)
            values[name] = Builder.cast(x=value, dtype=dtype) if dtype else value
        results = {}
        for index in ops:
            op = flow.ops[index]
            new = made(op)
            new = new if isinstance(new, (list, tuple)) else [new]
            written = f"{flow.results(index)[0]}_written"  # of a state
            for name, value in zip([*dict(op.outputs)] or [written], new):
                value.name = name
                values[name] = results[name] = value
        read = {name for index in ops for name in flow.ops[index].reads()}
        can = [n for n, value in results.items() if 0 < value.rank <= MAX_RANK]
        shown = []
        for name in [name for name in can if name not in read] or can[-1:]:
            value = results[name]
            is_cast = value.dtype not in (types.fp16, types.fp32, types.int32)
            shown.append(Builder.cast(x=value, dtype="int32") if is_cast else value)
        function.set_outputs(shown)
    program = Program()
    program.add_function("main", function)
    how = {"skip_model_load": True, "minimum_deployment_target": version}
    with quiet(), no_progress(), frozen():
        model = ct.convert(program, pass_pipeline=ct.PassPipeline.EMPTY, **how)
    model.save(str(target))
    return target
