"""Measures the README's table of commands on one real model, and writes the table.

    python tools/commands.py measure    # each command once, in a process of its own
    python tools/commands.py run        # `make run` in a fresh clone of this checkout
    python tools/commands.py table      # writes the README's table

`measure` takes SmolLM2-135M-Instruct for MODEL and works in a temporary folder, so that nothing
is kept from an earlier run. `run` needs the network. A measurement goes to
experiments/commands.json, with the machine and its load; it replaces the earlier one of the same
command. Times are those of one run: measure on an idle machine."""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from bench_record import conditions
from cyclopts import run

from workbench.log import machine

ROOT = Path(__file__).resolve().parents[1]
ROWS = ROOT / "experiments" / "commands.json"
BEGIN, END = "<!-- commands -->", "<!-- /commands -->"
MODEL = "data/smollm2-135m-instruct"
NOT_MEASURED = "not measured"
OVER = 4  # the exit code of a sound export that costs more than the limit
SMALLEST_SHOWN = 50e3
"""Bytes: a command that writes less has a dash in the table."""


@dataclass(frozen=True)
class Command:
    """A row of the table.

    Args:
        words: the command, with MODEL for the folder of the checkpoint.
        result: what it gives.
    """

    words: str
    result: str


MAKE_RUN = Command("make run", "installs, fetches SmolLM2, runs notebook 05 on it")
COMMANDS = [
    MAKE_RUN,
    Command("workbench export MODEL build/m", "a bundle, with weights in int8"),
    Command(
        "workbench validate build/m --checkpoint MODEL",
        "both verdicts: what is wrong and where, what compression costs",
    ),
    Command(
        "workbench report build/m --html build/m.html",
        "both verdicts and the heatmap as one page to send",
    ),
    Command(
        'workbench generate build/m --prompt "A ferry is"',
        "text from the bundle, tok/s",
    ),
    Command(
        "workbench evaluate build/m --text data/selection.txt --checkpoint MODEL",
        "perplexity, KL and equal top tokens on your text",
    ),
    Command(
        "workbench explain build/m --checkpoint MODEL",
        "parts of the error, the variant of the model that fits, fp16 headroom",
    ),
    Command(
        "workbench plan build/m --memory 16G --chip M4",
        "memory, predicted ms per call, predicted placement, rules against it",
    ),
    Command(
        "workbench run 05 --set CHECKPOINT=MODEL",
        "a report: figures, tables, answer, two planted faults",
    ),
    Command(
        "workbench sweep data/grid.yaml",
        "tok/s of each combination of options, here with tiny-llama",
    ),
]


@dataclass(frozen=True)
class Row:
    """One measurement: seconds by the clock and of all its processors, and the bytes that the
    command added to the folder in which it ran."""

    command: str
    seconds: float
    cpu_seconds: float
    bytes: int


def bytes_below(folder: Path) -> int:
    """The size of all regular files below a folder; a link counts nothing."""
    files = (path for path in folder.rglob("*") if not path.is_symlink())
    return sum(path.stat().st_size for path in files if path.is_file())


def measure_command(words: list[str], folder: Path) -> Row:
    """Runs a command in a folder.

    Raises:
        SystemExit: the command did not end with a result; its output is printed.
    """
    before, start, times = bytes_below(folder), time.monotonic(), os.times()
    result = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    seconds, after = time.monotonic() - start, os.times()
    if result.returncode not in (0, OVER):
        sys.exit(f"{shlex.join(words)}\n{result.stdout}{result.stderr}")
    cpu_seconds = after.children_user - times.children_user
    cpu_seconds += after.children_system - times.children_system
    added = bytes_below(folder) - before
    return Row("", round(seconds, 1), round(cpu_seconds, 1), added)


