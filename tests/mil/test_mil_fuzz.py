"""A few hundred attempts of the two random testers in `fuzz.py` and `mutants.py`; `make fuzz` makes
more of them."""

import pytest
from fuzz import fuzz
from mutants import BUNDLES, export_subjects, run_edits


def test_damaged_packages_are_refused_or_run_within_bounds(packages):
    outcomes = fuzz(packages["int8"], 200)
    assert outcomes["refused"] + outcomes["ran"] == 200
    assert min(outcomes.values()) > 10


@pytest.mark.wide
@pytest.mark.slow("exports three bundles")
def test_edited_programs_give_equal_results_plain_and_fused_or_are_refused_both_ways(
    exports,
):
    llama, _, qwen2_int8, _, _, zaya = BUNDLES
    subjects = export_subjects(exports, [llama, qwen2_int8, zaya])
    counts, differing = run_edits(subjects, 60)
    assert not differing
    assert counts["refused"] > 7 and counts["equal"] > 7
