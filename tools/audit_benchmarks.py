"""Computes both tables of benchmarks again from their samples: the README's, which has the rows of
`README_ROWS`, and that of experiments/benchmarks/README.md, which has all rows.

It uses neither the package's statistics nor those of `bench_record.py`."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from bench_record import README_ROWS, TableRow
from finding import Finding

ROW_TOLERANCE = 6e-3  # relative: the table prints three digits
NUMBER = r"[\d,]*\.?\d+(?:e-\d+)?"  # "1,234", "0.5", "1e-05"
# "1.2 (1.1 to 1.3)", and "250 tok/s"
RATIO = re.compile(rf"({NUMBER}) \(({NUMBER}) to ({NUMBER})\)")
VALUE = re.compile(rf"({NUMBER}) (\S+)")
BLOCK = re.compile(r"<!-- benchmarks -->(.*?)<!-- /benchmarks -->", re.DOTALL)
NOT_MEASURED = "not measured"
UNITS = ("tok/s", "s", "bytes")


@dataclass(frozen=True)
class Ratio:
    """How many times as fast as its peer a series is: figures over the rounds."""

    median: float
    least: float
    most: float


@dataclass(frozen=True)
class Row:
    """A row of the table, from the samples.

    Args:
        what: what was measured.
        identity: its command, which is the argument of `tools/bench.py`, its series and its peer.
        ratio: None where one of the two was not measured.
        value: the median in `unit`; None where it was not measured.
        peer_value: the peer's median, or None.
    """

    what: str
    identity: TableRow
    ratio: Ratio | None
    value: float | None
    peer_value: float | None
    unit: str


def check_benchmarks(
    project: Path, shown: Sequence[TableRow] = README_ROWS
) -> list[Finding]:
    """Lists samples that cannot be right, and the faults of both tables (`check_table`).

    Args:
        shown: the rows that the README must have.
    """
    folder = project / "experiments" / "benchmarks"
    files = sorted(folder.glob("*.json"))
    documents = [json.loads(file.read_text()) for file in files]
    findings, rows = [], []
    for document in documents:
        findings += check_series(place_of(document["command"]), document)
        rows += compute_rows(document)
    by_identity = {row.identity: row for row in rows}
    readme_rows = []
    for row in shown if documents else ():
        if row in by_identity:
            readme_rows.append(by_identity[row])
        else:
            needed = "a row that the samples have"
            label = f"{row.series} beside {row.peer}"
            findings.append(
                Finding(place_of(row.command), label, "README_ROWS", needed)
            )
    findings += check_table("README.md", project, documents, readme_rows)
    page = "experiments/benchmarks/README.md"
    return findings + check_table(page, project, documents, rows)


def place_of(command: str) -> str:
    """The place of a finding about a benchmark."""
    return f"benchmarks/{command}"


def check_table(
    page: str, project: Path, documents: list[dict], rows: list[Row]
) -> list[Finding]:
    """Lists the cells of a page's table that differ from the samples, rows without a benchmark,
    benchmarks without a row, and machines that the page does not name.

    Args:
        page: its path in the project.
        rows: those that the table must have. Rows of one label are in the table's order.
    """
    path = project / page
    block = BLOCK.search(path.read_text()) if path.exists() else None
    lines = block[1].splitlines() if block else []
    # every row with a benchmark is removed from these
    unmatched = printed_rows(lines)
    findings = []
    for row in rows:
        place = place_of(row.identity.command)
        rows_with_label = unmatched.get((row.what, row.identity.command))
        if rows_with_label:
            findings += check_row(place, row, rows_with_label.pop(0))
        else:
            findings.append(Finding(place, row.what, f"no row in {page}", "a row"))
    commands = {row.identity.command for row in rows}
    for document in documents:
        is_shown = document["command"] in commands
        if is_shown and not any(_names_machine(line, document) for line in lines):
            needed = f"- `{document['command']}`: {document['machine']}; "
            place = place_of(document["command"])
            findings.append(Finding(place, "machine", f"not in {page}", needed))
    for (what, command), remaining in unmatched.items():
        for _ in remaining:
            row = f"a row of `{command}`"
            findings.append(Finding(page, what, row, "no benchmark"))
    return findings


def _names_machine(line: str, document: dict) -> bool:
    """Whether a line of a page names the machine of a document. One line may stand for
    the documents of several commands."""
    commands, _, words = line.partition("`: ")
    is_named = f"`{document['command']}`" in f"{commands}`"
    is_item = line.startswith("- `")
    return is_item and is_named and words.startswith(f"{document['machine']}; ")


def printed_rows(lines: list[str]) -> dict[tuple[str, str], list[list[str]]]:
    """(what, command) → the cells of each row of the table with this label. A series that is
    compared with several peers has several rows, in the order of the comparisons."""
    rows: dict[tuple[str, str], list[list[str]]] = {}
    for line in lines:
        if line.startswith("| ") and not line.startswith("| what |"):
            cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
            rows.setdefault((cells[0], cells[-1].strip("`")), []).append(cells)
    return rows


def check_series(place: str, document: dict) -> list[Finding]:
    """Lists units that no benchmark has, and samples that are no positive numbers."""
    findings = []
    for series in document["series"]:
        name, unit, samples = series["name"], series["unit"], series["samples"]
        if unit not in UNITS:
            findings.append(Finding(place, name, unit, "tok/s, s or bytes"))
        if samples is None:
            if not series["missing"]:
                findings.append(Finding(place, name, "no samples", "a reason"))
        elif not are_positive(samples):
            findings.append(Finding(place, name, str(samples), "positive samples"))
    return findings


def are_positive(samples: list[float]) -> bool:
    """Whether there are samples, all of them finite and above zero."""
    return bool(samples) and bool(np.all(np.isfinite(samples))) and min(samples) > 0


def compute_rows(document: dict) -> list[Row]:
    """The rows that follow from the samples of a benchmark."""
    series_by_name = {series["name"]: series for series in document["series"]}
    rows = []
    for comparison in document["comparisons"]:
        series = series_by_name[comparison["series"]]
        peer = series_by_name[comparison["peer"]]
        row = Row(
            what=comparison["what"],
            identity=TableRow(document["command"], series["name"], peer["name"]),
            ratio=compute_ratio(series, peer),
            value=_median(series),
            peer_value=_median(peer),
            unit=series["unit"],
        )
        rows.append(row)
    return rows


def compute_ratio(series: dict, peer: dict) -> Ratio | None:
    """The ratio of two series, whose samples are paired by round: above one where the first
    is faster than the peer."""
    if not series["samples"] or not peer["samples"]:
        return None
    ratios = np.divide(series["samples"], peer["samples"])
    if series["unit"] == "s":  # the smaller time is the faster one
        ratios = 1 / ratios
    return Ratio(float(np.median(ratios)), ratios.min(), ratios.max())


def _median(series: dict) -> float | None:
    samples = series["samples"]
    return float(np.median(samples)) if samples else None


def check_row(place: str, row: Row, texts: list[str]) -> list[Finding]:
    """Lists the cells of a printed row that differ from the computed one."""
    if len(texts) != 5:
        return [Finding(place, row.what, " | ".join(texts), "five cells")]
    _, ratio, value, peer, _ = texts
    findings = check_ratio(place, f"ratio of {row.what}", ratio, row.ratio)
    name, _, peer_value = peer.rpartition(": ")
    if name != row.identity.peer:
        needed = row.identity.peer
        findings.append(Finding(place, f"peer of {row.what}", name, needed))
    label = f"value of {row.what}"
    findings += check_value(place, label, value, row.value, row.unit)
    label = f"peer's value of {row.what}"
    findings += check_value(place, label, peer_value, row.peer_value, row.unit)
    return findings


def check_ratio(
    place: str, label: str, text: str, ratio: Ratio | None
) -> list[Finding]:
    """Checks a printed ratio: its median, the least and the most."""
    if ratio is None:
        if text == NOT_MEASURED:
            return []
        return [Finding(place, label, text, NOT_MEASURED)]
    figures = ratio.median, ratio.least, ratio.most
    match = RATIO.fullmatch(text)
    if match and all(map(_is_close, match.groups(), figures)):
        return []
    computed = "{:.3g} ({:.3g} to {:.3g})".format(*figures)
    return [Finding(place, label, text, computed)]


def check_value(
    place: str, label: str, text: str, number: float | None, unit: str
) -> list[Finding]:
    """Checks a printed number with its unit. A number that is None was not measured."""
    match = VALUE.fullmatch(text)
    if number is None:
        if text != NOT_MEASURED:
            return [Finding(place, label, text, NOT_MEASURED)]
    elif not match or not _is_close(match[1], number):
        return [Finding(place, label, text, f"{number:.3g} {unit}")]
    elif match[2] != unit:
        return [Finding(place, f"unit of the {label}", match[2], unit)]
    return []


def _is_close(text: str, number: float) -> bool:
    return bool(np.isclose(float(text.replace(",", "")), number, rtol=ROW_TOLERANCE))
