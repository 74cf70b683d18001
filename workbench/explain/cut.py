"""Builds packages of some operations of a program, for given arrays."""

from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

import miltorch
from miltorch.constants import Constants
from miltorch.coremltools_import import (
    coremltools,
    frozen_gc,
    lean_passes,
    no_progress,
    protobuf_module,
    quiet,
    seldom_validated,
)
from miltorch.graph import Graph
from miltorch.program import Op, Ref, read_spec

# A package takes values of these dtypes as int32, and casts them to what the operation
# `cast` calls them.
CAST_DTYPES = {"BOOL": "bool", "INT8": "int8", "UINT8": "uint8", "INT16": "int16"}
MAX_RANK = 5  # of an output
WRITERS = "write_state", "coreml_update_state"
IOS16 = 7  # the first version of packages that takes inputs in fp16


class Flow(Graph):
    """The data flow between the operations of a program, each given by its index in `ops`.

    Attributes:
        constants: the values of the program's constants by name.
    """

    def __init__(self, program: miltorch.Program):
        super().__init__(program)
        self.constants = Constants(program)

    def results(self, index: int) -> list[str]:
        """The values that an operation computes, and the state that it writes."""
        op = self.ops[index]
        names = [name for name, _ in op.outputs]
        if op.kind in WRITERS:
            names += [name for name in op.reads() if name in self.program.states]
        return names

    def producers_of(self, indices: Collection[int]) -> set[int]:
        """The operations whose results or states any of `indices` reads."""
        producers = set()
        for index in indices:
            operands = {*self.ops[index].reads()}
            for earlier in range(index):
                if not operands.isdisjoint(self.results(earlier)):
                    producers.add(earlier)
        return producers

    def operands(self, indices: Collection[int]) -> list[str]:
        """Names of the values that operations read and none of them computes, constants
        included."""
        results = {name for index in indices for name, _ in self.ops[index].outputs}
        read = {name for index in indices for name in self.ops[index].reads()}
        return sorted(read - results)

    def recorded_name(self, operand: str, indices: Collection[int]) -> str:
        """The name under which a run of the whole program records the value that some
        operations read as `operand`: its own, except for a state.

        The run records a state as it was before the call, but the program may have
        written it since. If the first of the operations that reads it is a `read_state`,
        the recorded result of this `read_state` is the value that they start from."""
        first = next(self.ops[i] for i in indices if operand in self.ops[i].reads())
        return first.outputs[0][0] if first.kind == "read_state" else operand


def cut(
    flow: Flow, indices: Collection[int], arrays: Mapping[str, np.ndarray], target: Path
) -> Path:
    """Writes a package of some operations. Its outputs are the results that none of
    them reads. Weights stay compressed.

    Args:
        indices: of the operations, in order.
        arrays: the values that these read and do not compute: inputs and states, of
            these shapes, and constants that take the place of the program's.

    Raises:
        Exception: of coremltools, for arrays that do not fit and operations with blocks.
    """
    ct = coremltools()
    from coremltools.converters.mil.mil import Builder, Program

    Builder.name_count.clear()  # so that equal programs get equal names
    program = Program()
    builder = _FunctionBuilder(flow)
    program.add_function("main", builder.build(indices, arrays))
    options = {
        "skip_model_load": True,
        "minimum_deployment_target": builder.version,
        "pass_pipeline": ct.PassPipeline.EMPTY,
    }
    with quiet(), no_progress(), seldom_validated(), lean_passes(), frozen_gc():
        model = ct.convert(program, **options)
    model.save(str(target))
    return target


