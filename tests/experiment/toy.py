"""A small notebook, and runs of it that are recorded without a kernel."""

import json
from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from workbench import plots
from workbench.check import gates
from workbench.experiment import Experiment

NAME = "07_toy"
PARAMETERS = 'CHECKPOINT = "data/tiny-llama"\nMAX_SEQ_LEN = 64\nT = [1, 4]\nMAX_KL = 0.05\nPROMPT = ""'
BODY = """
import pandas as pd
from workbench import plots
from workbench.check import gates
from workbench.experiment import Experiment

experiment = Experiment("07_toy", globals())
assert MAX_KL > 0
speed = pd.DataFrame({"T": T, "tok/s": [float(MAX_SEQ_LEN)] * len(T)})
display(experiment.figure("speed", plots.bars, speed.set_index("T"), alt="bars of speed"))
experiment.add_gates([gates.quality_at_most("max_kl", 0.01, MAX_KL, "mean KL"), gates.holds("budget", True, "")])
experiment.conclude(f"{MAX_SEQ_LEN} rows.")
"""
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}


def write_notebook(
    checkout: Path, parameters: str = PARAMETERS, body: str = BODY, name: str = NAME
) -> Path:
    """Writes the notebook into a checkout; returns its path."""
    cells = [new_markdown_cell("# 07 · How fast?\n\nAn example.")]
    cells.append(new_code_cell(parameters, metadata={"tags": ["parameters"]}))
    cells.append(new_code_cell(body))
    notebook = new_notebook(cells=cells, metadata={"kernelspec": KERNEL})
    path = checkout / "notebooks" / f"{name}.ipynb"
    path.parent.mkdir(exist_ok=True)
    nbformat.write(notebook, path)
    return path


def names(checkpoint: str = "data/tiny-llama", **more) -> dict:
    """The parameters' values in a kernel."""
    values = {"CHECKPOINT": checkpoint, "MAX_SEQ_LEN": 64, "T": [1, 4], "LIMIT": 2}
    return values | more


def example(checkpoint: str = "data/tiny-llama", **more) -> Experiment:
    """A run with a figure, a table and two gates, before its conclusion."""
    experiment = Experiment(NAME, names(checkpoint, **more))
    data = pd.DataFrame({"ms": [2.0, np.nan], "run_id": ["run-one", "run-two"]})
    experiment.figure(
        "times-1.5", plots.bars, data[["ms"]], alt="bars of ms", title="ms"
    )
    data = pd.concat([data, pd.DataFrame({"T": range(30)})])
    experiment.table("numbers", data, "100 % of numbers_")
    gate = gates.at_most("budget", 7.0, 6.0, "error over what rounding alone causes")
    experiment.add_gates([gates.not_run("device", "needs a Mac"), gate])
    return experiment


def run_of(folder: Path) -> dict:
    """run.json of a run."""
    return json.loads((folder / "run.json").read_text())


def files_of(folder: Path) -> dict[str, bytes]:
    """Contents of all files of a run."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def checkpoint(folder: Path, seed: int = 0) -> Path:
    """A checkpoint's folder as far as its hash reads it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    from safetensors.numpy import save_file

    weights = np.random.default_rng(seed).normal(size=(4, 4)).astype(np.float32)
    save_file({"model.embed_tokens.weight": weights}, folder / "model.safetensors")
    return folder
