"""The log as one table, a row per setting, in lines of at most 100 columns, and two of
its runs side by side."""

import itertools
import json
import textwrap

import pandas as pd

from workbench import log

WIDTH = 100
BUNDLE = ["values", "bundle_hash"]
"""Columns that are equal for runs that compute the same."""
SPEEDS = ["tokens_per_s", "call_ms", "call_p90_ms"]
JUDGED = ["verdict", "worst_update", "worst_cosine", "kl_mean"]
FIGURES = {
    "verdict": "verdict",
    "n": "n",
    "tokens_per_s": "tok/s",
    "slowest": "slowest",
    "fastest": "fastest",
    "call_ms": "ms/call",
    "ane_ops_share": "ANE",
    "worst_update": "1−cos",
    "kl_mean": "KL",
}
"""Columns of `summary` that are printed as figures, and their titles."""


def repeated(
    runs: pd.DataFrame, by: list[str], validated: pd.DataFrame
) -> pd.DataFrame:
    """One row per group of runs: the columns of the newest one; medians over them of
    `SPEEDS`, the `slowest` and `fastest` tok/s, the number `n` and the `run_ids` of all
    of them; `JUDGED` of the newest of the `validated` runs of the same bundle."""
    groups = runs.groupby(by, sort=False, dropna=False)
    rates = groups["tokens_per_s"]
    extent = {"slowest": rates.min(), "fastest": rates.max(), "n": groups.size()}
    extent["run_ids"] = groups["run_id"].agg(list)
    speeds = groups[SPEEDS].median().assign(**extent).reset_index()
    last = runs.drop_duplicates(by, keep="last").drop(columns=[*SPEEDS, *JUDGED])
    judged = validated.drop_duplicates(BUNDLE, keep="last")[[*BUNDLE, *JUDGED]]
    return last.merge(speeds, on=by).merge(judged, "left", BUNDLE)


def summary(root: log.Root = None, where: str | dict | None = None) -> pd.DataFrame:
    """One row per setting, machine, software and status of the log's runs that fit
    `where` (see `log.load`); runs without a setting have a row each. The newest are
    last.

    Returns:
        The columns of `repeated`, validations of any machine; `JUDGED` of the newest
        run itself where it was validated.
    """
    runs = log.load("runs", root, where).drop(columns=["config", "versions"])
    runs["setting"] = runs["setting"].fillna(runs["run_id"])
    validated = log.load("runs", root).dropna(subset=["verdict", *BUNDLE])
    by = ["setting", "machine", "software", "status"]
    rows = repeated(runs, by, validated).set_index("run_id")
    rows.update(runs.set_index("run_id")[JUDGED])  # a run's own verdict stands
    rows = rows.reset_index()
    ok = rows["status"] == "ok"
    rows["verdict"] = rows["verdict"].astype(object).where(ok)
    said = rows[["verdict", "tokens_per_s"]].notna().any(axis=1)
    return rows[said | ~ok].sort_values("run_id", ignore_index=True)


def table_lines(rows: pd.DataFrame) -> list[str]:
    """Rows of `summary`: what is equal in all of them once, then a table, in several
    parts if it is too wide, whose first column is the short id that every command takes
    for a run."""
    if rows.empty:
        return []
    varied = [name for name in log.SETTINGS if rows[name].nunique(dropna=False) > 1]
    common = rows[log.SETTINGS].iloc[0].drop(varied).dropna()
    words = ["; ".join(f"{name} {value}" for name, value in common.items())]
    rows = rows.set_axis(rows["run_id"].str.split("-").str[-1])
    words += [f"{run}: {reason}" for run, reason in rows["reason"].dropna().items()]
    rows["verdict"] = rows["verdict"].fillna(rows["status"].replace("ok", None))
    rows.loc[rows["n"] == 1, ["slowest", "fastest"]] = None
    names = [*varied[:4], *FIGURES, *varied[4:]]  # figures beside the most telling
    table = rows[names].rename(columns=FIGURES)
    table = log.plain(table.dropna(axis="columns", how="all")).fillna("–")
    lines = table.rename_axis(None).to_string(
        line_width=WIDTH - len("  \\"), max_colwidth=15, float_format="{:.4g}".format
    )
    first, *more = (textwrap.wrap(text, WIDTH) for text in words)
    return [*first, *lines.splitlines(), *itertools.chain(*more)]


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
