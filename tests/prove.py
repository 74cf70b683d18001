"""The full matrices of gates: sound bundles × presets and planted faults × presets. `python -m
tests.prove`.

Every case is one JSON line in build/prove/cases.jsonl, skipped when it is there for the same
version of the code; the tables of tests/check/faults.md are written from them. Exits 1 when a
sound bundle is RED, a fault is GREEN, or a gate broke.

    python -m tests.prove -j 2             every case, in two processes
    python -m tests.prove disk int4        cases whose names contain all of these words
    python -m tests.prove --list           what fails so far, running nothing
"""

import argparse
import json
import math
import os
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
from tqdm import tqdm  # noqa: E402

RECORDS = cases.STORE / "cases.jsonl"
TABLES = ROOT / "tests" / "check" / "faults.md"
ABOUT = """# Planted faults, and the gates that are RED

Written by `make prove` from the cases that ran. Every gate is asked of every fault; interface and
weights only of faults in files. Sound bundles have to stay below 1, faults above. `device` is asked
of the portable runtime in the place of a device. `weights` has two limits: halves of a step, and for
tables the distance to the nearest entry and the squared error over the best table's.
"""


def stored() -> dict[str, dict]:
    """The newest line of every case that exists, made by the code as it is."""
    records, version = {}, cases.version()
    known = {*cases.sound_cases(), *cases.faulty_cases()}
    for line in RECORDS.read_text().splitlines() if RECORDS.is_file() else []:
        try:
            record = json.loads(line)
        except ValueError:  # an interrupted run may leave half a line
            continue
        if record["version"] == version and record["case"] in known:
            records[record["case"]] = record
    return records


def is_sound(case: str) -> bool:
    return case.split("/")[0] in cases.SOUND


def fails(record: dict) -> bool:
    """Whether a sound bundle is RED, a fault GREEN, or a gate broken."""
    return bool(record["error"]) or is_sound(record["case"]) == bool(record["red"])


def told(record: dict) -> str:
    found = record["error"] or record["red"] or "every gate is GREEN"
    return f"{record['case']}: {found}"


def run(names: list[str], jobs: int) -> None:
    """Runs cases, those of one bundle one after the other, and appends their lines."""
    RECORDS.parent.mkdir(parents=True, exist_ok=True)
    by_bundle = sorted(
        names, key=lambda name: sha256(str(cases.recipe(name)).encode()).digest()
    )
    pool = ProcessPoolExecutor(jobs, get_context("spawn"))
    with pool, RECORDS.open("a") as file:
        found = pool.map(prove, by_bundle, chunksize=4)
        for record in tqdm(found, "prove", len(names), unit="case"):
            file.write(json.dumps(record, default=str) + "\n")
            file.flush()
            if fails(record):
                tqdm.write(told(record))


def prove(case: str) -> dict:
    root = cases.STORE / cases.code_version(*cases.EXPORT)
    return cases.record(tiny.Exports(root), case)


def tables(records: dict[str, dict]) -> str:
    """What tests/check/faults.md says of the cases that ran."""
    made = sound_table(records), gate_table(records), fault_table(records)
    return "\n\n".join([ABOUT.strip(), counts(records), *made]) + "\n"


def markdown(rows: list[dict]) -> str:
    frame = pd.DataFrame(rows).fillna("–")
    return frame.to_markdown(index=False, disable_numparse=True, tablefmt="github")


def counts(records: dict[str, dict]) -> str:
    """How many cases ran, of how many."""
    sound = sum(map(is_sound, records))
    every = len(cases.sound_cases()), len(cases.faulty_cases())
    return (
        f"Run: {sound} of {every[0]} cases on sound bundles, {len(records) - sound} of "
        f"{every[1]} cases of faults. {sum(map(fails, records.values()))} of them are "
        "not as they should be."
    )


def sound_table(records: dict[str, dict]) -> str:
    found = defaultdict(list)
    for case, record in records.items():
        kind, _, preset = case.split("/")
        found[kind, preset].append(fails(record))
    rows = []
    for kind, name in cases.SOUND.items():
        row = {"RED on sound bundles": name}
        for preset in cases.clean.PRESETS:
            red = found[kind, preset]
            row[preset] = f"{sum(red)} of {len(red)}" if red else "–"
        rows.append(row)
    return markdown(rows)


