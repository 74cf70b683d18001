"""The write-up of a finished run from its files: `report.md`, drawings and, of a run
whose notebook was executed with its outputs, one HTML page."""

import base64
import re
from collections.abc import Mapping
from pathlib import Path

import nbformat
import pandas as pd
from nbformat.v4 import new_markdown_cell

from workbench import escape, log, plots
from workbench.check import gates
from workbench.errors import InputError
from workbench.experiment import folders
from workbench.experiment.notebooks import title_of
from workbench.experiment.parameters import assigned, default_values
from workbench.experiment.tables import gate_table, markdown_table
from workbench.files import write_whole

SHOWN_ROWS = 20  # of a table in the report
OUTPUT = "workbench"  # key of an output's metadata that names the run
WIDGET = "application/vnd.jupyter.widget-view+json"
SVG = "image/svg+xml"


def redraw(stem: Path) -> Path:
    """Draws a figure from its saved data as SVG, PDF and PNG; returns the SVG."""
    part = folders.read_json(folders.beside(stem, ".json"))
    data = pd.read_parquet(folders.beside(stem, ".parquet"))
    figure = getattr(plots, part["plot"])(data, **part["options"])
    return plots.save(figure, stem, about=part["about"])[0]


def write_again(folder: Path) -> Path:
    """Draws all figures of a run from their data and writes its report.

    Raises:
        InputError: figures or tables of another run lie there.
    """
    folders.check_one_run(folder)
    for part in folders.read_parts(folder):
        if part["kind"] == "figures":
            redraw(folder / "figures" / part["name"])
    return write_report(folder)


def write_report(folder: Path) -> Path:
    """Writes `report.md` of the run in `folder` from its files."""
    run = folders.check_one_run(folder)
    name = folders.experiment_name(folder, run)
    paragraphs = re.split(r"\n+", run["conclusion"])  # one for each line
    blocks = [f"# Experiment {escape.markdown(title_of(name))}"]
    if run["gates"]:
        blocks.append(_verdicts(run))
    blocks += map(escape.markdown_sentence, filter(None, paragraphs))
    for part in folders.read_parts(folder):
        stem = f"{part['kind']}/{part['name']}"
        if part["kind"] == "figures":
            blocks.append(f"![{_alt(part)}]({_link(stem)}.svg)")
            continue
        data = pd.read_parquet(folders.beside(folder / stem, ".parquet"))
        printed = data.drop(columns=["run_id", "run_ids"], errors="ignore")
        printed = printed.head(SHOWN_ROWS)
        blocks += [escape.markdown_sentence(part["alt"]), markdown_table(printed)]
        if (rest := len(data) - SHOWN_ROWS) > 0:
            link = f"[{escape.markdown(stem)}.parquet]({_link(stem)}.parquet)"
            blocks.append(f"{rest} more rows: {link}.")
    if run["gates"]:
        table = gate_table(gates.Gate(**gate) for gate in run["gates"])
        blocks.append(f"## Gates\n\n{markdown_table(table)}")
    blocks.append(f"## Setup\n\n{_setup(run)}")
    blocks.append(f"## Reproduce\n\n{_reproduce(name, run)}")
    path = folder / folders.REPORT
    write_whole(path, ("\n\n".join(blocks) + "\n").encode())
    return path


def _verdicts(run: Mapping) -> str:
    """Both verdicts of a run in bold."""
    results = [gates.Gate(**gate) for gate in run["gates"]]
    export = gates.verdict(results).replace("_", " ")
    return f"**Export {export}, quality {gates.describe_quality(results)}**"


def _alt(part: Mapping) -> str:
    return escape.markdown(" ".join(part["alt"].split()))


def _link(path: str) -> str:
    """A relative path as the address of a link in Markdown."""
    return re.sub(r"[\s()<>\\%#?\"'*`\[\]&|~$]", _percent, path)


def _percent(character: re.Match) -> str:
    return "".join(f"%{byte:02X}" for byte in character[0].encode())


def _setup(run: Mapping) -> str:
    """Checkpoint, options, machine and versions of a run in sentences."""
    sentences = []
    if source := run.get("checkpoint"):
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
    return " ".join(map(escape.markdown_sentence, sentences))


