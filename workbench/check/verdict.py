"""BUNDLE/verdict.json: what the gates that need the checkpoint said of a bundle, for machines that lack the checkpoint."""

import json
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

from workbench.bundle import Bundle
from workbench.check.gates import Gate
from workbench.errors import InputError
from workbench.files import write_whole

NAME = "verdict.json"
VERDICT_FORMAT = 1  # raised when a gate's meaning changes: older verdicts are not read then


def save(bundle: Bundle, gates: Iterable[Gate]) -> Path:
    """Writes the verdicts of `gates` into the bundle's folder, bound to the bundle's identity.

    Raises:
        InputError: a folder that cannot be written.
    """
    path = bundle.root / NAME
    contents = {
        "format": VERDICT_FORMAT,
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
    """The gates of the bundle's verdict.json; None where there is none, or one of another bundle or format."""
    try:
        contents = json.loads((bundle.root / NAME).read_text())
        if (contents["format"], contents["bundle"]) != (VERDICT_FORMAT, bundle.identity):
            return None
        names = [field.name for field in fields(Gate)]
        return [Gate(*(_number(gate[name]) for name in names)) for gate in contents["gates"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _number(value):
    """What `Gate.json` wrote as the name of a number that JSON lacks is that number again."""
    return float(value) if value in ("nan", "inf", "-inf") else value
