"""The README's table of commands has the measurements, and commands that exist."""

import json
import shlex
import sys
from datetime import UTC, datetime

import commands
import pytest
from commands import BEGIN, END, Row, format_disk, format_minutes, save_rows, table
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
    text = (ROOT / "README.md").read_text()
    block = "\n".join([BEGIN, "", *table(), "", END])
    assert block in text, "python tools/commands.py table writes it"


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
    save_rows([Row(first, 100, 90, 10**9), Row(second, 5, 4, 2e8)], COLUMNS, path)
    save_rows([Row(second, 65.2, 30, 196e6)], COLUMNS | {"load_end": 3.0}, path)
    assert [row["seconds"] for row in json.loads(path.read_text())] == [100, 65.2]
    rows = table(path)
    assert rows[2].endswith("| 1:40 (1:30) | 1 GB |")
    assert rows[3].endswith("| 1:05 (0:30) | 196 MB |")
    assert rows[4].endswith("| not measured | not measured |")
    assert "chip, 2 cores" in rows[-1]


def test_commands_of_one_run_have_one_line_on_the_machine(tmp_path):
    path = tmp_path / "commands.json"
    rows = [Row(command.words, 5, 4, 0) for command in commands.COMMANDS]
    save_rows(rows, COLUMNS, path)
    (line,) = [line for line in table(path) if "chip, 2 cores" in line]
    assert f"`{rows[0].command}` to `{rows[-1].command}`" in line


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
