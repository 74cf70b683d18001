"""The write-up of a finished run from its files: drawings, `report.md`, and the same page
as one HTML file."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from workbench import escape, plots
from workbench.check import gates
from workbench.errors import InputError
from workbench.experiment import artifacts, folders, page, sources
from workbench.experiment.artifacts import FIGURES, Artifact, artifact_path
from workbench.experiment.notebooks import cells_of, title_of
from workbench.experiment.page import (
    HEADING_MARK,
    Block,
    Commands,
    Heading,
    Page,
    Paragraph,
    Picture,
    Table,
    Verdict,
    Verdicts,
)
from workbench.experiment.parameters import default_values, value_text
from workbench.experiment.tables import gate_table, without_run_ids
from workbench.files import write_whole
from workbench.log.anonymous import anonymize

SHOWN_ROWS = 20  # of a table in the report
FOLDED_ROWS = 200  # of a table in the HTML page, which has no files beside it
ARTIFACTS = "Figures and tables"
"""The heading of those that have no section."""
APPENDIX = "Appendix"
"""A section that closes the page, such as of tables with a row for each layer."""
RUN_KEY = "workbench"
"""The key of a cell output's metadata under which a conclusion names its run."""
BUNDLE_GATES = {*gates.REQUIRED, "budget", "device", gates.MAX_KL_GATE}
"""Gates that judge an export or its cost. All others answer an experiment's own
question."""


def draw_figure(path: str | Path, subtitle: str | None = None, **options) -> Figure:
    """A figure of a run, drawn from its saved data with its saved options and subtitle.

    Args:
        path: of any of the figure's files, such as `RUN/figures/NAME.svg`.
        subtitle: in place of the saved one; "" for none. A figure that `options` give
            gets no subtitle.
        options: keywords of the plot in place of the saved ones, such as `width` in
            inches or `title`.

    Raises:
        InputError: no figure of a run has such a file.
    """
    path = Path(path)
    description = path.with_suffix(".json")
    if path.parent.name != FIGURES or not description.is_file():
        step = (
            "give a file in the folder figures of a run, such as RUN/figures/NAME.svg"
        )
        needed = f"{description.name} beside it, in a folder {FIGURES}"
        raise InputError(f"figure {path}", "no figure of a run", needed, step)
    artifact = artifacts.read_artifact(path.parent.parent, FIGURES, description.stem)
    data = pd.read_parquet(path.with_suffix(".parquet"))
    figure = getattr(plots, artifact.plot)(data, **artifact.options | options)
    if "figure" not in options:  # a caller's figure may be a part of a larger one
        saved = artifact.subtitle or ""
        plots.add_subtitle(figure, saved if subtitle is None else subtitle)
    return figure


def redraw_figure(folder: Path, name: str) -> Path:
    """Draws a figure of the run in `folder` from its saved data as SVG, PDF and PNG;
    returns the path of the SVG."""
    figure = draw_figure(artifact_path(folder, FIGURES, name, ".json"))
    svg, *_ = plots.save(figure, folder / FIGURES / name)
    return svg


def redraw_run(folder: Path) -> Path:
    """Draws all figures of a run from their data and writes its report again; returns
    the path of the report.

    Raises:
        InputError: figures or tables of another run lie there.
    """
    artifacts.check_one_run(folder)
    for artifact in artifacts.read_artifacts(folder):
        if artifact.is_figure:
            redraw_figure(folder, artifact.name)
    return write_report(folder)


def find_report(folder: Path) -> Path:
    """The path of the report that lies with a finished run, which is left as it is.

    Raises:
        InputError: figures or tables of another run lie there.
    """
    artifacts.check_one_run(folder)
    return folder / folders.REPORT


def write_report(folder: Path) -> Path:
    """Writes `report.md` of the run in `folder` from its files."""
    path = folder / folders.REPORT
    write_whole(path, page.markdown(run_page(folder)).encode())
    return path


def write_html(folder: Path, path: Path | None = None) -> Path:
    """Writes the page of the run in `folder` as one HTML file.

    Args:
        path: default: `report.html` in the run's folder, or of a shipped run, whose
            folder git tracks, a file beside the executed notebooks.
    """
    contents = page.html(run_page(folder)).encode()
    if path is None:
        path = folder / folders.HTML_REPORT
        if folders.is_shipped(folder):
            name = folders.experiment_name(folder, folders.read_run(folder))
            path = folders.executed_folder() / f"{name}.html"
            path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, contents)
    return path


