"""The runtime and folder of a stage's process, and the JSON lines that it writes."""

import json
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from workbench.bundle import Bundle, Shard
from workbench.check.gates import jsonable
from workbench.log.scrub import anonymous, identifiers
from workbench.runtime import Model, load_shard, named
from workbench.runtime.standin import installed


@dataclass(frozen=True)
class Job:
    """The `runtime` (`coreml`, `stand-in`, `stand-in:FAULT`) and the `folder` for
    bundles and for the log of a stage's process."""

    runtime: str
    folder: Path

    def model(self, bundle: Bundle, shard: Shard, units: str) -> Model:
        return load_shard(bundle, shard, self.runtime, compute_units=units)

    def native_layer(self) -> AbstractContextManager:
        """Makes coremltools' native layer available in the block: Core ML's, or the
        stand-in's."""
        name, fault = named(self.runtime)
        return installed(fault) if name == "stand-in" else nullcontext()


def write_line(path: Path, row: dict) -> None:
    """Appends a row without identifying names to a file of JSON lines and syncs the
    file."""
    row = anonymous(jsonable(row), _identifiers())
    with path.open("a") as file:
        file.write(json.dumps(row, default=str, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


@cache
def _identifiers() -> set[str]:
    """`log.scrub.identifiers`, cached, since it starts a command."""
    return identifiers()
