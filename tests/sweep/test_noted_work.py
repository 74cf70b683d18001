"""A run on a device notes what its program reads and computes, so that a packed log can stand
beside predictions."""

import json

import pytest
from tiny import DATA

from workbench import sweep
from workbench.ane.work import Work, call_work
from workbench.sweep import run


@pytest.mark.shim
@pytest.mark.parametrize("runtime", ["portable", "stand-in"])
def test_a_device_s_run_notes_the_work_of_its_call(llama_bundle, runtime):
    grid = sweep.make_grid(
        {
            "checkpoint": str(DATA / "tiny-llama"),
            "export": {"max_seq_len": [32], "compress": ["fp16"]},
            "run": {"T": [2], "n_gen": 2, "repetitions": 1, "runtime": [runtime]},
        }
    )
    (cell,) = sweep.cells(grid)
    row, _ = run.measure_in_child(cell, grid, llama_bundle.root)
    assert ("work" in row["config"]) == (runtime != "portable")
    if runtime != "portable":
        noted = json.loads(json.dumps(row["config"]["work"]))
        assert Work.from_json(noted) == call_work(llama_bundle, T=2)
