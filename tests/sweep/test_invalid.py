"""What an invalid run measured is shown, hatched and with its reason, and never ranks."""

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from matplotlib.patches import Patch, Rectangle

from workbench import log, plots, sweep
from workbench.studies import conclusions

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
    words = conclusions.choice_conclusion(found.assign(verdict="GREEN"))
    assert "Fastest of 1 configurations that pass (of 1)" in words and "T 1" in words
    ax = plots.speed_against_fidelity(found.assign(verdict="GREEN"))
    points = {line.get_label(): line.get_ydata().tolist() for line in ax.lines}
    fastest = found["tokens_per_s"][0]
    names = ("GREEN", "best that pass", "fastest that passes")
    assert points == {name: [fastest] for name in names}
    (hatched,) = (c for c in ax.collections if c.get_hatch())
    assert hatched.get_offsets()[0, 1] == found["tokens_per_s"][1]
    assert "invalid: not on the Neural Engine" in ax.get_xlabel().replace("\n", " ")


def test_invalid_speeds_are_hatched_and_no_part_of_a_line(root, grid):
    tables = sweep.stored_tables(sweep.make_grid(grid), root)
    rates = tables["samples"].query("phase == 'tokens_per_s'")
    ax = plots.speed(rates)
    assert [
        c.get_label() for c in ax.containers if c.get_label().startswith("T =")
    ] == ["T = 1"]
    (bar,) = bars(ax)
    assert bar.get_height() == rates.loc[rates["T"] == 2, "value"].median()
    assert REASON in ax.get_xlabel().replace("\n", " ")
    words = conclusions.speed_conclusion(rates, tables["layers"])
    assert "T = 1" in words and "T = 2" not in words
    only = conclusions.speed_conclusion(rates[rates["T"] == 2], tables["layers"])
    assert only.startswith("No valid run on") and REASON in only


def test_invalid_layer_times_are_hatched_cells(root, grid):
    layers = sweep.stored_tables(sweep.make_grid(grid), root)["layers"]
    ax = plots.layer_ms(layers)
    (cell,) = bars(ax)
    assert cell.get_xy() == (0, 1) and len(ax.texts) == 1
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["invalid"]
    assert REASON in ax.get_xlabel().replace("\n", " ")
    valid = layers[layers["T"] == 1]
    assert plots.layer_ms(valid).get_legend() is None
    assert len(bars(plots.layer_ms(layers[layers["T"] == 2]))) == 1


def test_invalid_cells_are_done(root, grid):
    assert cell_keys(root, grid) == sweep.done_cells(root)


@pytest.mark.shim
def test_cells_are_done_on_the_runtime_that_auto_means(root, grid, monkeypatch):
    monkeypatch.setenv("WORKBENCH_RUNTIME", "stand-in:kill")
    assert not sweep.done_cells(root)
    monkeypatch.setenv("WORKBENCH_RUNTIME", "portable")
    assert sweep.done_cells(root) == cell_keys(root, grid)


def cell_keys(root, grid) -> set[str]:
    checkpoint_hash = log.load("runs", root=root)["checkpoint_hash"][0]
    return {cell.key(checkpoint_hash) for cell in sweep.cells(sweep.make_grid(grid))}


def test_fidelity_of_an_invalid_run_is_no_verdict(root, grid):
    assert (
        sweep.stored_tables(sweep.make_grid(grid), root)["fidelity"]["run_id"].nunique()
        == 1
    )
