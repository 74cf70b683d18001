"""Cuts a package: a smaller or more talkative package of the same operations, whose
outputs are chosen inner values.

Edits the protobuf itself; nothing is converted again, so that every operation stays as
it was exported."""

import os
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

import miltorch
from miltorch.program import Op, read_spec, spec_path
from miltorch.quiet import messages

OUTPUTS = {"FLOAT16", "FLOAT32", "INT32"}  # that a package may have
CASTS = {"BOOL", "INT8", "UINT8", "INT16", "UINT16"}  # shown as int32
MAX_RANK = 5  # of an input or output
SHOWN = "_shown"  # ends the name of an output that is a value cast to int32
WRITERS = ("write_state", "coreml_update_state")


class Flow:
    """What each value of a function is computed from.

    What a state holds after the call is a value with the state's name. An operation
    that reads a state depends on the last one before it that writes it.

    Attributes:
        makers: value → index of its operation in `ops`, constants included.
        operands: by index, the values that are read at run time, the one in a state
            included; none of a constant.
        needs: by index, what must be computed before it: value or state → operation.
        outputs: names of the outputs, and of the states that are written.
    """

    def __init__(self, program: miltorch.Program):
        self.program, self.ops = program, program.block.ops
        self.types = program.inputs | program.states
        self.makers: dict[str, int] = {}
        self.operands: list[list[str]] = []
        self.needs: list[dict[str, int]] = []
        written: dict[str, int] = {}
        for index, op in enumerate(self.ops):
            names = _reads(op)
            states = [name for name in names if name in program.states]
            makers = self.makers | written
            self.needs.append({n: makers[n] for n in names if n in makers})
            self.operands.append([n for n in names if self._runs(n)])
            if op.kind in WRITERS:
                written |= dict.fromkeys(states, index)
            elif states and states[0] in written:
                data = self.operands[written[states[0]]]
                self.operands[index] += data
            self.types.update(op.outputs)
            self.makers |= dict.fromkeys(dict(op.outputs), index)
        self.makers |= written
        self.outputs = [*dict.fromkeys([*program.outputs, *written])]

    def _runs(self, name: str) -> bool:
        if name in self.makers:
            return not self.ops[self.makers[name]].constant
        return name in self.program.inputs

    @cached_property
    def computed(self) -> list[int]:
        """Indices of the operations that compute at run time."""
        return [i for i, op in enumerate(self.ops) if not op.constant]

    def results(self, index: int) -> list[str]:
        """The values that an operation makes."""
        state = [s for s in self.program.states if self.makers.get(s) == index]
        return [*dict(self.ops[index].outputs), *state]

    def showable(self, name: str) -> bool:
        """Whether a value can be an output of a package."""
        kind = self.types[name]
        allowed = kind.dtype in OUTPUTS | CASTS and 0 < len(kind.shape) <= MAX_RANK
        return allowed and kind.kind == "tensor"

    def before(self, names: Iterable[str], given: Collection[str] = ()) -> set[int]:
        """Indices of the operations that compute values from `given` ones."""
        found, waiting = set(), [self.makers[n] for n in names if n in self.makers]
        while waiting:
            index = waiting.pop()
            if index not in found:
                found.add(index)
                needs = self.needs[index].items()
                waiting += [maker for name, maker in needs if name not in given]
        return found

    def part(self, names: Iterable[str], given: Collection[str]) -> miltorch.Program:
        """The program that computes values from `given` ones and the states."""
        kept = sorted(self.before(names, given))
        ops = [self.ops[index] for index in kept]
        used = {name for op in ops for name in _reads(op)}
        program = self.program
        return replace(
            program,
            inputs={n: self.types[n] for n in [*program.inputs, *given] if n in used},
            states={n: kind for n, kind in program.states.items() if n in used},
            outputs=[],
            block=replace(program.block, ops=ops, outputs=[]),
        )


def _reads(op: Op) -> list[str]:
    """Names that an operation reads, its blocks included."""
    inner = [name for block in op.blocks for o in block.walk() for name in o.reads()]
    return [*op.reads(), *inner]


