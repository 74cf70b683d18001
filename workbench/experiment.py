"""A numbered experiment: its notebook shows figures and tables, which are files at
once, and its last cell logs one row and writes the report.

A run is a folder, `build/experiments/NN_slug/CHECKPOINT`: ``figures/NAME.json`` and
``.parquet`` are a figure's options and data, from which ``.svg``, ``.pdf`` and ``.png``
are drawn; ``tables/NAME.parquet`` and ``.tex``; ``run.json`` has verdict, gates and the
ids of all runs behind the figures; ``report.md`` is written from these files alone."""

import ast
import json
import re
import shlex
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import nbformat
import pandas as pd
from IPython.display import SVG
from pandas.io.formats.style import Styler

from workbench import log, plots
from workbench.check import gates
from workbench.decode import Decoder
from workbench.errors import InputError
from workbench.log.anonymous import anonymous
from workbench.sweep import identity

SHOWN_ROWS = 20  # of a table in the report
SIGNS = {"RED": "✗ RED", "GREEN": "✓ GREEN", "not_run": "– not run"}


class Experiment:
    """One run of a numbered notebook.

    Args:
        name: of the notebook and of the folder, such as ``05_stateful_kv_cache``.
        names: `globals()` of the notebook, which has its parameters.

    Its folder (see `run_folder`) is emptied at once, before anything has run.
    """

    def __init__(self, name: str, names: Mapping):
        self.name = name
        known = notebook_parameters(name[:2])
        self.parameters = {key: names[key] for key in known if key in names}
        self.folder = run_folder(name, self.parameters)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.gates: list[gates.Gate] = []

    def figure(
        self,
        name: str,
        draw,
        data: pd.DataFrame,
        *,
        alt: str,
        about: str = "",
        **options,
    ) -> SVG:
        """Saves the data, draws the figure from the saved file, and shows it.

        Args:
            draw: a function of `workbench.plots`; `options` are its keywords.
            alt: a description for readers who cannot see the figure.
            about: checkpoint, options and machine of the data.
        """
        if draw.__name__ not in plots.__all__:
            raise ValueError(f"{draw.__name__} is no function of workbench.plots")
        how = {"plot": draw.__name__, "about": about, "options": options}
        stem = self._write("figures", name, data, alt, **how)
        return SVG(filename=str(redraw(stem)))

    def table(self, name: str, data: pd.DataFrame, caption: str) -> Styler:
        """Saves a table as Parquet and LaTeX, and shows it."""
        stem = self._write("tables", name, data, caption)
        text = data.to_latex(
            index=False,
            escape=True,
            na_rep="--",
            float_format="%.4g",
            caption=re.sub(r"([&%$#_{}])", r"\\\1", caption),
            label=f"tab:{self.name[:2]}-{name}",
        )
        _beside(stem, ".tex").write_text(text)
        return show(data).set_caption(caption)

    def _write(self, kind: str, name: str, data: pd.DataFrame, alt: str, **how) -> Path:
        """Writes the data and the description of a figure or table; returns the path
        without an ending."""
        place = len(_parts(self.folder))
        stem = self.folder / kind / name
        stem.parent.mkdir(parents=True, exist_ok=True)
        data.to_parquet(_beside(stem, ".parquet"))
        rows = data.get("run_ids", data.get("run_id", pd.Series()))
        part = {"kind": kind, "name": name, "place": place, "alt": alt, **how}
        part["run_ids"] = sorted(set(rows.explode().dropna()))
        text = json.dumps(part, indent=1, default=lambda array: array.tolist())
        _beside(stem, ".json").write_text(text)
        return stem

    def add_gates(self, results: Iterable[gates.Gate]) -> Styler:
        """Adds gates to the verdict and shows them, RED first."""
        results = list(results)
        self.gates += results
        return show(gate_table(results))

    def conclude(self, words: str, decoder: Decoder | None = None, **tables) -> None:
        """Logs the run as one row with its `tables` (`fidelity`, `samples`, `layers`),
        writes the report and prints verdict, `words` and the report's path."""
        verdict = gates.verdict(self.gates) if self.gates else None
        config = {
            "parameters": self.parameters,
            "conclusion": words,
            "gates": [gate.json() for gate in self.gates],
        }
        config = json.loads(json.dumps(config, default=str))
        number = self.name[:2]
        row = {"command": f"notebook {number}", "experiment": number}
        row |= {"verdict": verdict, "config": config}
        if decoder:
            row |= identity.describe(decoder)
        run_id = log.record(row, **tables)
        run_ids = {run_id}.union(*(part["run_ids"] for part in _parts(self.folder)))
        run = {"run_id": run_id, "verdict": verdict, "run_ids": sorted(run_ids)}
        run |= config | {"environment": log.environment()}
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(run, indent=1, default=str, ensure_ascii=False)
        (self.folder / "run.json").write_text(text)
        report = write_report(self.folder)
        print(verdict or "no gates", words, f"report: {report}", sep="\n\n")


