"""The time left of a grid rests on stages that were measured: exports, validations and times of
their own, of the same export options where there are some."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from workbench.bundle import Options
from workbench.check import gates
from workbench.widgets import estimates
from workbench.widgets.estimates import (
    EXPORTING,
    MEASURING,
    CellSeconds,
    Stage,
    plan_stages,
    stage_of,
)

INT8, FP16 = (
    Options(compress=name, max_seq_len=256) for name in ("int8-channel", "fp16")
)
RECORDED = {"export": 9.0, "validation": 13.0, "times": 3.0}
"""Seconds of the stages of a model of 135 million parameters."""


def cell(options: Options, validates: bool = False):
    source = SimpleNamespace(finished=False, name="toy", checkpoint_hash="0")
    ids = (1, 2) if validates else ()
    return SimpleNamespace(source=source, options=options, validate_ids=ids)


@pytest.fixture
def seconds() -> CellSeconds:
    return CellSeconds()


def test_the_first_cell_of_a_bundle_exports_it(tmp_path):
    cells = [cell(INT8, True), cell(INT8), cell(FP16), cell(FP16, True)]
    planned = plan_stages(cells, tmp_path)
    assert planned == [
        [Stage(EXPORTING, False, INT8), Stage(MEASURING, True, INT8)],
        [Stage(MEASURING, False, INT8)],
        [Stage(EXPORTING, False, FP16), Stage(MEASURING, False, FP16)],
        [Stage(MEASURING, True, FP16)],
    ]
    (tmp_path / estimates.exporter.bundle_name("toy", "0", INT8)).mkdir()
    assert plan_stages(cells, tmp_path)[0] == planned[0][1:]
    finished = cell(FP16)
    finished.source.finished = True
    assert plan_stages([finished], tmp_path) == [[Stage(MEASURING, False, FP16)]]


def test_cells_whose_like_was_not_measured_have_no_estimate(seconds, tmp_path):
    cells = [cell(INT8, True), *[cell(INT8)] * 3]
    first, *others = plan_stages(cells, tmp_path)
    assert seconds.estimate(first) is None
    seconds.add(first[0], RECORDED["export"])
    seconds.add(first[1], RECORDED["validation"])
    # the long first cell says nothing of the others, nor they of the first of a bundle
    assert seconds.estimate(first) == 22.0 and seconds.estimate(others[0]) is None
    seconds.add(others[0][0], RECORDED["times"])
    left = [stage for stages in others[1:] for stage in stages]
    assert seconds.estimate(left) == 6.0
    assert seconds.estimate([]) == 0


def test_an_estimate_is_the_last_of_the_same_options_or_else_of_others(seconds):
    times = [stage_of(cell(options), MEASURING) for options in (INT8, FP16)]
    seconds.add(times[0], 3.0)
    assert seconds.estimate(times[1:]) == 3.0
    seconds.add(times[1], 5.0)
    seconds.add(times[1], 6.0)
    assert seconds.estimate(times[:1]) == 3.0 and seconds.estimate(times) == 9.0


def test_stages_are_timed_from_one_report_to_the_next(seconds, monkeypatch):
    clock = iter([10.0, 19.0, 32.0])
    monkeypatch.setattr(estimates.time, "monotonic", lambda: next(clock))
    measured = cell(INT8, True)
    with seconds.timing(measured) as report:
        report("exporting toy int8-channel S=256 T=1 depth=64")
        report("measuring toy int8-channel S=256 T=1 depth=64")
    exported, validated = (stage_of(measured, name) for name in (EXPORTING, MEASURING))
    assert seconds.estimate([exported]) == 9.0
    assert seconds.estimate([validated]) == 13.0


def test_a_cell_that_fails_or_is_in_the_log_already_gives_no_estimate(seconds):
    with pytest.raises(ValueError), seconds.timing(cell(INT8)) as report:
        report("measuring toy")
        raise ValueError
    with seconds.timing(cell(INT8)):
        pass  # another process logged it while this one waited
    assert seconds.estimate([stage_of(cell(INT8), MEASURING)]) is None


def write_bundle(
    bundles: Path, options: Options, *, validated_s: float = 110.0
) -> Path:
    """A bundle whose export began at 100 s and ended at 104 s."""
    bundle = bundles / estimates.exporter.bundle_name("toy", "0", options)
    bundle.mkdir()
    times = {
        bundle.with_name(f".{bundle.name}.lock"): 100.0,
        bundle / "bundle.json": 104.0,
        bundle / "verdict.json": validated_s,
    }
    for path, seconds in times.items():
        path.touch()
        os.utime(path, (seconds, seconds))
    return bundle


def test_a_first_estimate_rests_on_the_files_of_an_export_and_its_validation(
    seconds, tmp_path
):
    assert estimates.VERDICT == gates.VERDICT
    bundle = write_bundle(tmp_path, FP16)
    assert estimates.bundle_path(cell(FP16), tmp_path) == bundle
    first, second = plan_stages([cell(INT8, True), cell(INT8)], tmp_path)
    assert seconds.first_estimate(first) is None
    seconds.read_first([tmp_path / "missing", bundle])
    assert seconds.first_estimate(first) == 4.0 + 6.0 + 1.5
    assert seconds.first_estimate(second) == 1.5
    # which is no measurement
    assert seconds.estimate(first) is None
    for stage, measured in zip(first, (9.0, 13.0)):
        seconds.add(stage, measured)
    assert seconds.first_estimate(first + second) == 9.0 + 13.0 + 1.5


@pytest.mark.parametrize("validated_s", [103.0, 104.0, 400.0])
def test_a_validation_that_did_not_follow_the_export_gives_no_first_estimate(
    seconds, tmp_path, validated_s
):
    bundle = write_bundle(tmp_path, FP16, validated_s=validated_s)
    seconds.read_first([bundle])
    assert seconds.first_estimate([stage_of(cell(FP16), MEASURING)]) is None
