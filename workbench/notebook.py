"""Runs a numbered notebook without a browser, in a kernel of its own, and keeps the executed copy in `build/`."""

import json
import re
import tempfile

from workbench import log, report
from workbench.errors import InputError


def run(number: str, parameters: dict | None = None, progress: bool = True) -> dict:
    """Executes the notebook of experiment `number`; a cell that raises ends the run.

    Args:
        parameters: values for names that its cell tagged `parameters` sets; unknown names are refused.

    Returns:
        {experiment, verdict, executed, figures, runs, report}; `runs` are the log rows that are new or shown in a figure.
    """
    import nbclient
    import nbformat
    from tqdm.auto import tqdm
    from traitlets.config import Config

    root = log.default_root()
    name = report.experiment(number).name
    source = log.project(root) / "notebooks" / f"{name}.ipynb"
    if not source.is_file():
        raise InputError(f"notebook {source}", "no such file", "a checkout of this project", "run inside the checkout")
    notebook = nbformat.read(source, as_version=4)
    set_parameters(notebook, parameters or {})
    before = set(log.load("runs", root=root)["run_id"])
    bar = tqdm(total=len(notebook.cells), desc=name, unit="cell", disable=not progress)
    executed = log.project(root) / "build" / "notebooks" / source.name
    executed.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as sockets:  # over TCP, every user of this machine could listen
        kernel = Config(KernelManager={"transport": "ipc", "connection_file": f"{sockets}/kernel.json"})
        client = nbclient.NotebookClient(notebook, config=kernel, timeout=1800, on_cell_complete=lambda **_: bar.update(),
                                         resources={"metadata": {"path": str(source.parent)}})  # fmt: skip
        try:
            client.execute()
        finally:
            bar.close()
            nbformat.write(notebook, executed)
    runs = log.load("runs", root=root)
    new = runs[~runs["run_id"].isin(before) & (runs["experiment"] == number)]
    figures = root.parent / name / "figures"
    shown = {i for sidecar in figures.glob("*.json") for i in json.loads(sidecar.read_text())["run_ids"]}
    return {
        "experiment": name, "verdict": _verdict(runs[runs["experiment"] == number]), "executed": str(executed),
        "figures": sorted(map(str, figures.glob("*.png"))), "runs": sorted(shown | set(new["run_id"])),
        "report": str(report.write(number, root)),
    }  # fmt: skip


def _verdict(runs) -> str:
    """Verdict of the newest judged run of each bundle: RED if any is."""
    judged = (
        runs[runs["verdict"].notna()].sort_values("run_id").groupby(["bundle_hash", "command"], dropna=False).tail(1)["verdict"]
    )
    return "RED" if (judged == "RED").any() else "GREEN" if len(judged) else "not_run"


def set_parameters(notebook, parameters: dict) -> None:
    """Sets names of the notebook's cell tagged `parameters`; unknown names are refused."""
    cell = next((c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])), None)
    known = set(re.findall(r"^(\w+)\s*=", cell.source, re.MULTILINE)) if cell else set()
    unknown = sorted(parameters.keys() - known)
    if unknown:
        raise InputError("notebook parameters", ", ".join(unknown), f"names the notebook sets: {', '.join(sorted(known))}",
                         "correct the name")  # fmt: skip
    if cell and parameters:
        cell.source += "".join(f"\n{name} = {value!r}" for name, value in parameters.items())