def run_page(folder: Path) -> Page:
    """The page of the run in `folder`, from its files alone: the answer, the figures and
    tables, those of each section behind them, the gates and the setup. The section
    `APPENDIX` comes last.

    Raises:
        InputError: figures or tables of another run lie there.
    """
    run = artifacts.check_one_run(folder)
    name = folders.experiment_name(folder, run)
    run = run | anonymize({key: run[key] for key in ("conclusion", "gates")})
    results = [gates.Gate(**gate) for gate in run["gates"]]
    blocks: list[Block] = []
    if results:
        blocks.append(_verdicts(results))
    lines = re.split(r"\n+", run["conclusion"])
    blocks += [_answer_block(line) for line in lines if line]
    sections: dict[str, list[Block]] = {ARTIFACTS: []}  # heading → figures and tables
    for artifact in artifacts.read_artifacts(folder):
        if artifact.in_report:
            section = sections.setdefault(artifact.section or ARTIFACTS, [])
            section.append(_block(folder, artifact))
    appendix = sections.pop(APPENDIX, [])
    for heading, section in sections.items():
        if section:
            blocks += [Heading(heading), *section]
    if results:
        blocks += [Heading("Gates"), Table(gate_table(results))]
    blocks += [Heading("Setup"), Paragraph(_setup(run))]
    blocks += [Heading("Reproduce"), *_reproduce(name, run)]
    if appendix:
        blocks += [Heading(APPENDIX), *appendix]
    return Page(f"Experiment {title_of(name)}", tuple(blocks))


def _answer_block(line: str) -> Block:
    """A line of an answer: a heading or a paragraph."""
    if line.startswith(HEADING_MARK):
        return Heading(line.removeprefix(HEADING_MARK))
    return Paragraph(line)


def _block(folder: Path, artifact: Artifact) -> Block:
    """A figure, or a table, of which the report shows the first rows."""
    if artifact.is_figure:
        address = artifact.relative_path(".svg")
        return Picture((folder / address).read_bytes(), artifact.alt, address)
    source = artifact.relative_path(".parquet")
    data = pd.read_parquet(folder / source)
    all_rows = without_run_ids(data)
    shown = all_rows.head(SHOWN_ROWS)
    more_rows = len(data) - len(shown)
    return Table(shown, artifact.alt, more_rows, source, all_rows.head(FOLDED_ROWS))


def _verdicts(results: list[gates.Gate]) -> Block:
    """Both verdicts on a bundle; where no gate judges a bundle, the verdict of the
    experiment's own gates."""
    word = gates.verdict(results)
    if judges_export(results):
        quality = Verdict("Quality", gates.describe_quality(results))
        return Verdicts(Verdict("Export", word.replace("_", " ")), quality)
    return Paragraph(describe_own_gates(word))


def judges_export(results: Iterable[gates.Gate]) -> bool:
    """Whether one of the gates judges a bundle."""
    return any(gate.name in BUNDLE_GATES for gate in results)


def describe_own_gates(verdict: str) -> str:
    """The verdict of an experiment whose gates judge no single export, in sentences."""
    word = verdict.replace("_", " ")
    return f"Gates of this experiment: {word}. They are no verdict on a single export."


def _setup(run: Mapping) -> str:
    """Checkpoint, options, machine and versions of a run in sentences."""
    sentences = []
    source = run.get("checkpoint")
    if source and source["name"] == sources.NO_CHECKPOINT:
        sentences.append("No checkpoint.")
    elif source:
        text = f"Checkpoint {source['name']}"
        if source.get("sha256"):
            text += f", SHA-256 {source['sha256']}"
        sentences.append(f"{text}.")
    if options := run.get("options"):
        words = (f"{name} {value}" for name, value in options.items())
        sentences.append(f"Options: {', '.join(words)}.")
    machine = run["environment"]
    versions = (f"{name} {number}" for name, number in machine["versions"].items())
    sentences.append(
        f"{machine['machine']}, {machine['platform']}; {', '.join(versions)}."
    )
    sentences.append(
        f"Log row {run['run_id']}; `run.json` names the rows behind the figures."
    )
    return " ".join(sentences)


def _reproduce(name: str, run: Mapping) -> list[Block]:
    """The commands that repeat the run and its report, and sentences on their inputs."""
    commands = run_command(name, run["parameters"]), f"workbench report {name[:2]}"
    blocks: list[Block] = [Commands(commands)]
    source = run.get("checkpoint") or {}
    if source.get("label") and run["parameters"].get("CHECKPOINT") == source["label"]:
        sentence = (
            f"In place of {source['label']}, give the folder of the checkpoint "
            f"{source['name']}"
        )
        if source.get("sha256"):
            sentence += " whose SHA-256 is above"
        blocks.append(Paragraph(f"{sentence}."))
    if fixed := run.get("fixed_parameters"):
        words = "; ".join(f"{key} = {value}" for key, value in fixed.items())
        sentence = f"Set by the notebook alone, since --set has no such type: {words}."
        blocks.append(Paragraph(sentence))
    return blocks


def run_command(name: str, parameters: Mapping) -> str:
    """The command that repeats a run. It names every parameter, even one with the
    notebook's present value, because the notebook may be edited, or differ elsewhere."""
    words = ["workbench", "run", name[:2]]
    defaults = default_values(name)
    for parameter, value in parameters.items():
        default = defaults.get(parameter, value)
        words += ["--set", f"{parameter}={value_text(value, default)}"]
    return escape.shell(words)


def run_of_notebook(path: Path) -> dict | None:
    """The run that an executed notebook concluded last, as `Experiment.conclude` wrote it
    into the metadata of its output: `run_id`, and `folder`, relative to the checkout. None
    where the notebook concluded no run."""
    concluded = None
    for cell in cells_of(path):
        for output in cell.get("outputs", []):
            concluded = output.get("metadata", {}).get(RUN_KEY, concluded)
    return concluded
