"""nbformat is imported without the parser of internationalized addresses, and checks notebooks as
before; other code can still import the parser."""

import os
import subprocess
import sys

import nbformat
import pytest

from workbench import nbformat_import
from workbench.nbformat_import import IRI_PARSER, import_nbformat

CODE = """
import sys
from workbench.experiment.notebooks import cells_of
from workbench.nbformat_import import import_nbformat
cells_of({notebook!r})
format = import_nbformat()
assert "{parser}" not in sys.modules
try:
    format.validate({{"cells": [], "metadata": 1, "nbformat": 4, "nbformat_minor": 5}})
except format.ValidationError:
    print("refused")
import {parser}
"""


def test_a_new_process_reads_a_notebook_without_the_parser(tmp_path):
    (tmp_path / f"{IRI_PARSER}.py").write_text("print('parser')")
    notebook = tmp_path / "a.ipynb"
    nbformat.write(nbformat.v4.new_notebook(), notebook)
    code = CODE.format(notebook=str(notebook), parser=IRI_PARSER)
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    child = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    )
    # the parser is imported last, by the code itself
    assert child.stdout.split() == ["refused", "parser"], child.stderr


@pytest.mark.parametrize("loaded", [None, nbformat_import])
def test_what_was_imported_before_stays(monkeypatch, loaded):
    monkeypatch.setitem(sys.modules, IRI_PARSER, loaded)
    assert import_nbformat() is nbformat
    assert sys.modules[IRI_PARSER] is loaded