def gate_table(records: dict[str, dict]) -> str:
    """For every gate: its limits, the worst figure on sound bundles and the mildest RED one as
    multiples of the limit, how many faults it shows, and how many no other gate shows. A fault is
    shown where its gate is RED in every preset that ran."""
    sound, mild, limits = defaultdict(list), defaultdict(list), defaultdict(set)
    for case, record in records.items():
        for gate in record["gates"]:
            name, ratio = gate["name"], ratio_to_limit(gate)
            if ratio is None:
                continue
            limits[name].add(f"{gate['threshold']:.4g}")
            if is_sound(case):
                sound[name].append((ratio, case))
            # else it is RED for what it names, not for its figure
            elif gate["verdict"] == "RED" and ratio > 1:
                mild[name].append((ratio, case))
    shown = shown_by(records)
    rows = []
    for name in (name for step in cases.STEPS for name in step):
        seen = [gates for gates in shown.values() if name in gates]
        row = {
            "gate": f"`{name}`",
            "limit": ", ".join(sorted(limits[name])) or "–",
            "worst sound ÷ limit": place(max(sound[name], default=None)),
            "mildest RED ÷ limit": place(min(mild[name], default=None)),
            "faults it shows": len(seen),
            "that it alone shows": seen.count({name}),
        }
        rows.append(row)
    names = ", ".join(f"`{name}`" for name in sufficient(shown))
    return (
        f"{markdown(rows)}\n\nOf these gates {names} alone show every fault that ran."
    )


def shown_by(records: dict[str, dict]) -> dict[str, set[str]]:
    """Every fault that ran → the gates that are RED in each of its presets."""
    shown = {}
    for case, record in records.items():
        fault, red = case.rpartition("/")[0], set(record["red"])
        if not is_sound(case):
            shown[fault] = shown.get(fault, red) & red
    return shown


def sufficient(shown: dict[str, set[str]]) -> list[str]:
    """Few gates that together show every fault that any gate shows: those that alone show one,
    then whichever shows most of the rest."""
    left = [gates for gates in shown.values() if gates]
    chosen = {gate for gates in left if len(gates) == 1 for gate in gates}
    while left := [gates for gates in left if not gates & chosen]:
        seen = Counter(gate for gates in left for gate in sorted(gates))
        chosen.add(seen.most_common(1)[0][0])
    return [name for step in cases.STEPS for name in step if name in chosen]


def place(found: tuple[float, str] | None) -> str:
    return f"{found[0]:.3g} ({found[1].replace('_', ' ')})" if found else "–"


def ratio_to_limit(gate: dict) -> float | None:
    """Value over limit, None for gates that only say yes or no."""
    value, limit = gate["value"], gate["threshold"]
    numbers = all(isinstance(x, int | float) for x in (value, limit))
    if not numbers or not limit or not math.isfinite(value):
        return None
    yes_or_no = limit == 1 and value == (gate["verdict"] == "GREEN")
    return None if yes_or_no else value / limit


def fault_table(records: dict[str, dict]) -> str:
    """A row per fault: in how many presets each gate is RED, and the mildest figure of the best
    gate of each preset, as a multiple of its limit."""
    by_fault = defaultdict(list)
    for case, record in records.items():
        if not is_sound(case):
            by_fault[case.rpartition("/")[0]].append(record)
    rows = []
    for fault, found in sorted(by_fault.items()):
        seen = Counter(gate for record in found for gate in record["red"])
        shares = [
            f"`{gate}`" + f" ({count} of {len(found)})" * (count < len(found))
            for gate, count in seen.items()
        ]
        kind, name = fault.split("/")
        row = {
            "fault": name.replace("_", " "),
            "planted in": "files" if kind == "disk" else "memory",
            "presets RED": f"{sum(bool(r['red']) for r in found)} of {len(found)}",
            "mildest best ÷ limit": f"{min(map(best_ratio, found)):.3g}",
            "RED gates": ", ".join(shares) or "–",
        }
        rows.append(row)
    return markdown(rows)


def best_ratio(record: dict) -> float:
    """The largest figure over its limit of the RED gates; inf for one that says yes or no."""
    red = [gate for gate in record["gates"] if gate["verdict"] == "RED"]
    ratios = [ratio_to_limit(gate) for gate in red]
    return max((math.inf if r is None or r <= 1 else r for r in ratios), default=0.0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.prove")
    parser.add_argument("words", nargs="*")
    parser.add_argument("-j", "--jobs", type=int, default=1)
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    every = cases.sound_cases() + cases.faulty_cases()
    chosen = [case for case in every if all(word in case for word in arguments.words)]
    done = stored()
    if not arguments.list:
        try:
            run([case for case in chosen if case not in done], arguments.jobs)
        finally:
            done = stored()
            TABLES.write_text(tables(done))
    failing = [done[case] for case in chosen if case in done and fails(done[case])]
    for record in failing:
        print(told(record))
    ran = sum(case in done for case in chosen)
    print(f"{ran} of {len(chosen)} cases, {len(failing)} not as they should be")
    return int(bool(failing) or ran < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
