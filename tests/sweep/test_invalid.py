"""What an invalid run measured is told with its reason, is not measured again, and never ranks."""

import pytest

from workbench import log, sweep
from workbench.sweep import run

REASON = "not on the Neural Engine: the plan puts 0 of 40 operations there"


@pytest.fixture(scope="module")
def root(swept, tmp_path_factory):
    """The session's sweep in a log of its own: its run at T = 2 is invalid there, and the fastest
    by far."""
    folder, source = tmp_path_factory.mktemp("invalid"), swept[0] / "log"
    for row in log.plain(log.load("runs", source)).to_dict("records"):
        run_id = row["run_id"]
        for table in ("samples", "layers", "fidelity"):
            rows = log.load(table, source, {"run_id": run_id})
            if len(rows):
                log.append(table, rows, folder, run_id)
        if row["T"] == 2:
            row |= {"status": "invalid", "reason": REASON, "tokens_per_s": 1e9}
        log.append("runs", row, folder, run_id)
    return folder


def test_an_invalid_configuration_comes_last_and_is_no_verdict(root, grid):
    made = sweep.make_grid(grid)
    found = sweep.configurations(made, root)
    assert found["T"].tolist() == [1, 2]
    assert found["tokens_per_s"].is_monotonic_increasing
    assert found["invalid"].isna().tolist() == [True, False]
    assert found["invalid"][1] == REASON
    assert sweep.stored_tables(made, root)["fidelity"]["run_id"].nunique() == 1


def test_invalid_cells_are_done_and_stay_invalid_on_a_worker(root, grid):
    made = sweep.make_grid(grid)
    assert sweep.missing(made, root) == []
    (cell,) = (cell for cell in sweep.cells(made) if cell.run["T"] == 2)
    assert run.run_unless_done(cell, root=root) == ("invalid", REASON)


@pytest.mark.shim
def test_cells_are_done_on_the_runtime_that_auto_means(root, grid, monkeypatch):
    for runtime, count in (("stand-in-kill", 2), ("portable", 0)):
        monkeypatch.setenv("WORKBENCH_RUNTIME", runtime)
        assert len(sweep.missing(sweep.make_grid(grid), root)) == count
