"""A damaged package ends in a refusal or a run that is bounded; `make fuzz` tries more of them."""

import mutants
import pytest
from fuzz import fuzz


def test_damaged_packages_are_refused_or_run_within_bounds(packages):
    outcomes = fuzz(packages["int8"], 200)
    assert outcomes["refused"] + outcomes["ran"] == 200 and min(outcomes.values()) > 10


@pytest.mark.wide
@pytest.mark.slow("exports three bundles")
def test_changed_programs_mean_the_same_on_both_paths_or_are_refused_on_both(exports):
    families = [mutants.FAMILIES[n] for n in (0, 2, 5)]
    programs = mutants.programs_of(exports, families)
    counts, differing = mutants.run(programs, 60)
    assert not differing and counts["refused"] > 7 and counts["equal"] > 7
