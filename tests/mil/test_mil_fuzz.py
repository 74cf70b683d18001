"""A damaged package ends in a refusal or a run that is bounded; `python -m tests.mil.fuzz 10000` tries more of them."""

from fuzz import fuzz


def test_damaged_packages_are_refused_or_run_within_bounds(packages):
    outcomes = fuzz(packages["int8"], 200)
    assert outcomes["refused"] + outcomes["ran"] == 200 and min(outcomes.values()) > 10
