"""The log as one table, with a row per setting and as wide as the terminal; and two of
its runs side by side."""

import itertools
import json
import shutil
import string
import textwrap
from collections.abc import Iterator

import pandas as pd

from workbench import log

WIDTH = 100
"""Columns of the table where the output is no terminal."""
MAX_CELL = 18
"""Characters of a cell of the table; longer texts are cut."""
FIRST_SETTINGS = 4
"""The number of varied settings that a narrow terminal shows before figures."""
FIRST_FIGURES = ("verdict", "quality", "n", "tokens_per_s", "kl_mean")
"""Figures that a narrow terminal shows before others."""
LETTERED = ("machine", "software")
"""Settings whose values are too long for a cell; the table has letters for them."""
SAME_VALUES_COLUMNS = ["values", "bundle_hash"]
"""Columns that are equal for runs that compute the same values."""
SPEEDS = ["tokens_per_s", "call_ms", "call_p90_ms"]
VALIDATION_COLUMNS = [
    "verdict",
    "quality",
    "worst_update",
    "worst_cosine",
    "kl_mean",
    "kl_p99",
]
"""The results of a validation; `kl_p99` is part of its `config`. Settings are compared by
mean and 99% KL: in a model with an attention sink, whose residual is huge beside its
updates, the worst cosine says nothing about a setting."""
FIGURES = {
    "verdict": "export",
    "quality": "quality",
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
    """One row per group of runs; a run is one process.

    Args:
        by: the columns that are equal within a group.
        validated: runs with a verdict.

    Returns:
        The columns of the newest run of each group, and:
        tokens_per_s, call_ms, call_p90_ms: medians over processes.
        slowest, fastest: tok/s of a process.
        n, run_ids: number and ids of the processes.
        disturbed: the number of processes that were left out, since other work
            disturbed them. Where every process was disturbed, all are used, and `n`
            and `disturbed` count the same ones.
        verdict, quality, worst_update, worst_cosine, kl_mean, kl_p99: of the newest
            validation of the same bundle.
    """
    runs = with_speeds(runs, root)
    keys = [runs[name] for name in by]
    counts = runs["disturbed"].notna().groupby(keys, dropna=False)
    undisturbed = runs[log.select_undisturbed(runs, by)]
    groups = undisturbed.groupby(by, sort=False, dropna=False)
    rates = groups["tokens_per_s"]
    speeds = (
        groups[SPEEDS]
        .median()
        .assign(
            slowest=rates.min(),
            fastest=rates.max(),
            n=groups.size(),
            run_ids=groups["run_id"].agg(list),
            disturbed=counts.sum(),
        )
    )
    # run ids, by which the log is sorted, begin with their time
    newest = runs.drop_duplicates(by, keep="last")
    newest = newest.drop(columns=[*SPEEDS, *VALIDATION_COLUMNS, "disturbed"])
    judged = validated.drop_duplicates(SAME_VALUES_COLUMNS, keep="last")[
        [*SAME_VALUES_COLUMNS, *VALIDATION_COLUMNS]
    ]
    return newest.merge(speeds.reset_index(), on=by).merge(
        judged, "left", SAME_VALUES_COLUMNS
    )


def with_speeds(runs: pd.DataFrame, root: log.Root = None) -> pd.DataFrame:
    """Runs with `SPEEDS` computed from their raw samples, where the log has some, and
    the column `disturbed` (see `log.disturbance_reasons`). The stored speeds of older rows are
    medians over repetitions."""
    runs = runs.assign(disturbed=log.disturbance_reasons(runs))
    measured = runs.loc[runs[SPEEDS].notna().any(axis=1), "run_id"]
    if measured.empty:
        return runs
    speeds = log.speeds(log.load("samples", root, {"run_id": measured}))
    for name in SPEEDS:
        runs[name] = runs["run_id"].map(speeds[name]).fillna(runs[name])
    return runs


def with_kl_p99(runs: pd.DataFrame) -> pd.DataFrame:
    """Runs with `kl_p99`, the 99th percentile over tokens of the KL (nats) of their
    validation."""
    return runs.assign(kl_p99=runs["config"].map(_kl_p99).astype(float))


def _kl_p99(config: str | None) -> float | None:
    """The 99% KL that a run's `config` holds."""
    price = json.loads(config).get("price") if isinstance(config, str) else None
    return ((price or {}).get("kl") or {}).get("p99")


def summary(root: log.Root = None, where: str | dict | None = None) -> pd.DataFrame:
    """One row per setting, machine, software and status of the log's runs that fit
    `where` (see `log.load`), the newest last. Every run without a setting has a row of
    its own.

    Returns:
        The columns of `repeated`, with validations of any machine. A newest run that
        was validated itself has its own verdict and errors.
    """
    runs = with_kl_p99(log.load("runs", root, where)).drop(
        columns=["config", "versions"]
    )
    runs["setting"] = runs["setting"].fillna(runs["run_id"])
    validated = with_kl_p99(log.load("runs", root)).dropna(
        subset=["verdict", *SAME_VALUES_COLUMNS]
    )
    by = ["setting", "machine", "software", "status"]
    rows = repeated(runs, by, validated, root).set_index("run_id")
    # null does not overwrite: other runs take the verdict of their bundle
    rows.update(runs.set_index("run_id")[VALIDATION_COLUMNS])
    rows = rows.reset_index()
    # a verdict on a run that failed, or ran elsewhere, would be another run's
    ok = rows["status"] == "ok"
    for name in ("verdict", "quality"):
        rows[name] = rows[name].astype(object).where(ok)
    has_result = rows[["verdict", "tokens_per_s"]].notna().any(axis=1)
    return rows[has_result | ~ok].sort_values("run_id", ignore_index=True)


def table_lines(rows: pd.DataFrame, width: int | None = None) -> list[str]:
    """Rows of `summary` as lines: first what is equal in all of them, then a table,
    then what the table leaves out. The table's first column is the short id by which
    every command knows a run.

    Machines and software have a letter in the table and their name above it.

    Args:
        width: columns of the terminal; default: those of this one, or `WIDTH`.
    """
    if rows.empty:
        return []
    width = width or shutil.get_terminal_size((WIDTH, 0)).columns
    rows = rows.set_axis(rows["run_id"].str.split("-").str[-1])
    rows["verdict"] = rows["verdict"].fillna(rows["status"].replace("ok", None))
    # a single process is neither the slowest nor the fastest
    rows.loc[rows["n"] == 1, ["slowest", "fastest"]] = None
    varied = [name for name in log.SETTINGS if rows[name].nunique(dropna=False) > 1]
    common, figures = _split_figures(rows, varied)
    above = ["; ".join(f"{name} {_word(value)}" for name, value in common.items())]
    for name in LETTERED:
        if name in varied:
            letters = dict(zip(rows[name].dropna().unique(), _letters()))
            rows[name] = rows[name].map(letters)
            above += [f"{name} {letter}: {value}" for value, letter in letters.items()]
    # machines and the first settings, then figures, then other settings
    most_varied = varied[:FIRST_SETTINGS]
    leading = [name for name in varied if name in LETTERED or name in most_varied]
    names = [*leading, *figures, *(name for name in varied if name not in leading)]
    columns = {
        name: [_cut(text) for text in (FIGURES.get(name, name), *rows[name].map(_word))]
        for name in names
    }
    preferred = [*most_varied, *FIRST_FIGURES, *LETTERED, *figures, *names]
    preferred = list(dict.fromkeys(name for name in preferred if name in names))
    ids = ["", *rows.index]
    fitting = _fitting(columns, preferred, width - max(map(len, ids)))
    fitting.sort(key=names.index)
    below = [f"{run}: {reason}" for run, reason in rows["reason"].dropna().items()]
    if left_out := [FIGURES.get(name, name) for name in names if name not in fitting]:
        below.append(
            f"left out, since the line has {width} columns: {', '.join(left_out)}; "
            "`workbench log --rows` prints every column, --json all of them as JSON"
        )
    return [
        *_wrapped(above, width),
        *_aligned([ids, *(columns[name] for name in fitting)]),
        *_wrapped(below, width),
    ]


def _split_figures(rows: pd.DataFrame, varied: list[str]) -> tuple[dict, list[str]]:
    """Divides settings and figures by whether they are equal in all rows. Returns the equal
    ones by their titles, which are printed once above the table, and the names of the
    figures that have a column."""
    common = rows[log.SETTINGS].iloc[0].drop(varied).dropna().to_dict()
    figures = [name for name in FIGURES if rows[name].notna().any()]
    # in a single row, every figure would be equal
    if len(rows) == 1:
        return common, figures
    equal = [name for name in figures if rows[name].nunique(dropna=False) == 1]
    common |= {FIGURES[name]: rows[name].iloc[0] for name in equal}
    return common, [name for name in figures if name not in equal]


def _fitting(columns: dict[str, list[str]], order: list[str], width: int) -> list[str]:
    """The names of the columns that fit into `width` characters, where those that come
    first in `order` take precedence."""
    names = []
    for name in order:
        needed = 2 + max(map(len, columns[name]))  # two spaces before it
        if needed <= width:
            names.append(name)
            width -= needed
    return names


def _aligned(columns: list[list[str]]) -> Iterator[str]:
    """The lines of a table, each column as wide as its longest cell."""
    widths = [max(map(len, column)) for column in columns]
    for cells in zip(*columns):
        yield "  ".join(cell.rjust(w) for cell, w in zip(cells, widths)).rstrip()


def _wrapped(texts: list[str], width: int) -> Iterator[str]:
    for text in texts:
        yield from textwrap.wrap(text, width)


def _word(value: object) -> str:
    """A cell of the table; – where nothing was measured."""
    if pd.isna(value):
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CELL else text[: MAX_CELL - 1] + "…"


def _letters() -> Iterator[str]:
    """a, b, … z, aa, ab, …"""
    for count in itertools.count(1):
        for letters in itertools.product(string.ascii_lowercase, repeat=count):
            yield "".join(letters)


def compare_runs(run_a: str, run_b: str, root: log.Root = None) -> dict:
    """The differences of two runs.

    Returns:
        settings, measures, alike: see `log.compare`.
        changed_gates: gate, and its verdicts a and b, where these differ.

    Raises:
        InputError: the log lacks a run.
    """
    settings, measures, alike = log.compare(run_a, run_b, root)
    runs, gates = log.plain(log.load("runs", root)), {}
    for side, run in {"a": run_a, "b": run_b}.items():
        logged = json.loads(log.find_run(run, runs)["config"] or "{}").get("gates", [])
        gates[side] = {gate["name"]: gate["verdict"] for gate in logged}
    changed = pd.DataFrame(gates).rename_axis("gate").reset_index()
    changed = changed[changed["a"].ne(changed["b"]) & all(gates.values())]
    tables = {"settings": settings, "measures": measures, "changed_gates": changed}
    result = {n: json.loads(t.to_json(orient="records")) for n, t in tables.items()}
    return result | {"alike": alike}
