"""A slice of coremltools' own tests through the shim (`python -m tests.judge ops` runs them all),
and how it is judged."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from outcomes import op, summarize, table

pytestmark = pytest.mark.shim

ROOT = Path(__file__).parents[2]


FAULT = """from dataclasses import replace
from miltorch.ops import OPERATIONS
right = OPERATIONS["scaled_dot_product_attention"]
OPERATIONS["scaled_dot_product_attention"] = replace(right, function=lambda **operands: right.function(**operands) * 1.5)
"""


def judged(out, *arguments, code=0):
    """Runs the judge, which must end with `code`; its lines of outcomes."""
    command = [sys.executable, "-m", "tests.judge", *arguments, "--out", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(out)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == code, done.stdout + done.stderr[-2000:]
    return [
        json.loads(line)
        for line in (out / f"{arguments[0]}.jsonl").read_text().splitlines()
    ]


@pytest.mark.wide
@pytest.mark.slow("coremltools' own tests run in a process of theirs")
def test_the_slice_passes_whole(tmp_path):
    """State, attention and dialect ops as coremltools' authors test them, predictions compared."""
    assert [line.get("outcome", "selected") for line in judged(tmp_path, "slice")] == [
        "selected"
    ] + ["passed"] * 85
    assert "85 of 85 cases that ran passed" in (tmp_path / "slice.md").read_text()
    # a second run has nothing left to do
    assert judged(tmp_path, "slice")[86:] == [{"selected": 85}]


@pytest.mark.slow("coremltools' own tests run in a process of theirs")
def test_a_case_of_each_op_passes_unless_its_rule_is_wrong(tmp_path):
    (tmp_path / "fault.py").write_text(FAULT)
    selected, *lines = judged(tmp_path, "ops", "--sample", "1", "-p", "fault", code=1)
    assert selected["selected"] > 10_000 and len(lines) > 120
    failed = [op(line["case"]) for line in lines if line["outcome"] == "failed"]
    assert failed == ["ScaledDotProductAttention"]


def test_outcomes_are_sorted_by_op_and_reason():
    outcomes = {
        "a.py::TestAdd::test[1]": {"outcome": "passed", "reason": ""},
        "a.py::TestAdd::test[2]": {"outcome": "failed", "reason": "wrong"},
        "a.py::TestMul::test": {
            "outcome": "failed",
            "reason": "wrong",
            "expected": "rdar://1",
        },
        "a.py::TestMul::other": {"outcome": "skipped", "reason": "no TensorFlow"},
        "a.py::TestMul::old": {
            "outcome": "failed",
            "reason": "x.mlmodel: found a single .mlmodel file",
        },
    }
    summary = summarize(outcomes)
    assert summary["total"] == {"passed": 1, "failed": 1, "explained": 2, "skipped": 1}
    assert summary["ops"]["Add"] == {"passed": 1, "failed": 1}
    text = table("ops", summary, 7)
    assert (
        "1 of 4 cases that ran passed (25.00%); 1 failed; 2 did not for a known reason, 1 were skipped"
        in text
    )
    assert "of 7 selected" in text
    assert "Add 1/2, Mul 0/3." in text and "| failed | Add 1 | wrong |" in text
