"""Every export option and every run option is a column of the log, a setting, and a control or a
name where it varies."""

import json

import pytest
from synthetic import SLOW, add
from test_machines import CHECKPOINT, HASH

from workbench import log, sweep
from workbench.bundle import Options
from workbench.errors import InputError
from workbench.export import options
from workbench.sweep import identity
from workbench.sweep.grid import Run
from workbench.widgets import Explorer

OTHER = {
    "max_seq_len": 32,
    "tokens": "1-2",
    "batch": 2,
    "layers_per_shard": 2,
    "compress": "int8-tensor",
    "kv_write": "slice",
    "layout": "bc1t",
    "moe": "routed",
    "sliding": "ring",
    "target": "other",
}
"""Of every export option a value that is not its default."""

AXES = {
    "runtime": ["portable", "coreml"],
    "precision": ["declared", "exact"],
    "fast": [True, False],
    "reads": ["used", "all"],
    "compute_units": ["CPU_AND_NE", "CPU_ONLY"],
    "hints": [{}, {"reshapeFrequency": "Infrequent"}],
    "T": [1, 2],
    "depth": [0, 4],
}
ON_CORE_ML = {"compute_units", "hints"}
ON_TARGET = ["portable", "other"]  # what runs bundles of either target


def varied(axis: str) -> dict:
    grid = {
        "checkpoint": str(CHECKPOINT),
        "validate_ids": [1, 4],
        "export": {"max_seq_len": [16]},
        "run": {"n_gen": 4},
    }
    if axis in AXES:
        return grid | {"run": grid["run"] | {axis: AXES[axis]}}
    first = 16 if axis == "max_seq_len" else getattr(options(), axis)
    return grid | {"export": grid["export"] | {axis: [first, OTHER[axis]]}}


def ms(options, run) -> float:
    """Different for both values of whichever axis varies."""
    return 1.0 + int(
        json.dumps([options.model_dump(), run], default=str, sort_keys=True)
        != FIRST.setdefault(
            "first",
            json.dumps([options.model_dump(), run], default=str, sort_keys=True),
        )
    )


FIRST: dict = {}
pytestmark = pytest.mark.usefixtures("other_target")


def test_every_option_has_a_column_and_another_value_here():
    assert identity.OPTIONS == tuple(Options.model_fields) and set(OTHER) == set(
        Options.model_fields
    )
    # how often, not how
    run = Run.model_fields.keys() - {
        "repetitions",
        "rounds",
        "cool_down_s",
        "timeout_s",
    }
    assert run == set(AXES) | {"n_gen", "threads", "min_tokens", "min_seconds"} and set(
        sweep.RUN_AXES
    ) == set(AXES)
    assert {*identity.OPTIONS, *run} <= set(log.SCHEMAS["runs"].names)


@pytest.mark.matrix(8)
@pytest.mark.parametrize("axis", [*Options.model_fields, *AXES])
def test_an_option_that_varies_is_told_apart_everywhere(tmp_path, axis):
    grid, root = varied(axis), tmp_path / "experiments" / "log"
    FIRST.clear()
    if axis in ("runtime", "target"):
        for i, runtime in enumerate(
            AXES["runtime"] if axis == "runtime" else ON_TARGET
        ):
            part = grid | {"run": grid["run"] | {"runtime": [runtime]}}
            if axis == "target":
                part = grid | {
                    "export": grid["export"] | {"target": [grid["export"][axis][i]]}
                }
            add(
                root,
                part,
                SLOW,
                lambda o, r, i=i: 1.0 + i,
                number=i,
                checkpoint_hash=HASH,
                runtime=runtime,
            )
    else:
        add(
            root,
            grid,
            SLOW,
            ms,
            number=0,
            checkpoint_hash=HASH,
            runtime="coreml" if axis in ON_CORE_ML else "portable",
        )
    made = sweep.make_grid(grid)
    stored = sweep.stored_tables(made, root)
    for table in ("samples", "layers"):
        assert stored[table][axis].nunique(dropna=False) == 2
    found = sweep.configurations(made, root)
    assert (
        len(found) == 2
        and (found["n"] == 1).all()
        and found["call_ms"].tolist() == [1.0, 2.0]
    )
    assert (
        found["name"].nunique() == 2
        and found["name"].str.contains(f"{axis} ").all()
        and found[axis].nunique(dropna=False) == 2
    )
    assert found["worst_cosine"].notna().all() and (found["verdict"] == "GREEN").all()

    explorer = Explorer(grid, root=root)
    explorer.check()
    control = explorer.axes[axis]
    shown = set()
    for _, value in control._options_full:
        control.value = value
        explorer.check()
        shown.add(explorer.message.value)
        assert len(explorer.shown), "fidelity"
    assert {text.split(" ms per layer")[0].rsplit(" ", 1)[-1] for text in shown} == {
        "0.25",
        "0.5",
    }, shown


