"""What tests run on: the portable runtime by default, on a Mac too, which skips what uses the shim;
and the Pythons that the Makefile takes."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import ROOT

from workbench import runtime


def test_auto_is_portable_in_tests_on_a_mac_too(monkeypatch):
    assert os.environ["WORKBENCH_RUNTIME"] == "portable"
    monkeypatch.setattr(runtime, "coreml_available", lambda: True)
    assert runtime.resolve() == "portable"
    monkeypatch.delenv("WORKBENCH_RUNTIME")
    assert runtime.resolve() == "coreml"


def test_every_file_that_uses_the_shim_is_marked():
    """macOS refuses the shim and the stand-in, so that such a test must not run there."""
    uses = re.compile(r"shim\.install\(|[\"']stand-in")
    unmarked = [
        path.name
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if uses.search(text := path.read_text())
        and "mark.shim" not in text
        and "shimmed" not in text
        and path != Path(__file__)
    ]
    assert unmarked == []


@pytest.mark.skipif(not shutil.which("make"), reason="no make here")
@pytest.mark.parametrize(
    ("version", "accepted"),
    [((3, 10), False), ((3, 11), True), ((3, 13), True), ((3, 14), False)],
)
def test_make_takes_the_pythons_that_have_wheels_and_says_what_to_type(
    version, accepted, tmp_path
):
    """A Python that says that it is another version and cannot make environments."""
    for name in ("Makefile", "pyproject.toml", "requirements.lock", "tools/ready.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / "python"
    changed = {"version_info": (*version, 0, "final", 0), "executable": "/bin/false"}
    code = f"import runpy, sys; vars(sys).update({changed!r}); runpy.run_path('$1', run_name='__main__')"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{code}" "$@"\n')
    python.chmod(0o755)
    command = ["make", "-C", tmp_path, "test", f"PYTHON={python}"]
    result = subprocess.run(command, capture_output=True, text=True)
    said = result.stdout + result.stderr
    assert result.returncode and ("make PYTHON=python3.12" in said) == (not accepted)
    assert accepted or f"{version[0]}.{version[1]}" in said
