"""Makes shards of one shape from one conversion: their programs are equal, and only
weight bytes differ.

A `Template` is read from one plainly converted shard: where in its weight file and in
its program each parameter lies. `press` writes another shard with its own weights in
those places. coremltools also reads values: weights for which it would remove, merge or
fold an operation raise `TemplateMismatch`, and the caller converts that shard."""

import hashlib
import shutil
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from workbench.bundle import FileEntry, file_entries
from workbench.export.compress import packed
from workbench.export.package import MANIFEST, MODEL, WEIGHTS, read_package, serialize
from workbench.export.shards import Spec
from workbench.export.weights import Clock, WeightSource

RECORD = struct.Struct("<IIQQ")  # sentinel, dtype, bytes of payload, their offset
RECORD_SENTINEL = 0xDEADBEEF
# constants that make coremltools drop the operation
NEUTRAL = {"add": 0.0, "sub": 0.0, "mul": 1.0, "real_div": 1.0}
# coremltools merges constants of one shape whose first 100 values are equal, and the
# rest nearly so
PREFIX = 100


class TemplateMismatch(Exception):
    """These weights would convert to a different program or another weight file."""


class Slot(NamedTuple):
    """The place of one stored array of a weight: [start, stop) of the weight file; 0,
    0: in operation `op` of `operations(model)`."""

    role: str
    op: int
    start: int
    stop: int
    is_float: bool


def values_of(op) -> dict:
    """Role → Value message of a constant operation."""
    if op.type == "const":
        return {"val": op.attributes["val"]}
    inputs = op.inputs if op.type.startswith("constexpr_") else {}
    return {role: bound.arguments[0].value for role, bound in inputs.items()}


def operations(model) -> list:
    """The operations of a program, of all its functions in the order of their names."""
    functions = [function for _, function in sorted(model.mlProgram.functions.items())]
    return [op for f in functions for op in f.block_specializations[f.opset].operations]


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

    def __init__(
        self,
        spec: Spec,
        weights: list[WeightSource],
        package: Path,
        constants: dict[str, str],
        modules: dict[str, str],
    ):
        self.spec = spec
        self.constants = constants
        self.modules = modules
        self.model = read_package(package)
        self.manifest = (package / MANIFEST).read_bytes()
        if not (package / WEIGHTS).is_file():
            raise TemplateMismatch("weights so small that they stand in the program")
        blob = (package / WEIGHTS).read_bytes()
        ops = operations(self.model)
        slots = _slots(ops, blob)
        places = []
        for weight in weights:
            name = constants.get(weight.path)
            if name not in slots:
                raise TemplateMismatch("a parameter that the program does not hold")
            places.append((weight.path, slots[name], _neutral(ops, name)))
        # (path, slots, neutral value), as in the file
        self.places = sorted(places, key=lambda place: place[1][-1].stop)
        edges = [0]
        starts = {0}
        for _, parts, _ in self.places:
            for slot in parts:
                if slot.stop:
                    edges += slot.start, slot.stop
                    starts.add(slot.start)
        edges.append(len(blob))
        if edges != sorted(edges):
            raise TemplateMismatch(
                "parameters that share bytes, or lie in another order"
            )
        for slot in chain.from_iterable(slots.values()):
            if slot.is_float and slot.start not in starts:
                raise TemplateMismatch(
                    "a constant in the weight file that is no parameter"
                )
        # between the slots: headers, records, padding, constants that are no parameters
        gaps = zip(edges[::2], edges[1::2], strict=True)
        self.gaps = [blob[start:stop] for start, stop in gaps]

    def state_names(self, spec: Spec) -> dict[str, str]:
        """State of this template → that of another shard, where they differ."""
        pairs = zip(self.spec.buffers, spec.buffers, strict=True)
        return {old: new for old, new in pairs if old != new}

    def press(
        self,
        spec: Spec,
        weights: list[WeightSource],
        load: Callable,
        package: Path,
        clock: Clock,
    ) -> list[FileEntry]:
        """Writes `package`: this program with other `weights`. Returns its files,
        hashed while they were written.

        Args:
            load: weight → its fp16 values, and by role the arrays that are stored for
                it.

        Raises:
            TemplateMismatch: the converter would lay these weights out differently; no
                package is left.
        """
        shutil.rmtree(package, ignore_errors=True)
        (package / WEIGHTS).parent.mkdir(parents=True)
        model = type(self.model)()
        model.CopyFrom(self.model)
        digest = hashlib.sha256()
        payloads = self._payloads(weights, load, operations(model), clock)
        try:
            with (
                (package / WEIGHTS).open("wb", buffering=0) as file,
                ThreadPoolExecutor(1) as beside,
            ):
                for piece in payloads:
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
        whole = f"{package.name}/{WEIGHTS}"
        files = [FileEntry(path=whole, bytes=size, sha256=digest.hexdigest())]
        for name, content in ((MODEL, serialize(model)), (MANIFEST, self.manifest)):
            (package / name).write_bytes(content)
            files += file_entries(package.parent, package / name)
        return sorted(files, key=lambda entry: Path(entry.path))

    def _payloads(
        self, weights: list[WeightSource], load: Callable, ops, clock: Clock
    ) -> Iterator[bytes | np.ndarray]:
        """The weight file in order, while inline values are put into the operations
        `ops`."""
        beginnings = set()
        gaps = iter(self.gaps)
        by_path = {weight.path: weight for weight in weights}
        yield next(gaps)
        for path, slots, neutral in self.places:
            weight = by_path[path]
            values, arrays = load(weight)
            if neutral is not None and bool((values == neutral).all()):
                raise TemplateMismatch(
                    f"{path} is all {neutral:g}: the operation would be removed"
                )
            _refuse_twins(beginnings, weight, {"values": values.numpy()} | arrays)
            for slot in slots:
                bits = 16
                if slot.role in ("data", "indices"):
                    bits = weight.preset.bits
                with clock("compress"):
                    payload = packed(arrays[slot.role], bits)
                if not slot.stop:
                    _inline(values_of(ops[slot.op])[slot.role], payload)
                    continue
                room = slot.stop - slot.start
                if len(payload) != room:
                    raise TemplateMismatch(
                        f"{path} takes {len(payload)} bytes, not {room}"
                    )
                yield payload
                yield next(gaps)