class _FunctionBuilder:
    """Builds coremltools' function of some operations of a program.

    Attributes:
        version: of packages, at least that of the program's.
        stored: value of the program → the operation in the package's protobuf that
            computes it.
        values: coremltools' values by the program's names.
    """

    def __init__(self, flow: Flow):
        spec = read_spec(flow.program.package)
        source = spec.mlProgram.functions[flow.program.function]
        operations = source.block_specializations[source.opset].operations
        self.flow = flow
        self.version = coremltools().target(max(spec.specificationVersion, IOS16))
        self.stored = {output.name: op for op in operations for output in op.outputs}
        self.values = {}

    def build(self, indices: Collection[int], arrays: Mapping[str, np.ndarray]):
        """The function of some operations, called with `arrays`."""
        from coremltools.converters.mil.mil import Builder, Function

        inputs = {}
        for name, array in arrays.items():
            if name in self.flow.constants.ops:
                self.values[name] = _as_dtype(array, self._dtype(name))
            else:
                inputs[name] = self._placeholder(name, array.shape)
        with Function(inputs, opset_version=self.version) as function:
            for name, value in function.inputs.items():
                dtype = CAST_DTYPES.get(self.flow.types[name].dtype)
                if dtype:
                    value = Builder.cast(x=value, dtype=dtype)
                self.values[name] = value
            function.set_outputs(self._outputs(indices, self._results(indices)))
        return function

    def _dtype(self, name: str):
        """coremltools' dtype of a value of the program."""
        from coremltools.converters.mil.mil import types

        dtype = protobuf_module("MIL_pb2").DataType.Value(self.flow.types[name].dtype)
        return types.PROTO_TO_BUILTIN_TYPE[dtype]

    def _placeholder(self, name: str, shape: tuple[int, ...]):
        """An input or a state of the function."""
        from coremltools.converters.mil.mil import Builder, types

        dtype = self._dtype(name)
        if self.flow.types[name].dtype in CAST_DTYPES:
            dtype = types.int32
        if name in self.flow.program.states:
            return Builder.state_tensor_placeholder(shape, dtype)
        return Builder.placeholder(shape, dtype)

    def _results(self, indices: Collection[int]) -> dict:
        """Adds the operations to the function; their results by name."""
        results = {}
        for index in indices:
            op = self.flow.ops[index]
            added = self._add_operation(op)
            if not isinstance(added, (list, tuple)):
                added = [added]
            names = list(dict(op.outputs))
            if not names:  # a write to a state, which has a result here
                names = [f"{self.flow.results(index)[0]}_written"]
            for name, value in zip(names, added):
                value.name = name
                self.values[name] = results[name] = value
        return results

    def _outputs(self, indices: Collection[int], results: dict) -> list:
        """The results that none of these operations reads; the last one if all are
        read."""
        from coremltools.converters.mil.mil import Builder, types

        read = {name for index in indices for name in self.flow.ops[index].reads()}
        possible = [n for n, value in results.items() if 0 < value.rank <= MAX_RANK]
        unread = [name for name in possible if name not in read]
        outputs = []
        for name in unread or possible[-1:]:
            value = results[name]
            if value.dtype not in (types.fp16, types.fp32, types.int32):
                value = Builder.cast(x=value, dtype="int32")
            outputs.append(value)
        return outputs

    def _add_operation(self, op: Op):
        """Adds one operation of the program to the function, after the constants that it
        reads (see `_argument`)."""
        from coremltools.converters.mil.mil import Builder

        arguments = {n: self._argument(source) for n, source in op.inputs.items()}
        if op.kind == "write_state":
            state, value = arguments["input"], arguments["data"]
            return Builder.coreml_update_state(state=state, value=value)
        if op.is_constant:
            arguments = self._with_stored_dtypes(op, arguments)
        return getattr(Builder, op.kind)(**arguments, name=op.name)

    def _with_stored_dtypes(self, op: Op, arguments: dict) -> dict:
        """The arguments of an operation on compressed weights, each in the dtype in which
        the package stores it, which may be smaller than NumPy's smallest one."""
        from coremltools.converters.mil.mil import types

        with_dtypes = dict(arguments)
        for name, bound in self.stored[op.key].inputs.items():
            # 0 for an argument that is the result of another operation
            dtype = bound.arguments[0].value.type.tensorType.dataType
            if dtype:
                builtin = types.PROTO_TO_BUILTIN_TYPE[dtype]
                with_dtypes[name] = _as_dtype(arguments[name], builtin)
        return with_dtypes

    def _argument(self, source):
        """An argument of an operation, as coremltools takes it. The first time that an
        operation reads a constant of the program, the constant is added to the
        function."""
        if isinstance(source, list):
            return [self._argument(part) for part in source]
        if isinstance(source, np.ndarray):
            return source[()]
        if not isinstance(source, Ref):
            return source
        name = source.name
        if name not in self.values:
            op = self.flow.producers[name]
            if op.kind == "const":
                value = _as_dtype(op.inputs["val"], self._dtype(name))
            else:
                value = self._add_operation(op)
            self.values[name] = value
        return self.values[name]


def _as_dtype(value, builtin):
    """A constant in one of coremltools' dtypes, some of which have less than a byte."""
    from coremltools.converters.mil.mil import types

    if isinstance(value, (np.ndarray, np.generic)):
        return value.astype(types.nptype_from_builtin(builtin))[()]
    return value
