"""Shards of one shape out of one conversion: the program is the same, only weight bytes differ.

A `Template` is read from one plainly converted shard: where in its weight file and in its program each parameter lies.
`press` writes another shard with its own weights in those places. Converters look at values, though: weights for which
coremltools would remove, merge or fold an operation raise `TemplateMismatch`, and the caller converts that shard.
"""

import hashlib
import shutil
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from workbench.bundle import FileEntry
from workbench.export.compress import packed
from workbench.export.package import MANIFEST, MODEL, WEIGHTS, read_package, serialize
from workbench.export.shards import Spec
from workbench.export.weights import Clock, WeightSource

RECORD = struct.Struct("<IIQQ")  # sentinel, dtype, bytes of payload, its offset in the file
RECORD_SENTINEL = 0xDEADBEEF
NEUTRAL = {"add": 0.0, "sub": 0.0, "mul": 1.0, "real_div": 1.0}  # constants that make coremltools drop the operation
PREFIX = 100  # coremltools merges constants of one shape whose first 100 values are equal (and the rest nearly so)


class TemplateMismatch(Exception):
    """These weights would convert to a different program or another weight file."""


class Slot(NamedTuple):
    """Where one stored array of a weight lies: [start, stop) of the weight file; 0, 0: in operation `op` of the program."""

    role: str
    op: int
    start: int = 0
    stop: int = 0


def values_of(op) -> dict:
    """Role → Value message of a constant operation."""
    if op.type == "const":
        return {"val": op.attributes["val"]}
    return {role: bound.arguments[0].value for role, bound in op.inputs.items()} if op.type.startswith("constexpr_") else {}


def operations(model):
    """The operations of a one-function program."""
    (function,) = model.mlProgram.functions.values()
    return function.block_specializations[function.opset].operations


class Template:
    """One converted shard whose weights can be replaced.

    Args:
        spec, weights: the shard that was converted.
        package: its files.
        constants: parameter path → name of the program's value that holds it.
        modules: program value → module path, layers counted from the shard's first.

    Raises:
        TemplateMismatch: not every float constant of the weight file is one parameter.
    """

    def __init__(self, spec: Spec, weights: list[WeightSource], package: Path, constants: dict[str, str],
                 modules: dict[str, str]):  # fmt: skip
        self.spec, self.constants, self.modules = spec, constants, modules
        self.model, self.manifest = read_package(package), (package / MANIFEST).read_bytes()
        if not (package / WEIGHTS).is_file():
            raise TemplateMismatch("weights so small that they stand in the program")
        blob, ops = (package / WEIGHTS).read_bytes(), operations(self.model)
        index = {op.outputs[0].name: i for i, op in enumerate(ops) if values_of(op)}
        if not all(constants.get(weight.path) in index for weight in weights):
            raise TemplateMismatch("a parameter that the program does not hold")
        self.slots, self.neutral = {}, {}
        for weight in weights:
            constant = constants[weight.path]
            slots = _slots(ops, index[constant], blob)
            self.slots[weight.path] = sorted(slots, key=lambda slot: slot.start)
            self.neutral[weight.path] = _neutral(ops, constant)
        self.order = sorted(range(len(weights)), key=lambda i: self.slots[weights[i].path][-1].stop)
        self._cut(blob, ops, [slot for i in self.order for slot in self.slots[weights[i].path] if slot.stop])

    def _cut(self, blob: bytes, ops, slots: list[Slot]) -> None:
        """Stores what lies between the slots: headers, records, padding, constants that are no parameters."""
        edges = [0, *(edge for slot in slots for edge in (slot.start, slot.stop)), len(blob)]
        if edges != sorted(edges):
            raise TemplateMismatch("parameters that share bytes, or lie in another order")
        self.gaps = [blob[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)]
        starts = {slot.start for slot in slots}
        for i, op in enumerate(ops):
            values = values_of(op)
            for slot in _slots(ops, i, blob):
                if slot.stop and slot.start not in starts and values[slot.role].type.tensorType.dataType in _floats():
                    raise TemplateMismatch("a constant in the weight file that is no parameter")

    def state_names(self, spec: Spec) -> dict[str, str]:
        """State of this template → that of another shard, where they differ."""
        return {old: new for old, new in zip(self.spec.buffers, spec.buffers, strict=True) if old != new}

    def press(self, spec: Spec, weights: list[WeightSource], load: Callable, package: Path, clock: Clock) -> list[FileEntry]:
        """Writes `package`: this program with other `weights`. Returns its files, hashed while they were written.

        Args:
            load: weight → its fp16 values, and by role the arrays that are stored for it.

        Raises:
            TemplateMismatch: the converter would lay these weights out differently; no package is left.
        """
        shutil.rmtree(package, ignore_errors=True)
        (package / WEIGHTS).parent.mkdir(parents=True)
        model = type(self.model)()
        model.CopyFrom(self.model)
        digest = hashlib.sha256()
        try:
            with (package / WEIGHTS).open("wb", buffering=0) as file, ThreadPoolExecutor(1) as beside:
                for piece in self._payloads(weights, load, operations(model), clock):
                    with clock("write"):
                        hashing = beside.submit(digest.update, piece)
                        _write_all(file, piece)
                        hashing.result()
                size = file.tell()
        except TemplateMismatch:
            shutil.rmtree(package)
            raise
        if names := self.state_names(spec):
            rename(model, names)
        entries = [FileEntry(path=f"{package.name}/{WEIGHTS}", bytes=size, sha256=digest.hexdigest())]
        for name, content in ((MODEL, serialize(model)), (MANIFEST, self.manifest)):
            (package / name).write_bytes(content)
            entries.append(FileEntry(path=f"{package.name}/{name}", bytes=len(content), sha256=hashlib.sha256(content).hexdigest()))
        return sorted(entries, key=lambda entry: Path(entry.path))

    def _payloads(self, weights: list[WeightSource], load: Callable, ops, clock: Clock) -> Iterator[bytes | np.ndarray]:
        """The weight file in order, while inline values are put into the operations `ops`."""
        beginnings, gaps = set(), iter(self.gaps)
        yield next(gaps)
        for weight in (weights[i] for i in self.order):
            values, arrays = load(weight)
            neutral = self.neutral[weight.path]
            if neutral is not None and bool((values == neutral).all()):
                raise TemplateMismatch(f"{weight.path} is all {neutral:g}: the operation would be removed")
            _refuse_twins(beginnings, weight, {"values": values.numpy()} | arrays)
            for role, op, start, stop in self.slots[weight.path]:
                with clock("compress"):
                    payload = packed(arrays[role], weight.preset.bits if role in ("data", "indices") else 16)
                if not stop:
                    _inline(values_of(ops[op])[role], payload)
                elif len(payload) != stop - start:
                    raise TemplateMismatch(f"{weight.path} takes {len(payload)} bytes, not {stop - start}")
                else:
                    yield payload
                    yield next(gaps)


