"""Notebooks executed headless, each in a kernel of its own."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

from workbench import kernel, log
from workbench.check import gates
from workbench.errors import InputError, did_you_mean
from workbench.experiment import artifacts, folders, report
from workbench.experiment.notebooks import find_notebook
from workbench.experiment.parameters import check_lengths, notebook_parameters
from workbench.experiment.publishing import publish_run
from workbench.files import locked, write_whole
from workbench.progress import announce

SECONDS = "seconds"
"""The key of run.json with the time of the whole notebook in a kernel of its own, its start
included; runs of a notebook in JupyterLab have none."""


def run_notebook(
    number: str,
    parameters: Mapping | None = None,
    *,
    publish: bool = False,
    beside: bool = False,
    progress: bool = True,
) -> dict:
    """Executes a numbered notebook in a kernel of its own.

    If the run is concluded, the executed notebook is copied to the folder of the run. If
    it is not, the copy stays in `folders.executed_folder` as `NAME.partial.ipynb`; a
    `CellError` names its path.

    Args:
        parameters: values for names that the cell tagged `parameters` sets.
        publish: make the run the shipped one (see `publish_run`).
        beside: ship the run next to that of another checkpoint (see `publish_run`).

    Returns:
        {experiment, verdict, quality, judges_export, conclusion, executed, figures, runs,
        report}; `judges_export` says whether a gate of the run judges a bundle, and
        `figures` are {path, alt} in the order of the notebook.

    Raises:
        InputError: unknown notebook or parameter, no cell that concludes, or a cell
            raised it.
        CellError: a cell raised another error, or the kernel failed.
    """
    source = find_notebook(number)
    parameters = dict(parameters or {})
    check_parameters(number, parameters)
    copies = folders.executed_folder()
    copies.mkdir(parents=True, exist_ok=True)
    copy = copies / f"{source.stem}.partial.ipynb"
    step = "wait until it ends"
    needed = "one run of a notebook at a time in a checkout"
    busy = InputError(f"notebook {source.stem}", "another run of it", needed, step)
    with locked(copies / f".{source.stem}.lock", busy):
        if progress and (expected := describe_published_time(number, parameters)):
            announce(expected)
        start = time.monotonic()
        kernel.execute(source, copy, parameters, progress=progress)
        seconds = time.monotonic() - start
        folder = _find_concluded(source, copy)
        timed = folders.read_run(folder) | {SECONDS: round(seconds, 1)}
        folders.write_json(folder / folders.RUN, timed)
        write_whole(folder / folders.NOTEBOOK, copy.read_bytes())
        os.replace(copy, copies / source.name)
    executed = folder / folders.NOTEBOOK
    if publish or beside:
        folder = publish_run(folder, beside=beside)
    run = artifacts.check_one_run(folder)
    figures = [
        {"path": str(folder / artifact.relative_path(".png")), "alt": artifact.alt}
        for artifact in artifacts.read_artifacts(folder)
        if artifact.is_figure
    ]
    return {
        "experiment": source.stem,
        "verdict": run["verdict"] or gates.NOT_RUN,
        "quality": run.get("quality") or gates.NOT_RUN,
        "judges_export": report.judges_export(
            gates.Gate(**gate) for gate in run["gates"]
        ),
        "conclusion": run["conclusion"],
        "executed": str(executed),
        "figures": figures,
        "runs": run["run_ids"],
        "report": str(folder / folders.REPORT),
    }


def describe_published_time(number: str, parameters: Mapping) -> str | None:
    """How long the published run of a notebook with these parameters took, in a sentence;
    None where no such run recorded its time.

    Args:
        parameters: values in place of the notebook's own.
    """
    stem = find_notebook(number).stem
    values = None
    for file in sorted(folders.shipped_root().glob(f"{stem}*/{folders.RUN}")):
        run = folders.read_json(file)
        if not run.get(SECONDS) or folders.experiment_name(file.parent, run) != stem:
            continue
        values = values or notebook_parameters(number).values | dict(parameters)
        if run["parameters"] == values:
            minutes, seconds = divmod(round(run[SECONDS]), 60)
            machine = run["environment"]["machine"]
            return (
                f"{stem}: about {minutes}:{seconds:02d} (min:s), the time of its "
                f"published run on {machine}"
            )
    return None


def check_parameters(number: str, parameters: Mapping) -> None:
    """Refuses parameters that a notebook does not have, that cannot be overridden, or
    that count more tokens than the cache has rows."""
    if not parameters:
        return
    accepted = notebook_parameters(number)
    subject = f"notebook {find_notebook(number).stem}, parameters"
    needed = f"names among {', '.join(sorted(accepted.values))}"
    if unknown := parameters.keys() - accepted.values.keys() - accepted.fixed.keys():
        actual = ", ".join(sorted(unknown))
        step = did_you_mean(min(unknown), accepted.values, "correct the name")
        raise InputError(subject, actual, needed, step)
    if fixed := parameters.keys() & accepted.fixed.keys():
        words = (f"{name} = {accepted.fixed[name]}" for name in sorted(fixed))
        actual = f"{', '.join(words)}, whose type --set cannot write"
        raise InputError(subject, actual, needed, "change it in the notebook")
    check_lengths(number.zfill(2), accepted.values | parameters)


def _find_concluded(source: Path, copy: Path) -> Path:
    """The folder of the run that an executed notebook concluded.

    Raises:
        InputError: it concluded none, or another run of the checkpoint has taken its
            place since.
    """
    subject = f"notebook {source.stem}"
    concluded = report.run_of_notebook(copy)
    if concluded is None:
        needed = f"a cell that concludes Experiment({source.stem!r}, globals())"
        step = "end the notebook with experiment.conclude(words)"
        raise InputError(subject, "no conclusion", needed, step)
    folder = log.project() / concluded["folder"]
    run_id = folders.read_run(folder)["run_id"]
    if run_id != concluded["run_id"]:
        step = "run it again, with no other run of the checkpoint beside it"
        needed = f"run {concluded['run_id']} in {folder}"
        raise InputError(subject, f"run {run_id}", needed, step)
    return folder
