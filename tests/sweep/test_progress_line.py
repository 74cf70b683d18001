"""What a sweep says of its cells: which one is measured, and which were disturbed."""

from pathlib import Path

import pandas as pd
from tiny import DATA

from workbench.sweep import cells, make_grid
from workbench.sweep.run import CellMeasurement
from workbench.sweep.table import _notes


def test_the_line_of_a_cell_tells_it_from_cells_of_other_t_and_depth():
    mapping = {
        "checkpoint": str(DATA / "tiny-llama"),
        "run": {"T": [1, 4], "depth": [0, 8]},
    }
    grid, lines = make_grid(mapping), []
    for cell in cells(grid):
        measurement = CellMeasurement(cell, grid, Path(), Path(), report=lines.append)
        measurement._report_stage("measuring")
    assert len(set(lines)) == len(lines) == 4
    assert lines[0] == "measuring tiny-llama int8-channel S=512 T=1 depth=0"


def test_disturbed_processes_have_a_sentence_below_the_table():
    rows = pd.DataFrame({"reason": [None, None], "disturbed": [0, 3]})
    (note,) = _notes(rows, [], 80)
    assert note.startswith("Other work on the machine disturbed 3 processes")
    assert not _notes(rows.assign(disturbed=0), [], 80)
