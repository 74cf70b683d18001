"""What a sweep says of its cells: which one is measured, and which were disturbed."""

from pathlib import Path

import pandas as pd
from tiny import DATA

from workbench.progress import plain_stage_lines
from workbench.sweep import cells, make_grid, run, sweep
from workbench.sweep.grid import CellResult
from workbench.sweep.run import CellMeasurement, describe_cell, describe_end
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


def test_each_cell_that_ended_is_a_line_of_a_log_file(tmp_path, monkeypatch, capsys):
    mapping = {
        "checkpoint": str(DATA / "tiny-llama"),
        "export": {"kv_write": ["slice"]},
        "run": {"T": [1, 4], "rounds": 2},
    }
    failed = CellResult("failed", "no room")
    monkeypatch.setattr(run, "run_cell", lambda cell, **_: failed)
    for prints in (True, False):
        if prints:
            with plain_stage_lines():
                sweep(make_grid(mapping), root=tmp_path)
        else:  # as in a notebook
            sweep(make_grid(mapping), root=tmp_path)
        lines = [
            line for line in capsys.readouterr().err.splitlines() if ": cell " in line
        ]
        assert len(lines) == (4 if prints else 0)
        for index, line in enumerate(lines, start=1):
            words = f"sweep: cell {index} of 4, tiny-llama int8-channel S=512 kv_write=slice"
            assert line.startswith(f"{words} T=")
            assert line.endswith(f", round {(index + 1) // 2} of 2: failed: no room")


def test_the_line_of_a_measured_cell_has_the_speed_in_the_log(swept, grid):
    planned = list(cells(make_grid(grid), swept.log))
    for cell in planned:
        line = describe_end(cell, CellResult("ok", None), swept.log)
        assert line.startswith(describe_cell(cell))
        assert float(line.rsplit(": ")[-1].removesuffix(" tok/s")) > 0
        other_unit = describe_end(cell, CellResult("invalid", "the CPU"), swept.log)
        assert other_unit == f"{line}, invalid: the CPU"


def test_disturbed_processes_have_a_sentence_below_the_table():
    rows = pd.DataFrame({"reason": [None, None], "disturbed": [0, 3]})
    (note,) = _notes(rows, [], 80)
    assert note.startswith("Other work on the machine disturbed 3 processes")
    assert not _notes(rows.assign(disturbed=0), [], 80)
