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
    rows["disturbed"] = rows["disturbed"].where(rows["disturbed"] > 0)
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
