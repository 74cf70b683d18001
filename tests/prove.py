"""Runs every gate on sound bundles and on bundles with a planted fault, in every preset. `python -m
tests.prove`.

Every case is one JSON line in build/prove/cases.jsonl. It is skipped when its line is there for the
same version of the code. A run of every case writes the tables of tests/check/faults.md from these
lines; a run of some leaves them as they are. Exits 1 when a sound bundle is RED, every gate is GREEN
on a fault, or a gate broke, and 2 when no case has the words.

    python -m tests.prove -j 2             every case, in two processes
    python -m tests.prove disk int4        cases whose KIND/NAME@LAYER/PRESET contains all words
    python -m tests.prove clean FAMILY     the random draws of a family
    python -m tests.prove --list           what fails so far, running nothing
"""

import argparse
import math
import os
import subprocess
import sys
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "check"), str(ROOT / "tests")]
import cases  # noqa: E402
import pandas as pd  # noqa: E402
import tiny  # noqa: E402
from cases import Case, Record  # noqa: E402
from tqdm import tqdm  # noqa: E402

STORE = cases.PROVE_FOLDER / "cases.jsonl"
TABLES = ROOT / "tests" / "check" / "faults.md"
INTRODUCTION = """# Planted faults, and the gates that are RED

Written by `make prove` from the cases that ran. Every gate runs on every fault; interface and
weights only on faults in files. Sound bundles have to stay below 1, faults above. `device` runs on
the portable runtime in the place of a device. `weights` compares several figures, each with a limit
of its own, and shows the one that is largest in parts of its limit. Values that were rounded to the
nearest are compared by their distance from the checkpoint's, in halves of a step or of an fp16
unit; tables also by the distance to the nearest entry and by the squared error over the best
table's. Values that were fitted to a calibration text are compared by four figures of every row and
by the median error of a matrix, which workbench/check/row_statistics.py describes.
"""
Records = dict[Case, Record]
"""Each case that ran → its record."""


# Running cases


def all_cases() -> list[Case]:
    return cases.sound_cases() + cases.faulty_cases() + cases.relocated_cases()


def matches(case: Case, word: str) -> bool:
    """Whether a word is in the text KIND/NAME@LAYER/PRESET of a case, or is the family of a random
    draw, whose text has a seed instead."""
    if word in str(case):
        return True
    return case.kind == "clean" and word == cases.clean.family_of(int(case.name))


def read_store() -> Records:
    """The newest record of every case that exists, made by the code as it is."""
    if not STORE.is_file():
        return {}
    records, version = {}, cases.version()
    known_cases = {*all_cases()}
    for line in STORE.read_text().splitlines():
        try:
            record = Record.parse(line)
        except (ValueError, TypeError):
            # an interrupted run may leave half a line, another version other fields
            continue
        if record.version == version and record.case in known_cases:
            records[record.case] = record
    return records


def run_cases(chosen: list[Case], jobs: int) -> None:
    """Runs cases and appends their records to the store."""
    STORE.parent.mkdir(parents=True, exist_ok=True)
    # cases of one bundle follow each other, so that a process exports it once
    by_bundle = sorted(
        chosen, key=lambda case: sha256(str(case.recipe).encode()).digest()
    )
    pool = ProcessPoolExecutor(jobs, get_context("spawn"))
    with pool, STORE.open("a") as file:
        records = pool.map(run_case, by_bundle, chunksize=4)
        for record in tqdm(records, "prove", len(chosen), unit="case"):
            file.write(record.to_line() + "\n")
            file.flush()
            if record.fails:
                tqdm.write(describe_failure(record))


def run_case(case: Case) -> Record:
    """Runs a case in a process of the pool."""
    root = cases.PROVE_FOLDER / cases.code_version(*cases.EXPORT_CODE)
    return cases.run_case(tiny.Exports(root), case)


def describe_failure(record: Record) -> str:
    reason = record.error or record.red or "every gate is GREEN"
    return f"{record.case}: {reason}"


# The tables of tests/check/faults.md


