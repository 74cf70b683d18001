"""Times belong to one machine and one setting: nothing that shows, ranks, resumes or compares them
mixes two."""

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from synthetic import FAST, FAST_NAME, SLOW, SLOW_NAME, add

from workbench import log, plots, report, sweep
from workbench.errors import InputError
from workbench.log.machine import machine_name, machine_names, with_machines
from workbench.models.checkpoint import Checkpoint
from workbench.report import writeup
from workbench.studies import conclusions
from workbench.sweep import cell, runs
from workbench.widgets import Compare, Explorer

CHECKPOINT = Path(__file__).parents[1] / "data" / "tiny-llama"
HASH = Checkpoint(CHECKPOINT).sha256
GRID = {
    "checkpoint": str(CHECKPOINT),
    "experiment": "34",
    "validate_ids": [1, 4, 69],
    "export": {
        "max_seq_len": [16, 32],
        "t_max": [2],
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
    for number, (machine, ms) in enumerate(((SLOW, slow_ms), (FAST, fast_ms))):
        mine = {"checkpoint_hash": HASH}
        other = lambda options, run: 1e-3  # noqa: E731  (anything that mixes these in has a winner of its own)
        add(
            folder,
            GRID,
            machine | {"os_build": "23A344"},
            other,
            number=10 * number,
            **mine,
        )
        add(
            folder,
            GRID | {"validate_ids": []},
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
            changed = GRID | {"run": GRID["run"] | run, "validate_ids": []}
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
    [
        (SLOW_NAME, SLOW_NAME, slow_ms),
        (FAST_NAME, FAST_NAME, fast_ms),
        (None, FAST_NAME, fast_ms),
    ],
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
    words = conclusions.choice_conclusion(found)
    assert (
        name in words
        and f"{expected(ms).max():.0f} tok/s" in words
        and found["name"][0] in words
    )


@pytest.mark.parametrize(
    ("machine", "ms"), [(SLOW_NAME, slow_ms), (FAST_NAME, fast_ms)]
)
def test_stored_timings_are_one_machine_s_and_one_setting_s(root, machine, ms):
    found = sweep.stored_tables(grid(), root, machine)
    for table in ("samples", "layers"):
        frame = found[table]
        assert set(frame["machine"]) == {machine} and set(frame["checkpoint_hash"]) == {
            HASH
        }
        for column in ("precision", "fast", "threads", "depth", "os_build", "n_gen"):
            assert frame[column].nunique(dropna=False) == 1, column
        assert frame["run_id"].nunique() == 8
    words = conclusions.speed_conclusion(
        found["samples"].query("phase == 'tokens_per_s' and compress == 'fp16'"),
        found["layers"],
    )
    assert machine in words


def test_fidelity_is_not_split_by_machine(root):
    here, there = (
        sweep.stored_tables(grid(), root, machine)["fidelity"] for machine in NAMES
    )
    pd.testing.assert_frame_equal(here, there)
    assert here["run_id"].nunique() == 4 and set(here["checkpoint_hash"]) == {HASH}


@pytest.mark.parametrize(
    ("machine", "ms"), [(SLOW_NAME, slow_ms), (FAST_NAME, fast_ms)]
)
def test_every_figure_names_its_machine(root, machine, ms):
    found = sweep.stored_tables(grid(), root, machine)
    one = {name: frame[frame["compress"] == "fp16"] for name, frame in found.items()}
    rates, calls = (
        one["samples"][one["samples"]["phase"] == phase]
        for phase in ("tokens_per_s", "call")
    )
    for draw, data in (
        (plots.speed, rates),
        (plots.speed, calls),
        (plots.layer_ms, one["layers"]),
        (plots.speed_against_fidelity, sweep.configurations(grid(), root, machine)),
    ):
        again = report.data_of(report.exhibit("x", data, "caption"))
        for frame in (data, again):  # what is drawn from the log says the same
            ax = draw(frame)
            assert machine in ax.get_title("left"), draw
    lines = {line.get_label(): line for line in plots.speed(rates).containers}
    assert lines["T = 1"][0].get_ydata()[0] == pytest.approx(
        expected(ms)["max_seq_len 16, compress fp16, T 1"]
    )


def test_figures_and_conclusions_refuse_two_machines(root):
    both = {
        t: pd.concat([sweep.stored_tables(grid(), root, m)[t] for m in NAMES])
        for t in ("samples", "layers")
    }
    rates = both["samples"][both["samples"]["phase"] == "tokens_per_s"]
    ranked = pd.concat(
        [sweep.configurations(grid(), root, m) for m in NAMES], ignore_index=True
    )
    for refused in (
        lambda: plots.speed(rates),
        lambda: plots.layer_ms(both["layers"]),
        lambda: plots.speed_against_fidelity(ranked),
        lambda: conclusions.speed_conclusion(rates, both["layers"]),
        lambda: conclusions.choice_conclusion(ranked),
    ):
        with pytest.raises(ValueError, match="machine"):
            refused()


def test_the_default_is_this_machine_where_the_log_has_it(root, monkeypatch):
    monkeypatch.setattr(log, "environment", lambda: dict(SLOW))
    assert set(sweep.configurations(grid(), root)["machine"]) == {SLOW_NAME}
    monkeypatch.setattr(
        log, "environment", lambda: SLOW | {"memory_bytes": (8 << 30) + 4096}
    )
    assert set(sweep.configurations(grid(), root)["machine"]) == {SLOW_NAME}, (
        "memory is rounded to GiB"
    )
    monkeypatch.setattr(log, "environment", lambda: SLOW | {"memory_bytes": 16 << 30})
    assert set(sweep.configurations(grid(), root)["machine"]) == {FAST_NAME}, (
        "a machine that the log lacks: the newest run's"
    )


def test_a_machine_that_the_log_lacks_is_refused(root):
    with pytest.raises(InputError, match="Apple M9.*MacBookAir10,1"):
        sweep.configurations(grid(), root, "Apple M9")


def test_the_newest_setting_is_shown_where_the_software_differs(root):
    assert set(sweep.stored_tables(grid(), root, SLOW_NAME)["samples"]["os_build"]) == {
        "24B83"
    }


@pytest.mark.parametrize(
    "change",
    [
        {"memory_bytes": 16 << 30},
        {"model": "Mac14,2"},
        {"cores": 10},
        {"chip": "Apple M2"},
        {"os_build": "24C101"},
        {"versions": SLOW["versions"] | {"coremltools": "9.1"}},
        {"versions": SLOW["versions"] | {"torch": "2.14.0"}},
    ],
)
def test_a_cell_is_done_only_on_its_machine_with_its_software(
    root, monkeypatch, change
):
    keys = {cell.key(HASH) for cell in sweep.cells(grid())}
    monkeypatch.setattr(log, "environment", lambda: dict(SLOW))
    assert keys <= sweep.done_cells(root)
    monkeypatch.setattr(log, "environment", lambda: SLOW | change)
    assert not keys & sweep.done_cells(root)


def test_a_sweep_on_a_machine_that_the_log_does_not_know_measures_anew(
    tmp_path, monkeypatch
):
    small = GRID | {
        "validate_ids": [],
        "export": {"max_seq_len": [16], "t_max": [2]},
        "run": GRID["run"] | {"T": [1]},
    }
    add(tmp_path / "log", small, SLOW, slow_ms, number=0, checkpoint_hash=HASH)
    measured = []

    def measure(job, function):
        measured.append(job["cell"])
        add(
            tmp_path / "new",
            small,
            log.environment(),
            fast_ms,
            number=1 + len(measured),
            checkpoint_hash=HASH,
        )
        return log.files(tmp_path / "new")

    monkeypatch.setattr(cell, "run_cell", measure)
    for machine, count in ((SLOW, 0), (SLOW | {"memory_bytes": 16 << 30}, 1)):
        monkeypatch.setattr(log, "environment", lambda machine=machine: dict(machine))
        assert (
            sweep.sweep(sweep.make_grid(small), root=tmp_path / "log", progress=False)[
                "resumed"
            ]
            == 1 - count
        )
        assert len(measured) == count


@pytest.mark.parametrize(
    ("machine", "ms"), [(SLOW_NAME, slow_ms), (FAST_NAME, fast_ms)]
)
def test_the_explorer_shows_one_machine_and_offers_the_others(root, machine, ms):
    made = Explorer(GRID, root=root)
    made.check()
    assert (
        list(made.controls["machine"].options) == [FAST_NAME, SLOW_NAME]
        and made.value("machine") == FAST_NAME
    )
    made.controls["machine"].value = machine
    made.controls["bundle"].value = "fp16"
    made.check()
    chosen = next(
        c
        for c in sweep.cells(grid())
        if (c.options.compress, c.options.max_seq_len) == ("fp16", 32)
    )
    assert (
        f"{ms(chosen.options, chosen.run) / 4:.3f} ms per layer" in made.message.value
        and machine in made.message.value
    )
    speed = next(ax for ax in made.figure.axes if ax.get_ylabel() == "tok/s")
    assert machine in speed.get_title("left")
    assert speed.containers[0][0].get_ydata()[-1] == pytest.approx(
        expected(ms)["max_seq_len 32, compress fp16, T 1"]
    )


def test_widgets_refuse_a_machine_that_the_log_lacks(root):
    for widget in (
        lambda: Explorer(GRID, root=root, machine="Apple M9"),
        lambda: Compare("34", root=root, machine="Apple M9"),
    ):
        with pytest.raises(InputError, match="Apple M9"):
            widget()
    assert Explorer(GRID, root=root, machine=SLOW_NAME).value("machine") == SLOW_NAME
    assert Compare("34", root=root, machine=SLOW_NAME).value("machine") == SLOW_NAME


def test_compare_offers_runs_of_one_machine_by_what_differs(root):
    made = Compare("34", root=root)
    made.check()
    assert set(made.controls["machine"].options) == set(NAMES)
    for machine in NAMES:
        made.controls["machine"].value = machine
        made.check()
        labels = [label for label, _ in made.controls["A"].options]
        assert len(labels) == len(set(labels)) == 64
        listed = log.load(
            "runs",
            root,
            {"run_id": [run_id for _, run_id in made.controls["A"].options]},
        )
        assert set(with_machines(listed)["machine"]) == {machine}
        for said in (
            "compress fp16",
            "compress int8-tensor",
            "T 2",
            "precision exact",
            "fast False",
            "threads 2",
            "n_gen 8",
            "depth 4",
            "os_build 23A344",
            "checkpoint_hash 000000",
        ):
            assert any(said in label for label in labels), said
        assert not any("t_max" in label or "batch" in label for label in labels), (
            "what all share is not repeated"
        )


def test_two_machines_are_not_compared(root):
    found = with_machines(
        log.load("runs", root).query("os_build == '24B83'").sort_values("run_id")
    )
    slow, fast = (
        found.loc[found["machine"] == name, "run_id"].iloc[-1] for name in NAMES
    )
    compared = log.compare(slow, fast, root)
    assert (
        set(compared.measures["note"]) == {"two machines"}
        and compared.measures["ratio"].isna().all()
    )
    assert "machine" in set(compared.settings["setting"])
    same = log.compare(
        slow, found.loc[found["machine"] == SLOW_NAME, "run_id"].iloc[-2], root
    )
    assert "two machines" not in set(same.measures["note"])


def test_runs_of_two_machines_do_not_repeat_each_other(tmp_path):
    """The same setting, code and chip: rounds of another machine are no evidence for this one."""
    small = GRID | {
        "validate_ids": [],
        "export": {"max_seq_len": [16], "t_max": [2]},
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
    found = with_machines(log.load("runs", tmp_path))
    a, b = (
        found[(found["machine"] == SLOW_NAME) & (found["T"] == 1)]["run_id"].iloc[0],
        found[(found["machine"] == SLOW_NAME) & (found["T"] == 2)]["run_id"].iloc[0],
    )
    assert (log.compare(a, b, tmp_path).measures[["n_a", "n_b"]].dropna() <= 3).all(
        axis=None
    )


def test_the_report_s_speeds_stand_under_their_machine(root):
    every = with_machines(log.load("runs", root))
    text = writeup._speed(log.load("runs", root), root)
    slow, fast = text.index(SLOW_NAME), text.index(FAST_NAME)
    first, second = sorted((slow, fast))
    parts = {NAMES[slow > fast]: text[first:second], NAMES[slow < fast]: text[second:]}
    for name, part in parts.items():
        others = every[every["machine"] != name]["run_id"]
        assert not [run_id for run_id in others if run_id in part], name


def test_a_grid_of_a_user_has_an_experiment_of_its_own():
    assert sweep.make_grid({"checkpoint": "x"}).experiment == "sweep"


@pytest.mark.parametrize(
    "run",
    [{"chip": None, "model": None, "memory_bytes": None, "cores": None}, {"chip": "x"}],
)
def test_a_machine_of_which_little_is_known_has_a_name(run):
    assert machine_name(run) and "None" not in machine_name(run)


def test_tables_of_one_machine_can_be_asked_for_by_name(root):
    assert machine_names(runs.listing("34", root)) == [FAST_NAME, SLOW_NAME]


def test_a_log_that_holds_nothing_of_a_grid_gives_empty_tables(tmp_path):
    found = sweep.stored_tables(grid(), tmp_path)
    assert all(
        frame.empty and "machine" in frame
        for name, frame in found.items()
        if name != "fidelity"
    )
    assert (
        sweep.configurations(grid(), tmp_path).empty
        and sweep.offered_machines(grid(), tmp_path) == []
    )


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


@pytest.mark.parametrize("draw", [plots.against_peer, plots.ratios])
def test_bars_and_ratios_name_their_machine(draw):
    row = {
        "name": "ms",
        "value": 1.0,
        "unit": "ms",
        "peer": "p",
        "peer_value": 2.0,
        "ratio": 2.0,
        "n": 3,
        "phase": "call",
        "shard": None,
        "T": 1,
        "depth": 0,
        "low": 1.0,
        "high": 3.0,
    }
    data = pd.DataFrame([row, row]).assign(machine=SLOW_NAME)
    figure = draw(data)
    title = (
        figure.get_suptitle()
        if draw is plots.against_peer
        else figure.get_title("left")
    )
    assert SLOW_NAME in title
    with pytest.raises(ValueError, match="machine"):
        draw(data.assign(machine=NAMES))


def test_a_bench_of_routing_names_its_machine():
    rows = [
        {
            "name": name,
            "value": 1.0,
            "unit": "ms",
            "peer": "dense",
            "peer_value": 2.0,
            "ratio": 2.0,
            "n": 1,
        }
        for name in ("moe_ms_per_token", "moe_bytes_per_token")
    ]
    assert set(conclusions.bench_rows(rows, SLOW_NAME)["machine"]) == {SLOW_NAME}
    assert SLOW_NAME in conclusions.moe_conclusion(rows, 16, SLOW_NAME)