def values(
    executable: miltorch.Executable,
    inputs: Mapping[str, np.ndarray],
    states: Mapping[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """Every value of a program by name, floats in float32, and its states after the
    call."""
    found, cells = {}, executable.make_state()
    for name, cell in cells.items():
        cell.value = torch.tensor(states[name]).to(cell.value.dtype)

    def keep(op, outputs):
        found.update(zip(dict(op.outputs), outputs, strict=True))

    tensors = {n: torch.tensor(inputs[n]) for n in executable.program.inputs}
    executable.run(tensors, cells, keep)
    found |= {name: cell.value.float() for name, cell in cells.items()}
    return {n: v.numpy() for n, v in found.items() if isinstance(v, torch.Tensor)}


def cut(
    flow: Flow,
    target: Path,
    names: Iterable[str],
    *,
    given: Mapping[str, np.ndarray] | None = None,
    whole: bool = True,
) -> Path:
    """Writes a package that shows `names`, its weights shared with the original.

    Args:
        names: values that `showable` allows; states need not be named.
        given: values that become inputs of their shapes here; operations that only they
            need are left out.
        whole: whether all other operations and outputs stay.
    """
    given = given or {}
    package, function = flow.program.package, flow.program.function
    spec = read_spec(package)
    kept = set(range(len(flow.ops)))
    if not whole:
        kept = flow.before(names, given)
    program, block = _only(spec, function)
    about = next(iter(spec.description.functions), spec.description)
    operations = [op for index, op in enumerate(block.operations) if index in kept]
    used = {name for index in kept for name in _reads(flow.ops[index])}
    outputs = list(block.outputs) if whole else []
    casts = []
    for name in names:
        if name in flow.program.states or name in outputs:
            continue
        output, kind = name, flow.types[name].dtype
        if kind in CASTS:
            output, kind = name + SHOWN, "INT32"
            casts.append(_cast(name, output, block, flow.makers[name]))
        outputs.append(output)
    if not whole:
        _keep(about.input, used)
        _keep(about.state, used)
        _keep(program.inputs, used)
    given = {name: value for name, value in given.items() if name in used}
    _keep(about.input, {feature.name for feature in about.input} - given.keys())
    for name, value in given.items():
        if name not in flow.program.inputs:
            kind = _type_of(block, flow.makers[name], name)
            program.inputs.add(name=name, type=kind)
        _describe(about.input.add(name=name), flow.types[name].dtype, value.shape)
    described = {feature.name for feature in about.output}
    _keep(about.output, set(outputs))
    for name in outputs:
        if name not in described:
            kind = flow.types.get(name, miltorch.Type("INT32")).dtype
            _describe(about.output.add(name=name), kind)
    _replace(block.operations, [*operations, *casts])
    block.outputs[:] = outputs
    return _write(spec, package, target)


def _only(spec, function: str):
    """The function of a specification and its block; all others are taken out."""
    functions = spec.mlProgram.functions
    for name in set(functions) - {function}:
        del functions[name]
    _keep(spec.description.functions, {function})
    if spec.description.functions:
        spec.description.defaultFunctionName = function
    program = functions[function]
    return program, program.block_specializations[program.opset]


def _keep(features, names: Collection[str]) -> None:
    _replace(features, [feature for feature in features if feature.name in names])


def _replace(field, items: list) -> None:
    """Puts messages in place of those of a repeated field."""
    copies = [type(item).FromString(item.SerializeToString()) for item in items]
    del field[:]
    field.extend(copies)


def _describe(feature, dtype: str, shape: Iterable[int] = ()) -> None:
    array = feature.type.multiArrayType
    array.dataType = array.ArrayDataType.Value(dtype)
    array.shape.extend(shape)


def _cast(name: str, output: str, block, maker: int):
    """The operation that casts a value to int32."""
    op = messages("MIL_pb2").Operation(type="cast")
    op.inputs["x"].arguments.add(name=name)
    _text(op.inputs["dtype"].arguments.add().value, "int32")
    _text(op.attributes["name"], output)
    result = op.outputs.add(name=output, type=_type_of(block, maker, name))
    result.type.tensorType.dataType = messages("MIL_pb2").DataType.Value("INT32")
    return op


def _type_of(block, maker: int, name: str):
    """The declared type of an operation's result."""
    return next(o.type for o in block.operations[maker].outputs if o.name == name)


def _text(value, text: str) -> None:
    """Makes a MIL value a string."""
    value.type.tensorType.dataType = messages("MIL_pb2").DataType.Value("STRING")
    value.immediateValue.tensor.strings.values.append(text)


def _write(spec, package: Path, target: Path) -> Path:
    """The files of `package` with another specification, weights as hard links where
    the disk has them."""
    model = spec_path(package)
    for path in filter(Path.is_file, package.rglob("*")):
        copy = target / path.relative_to(package)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path == model:
            copy.write_bytes(spec.SerializeToString(deterministic=True))
        elif path.suffix == ".bin":
            _link(path, copy)
        else:
            shutil.copyfile(path, copy)
    return target


def _link(path: Path, copy: Path) -> None:
    try:
        os.link(path, copy)
    except OSError:  # another disk, or one without hard links
        shutil.copyfile(path, copy)
