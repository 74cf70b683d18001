"""The figures and tables of a run, its artifacts. Each is a few files with one stem:
`NAME.json` describes it, and the others are its data and its drawings."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pandas as pd

from workbench.errors import InputError
from workbench.experiment.folders import (
    experiment_name,
    read_json,
    read_run,
    write_json,
)

FIGURES, TABLES = "figures", "tables"
KINDS = FIGURES, TABLES
"""The kinds of artifacts, and the folders of a run that have them."""
ENDINGS = ".json", ".parquet", ".svg", ".pdf", ".png", ".tex"
"""The endings of the files of an artifact."""


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """A figure or a table of a run, as `NAME.json` describes it.

    A field that is None is not written to the file: a table has no `plot`, `subtitle` and
    `options`, most artifacts have no `section`, and artifacts of older or unfinished runs
    have no `run_id`.
    """

    kind: str
    """One of `KINDS`."""
    name: str
    place: int
    """The place among all artifacts of the run, in the order of the notebook."""
    alt: str
    """The description of a figure for readers who cannot see it; the caption of a
    table."""
    plot: str | None = None
    """The name of the function of `workbench.plots` that draws the figure."""
    subtitle: str | None = None
    """Checkpoint, options and machine of the data."""
    options: dict | None = None
    """The keywords of the function `plot`."""
    in_report: bool = True
    """Whether the report has it; the files have it always."""
    section: str | None = None
    """The heading under which the report has it; None: that of all others."""
    run_ids: list[str]
    """The log's runs that the rows of the data came from."""
    run_id: str | None = None
    """The run that the artifact belongs to."""

    @property
    def key(self) -> tuple[str, str]:
        """Kind and name."""
        return self.kind, self.name

    @property
    def is_figure(self) -> bool:
        return self.kind == FIGURES

    def relative_path(self, ending: str) -> str:
        """The path of one of its files, relative to the run's folder."""
        return f"{self.kind}/{self.name}{ending}"


def artifact_path(folder: Path, kind: str, name: str, ending: str) -> Path:
    """The path of a file of an artifact, whatever dots its name has.

    Args:
        folder: of the run.
        ending: one of `ENDINGS`.
    """
    return folder / kind / f"{name}{ending}"


def read_artifact(folder: Path, kind: str, name: str) -> Artifact:
    """Reads the description of one artifact of a run."""
    return _read_description(artifact_path(folder, kind, name, ".json"))


def read_artifacts(folder: Path) -> list[Artifact]:
    """Reads the descriptions of all artifacts of a run, in the order of the notebook."""
    paths = [path for kind in KINDS for path in (folder / kind).glob("*.json")]
    return sorted(map(_read_description, paths), key=lambda artifact: artifact.place)


def _read_description(path: Path) -> Artifact:
    contents = read_json(path)
    if "about" in contents:  # its name in runs of earlier releases
        contents["subtitle"] = contents.pop("about")
    names = {field.name for field in fields(Artifact)}
    return Artifact(**{name: contents[name] for name in names & contents.keys()})


def write_description(folder: Path, artifact: Artifact) -> None:
    """Writes the description of an artifact into the folder of a run."""
    contents = {
        field.name: getattr(artifact, field.name)
        for field in fields(Artifact)
        if getattr(artifact, field.name) is not None
    }
    path = artifact_path(folder, artifact.kind, artifact.name, ".json")
    write_json(path, contents)


def remove_artifact(folder: Path, kind: str, name: str) -> None:
    """Removes the files of an artifact."""
    for ending in ENDINGS:
        artifact_path(folder, kind, name, ending).unlink(missing_ok=True)


def copy_artifact(source: Path, target: Path, kind: str, name: str) -> None:
    """Copies the files of an artifact from one run's folder to another's."""
    (target / kind).mkdir(exist_ok=True)
    for ending in ENDINGS:
        file = artifact_path(source, kind, name, ending)
        if file.is_file():
            shutil.copy(file, target / kind)


def copy_artifacts(source: Path, target: Path) -> None:
    """Copies all artifacts from one run's folder to another's, which has none."""
    for kind in KINDS:
        if (source / kind).is_dir():
            shutil.copytree(source / kind, target / kind)


def stamp_run_id_and_order(
    folder: Path, run_id: str, keys: Sequence[tuple[str, str]]
) -> None:
    """Writes the run's id and the place in the notebook into the description of each
    artifact.

    Args:
        keys: kind and name of each artifact, in the order of the notebook.
    """
    for place, (kind, name) in enumerate(keys):
        artifact = read_artifact(folder, kind, name)
        write_description(folder, replace(artifact, place=place, run_id=run_id))


def check_one_run(folder: Path) -> dict:
    """The contents of run.json of a run, all of whose artifacts have its id.

    Runs that were written before artifacts had the id of their run have none to compare.

    Raises:
        InputError: a figure or table of another run.
    """
    run = read_run(folder)
    mixed = [
        f"{artifact.kind}/{artifact.name} of run {artifact.run_id}"
        for artifact in read_artifacts(folder)
        if artifact.run_id not in (None, run["run_id"])
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
