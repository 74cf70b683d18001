"""The log as one table with a row per setting (`summary`), that table as lines as wide as
the terminal (`table_lines`), and two runs side by side (`compare_runs`).

Runs are in the order of their ids, which begin with their time: the last one is the
newest. `log.load` gives them so."""

import itertools
import json
import shutil
import string
import textwrap
from collections.abc import Iterator

import pandas as pd

from workbench import log
from workbench.sweep.identity import COST_KEY

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


def summarize_settings(
    runs: pd.DataFrame, by: list[str], validated: pd.DataFrame, root: log.Root = None
) -> pd.DataFrame:
    """One row per setting, from the runs of a table; each run is one process.

    Args:
        by: the columns that are equal in the runs of a setting.
        validated: runs with a verdict.

    Returns:
        The columns of the newest run of each setting, and:
        tokens_per_s, call_ms, call_p90_ms: medians over the processes that count. These
            are the undisturbed ones, or all where every one was disturbed.
        slowest, fastest: tok/s of a process that counts.
        n, run_ids: number and ids of the processes that count.
        disturbed: the number of processes that other work disturbed.
        verdict, quality, worst_update, worst_cosine, kl_mean, kl_p99: of the newest
            validation of the same bundle.
    """
    runs = with_speeds(runs, root)
    newest = runs.drop_duplicates(by, keep="last")
    newest = newest.drop(columns=[*SPEEDS, *VALIDATION_COLUMNS, "disturbed"])
    judged = validated.drop_duplicates(SAME_VALUES_COLUMNS, keep="last")
    judged = judged[[*SAME_VALUES_COLUMNS, *VALIDATION_COLUMNS]]
    rows = newest.merge(_speeds_of_settings(runs, by), on=by)
    return rows.merge(judged, "left", SAME_VALUES_COLUMNS)