def _reproduce(name: str, run: Mapping) -> str:
    """The commands that give the run and its report again, and what they need."""
    commands = [run_command(name, run["parameters"]), f"workbench report {name[:2]}"]
    text = "\n".join(commands)
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    blocks = [f"{fence}\n{text}\n{fence}"]
    source = run.get("checkpoint") or {}
    if source.get("label") and run["parameters"].get("CHECKPOINT") == source["label"]:
        sentence = (
            f"In place of {source['label']}, give the folder of the checkpoint "
            f"{source['name']}"
        )
        if source.get("sha256"):
            sentence += " whose SHA-256 is above"
        blocks.append(escape.markdown(f"{sentence}."))
    if fixed := run.get("fixed_parameters"):
        words = "; ".join(f"{key} = {value}" for key, value in fixed.items())
        sentence = f"Set by the notebook alone, since --set has no such type: {words}."
        blocks.append(escape.markdown(sentence))
    return "\n\n".join(blocks)


def run_command(name: str, parameters: Mapping) -> str:
    """The command that repeats a run. It has each parameter, those too that have the
    notebook's present values: the notebook may be edited, or differ elsewhere."""
    words = ["workbench", "run", name[:2]]
    defaults = default_values(name)
    for parameter, value in parameters.items():
        default = defaults.get(parameter, value)
        words += ["--set", f"{parameter}={assigned(value, default)}"]
    return escape.shell(words)


def run_of_notebook(path: Path) -> dict | None:
    """The run that an executed notebook concluded last: its `run_id` and `folder`,
    relative to the checkout; None of a notebook that concluded none."""
    concluded = None
    for cell in nbformat.read(path, as_version=4).cells:
        for output in cell.get("outputs", []):
            concluded = output.get("metadata", {}).get(OUTPUT, concluded)
    return concluded


def executed_copy(folder: Path, run: Mapping) -> Path:
    """The executed notebook of a finished run: the copy in its folder, else the one that
    JupyterLab saved.

    Raises:
        InputError: there is none, or the one that is there ran another run.
    """
    name = folders.experiment_name(folder, run)
    subject = f"page of run {run['run_id']}"
    step = f"run the notebook: workbench run {name[:2]}"
    others = []
    saved = folders.executed_folder() / f"{name}.ipynb"
    for path in (folder / folders.NOTEBOOK, saved):
        if path.is_file():
            concluded = run_of_notebook(path)
            if concluded and concluded["run_id"] == run["run_id"]:
                return path
            run_id = concluded["run_id"] if concluded else "that did not conclude"
            others.append(f"{path} of a run {run_id}")
    actual = ", ".join(others) or "no executed copy of its notebook"
    raise InputError(subject, actual, "the executed copy of that run", step)


def write_html(folder: Path) -> Path:
    """Writes `report.html` of a finished run: its executed notebook as one page without
    code, with the run's id and parameters.

    Raises:
        InputError: see `executed_copy`.
    """
    from nbconvert import HTMLExporter

    run = folders.check_one_run(folder)
    name = folders.experiment_name(folder, run)
    notebook = nbformat.read(executed_copy(folder, run), as_version=4)
    for cell in notebook.cells:
        if "outputs" in cell:
            page_outputs = (_page_output(output) for output in cell.outputs)
            cell.outputs = [output for output in page_outputs if output]
    notebook.cells.insert(1, new_markdown_cell(_about_run(run), id="about-run"))
    notebook.metadata.pop("widgets", None)
    resources = {"metadata": {"name": name}}
    exporter = HTMLExporter(exclude_input=True)
    text, _ = exporter.from_notebook_node(notebook, resources=resources)
    path = folder / folders.PAGE
    if folders.is_shipped(folder):  # git tracks that folder
        path = folders.executed_folder() / f"{name}.html"
    write_whole(path, text.encode())
    return path


def _about_run(run: Mapping) -> str:
    """The run's id and parameters as a table in Markdown."""
    rows = [("run", run["run_id"]), *run["parameters"].items()]
    rows += (run.get("fixed_parameters") or {}).items()
    return markdown_table(
        pd.DataFrame(rows, columns=["parameter", "value"], dtype=object)
    )


def _page_output(output: Mapping) -> Mapping | None:
    """An output as a page shows it: no widget, which needs a kernel, no progress on
    stderr, no path of this machine; a figure with its description."""
    if output.output_type == "stream" and output.name == "stderr":
        return None
    data = output.get("data", {})
    if WIDGET in data:
        return None
    if SVG in data:
        words = output.get("metadata", {}).get(SVG, {}).get("alt", "")
        encoded = base64.b64encode(data[SVG].encode()).decode()
        picture = f'<img alt="{escape.html(words)}" src="data:{SVG};base64,{encoded}">'
        output.data = {"text/html": picture}
        return output
    here = f"{log.project()}/"
    if "text" in output:
        output.text = output.text.replace(here, "")
    for kind, value in data.items():
        if isinstance(value, str):
            data[kind] = value.replace(here, "")
    return output
