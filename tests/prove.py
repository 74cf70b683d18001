"""The full matrices of bug gates: clean bundles × presets and planted faults × presets. `python -m
tests.prove`.

Every case is one JSON line in build/prove/cases.jsonl, skipped when it is there for the same
version of the code; the tables of tests/check/faults.md are written from them. Exits 1 when a
clean case is RED, a fault is GREEN, or a gate broke.

    python -m tests.prove                  every case, in one process
    python -m tests.prove -j 2             in two processes
    python -m tests.prove disk int4        cases whose names contain all of these words
    python -m tests.prove --list           what fails so far, running nothing

Cases are taken in a random order, a few of one bundle at a time: the first ones are a sample, from
which the time that all take is estimated, and an interrupted run has proved a bit of everything.
"""

import argparse
import json
import math
import os
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "check"), str(ROOT / "tests")]
import cases  # noqa: E402

TABLES = ROOT / "tests" / "check" / "faults.md"
ABOUT = """# Planted faults, and the gates that are RED

Written by `make prove` from the cases that ran. Every gate is asked of every fault; interface and
weights only of faults in files. Sound bundles have to stay below 1, faults above. `device` is asked
of the portable runtime in the place of a device. `weights` has two limits: halves of a step, and for
tables the distance to the nearest entry and the squared error over the best table's.
"""
CLEAN = ("clean", "trained", "massive", "deep")
BATCH = 8  # cases that a process runs before they are stored
SAMPLE = 0.05  # of all cases: enough for an estimate of the time


def stored(path: Path) -> dict[str, dict]:
    """The newest line of every case."""
    lines = path.read_text().splitlines() if path.is_file() else []
    records = {}
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:  # an interrupted run may leave half a line
            continue
        records[record["case"]] = record
    return records


def current(records: dict[str, dict]) -> dict[str, dict]:
    """Records of cases that exist, made by the code as it is."""
    known, version = cases.all_cases(), cases.version()
    return {
        c: records[c] for c in known if records.get(c, {}).get("version") == version
    }


def fails(record: dict) -> bool:
    """Whether a case is not as it should be: a clean one RED, a fault GREEN, a gate broken."""
    clean = record["case"].split("/")[0] in CLEAN
    return bool(record["error"]) or clean == bool(record["red"])


def run(names: list[str], path: Path, jobs: int) -> None:
    """Runs cases and appends their lines."""
    from tqdm.auto import tqdm

    path.parent.mkdir(parents=True, exist_ok=True)
    start, count = time.perf_counter(), 0
    with (
        path.open("a") as file,
        tqdm(total=len(names), desc="prove", unit="case") as bar,
    ):
        for records in records_of(batches(names), jobs):
            for record in records:
                file.write(json.dumps(record, default=str) + "\n")
                if fails(record):
                    bar.write(
                        f"{record['case']}: {record['error'] or record['red'] or 'GREEN'}"
                    )
            file.flush()
            sampled = count >= len(names) * SAMPLE
            count += len(records)
            bar.update(len(records))
            if not sampled and count >= len(names) * SAMPLE:
                minutes = (time.perf_counter() - start) / count * len(names) / 60
                bar.write(
                    f"{len(names)} cases take about {minutes:.0f} minutes, by {count} of them"
                )


def batches(names: list[str]) -> list[list[str]]:
    """Cases of one bundle, `BATCH` at most, in a random order that is always the same."""
    rng, by_bundle = random.Random(0), defaultdict(list)
    for name in names:
        by_bundle[cases.bundle_of(name)].append(name)
    parts = []
    for group in by_bundle.values():
        rng.shuffle(group)
        parts += [group[i : i + BATCH] for i in range(0, len(group), BATCH)]
    rng.shuffle(parts)
    return parts


def records_of(parts: list[list[str]], jobs: int) -> Iterator[list[dict]]:
    if jobs == 1:
        yield from (prove([case]) for part in parts for case in part)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for future in as_completed([pool.submit(prove, part) for part in parts]):
            yield future.result()


