"""The time left of a grid rests on stages that were measured: exports, validations and times of
their own, of the same export options where there are some."""

from types import SimpleNamespace

import pytest

from workbench.bundle import Options
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
