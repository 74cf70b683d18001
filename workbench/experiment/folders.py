"""The folders of runs, finished and unfinished, the replacement of a finished run by the
next one, and `run.json`."""

import json
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from workbench import log
from workbench.errors import InputError
from workbench.experiment.notebooks import find_notebook
from workbench.experiment.sources import source_of
from workbench.files import (
    OUT_VARIABLE,
    checkout,
    locked,
    output_root,
    replace_folder,
    restore_folder,
    write_whole,
)

RUN, REPORT, HTML_REPORT, NOTEBOOK = (
    "run.json",
    "report.md",
    "report.html",
    "notebook.ipynb",
)
UNFINISHED = ".unfinished"
NEW_S = 60
"""Seconds: an unfinished folder as young as this may have no lock yet."""


def runs_root() -> Path:
    """The folder of all runs of this checkout, `build/experiments`."""
    return log.project() / "build" / "experiments"


def shipped_root() -> Path:
    """The folder of the runs that came with the project or were published."""
    return checkout() / "experiments"


def executed_folder() -> Path:
    """The folder of executed copies of notebooks."""
    return log.project() / "build" / "notebooks"


def run_folder(name: str, parameters: Mapping) -> Path:
    """The folder of a notebook's finished run of a checkpoint:
    `build/experiments/NN_slug/NAME-HASH`, where HASH begins the hash of the
    checkpoint's content."""
    return runs_root() / name / source_of(parameters).label


def check_writable(command: str) -> None:
    """Refuses a checkout in which a run cannot be written.

    Raises:
        InputError: names the variable that says where to write instead.
    """
    for folder in (runs_root(), executed_folder(), log.default_root()):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as problem:
            reason = problem.strerror or str(problem)
            step = f"name another one: {OUT_VARIABLE}=FOLDER {command}"
            needed = "a folder that can be written"
            raise InputError(f"folder {folder}", reason, needed, step) from None


def writable_run(folder: Path, run: Mapping) -> Path:
    """The folder into which files of a finished run may be written: its own, or a new
    copy of it where the run is shipped and outputs go to a folder outside of the
    checkout."""
    if not is_shipped(folder) or output_root() == checkout():
        return folder
    name = experiment_name(folder, run)
    copy = make_staging_folder(name)
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    target = runs_root() / name / "shipped"
    replace_finished(copy, target)
    return target


def make_staging_folder(name: str) -> Path:
    """A new folder beside the finished runs, in which the files of a run are collected
    before they replace a finished one."""
    folder = runs_root() / UNFINISHED / f"{name}.{secrets.token_hex(6)}"
    folder.mkdir(parents=True)
    return folder


def remove_abandoned() -> None:
    """Removes unfinished runs whose process has ended. A process that goes on holds a
    lock on the folder of its run."""
    for folder in (runs_root() / UNFINISHED).glob("*"):
        busy = InputError(
            str(folder),
            "a run that has not ended",
            "a finished run",
            "wait until it ends",
        )
        try:
            if time.time() - folder.stat().st_mtime < NEW_S:
                continue
            with locked(folder, busy):
                shutil.rmtree(folder, ignore_errors=True)
        except (InputError, OSError):
            pass  # the run goes on, or another process has removed the folder


def replace_finished(staging: Path, finished: Path) -> None:
    """Moves a complete run from its staging folder to `finished`, in place of an earlier
    run there."""
    finished.parent.mkdir(parents=True, exist_ok=True)
    replace_folder(staging, finished)


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


def experiment_name(folder: Path, run: Mapping) -> str:
    """NN_slug of the experiment whose run is in `folder`."""
    if name := run.get("experiment"):
        return name
    # Older run.json files lack the name. The parent folder is asked first, because the
    # folder of a run may be named after a checkpoint that is named like an experiment.
    is_below_name = re.match(r"\d\d_", folder.parent.name)
    return folder.parent.name if is_below_name else folder.name


def is_shipped(folder: Path) -> bool:
    """Whether the run came with the project, or was published."""
    return folder.parent == shipped_root()


def _restore_interrupted(number: str) -> None:
    """Puts back finished runs whose replacement was interrupted between two renames."""
    for folder in runs_root().glob(f"{number}_*"):
        for earlier in folder.glob(".*.earlier"):
            name = earlier.name.removeprefix(".").removesuffix(".earlier")
            restore_folder(folder / name)


def last_run(number: str) -> Path:
    """The folder of an experiment's newest run in `runs_root`, or else of the shipped
    run.

    Raises:
        InputError: there is no finished run.
    """
    number = number.zfill(2)
    _restore_interrupted(number)
    runs = runs_root().glob(f"{number}_*/[!.]*/{RUN}")
    shipped = shipped_root().glob(f"{number}_*/{RUN}")
    if newest := sorted(runs, key=lambda path: path.stat().st_mtime):
        return newest[-1].parent
    # the shortest name: `publish_run` appends the names of further checkpoints
    if by_length := sorted(shipped, key=lambda path: len(path.parent.name)):
        return by_length[0].parent
    find_notebook(number)  # refuses a number that no notebook has
    step = f"run the notebook: workbench run {number}"
    raise InputError(f"experiment {number}", "no finished run", "a finished run", step)
