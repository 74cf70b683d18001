"""Notebooks on the stand-in for Core ML: the verdicts of the portable runtime without one illegal
call, in the kernel and in the processes it starts. All of them: `pytest -m exhaustive` on this
file."""

import json
import shutil
from pathlib import Path

import pytest
from browser.lab import commit
from studies.test_real_layer import DIMS
from test_notebooks import ROOT, SMALL

from workbench import log
from workbench.report import notebook

pytestmark = pytest.mark.shim
# Python imports this module when it starts; the shim prints what it refuses before it raises
COUNTING = """import builtins, os
_print = builtins.print
def print(*words, **options):
    if str(words[:1]).find("Error: value type not convertible") >= 0:
        with open(os.environ["ILLEGAL_CALLS"], "a") as file:
            file.write("illegal\\n")
    _print(*words, **options)
builtins.print = print
"""
CHANGED = {"34": {"REAL": DIMS, "LAYERS_PER_SHARD": [1], "MAX_SEQ_LEN": [16], "T": [1]}}
WHOLE = [
    pytest.param(number, marks=pytest.mark.exhaustive)
    for number in ("05", "30", "31", "33", "34", "35")
]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    copy = tmp_path_factory.mktemp("project")
    shutil.copy(ROOT / "pyproject.toml", copy)
    shutil.copytree(ROOT / "notebooks", copy / "notebooks")
    ignored = shutil.ignore_patterns("bundles", "golden")
    shutil.copytree(ROOT / "data", copy / "data", ignore=ignored)
    commit(copy)
    return copy


def run(
    number: str, project: Path, monkeypatch, **parameters
) -> tuple[str, dict, list[dict]]:
    """Verdict, gates by name of all verdicts in the log, and the new rows."""
    monkeypatch.chdir(project)
    before = set(log.load("runs")["run_id"])
    parameters = SMALL[number] | CHANGED.get(number, {}) | parameters
    found = notebook.run_notebook(number, parameters, progress=False)
    rows = log.load("runs")
    rows = rows[~rows["run_id"].isin(before)].to_dict("records")
    verdicts = {}
    for row in rows:
        for gate in json.loads(row["config"] or "{}").get("gates", ()):
            verdicts.setdefault(gate["name"], set()).add(gate["verdict"])
    # asked of another runtime alone, and of portable alone
    for name in ("device", "routing"):
        verdicts.pop(name, None)
    return found["verdict"], verdicts, rows


@pytest.mark.parametrize("number", ["29", *WHOLE])
def test_a_notebook_gives_portable_s_verdicts_and_no_illegal_call(
    number, project, monkeypatch, tmp_path
):
    (tmp_path / "sitecustomize.py").write_text(COUNTING)
    calls = tmp_path / "illegal"
    monkeypatch.setenv("ILLEGAL_CALLS", str(calls))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    verdict, gates, rows = run(number, project, monkeypatch, RUNTIME="stand-in")
    assert not calls.exists() and verdict == "GREEN"
    assert "stand-in" in {row["runtime"] for row in rows}
    units = {row["compute_units"] for row in rows if row["runtime"] == "stand-in"}
    assert units == ({"CPU_ONLY", "CPU_AND_NE"} if number == "34" else {"CPU_ONLY"})
    portable = run(number, project, monkeypatch, RUNTIME="portable")
    assert gates == portable[1] and verdict == portable[0]


def test_the_count_of_illegal_calls_sees_a_process_s_calls(tmp_path, monkeypatch):
    import subprocess
    import sys

    (tmp_path / "sitecustomize.py").write_text(COUNTING)
    monkeypatch.setenv("ILLEGAL_CALLS", str(tmp_path / "illegal"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    code = "import numpy as np; from miltorch import shim; shim._taken(np.zeros(2, np.float16))"
    subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert (tmp_path / "illegal").read_text() == "illegal\n"
