"""A damaged package ends in a refusal or a run that is bounded; `make fuzz` tries more of them."""

from collections import Counter

import mutants
import pytest
from fuzz import fuzz


def test_damaged_packages_are_refused_or_run_within_bounds(packages):
    outcomes = fuzz(packages["int8"], 200)
    assert outcomes["refused"] + outcomes["ran"] == 200 and min(outcomes.values()) > 10


@pytest.fixture
def edited(exports):
    return mutants.packages_of(
        exports, [("llama", {}), ("qwen2", {"compress": "int8-tensor"}), ("zaya", {})]
    )


def test_changed_programs_mean_the_same_on_both_paths_or_are_refused_on_both(edited):
    rows = mutants.run(edited, 45)
    counts = Counter(kind for _, kind, *_ in rows)
    assert [row for row in rows if row[1] not in mutants.GOOD] == []
    assert counts["refused"] > 7 and counts["equal"] > 7 and counts.total() == 45


def test_a_process_that_dies_counts_as_a_crash_and_the_others_go_on(
    edited, monkeypatch, tmp_path
):
    dying = tmp_path / "dying.py"
    dying.write_text(
        "import json, os, sys\n"
        "first, last = int(sys.argv[2]), int(sys.argv[3])\n"
        "for number in range(first, last):\n"
        "    os.abort() if number == 3 else print(json.dumps([number, 'equal', '', '']), flush=True)\n"
    )
    monkeypatch.setattr(mutants, "__file__", str(dying))
    rows = mutants.run(edited, 6)
    assert [row[:2] for row in rows] == [
        (n, "crash" if n == 3 else "equal") for n in range(6)
    ]
