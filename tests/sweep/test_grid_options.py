"""Every export option and every run option is a column of the log, a setting, and a control or a
name where it varies."""

import os
import re

import pytest
from refusal import refused
from synthetic import LAYER_SHARE, SLOW, SLOW_NAME, add
from test_machines import CHECKPOINT, HASH

from workbench import log, sweep
from workbench.bundle import Options
from workbench.exporter import make_options
from workbench.sweep.grid import Run
from workbench.widgets import Explorer

OTHER_VALUES = {
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
"""Every export option → a value that is not its default. The fixture `other_target` makes the target
`other`."""
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
"""Axis → the runtimes with which its first and its second value are logged; those of other axes are
logged with `portable`."""
CALL_MS = 1.0, 2.0
"""The logged times of a call with the two values of an axis."""
pytestmark = pytest.mark.usefixtures("other_target")


def make_fields(**run) -> dict:
    """The fields of a grid of one bundle, with these fields under `run`."""
    grid = {"checkpoint": str(CHECKPOINT), "validate_ids": [1, 4]}
    return grid | {"export": {"max_seq_len": [16]}, "run": {"n_gen": 4} | run}


def vary(axis: str, *values) -> dict:
    """The fields of a grid in which an axis has these values."""
    if axis in AXES:
        return make_fields(**{axis: list(values)})
    grid = make_fields()
    return grid | {"export": grid["export"] | {axis: list(values)}}


def test_every_option_has_a_column_and_another_value_here():
    assert list(Options.model_fields) == list(OTHER_VALUES)
    no_settings = {"repetitions", "rounds", "cool_down_s", "timeout_s"}
    run = Run.model_fields.keys() - no_settings
    assert run == set(AXES) | {"n_gen", "threads", "min_tokens", "min_seconds"}
    assert set(sweep.RUN_AXES) == set(AXES)
    assert {*OTHER_VALUES, *run} <= set(log.SETTINGS) <= set(log.SCHEMAS["runs"].names)


@pytest.mark.matrix(4, wide=14)
@pytest.mark.parametrize("axis", [*Options.model_fields, *AXES])
def test_an_option_that_varies_is_told_apart_everywhere(tmp_path, axis):
    root = tmp_path / "experiments" / "log"
    first = 16 if axis == "max_seq_len" else getattr(make_options(), axis, None)
    values = AXES.get(axis) or [first, OTHER_VALUES[axis]]
    for i, value in enumerate(values):
        runtime = RUNTIMES.get(axis, ["portable"] * 2)[i]
        call_ms = lambda *_, i=i: CALL_MS[i]  # noqa: E731
        add(root, vary(axis, value), SLOW, call_ms, HASH, runtime)
    grid = vary(axis, *values)
    parsed = sweep.make_grid(grid)
    stored = sweep.stored_tables(parsed, root)
    for table in ("samples", "layers"):
        assert stored[table][axis].nunique(dropna=False) == 2
    settings = sweep.configurations(parsed, root)
    assert (settings["n"] == 1).all() and settings["call_ms"].tolist() == [*CALL_MS]
    assert settings["name"].nunique() == 2 and settings[axis].nunique(dropna=False) == 2
    assert settings["name"].str.contains(f"{axis} ").all()

    explorer = Explorer(grid, None, root=root)
    readings = set()
    for _, value in explorer.axes[axis]._options_full:
        explorer.axes[axis].value = value
        # behind it may stand which T the errors are of
        message = explorer.message.value.partition("<br>")[0]
        assert message.endswith(f"on {SLOW_NAME}")
        tokens_per_s, layer_ms = re.findall(r"[\d.]+", message)[:2]
        call_ms = float(layer_ms) / LAYER_SHARE
        assert float(tokens_per_s) == 1e3 * explorer.axes["T"].value / call_ms
        readings.add(layer_ms)
        assert len(explorer.shown_rows), "fidelity"
    assert readings == {f"{call_ms * LAYER_SHARE:g}" for call_ms in CALL_MS}


@pytest.mark.parametrize(
    "run", [{"rounds": 10**9}, {"T": [1] * 1000, "depth": [0] * 101}]
)
def test_a_grid_of_more_cells_than_any_sweep_runs_is_refused_before_they_are_listed(
    run,
):
    with refused("at most 100,000 cells"):
        sweep.make_grid(make_fields(**run))


def test_a_grid_s_file_without_an_end_is_refused(tmp_path):
    (tmp_path / "grid.yaml").symlink_to("/dev/zero")
    with refused("found a device"):
        sweep.load_grid(tmp_path / "grid.yaml")
    (tmp_path / "deep.yaml").write_text("[" * 5000)
    with refused("grid .*a YAML file"):
        sweep.load_grid(tmp_path / "deep.yaml")


def test_a_checkpoint_that_changed_within_the_time_of_its_files_has_another_hash(
    checkpoint_copy,
):
    """Programs that copy set the time of a file."""
    grid = sweep.make_grid(make_fields() | {"checkpoint": str(checkpoint_copy)})
    first, *_ = sweep.cells(grid)
    path = checkpoint_copy / "config.json"
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_bytes(path.read_bytes().replace(b"{", b"{ ", 1))
    os.utime(path, ns=times)
    second, *_ = sweep.cells(grid)
    assert first.source.checkpoint_hash != second.source.checkpoint_hash
