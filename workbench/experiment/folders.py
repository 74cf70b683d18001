"""The folders of runs, finished and unfinished, and the replacement of a finished run by
the next one."""

import json
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from workbench import checkpoint_checks, log, paths
from workbench.errors import InputError
from workbench.experiment.notebooks import find_notebook
from workbench.files import (
    OUT_VARIABLE,
    checkout,
    locked,
    output_root,
    replace_folder,
    restore_folder,
    write_whole,
)

RUN, REPORT, PAGE, NOTEBOOK = "run.json", "report.md", "report.html", "notebook.ipynb"
KINDS = "figures", "tables"
PART_ENDINGS = ".json", ".parquet", ".svg", ".pdf", ".png", ".tex"
"""The endings of the files of a figure or table."""
HASH_DIGITS = 8
"""The number of digits of a checkpoint's SHA-256 in the name of a folder."""
UNFINISHED = ".unfinished"
NO_CHECKPOINT = "run"  # the name of the source of a notebook without a checkpoint
NEW_S = 60
"""Seconds: an unfinished folder as young as this may have no lock yet."""


@dataclass(frozen=True)
class Source:
    """The checkpoint of a run: its folder's name, and the hash of its content where it
    is a checkpoint's folder."""

    name: str
    sha256: str | None = None

    @property
    def label(self) -> str:
        """The checkpoint's name in a run's folder and in a report. Two checkpoints whose
        folders have one name have two labels."""
        if self.sha256:
            return f"{self.name}-{self.sha256[:HASH_DIGITS]}"
        return self.name


def source_of(parameters: Mapping) -> Source:
    """The checkpoint that a notebook's `CHECKPOINT` names. A notebook without a checkpoint
    has the source `NO_CHECKPOINT`, and so has a checkpoint without a name, such as `.` and `..`.

    Raises:
        InputError: a checkpoint whose files cannot be read.
    """
    given = str(parameters.get("CHECKPOINT", ""))
    folder = paths.find(given) if given else Path()
    if given and (folder / checkpoint_checks.CONFIG).is_file():
        from workbench.models.checkpoint import Checkpoint

        folder = folder.absolute()
        return Source(paths.model_name(folder), Checkpoint(folder).sha256)
    return Source(Path(given).name.strip(".") or NO_CHECKPOINT)


def experiments() -> Path:
    """The folder of all runs of this checkout."""
    return log.project() / "build" / "experiments"


def executed_folder() -> Path:
    """The folder of executed copies of notebooks."""
    return log.project() / "build" / "notebooks"


def run_folder(name: str, parameters: Mapping) -> Path:
    """The folder of a notebook's finished run of a checkpoint:
    `build/experiments/NN_slug/NAME-HASH`, where HASH begins the hash of the
    checkpoint's content."""
    return experiments() / name / source_of(parameters).label


def check_writable(command: str) -> None:
    """Refuses a checkout in which a run cannot be written.

    Raises:
        InputError: names the variable that says where to write instead.
    """
    for folder in (experiments(), executed_folder(), log.default_root()):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as problem:
            reason = problem.strerror or str(problem)
            step = f"name another one: {OUT_VARIABLE}=FOLDER {command}"
            needed = "a folder that can be written"
            raise InputError(f"folder {folder}", reason, needed, step) from None


def writable_run(folder: Path, run: Mapping) -> Path:
    """The folder of a finished run; a copy of a shipped one where another folder than
    the checkout takes what is written."""
    if not is_shipped(folder) or output_root() == checkout():
        return folder
    name = experiment_name(folder, run)
    copy = make_unfinished(name)
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    target = experiments() / name / "shipped"
    finish(copy, target)
    return target


def make_unfinished(name: str) -> Path:
    """A new folder beside the finished runs, for one that has not finished."""
    folder = experiments() / UNFINISHED / f"{name}.{secrets.token_hex(6)}"
    folder.mkdir(parents=True)
    return folder


def remove_abandoned() -> None:
    """Removes unfinished runs whose process has ended: each holds a lock on its
    folder."""
    for folder in (experiments() / UNFINISHED).glob("*"):
        busy = InputError(str(folder), "a run that goes on", "one that ended", "wait")
        try:
            if time.time() - folder.stat().st_mtime < NEW_S:
                continue
            with locked(folder, busy):
                shutil.rmtree(folder, ignore_errors=True)
        except (InputError, OSError):
            pass  # it goes on, or another process has removed it