@pytest.mark.parametrize("option", ["threads", "n_gen"])
def test_an_option_that_a_grid_takes_once_is_a_setting(tmp_path, option):
    one = {
        "checkpoint": str(CHECKPOINT),
        "export": {"max_seq_len": [16]},
        "run": {"n_gen": 4},
    }
    two = one | {"run": one["run"] | {option: 2}}
    for i, grid in enumerate((one, two)):
        add(
            tmp_path,
            grid,
            SLOW,
            lambda o, r, i=i: 1.0 + i,
            number=i,
            checkpoint_hash=HASH,
        )
    for i, grid in enumerate((one, two)):
        found = sweep.configurations(sweep.make_grid(grid), tmp_path)
        assert found["call_ms"].tolist() == [1.0 + i] and found["n"].tolist() == [1]


def test_a_decoder_s_row_has_every_option(exports):
    from workbench import Decoder

    bundle = exports.bundle(exports.checkpoint("llama"), tokens="2")
    row = identity.describe(Decoder(bundle, "portable", fast=True))
    assert (
        row["tokens"] == "2"
        and row["sliding"] == "mask"
        and set(identity.OPTIONS) <= set(row)
        and row["hints"] is None
    )
    cell = next(
        sweep.cells(
            sweep.make_grid(
                {"checkpoint": "x", "export": {"tokens": ["2"], "max_seq_len": [32]}}
            )
        )
    )
    how = cell.columns("portable")
    names = [*identity.OPTIONS, "runtime", "precision", "fast", "reads"]
    assert [row[name] for name in names] == [how[name] for name in names]


def test_a_sweep_logs_the_columns_by_which_it_is_found(swept, grid):
    rows = log.load("runs", swept[0] / "log")
    for cell in sweep.cells(sweep.make_grid(grid)):
        columns = cell.columns("portable")
        (row,) = log.plain(rows[rows["setting"] == columns["setting"]]).to_dict(
            "records"
        )
        assert {name: row[name] for name in columns} == columns
    assert set(rows["machine"]) == {log.environment()["machine"]}


def test_a_long_run_is_a_setting_of_its_own_and_a_short_one_is_what_it_was():
    (short,) = sweep.cells(make({"n_gen": 4}))
    (long,) = sweep.cells(make({"n_gen": 4, "min_seconds": 60, "min_tokens": 1024}))
    assert (
        "min_seconds" not in short.run
        and short.columns("portable")["min_seconds"] is None
    )
    assert long.columns("portable")["min_seconds"] == 60
    assert long.columns()["setting"] != short.columns()["setting"]


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ({"min_seconds": 60, "timeout_s": 60}, "below timeout_s"),
        ({"min_seconds": 0}, "min_seconds"),
        ({"min_tokens": 0}, "min_tokens"),
    ],
)
def test_a_length_that_no_run_can_have_is_refused(run, words):
    with pytest.raises(InputError, match=words):
        make(run)


def make(run: dict) -> sweep.grid.Grid:
    return sweep.make_grid({"checkpoint": str(CHECKPOINT), "run": run})
