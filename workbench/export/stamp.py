"""Shards of one shape out of one conversion: the program is the same, only weight bytes differ.

A `Template` is read from one plainly converted shard: where in its weight file and in its program each parameter lies.
`press` writes another shard with its own weights in those places. Converters look at values, though: what they would
remove, merge or fold for this shard is refused as `Unlike`, and the caller converts that shard plainly.
"""

import hashlib
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from workbench.bundle import FileEntry, Options
from workbench.export import package as packages
from workbench.export.build import Clock, Scratch, WeightSource, load_values
from workbench.export.compress import WEIGHT_BITS, packed, stored_arrays
from workbench.export.shards import Spec
from workbench.models.checkpoint import Checkpoint

RECORD = struct.Struct("<IIQQ")  # sentinel, dtype, bytes of payload, its offset in the file
RECORD_SENTINEL = 0xDEADBEEF
NEUTRAL = {"add": 0.0, "sub": 0.0, "mul": 1.0, "real_div": 1.0}  # constants that make coremltools drop the operation
PREFIX = 100  # coremltools merges constants of one shape whose first 100 values are equal (and the rest nearly so)


class TemplateMismatch(Exception):  # an answer, not an error
    """Weights for which the converter would make another program or another weight file."""


@dataclass(frozen=True)
class Slot:
    """Where one stored array of a part lies: [start, stop) of the weight file, or in operation `op` of the program."""

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
    """One converted shard as a form to fill in.

    Args:
        spec, parts: the shard that was converted.
        package: its files.
        constants: parameter path → name of the program's value that holds it.

    Raises:
        Unlike: not every float constant of the weight file is one parameter.
    """

    def __init__(self, spec: Spec, parts: list[WeightSource], package: Path, constants: dict[str, str]):
        self.spec, self.model = spec, packages.read_package(package)
        self.manifest = (package / packages.MANIFEST).read_bytes()
        if not (package / packages.WEIGHTS).is_file():
            raise TemplateMismatch("weights so small that they stand in the program")
        weights = (package / packages.WEIGHTS).read_bytes()
        ops = operations(self.model)
        at = {op.outputs[0].name: i for i, op in enumerate(ops) if values_of(op)}
        try:
            found = {p.path: [self._slot(ops, at[constants[p.path]], role, weights) for role in values_of(ops[at[constants[p.path]]])]
                     for p in parts}  # fmt: skip
        except KeyError:
            raise TemplateMismatch("a parameter that the program does not hold") from None
        self.slots = {path: sorted(slots, key=lambda s: s.start) for path, slots in found.items()}
        self.order = sorted(range(len(parts)), key=lambda i: self.slots[parts[i].path][-1].stop)
        self.neutral = {p.path: _neutral(ops, constants[p.path]) for p in parts}
        self._cut(weights, ops, [s for i in self.order for s in self.slots[parts[i].path] if s.stop])

    @staticmethod
    def _slot(ops, op: int, role: str, weights: bytes) -> Slot:
        value = values_of(ops[op])[role]
        if value.WhichOneof("value") != "blobFileValue":
            return Slot(role, op)
        sentinel, _, size, start = RECORD.unpack_from(weights, value.blobFileValue.offset)
        assert sentinel == RECORD_SENTINEL
        return Slot(role, op, start, start + size)

    def _cut(self, weights: bytes, ops, slots: list[Slot]) -> None:
        """Keeps what lies between the slots: headers, records, padding, constants that are no parameters."""
        edges = [0, *(edge for slot in slots for edge in (slot.start, slot.stop)), len(weights)]
        if edges != sorted(edges):
            raise TemplateMismatch("parameters that share bytes, or lie in another order")
        self.gaps = [weights[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)]
        held = {slot.start for slot in slots}
        for i, op in enumerate(ops):
            for role, value in values_of(op).items():
                slot = self._slot(ops, i, role, weights)
                if slot.stop and slot.start not in held and value.type.tensorType.dataType in _floats():
                    raise TemplateMismatch("a constant in the weight file that is no parameter")

    def press(self, spec: Spec, parts: list[WeightSource], source: Checkpoint, options: Options, package: Path,
              scratch: Scratch, clock: Clock) -> list[FileEntry]:  # fmt: skip
        """Writes `package`: this program with the weights of `parts`. Returns its files, hashed while they were written.

        Raises:
            Unlike: the converter would lay these weights out differently.
        """
        model = type(self.model)()
        model.CopyFrom(self.model)
        (package / packages.WEIGHTS).parent.mkdir(parents=True)
        digest = hashlib.sha256()
        with (package / packages.WEIGHTS).open("wb", buffering=0) as file, ThreadPoolExecutor(1) as beside:
            for piece in self._payloads(parts, source, options, scratch, clock, model):
                with clock("write"):
                    hashed = beside.submit(digest.update, piece)
                    _write_whole(file, piece)
                    hashed.result()
            size = file.tell()
        names = {old: new for old, new in zip(self.spec.buffers, spec.buffers, strict=True) if old != new}
        if names:
            rename(model, names)
        files = [(packages.MODEL, packages.serialize(model)), (packages.MANIFEST, self.manifest)]
        for name, content in files:
            (package / name).write_bytes(content)
        made = [FileEntry(path=f"{package.name}/{name}", bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
                for name, content in files]  # fmt: skip
        made.append(FileEntry(path=f"{package.name}/{packages.WEIGHTS}", bytes=size, sha256=digest.hexdigest()))
        return sorted(made, key=lambda entry: Path(entry.path))

    def _payloads(self, parts, source, options, scratch, clock, model) -> Iterator[bytes | np.ndarray]:
        """The weight file in order, while inline values are put into `model`."""
        seen, ops, gaps = set(), operations(model), iter(self.gaps)
        yield next(gaps)
        for i in self.order:
            part = parts[i]
            with clock("read"):
                values, peak = load_values(part, source, options, scratch)
            if self.neutral[part.path] is not None and bool((values == self.neutral[part.path]).all()):
                raise TemplateMismatch(f"{part.path} is all {self.neutral[part.path]:g}: the operation would be removed")
            with clock("compress"):
                arrays = stored_arrays(part, values, peak, options.compress, scratch)
            _refuse_twins(seen, part, {"values": values.numpy()} | arrays)
            for slot in self.slots[part.path]:
                with clock("compress"):
                    payload = packed(arrays[slot.role], _bits(slot.role, part, options))
                if not slot.stop:
                    _inline(values_of(ops[slot.op])[slot.role], payload)
                elif len(payload) != slot.stop - slot.start:
                    raise TemplateMismatch(f"{part.path} takes {len(payload)} bytes, not {slot.stop - slot.start}")
                else:
                    yield payload
                    yield next(gaps)


def _bits(role: str, part: WeightSource, options: Options) -> int:
    return WEIGHT_BITS[options.compress] if role in ("data", "indices") and part.compressed else 16


def _floats() -> tuple[int, int]:
    from coremltools.proto import MIL_pb2

    return MIL_pb2.FLOAT16, MIL_pb2.FLOAT32


def _inline(value, payload: np.ndarray) -> None:
    tensor = value.immediateValue.tensor
    if len(tensor.bytes.values) != len(payload):
        raise TemplateMismatch(f"an inline constant of {len(tensor.bytes.values)} bytes, not {len(payload)}")
    tensor.bytes.values = payload.tobytes()


def _write_whole(file, piece) -> None:
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


def _refuse_twins(seen: set, part: WeightSource, arrays: dict[str, np.ndarray]) -> None:
    """Refuses a shard whose constants coremltools would take for one: same kind and shape, same first values."""
    for role, array in arrays.items():
        if role == "lut" or len(array) == 1 or part.tensor is None:
            continue  # too few values for merging; a stand-in for no tensor is met by `neutral`
        key = role, part.shape, len(array), (array[:PREFIX] + array.dtype.type(0)).tobytes()  # -0 counts as 0
        if key in seen:
            raise TemplateMismatch(f"{part.path} begins like another constant: they could be merged")
        seen.add(key)


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