def _slots(ops: list, blob: bytes) -> dict[str, list[Slot]]:
    """Where the values of each constant operation lie, in the order of the weight file;
    by the name of its result.

    Functions share what is in the weight file, and each has inline values of its own.
    """
    from coremltools.proto import MIL_pb2

    slots: dict[str, dict[tuple, Slot]] = {}
    for index, op in enumerate(ops):
        for role, value in values_of(op).items():
            start = 0
            size = 0
            if value.WhichOneof("value") == "blobFileValue":
                sentinel, _, size, start = RECORD.unpack_from(
                    blob, value.blobFileValue.offset
                )
                assert sentinel == RECORD_SENTINEL
            kind = value.type.tensorType.dataType
            is_float = kind in (MIL_pb2.FLOAT16, MIL_pb2.FLOAT32)
            slot = Slot(role, index, start, start + size, is_float)
            place = role, start or index
            slots.setdefault(op.outputs[0].name, {}).setdefault(place, slot)
    by_start = attrgetter("start")
    return {name: sorted(s.values(), key=by_start) for name, s in slots.items()}


def _inline(value, payload: np.ndarray) -> None:
    stored = value.immediateValue.tensor.bytes
    size = len(stored.values)
    if size != len(payload):
        message = f"an inline constant of {size} bytes, not {len(payload)}"
        raise TemplateMismatch(message)
    stored.values = payload.tobytes()


def _write_all(file, piece) -> None:
    """Writes all of `piece`; an unbuffered write may write less, for example on a disk
    that is nearly full."""
    view = memoryview(piece)
    while len(view):
        view = view[file.write(view) :]


def _neutral(ops, constant: str) -> float | None:
    """The value with which the only operation that reads `constant` would do
    nothing."""
    for op in ops:
        if op.type in NEUTRAL:
            for operand in op.inputs.values():
                if constant in [binding.name for binding in operand.arguments]:
                    return NEUTRAL[op.type]


def _refuse_twins(
    beginnings: set, weight: WeightSource, arrays: dict[str, np.ndarray]
) -> None:
    """Raises `TemplateMismatch` for a shard with constants that coremltools would
    merge: same kind and shape, same first values."""
    for role, array in arrays.items():
        if role == "lut" or len(array) == 1 or weight.tensor is None:
            # too few values for merging; `neutral` covers the zeros that stand for no
            # tensor
            continue
        beginning = array[:PREFIX] + array.dtype.type(0)  # -0 counts as 0
        key = role, weight.shape, len(array), beginning.tobytes()
        if key in beginnings:
            raise TemplateMismatch(
                f"{weight.path} begins like another constant: they could be merged"
            )
        beginnings.add(key)


def rename(message, names: dict[str, str]) -> None:
    """Replaces state names (and names derived from them) in every string of a protobuf
    message."""
    for field, value in message.ListFields():
        if field.type == field.TYPE_STRING:
            if field.is_repeated:
                value[:] = [renamed(text, names) for text in value]
            else:
                setattr(message, field.name, renamed(value, names))
        elif field.type == field.TYPE_MESSAGE:
            inner = value if field.is_repeated else [value]
            if field.message_type.GetOptions().map_entry:
                messages = field.message_type.fields_by_name["value"].message_type
                inner = value.values() if messages else ()
            for part in inner:
                rename(part, names)


def renamed(text: str, names: dict[str, str]) -> str:
    """`text` with the state name that it begins with, if it does, replaced."""
    for old, new in names.items():
        if text.startswith(old):
            return new + text.removeprefix(old)
    return text
