"""Executes a numbered notebook in a kernel of its own and writes the executed copy to
`build/`."""

import re
import tempfile
from pathlib import Path

from miltorch.quiet import hidden
from workbench import log, report
from workbench.errors import InputError


class CellError(RuntimeError):
    """A cell raised another error than InputError. The message names the notebook, the
    number of the cell, the last line of the error, and the executed copy."""


def run_notebook(
    number: str,
    parameters: dict | None = None,
    progress: bool = True,
    publish: bool = False,
) -> dict:
    """Executes the notebook of experiment `number`; a cell that raises ends the run.

    Args:
        parameters: values for names that the cell tagged `parameters` sets; unknown
            names are refused.
        publish: makes the write-up the shipped one (see `report.publish`).

    Returns:
        {experiment, verdict, executed, figures, runs, report}; `runs` are the new log
        rows and those that the report uses, `verdict` is their verdict.

    Raises:
        InputError: a cell raised it.
        CellError: a cell raised another error.
    """
    nbformat = _nbformat()
    root = log.default_root()
    source = _source(number)
    if not source.is_file():
        raise InputError(
            f"notebook {source}",
            "no such file",
            "a checkout of this project",
            "run inside the checkout",
        )
    notebook = nbformat.read(source, as_version=4)
    set_parameters(notebook, parameters or {})
    before = log.load("runs", root)["run_id"]
    copy = Path("build/notebooks", source.name)
    executed = log.project(root) / copy
    executed.parent.mkdir(parents=True, exist_ok=True)
    try:
        _execute(notebook, source, f"(executed copy: {copy})", progress)
    finally:
        nbformat.write(notebook, executed)
    runs = log.load("runs", root, {"experiment": number})
    new = ~runs["run_id"].isin(before)
    own = runs[new & runs["command"].eq(f"notebook {number}")]
    concluded = max(own["run_id"], default=None)
    sources, exhibits = report.behind(number, root, concluded)
    runs = runs[new | runs["run_id"].isin(sources["run_id"])]
    write = report.publish if publish else report.write_report
    path = write(number, root, concluded)
    figures = path.parent / "figures"
    names = [row["name"] for row in exhibits if row["plot"]]
    return {
        "experiment": source.stem,
        "verdict": _verdict(runs),
        "executed": str(executed),
        "figures": sorted(str(figures / f"{name}.png") for name in names),
        "runs": sorted(runs["run_id"]),
        "report": str(path),
    }


def _nbformat():
    """nbformat, imported without the parser of internationalized addresses that its
    schemas could use: building it takes two seconds."""
    with hidden("rfc3987_syntax"):
        import nbformat
    return nbformat


def _source(number: str) -> Path:
    """The notebook of an experiment, which may not exist."""
    folder = log.project() / "notebooks"
    return folder / f"{report.experiment(number).name}.ipynb"


def _execute(notebook, source: Path, copy: str, progress: bool) -> None:
    """Executes the notebook in the folder of `source`; `copy` is the end of an error's
    message."""
    from nbclient import NotebookClient
    from nbclient.exceptions import CellControlSignal, DeadKernelError
    from tqdm.auto import tqdm
    from traitlets.config import Config

    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    code = sum(bool(source.strip()) for source in sources)
    started = []  # cells
    with (
        tqdm(total=code, desc=source.stem, unit="cell", disable=not progress) as bar,
        tempfile.TemporaryDirectory() as sockets,  # TCP ports are open to all users of the machine
    ):
        manager = {"transport": "ipc", "connection_file": f"{sockets}/kernel.json"}
        client = NotebookClient(
            notebook,
            config=Config(KernelManager=manager),
            timeout=1800,
            resources={"metadata": {"path": str(source.parent)}},
            on_cell_execute=lambda cell, **_: started.append(cell),
            on_cell_executed=lambda **_: bar.update(),
        )
        try:
            client.execute()
        except (CellControlSignal, DeadKernelError) as problem:
            where = f"{source.stem}, cell [{len(started)}]"
            raise _failure(problem, where, copy) from None


def _failure(problem: Exception, where: str, copy: str) -> Exception:
    """The InputError that a cell raised, or a CellError with any other error in one
    line."""
    name = getattr(problem, "ename", None)
    text = getattr(problem, "evalue", str(problem))
    if name == "InputError" and (refusal := InputError.from_message(text)):
        return refusal
    lines = text.strip().splitlines() or [""]
    words = lines[0]
    if name:
        words = f"{name}: {lines[-1]}"
    return CellError(f"{where}: {words} {copy}")


def _verdict(runs) -> str:
    """RED if the newest verdict of any bundle is RED, else GREEN, or not_run without
    verdicts."""
    rows = runs.dropna(subset="verdict").sort_values("run_id")
    verdicts = rows.groupby(["bundle_hash", "command"], dropna=False)["verdict"].last()
    if "RED" in set(verdicts):
        return "RED"
    if len(verdicts):
        return "GREEN"
    return "not_run"


def parameter_names(number: str) -> set[str]:
    """The names of a notebook's parameters; none if the notebook does not exist."""
    source = _source(number)
    if source.is_file():
        return _parameters_cell(_nbformat().read(source, 4))[1]
    return set()


def _parameters_cell(notebook) -> tuple:
    """The cell tagged `parameters`, None without one, and the names that it sets."""
    for cell in notebook.cells:
        if "parameters" in cell.metadata.get("tags", []):
            return cell, set(re.findall(r"^(\w+)\s*=", cell.source, re.MULTILINE))
    return None, set()


def set_parameters(notebook, parameters: dict) -> None:
    """Sets names of the notebook's cell tagged `parameters`; unknown names are
    refused."""
    cell, names = _parameters_cell(notebook)
    if unknown := sorted(parameters.keys() - names):
        raise InputError(
            "notebook parameters",
            ", ".join(unknown),
            f"names the notebook sets: {', '.join(sorted(names))}",
            "correct the name",
        )
    for name, value in parameters.items():
        cell.source += f"\n{name} = {value!r}"
