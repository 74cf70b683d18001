"""The README's table of commands has the measurements, and commands that exist."""

import json
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path

import commands
import pytest
from commands import (
    Command,
    Row,
    add_conditions,
    format_disk,
    format_minutes,
    measure_commands,
    save_rows,
    table,
)
from page_blocks import find_block, format_block
from tiny import ROOT

from workbench.cli.app import app

COLUMNS = {
    "machine": "chip, 2 cores",
    "commit": "0123456789ab",
    "time": datetime(2026, 11, 29, tzinfo=UTC),
    "load_start": 0.1,
    "load_end": 1.9,
    "steal": None,
}


def test_the_readme_has_the_table_that_the_tool_writes():
    block = find_block("commands", ROOT / "README.md")
    message = "python tools/commands.py table writes it"
    assert block == format_block("commands", table()), message


def test_every_command_of_the_table_parses():
    for command in commands.COMMANDS:
        program, *words = shlex.split(command.words)
        if program == "make":
            assert f"\n{words[0]}:" in (ROOT / "Makefile").read_text()
        else:
            app.parse_args(words)


def test_a_measurement_replaces_the_earlier_one_of_its_command_alone(tmp_path):
    path = tmp_path / "commands.json"
    first, second = (command.words for command in commands.COMMANDS[:2])
    rows = [Row(first, 100, 90, 10**9), Row(second, 5, 4, 2e8)]
    save_rows(add_conditions(rows, COLUMNS), path)
    rows = [Row(second, 65.2, 30, 196e6)]
    save_rows(add_conditions(rows, COLUMNS | {"load_end": 3.0}), path)
    assert [row["seconds"] for row in json.loads(path.read_text())] == [100, 65.2]
    rows = table(path)
    assert rows[2].endswith("| 1:40 (1:30) | 1 GB |")
    assert rows[3].endswith("| 1:05 (0:30) | 196 MB |")
    assert rows[4].endswith("| not measured | not measured |")
    assert "chip, 2 cores" in rows[-1]


def test_commands_of_one_run_have_one_line_on_the_machine(tmp_path):
    path = tmp_path / "commands.json"
    first, *others = [Row(command.words, 5, 4, 0) for command in commands.COMMANDS]
    save_rows(add_conditions([first], COLUMNS | {"steal": 0.02}), path)
    later = {"load_start": 5.0, "load_end": 7.0, "steal": 0.01}
    save_rows(add_conditions(others, COLUMNS | later), path)
    (line,) = [line for line in table(path) if "chip, 2 cores" in line]
    assert f"`{first.command}` to `{others[-1].command}`" in line
    assert "load average 0.1 before and 7.0 after; steal 2.0%" in line


@pytest.fixture
def three_commands(monkeypatch):
    """A table of three commands that append their number to the file `lines`. The second writes
    `half`, which must not be there before, and fails while there is a file `fails`."""
    code = """
import pathlib, sys
if sys.argv[1] == "2":
    pathlib.Path("half").touch(exist_ok=False)
    assert not pathlib.Path("fails").exists()
with open("lines", "a") as file:
    file.write(sys.argv[1])
"""
    program = Path(sys.executable).name
    names = [shlex.join([program, "-c", code, number]) for number in "123"]
    monkeypatch.setattr(commands, "COMMANDS", [Command(name, "") for name in names])

    def copy_inputs(folder):
        folder.mkdir(parents=True)
        (folder / "fails").touch()

    monkeypatch.setattr(commands, "copy_inputs", copy_inputs)


@pytest.mark.parametrize(
    ("commits", "lines"),
    [(("a", "a"), "123"), (("a", "b"), "1"), (("a-dirty", "a-dirty"), "1")],
    ids=["same", "other", "changed"],
)
def test_an_interrupted_run_goes_on_at_its_commit_alone(
    three_commands, tmp_path, commits, lines
):
    """What the interrupted command wrote is removed."""
    first, second = (COLUMNS | {"commit": commit} for commit in commits)
    with pytest.raises(SystemExit, match="AssertionError"):
        measure_commands(first, tmp_path)
    folder = tmp_path / "folder"
    assert (folder / "lines").read_text() == "1" and (folder / "half").exists()
    (folder / "fails").unlink()
    later = second | {"time": datetime(2026, 11, 30, tzinfo=UTC)}
    if lines == "123":
        days = [row["time"][:10] for row in measure_commands(later, tmp_path)]
        assert days == ["2026-11-29", "2026-11-30", "2026-11-30"]
    else:
        # begins again in a new folder, in which the second command fails
        with pytest.raises(SystemExit, match="AssertionError"):
            measure_commands(later, tmp_path)
    assert (folder / "lines").read_text() == lines


def test_a_command_s_time_and_bytes_are_those_of_its_process(tmp_path):
    code = (
        "import pathlib; pathlib.Path('a').write_bytes(bytes(1000)); sum(range(10**7))"
    )
    row = commands.measure_command([sys.executable, "-c", code], tmp_path)
    assert row.bytes == 1000 and 0 < row.cpu_seconds
    # a second run writes the same file again
    row = commands.measure_command([sys.executable, "-c", code], tmp_path)
    assert row.bytes == 0
    with pytest.raises(SystemExit, match="no such luck"):
        words = [sys.executable, "-c", "raise SystemExit('no such luck')"]
        commands.measure_command(words, tmp_path)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "–"),
        (196e6, "196 MB"),
        (60e3, "0.1 MB"),
        (999.7e6, "1 GB"),
        (1.52e9, "1.5 GB"),
    ],
)
def test_disk_has_two_or_three_digits(size, text):
    assert format_disk(size) == text


def test_minutes_are_rounded_to_seconds():
    assert [format_minutes(seconds) for seconds in (0.4, 59.6, 125)] == [
        "0:00",
        "1:00",
        "2:05",
    ]
