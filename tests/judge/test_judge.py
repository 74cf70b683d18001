"""A case of each op of coremltools' own tests through the shim (`python -m tests.judge ops` runs them
all), and how it is judged."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from outcomes import op

pytestmark = pytest.mark.shim

ROOT = Path(__file__).parents[2]


FAULT = """from dataclasses import replace
from miltorch.ops import OPERATIONS
right = OPERATIONS["scaled_dot_product_attention"]
OPERATIONS["scaled_dot_product_attention"] = replace(right, function=lambda **operands: right.function(**operands) * 1.5)
"""


@pytest.mark.wide
@pytest.mark.slow("coremltools' own tests run in a process of theirs")
def test_a_case_of_each_op_passes_unless_its_rule_is_wrong(tmp_path):
    (tmp_path / "fault.py").write_text(FAULT)
    options = "ops", "--sample", "1", "-p", "fault", "--out", tmp_path
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "tests.judge", *options]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True)
    assert done.returncode == 1, done.stdout + done.stderr[-2000:]
    text = (tmp_path / "ops.jsonl").read_text()
    selected, *lines = map(json.loads, text.splitlines())
    assert selected["selected"] > 10_000 and len(lines) > 120
    failed = [op(line["case"]) for line in lines if line["outcome"] == "failed"]
    assert failed == ["ScaledDotProductAttention"]
    report = (tmp_path / "ops.md").read_text()
    assert "; 1 failed; " in report
    assert "\n| failed | ScaledDotProductAttention 1 | AssertionError" in report
