"""Computes published numbers again from the log's raw samples, and lists those that differ.

    python tools/audit.py [PROJECT]

It uses none of the package's statistics: it reads files with pandas and has the formulas here.

For every report below `experiments/` it checks the tables against the stored ones, figures and
tables of times against the samples of their runs, the labels of axes, and the numbers of the
Answers. For the shipped log it checks units, rates, the ratio of every row of `fidelity`, and
that no row has an older definition. The README's table of benchmarks is computed from the samples
in `experiments/benchmarks`, and every number in the prose of README.md and docs needs a test, a
constant or a source (`audit_prose.py`). The exit code is 1 if a number differs, and 2 if PROJECT
has no shipped log."""

import json
import re
import sys
from dataclasses import dataclass
from itertools import combinations, takewhile
from pathlib import Path

import numpy as np
import pandas as pd

from workbench.errors import InputError

sys.path.insert(0, str(Path(__file__).parent))
from audit_answers import check_sentences  # beside this script
from audit_benchmarks import check_benchmarks
from audit_prose import check_prose
from finding import Finding

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
# a figure of times in notebook 34 → the phase of the samples behind it
QUANTITIES = {"speed": "tokens_per_s", "paths": "call", "layer_ms": "layer"}
# phase → the words that the label of an axis must have
LABEL_WORDS = {"tokens_per_s": "tokens per second", "call": "ms", "layer": "ms"}
# "128: 250.1 (248 to 252, 3 processes)": the value of an axis; the median over its processes,
# the least and the most of several, and their number
LISTED = re.compile(
    r"([\w.]+): ([\d.e+]+) \((?:([\d.e+]+) to ([\d.e+]+), )?(\d+) process(?:es)?\)"
)
# "1024 has fewer than 128, 0.8 times (0.79 to 0.81, paired over 3 rounds)": the second value of
# an axis, the direction, the first value, the ratio of second to first, and the rounds
RATIO = re.compile(
    r"([\w.]+) has (more|fewer) than ([\w.]+), ([\d.e+-]+) times "
    r"\([\d.e+-]+ to [\d.e+-]+, paired over (\d+) rounds\)"
)
# the definition of rows of fidelity whose chained updates are the sum that a layer adds
DEFINITION = 2
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
    processes: dict[str, pd.DataFrame] = {}  # figure of times → a row for each process
    for path in sorted(folder.glob("*/*.json")):
        part = json.loads(path.read_text())
        data = pd.read_parquet(path.with_suffix(".parquet"))
        name = f"{path.parent.name}/{path.stem}"
        tables[name] = data
        place = f"{folder.name}/{name}"
        if part["kind"] == "tables":
            findings += check_printed(place, data, report)
            if {"run_ids", "tokens_per_s"} <= set(data):
                findings += check_configurations(place, data, log)
        elif path.stem in QUANTITIES and {"run_id", "value"} <= set(data):
            findings += check_times(place, part, data, log)
            processes[path.stem] = data
    place = f"{folder.name}/Answer"
    answer = run["conclusion"]
    if processes:
        named = tables.get("tables/processes")
        findings += check_answer(place, answer, processes, named)
    check = check_sentences(folder.name[:2], answer, tables, place)
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
    # several tables may have the same columns: the one with the fewest differences is meant
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


def check_times(place: str, part: dict, data: pd.DataFrame, log: Log) -> list[Finding]:
    """Checks that a figure has one row for each process, its value, and the label of the axis."""
    phase = QUANTITIES[place.rpartition("/")[2]]
    findings = []
    label = part["options"].get("ylabel", "")
    if LABEL_WORDS[phase] not in label:
        findings.append(
            Finding(place, "label of the axis", repr(label), repr(LABEL_WORDS[phase]))
        )
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


@dataclass(frozen=True)
class Stated:
    """A setting as an Answer lists it, with the digits that are printed: the median over its
    processes, their number, and the least and the most of several."""

    key: str
    median: str
    count: int
    least: str = ""
    most: str = ""


def check_answer(
    place: str,
    text: str,
    processes: dict[str, pd.DataFrame],
    named: pd.DataFrame | None = None,
) -> list[Finding]:
    """Checks every setting that an Answer lists against the median over processes, and every ratio
    and its direction against paired rounds. Settings with a name are checked against `named`, the
    table of their processes."""
    findings = []
    if named is not None:
        findings, text = check_named(place, text, named)
    if "median" in text and not LISTED.search(text):
        findings.append(
            Finding(place, "times", "no number of processes", "a median over processes")
        )
    findings += check_medians(place, text, processes)
    return findings + check_ratios(place, text, processes)


