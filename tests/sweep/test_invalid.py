"""What an invalid run measured is shown, hatched and with its reason, and never ranks."""

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from matplotlib.patches import Patch, Rectangle

from workbench import log, sweep
from workbench.sweep import run

REASON = (
    "not on the Neural Engine: the plan puts 0 of 40 operations there, 40 on the CPU"
)


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def root(swept, tmp_path_factory):
    """The session's sweep in a log of its own: its run at T = 2 is invalid there, and the fastest
    by far."""
    folder, source = tmp_path_factory.mktemp("invalid"), swept[0] / "log"
    runs = log.load("runs", root=source)
    for row in runs.to_dict("records"):
        invalid = row["T"] == 2
        for table in ("samples", "layers", "fidelity"):
            rows = log.load(table, root=source, where={"run_id": [row["run_id"]]})
            if table == "samples" and invalid:
                rows["value"] *= rows["phase"].map({"tokens_per_s": 1e3}).fillna(1e-3)
            if len(rows):
                rows = rows.drop(columns="run_id")
                log.append(table, rows, root=folder, run_id=row["run_id"])
        row |= {"status": "invalid", "reason": REASON} if invalid else {}
        row = {
            name: value
            for name, value in row.items()
            if name != "run_id" and pd.notna(value)
        }
        log.append(
            "runs",
            row,
            root=folder,
            run_id=runs["run_id"][runs["T"] == row["T"]].item(),
        )
    return folder


def bars(ax) -> list[Patch]:
    return [
        patch
        for patch in ax.patches
        if isinstance(patch, Rectangle) and patch.get_hatch()
    ]


def test_an_invalid_configuration_comes_last_and_is_not_chosen(root, grid):
    found = sweep.configurations(sweep.make_grid(grid), root)
    assert (
        found["T"].tolist() == [1, 2] and found["tokens_per_s"].is_monotonic_increasing
    )
    assert (
        found["invalid"].isna().tolist() == [True, False]
        and found["invalid"][1] == REASON
    )


def test_invalid_cells_are_done(root, grid):
    assert sweep.missing(sweep.make_grid(grid), root) == []


def test_a_cell_that_a_dead_worker_logged_as_invalid_stays_invalid(root, grid):
    cell = next(c for c in sweep.cells(sweep.make_grid(grid)) if c.run["T"] == 2)
    assert run.run_unless_done(cell, root=root) == ("invalid", REASON)


@pytest.mark.shim
def test_cells_are_done_on_the_runtime_that_auto_means(root, grid, monkeypatch):
    monkeypatch.setenv("WORKBENCH_RUNTIME", "stand-in-kill")
    assert len(sweep.missing(sweep.make_grid(grid), root)) == 2
    monkeypatch.setenv("WORKBENCH_RUNTIME", "portable")
    assert sweep.missing(sweep.make_grid(grid), root) == []


def test_fidelity_of_an_invalid_run_is_no_verdict(root, grid):
    assert (
        sweep.stored_tables(sweep.make_grid(grid), root)["fidelity"]["run_id"].nunique()
        == 1
    )
