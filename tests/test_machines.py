"""Times belong to one machine and one setting: nothing that shows, ranks, resumes or compares them
mixes two."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from refusal import refused
from synthetic import FAST, FAST_NAME, SLOW, SLOW_NAME, add
from tiny import DATA

from workbench import log, sweep
from workbench.models.checkpoint import Checkpoint
from workbench.sweep import run
from workbench.widgets import Explorer

CHECKPOINT = DATA / "tiny-llama"
HASH = Checkpoint(CHECKPOINT).sha256
GRID = {
    "checkpoint": str(CHECKPOINT),
    "experiment": "34",
    "validate_ids": [1, 4, 69],
    "export": {
        "max_seq_len": [16, 32],
        "tokens": ["1-2"],
        "compress": ["int8-tensor", "fp16"],
    },
    "run": {"T": [1, 2], "n_gen": 4, "repetitions": 3},
}
FEW = GRID | {"export": GRID["export"] | {"max_seq_len": [16]}, "validate_ids": []}
MADE = sweep.make_grid(GRID)
CELLS = list(sweep.cells(MADE))
NAMES = SLOW_NAME, FAST_NAME


def slow_ms(options, run):
    """int8 wins on the slow machine."""
    return (12.0 if options.compress == "fp16" else 9.0) + options.max_seq_len / 16


def fast_ms(options, run):
    """fp16 wins on the fast machine, which is three times as fast."""
    ms = 9.0 if options.compress == "fp16" else 12.0
    return (ms + options.max_seq_len / 16) / 3


def least_ms(options, run):
    """For rows that belong to no reader's grid: a reader that mixes one in ranks it first."""
    return 1e-3


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A log of both machines. Each also has rows that no reader may take for the grid's: of another
    checkpoint of this name, of another option of runs, of an older system, and of a validation on
    another prompt."""
    folder = tmp_path_factory.mktemp("machines") / "experiments" / "log"
    others = [{"precision": ["exact"]}, {"fast": [False]}, {"threads": 2}]
    others += [{"n_gen": 8}, {"depth": [4]}, {"min_seconds": 1}, {"min_tokens": 8}]
    for machine, ms in ((SLOW, slow_ms), (FAST, fast_ms)):
        older = machine | {"software": "23A344, coremltools 9.0"}
        add(folder, GRID, older, least_ms, HASH)
        add(folder, GRID, machine, ms, HASH)
        add(folder, GRID | {"validate_ids": [7, 8]}, machine, ms, HASH)
        add(folder, FEW, machine, least_ms, "0" * 64)
        for options in others:
            grid = FEW | {"run": GRID["run"] | options}
            add(folder, grid, machine, least_ms, HASH)
    return folder


@pytest.fixture
def here(monkeypatch):
    """Puts a machine in the place of this one."""
    return lambda machine: monkeypatch.setattr(log, "identify_machine", lambda: machine)


@pytest.mark.parametrize(
    ("machine", "name", "ms"),
    [(SLOW_NAME, SLOW_NAME, slow_ms), (None, FAST_NAME, fast_ms)],
)
def test_configurations_are_one_machine_s_with_its_own_winner(root, machine, name, ms):
    table = sweep.configurations(MADE, root, machine)
    assert set(table["machine"]) == {name} and (table["n"] == 1).all()
    assert table["run_ids"].str.len().eq(1).all()
    assert len(table) == len(table["name"].unique()) == 8
    rates = [1e3 * row["T"] / ms(row, row) for _, row in table.iterrows()]
    assert np.allclose(table["tokens_per_s"], rates)
    assert table["tokens_per_s"].is_monotonic_decreasing


def test_stored_timings_are_one_machine_s_and_one_setting_s(root):
    tables = sweep.stored_tables(MADE, root, SLOW_NAME)
    for table in ("samples", "layers"):
        frame = tables[table]
        assert set(frame["machine"]) == {SLOW_NAME}
        assert set(frame["checkpoint_hash"]) == {HASH}
        # the newest setting
        assert set(frame["software"]) == {SLOW["software"]}
        for column in ("precision", "fast", "threads", "depth", "n_gen"):
            assert frame[column].nunique(dropna=False) == 1, column
        assert frame["run_id"].nunique() == 8
        assert set(frame["depth"]) == {0}  # by default a cache is empty


def test_fidelity_is_not_split_by_machine(root):
    here, there = (sweep.stored_tables(MADE, root, m)["fidelity"] for m in NAMES)
    pd.testing.assert_frame_equal(here, there)
    assert here["run_id"].nunique() == 4 and set(here["checkpoint_hash"]) == {HASH}
    assert set(here["position"]) == {0, 1, 2}  # of the grid's prompt


def test_the_default_is_this_machine_where_the_log_has_it_else_the_newest_run_s(
    root, here
):
    for machine, name in ((SLOW_NAME, SLOW_NAME), ("another", FAST_NAME)):
        here(SLOW | {"machine": machine})
        assert set(sweep.configurations(MADE, root)["machine"]) == {name}
    with refused("Apple M9.*MacBookAir10,1"):
        sweep.configurations(MADE, root, "Apple M9")


@pytest.mark.parametrize(
    "change", [{"machine": "Apple M2"}, {"software": "24C101, coremltools 9.0"}]
)
def test_a_cell_is_done_only_on_its_machine_with_its_software(root, here, change):
    here(SLOW)
    assert sweep.missing(CELLS, root) == []
    here(SLOW | change)
    assert len(sweep.missing(CELLS, root)) == 8


@pytest.mark.shim
def test_cells_are_done_on_the_runtime_that_auto_means(root, here, monkeypatch):
    here(SLOW)
    for runtime, count in (("stand-in-kill", 8), ("portable", 0)):
        monkeypatch.setenv("WORKBENCH_RUNTIME", runtime)
        assert len(sweep.missing(sweep.cells(MADE), root)) == count


def test_an_invalid_run_is_told_with_its_reason_is_done_and_never_ranks(tmp_path, here):
    reason = "not on the Neural Engine: the plan puts 0 of 40 operations there"
    grid = GRID | {"export": {"max_seq_len": [16]}}
    one, two = (grid | {"run": GRID["run"] | {"T": [T]}} for T in (1, 2))
    add(tmp_path, one, SLOW, slow_ms, HASH)
    add(tmp_path, two, SLOW, least_ms, HASH, status="invalid", reason=reason)
    plan = sweep.make_grid(grid)
    table = log.plain(sweep.configurations(plan, tmp_path))
    assert table["T"].tolist() == [1, 2]
    assert table["tokens_per_s"].is_monotonic_increasing
    assert table["invalid"].tolist() == [None, reason]
    assert sweep.stored_tables(plan, tmp_path)["fidelity"]["run_id"].nunique() == 1
    explorer = Explorer(grid, None, root=tmp_path)
    explorer.axes["T"].value = 2
    assert f"; invalid: {reason}<br>" in explorer.message.value
    assert (
        "Errors: not measured at T = 2; the heatmap shows those at T = 1."
        in explorer.message.value
    )
    here(SLOW)
    assert sweep.missing(sweep.cells(plan), tmp_path) == []
    *_, cell = sweep.cells(plan)
    outcome = run.run_cell(cell, grid=plan, bundles=tmp_path / "bundles", root=tmp_path)
    assert outcome == ("invalid", reason)


def test_two_machines_are_not_compared(root):
    runs = log.load("runs", root).query("software.str.startswith('24B83')")
    ids = [runs.loc[runs["machine"] == name, "run_id"] for name in NAMES]
    slow, fast = (of_one.iloc[-1] for of_one in ids)
    settings, measures, _ = log.compare(slow, fast, root)
    assert set(measures["note"]) == {"two machines"}
    assert measures["ratio"].isna().all()
    assert "machine" in set(settings["setting"])
    _, same, _ = log.compare(slow, ids[0].iloc[-2], root)
    assert "two machines" not in set(same["note"])
    # the same setting on the other machine is no round of it
    assert len(same) and same[["n_a", "n_b"]].isin([1, np.nan]).all(axis=None)


def test_a_checkpoint_that_is_not_at_hand_is_the_newest_of_its_name(tmp_path):
    root, elsewhere = tmp_path / "log", GRID | {"checkpoint": "models/tiny-llama"}
    assert sweep.configurations(MADE, root).empty
    for contents in ("1" * 64, "2" * 64):
        add(root, elsewhere, SLOW, slow_ms, contents)
    tables = sweep.stored_tables(sweep.make_grid(elsewhere), root)
    assert all(set(frame["checkpoint_hash"]) == {"2" * 64} for frame in tables.values())
