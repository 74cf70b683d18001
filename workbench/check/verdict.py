"""BUNDLE/verdict.json: the results of the gates that need the checkpoint, for machines
that lack it."""

import hashlib
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter

from workbench.bundle import Bundle
from workbench.check.gates import Gate
from workbench.errors import InputError
from workbench.files import write_whole

NAME = "verdict.json"
GATES = Path(__file__).parent  # the source of every gate


@cache
def gates_version() -> str:
    """SHA-256 of the source of all gates; a verdict that other gates gave is not
    read."""
    digest = hashlib.sha256()
    for path in sorted(GATES.glob("*.py")):
        digest.update(
            f"{path.name} {path.stat().st_size} ".encode() + path.read_bytes()
        )
    return digest.hexdigest()


def save(bundle: Bundle, gates: Iterable[Gate]) -> Path:
    """Writes the verdicts of `gates` into the bundle's folder, bound to the bundle's
    identity and to the gates' source.

    Raises:
        InputError: a folder that cannot be written.
    """
    path = bundle.root / NAME
    contents = {
        "version": gates_version(),
        "bundle": bundle.identity,
        "gates": [gate.json() for gate in gates],
    }
    try:
        write_whole(path, (json.dumps(contents, indent=1) + "\n").encode())
    except OSError as problem:
        raise InputError(
            str(path),
            problem.strerror or str(problem),
            "a folder that can be written",
            "copy the bundle to one, and validate it there",
        ) from None
    return path


def load(bundle: Bundle) -> list[Gate] | None:
    """The gates of the bundle's verdict.json; None where there is none, or one of
    another bundle or by gates of other source."""
    try:
        contents = json.loads((bundle.root / NAME).read_text())
        own = [gates_version(), bundle.identity]
        if [contents["version"], contents["bundle"]] != own:
            return None
        # "nan" is nan again
        return TypeAdapter(list[Gate]).validate_python(contents["gates"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
