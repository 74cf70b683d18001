"""The log as one table, a row per setting, as wide as the terminal, and two of its runs
side by side."""

import itertools
import json
import shutil
import string
import textwrap
from collections.abc import Iterator

import pandas as pd

from workbench import log

WIDTH = 100
"""Of the table where the output is no terminal."""
LONGEST = 18
"""Characters of a cell of the table."""
TELLING = ("verdict", "n", "tokens_per_s", "kl_mean")
"""Figures that a narrow terminal shows before others."""
LONG = ("machine", "software")
"""Settings whose values are too long for a table."""
BUNDLE = ["values", "bundle_hash"]
"""Columns that are equal for runs that compute the same."""
SPEEDS = ["tokens_per_s", "call_ms", "call_p90_ms"]
JUDGED = ["verdict", "worst_update", "worst_cosine", "kl_mean", "kl_p99"]
"""Of a validation; `kl_p99` stands in its `config`. Settings are compared by both KL:
the worst cosine of a model with an attention sink says nothing about a setting."""
FIGURES = {
    "verdict": "verdict",
    "n": "n",
    "tokens_per_s": "tok/s",
    "slowest": "slowest",
    "fastest": "fastest",
    "call_ms": "ms/call",
    "disturbed": "disturbed",
    "ane_ops_share": "ANE",
    "kl_mean": "mean KL",
    "kl_p99": "99% KL",
}
"""Columns of `summary` that are printed as figures, and their titles."""


def repeated(
    runs: pd.DataFrame, by: list[str], validated: pd.DataFrame, root: log.Root = None
) -> pd.DataFrame:
    """One row per group of runs, each of which is a process: the columns of the newest
    one; medians over processes of `SPEEDS`; the `slowest` and `fastest` tok/s; the
    number `n` and the `run_ids` of the processes; `disturbed`, the number of those that
    were left out because other work disturbed them (all are used, and counted in both,
    where every one was); `JUDGED` of the newest of the `validated` runs of the same
    bundle."""
    runs = with_speeds(runs, root)
    counts = (
        runs["disturbed"].notna().groupby([runs[name] for name in by], dropna=False)
    )
    used = runs[log.select_undisturbed(runs, by)]
    groups = used.groupby(by, sort=False, dropna=False)
    rates = groups["tokens_per_s"]
    extent = {"slowest": rates.min(), "fastest": rates.max(), "n": groups.size()}
    extent["run_ids"] = groups["run_id"].agg(list)
    extent["disturbed"] = counts.sum()
    speeds = groups[SPEEDS].median().assign(**extent).reset_index()
    last = runs.drop_duplicates(by, keep="last")
    last = last.drop(columns=[*SPEEDS, *JUDGED, "disturbed"])
    judged = validated.drop_duplicates(BUNDLE, keep="last")[[*BUNDLE, *JUDGED]]
    return last.merge(speeds, on=by).merge(judged, "left", BUNDLE)


def with_speeds(runs: pd.DataFrame, root: log.Root = None) -> pd.DataFrame:
    """Runs with `SPEEDS` computed from their raw samples, where the log has some, and
    the column `disturbed` (see `log.disturbed`). The stored columns of older rows are
    medians over repetitions."""
    runs = runs.assign(disturbed=log.disturbed(runs))
    measured = runs.loc[runs[SPEEDS].notna().any(axis=1), "run_id"]
    if measured.empty:
        return runs
    speeds = log.speeds(log.load("samples", root, {"run_id": measured}))
    for name in SPEEDS:
        runs[name] = runs["run_id"].map(speeds[name]).fillna(runs[name])
    return runs


def with_tail(runs: pd.DataFrame) -> pd.DataFrame:
    """Runs with `kl_p99`, the 99th percentile over tokens of the KL (nats) of their
    validation."""

    def read(text: str | None) -> float | None:
        price = json.loads(text).get("price") if isinstance(text, str) else None
        return ((price or {}).get("kl") or {}).get("p99")

    return runs.assign(kl_p99=runs["config"].map(read).astype(float))


def summary(root: log.Root = None, where: str | dict | None = None) -> pd.DataFrame:
    """One row per setting, machine, software and status of the log's runs that fit
    `where` (see `log.load`); runs without a setting have a row each. The newest are
    last.

    Returns:
        The columns of `repeated`, validations of any machine; `JUDGED` of the newest
        run itself where it was validated.
    """
    runs = with_tail(log.load("runs", root, where)).drop(columns=["config", "versions"])
    runs["setting"] = runs["setting"].fillna(runs["run_id"])
    validated = with_tail(log.load("runs", root)).dropna(subset=["verdict", *BUNDLE])
    by = ["setting", "machine", "software", "status"]
    rows = repeated(runs, by, validated, root).set_index("run_id")
    rows.update(runs.set_index("run_id")[JUDGED])  # a run's own verdict stands
    rows = rows.reset_index()
    ok = rows["status"] == "ok"
    rows["verdict"] = rows["verdict"].astype(object).where(ok)
    said = rows[["verdict", "tokens_per_s"]].notna().any(axis=1)
    return rows[said | ~ok].sort_values("run_id", ignore_index=True)


