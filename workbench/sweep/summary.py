"""The log as one table with a row per setting (`summary`), and two runs side by side
(`compare_runs`).

Runs are in the order of their ids, which begin with their time: the last one is the
newest. `log.load` gives them so."""

import json

import pandas as pd

from workbench import log
from workbench.sweep.identity import COST_KEY

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
    validations = validated.drop_duplicates(SAME_VALUES_COLUMNS, keep="last")
    validations = validations[[*SAME_VALUES_COLUMNS, *VALIDATION_COLUMNS]]
    rows = newest.merge(_speeds_of_settings(runs, by), on=by)
    return rows.merge(validations, "left", SAME_VALUES_COLUMNS)


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


def compare_runs(run_a: str, run_b: str, root: log.Root = None) -> dict:
    """The differences of two runs.

    Returns:
        settings, measures, alike: see `log.compare`.
        changed_gates: gate, and its verdicts a and b, where these differ.

    Raises:
        InputError: the log lacks a run.
    """
    settings, measures, alike = log.compare(run_a, run_b, root)
    runs = log.plain(log.load("runs", root))
    changed_gates = _changed_gates(log.find_run(run_a, runs), log.find_run(run_b, runs))
    return {
        "settings": _json_records(settings),
        "measures": _json_records(measures),
        "changed_gates": _json_records(changed_gates),
        "alike": alike,
    }


def _changed_gates(run_a: pd.Series, run_b: pd.Series) -> pd.DataFrame:
    """The gates whose verdicts differ in two rows of `runs`, or that one of them lacks;
    none unless both runs have gates.

    Returns:
        gate, a, b: its name and both verdicts.
    """
    verdicts = {"a": _gate_verdicts(run_a), "b": _gate_verdicts(run_b)}
    gates = pd.DataFrame(verdicts).rename_axis("gate").reset_index()
    if not all(verdicts.values()):
        return gates.iloc[:0]
    return gates[gates["a"].ne(gates["b"])]


def _gate_verdicts(run: pd.Series) -> dict[str, str]:
    """Gate → verdict, of a row of `runs`."""
    config = json.loads(run["config"] or "{}")
    return {gate["name"]: gate["verdict"] for gate in config.get("gates", [])}


def _json_records(table: pd.DataFrame) -> list[dict]:
    """The rows of a table as values of JSON; null where a cell is missing."""
    return json.loads(table.to_json(orient="records"))
