"""Notebooks: committed without outputs, one parameters cell, run whole at a small size; a broken callback fails the run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from workbench import notebook
from workbench.errors import InputError

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_committed_stripped_with_one_parameters_cell(path):
    subprocess.run([sys.executable, "-m", "nbstripout", "--verify", path], check=True)
    cells = json.loads(path.read_text())["cells"]
    assert sum("parameters" in c["metadata"].get("tags", []) for c in cells) == 1
    for cell in cells:
        assert cell["cell_type"] != "code" or len(cell["source"]) <= 14, "".join(cell["source"])


def test_misspelt_parameters_are_refused():
    with pytest.raises(InputError, match="MAX_SEQ_LENGTH"):
        notebook.run("05", {"MAX_SEQ_LENGTH": 64}, progress=False)