def format_tables(all_records: Records) -> str:
    """The text of tests/check/faults.md."""
    records, relocated = {}, {}
    for case, record in all_records.items():
        if case.layer is None:
            records[case] = record
        else:
            relocated[case] = record
    parts = [
        INTRODUCTION.strip(),
        f"The code that ran them is of {describe_commit()}.",
        describe_counts(records),
        describe_relocated_counts(relocated),
        to_markdown(sound_rows(records)),
        to_markdown(gate_rows(records)),
        to_markdown(fault_rows(records)),
    ]
    return "\n\n".join(parts) + "\n"


def describe_commit() -> str:
    """The commit that is checked out, and whether code that verdicts depend on differs from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    commit = git("rev-parse", "--short", "HEAD")
    if not commit:
        return "a checkout without a history"
    # the same files as in `cases.version`, by which a record counts or not
    changes = git(
        "status",
        "--porcelain",
        "--untracked-files=all",
        "--",
        *cases.EXPORT_CODE,
        *cases.GATE_CODE,
    )
    python_changes = [line for line in changes.splitlines() if line.endswith(".py")]
    return f"commit {commit}" + (", with uncommitted changes" if python_changes else "")


def to_markdown(rows: list[dict]) -> str:
    frame = pd.DataFrame(rows).fillna("–")
    return frame.to_markdown(index=False, disable_numparse=True, tablefmt="github")


def describe_counts(records: Records) -> str:
    sound = sum(case.is_sound for case in records)
    failed = sum(record.fails for record in records.values())
    return (
        f"Run: {sound} of {len(cases.sound_cases())} cases on sound bundles, "
        f"{len(records) - sound} of {len(cases.faulty_cases())} cases of faults. "
        f"{failed} of them are not as they should be."
    )


def describe_relocated_counts(relocated: Records) -> str:
    failed = sum(record.fails for record in relocated.values())
    return (
        f"Of the faults of one layer, planted in other layers of the same program, "
        f"{len(relocated)} of {len(cases.relocated_cases())} cases ran; {failed} are GREEN."
    )


def sound_rows(records: Records) -> list[dict]:
    """A row for each kind of sound bundle: in how many cases of each preset a gate is RED."""
    # (kind, preset) → for each of these cases, whether it fails
    fails = defaultdict(list)
    for case, record in records.items():
        fails[case.kind, case.preset].append(record.fails)
    rows = []
    for kind, description in cases.SOUND.items():
        row = {"RED on sound bundles": description}
        for preset in cases.clean.PRESETS:
            outcomes = fails[kind, preset]
            row[preset] = f"{sum(outcomes)} of {len(outcomes)}" if outcomes else "–"
        rows.append(row)
    return rows


def gate_rows(records: Records) -> list[dict]:
    """A row for each gate: its limits; its largest figure on a sound bundle and its smallest RED
    figure, both as multiples of the limit; how many faults it shows, and how many of these no other
    gate shows. A gate shows a fault if it is RED in every preset that ran."""
    limits = defaultdict(set)  # gate → its limits
    # gate → (multiple of the limit, case) of every sound bundle, and of every case that is RED
    sound, red = defaultdict(list), defaultdict(list)
    for case, record in records.items():
        for gate in record.gates:
            name, ratio = gate["name"], ratio_to_limit(gate)
            if ratio is None:
                continue
            limits[name].add(f"{gate['threshold']:.4g}")
            if case.is_sound:
                sound[name].append((ratio, str(case)))
            # a gate may be RED for a reason without a figure, such as a missing tensor; then its
            # figure may be below the limit
            elif gate["verdict"] == "RED" and ratio > 1:
                red[name].append((ratio, str(case)))
    gates_of_faults = list(find_gates_of_faults(records).values())
    return [
        {
            "gate": f"`{name}`",
            "limit": ", ".join(sorted(limits[name])) or "–",
            "worst sound ÷ limit": describe_ratio(max(sound[name], default=None)),
            "mildest RED ÷ limit": describe_ratio(min(red[name], default=None)),
            "faults it shows": sum(name in gates for gates in gates_of_faults),
            "that it alone shows": gates_of_faults.count({name}),
        }
        for name in cases.GATE_NAMES
    ]


def find_gates_of_faults(records: Records) -> dict[tuple[str, str], set[str]]:
    """(kind, name) of every fault that ran → the gates that are RED in all of its presets."""
    gates = {}
    for case, record in records.items():
        if not case.is_sound:
            fault, red = (case.kind, case.name), set(record.red)
            gates[fault] = gates.get(fault, red) & red
    return gates


def ratio_to_limit(gate: dict) -> float | None:
    """Value over limit; None where one of them is no finite number, the limit is 0, or the gate has
    no figure."""
    value, limit = gate["value"], gate["threshold"]
    if not isinstance(value, int | float) or not isinstance(limit, int | float):
        return None
    if limit == 0 or not math.isfinite(value) or says_yes_or_no(gate):
        return None
    return value / limit


def says_yes_or_no(gate: dict) -> bool:
    """Whether a gate has no figure. Such a gate, of `workbench.check.gates.holds`, has the limit 1
    and the value 1 where it is GREEN and 0 where it is RED."""
    value_without_figure = 1 if gate["verdict"] == "GREEN" else 0
    return gate["threshold"] == 1 and gate["value"] == value_without_figure


def describe_ratio(worst: tuple[float, str] | None) -> str:
    if worst is None:
        return "–"
    ratio, case = worst
    return f"{ratio:.3g} ({case.replace('_', ' ')})"


def fault_rows(records: Records) -> list[dict]:
    """A row for each fault: in how many presets each gate is RED, and the smallest `best_ratio` of
    its presets."""
    # (kind, name) of a fault → its record in each preset
    by_fault = defaultdict(list)
    for case, record in records.items():
        if not case.is_sound:
            by_fault[case.kind, case.name].append(record)
    rows = []
    for (kind, name), fault_records in sorted(by_fault.items()):
        total = len(fault_records)
        counts = Counter(gate for record in fault_records for gate in record.red)
        gates = []
        for gate, count in counts.items():
            share = "" if count == total else f" ({count} of {total})"
            gates.append(f"`{gate}`{share}")
        red = sum(bool(record.red) for record in fault_records)
        row = {
            "fault": name.replace("_", " "),
            "planted in": "files" if kind == "disk" else "memory",
            "presets RED": f"{red} of {total}",
            "mildest best ÷ limit": f"{min(map(best_ratio, fault_records)):.3g}",
            "RED gates": ", ".join(gates) or "–",
        }
        rows.append(row)
    return rows


def best_ratio(record: Record) -> float:
    """The largest figure of a RED gate as a multiple of its limit, 0 without a RED gate; inf where
    a gate is RED for a reason without a figure."""
    ratios = [0.0]
    for gate in record.gates:
        if gate["verdict"] == "RED":
            ratio = ratio_to_limit(gate)
            ratios.append(math.inf if ratio is None or ratio <= 1 else ratio)
    return max(ratios)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.prove")
    parser.add_argument("words", nargs="*")
    parser.add_argument("-j", "--jobs", type=int, default=1)
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    chosen = [
        case
        for case in all_cases()
        if all(matches(case, word) for word in arguments.words)
    ]
    if not chosen:
        parser.error(
            f"no case has all of {' '.join(arguments.words)} in its name; the name of a fault is "
            "written in lower case, with underscores"
        )
    records = read_store()
    if not arguments.list:
        try:
            run_cases([case for case in chosen if case not in records], arguments.jobs)
        finally:
            records = read_store()
            if not arguments.words:
                TABLES.write_text(format_tables(records))
    ran = [records[case] for case in chosen if case in records]
    failed = [record for record in ran if record.fails]
    for record in failed:
        print(describe_failure(record))
    print(f"{len(ran)} of {len(chosen)} cases, {len(failed)} not as they should be")
    return int(bool(failed) or len(ran) < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
