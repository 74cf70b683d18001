"""A slice of coremltools' own tests through the shim (`python -m tests.judge ops` runs them all),
and how it is judged."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from outcomes import judged, op, table

pytestmark = pytest.mark.shim

ROOT = Path(__file__).parents[2]


FAULT = """from dataclasses import replace
from miltorch.ops import OPERATIONS
right = OPERATIONS["scaled_dot_product_attention"]
OPERATIONS["scaled_dot_product_attention"] = replace(right, function=lambda **operands: right.function(**operands) * 1.5)
"""


def run(out, *arguments, code=0):
    """Runs the judge, which must end with `code`; its lines of outcomes."""
    command = [sys.executable, "-m", "tests.judge", *arguments, "--out", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(out)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == code, done.stdout + done.stderr[-2000:]
    text = (out / f"{arguments[0]}.jsonl").read_text()
    return list(map(json.loads, text.splitlines()))


@pytest.mark.wide
@pytest.mark.slow("coremltools' own tests run in a process of theirs")
def test_the_slice_passes_whole(tmp_path):
    """State, attention and dialect ops as coremltools' authors test them, predictions compared."""
    outcomes = [line.get("outcome", "selected") for line in run(tmp_path, "slice")]
    assert outcomes == ["selected"] + ["passed"] * 85
    assert "85 of 85 cases that ran passed" in (tmp_path / "slice.md").read_text()


@pytest.mark.wide
@pytest.mark.slow("coremltools' own tests run in a process of theirs")
def test_a_case_of_each_op_passes_unless_its_rule_is_wrong(tmp_path):
    (tmp_path / "fault.py").write_text(FAULT)
    selected, *lines = run(tmp_path, "ops", "--sample", "1", "-p", "fault", code=1)
    assert selected["selected"] > 10_000 and len(lines) > 120
    failed = [op(line["case"]) for line in lines if line["outcome"] == "failed"]
    assert failed == ["ScaledDotProductAttention"]


def test_outcomes_are_sorted_by_op_and_reason():
    failed = {"outcome": "failed", "reason": "wrong"}
    outcomes = {
        "a.py::TestAdd::test[1]": {"outcome": "passed", "reason": ""},
        "a.py::TestAdd::test[2]": failed,
        "a.py::TestMul::test": failed | {"expected": "rdar://1"},
        "a.py::TestMul::other": {"outcome": "skipped", "reason": "no TensorFlow"},
        "a.py::TestMul::old": failed | {"reason": "found a single .mlmodel file"},
    }
    text = table("ops", judged(outcomes), 7)
    for words in (
        "1 of 4 cases that ran passed (25.00%); 1 failed; 2 did not for a known reason, "
        "1 were skipped by their authors; of 7 selected",
        "Add 1/2, Mul 0/3.",
        "| failed | Add 1 | wrong |",
        "| explained | Mul 1 | coremltools expects this to fail on Core ML too: rdar://1 |",
    ):
        assert words in text
