"""The file of a grid, read and checked for wrong presets. Imports nothing heavy, so that a
command refuses such a file before it loads torch."""

from pathlib import Path
from typing import Any

import yaml

from workbench.errors import InputError, did_you_mean
from workbench.files import read_bytes

MAX_GRID_BYTES = 1 << 22
FIRST_LIGHT = "first-light"
"""The word for the grids of this name, in the place of a grid's file."""
NEXT_STEP = "see docs/guide.md: Sweeps"


def read_grid_file(path: str | Path) -> Any:
    """The contents of a YAML file, usually a mapping; only their syntax is checked.

    Raises:
        InputError: no YAML file.
    """
    try:
        return yaml.safe_load(read_bytes(Path(path), MAX_GRID_BYTES).decode("utf-8"))
    except InputError:  # a ValueError too: `read_bytes` has said what is wrong
        raise
    # ValueError: not UTF-8, or an invalid date
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as problem:
        step = NEXT_STEP
        if isinstance(problem, FileNotFoundError):
            reason = "no such file"
            step = did_you_mean(str(path), [FIRST_LIGHT], step)
        elif isinstance(problem, UnicodeDecodeError):
            reason = "not UTF-8"
        else:
            reason = getattr(problem, "strerror", None) or _describe(problem)
        raise InputError(f"grid {path}", reason, "a YAML file", step) from None


def _describe(problem: Exception) -> str:
    """The place and the cause of an error in one line, without the quoted text of the
    file, which may be a page of prose."""
    mark = getattr(problem, "problem_mark", None)
    if mark is None:
        return " ".join(str(problem).split())
    place = f"line {mark.line + 1}, column {mark.column + 1}"
    return f"{place}: {' '.join(problem.problem.split())}"


def check_presets(mapping: Any) -> None:
    """Refuses a preset of `export: compress:` that no export has. All else in the mapping
    is left to `grid.make_grid`.

    Raises:
        InputError: names the first one, as `make_options` does.
    """
    from workbench.bundle.options import make_options

    export = mapping.get("export") if isinstance(mapping, dict) else None
    names = export.get("compress") if isinstance(export, dict) else None
    for name in names if isinstance(names, list) else []:
        make_options(compress=name)
