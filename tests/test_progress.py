"""Bars show in notebooks and on terminals."""

import io
import sys
from types import SimpleNamespace

import pytest

from workbench.progress import bar, end_stage, stage


@pytest.mark.parametrize("in_kernel", [True, False])
def test_a_bar_shows_in_a_kernel_and_not_in_a_file(monkeypatch, tmp_path, in_kernel):
    monkeypatch.setitem(sys.modules, "ipykernel", sys)  # to import it starts no kernel
    shell = SimpleNamespace(kernel=None) if in_kernel else None
    ipython = SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    with (tmp_path / "said").open("w") as file:
        assert bar([1], file=file).disable is not in_kernel


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_stage_is_one_line_on_a_terminal_until_the_next_one(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    for name in ("reading", "comparing"):
        stage(name)
        assert terminal.getvalue().endswith(f"\r{name} …")
    end_stage()
    assert "\n" not in terminal.getvalue()
    assert terminal.getvalue().rsplit("…", 1)[1].strip() == ""


def test_a_stage_says_nothing_in_a_file(monkeypatch):
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    stage("reading")
    end_stage()
    assert file.getvalue() == ""
