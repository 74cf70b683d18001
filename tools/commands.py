"""Measures the README's table of commands on one real model, and writes the table.

    python tools/commands.py measure    # each command once, in a process of its own
    python tools/commands.py run        # `make run` in a fresh clone of this checkout
    python tools/commands.py table      # writes the README's table

`measure` takes SmolLM2-135M-Instruct for MODEL and begins in an empty folder, build/commands, so
that nothing is kept from an earlier run. Each measurement is saved there. A run that was
interrupted goes on with the first command that is not measured, if the machine and the commit are
the same and no file of the checkout was changed; the folder is removed at the end. `run` needs the
network. Measurements go to experiments/commands.json, each with the machine and its load; they
replace the earlier ones of the same commands. Times are those of one run: measure on an idle
machine."""

import json
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from bench_record import NOT_MEASURED, machine_line
from cpu_time import cpu_seconds_of_children
from cyclopts import run
from page_blocks import replace_block

from workbench.files import write_whole
from workbench.log import machine

ROOT = Path(__file__).resolve().parents[1]
ROWS = ROOT / "experiments" / "commands.json"
WORK = ROOT / "build" / "commands"
MODEL = "data/smollm2-135m-instruct"
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
        "both verdicts and the heatmap as one HTML file to send",
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
        "parts of the error, the variant of the model that fits, bits left to fp16 overflow",
    ),
    Command(
        "workbench plan build/m --memory 16G --chip M4",
        "memory, predicted ms per call and placement, published rules that apply",
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
    """One measurement.

    Args:
        command: the `words` of a command of the table.
        seconds: by the clock.
        cpu_seconds: of all its processors.
        bytes: added to the folder in which it ran.
    """

    command: str
    seconds: float
    cpu_seconds: float
    bytes: int


def bytes_below(folder: Path) -> int:
    """The size of all regular files below a folder; a link counts nothing."""
    files = (path for path in folder.rglob("*") if not path.is_symlink())
    return sum(path.stat().st_size for path in files if path.is_file())


def measure_command(words: list[str], folder: Path, command: str = "") -> Row:
    """Runs a command in a folder.

    Args:
        words: the program and its arguments.
        command: the command as the table has it.

    Raises:
        SystemExit: the command did not end with a result; its output is printed.
    """
    bytes_before = bytes_below(folder)
    cpu_start, start = cpu_seconds_of_children(), time.monotonic()
    result = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    seconds = time.monotonic() - start
    cpu_seconds = cpu_seconds_of_children() - cpu_start
    if result.returncode not in (0, OVER):
        sys.exit(f"{shlex.join(words)}\n{result.stdout}{result.stderr}")
    added_bytes = bytes_below(folder) - bytes_before
    return Row(command, round(seconds, 1), round(cpu_seconds, 1), added_bytes)


def copy_inputs(folder: Path) -> None:
    """Copies what the commands read into a folder; the model is a link."""
    listing = subprocess.run(
        ["git", "ls-files", "data", "notebooks", "pyproject.toml", ".gitignore"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listing.stdout.splitlines():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    (folder / MODEL).symlink_to((ROOT / MODEL).resolve())


def can_resume(rows: Path, machine_fields: dict) -> bool:
    """Whether an interrupted run saved rows that the machine and the commit of `machine_fields`
    measured. A commit with changed files does not say what was measured."""
    commit = machine_fields["commit"]
    if commit is None or commit.endswith("-dirty"):
        return False
    measured = {(row["machine"], row["commit"]) for row in read_rows(rows).values()}
    return measured == {(machine_fields["machine"], commit)}


def remove_later_files(folder: Path, saved: Path) -> None:
    """Removes the files of a folder that were written or linked later than the file `saved`: those
    of a command that was interrupted."""
    saved_at = saved.stat().st_mtime_ns
    for path in [*folder.rglob("*")]:
        # a hard link to an older file changes its ctime alone
        if not path.is_dir() and path.lstat().st_ctime_ns > saved_at:
            path.unlink()


def measure_commands(machine_fields: dict, work: Path = WORK) -> list[dict]:
    """Measures all commands of the table but `make run`, in their order, in a copy of what they
    read. Each row is saved in the folder `work`, where an interrupted run goes on.

    Args:
        machine_fields: of this machine, from `machine.environment`.
    """
    saved, folder = work / "rows.json", work / "folder"
    if can_resume(saved, machine_fields):
        remove_later_files(folder, saved)
    else:
        shutil.rmtree(work, ignore_errors=True)
        copy_inputs(folder)
    for command in COMMANDS:
        if command == MAKE_RUN or command.words in read_rows(saved):
            continue
        words = shlex.split(command.words.replace("MODEL", MODEL))
        program = str(Path(sys.executable).with_name(words[0]))
        with machine.measure_disturbance() as disturbance:
            row = measure_command([program, *words[1:]], folder, command.words)
        # after the block, whose end fills `disturbance` in
        save_rows(add_conditions([row], machine_fields | disturbance), saved)
        print(f"{row}", flush=True)
    return [*read_rows(saved).values()]


def measure_make_run(folder: Path) -> Row:
    """`make run` in a fresh clone; its bytes are those of the clone, .venv and all."""
    clone = folder / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    row = measure_command(["make", "run"], clone, MAKE_RUN.words)
    return replace(row, bytes=bytes_below(clone))


def read_rows(path: Path = ROWS) -> dict[str, dict]:
    """Command → its row with the machine behind it."""
    if not path.exists():
        return {}
    return {row["command"]: row for row in json.loads(path.read_text())}


def add_conditions(rows: list[Row], conditions: dict) -> list[dict]:
    """Rows with the machine, its load and the time when the run began."""
    names = "machine commit load_start load_end steal".split()
    run_columns = {name: conditions[name] for name in names}
    run_columns["time"] = conditions["time"].isoformat(timespec="seconds")
    return [asdict(row) | run_columns for row in rows]


def save_rows(rows: list[dict], path: Path = ROWS) -> None:
    """Writes measurements over the earlier ones of the same commands."""
    stored = read_rows(path) | {row["command"]: row for row in rows}
    ordered = [stored[c.words] for c in COMMANDS if c.words in stored]
    text = json.dumps(ordered, indent=1, ensure_ascii=False) + "\n"
    write_whole(path, text.encode())


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
    # machine and time of a run → its rows
    runs: dict[tuple[str, str], list[dict]] = {}
    for row in stored.values():
        runs.setdefault((row["machine"], row["time"]), []).append(row)
    machines = [describe_run(rows) for rows in runs.values()]
    return [*lines, "", *machines] if machines else lines


def describe_run(rows: list[dict]) -> str:
    """One line on the machine and the load of the commands of one run: the load before the first
    and after the last, and the largest steal."""
    first, last = rows[0], rows[-1]
    name = first["command"]
    if len(rows) > 1:
        name += f"` to `{last['command']}"
    steals = [row["steal"] for row in rows]
    steal = None if None in steals else max(steals)
    changes = {"command": name, "load_end": last["load_end"], "steal": steal}
    return machine_line(first | changes)


def write_table(readme: Path, path: Path = ROWS) -> None:
    """Writes the table into the README's block `commands`."""
    replace_block(readme, "commands", table(path))


def main(what: Literal["measure", "run", "table"]) -> None:
    """Measures the README's table of commands, or writes it."""
    machine_fields = machine.environment()
    if what == "measure":
        save_rows(measure_commands(machine_fields))
        shutil.rmtree(WORK)
    elif what == "run":
        with (
            tempfile.TemporaryDirectory() as folder,
            machine.measure_disturbance() as disturbance,
        ):
            row = measure_make_run(Path(folder))
        save_rows(add_conditions([row], machine_fields | disturbance))
    write_table(ROOT / "README.md")


if __name__ == "__main__":
    run(main)
