"""What the process of a stage works on, and the file of lines that it leaves."""

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
    """What a stage's process works on: the `runtime` (`coreml`, `stand-in`, `stand-in:FAULT`) and
    the `folder` for bundles and for the log."""

    runtime: str
    folder: Path

    def model(self, bundle: Bundle, shard: Shard, units: str) -> Model:
        return load_shard(bundle, shard, self.runtime, compute_units=units)

    def native_layer(self) -> AbstractContextManager:
        """Within, coremltools' native layer is there: Core ML's own, or the stand-in's."""
        name, fault = named(self.runtime)
        return installed(fault) if name == "stand-in" else nullcontext()


def write_line(path: Path, row: dict) -> None:
    """Appends a row, without names of its machine and user, to a file of JSON lines; it is on the
    disk afterwards."""
    row = anonymous(jsonable(row), _identifiers())
    with path.open("a") as file:
        file.write(json.dumps(row, default=str, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


@cache
def _identifiers() -> set[str]:
    """`log.scrub.identifiers`, which asks the system, once for each process."""
    return identifiers()
