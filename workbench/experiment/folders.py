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
    copy = make_staging_folder(name)
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    target = experiments() / name / "shipped"
    replace_finished(copy, target)
    return target


def make_staging_folder(name: str) -> Path:
    """A new folder beside the finished runs, in which the files of a run are collected
    before they replace a finished one."""
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


def replace_finished(staging: Path, finished: Path) -> None:
    """Puts a whole run in its place; an earlier one there is removed."""
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
