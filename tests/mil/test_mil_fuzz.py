"""A damaged package ends in a refusal or a run that is bounded; `make fuzz` tries more of them."""

from collections import Counter

import mutants
import pytest
from fuzz import fuzz


def test_damaged_packages_are_refused_or_run_within_bounds(packages):
    outcomes = fuzz(packages["int8"], 200)
    assert outcomes["refused"] + outcomes["ran"] == 200 and min(outcomes.values()) > 10


@pytest.mark.wide
@pytest.mark.slow("exports three bundles")
def test_changed_programs_mean_the_same_on_both_paths_or_are_refused_on_both(exports):
    families = [("llama", {}), ("qwen2", {"compress": "int8-tensor"}), ("zaya", {})]
    rows = mutants.run(mutants.programs_of(exports, families), 60)
    counts = Counter(kind for kind, _ in rows)
    assert [row for row in rows if row[0] not in mutants.GOOD] == []
    assert counts["refused"] > 7 and counts["equal"] > 7
