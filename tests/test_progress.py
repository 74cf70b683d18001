"""Bars show in notebooks and on terminals."""

import sys
from types import SimpleNamespace

import pytest

from workbench.progress import bar


@pytest.mark.parametrize("in_kernel", [True, False])
def test_a_bar_shows_in_a_kernel_and_not_in_a_file(monkeypatch, tmp_path, in_kernel):
    monkeypatch.setitem(sys.modules, "ipykernel", sys)  # to import it starts no kernel
    shell = SimpleNamespace(kernel=None) if in_kernel else None
    ipython = SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    with (tmp_path / "said").open("w") as file:
        assert bar([1], file=file).disable is not in_kernel