@dataclass(frozen=True)
class Setting:
    """The processes of one setting in a figure of times.

    Args:
        values: of the figure's axes.
        measured: the processes' values, in the order of time.
    """

    values: tuple
    measured: pd.Series


def group_by_setting(data: pd.DataFrame) -> list[Setting]:
    """The settings of a figure of times."""
    axes = [name for name in ("max_seq_len", "T", "rows") if name in data]
    # ids of runs begin with the time
    groups = data.sort_values("run_id").groupby(axes, dropna=False)
    return [Setting(values, rows["value"]) for values, rows in groups]


def check_medians(
    place: str, text: str, processes: dict[str, pd.DataFrame]
) -> list[Finding]:
    """Checks the settings that an Answer lists by the value of an axis."""
    computed: set[Stated] = set()
    for data in processes.values():
        for setting in group_by_setting(data):
            computed |= possible_statements(setting)
    findings = []
    for key, median, least, most, count in LISTED.findall(text):
        stated = Stated(key, median, int(count), least, most)
        of_key = {statement for statement in computed if statement.key == key}
        if of_key and stated not in of_key:
            published = f"{median} of {count}"
            medians = "; ".join(sorted({statement.median for statement in of_key}))
            findings.append(Finding(place, f"median at {key}", published, medians))
    return findings


def possible_statements(setting: Setting) -> set[Stated]:
    """The ways in which an Answer may list a setting: by the value of any axis, with or
    without the least and the most."""
    median = f"{setting.measured.median():.4g}"
    least, most = f"{setting.measured.min():.4g}", f"{setting.measured.max():.4g}"
    count = len(setting.measured)
    statements = set()
    for key in map(str, setting.values):
        statements.add(Stated(key, median, count))
        statements.add(Stated(key, median, count, least, most))
    return statements


def check_ratios(
    place: str, text: str, processes: dict[str, pd.DataFrame]
) -> list[Finding]:
    """Checks the ratios of an Answer, and whether it says more or fewer."""
    ratios = paired_ratios(processes)
    findings = []
    for second, more, first, ratio, rounds in RATIO.findall(text):
        right = ratios.get((first, second), set())
        word = "more" if float(ratio) > 1 else "fewer"
        if ratio not in right or word != more or int(rounds) < 3:
            published = f"{more}, {ratio} times, {rounds} rounds"
            label = f"{second} over {first}"
            computed = "; ".join(sorted(right))
            findings.append(Finding(place, label, published, computed))
    return findings


def paired_ratios(
    processes: dict[str, pd.DataFrame],
) -> dict[tuple[str, str], set[str]]:
    """(first, second) value of an axis → the ratios of second to first, as they are printed, of
    settings that differ in this axis alone."""
    ratios: dict[tuple[str, str], set[str]] = {}
    for data in processes.values():
        for first, second in combinations(group_by_setting(data), 2):
            changed = [
                (str(value), str(other))
                for value, other in zip(first.values, second.values)
                if value != other
            ]
            if len(changed) != 1:
                continue
            (pair,) = changed
            log_ratio = mean_log_ratio(first.measured, second.measured)
            ratios.setdefault(pair, set()).add(f"{np.exp(log_ratio):.3g}")
            ratios.setdefault(pair[::-1], set()).add(f"{np.exp(-log_ratio):.3g}")
    return ratios


def mean_log_ratio(first: pd.Series, second: pd.Series) -> float:
    """The mean logarithm of second over first. The k-th process of one is paired with the k-th
    of the other, since both ran in the same round."""
    count = min(len(first), len(second))
    ratios = second.to_numpy()[:count] / first.to_numpy()[:count]
    return float(np.log(ratios).mean())


def check_named(
    place: str, text: str, processes: pd.DataFrame
) -> tuple[list[Finding], str]:
    """Checks medians and ranges of settings with a name. Returns the findings and the text without
    these settings."""
    findings = []
    undisturbed = processes[processes["disturbed"].isna()]
    for name, rows in undisturbed.groupby("name"):
        values = rows["value"]
        # "NAME: median (least to most, N processes)"
        pattern = (
            rf"{re.escape(name)}: ([\d.e+]+) \(([\d.e+]+) to ([\d.e+]+), "
            r"(\d+) process(?:es)?\)"
        )
        figures = [values.median(), values.min(), values.max()]
        computed = (*(f"{figure:.4g}" for figure in figures), str(len(values)))
        for match in re.finditer(pattern, text):
            if match.groups() != computed:
                printed, right = " ".join(match.groups()), " ".join(computed)
                findings.append(Finding(place, f"median of {name}", printed, right))
        text = re.sub(pattern, "", text)
    return findings, text


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
