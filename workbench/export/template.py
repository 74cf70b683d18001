"""The shards of one shape: their programs are equal, and only weight bytes differ.

A `Template` is a program that was converted with placeholder weights. It knows where in
the weight file and in the program each parameter lies; `write` makes a shard of it by
putting the shard's own weights in these places.

Equal programs and weights give equal bytes. coremltools writes a fresh date, random
identifiers and map entries in any order; here the date is pinned, identifiers follow
from what they name, and the model is serialized in canonical order. Two shards are
therefore equal if their manifest entries (path, size, SHA-256) are."""

import json
import shutil
import struct
import uuid
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import NamedTuple

from miltorch.quiet import messages
from workbench.bundle import FileEntry, file_entries
from workbench.export.weights import WeightSource, packed

DATE_KEY = "com.github.apple.coremltools.conversion_date"
DATE = "1970-01-01"
MODEL = "Data/com.apple.CoreML/model.mlmodel"
WEIGHTS = "Data/com.apple.CoreML/weights/weight.bin"
MANIFEST = "Manifest.json"
RECORD = struct.Struct("<IIQQ")  # sentinel, dtype, bytes of payload, their offset


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
        weights: the parameters of the shard.
        modules: program value → module path, layers counted from the shard's first.
    """

    suffix = ".mlpackage"

    def __init__(
        self,
        name: str,
        package: Path,
        weights: list[WeightSource],
        modules: dict[str, str],
    ):
        self.name = name
        self.modules = modules
        self.model = read_package(package)
        self.manifest = (package / MANIFEST).read_bytes()
        file = package / WEIGHTS
        blob = file.read_bytes() if file.is_file() else b""  # none: small constants
        slots = find_slots(operations(self.model), blob)
        # fp16 cast and compression append to the parameter's name
        names = {name.split("_to_fp16")[0]: name for name in slots}
        self.constants = {w.path: names[w.path.replace(".", "_")] for w in weights}
        places = [(path, slots[name]) for path, name in self.constants.items()]
        # in the order of the weight file, each parameter with the bytes before each of
        # its slots: headers, records, padding, constants that are no parameters
        self.places = []
        end = 0
        for path, parts in sorted(places, key=lambda place: place[1][-1].stop):
            gaps = []
            for slot in parts:
                assert not slot.stop or slot.start >= end, "parameters that share bytes"
                gaps.append(blob[end : slot.start])
                end = max(end, slot.stop)
            self.places.append((path, list(zip(parts, gaps))))
        self.rest = blob[end:]

    def write(
        self, package: Path, weights: list[WeightSource], load: Callable
    ) -> tuple[list[FileEntry], dict[str, str]]:
        """Writes this program with `weights` to the new folder `package`. Returns its
        files and the place of each parameter.

        Args:
            load: weight → by role, the arrays that are stored for it.

        Raises:
            InputError: a weight of another shape, or one that fp16 or the compression
                cannot hold.
        """
        model = deepcopy(self.model)
        ops = operations(model)
        by_path = {weight.path: weight for weight in weights}
        file = package / WEIGHTS
        file.parent.mkdir(parents=True)
        with file.open("wb") as whole:
            for path, slots in self.places:
                weight = by_path[path]
                arrays = load(weight)
                for slot, gap in slots:
                    bits = 16
                    if slot.role in ("data", "indices"):
                        bits = weight.preset.bits
                    payload = packed(arrays[slot.role], bits)
                    whole.write(gap)
                    if slot.stop:
                        assert len(payload) == slot.stop - slot.start, (path, slot)
                        whole.write(payload)
                        continue
                    value = values_of(ops[slot.op])[slot.role]
                    inline = value.immediateValue.tensor.bytes
                    assert len(payload) == len(inline.values), (path, slot)
                    inline.values = payload.tobytes()
            whole.write(self.rest)
        if not file.stat().st_size:
            file.unlink()
            file.parent.rmdir()
        (package / MODEL).write_bytes(serialize(model))
        (package / MANIFEST).write_bytes(self.manifest)
        return file_entries(package.parent, package), self.constants


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


def find_slots(ops: list, blob: bytes) -> dict[str, list[Slot]]:
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
                _, _, size, start = RECORD.unpack_from(blob, at)
            places = slots.setdefault(op.outputs[0].name, {})
            slot = Slot(role, index, start, start + size)
            places.setdefault((role, start or index), slot)
    return {
        name: sorted(places.values(), key=lambda slot: slot.start)
        for name, places in slots.items()
    }


def save_package(model, package: Path) -> None:
    """Writes a converted model (coremltools' MLModel) to `package`, replacing an
    existing one."""
    shutil.rmtree(package, ignore_errors=True)
    model.save(str(package))
    pin(package)


def pin(package: Path) -> None:
    """Rewrites what coremltools changes each time it saves: date, identifiers, order of
    map entries."""
    (package / MODEL).write_bytes(serialize(read_package(package)))
    listed = json.loads((package / MANIFEST).read_text())
    items = listed["itemInfoEntries"]
    names = {
        old: str(uuid.uuid5(uuid.NAMESPACE_URL, item["path"])).upper()
        for old, item in items.items()
    }
    listed["itemInfoEntries"] = {names[old]: item for old, item in items.items()}
    listed["rootModelIdentifier"] = names[listed["rootModelIdentifier"]]
    # coremltools rewrites the file in this form when it opens the package, so its bytes
    # stay
    text = json.dumps(listed, indent=4, sort_keys=True) + "\n"
    (package / MANIFEST).write_text(text)


def read_package(package: Path):
    """Reads the Model protobuf of a package that this export wrote."""
    return messages("Model_pb2").Model.FromString((package / MODEL).read_bytes())


def serialize(spec) -> bytes:
    """A Model protobuf as canonical bytes, its date pinned."""
    if DATE_KEY in spec.description.metadata.userDefined:
        spec.description.metadata.userDefined[DATE_KEY] = DATE
    return spec.SerializeToString(deterministic=True)