def _beside(stem: Path, ending: str) -> Path:
    """The path with an ending, whatever dots the name of a figure or table has."""
    return stem.with_name(stem.name + ending)


def _parts(folder: Path) -> list[dict]:
    """Figures and tables of a run in the order in which they were made."""
    parts = [json.loads(path.read_text()) for path in folder.glob("*/*.json")]
    return sorted(parts, key=lambda part: part["place"])


def _run_of(folder: Path) -> dict:
    return json.loads((folder / "run.json").read_text(encoding="utf-8"))


def run_folder(name: str, parameters: Mapping) -> Path:
    """The folder of a notebook's run: `build/experiments/NN_slug/CHECKPOINT`; `run` for
    a checkpoint without a name, such as `.` and `..`."""
    checkpoint = Path(str(parameters.get("CHECKPOINT", ""))).name.strip(".")
    return log.project() / "build" / "experiments" / name / (checkpoint or "run")


def redraw(stem: Path) -> Path:
    """Draws a figure from its saved data as SVG, PDF and PNG; returns the SVG."""
    part = json.loads(_beside(stem, ".json").read_text())
    data = pd.read_parquet(_beside(stem, ".parquet"))
    figure = getattr(plots, part["plot"])(data, **part["options"])
    return plots.save(figure, stem, about=part["about"])[0]


def show(table: pd.DataFrame) -> Styler:
    """A table for display: text to the left and wrapped, numbers with four digits,
    nulls as –."""

    def digits(value):
        return f"{value:.4g}" if isinstance(value, float) else value

    texts = list(table.select_dtypes(exclude="number").columns)
    look = table.style.format(digits, na_rep="–").hide(axis="index")
    wrapped = {"text-align": "left", "white-space": "normal", "max-width": "44em"}
    return look.set_properties(subset=texts, **wrapped)


def gate_table(results: Iterable[gates.Gate]) -> pd.DataFrame:
    """Gates, RED first: gate, verdict with a sign, value, limit, reason."""
    rows = [gate.json() for gate in results]
    rows.sort(key=lambda row: [*SIGNS].index(row["verdict"]))
    columns = ["name", "verdict", "value", "threshold", "reason"]
    table = pd.DataFrame(rows, columns=columns)
    table["verdict"] = table["verdict"].map(SIGNS)
    return table.rename(columns={"name": "gate", "threshold": "limit"})


def last_run(number: str) -> Path:
    """The folder of an experiment's newest run below `build/experiments`, else of the
    shipped one.

    Raises:
        InputError: there is no finished run.
    """
    number = number.zfill(2)
    runs = (log.project() / "build" / "experiments").glob(f"{number}_*/*/run.json")
    shipped = (log.project() / "experiments").glob(f"{number}_*/run.json")
    newest = sorted(runs, key=lambda path: path.stat().st_mtime) or list(shipped)
    if not newest:
        step = f"run the notebook: workbench run {number}"
        raise InputError(f"experiment {number}", "no finished run", "one", step)
    return newest[-1].parent


def write_again(folder: Path) -> Path:
    """Draws all figures of a run from their data and writes its report."""
    for part in _parts(folder):
        if part["kind"] == "figures":
            redraw(folder / "figures" / part["name"])
    return write_report(folder)


