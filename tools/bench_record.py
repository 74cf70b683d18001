"""What a benchmark records, and the two tables that are made of it: all comparisons on the page
beside the files, and a few of them in the README.

A file COMMAND.json has the comparisons, every sample of every series, and the machine, its load,
versions and commit. `tools/audit.py` computes the tables again from these files by formulas of its
own."""

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from page_blocks import replace_block

FASTER_IS_MORE = {"tok/s": True, "s": False}
"""Unit → whether the larger number is the faster one. Series of other units are not compared."""
NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class TableRow:
    """A row of a table: a comparison, named by its command, its series and its peer.

    The text of a row names the model too, which is another one where SmolLM2 is missing."""

    command: str
    series: str
    peer: str


README_ROWS = (
    TableRow("decode", "int8-channel at 64", "llama.cpp Q8_0 at 64"),
    TableRow("decode", "int8-channel at 64", "HF bfloat16 at 64"),
    TableRow("prompt", "int8-channel, T = 64", "llama.cpp Q8_0"),
    TableRow("evaluate", "evaluate", "HF fp32, documented loop"),
    TableRow("validate", "first validation with checkpoint", "HF fp32, one pass"),
    TableRow("export", "export", "coremltools, one shard of each kind × their number"),
    TableRow("log", "first load of a copy", "pandas"),
)
"""The rows of the README's table, in its order: one for each task of a user in the default preset,
and both peers of decoding."""


@dataclass(frozen=True)
class Series:
    """The samples of one contestant, one for each round.

    Args:
        unit: `tok/s`, `s` or `bytes`.
        samples: None where the contestant cannot run here.
        missing: why it cannot.
    """

    name: str
    unit: str
    samples: list[float] | None
    missing: str | None = None

    @property
    def median(self) -> float | None:
        return statistics.median(self.samples) if self.samples else None

    @property
    def value(self) -> str:
        """The median with its unit."""
        if self.median is None:
            return NOT_MEASURED
        return f"{format_number(self.median)} {self.unit}"


@dataclass(frozen=True)
class Comparison:
    """A series and its peer, both named; `what` says what was measured."""

    what: str
    series: str
    peer: str


@dataclass(frozen=True)
class Measurement:
    """The series and comparisons of one run of a benchmark."""

    series: list[Series]
    comparisons: list[Comparison]

    def named(self, name: str) -> Series:
        """The series of this name."""
        (series,) = [series for series in self.series if series.name == name]
        return series

    def ratio(self, comparison: Comparison) -> str:
        """The number of times that a series is as fast as its peer: the median over rounds, the
        least and the largest. The samples of a round are paired."""
        series, peer = self.named(comparison.series), self.named(comparison.peer)
        if series.samples is None or peer.samples is None:
            return NOT_MEASURED
        pairs = zip(series.samples, peer.samples, strict=True)
        if FASTER_IS_MORE[series.unit]:
            ratios = [value / peer_value for value, peer_value in pairs]
        else:
            ratios = [peer_value / value for value, peer_value in pairs]
        median = format_number(statistics.median(ratios))
        least, most = format_number(min(ratios)), format_number(max(ratios))
        return f"{median} ({least} to {most})"

    def lines(self) -> list[str]:
        """The ratios, then the medians, for a reader."""
        lines = []
        for comparison in self.comparisons:
            ratio = self.ratio(comparison)
            if ratio != NOT_MEASURED:
                ratio += " times as fast"
            lines.append(f"{comparison.what}, beside {comparison.peer}: {ratio}")
        lines += [f"{series.name}: {series.value}" for series in self.series]
        return lines

    def save(self, folder: Path, command: str, options: dict, conditions: dict) -> Path:
        """Writes COMMAND.json.

        Args:
            options: of the measurement.
            conditions: of the machine, from `machine.environment` and
                `machine.measure_disturbance`.
        """
        names = "machine software versions commit load_start load_end steal"
        document = {
            "command": command,
            "options": options,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            **{name: conditions[name] for name in names.split()},
            "comparisons": [asdict(comparison) for comparison in self.comparisons],
            "series": [asdict(series) for series in self.series],
        }
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{command}.json"
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
        return path