def prove(part: list[str]) -> list[dict]:
    import torch

    torch.set_num_threads(1)
    return [cases.Prover().record(case) for case in part]


def tables(records: dict[str, dict]) -> str:
    """What tests/check/faults.md says of the cases that ran."""
    made = clean_table(records), gate_table(records), fault_table(records)
    return "\n\n".join([ABOUT.strip(), *made]) + "\n"


def clean_table(records: dict[str, dict]) -> str:
    counts = defaultdict(lambda: [0, 0])
    for case, record in records.items():
        kind, _, preset = case.split("/")
        if kind in CLEAN:
            counts[kind, preset][0] += 1
            counts[kind, preset][1] += fails(record)
    presets = sorted(
        {preset for _, preset in counts}, key=list(cases.clean.PRESETS).index
    )
    names = {
        "clean": "random draws",
        "trained": "trained checkpoints",
        "massive": "one massive activation",
        "deep": "24 random layers",
    }
    rows = []
    for kind, name in names.items():
        rows.append([name])
        for preset in presets:
            total, red = counts[kind, preset]
            rows[-1].append(f"{red} of {total}" if total else "–")
    table = markdown(["RED on sound bundles", *presets], rows)
    return f"{counts_in_words(records)}\n\n{table}"


def counts_in_words(records: dict[str, dict]) -> str:
    """How many cases of each kind ran, of how many."""
    everything = [case.split("/")[0] for case in cases.all_cases()]
    ran = [case.split("/")[0] for case in records]
    kinds = {"on sound bundles": CLEAN, "of faults in files": ("disk",)}
    parts = []
    for name, of_kind in (kinds | {"of faults in memory": ("memory",)}).items():
        counts = [sum(kind in of_kind for kind in names) for names in (ran, everything)]
        parts.append(f"{counts[0]} of {counts[1]} cases {name}")
    failing = sum(map(fails, records.values()))
    return f"Run: {', '.join(parts)}. {failing} of them are not as they should be."


def gate_table(records: dict[str, dict]) -> str:
    """For every gate: its limits, the worst figure on sound bundles and the mildest RED one as
    multiples of the limit, how many faults it shows, and how many no other gate shows. A fault is
    shown where its gate is RED in every preset that ran."""
    clean, mild, limits = defaultdict(list), defaultdict(list), defaultdict(set)
    for case, record in records.items():
        for gate in record["gates"]:
            ratio = ratio_to_limit(gate)
            if ratio is None:
                continue
            limits[gate["name"]].add(f"{gate['threshold']:.4g}")
            if case.split("/")[0] in CLEAN:
                clean[gate["name"]].append((ratio, case))
            # else it is RED for what it names, not for its figure
            elif gate["verdict"] == "RED" and ratio > 1:
                mild[gate["name"]].append((ratio, case))
    shown = shown_by(records)
    rows = []
    for name in sorted(set().union(*shown.values(), limits), key=order):
        figures = max(clean[name], default=None), min(mild[name], default=None)
        seen = [fault for fault, gates in shown.items() if name in gates]
        alone = [fault for fault in seen if shown[fault] == {name}]
        limit = ", ".join(sorted(limits[name])) or "–"
        counts = [str(len(seen)), str(len(alone))]
        rows.append([f"`{name}`", limit, *map(place, figures), *counts])
    heads = ["gate", "limit", "worst sound ÷ limit", "mildest RED ÷ limit"]
    table = markdown([*heads, "faults it shows", "that it alone shows"], rows)
    names = ", ".join(f"`{name}`" for name in sufficient(shown))
    return f"{table}\n\nOf these gates {names} alone show every fault that ran."


def shown_by(records: dict[str, dict]) -> dict[tuple, set[str]]:
    """(kind, name) of every fault that ran → the gates that are RED in each of its presets."""
    shown = {}
    for case, record in records.items():
        kind, name, _ = case.split("/")
        if kind not in CLEAN:
            red = set(record["red"])
            shown[kind, name] = shown.get((kind, name), red) & red
    return shown