def measure_rows(folder: Path) -> list[Row]:
    """All commands of the table but `make run`, in their order, in a copy of what they read."""
    names = subprocess.run(
        ["git", "ls-files", "data", "notebooks", "pyproject.toml", ".gitignore"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in names.stdout.splitlines():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    (folder / MODEL).symlink_to((ROOT / MODEL).resolve())
    rows = []
    for command in COMMANDS:
        if command == MAKE_RUN:
            continue
        words = shlex.split(command.words.replace("MODEL", MODEL))
        program = str(Path(sys.executable).with_name(words[0]))
        row = measure_command([program, *words[1:]], folder)
        rows.append(Row(command.words, row.seconds, row.cpu_seconds, row.bytes))
        print(f"{rows[-1]}", flush=True)
    return rows


def measure_make_run(folder: Path) -> Row:
    """`make run` in a fresh clone; its bytes are those of the clone, .venv and all."""
    clone = folder / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    row = measure_command(["make", "run"], clone)
    return Row(MAKE_RUN.words, row.seconds, row.cpu_seconds, bytes_below(clone))


def read_rows(path: Path = ROWS) -> dict[str, dict]:
    """Command → its row with the machine behind it."""
    if not path.exists():
        return {}
    return {row["command"]: row for row in json.loads(path.read_text())}


def save_rows(rows: list[Row], columns: dict, path: Path = ROWS) -> None:
    """Writes measurements over the earlier ones of the same commands."""
    names = "machine commit load_start load_end steal".split()
    stored = read_rows(path)
    day = columns["time"].isoformat(timespec="seconds")
    for row in rows:
        place = {name: columns[name] for name in names} | {"time": day}
        stored[row.command] = asdict(row) | place
    ordered = [stored[c.words] for c in COMMANDS if c.words in stored]
    path.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")


def format_minutes(seconds: float) -> str:
    """Minutes and seconds, such as 1:05."""
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02}"


def format_disk(size: int) -> str:
    """Megabytes or gigabytes of 1000 each; a dash for next to nothing."""
    if size < SMALLEST_SHOWN:
        return "–"
    if size < 999.5e6:  # less is 999 MB when it is rounded
        return f"{max(size / 1e6, 0.1):.3g} MB"
    return f"{size / 1e9:.2g} GB"


def table(path: Path = ROWS) -> list[str]:
    """The lines of the README's table, and one on the machine behind each measurement."""
    stored = read_rows(path)
    lines = ["| command | what you get | min:s (CPU) | disk |", "|---|---|---|---|"]
    for command in COMMANDS:
        cells = [f"`{command.words}`", command.result, NOT_MEASURED, NOT_MEASURED]
        if row := stored.get(command.words):
            clock = format_minutes(row["seconds"])
            cells[2] = f"{clock} ({format_minutes(row['cpu_seconds'])})"
            cells[3] = format_disk(row["bytes"])
        lines.append(f"| {' | '.join(cells)} |")
    runs: dict[tuple, list[str]] = {}
    for command, row in stored.items():
        runs.setdefault((row["machine"], row["time"]), []).append(command)
    machines = []
    for commands in runs.values():
        name = (
            commands[0] if len(commands) == 1 else f"{commands[0]}` to `{commands[-1]}"
        )
        machines.append(conditions(stored[commands[0]] | {"command": name}))
    return [*lines, "", *machines] if machines else lines


def write_table(readme: Path, path: Path = ROWS) -> None:
    """Replaces what stands between the two marks of the README."""
    text = readme.read_text()
    block = "\n".join([BEGIN, "", *table(path), "", END])
    pattern = f"{re.escape(BEGIN)}.*?{re.escape(END)}"
    if not re.search(pattern, text, re.DOTALL):
        sys.exit(f"{readme} has no line {BEGIN} with a line {END} behind it")
    readme.write_text(re.sub(pattern, lambda _: block, text, flags=re.DOTALL))


def main(what: Literal["measure", "run", "table"]) -> None:
    """Measures the README's table of commands, or writes it."""
    if what != "table":
        columns = machine.environment()
        with (
            tempfile.TemporaryDirectory() as folder,
            machine.disturbance() as disturbance,
        ):
            if what == "run":
                rows = [measure_make_run(Path(folder))]
            else:
                rows = measure_rows(Path(folder))
        save_rows(rows, columns | disturbance)
    write_table(ROOT / "README.md")


if __name__ == "__main__":
    run(main)