def finish(unfinished: Path, finished: Path) -> None:
    """Puts a whole run in its place; an earlier one there is removed."""
    finished.parent.mkdir(parents=True, exist_ok=True)
    replace_folder(unfinished, finished)


def beside(stem: Path, ending: str) -> Path:
    """The path with an ending, whatever dots the name of a figure or table has."""
    return stem.with_name(stem.name + ending)


def write_json(path: Path, value: object) -> None:
    """Writes a JSON file, whole or not at all; arrays become lists, other values
    texts."""

    def plain(item):
        return item.tolist() if hasattr(item, "tolist") else str(item)

    text = json.dumps(value, indent=1, default=plain, ensure_ascii=False)
    write_whole(path, text.encode())


def read_json(path: Path) -> dict:
    """The contents of a JSON file of a run."""
    return json.loads(path.read_text(encoding="utf-8"))


def read_run(folder: Path) -> dict:
    """The contents of run.json of a finished run."""
    return read_json(folder / RUN)


def read_parts(folder: Path) -> list[dict]:
    """Figures and tables of a run in the order of the notebook."""
    files = [path for kind in KINDS for path in (folder / kind).glob("*.json")]
    return sorted(map(read_json, files), key=lambda part: part["place"])


def remove_part(folder: Path, kind: str, name: str) -> None:
    """Removes the files of a figure or table."""
    for ending in PART_ENDINGS:
        beside(folder / kind / name, ending).unlink(missing_ok=True)


def copy_part(source: Path, target: Path, kind: str, name: str) -> None:
    """Copies the files of a figure or table from one run's folder to another's."""
    (target / kind).mkdir(exist_ok=True)
    for ending in PART_ENDINGS:
        file = beside(source / kind / name, ending)
        if file.is_file():
            shutil.copy(file, target / kind)


def stamp(folder: Path, run_id: str, order: list[tuple[str, str]]) -> None:
    """Writes the run's id into the description of each of its figures and tables, and the
    place of each in the notebook.

    Args:
        order: the kind and the name of each.
    """
    for place, (kind, name) in enumerate(order):
        path = beside(folder / kind / name, ".json")
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


def experiment_name(folder: Path, run: Mapping) -> str:
    """NN_slug of the experiment whose run is in `folder`."""
    if name := run.get("experiment"):
        return name
    # before run.json had the name; a checkpoint may be named like an experiment
    below = re.match(r"\d\d_", folder.parent.name)
    return folder.parent.name if below else folder.name


def is_shipped(folder: Path) -> bool:
    """Whether the run came with the project, or was published."""
    return folder.parent == checkout() / "experiments"


def _restore_interrupted(number: str) -> None:
    """Puts back finished runs whose replacement was interrupted between two renames."""
    for folder in experiments().glob(f"{number}_*"):
        for waiting in folder.glob(".*.earlier"):
            restore_folder(folder / waiting.name[1 : -len(".earlier")])


def last_run(number: str) -> Path:
    """The folder of an experiment's newest run below `build/experiments`, else of the
    shipped one.

    Raises:
        InputError: there is no finished run.
    """
    number = number.zfill(2)
    _restore_interrupted(number)
    runs = experiments().glob(f"{number}_*/[!.]*/{RUN}")
    shipped = (checkout() / "experiments").glob(f"{number}_*/{RUN}")
    if newest := sorted(runs, key=lambda path: path.stat().st_mtime):
        return newest[-1].parent
    # the shortest name: runs of further checkpoints lie beside it
    if by_length := sorted(shipped, key=lambda path: len(path.parent.name)):
        return by_length[0].parent
    find_notebook(number)  # refuses a number that no notebook has
    step = f"run the notebook: workbench run {number}"
    raise InputError(f"experiment {number}", "no finished run", "one", step)


def run_ids_of(data: pd.DataFrame) -> list[str]:
    """The log's runs that the rows of a figure or table came from."""
    rows = data.get("run_ids", data.get("run_id", pd.Series()))
    return sorted(set(rows.explode().dropna()))