def sufficient(shown: dict[tuple, set[str]]) -> list[str]:
    """Few gates that together show every fault that any gate shows: those that alone show one,
    then whichever shows most of the rest."""
    left = [gates for gates in shown.values() if gates]
    chosen = {gate for gates in left if len(gates) == 1 for gate in gates}
    while left := [gates for gates in left if not gates & chosen]:
        chosen.add(
            max(sorted(set().union(*left)), key=lambda g: sum(g in s for s in left))
        )
    return sorted(chosen, key=order)


def order(name: str) -> int:
    """The place of a gate in tables: as they are asked."""
    names = [name for step in cases.STEPS for name in step]
    return names.index(name) if name in names else len(names)


def place(found: tuple[float, str] | None) -> str:
    return f"{found[0]:.3g} ({found[1].replace('_', ' ')})" if found else "–"


def ratio_to_limit(gate: dict) -> float | None:
    """Value over limit, None for gates that only say yes or no."""
    value, limit = gate["value"], gate["threshold"]
    numbers = all(isinstance(x, int | float) for x in (value, limit))
    if not numbers or not limit or not math.isfinite(value):
        return None
    yes_or_no = (
        limit == 1 and value in (0, 1) and (value == 1) == (gate["verdict"] == "GREEN")
    )
    return None if yes_or_no else value / limit


def fault_table(records: dict[str, dict]) -> str:
    """A row per fault: in how many presets each gate is RED, and the mildest figure of the best
    gate of each preset, as a multiple of its limit."""
    by_fault = defaultdict(list)
    for case, record in records.items():
        kind, name, _ = case.split("/")
        if kind not in CLEAN:
            by_fault[kind, name].append(record)
    rows = []
    for (kind, name), of_fault in sorted(by_fault.items()):
        counts = Counter(gate for record in of_fault for gate in record["red"])
        shares = [
            f"`{gate}`" + f" ({count} of {len(of_fault)})" * (count < len(of_fault))
            for gate, count in counts.items()
        ]
        caught = sum(bool(record["red"]) for record in of_fault)
        place = "files" if kind == "disk" else "memory"
        best = min(map(best_ratio, of_fault))
        cells = [name.replace("_", " "), place, f"{caught} of {len(of_fault)}"]
        rows.append([*cells, f"{best:.3g}", ", ".join(shares) or "–"])
    heads = ["fault", "planted in", "presets RED", "mildest best ÷ limit", "RED gates"]
    return markdown(heads, rows)


def best_ratio(record: dict) -> float:
    """The largest figure over its limit of the RED gates; inf for one that says yes or no."""
    red = [gate for gate in record["gates"] if gate["verdict"] == "RED"]
    ratios = [ratio_to_limit(gate) for gate in red]
    return max((math.inf if r is None or r <= 1 else r for r in ratios), default=0.0)


def markdown(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.prove")
    parser.add_argument("words", nargs="*")
    parser.add_argument("-j", "--jobs", type=int, default=1)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--store", type=Path, default=cases.STORE / "cases.jsonl")
    arguments = parser.parse_args()
    chosen = [
        c for c in cases.all_cases() if all(word in c for word in arguments.words)
    ]
    done = current(stored(arguments.store))
    if not arguments.list:
        try:
            run(
                [case for case in chosen if case not in done],
                arguments.store,
                arguments.jobs,
            )
        finally:
            done = current(stored(arguments.store))
            TABLES.write_text(tables(done))
    failing = [done[case] for case in chosen if case in done and fails(done[case])]
    for record in failing:
        print(
            f"{record['case']}: {record['error'] or record['red'] or 'every bug gate is GREEN'}"
        )
    ran = sum(case in done for case in chosen)
    print(f"{ran} of {len(chosen)} cases, {len(failing)} not as they should be")
    return int(bool(failing) or ran < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