def _slots(ops, op: int, blob: bytes) -> list[Slot]:
    """Where the values of constant operation `op` lie."""
    slots = []
    for role, value in values_of(ops[op]).items():
        if value.WhichOneof("value") == "blobFileValue":
            sentinel, _, size, start = RECORD.unpack_from(blob, value.blobFileValue.offset)
            assert sentinel == RECORD_SENTINEL
            slots.append(Slot(role, op, start, start + size))
        else:
            slots.append(Slot(role, op))
    return slots


def _floats() -> tuple[int, int]:
    from coremltools.proto import MIL_pb2

    return MIL_pb2.FLOAT16, MIL_pb2.FLOAT32


def _inline(value, payload: np.ndarray) -> None:
    tensor = value.immediateValue.tensor
    if len(tensor.bytes.values) != len(payload):
        raise TemplateMismatch(f"an inline constant of {len(tensor.bytes.values)} bytes, not {len(payload)}")
    tensor.bytes.values = payload.tobytes()


def _write_all(file, piece) -> None:
    """All of `piece`: an unbuffered write may stop short, on a disk that is nearly full for one."""
    view = memoryview(piece)
    while len(view):
        view = view[file.write(view) :]


def _neutral(ops, constant: str) -> float | None:
    """The value that would make the one operation that takes `constant` a no-op."""
    for op in ops:
        if op.type in NEUTRAL and any(b.name == constant for a in op.inputs.values() for b in a.arguments):
            return NEUTRAL[op.type]
    return None


def _refuse_twins(beginnings: set, weight: WeightSource, arrays: dict[str, np.ndarray]) -> None:
    """Refuses a shard whose constants coremltools would take for one: same kind and shape, same first values."""
    for role, array in arrays.items():
        if role == "lut" or len(array) == 1 or weight.tensor is None:
            continue  # too few values for merging; `neutral` covers the zeros that stand for no tensor
        key = role, weight.shape, len(array), (array[:PREFIX] + array.dtype.type(0)).tobytes()  # -0 counts as 0
        if key in beginnings:
            raise TemplateMismatch(f"{weight.path} begins like another constant: they could be merged")
        beginnings.add(key)


def rename(message, names: dict[str, str]) -> None:
    """Puts state names (and names derived from them) into every string of a protobuf message."""
    for field, value in message.ListFields():
        if field.type == field.TYPE_STRING:
            if field.is_repeated:
                value[:] = [renamed(text, names) for text in value]
            else:
                setattr(message, field.name, renamed(value, names))
        elif field.type == field.TYPE_MESSAGE:
            if field.message_type.GetOptions().map_entry:
                inner = list(value.values()) if field.message_type.fields_by_name["value"].message_type else []
            else:
                inner = value if field.is_repeated else [value]
            for part in inner:
                rename(part, names)


def renamed(text: str, names: dict[str, str]) -> str:
    """`text` with the state name that it begins with, if it does, replaced."""
    old = next((old for old in names if text.startswith(old)), None)
    return text if old is None else names[old] + text.removeprefix(old)
