"""The shards of one shape: their programs are equal, and only weight bytes differ.

A `Template` is a program that was converted with placeholder weights. It knows where in
the weight file and in the program each parameter lies; `write` makes a shard of it by
putting the shard's own weights in these places."""

import hashlib
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from workbench.bundle import FileEntry, file_entries
from workbench.bundle.names import split_layer
from workbench.export.compress import packed
from workbench.export.package import MANIFEST, MODEL, WEIGHTS, read_package, serialize
from workbench.export.weights import WeightSource

RECORD = struct.Struct("<IIQQ")  # sentinel, dtype, bytes of payload, their offset
RECORD_SENTINEL = 0xDEADBEEF


class Slot(NamedTuple):
    """The place of one stored array of a parameter: [start, stop) of the weight file;
    0, 0: in operation `op` of `operations(model)`."""

    role: str
    op: int
    start: int
    stop: int


class Template:
    """One converted program whose weights can be replaced.

    Args:
        name: of the shard that was converted.
        package: its files, which are read and not kept.
        constants: parameter path → name of the program's value that holds it.
        modules: program value → module path, layers counted from the shard's first.
    """

    suffix = ".mlpackage"

    def __init__(
        self,
        name: str,
        package: Path,
        constants: dict[str, str],
        modules: dict[str, str],
    ):
        self.name = name
        self.constants = constants
        self.modules = modules
        self.taps = {}  # layer of the shard → its last value
        for value, path in modules.items():
            index, _ = split_layer(path)
            if index is not None:
                self.taps[index] = value
        self.model = read_package(package)
        self.manifest = (package / MANIFEST).read_bytes()
        file = package / WEIGHTS
        blob = file.read_bytes() if file.is_file() else b""  # none: small constants
        slots = _slots(operations(self.model), blob)
        places = [(path, slots[name]) for path, name in constants.items()]
        # in the order of the weight file
        self.places = sorted(places, key=lambda place: place[1][-1].stop)
        edges = [0]
        for _, parts in self.places:
            for slot in parts:
                edges += (slot.start, slot.stop) if slot.stop else ()
        edges.append(len(blob))
        assert edges == sorted(edges), "parameters that share bytes"
        # between the slots: headers, records, padding, constants that are no parameters
        gaps = zip(edges[::2], edges[1::2], strict=True)
        self.gaps = [blob[start:stop] for start, stop in gaps]

    def write(
        self, package: Path, weights: list[WeightSource], load: Callable
    ) -> tuple[list[FileEntry], dict[str, str]]:
        """Writes this program with `weights` to the new folder `package`. Returns its
        files, hashed while they were written, and the place of each parameter.

        Args:
            load: weight → by role, the arrays that are stored for it.

        Raises:
            InputError: a weight of another shape, or one that fp16 or the compression
                cannot hold.
        """
        file = package / WEIGHTS
        file.parent.mkdir(parents=True)
        model = type(self.model)()
        model.CopyFrom(self.model)
        digest = hashlib.sha256()
        with file.open("wb", buffering=0) as whole, ThreadPoolExecutor(1) as beside:
            for piece in self._pieces(operations(model), weights, load):
                hashing = beside.submit(digest.update, piece)
                rest = memoryview(piece)
                while len(rest):  # a disk that is nearly full takes less than all
                    rest = rest[whole.write(rest) :]
                hashing.result()
            size = whole.tell()
        files = []
        if size:
            name = f"{package.name}/{WEIGHTS}"
            files.append(FileEntry(path=name, bytes=size, sha256=digest.hexdigest()))
        else:
            file.unlink()
            file.parent.rmdir()
        for name, content in ((MODEL, serialize(model)), (MANIFEST, self.manifest)):
            (package / name).write_bytes(content)
            files += file_entries(package.parent, package / name)
        return sorted(files, key=lambda entry: Path(entry.path)), self.constants

    def _pieces(
        self, ops: list, weights: list[WeightSource], load: Callable
    ) -> Iterator[bytes | np.ndarray]:
        """The weight file in order, while inline values are put into the operations
        `ops`."""
        by_path = {weight.path: weight for weight in weights}
        gaps = iter(self.gaps)
        yield next(gaps)
        for path, slots in self.places:
            weight = by_path[path]
            arrays = load(weight)
            for slot in slots:
                bits = 16
                if slot.role in ("data", "indices"):
                    bits = weight.preset.bits
                payload = packed(arrays[slot.role], bits)
                if slot.stop:
                    assert len(payload) == slot.stop - slot.start, (path, slot)
                    yield payload
                    yield next(gaps)
                else:
                    value = values_of(ops[slot.op])[slot.role]
                    stored = value.immediateValue.tensor.bytes
                    assert len(payload) == len(stored.values), (path, slot)
                    stored.values = payload.tobytes()


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


def _slots(ops: list, blob: bytes) -> dict[str, list[Slot]]:
    """Where the values of each constant operation lie, in the order of the weight file;
    by the name of its result.

    Functions share what is in the weight file, and each has inline values of its own.
    """
    slots: dict[str, dict[tuple, Slot]] = {}
    for index, op in enumerate(ops):
        for role, value in values_of(op).items():
            start = size = 0
            if value.WhichOneof("value") == "blobFileValue":
                at = value.blobFileValue.offset
                sentinel, _, size, start = RECORD.unpack_from(blob, at)
                assert sentinel == RECORD_SENTINEL
            slot = Slot(role, index, start, start + size)
            places = slots.setdefault(op.outputs[0].name, {})
            places.setdefault((role, start or index), slot)
    return {
        name: sorted(places.values(), key=lambda slot: slot.start)
        for name, places in slots.items()
    }
