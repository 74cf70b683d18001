"""Computes published numbers again from the log's raw samples, and lists those that differ.

    python tools/audit.py [PROJECT]

It uses none of the package's statistics: it reads files with pandas and has the formulas here.

For every report below `experiments/` it checks the tables against the stored ones, figures and
tables of times against the samples of their runs, the labels of axes, and the numbers of the
Answers. For the shipped log it checks units, rates, the ratio of every row of `fidelity`, and
that no row has an older definition. The tables of benchmarks are computed from the samples in
`experiments/benchmarks`, and every number in the prose of README.md and docs needs a test, a
constant or a source (`audit_prose.py`). The exit code is 1 if a number differs, and 2 if PROJECT
has no shipped log."""

import json
import re
import sys
from itertools import takewhile
from pathlib import Path

import numpy as np
import pandas as pd
from audit_answers import check_sentences
from audit_benchmarks import check_benchmarks
from audit_prose import check_prose
from audit_times import check_listed_times
from finding import Finding

from workbench.errors import InputError

TOLERANCE = 1e-3  # relative: tables print four digits
HALF_ULP_SQUARED = 2.0**-22
"""The square of 2⁻¹¹, the largest relative error of a rounding to fp16 (11 significant bits)."""
PRINTED_ROWS = 20
"""Rows of a table that a report prints."""
# phase → the unit of its samples
UNITS = {
    "tokens_per_s": "tok/s",
    "call": "ms",
    "layer": "ms",
    "head": "ms",
    "host": "ms",
}
# a figure of times, by its name in the report of notebook 34 → the phase of the samples behind it
PHASE_OF_FIGURE = {"speed": "tokens_per_s", "paths": "call", "layer_ms": "layer"}
# phase → the words that the label of an axis must have
LABEL_WORDS = {"tokens_per_s": "tokens per second", "call": "ms", "layer": "ms"}
# the definition of rows of fidelity whose chained updates are the sum that a layer adds
DEFINITION = 2
# notebooks whose Answers have sentences of times, which are checked by `check_listed_times`
TIMED_NOTEBOOKS = {"34"}
Log = dict[str, pd.DataFrame]
"""The tables of a log by name: runs, samples, layers, fidelity."""


def audit(project: Path) -> list[Finding]:
    """All findings in the reports and the shipped log of a project.

    Raises:
        InputError: the shipped log lacks runs or samples.
    """
    folder = project / "experiments" / "log" / "shipped"
    for table in ("runs", "samples"):
        if not any((folder / table).glob("*.parquet")):
            step = "give the folder of a checkout: python tools/audit.py PROJECT"
            raise InputError(folder, f"no file of {table}", "the shipped log", step)
    log = read_log(folder)
    reports = sorted((project / "experiments").glob("*/run.json"))
    findings = check_log(log, {path.parent.name[:2] for path in reports})
    for path in reports:
        findings += check_report(path.parent, log)
    return findings + check_benchmarks(project) + check_prose(project)


def read_log(folder: Path) -> Log:
    """The tables of a log, with empty ones where there is no file."""
    tables = {}
    for name in ("runs", "samples", "layers", "fidelity"):
        parts = [
            pd.read_parquet(path) for path in sorted((folder / name).glob("*.parquet"))
        ]
        parts = [part.dropna(axis="columns", how="all") for part in parts]
        tables[name] = pd.concat(parts) if parts else pd.DataFrame({"run_id": []})
    return tables


def differs(published: float, computed: float) -> bool:
    return not np.isclose(published, computed, rtol=TOLERANCE, atol=0, equal_nan=True)


def process_value(log: Log, run_id: str, phase: str) -> float:
    """The value of a phase in a process, without its warm-up: tokens per second for the phase
    tokens_per_s, ms for the others. Without a rule of its own, a phase has the median of its
    samples."""
    samples = log["samples"]
    timed = samples[(samples["run_id"] == run_id) & samples["warmup"].eq(False)]
    if phase == "tokens_per_s":
        batch = log["runs"].set_index("run_id").loc[run_id].get("batch", 1)
        return tokens_per_second(timed, 1 if pd.isna(batch) else batch)
    of_phase = timed[timed["phase"] == phase]
    if phase == "layer":
        return layer_ms(of_phase)
    return float(np.median(of_phase["value"]))


def tokens_per_second(timed: pd.DataFrame, batch: float) -> float:
    """All tokens over the time of all calls.

    Args:
        timed: samples of one process; those of calls have T tokens and a `value` in ms.
        batch: sequences of a call.
    """
    calls = timed[timed["phase"] == "call"]
    tokens = calls["T"].sum() * batch
    return float(tokens / calls["value"].sum() * 1e3)


