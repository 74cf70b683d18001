"""Computes the README's table of benchmarks again from their samples.

It uses neither the package's statistics nor those of `bench_record.py`."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROW_TOLERANCE = 6e-3  # relative: the table prints three digits
NUMBER = r"[\d,]*\.?\d+"
RATIO = re.compile(rf"({NUMBER}) \(({NUMBER}) to ({NUMBER})\)")
VALUE = re.compile(rf"({NUMBER}) (\S+)")
BLOCK = re.compile(r"<!-- benchmarks -->(.*?)<!-- /benchmarks -->", re.DOTALL)
NOT_MEASURED = "not measured"
RATES, TIMES = {"tok/s"}, {"s"}


@dataclass(frozen=True)
class Row:
    """What a row of the table must say."""

    what: str
    command: str
    ratios: tuple[float, float, float] | None
    value: float | None
    peer: str
    peer_value: float | None
    unit: str


def check_benchmarks(project: Path) -> list[tuple[str, str, str, str]]:
    """Place, label, printed text and computed text of every cell of the table that differs from the
    samples, of rows without a benchmark and of benchmarks without a row."""
    files = sorted((project / "experiments" / "benchmarks").glob("*.json"))
    readme = project / "README.md"
    block = BLOCK.search(readme.read_text()) if readme.exists() else None
    if not files and not block:
        return []
    lines = block[1].splitlines() if block else []
    cells = [
        [cell.strip() for cell in line.strip("| ").split(" | ")]
        for line in lines
        if line.startswith("| ") and not line.startswith("| what |")
    ]
    # several peers may stand beside one series: such rows are in the samples' order
    printed: dict[tuple[str, str], list[list[str]]] = {}
    for row in cells:
        printed.setdefault((row[0], row[-1].strip("`")), []).append(row)
    findings = []
    for file in files:
        document = json.loads(file.read_text())
        place = f"benchmarks/{file.stem}"
        findings += check_series(place, document)
        for row in compute_rows(document):
            rows_left = printed.get((row.what, row.command))
            if not rows_left:
                findings.append((place, row.what, "no row in README.md", "a row"))
            else:
                findings += check_row(place, row, rows_left.pop(0))
        condition = f"- `{document['command']}`: {document['machine']}; "
        if not any(line.startswith(condition) for line in lines):
            findings.append((place, "machine", "not in README.md", condition))
    for (what, command), rows_left in printed.items():
        for _ in rows_left:
            findings.append(
                ("README.md", what, f"a row of `{command}`", "no benchmark")
            )
    return findings


def check_series(place: str, document: dict) -> list[tuple[str, str, str, str]]:
    """Units that no benchmark has, and samples that are no positive numbers."""
    findings = []
    for series in document["series"]:
        if series["unit"] not in RATES | TIMES | {"bytes"}:
            findings.append(
                (place, series["name"], series["unit"], "tok/s, s or bytes")
            )
        samples = series["samples"]
        if samples is None:
            if not series["missing"]:
                findings.append((place, series["name"], "no samples", "a reason"))
        elif not samples or not np.all(np.isfinite(samples)) or min(samples) <= 0:
            findings.append((place, series["name"], str(samples), "positive samples"))
    return findings


def compute_rows(document: dict) -> list[Row]:
    """The rows that follow from the samples of a benchmark."""
    series = {one["name"]: one for one in document["series"]}
    rows = []
    for comparison in document["comparisons"]:
        first, peer = series[comparison["series"]], series[comparison["peer"]]
        value, peer_value = _median(first), _median(peer)
        ratios = None
        if value is not None and peer_value is not None:
            fraction = np.divide(first["samples"], peer["samples"])
            # a ratio above one: faster than the peer
            if first["unit"] in TIMES:
                fraction = 1 / fraction
            ratios = float(np.median(fraction)), fraction.min(), fraction.max()
        rows.append(
            Row(
                comparison["what"],
                document["command"],
                ratios,
                value,
                peer["name"],
                peer_value,
                first["unit"],
            )
        )
    return rows


def _median(series: dict) -> float | None:
    samples = series["samples"]
    return float(np.median(samples)) if samples else None


def check_row(
    place: str, row: Row, texts: list[str]
) -> list[tuple[str, str, str, str]]:
    """The cells of a printed row that differ from the computed one."""
    if len(texts) != 5:
        return [(place, row.what, " | ".join(texts), "five cells")]
    _, ratio, value, peer, _ = texts
    findings = []
    match = RATIO.fullmatch(ratio)
    if row.ratios is None:
        if ratio != NOT_MEASURED:
            findings.append((place, f"ratio of {row.what}", ratio, NOT_MEASURED))
    elif not match or not all(map(_close, match.groups(), row.ratios)):
        computed = "{:.3g} ({:.3g} to {:.3g})".format(*row.ratios)
        findings.append((place, f"ratio of {row.what}", ratio, computed))
    name, _, peer_value = peer.rpartition(": ")
    if name != row.peer:
        findings.append((place, f"peer of {row.what}", name, row.peer))
    for label, text, number in (
        (f"value of {row.what}", value, row.value),
        (f"peer's value of {row.what}", peer_value, row.peer_value),
    ):
        match = VALUE.fullmatch(text)
        if number is None:
            if text != NOT_MEASURED:
                findings.append((place, label, text, NOT_MEASURED))
        elif not match or not _close(match[1], number):
            findings.append((place, label, text, f"{number:.3g} {row.unit}"))
        elif match[2] != row.unit:
            findings.append((place, f"unit of the {label}", match[2], row.unit))
    return findings


def _close(text: str, number: float) -> bool:
    return bool(np.isclose(float(text.replace(",", "")), number, rtol=ROW_TOLERANCE))
