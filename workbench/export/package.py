"""Writes the files of a shard's package so that equal programs and weights give equal
bytes.

coremltools writes a fresh date, random identifiers and map entries in any order; here
the date is pinned, identifiers follow from what they name, and the model is serialized
in canonical order. `weight.bin` is kept as it is. Two shards are therefore equal if
their manifest entries (path, size, SHA-256) are."""

import json
import shutil
import uuid
from pathlib import Path

from miltorch.quiet import messages

DATE_KEY = "com.github.apple.coremltools.conversion_date"
DATE = "1970-01-01"
MODEL = "Data/com.apple.CoreML/model.mlmodel"
WEIGHTS = "Data/com.apple.CoreML/weights/weight.bin"
MANIFEST = "Manifest.json"


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
