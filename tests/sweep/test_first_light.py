"""First light: grids that any machine can rehearse, whose log another machine takes in."""

import json
import socket
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from workbench import log, sweep
from workbench.sweep.grid import check_sizes
from workbench.sweep.seeded import Noise, first_light

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "34_decode_sweep.ipynb"


@pytest.fixture(scope="module")
def grids(tmp_path_factory):
    return first_light(tmp_path_factory.mktemp("project"))


def test_its_grids_are_ones_that_bundles_can_run(grids):
    for grid in grids:
        check_sizes(list(sweep.cells(grid)))


def test_a_state_is_compared_on_the_cpu_and_the_neural_engine_and_on_all_units(grids):
    units = [set(grid.run.compute_units) for grid in grids if grid.validate_ids]
    assert {"CPU_ONLY", "CPU_AND_NE"} in units and max(map(len, units)) == 4
    assert all("CPU_AND_NE" in each for each in units)


def test_times_are_taken_by_layers_per_shard_and_T_and_in_a_long_run(grids):
    times = [grid for grid in grids if not grid.validate_ids]
    assert any(
        g.run.T == [1, 4] and len(g.export["layers_per_shard"]) > 1 for g in times
    )
    assert any(grid.run.min_seconds == 30 for grid in times)


def test_seeded_values_are_equal_on_every_machine():
    found = Noise(0)((2, 3)).numpy()
    assert found.dtype == np.float32
    assert (found * 1024 / 1.75).round().astype(int).tolist() == SEEDED


SEEDED = [[-869, -796, -412], [-268, 434, 168]]


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

    names = {"experiment": Experiment(), "display": lambda table: None}
    exec(cell, names | {"log": log, "pd": pd, "runs": runs})
    assert sorted(shown[0]["T"]) == [1, 2]
    assert (shown[0]["tokens_per_s"] > 0).all()