def write_report(folder: Path) -> Path:
    """Writes `report.md` of the run in `folder` from its files."""
    run = _run_of(folder)
    # a checkpoint may be named like an experiment
    name = folder.parent.name
    if not re.match(r"\d\d_", name):
        name = folder.name
    title = name
    if (source := notebook_path(name[:2])).is_file():
        title = _cells(source)[0].source.partition("\n")[0].lstrip("# ")
    conclusion = re.sub(r"\n+", "\n\n", run["conclusion"])  # a paragraph for each line
    parts = [f"# Experiment {title}", conclusion]
    for part in _parts(folder):
        stem = f"{part['kind']}/{part['name']}"
        if part["kind"] == "figures":
            parts.append(f"![{part['alt']}]({stem}.svg)")
            continue
        data = pd.read_parquet(folder / f"{stem}.parquet")
        shown = data.drop(columns=["run_id", "run_ids"], errors="ignore")
        shown = shown.head(SHOWN_ROWS)
        parts += [part["alt"], _markdown(shown)]
        if (rest := len(data) - SHOWN_ROWS) > 0:
            parts.append(f"{rest} more rows: [{stem}.parquet]({stem}.parquet).")
    if run["gates"]:
        table = gate_table(gates.Gate(**gate) for gate in run["gates"])
        parts.append(f"## Gates\n\n{_markdown(table)}")
    machine = run["environment"]
    versions = ", ".join(f"{key} {value}" for key, value in machine["versions"].items())
    parts.append(
        f"## Setup\n\n{machine['machine']}, {machine['platform']}; {versions}. Log row "
        f"{run['run_id']}; `run.json` names the rows behind the figures."
    )
    command = _command(name[:2], run["parameters"])
    parts.append(f"## Reproduce\n\n```\n{command}\nworkbench report {name[:2]}\n```")
    path = folder / "report.md"
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return path


def _markdown(table: pd.DataFrame) -> str:
    """A table with four digits and nulls as –."""
    how = {"index": False, "floatfmt": ".4g", "missingval": "–"}
    return log.plain(table).to_markdown(**how)


def _command(number: str, parameters: Mapping) -> str:
    """The command that repeats a run: the parameters that are not the notebook's own."""
    words = ["workbench", "run", number]
    defaults = notebook_parameters(number)
    for name, value in parameters.items():
        if name not in defaults or value != defaults[name]:
            text = value if isinstance(value, str) else json.dumps(value)
            words += ["--set", f"{name}={text}"]
    return shlex.join(words)


def notebook_path(number: str) -> Path:
    """The notebook of an experiment, which may not exist."""
    folder = log.project() / "notebooks"
    number = number.zfill(2)
    return next(folder.glob(f"{number}_*.ipynb"), folder / f"{number}.ipynb")


def _cells(source: Path) -> list:
    return nbformat.read(source, as_version=4).cells


def notebook_parameters(number: str) -> dict:
    """Names and values that the cell tagged `parameters` of an experiment's notebook
    sets; none if there is no such notebook."""
    source = notebook_path(number)
    cells = _cells(source) if source.is_file() else []
    tagged = [cell for cell in cells if "parameters" in cell.metadata.get("tags", [])]
    lines = ast.parse("\n".join(cell.source for cell in tagged)).body
    return {line.targets[0].id: ast.literal_eval(line.value) for line in lines}