def format_number(value: float) -> str:
    """Three digits; large numbers have commas and no exponent."""
    text = f"{value:.3g}"
    return f"{float(text):,.0f}" if "e+" in text else text


def read_measurement(document: dict) -> Measurement:
    """The measurement of a file's document."""
    return Measurement(
        [Series(**row) for row in document["series"]],
        [Comparison(**row) for row in document["comparisons"]],
    )


def table(folder: Path, shown: Sequence[TableRow] | None = None) -> list[str]:
    """The lines of a table, and the machines and commits behind its rows.

    Args:
        folder: where the files of the benchmarks are.
        shown: the rows of the table, in its order; None: all that the files have.

    Raises:
        SystemExit: the files lack a row of `shown`.
    """
    documents = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    if not documents:
        return ["No benchmark is published: `make bench` measures them."]
    lines_of_rows = {
        TableRow(document["command"], comparison.series, comparison.peer): line
        for document in documents
        for comparison, line in row_lines(document)
    }
    rows = list(lines_of_rows) if shown is None else shown
    for row in rows:
        if row not in lines_of_rows:
            sys.exit(
                f"{folder / row.command}.json: found no comparison of `{row.series}` with "
                f"`{row.peer}`: run `make bench`, or correct README_ROWS"
            )
    commands = {row.command for row in rows}
    used = [document for document in documents if document["command"] in commands]
    return [
        "| what | times as fast as the peer | value | peer | command |",
        "|---|---|---|---|---|",
        *(lines_of_rows[row] for row in rows),
        "",
        *machine_lines(used),
    ]


def row_lines(document: dict) -> list[tuple[Comparison, str]]:
    """Every comparison of a document, with its line of a table."""
    measurement = read_measurement(document)
    rows = []
    for comparison in measurement.comparisons:
        peer = measurement.named(comparison.peer)
        cells = [
            comparison.what,
            measurement.ratio(comparison),
            measurement.named(comparison.series).value,
            f"{peer.name}: {peer.value}",
            f"`{document['command']}`",
        ]
        rows.append((comparison, f"| {' | '.join(cells)} |"))
    return rows


def machine_lines(documents: list[dict]) -> list[str]:
    """The lines of `machine_line`, one for all documents of one machine, commit and day: the
    least load before and the largest after, and the largest steal."""
    by_origin: dict[tuple, list[dict]] = {}
    for document in documents:
        commit = (document["commit"] or "")[:8]  # as it is printed
        origin = document["machine"], commit, document["time"][:10]
        by_origin.setdefault(origin, []).append(document)
    lines = []
    for group in by_origin.values():
        steals = [document["steal"] for document in group]
        summary = {
            "command": "`, `".join(document["command"] for document in group),
            "load_start": min(document["load_start"] for document in group),
            "load_end": max(document["load_end"] for document in group),
            "steal": None if None in steals else max(steals),
        }
        lines.append(machine_line(group[0] | summary))
    return lines


def machine_line(document: dict) -> str:
    """One line of a list in Markdown: the machine, its load, the commit and the date of the
    measurement in a document."""
    steal = document["steal"]
    load = f"{document['load_start']:.1f} before and {document['load_end']:.1f} after"
    parts = [
        document["machine"],
        f"commit {(document['commit'] or 'unknown')[:8]}",
        document["time"][:10],
        f"load average {load}",
        "steal not measured" if steal is None else f"steal {steal:.1%}",
    ]
    return f"- `{document['command']}`: {'; '.join(parts)}"


def write_tables(
    project: Path, folder: Path, shown: Sequence[TableRow] = README_ROWS
) -> None:
    """Writes the block `benchmarks` of two pages of a project: the rows `shown` into the README,
    all rows into the page of the benchmarks.

    Args:
        folder: where the files of the benchmarks are.

    Raises:
        SystemExit: the files lack a row of `shown`, or a page has no such block.
    """
    replace_block(project / "README.md", "benchmarks", table(folder, shown))
    page = project / "experiments" / "benchmarks" / "README.md"
    replace_block(page, "benchmarks", table(folder))
