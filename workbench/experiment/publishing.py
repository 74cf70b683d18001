"""Publishes a run: makes it the write-up of its experiment that the project ships."""

import shutil
from collections.abc import Iterable
from pathlib import Path

from workbench import log
from workbench.errors import InputError
from workbench.experiment import artifacts, folders, overview, report
from workbench.experiment.sources import recorded_checkpoint
from workbench.files import replace_folder
from workbench.log.anonymous import anonymize


def publish_run(folder: Path, *, beside: bool = False) -> Path:
    """Makes the run in `folder` the shipped one, and returns its new folder.

    Its files are copied to `experiments/NN_slug`, with absolute paths shortened, and its
    log rows to the shipped log. Rows of the shipped log that no shipped run uses any more
    are removed. The page of all shipped runs, `experiments/README.md`, is written again.
    At every moment `experiments/NN_slug` holds the whole earlier run or the whole new one.

    Args:
        folder: of a run in `folders.runs_root`.
        beside: keep the shipped run, which is of another checkpoint, and copy this one
            to `experiments/NN_slug-NAME`, where NAME is the name of its checkpoint.

    Raises:
        InputError: `folder` is a shipped run, or has figures of another run; or `beside`
            is set and there is no shipped run of another checkpoint.
    """
    run = artifacts.check_one_run(folder)
    name = folders.experiment_name(folder, run)
    if folders.is_shipped(folder):
        step = f"run: workbench run {name[:2]} --publish"
        raise InputError(folder.name, "the shipped run", "a run of your own", step)
    target = folders.shipped_root() / name
    if beside:
        target = _further_folder(target, run)
    target.parent.mkdir(parents=True, exist_ok=True)
    # next to its target, since the folder of runs may be on another disk
    new = target.with_name(f".{target.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    artifacts.copy_artifacts(folder, new)
    folders.write_json(new / folders.RUN, anonymize(run | {"experiment": name}))
    report.write_report(new)
    _ship_rows(run["run_ids"])
    replace_folder(new, target)
    _remove_unused_rows(name[:2])
    overview.write_overview(target.parent)
    return target


def _further_folder(shipped: Path, run: dict) -> Path:
    """The folder of a run that is shipped next to the run of another checkpoint.

    Raises:
        InputError: there is no shipped run, or it is of the same checkpoint.
    """
    checkpoint = recorded_checkpoint(run)
    if not (shipped / folders.RUN).is_file():
        actual = "no shipped run"
    elif recorded_checkpoint(folders.read_run(shipped)) == checkpoint:
        actual = f"the shipped run is of {checkpoint['name']} too"
    else:
        return shipped.with_name(f"{shipped.name}-{checkpoint['name']}")
    needed = "a shipped run of another checkpoint"
    raise InputError(f"--beside, {shipped.name}", actual, needed, "leave --beside out")


def shipped_log() -> Path:
    """The log that came with the project."""
    return folders.shipped_root() / "log" / log.SHIPPED


def _ship_rows(run_ids: Iterable[str]) -> None:
    """Copies the files of these runs to the shipped log."""
    root = log.default_root()
    for run_id in run_ids:
        for path in root.glob(f"*/{run_id}.parquet"):
            table = shipped_log() / path.parent.name
            table.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, table)


def _remove_unused_rows(number: str) -> None:
    """Removes those runs of an experiment from the shipped log that no `run.json` of a
    shipped run names."""
    shipped = shipped_log()
    unused = set(log.load("runs", shipped, {"experiment": number})["run_id"])
    for path in folders.shipped_root().glob(f"[!.]*/{folders.RUN}"):
        unused -= set(folders.read_run(path.parent)["run_ids"])
    for run_id in unused:
        for path in shipped.glob(f"*/{run_id}.parquet"):
            path.unlink()