def run_notebook(
    number: str,
    parameters: Mapping | None = None,
    *,
    publish: bool = False,
    progress: bool = True,
) -> dict:
    """Executes a numbered notebook in a kernel of its own.

    Args:
        parameters: values for names that the cell tagged `parameters` sets.
        publish: makes the run the shipped one (see `publish_run`).

    Returns:
        {experiment, verdict, conclusion, executed, figures, runs, report}; `figures`
        are {path, alt} in the order of the notebook.

    Raises:
        InputError: unknown notebook or parameter, no cell that concludes, or a cell
            raised it.
        CellError: a cell raised another error, or the kernel failed.
    """
    from workbench import kernel

    source = notebook_path(number)
    if not source.is_file():
        known = sorted(path.name[:2] for path in source.parent.glob("[0-9]*.ipynb"))
        step = "name one of these, inside a checkout of this project"
        raise InputError(
            f"experiment {number}", "no such notebook", f"one of {known}", step
        )
    parameters = dict(parameters or {})
    defaults = notebook_parameters(number)
    if unknown := parameters.keys() - defaults.keys():
        subject = f"notebook {source.stem}, parameters"
        needed = f"some of {', '.join(sorted(defaults))}"
        raise InputError(subject, ", ".join(unknown), needed, "correct the name")
    copy = log.project() / "build" / "notebooks" / source.name
    copy.parent.mkdir(parents=True, exist_ok=True)
    kernel.execute(source, copy, parameters, progress=progress)
    folder = run_folder(source.stem, defaults | parameters)
    if not (folder / "run.json").is_file():
        needed = f"a cell that concludes Experiment({source.stem!r}, globals())"
        step = "end the notebook with experiment.conclude(words)"
        raise InputError(f"notebook {source.stem}", "no conclusion", needed, step)
    if publish:
        folder = publish_run(folder)
    run = _run_of(folder)
    figures = [
        {"path": str(folder / "figures" / f"{part['name']}.png"), "alt": part["alt"]}
        for part in _parts(folder)
        if part["kind"] == "figures"
    ]
    return {
        "experiment": source.stem,
        "verdict": run["verdict"] or gates.NOT_RUN,
        "conclusion": run["conclusion"],
        "executed": str(copy),
        "figures": figures,
        "runs": run["run_ids"],
        "report": str(folder / "report.md"),
    }


def write_html(number: str) -> Path:
    """One HTML page of the executed copy of a notebook, without its code."""
    from nbconvert import HTMLExporter

    notebook = log.project() / "build" / "notebooks" / notebook_path(number).name
    if not notebook.is_file():
        step = f"run the notebook: workbench run {number}"
        raise InputError(f"{notebook}", "no executed copy", "one", step)
    text, _ = HTMLExporter(exclude_input=True).from_filename(str(notebook))
    path = notebook.with_suffix(".html")
    path.write_text(text, encoding="utf-8")
    return path


def publish_run(folder: Path) -> Path:
    """Makes the run in `folder` the shipped one: its files go to `experiments/NN_slug`,
    its log rows to the shipped log, from which the rows go that no shipped run uses.

    Absolute paths are shortened. Returns the shipped folder.

    Args:
        folder: of a run below `build/experiments`.

    Raises:
        InputError: it is the shipped run.
    """
    if folder.parent.name == "experiments":
        step = f"run: workbench run {folder.name[:2]} --publish"
        raise InputError(folder.name, "the shipped run", "a run of your own", step)
    run = anonymous(_run_of(folder))
    target = log.project() / "experiments" / folder.parent.name
    for kind in ("figures", "tables"):
        shutil.rmtree(target / kind, ignore_errors=True)
        if (folder / kind).is_dir():
            shutil.copytree(folder / kind, target / kind)
    target.mkdir(parents=True, exist_ok=True)
    text = json.dumps(run, indent=1, ensure_ascii=False).replace("…/", "/path/to/")
    (target / "run.json").write_text(text, encoding="utf-8")
    _ship_rows(run["run_ids"], folder.parent.name[:2])
    return write_report(target).parent


def _ship_rows(run_ids: Iterable[str], number: str) -> None:
    """Copies the files of these runs to the shipped log, and removes an experiment's
    runs from it that no shipped `run.json` names."""
    whole = log.default_root()
    shipped = whole / log.SHIPPED
    for run_id in run_ids:
        for path in whole.glob(f"*/{run_id}.parquet"):
            table = shipped / path.parent.name
            table.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, table)
    unused = set(log.load("runs", shipped, {"experiment": number})["run_id"])
    for path in whole.parent.glob("*/run.json"):
        unused -= set(_run_of(path.parent)["run_ids"])
    for run_id in unused:
        for path in shipped.glob(f"*/{run_id}.parquet"):
            path.unlink()
