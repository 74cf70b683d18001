"""The figures and tables of a run, each a few files with one stem: `NAME.json` describes
it, and the others are its data and its drawings."""

import shutil
from pathlib import Path

import pandas as pd

from workbench.errors import InputError
from workbench.experiment.folders import (
    experiment_name,
    read_json,
    read_run,
    write_json,
)

KINDS = "figures", "tables"
PART_ENDINGS = ".json", ".parquet", ".svg", ".pdf", ".png", ".tex"
"""The endings of the files of a figure or table."""


def with_ending(stem: Path, ending: str) -> Path:
    """The path with an ending, whatever dots the name of a figure or table has."""
    return stem.with_name(stem.name + ending)


def read_parts(folder: Path) -> list[dict]:
    """Figures and tables of a run in the order of the notebook."""
    files = [path for kind in KINDS for path in (folder / kind).glob("*.json")]
    return sorted(map(read_json, files), key=lambda part: part["place"])


def remove_part(folder: Path, kind: str, name: str) -> None:
    """Removes the files of a figure or table."""
    for ending in PART_ENDINGS:
        with_ending(folder / kind / name, ending).unlink(missing_ok=True)


def copy_part(source: Path, target: Path, kind: str, name: str) -> None:
    """Copies the files of a figure or table from one run's folder to another's."""
    (target / kind).mkdir(exist_ok=True)
    for ending in PART_ENDINGS:
        file = with_ending(source / kind / name, ending)
        if file.is_file():
            shutil.copy(file, target / kind)


def stamp_run_id_and_order(
    folder: Path, run_id: str, order: list[tuple[str, str]]
) -> None:
    """Writes the run's id into the description of each of its figures and tables, and the
    place of each in the notebook.

    Args:
        order: the kind and the name of each.
    """
    for place, (kind, name) in enumerate(order):
        path = with_ending(folder / kind / name, ".json")
        write_json(path, read_json(path) | {"place": place, "run_id": run_id})


def check_one_run(folder: Path) -> dict:
    """The contents of run.json of a run, all of whose figures and tables have its id.

    Runs that were written before figures had the id of their run have none to compare.

    Raises:
        InputError: a figure or table of another run.
    """
    run = read_run(folder)
    mixed = [
        f"{part['kind']}/{part['name']} of run {part['run_id']}"
        for part in read_parts(folder)
        if part.get("run_id", run["run_id"]) != run["run_id"]
    ]
    if mixed:
        raise InputError(
            f"run {folder}",
            f"{', '.join(mixed)} beside run {run['run_id']}",
            "figures and tables of one run",
            f"run the notebook again: workbench run {experiment_name(folder, run)[:2]}",
        )
    return run


def run_ids_of(data: pd.DataFrame) -> list[str]:
    """The log's runs that the rows of a figure or table came from."""
    rows = data.get("run_ids", data.get("run_id", pd.Series()))
    return sorted(set(rows.explode().dropna()))