def table_lines(rows: pd.DataFrame, width: int | None = None) -> list[str]:
    """Rows of `summary`: what is equal in all of them once, then one table, whose first
    column is the short id that every command takes for a run, then what the table
    leaves out.

    Machines and software have a letter in the table and their name above it.

    Args:
        width: columns of the terminal; default: those of this one, or `WIDTH`.
    """
    if rows.empty:
        return []
    width = width or shutil.get_terminal_size((WIDTH, 0)).columns
    rows = rows.set_axis(rows["run_id"].str.split("-").str[-1])
    rows["verdict"] = rows["verdict"].fillna(rows["status"].replace("ok", None))
    rows.loc[rows["n"] == 1, ["slowest", "fastest"]] = None
    varied = [name for name in log.SETTINGS if rows[name].nunique(dropna=False) > 1]
    common = rows[log.SETTINGS].iloc[0].drop(varied).dropna().to_dict()
    figures = [name for name in FIGURES if rows[name].notna().any()]
    if len(rows) > 1:  # of one row, every figure is equal
        equal = [name for name in figures if rows[name].nunique(dropna=False) == 1]
        common |= {FIGURES[name]: rows[name].iloc[0] for name in equal}
        figures = [name for name in figures if name not in equal]
    above = ["; ".join(f"{name} {_word(value)}" for name, value in common.items())]
    for name in set(varied) & set(LONG):
        letters = dict(zip(rows[name].dropna().unique(), _letters()))
        rows[name] = rows[name].map(letters)
        above += [f"{name} {letter}: {value}" for value, letter in letters.items()]
    # the machine and the most telling settings, then figures, then other settings
    telling = [name for name in varied if name in LONG or name in varied[:4]]
    names = [*telling, *figures, *(name for name in varied if name not in telling)]
    columns = {
        name: [FIGURES.get(name, name), *rows[name].map(_word)] for name in names
    }
    ids = ["", *rows.index]
    size = max(map(len, ids))
    shown = []
    first = [*varied[:4], *TELLING, *LONG, *figures]
    order = dict.fromkeys([*(name for name in first if name in names), *names])
    for name in order:  # the most telling first, while the line has room
        columns[name] = [_cut(text) for text in columns[name]]
        needed = 2 + max(map(len, columns[name]))
        if size + needed <= width:
            shown.append(name)
            size += needed
    shown.sort(key=names.index)
    cells = [ids, *(columns[name] for name in shown)]
    widths = [max(map(len, column)) for column in cells]
    table = [
        "  ".join(text.rjust(size) for text, size in zip(line, widths)).rstrip()
        for line in zip(*cells)
    ]
    below = [f"{run}: {reason}" for run, reason in rows["reason"].dropna().items()]
    if left_out := [FIGURES.get(name, name) for name in names if name not in shown]:
        below.append(
            f"left out, since the line has {width} columns: {', '.join(left_out)}; "
            "`workbench log --rows` prints every column, --json all of them as JSON"
        )
    wrapped = (textwrap.wrap(text, width) for text in above)
    more = (textwrap.wrap(text, width) for text in below)
    return [*itertools.chain(*wrapped), *table, *itertools.chain(*more)]


def _word(value: object) -> str:
    """A cell of the table; – where nothing was measured."""
    if pd.isna(value):
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _letters() -> Iterator[str]:
    """a, b, … z, aa, ab, …"""
    for count in itertools.count(1):
        for letters in itertools.product(string.ascii_lowercase, repeat=count):
            yield "".join(letters)


def difference(run_a: str, run_b: str, root: log.Root = None) -> dict:
    """Where two runs differ.

    Returns:
        settings, measures, alike (see `log.compare`), changed_gates (gate, a, b:
        verdicts that differ).

    Raises:
        InputError: the log lacks a run.
    """
    settings, measures, alike = log.compare(run_a, run_b, root)
    runs, gates = log.plain(log.load("runs", root)), {}
    for side, run in {"a": run_a, "b": run_b}.items():
        logged = json.loads(log.find(run, runs)["config"] or "{}").get("gates", [])
        gates[side] = {gate["name"]: gate["verdict"] for gate in logged}
    changed = pd.DataFrame(gates).rename_axis("gate").reset_index()
    changed = changed[changed["a"].ne(changed["b"]) & all(gates.values())]
    tables = {"settings": settings, "measures": measures, "changed_gates": changed}
    result = {n: json.loads(t.to_json(orient="records")) for n, t in tables.items()}
    return result | {"alike": alike}