def layer_ms(samples: pd.DataFrame) -> float:
    """The median over layers, where a layer's ms are the median of its shard's calls over the
    number of the shard's layers."""
    ms_of_layers = []
    for shard, calls in samples.groupby("shard"):
        # a shard is named by its first and its last layer
        first, last = map(int, re.findall(r"\d+", shard)[:2])
        count = last - first + 1
        ms_of_layers += [float(np.median(calls["value"])) / count] * count
    return float(np.median(ms_of_layers))


def check_log(log: Log, reported: set[str]) -> list[Finding]:
    """Checks every row of the log.

    Args:
        reported: the numbers of the experiments with a report.
    """
    return [
        *check_units(log["samples"]),
        *check_rates(log),
        *check_error_ratios(log["fidelity"]),
        *check_definitions(log, reported),
    ]


def check_units(samples: pd.DataFrame) -> list[Finding]:
    """Checks the unit of every sample."""
    findings = []
    for phase, unit in UNITS.items():
        wrong = samples[(samples.get("phase") == phase) & (samples.get("unit") != unit)]
        if len(wrong):
            units = ", ".join(sorted(set(wrong["unit"])))
            findings.append(Finding("log/samples", f"unit of {phase}", units, unit))
    return findings


def check_rates(log: Log) -> list[Finding]:
    """Checks the tokens per second of every run against its calls."""
    findings = []
    for run_id, rows in log["samples"].groupby("run_id"):
        calls = rows[(rows["phase"] == "call") & rows["warmup"].eq(False)]
        rates = rows[rows["phase"] == "tokens_per_s"]
        if len(calls) and len(rates):
            published = len(rates) / (1 / rates["value"]).sum()
            computed = process_value(log, run_id, "tokens_per_s")
            if differs(published, computed):
                label = "tokens_per_s of its repetitions"
                findings.append(
                    number_finding(f"log/samples/{run_id}", label, published, computed)
                )
    return findings


def check_error_ratios(fidelity: pd.DataFrame) -> list[Finding]:
    """Checks the column `ratio` of the rows of fidelity against error and budget."""
    columns = ["ratio", "error", "budget"]
    if not set(columns) <= set(fidelity):
        return []
    rows = fidelity.dropna(subset=columns)
    rows = rows[np.isfinite(rows["ratio"]) & (rows["error"] > 0)]
    # the rounding budget, and beside it the rounding of the result to fp16
    ratio = rows["error"] / np.sqrt(rows["budget"] ** 2 + HALF_ULP_SQUARED)
    is_wrong = ~np.isclose(rows["ratio"], ratio, rtol=TOLERANCE)
    wrong = rows.assign(computed=ratio)[is_wrong]
    findings = []
    for run_id, part in wrong.groupby("run_id"):
        label = f"error over its budget, {len(part)} rows"
        first = part.iloc[0]
        place = f"log/fidelity/{run_id}"
        findings.append(number_finding(place, label, first["ratio"], first["computed"]))
    return findings


def check_definitions(log: Log, reported: set[str]) -> list[Finding]:
    """Checks the definition of the rows of experiments with a report. No report shows rows of
    other experiments, and readers refuse old ones."""
    fidelity = log["fidelity"]
    if "mode" not in fidelity:
        return []
    definition = fidelity.get("definition", pd.Series(np.nan, fidelity.index))
    stale = definition.fillna(1).lt(DEFINITION)
    stale &= fidelity["mode"].eq("chained") & fidelity["tensor"].eq("update")
    experiments = log["runs"].set_index("run_id").reindex(columns=["experiment"])
    experiment = fidelity["run_id"].map(experiments["experiment"].to_dict())
    stale &= experiment.isna() | experiment.isin(reported)
    if not stale.any():
        return []
    runs = fidelity.loc[stale, "run_id"].nunique()
    label = f"chained updates, {stale.sum()} rows of {runs} runs"
    return [Finding("log/fidelity", label, "an older definition", str(DEFINITION))]


def check_report(folder: Path, log: Log) -> list[Finding]:
    """Checks the tables, the figures of times and the Answer of the report in a folder."""
    run = json.loads((folder / "run.json").read_text())
    report = (folder / "report.md").read_text()
    findings = []
    tables: dict[str, pd.DataFrame] = {}  # stored data by name, such as tables/cost
    times: dict[str, pd.DataFrame] = {}  # figure of times → a row for each process
    for path in sorted(folder.glob("*/*.json")):
        part = json.loads(path.read_text())
        data = pd.read_parquet(path.with_suffix(".parquet"))
        name = f"{path.parent.name}/{path.stem}"
        tables[name] = data
        place = f"{folder.name}/{name}"
        if part["kind"] == "tables":
            if part.get("in_report", True):
                findings += check_printed(place, data, report)
            if {"run_ids", "tokens_per_s"} <= set(data):
                findings += check_configurations(place, data, log)
        elif path.stem in PHASE_OF_FIGURE and {"run_id", "value"} <= set(data):
            ylabel = part["options"].get("ylabel", "")
            findings += check_times(
                place, PHASE_OF_FIGURE[path.stem], ylabel, data, log
            )
            times[path.stem] = data
    place = f"{folder.name}/Answer"
    answer = run["conclusion"]
    if times:
        named_processes = tables.get("tables/processes")
        findings += check_listed_times(place, answer, times, named_processes)
    notebook = folder.name[:2]
    check = check_sentences(notebook, answer, tables, place)
    if notebook not in TIMED_NOTEBOOKS:
        for number in check.unclaimed:
            needed = "a claim that computes it, in tools/audit_answers.py"
            findings.append(Finding(place, "measured number", number, needed))
    return findings + check.findings


