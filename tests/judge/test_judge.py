"""A slice of coremltools' own tests through the shim (`python -m tests.judge ops` runs them all), and how it is judged."""

import json
import os
import subprocess
import sys
from pathlib import Path

from outcomes import summarize, table

ROOT = Path(__file__).parents[2]


def test_the_slice_passes_whole(tmp_path):
    """State, attention and dialect ops as coremltools' authors test them, predictions compared."""
    command = [sys.executable, "-m", "tests.judge", "slice", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    lines = [json.loads(line) for line in (tmp_path / "slice.jsonl").read_text().splitlines()]
    assert [line.get("outcome", "selected") for line in lines] == ["selected"] + ["passed"] * 85
    assert "85 of 85 cases that ran passed" in (tmp_path / "slice.md").read_text()


def test_outcomes_are_sorted_by_op_and_reason():
    outcomes = {
        "a.py::TestAdd::test[1]": {"outcome": "passed", "reason": ""},
        "a.py::TestAdd::test[2]": {"outcome": "failed", "reason": "wrong"},
        "a.py::TestMul::test": {"outcome": "failed", "reason": "wrong", "expected": "rdar://1"},
        "a.py::TestMul::other": {"outcome": "skipped", "reason": "no TensorFlow"},
        "a.py::TestMul::old": {"outcome": "failed", "reason": "x.mlmodel: found a single .mlmodel file"},
    }
    summary = summarize(outcomes)
    assert summary["total"] == {"passed": 1, "failed": 1, "explained": 2, "skipped": 1}
    assert summary["ops"]["Add"] == {"passed": 1, "failed": 1}
    text = table("ops", summary, 7)
    assert "1 of 4 cases that ran passed (25.00%); 1 failed; 2 did not for a known reason, 1 were skipped" in text and "of 7" in text
    assert "Add 1/2, Mul 0/3." in text and "| failed | Add | 1 | wrong |" in text
