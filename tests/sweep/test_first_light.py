"""First light: grids that any machine can rehearse, whose log another machine takes in."""

import json
import socket
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from workbench import log, plots, sweep
from workbench.sweep.grid import check_cells
from workbench.sweep.seeded import first_light, noise

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "34_decode_sweep.ipynb"


@pytest.fixture(scope="module")
def grids(tmp_path_factory):
    return first_light(tmp_path_factory.mktemp("project"))


def test_its_grids_run_and_compare_a_state_on_the_cpu_and_the_neural_engine(grids):
    for grid in grids:
        check_cells(list(sweep.cells(grid)), grid)
    units = [grid.run.compute_units for grid in grids if grid.validate_ids]
    assert ["CPU_ONLY", "CPU_AND_NE"] in units and max(map(len, units)) == 4


def test_seeded_values_are_equal_on_every_machine():
    found = noise(0)((2, 3)).numpy()
    drawn = (found / 12**0.5 + 0.5) * 2**24
    assert found.dtype == np.float32
    assert drawn.round().astype(int).tolist() == [
        [582872, 193722, 10266821],
        [4052523, 6131758, 1869415],
    ]


@pytest.fixture
def packed(swept, tmp_path):
    """The session's sweep as if Core ML had run it, packed."""
    root = tmp_path / "mac"
    for row in log.plain(log.load("runs", swept[0] / "log")).to_dict("records"):
        run_id = row.pop("run_id")
        samples = log.load("samples", swept[0] / "log", {"run_id": run_id})
        log.append("samples", samples, root, run_id)
        row |= {"runtime": "coreml", "compute_units": "CPU_AND_NE"}
        log.append("runs", row, root, run_id)
    log.pack(tmp_path / "log.zip", root)
    return tmp_path / "log.zip"


def test_another_machine_takes_it_in_once_and_the_notebook_shows_it(
    packed, tmp_path, monkeypatch
):
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "workbench"\n')
    monkeypatch.chdir(tmp_path)
    assert [len(log.unpack(packed)) for _ in range(2)] == [2, 0]
    runs, shown = log.load("runs"), []
    text = runs.to_csv() + log.load("samples").to_csv()
    for name in (str(Path.home()), str(tmp_path), "/tmp", socket.gethostname()):
        assert name not in text
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    (cell,) = ("".join(c["source"]) for c in cells if "macs = " in "".join(c["source"]))

    class Experiment:
        def table(self, name, data, caption):
            shown.append(data)

        def figure(self, name, plot, data, alt, about, **options):
            plot(data, **options)

    names = {"experiment": Experiment(), "display": lambda table: None}
    exec(cell, names | {"log": log, "pd": pd, "plots": plots, "runs": runs})
    assert sorted(shown[0]["T"]) == [1, 2]
    assert (shown[0]["tokens_per_s"] > 0).all()