def _speeds_of_settings(runs: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """For each setting: `by`, `SPEEDS`, slowest, fastest, n, run_ids and disturbed (see
    `summarize_settings`)."""
    keys = [runs[name] for name in by]
    was_disturbed = runs["disturbed"].notna().groupby(keys, dropna=False)
    counting = runs[log.select_undisturbed(runs, by)]
    groups = counting.groupby(by, sort=False, dropna=False)
    rates = groups["tokens_per_s"]
    speeds = groups[SPEEDS].median()
    speeds = speeds.assign(
        slowest=rates.min(),
        fastest=rates.max(),
        n=groups.size(),
        run_ids=groups["run_id"].agg(list),
        disturbed=was_disturbed.sum(),
    )
    return speeds.reset_index()


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
    cost = json.loads(config).get(COST_KEY) if isinstance(config, str) else None
    return ((cost or {}).get("kl") or {}).get("p99")


def summary(root: log.Root = None, where: str | dict | None = None) -> pd.DataFrame:
    """One row per setting, machine, software and status of the log's runs that fit
    `where` (see `log.load`), the newest last. Every run without a setting has a row of
    its own.

    Returns:
        The columns of `summarize_settings`, with validations of any machine. A newest
        run that was validated itself has its own verdict and errors.
    """
    runs = with_kl_p99(log.load("runs", root, where)).drop(
        columns=["config", "versions"]
    )
    runs["setting"] = runs["setting"].fillna(runs["run_id"])
    validated = with_kl_p99(log.load("runs", root)).dropna(
        subset=["verdict", *SAME_VALUES_COLUMNS]
    )
    by = ["setting", "machine", "software", "status"]
    rows = summarize_settings(runs, by, validated, root).set_index("run_id")
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
    rows = _printed_rows(rows)
    varied = [name for name in log.SETTINGS if rows[name].nunique(dropna=False) > 1]
    common, figures = _split_figures(rows, varied)
    rows, legend = _with_letters(rows, [name for name in LETTERED if name in varied])
    display_order = _display_order(varied, figures)
    cells = {
        name: [_cut(_title(name)), *(_cut(_cell_text(value)) for value in rows[name])]
        for name in display_order
    }
    ids = ["", *rows.index]
    room = width - max(map(len, ids))
    fitting = _choose_columns(cells, _priority(varied, figures, display_order), room)
    left_out = [_title(name) for name in display_order if name not in fitting]
    common_words = "; ".join(
        f"{name} {_cell_text(value)}" for name, value in common.items()
    )
    return [
        *_wrap([common_words, *legend], width),
        *_align([ids, *(cells[name] for name in display_order if name in fitting)]),
        *_wrap(_notes(rows, left_out, width), width),
    ]


def _printed_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows under their short ids. A run that failed or is invalid has this word in
    place of a verdict."""
    rows = rows.set_axis(rows["run_id"].str.split("-").str[-1])
    rows["verdict"] = rows["verdict"].fillna(rows["status"].replace("ok", None))
    # a single process is neither the slowest nor the fastest
    rows.loc[rows["n"] == 1, ["slowest", "fastest"]] = None
    return rows


def _with_letters(
    rows: pd.DataFrame, names: list[str]
) -> tuple[pd.DataFrame, list[str]]:
    """The rows with a letter for each value of these columns, and a line for each letter
    that says what it stands for."""
    legend = []
    for name in names:
        letters = dict(zip(rows[name].dropna().unique(), _letters()))
        rows = rows.assign(**{name: rows[name].map(letters)})
        legend += [f"{name} {letter}: {value}" for value, letter in letters.items()]
    return rows, legend


def _display_order(varied: list[str], figures: list[str]) -> list[str]:
    """The columns from left to right: machines and the first settings, then figures, then
    other settings.

    Args:
        varied: the settings that differ between rows.
        figures: the figures that have a column.
    """
    first = varied[:FIRST_SETTINGS]
    leading = [name for name in varied if name in LETTERED or name in first]
    return [*leading, *figures, *(name for name in varied if name not in leading)]


def _priority(
    varied: list[str], figures: list[str], display_order: list[str]
) -> list[str]:
    """The columns of `display_order`, those first that a narrow terminal shows before
    others."""
    first = varied[:FIRST_SETTINGS]
    names = [*first, *FIRST_FIGURES, *LETTERED, *figures, *display_order]
    return list(dict.fromkeys(name for name in names if name in display_order))


def _title(name: str) -> str:
    return FIGURES.get(name, name)


def _notes(rows: pd.DataFrame, left_out: list[str], width: int) -> list[str]:
    """What stands below the table: the reasons of failed and invalid runs, and the titles
    of columns that did not fit."""
    notes = [f"{run}: {reason}" for run, reason in rows["reason"].dropna().items()]
    if left_out:
        notes.append(
            f"left out, since the line has {width} columns: {', '.join(left_out)}; "
            "`workbench log --rows` prints every column, --json all of them as JSON"
        )
    return notes


def _split_figures(rows: pd.DataFrame, varied: list[str]) -> tuple[dict, list[str]]:
    """Divides settings and figures by whether they are equal in all rows. Returns the equal
    ones by their titles, which are printed once above the table, and the names of the
    figures that have a column.

    Args:
        varied: the settings that differ between rows.
    """
    common = rows[log.SETTINGS].iloc[0].drop(varied).dropna().to_dict()
    figures = [name for name in FIGURES if rows[name].notna().any()]
    # in a single row, every figure would be equal
    if len(rows) == 1:
        return common, figures
    equal = [name for name in figures if rows[name].nunique(dropna=False) == 1]
    common |= {FIGURES[name]: rows[name].iloc[0] for name in equal}
    return common, [name for name in figures if name not in equal]


def _choose_columns(
    cells: dict[str, list[str]], priority: list[str], width: int
) -> set[str]:
    """The names of the columns that fit into `width` characters, where those that come
    first in `priority` take precedence."""
    names = set()
    for name in priority:
        needed = 2 + max(map(len, cells[name]))  # two spaces before it
        if needed <= width:
            names.add(name)
            width -= needed
    return names


def _align(columns: list[list[str]]) -> Iterator[str]:
    """The lines of a table, each column as wide as its longest cell."""
    widths = [max(map(len, column)) for column in columns]
    for cells in zip(*columns):
        yield "  ".join(cell.rjust(w) for cell, w in zip(cells, widths)).rstrip()


def _wrap(texts: list[str], width: int) -> Iterator[str]:
    for text in texts:
        yield from textwrap.wrap(text, width)


def _cell_text(value: object) -> str:
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
