"""A run as the write-up that the project ships."""

import shutil
from collections.abc import Iterable
from pathlib import Path

from workbench import log
from workbench.errors import InputError
from workbench.experiment import folders, overview, parts, report, sources
from workbench.files import checkout, replace_folder
from workbench.log.anonymous import anonymize


def publish_run(folder: Path, *, beside: bool = False) -> Path:
    """Makes the run in `folder` the shipped one: its files go to `experiments/NN_slug`,
    its log rows to the shipped log, from which the rows go that no shipped run uses. The
    page of all shipped runs, `experiments/README.md`, is written again.

    The shipped run is the earlier or the new one at every moment. Absolute paths are
    shortened. Returns the shipped folder.

    Args:
        folder: of a run below `build/experiments`.
        beside: the shipped run, of another checkpoint, stays, and this one goes to
            `experiments/NN_slug-NAME` with the name of its checkpoint.

    Raises:
        InputError: it is the shipped run, or figures of another run lie there; `beside`
            without a shipped run of another checkpoint.
    """
    run = parts.check_one_run(folder)
    name = folders.experiment_name(folder, run)
    if folders.is_shipped(folder):
        step = f"run: workbench run {name[:2]} --publish"
        raise InputError(folder.name, "the shipped run", "a run of your own", step)
    target = checkout() / "experiments" / name
    if beside:
        target = _further_folder(target, run)
    target.parent.mkdir(parents=True, exist_ok=True)
    # next to its target, since the folder of runs may be on another disk
    new = target.with_name(f".{target.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    for kind in parts.KINDS:
        if (folder / kind).is_dir():
            shutil.copytree(folder / kind, new / kind)
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
    checkpoint = _checkpoint(run)
    if not (shipped / folders.RUN).is_file():
        actual = "no shipped run"
    elif _checkpoint(folders.read_run(shipped)) == checkpoint:
        actual = f"the shipped run is of {checkpoint['name']} too"
    else:
        return shipped.with_name(f"{shipped.name}-{checkpoint['name']}")
    needed = "a shipped run of another checkpoint"
    raise InputError(f"--beside, {shipped.name}", actual, needed, "leave --beside out")


def _checkpoint(run: dict) -> dict:
    """Name and hash of a run's checkpoint; older runs have none."""
    return run.get("checkpoint") or {"name": sources.NO_CHECKPOINT, "sha256": None}


def shipped_log() -> Path:
    """The log that came with the project."""
    return checkout() / "experiments" / "log" / log.SHIPPED


def _ship_rows(run_ids: Iterable[str]) -> None:
    """Copies the files of these runs to the shipped log."""
    whole = log.default_root()
    for run_id in run_ids:
        for path in whole.glob(f"*/{run_id}.parquet"):
            table = shipped_log() / path.parent.name
            table.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, table)


def _remove_unused_rows(number: str) -> None:
    """Removes an experiment's runs from the shipped log that no shipped `run.json`
    names."""
    shipped = shipped_log()
    unused = set(log.load("runs", shipped, {"experiment": number})["run_id"])
    for path in (checkout() / "experiments").glob(f"[!.]*/{folders.RUN}"):
        unused -= set(folders.read_run(path.parent)["run_ids"])
    for run_id in unused:
        for path in shipped.glob(f"*/{run_id}.parquet"):
            path.unlink()
