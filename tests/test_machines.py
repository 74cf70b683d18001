"""Times belong to one machine and one setting: nothing that shows, ranks, resumes or compares them
mixes two."""

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from synthetic import FAST, FAST_NAME, SLOW, SLOW_NAME, add

from workbench import log, sweep
from workbench.errors import InputError
from workbench.models.checkpoint import Checkpoint
from workbench.widgets import Explorer

CHECKPOINT = Path(__file__).parents[1] / "data" / "tiny-llama"
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
NAMES = [SLOW_NAME, FAST_NAME]


def slow_ms(options, run):
    """int8 wins on the slow machine."""
    return (12.0 if options.compress == "fp16" else 9.0) + options.max_seq_len / 16


def fast_ms(options, run):
    """fp16 wins on the fast machine, which is three times as fast."""
    return (
        (9.0 if options.compress == "fp16" else 12.0) + options.max_seq_len / 16
    ) / 3


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Both machines, and on each of them rows that must not be taken for the grid's: another
    checkpoint of the same name, another precision, the literal graph, another number of threads, an
    older system."""
    folder = tmp_path_factory.mktemp("machines") / "experiments" / "log"
    few = GRID | {"export": GRID["export"] | {"max_seq_len": [16]}, "validate_ids": []}
    for number, (machine, ms) in enumerate(((SLOW, slow_ms), (FAST, fast_ms))):
        mine = {"checkpoint_hash": HASH}
        other = lambda options, run: 1e-3  # noqa: E731  (anything that mixes these in has a winner of its own)
        add(
            folder,
            GRID,
            machine | {"software": "23A344, coremltools 9.0"},
            other,
            number=10 * number,
            **mine,
        )
        add(
            folder,
            few,
            machine,
            other,
            number=10 * number + 1,
            checkpoint_hash="0" * 64,
        )
        for i, run in enumerate(
            (
                {"precision": ["exact"]},
                {"fast": [False]},
                {"threads": 2},
                {"n_gen": 8},
                {"depth": [4]},
            )
        ):
            changed = few | {"run": GRID["run"] | run}
            add(folder, changed, machine, other, number=10 * number + 2 + i, **mine)
        add(folder, GRID, machine, ms, number=10 * number + 9, **mine)
    return folder


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    plt.close("all")


def grid():
    return sweep.make_grid(GRID)


def expected(ms) -> pd.Series:
    """tok/s of every configuration by name."""
    return pd.Series(
        {
            f"max_seq_len {c.options.max_seq_len}, compress {c.options.compress}, T {c.run['T']}": 1e3
            * c.run["T"]
            / ms(c.options, c.run)
            for c in sweep.cells(grid())
        }
    )


@pytest.mark.parametrize(
    ("machine", "name", "ms"),
    [(SLOW_NAME, SLOW_NAME, slow_ms), (None, FAST_NAME, fast_ms)],
)
def test_configurations_are_one_machine_s_with_its_own_winner(root, machine, name, ms):
    found = sweep.configurations(grid(), root, machine)
    assert set(found["machine"]) == {name} and (found["n"] == 1).all()
    pd.testing.assert_series_equal(
        found.set_index("name")["tokens_per_s"].sort_index(),
        expected(ms).sort_index(),
        check_names=False,
    )
    assert found["name"][0] == expected(ms).idxmax()


def test_stored_timings_are_one_machine_s_and_one_setting_s(root):
    found = sweep.stored_tables(grid(), root, SLOW_NAME)
    for table in ("samples", "layers"):
        frame = found[table]
        assert set(frame["machine"]) == {SLOW_NAME}
        assert set(frame["checkpoint_hash"]) == {HASH}
        # the newest setting
        assert table != "samples" or set(frame["software"]) == {SLOW["software"]}
        for column in ("precision", "fast", "threads", "depth", "software", "n_gen"):
            assert frame[column].nunique(dropna=False) == 1, column
        assert frame["run_id"].nunique() == 8


def test_fidelity_is_not_split_by_machine(root):
    here, there = (
        sweep.stored_tables(grid(), root, machine)["fidelity"] for machine in NAMES
    )
    pd.testing.assert_frame_equal(here, there)
    assert here["run_id"].nunique() == 4 and set(here["checkpoint_hash"]) == {HASH}


def test_the_default_is_this_machine_where_the_log_has_it(root, monkeypatch):
    monkeypatch.setattr(log, "environment", lambda: dict(SLOW))
    assert set(sweep.configurations(grid(), root)["machine"]) == {SLOW_NAME}
    monkeypatch.setattr(log, "environment", lambda: SLOW | {"machine": "another"})
    assert set(sweep.configurations(grid(), root)["machine"]) == {FAST_NAME}, (
        "a machine that the log lacks: the newest run's"
    )


def test_a_machine_that_the_log_lacks_is_refused(root):
    with pytest.raises(InputError, match="Apple M9.*MacBookAir10,1"):
        sweep.configurations(grid(), root, "Apple M9")


@pytest.mark.parametrize(
    "change", [{"machine": "Apple M2"}, {"software": "24C101, coremltools 9.0"}]
)
def test_a_cell_is_done_only_on_its_machine_with_its_software(
    root, monkeypatch, change
):
    monkeypatch.setattr(log, "environment", lambda: dict(SLOW))
    assert sweep.missing(grid(), root) == []
    monkeypatch.setattr(log, "environment", lambda: SLOW | change)
    assert len(sweep.missing(grid(), root)) == len(list(sweep.cells(grid())))


def test_the_explorer_shows_the_times_of_one_machine(root, monkeypatch):
    monkeypatch.setattr(log, "environment", lambda: dict(SLOW))
    made = Explorer(GRID, None, root=root)
    made.axes["compress"].value = "fp16"
    made.axes["max_seq_len"].value = 32
    chosen = next(
        c
        for c in sweep.cells(grid())
        if (c.options.compress, c.options.max_seq_len) == ("fp16", 32)
    )
    said = made.message.value
    assert f"{slow_ms(chosen.options, chosen.run) / 4:.3g} ms per layer" in said
    rates = expected(slow_ms)
    assert (
        f"{rates['max_seq_len 32, compress fp16, T 1']:.4g} tokens per second" in said
    )
    assert said.endswith(f"on {SLOW_NAME}")


def test_two_machines_are_not_compared(root):
    found = log.load("runs", root).query("software.str.startswith('24B83')")
    slow, fast = (
        found.loc[found["machine"] == name, "run_id"].iloc[-1] for name in NAMES
    )
    settings, measures, _ = log.compare(slow, fast, root)
    assert set(measures["note"]) == {"two machines"}
    assert measures["ratio"].isna().all()
    assert "machine" in set(settings["setting"])
    _, same, _ = log.compare(
        slow, found.loc[found["machine"] == SLOW_NAME, "run_id"].iloc[-2], root
    )
    assert "two machines" not in set(same["note"])


def test_runs_of_two_machines_do_not_repeat_each_other(tmp_path):
    """The same setting, code and chip: rounds of another machine are no evidence for this one."""
    small = GRID | {
        "validate_ids": [],
        "export": {"max_seq_len": [16], "tokens": ["1-2"]},
        "run": GRID["run"] | {"T": [1, 2]},
    }
    for number in range(3):
        for machine, ms in ((SLOW, slow_ms), (FAST, fast_ms)):
            add(
                tmp_path,
                small,
                machine,
                ms,
                number=2 * number + (machine is FAST),
                checkpoint_hash=HASH,
            )
    found = log.load("runs", tmp_path)
    a, b = (
        found[(found["machine"] == SLOW_NAME) & (found["T"] == 1)]["run_id"].iloc[0],
        found[(found["machine"] == SLOW_NAME) & (found["T"] == 2)]["run_id"].iloc[0],
    )
    _, found, _ = log.compare(a, b, tmp_path)
    assert (found[["n_a", "n_b"]].dropna() <= 3).all(axis=None)


def test_a_log_that_holds_nothing_of_a_grid_gives_empty_tables(tmp_path):
    found = sweep.stored_tables(grid(), tmp_path)
    assert all(
        frame.empty and "machine" in frame
        for name, frame in found.items()
        if name != "fidelity"
    )
    assert sweep.configurations(grid(), tmp_path).empty


def test_a_checkpoint_that_is_not_at_hand_is_the_newest_of_its_name(tmp_path):
    elsewhere = GRID | {
        "checkpoint": "models/tiny-llama",
        "export": {"max_seq_len": [16]},
        "run": GRID["run"] | {"T": [1]},
    }
    for number, contents in enumerate(("1" * 64, "2" * 64)):
        add(
            tmp_path / "log",
            elsewhere,
            SLOW,
            slow_ms,
            number=number,
            checkpoint_hash=contents,
        )
    found = sweep.stored_tables(sweep.make_grid(elsewhere), tmp_path / "log")
    assert all(set(frame["checkpoint_hash"]) == {"2" * 64} for frame in found.values())
