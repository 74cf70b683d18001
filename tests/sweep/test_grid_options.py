"""Every export option and every run option is a column of the log, a setting, and a control or a
name where it varies."""

import os
import re

import pytest
from refusal import refused
from synthetic import SLOW, SLOW_NAME, add
from test_machines import CHECKPOINT, HASH

from workbench import log, sweep
from workbench.bundle import Options
from workbench.exporter import make_options
from workbench.sweep.grid import Run
from workbench.widgets import Explorer

OTHER = {
    "max_seq_len": 32,
    "tokens": "1-2",
    "batch": 2,
    "layers_per_shard": 2,
    "compress": "fp16",
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
RUNTIMES = {
    "runtime": AXES["runtime"],
    "target": ["portable", "other"],
    "compute_units": ["coreml"] * 2,
    "hints": ["coreml"] * 2,
}
"""The runtimes of an axis' two values, where not both are portable."""
pytestmark = pytest.mark.usefixtures("other_target")


def make(**run) -> dict:
    grid = {"checkpoint": str(CHECKPOINT), "validate_ids": [1, 4]}
    return grid | {"export": {"max_seq_len": [16]}, "run": {"n_gen": 4} | run}


def varied(axis: str, *values) -> dict:
    """A grid of an axis with these values."""
    if axis in AXES:
        return make(**{axis: list(values)})
    grid = make()
    return grid | {"export": grid["export"] | {axis: list(values)}}


def test_every_option_has_a_column_and_another_value_here():
    assert list(Options.model_fields) == list(OTHER)
    how_often = {"repetitions", "rounds", "cool_down_s", "timeout_s"}
    run = Run.model_fields.keys() - how_often
    assert run == set(AXES) | {"n_gen", "threads", "min_tokens", "min_seconds"}
    assert set(sweep.RUN_AXES) == set(AXES)
    assert {*OTHER, *run} <= set(log.SETTINGS) <= set(log.SCHEMAS["runs"].names)


@pytest.mark.matrix(4, wide=14)
@pytest.mark.parametrize("axis", [*Options.model_fields, *AXES])
def test_an_option_that_varies_is_told_apart_everywhere(tmp_path, axis):
    root = tmp_path / "experiments" / "log"
    first = 16 if axis == "max_seq_len" else getattr(make_options(), axis, None)
    values = AXES.get(axis) or [first, OTHER[axis]]
    for i, value in enumerate(values):
        runtime = RUNTIMES.get(axis, ["portable"] * 2)[i]
        add(root, varied(axis, value), SLOW, lambda *_, i=i: 1.0 + i, HASH, runtime)
    grid = varied(axis, *values)
    parsed = sweep.make_grid(grid)
    stored = sweep.stored_tables(parsed, root)
    for table in ("samples", "layers"):
        assert stored[table][axis].nunique(dropna=False) == 2
    settings = sweep.configurations(parsed, root)
    assert (settings["n"] == 1).all() and settings["call_ms"].tolist() == [1.0, 2.0]
    assert settings["name"].nunique() == 2 and settings[axis].nunique(dropna=False) == 2
    assert settings["name"].str.contains(f"{axis} ").all()

    explorer = Explorer(grid, None, root=root)
    readings = set()
    for _, value in explorer.axes[axis]._options_full:
        explorer.axes[axis].value = value
        said = explorer.message.value
        assert said.endswith(f"on {SLOW_NAME}")
        rate, ms = re.findall(r"[\d.]+", said)[:2]
        assert float(rate) == 250 * explorer.axes["T"].value / float(ms)
        readings.add(ms)
        assert len(explorer.shown_rows), "fidelity"
    assert readings == {"0.25", "0.5"}


@pytest.mark.parametrize(
    "run", [{"rounds": 10**9}, {"T": [1] * 1000, "depth": [0] * 101}]
)
def test_a_grid_of_more_cells_than_any_sweep_runs_is_refused_before_they_are_listed(
    run,
):
    with refused("at most 100,000 cells"):
        sweep.make_grid(make(**run))


def test_a_grid_s_file_without_an_end_is_refused(tmp_path):
    (tmp_path / "grid.yaml").symlink_to("/dev/zero")
    with refused("found a device"):
        sweep.load_grid(tmp_path / "grid.yaml")
    (tmp_path / "deep.yaml").write_text("[" * 5000)
    with refused("grid .*a YAML file"):
        sweep.load_grid(tmp_path / "deep.yaml")


def test_a_checkpoint_that_changed_within_the_time_of_its_files_has_another_hash(copy):
    """Programs that copy set the time of a file."""
    grid = sweep.make_grid(make() | {"checkpoint": str(copy)})
    first, *_ = sweep.cells(grid)
    path = copy / "config.json"
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_bytes(path.read_bytes().replace(b"{", b"{ ", 1))
    os.utime(path, ns=times)
    second, *_ = sweep.cells(grid)
    assert first.source.checkpoint_hash != second.source.checkpoint_hash
