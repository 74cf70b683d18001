"""The page of all shipped experiments, `experiments/README.md`: question, answer and
picture of each, from the files of its run."""

import re
from collections.abc import Mapping
from pathlib import Path

from workbench.escape import markdown_cell
from workbench.experiment import artifacts, folders
from workbench.experiment.notebooks import title_of
from workbench.experiment.sources import NO_CHECKPOINT, recorded_checkpoint
from workbench.files import write_whole

OVERVIEW_FILE = "README.md"
LEAST_ANSWER = 40
"""Characters: sentences of the answer's first line are added until the answer has as
many, because the first may be "Yes." alone."""
PICTURE_WIDTH = 320  # pixels


def overview(shipped: Path) -> str:
    """The page in Markdown, with a row for each run in the folder `shipped`."""
    lines = [
        "# Experiments",
        "",
        "Every numbered folder holds the last published run of a notebook: `report.md`, "
        "figures with their data, tables, and `run.json` with parameters, checkpoint and machine. "
        "`workbench run NN --publish` replaces it and writes this page again; with "
        "`--beside` the run of a further checkpoint is added.",
        "",
        "| experiment | question | answer | checkpoint, day | picture |",
        "|---|---|---|---|---|",
    ]
    for path in sorted(shipped.glob(f"[0-9]*/{folders.RUN}")):
        lines.append(_row(path.parent))
    lines += [
        "",
        "Beside them: [benchmarks](benchmarks/README.md), the rows of the tables in "
        "[presets](../docs/presets.md) (`bits`) and [verdict](../docs/verdict.md) "
        "(`verdicts`), and the [log](log/public/README.md).",
        "",
    ]
    return "\n".join(lines)


def write_overview(shipped: Path) -> Path:
    """Writes the page into the folder of the shipped runs."""
    path = shipped / OVERVIEW_FILE
    write_whole(path, overview(shipped).encode())
    return path


def short_answer(conclusion: str) -> str:
    """The first sentences of an answer's first line, at least `LEAST_ANSWER` characters
    where the line has as many."""
    return first_sentences(conclusion.strip().partition("\n")[0], LEAST_ANSWER)


def first_sentences(line: str, least: int) -> str:
    """The first sentences of a line, as many as give `least` characters."""
    taken = ""
    # a full stop inside a number or a name has no space behind it
    for sentence in re.split(r"(?<=[.?!])\s+", line.strip()):
        taken = f"{taken} {sentence}".strip()
        if len(taken) >= least:
            break
    return taken


def _row(folder: Path) -> str:
    """The line of one run."""
    run = folders.read_run(folder)
    name = folder.name
    _, _, question = title_of(folders.experiment_name(folder, run)).partition(" · ")
    checkpoint = recorded_checkpoint(run)["name"]
    if checkpoint == NO_CHECKPOINT:
        checkpoint = "no checkpoint"
    day = run["environment"]["time"][:10]
    cells = [
        f"[{name[:2]}]({name}/report.md)",
        markdown_cell(question or name),
        markdown_cell(short_answer(run["conclusion"])),
        markdown_cell(f"{checkpoint}, {day}"),
        _picture(folder, run),
    ]
    return f"| {' | '.join(cells)} |"


def _picture(folder: Path, run: Mapping) -> str:
    """The figure that shows the answer of a run, or its first figure."""
    figures = [a for a in artifacts.read_artifacts(folder) if a.is_figure]
    if not figures:
        return "–"
    by_name = {figure.name: figure for figure in figures}
    figure = by_name.get(run.get("picture"), figures[0])
    address = f"{folder.name}/{figure.relative_path('.svg')}"
    # a bar would end the cell of the table
    alt = figure.alt.replace('"', "&quot;").replace("|", "&#124;")
    return f'<img src="{address}" width="{PICTURE_WIDTH}" alt="{alt}">'