def check_printed(place: str, data: pd.DataFrame, report: str) -> list[Finding]:
    """Checks the numbers of a table in `report.md` against the stored ones."""
    stored = data.drop(columns=["run_id", "run_ids"], errors="ignore").head(
        PRINTED_ROWS
    )
    tables = _printed_tables(list(stored.columns), report)
    if not tables:
        columns = str(list(stored.columns))
        return [Finding(place, "table of the report", "no such columns", columns)]
    # Where several printed tables have these columns, the one with the fewest differences is
    # taken for this stored one. Two stored tables may thus be compared with the same printed
    # table, and an error in the other printed one is not found.
    return min((_compare(place, stored, table) for table in tables), key=len)


def _compare(
    place: str, stored: pd.DataFrame, printed: list[list[str]]
) -> list[Finding]:
    """Lists the numbers of a printed table that differ from the stored ones.

    Args:
        printed: the cells of its rows.
    """
    findings = []
    for texts, (_, row) in zip(printed, stored.iterrows()):
        for name, text in zip(stored.columns, texts):
            value = row[name]
            if not isinstance(value, float) or not np.isfinite(value):
                continue
            is_number = re.fullmatch(r"-?[\d.]+(e[+-]?\d+)?", text)
            number = float(text) if is_number else np.nan
            if differs(number, value):
                findings.append(number_finding(place, name, number, value))
    return findings


def _printed_tables(columns: list[str], report: str) -> list[list[list[str]]]:
    """The cells of every table of a report with these columns."""
    lines = report.splitlines()
    tables = []
    for start, line in enumerate(lines):
        if line.startswith("|") and _cells(line) == columns:
            # the line after the headings is |---|---|
            rows = takewhile(lambda row: row.startswith("|"), lines[start + 2 :])
            tables.append([_cells(row) for row in rows])
    return tables


def _cells(line: str) -> list[str]:
    """The cells of a row of a table in Markdown, in which \\| is a bar of a cell's text."""
    cells = re.split(r"(?<!\\)\|", line.strip())[1:-1]
    return [cell.strip().replace("\\|", "|") for cell in cells]


def check_configurations(place: str, data: pd.DataFrame, log: Log) -> list[Finding]:
    """Checks medians over processes and their range in a table with `run_ids`: in each row,
    the processes of a configuration."""
    findings = []
    for row in data.to_dict("records"):
        rates = [
            process_value(log, run_id, "tokens_per_s") for run_id in row["run_ids"]
        ]
        calls = [process_value(log, run_id, "call") for run_id in row["run_ids"]]
        computed = {
            "tokens_per_s": np.median(rates),
            "slowest": min(rates),
            "fastest": max(rates),
            "call_ms": np.median(calls),
            "n": len(rates),
        }
        for name, value in computed.items():
            if name in row and differs(row[name], value):
                findings.append(
                    number_finding(place, f"{name} of {row['name']}", row[name], value)
                )
    return findings


def check_times(
    place: str, phase: str, ylabel: str, data: pd.DataFrame, log: Log
) -> list[Finding]:
    """Checks that a figure has one row for each process, its value, and the label of the axis.

    Args:
        phase: of the samples behind the figure.
    """
    findings = []
    if LABEL_WORDS[phase] not in ylabel:
        words = repr(LABEL_WORDS[phase])
        findings.append(Finding(place, "label of the axis", repr(ylabel), words))
    for run_id, rows in data.groupby("run_id"):
        computed = process_value(log, run_id, phase)
        if len(rows) > 1:
            count = f"{len(rows)} values of one process"
            findings.append(
                Finding(place, f"run {run_id}", count, f"one, {computed:.4g}")
            )
        elif differs(rows["value"].iloc[0], computed):
            findings.append(
                number_finding(place, f"run {run_id}", rows["value"].iloc[0], computed)
            )
    return findings


def number_finding(
    place: str, label: str, published: float, computed: float
) -> Finding:
    return Finding(place, label, f"{published:.4g}", f"{computed:.4g}")


def main() -> None:
    project = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parents[1]
    try:
        findings = audit(project)
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    print("\n".join(map(str, findings)) or "every number is what its label says")
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
