"""The full matrices of bug gates: clean bundles × presets and planted faults × presets. `python -m tests.prove`.

Every case is one JSON line in build/prove/cases.jsonl, skipped when it is there for the same version of the code; the
tables of docs/verdict.md are written from these lines. Exits 1 when a clean case is RED, a fault is GREEN, or a gate broke.

    python -m tests.prove                  every case, in one process
    python -m tests.prove -j 2             in two processes
    python -m tests.prove disk int4        cases whose names contain all of these words
    python -m tests.prove --list           what fails so far, running nothing
"""

import argparse
import json
import math
import os
import sys
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "check"), str(ROOT / "tests")]
import cases  # noqa: E402

DOCUMENT = ROOT / "docs" / "verdict.md"
CLEAN = ("clean", "massive", "deep")


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
    versions = {case: cases.version(case) for case in cases.all_cases()}
    return {c: r for c, r in records.items() if versions.get(c) == r["version"]}


def fails(record: dict) -> bool:
    """Whether a case is not as it should be: a clean one RED, a fault GREEN, a gate broken."""
    clean = record["case"].split("/")[0] in CLEAN
    return bool(record["error"]) or clean == bool(record["red"])


def run(names: list[str], path: Path, jobs: int) -> None:
    """Runs cases and appends their lines."""
    from tqdm.auto import tqdm

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file, tqdm(total=len(names), desc="prove", unit="case") as bar:
        for record in records_of(names, jobs):
            file.write(json.dumps(record, default=str) + "\n")
            file.flush()
            bar.update()
            if fails(record):
                bar.write(f"{record['case']}: {record['error'] or record['red'] or 'GREEN'}")


def records_of(names: list[str], jobs: int):
    if jobs == 1:
        yield from map(one, names)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for future in as_completed([pool.submit(one, name) for name in names]):
            yield future.result()


def one(case: str) -> dict:
    import torch

    torch.set_num_threads(1)
    return cases.Prover().record(case)


def tables(records: dict[str, dict]) -> dict[str, str]:
    """The tables of docs/verdict.md by the name of their marker."""
    return {
        "clean": clean_table(records),
        "margins": margin_table(records),
        "faults": fault_table(records),
    }


def clean_table(records: dict[str, dict]) -> str:
    counts = defaultdict(lambda: [0, 0])
    for case, record in records.items():
        kind, _, preset = case.split("/")
        if kind in CLEAN:
            counts[kind, preset][0] += 1
            counts[kind, preset][1] += fails(record)
    presets = sorted({preset for _, preset in counts}, key=list(cases.clean.PRESETS).index)
    names = {
        "clean": "random draws",
        "massive": "one massive activation",
        "deep": "24 random layers",
    }
    rows = []
    for kind, name in names.items():
        rows.append([name])
        for preset in presets:
            total, red = counts[kind, preset]
            rows[-1].append(f"{red} of {total}" if total else "–")
    return markdown(["RED on sound bundles", *presets], rows)


def margin_table(records: dict[str, dict]) -> str:
    """For every gate with a figure: the worst clean value and the mildest RED one, as multiples of its limit."""
    clean, faults, order = defaultdict(list), defaultdict(list), {}
    for case, record in records.items():
        sound = case.split("/")[0] in CLEAN
        for gate in record["gates"]:
            ratio = ratio_to_limit(gate)
            order.setdefault(gate["name"], gate["threshold"])
            if ratio is None:
                continue
            if sound:
                clean[gate["name"]].append((ratio, case))
            elif gate["verdict"] == "RED":
                faults[gate["name"]].append((ratio, case))
    rows = []
    for name, limit in order.items():
        worst = max(clean[name], default=None)
        mild = min(faults[name], default=None)
        if worst or mild:
            rows.append([f"`{name}`", f"{limit:.3g}", place(worst), place(mild)])
    return markdown(["gate", "limit", "worst clean ÷ limit", "mildest RED ÷ limit"], rows)


def place(found: tuple[float, str] | None) -> str:
    return f"{found[0]:.3g} ({found[1].replace('_', ' ')})" if found else "–"


def ratio_to_limit(gate: dict) -> float | None:
    """Value over limit, None for gates that only say yes or no."""
    value, limit = gate["value"], gate["threshold"]
    numbers = all(isinstance(x, int | float) for x in (value, limit))
    if not numbers or not limit or not math.isfinite(value):
        return None
    yes_or_no = limit == 1 and value in (0, 1) and (value == 1) == (gate["verdict"] == "GREEN")
    return None if yes_or_no else value / limit


def fault_table(records: dict[str, dict]) -> str:
    """A row per fault: the gates that are RED for every preset, then those that are for some."""
    by_fault = defaultdict(dict)
    for case, record in records.items():
        kind, name, preset = case.split("/")
        if kind not in CLEAN:
            by_fault[kind, name][preset] = record
    rows = []
    for (kind, name), found in sorted(by_fault.items()):
        red = {preset: set(record["red"]) for preset, record in found.items()}
        everywhere = set.intersection(*red.values())
        some = set.union(*red.values()) - everywhere
        missed = [preset for preset, gates in red.items() if not gates]
        rows.append(
            [
                name.replace("_", " "),
                "files" if kind == "disk" else "memory",
                f"{len(found) - len(missed)} of {len(found)}",
                ", ".join(f"`{gate}`" for gate in sorted(everywhere)) or "–",
                ", ".join(f"`{gate}`" for gate in sorted(some)),
            ]
        )
    heads = ["fault", "planted in", "presets RED", "gates RED in all of them", "in some"]
    return markdown(heads, rows)


def markdown(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_tables(document: Path, made: dict[str, str]) -> None:
    """Puts each table between its markers, `<!-- NAME -->` and `<!-- end NAME -->`."""
    text = document.read_text()
    for name, table in made.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end {name} -->"
        before, rest = text.split(begin)
        text = before + begin + table + "\n" + end + rest.split(end)[1]
    document.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.prove")
    parser.add_argument("words", nargs="*")
    parser.add_argument("-j", "--jobs", type=int, default=1)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--store", type=Path, default=cases.STORE / "cases.jsonl")
    arguments = parser.parse_args()
    chosen = [c for c in cases.all_cases() if all(word in c for word in arguments.words)]
    done = current(stored(arguments.store))
    if not arguments.list:
        run([case for case in chosen if case not in done], arguments.store, arguments.jobs)
        done = current(stored(arguments.store))
        write_tables(DOCUMENT, tables(done))
    failing = [done[case] for case in chosen if case in done and fails(done[case])]
    for record in failing:
        print(f"{record['case']}: {record['error'] or record['red'] or 'every bug gate is GREEN'}")
    ran = sum(case in done for case in chosen)
    print(f"{ran} of {len(chosen)} cases, {len(failing)} not as they should be")
    return int(bool(failing) or ran < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
