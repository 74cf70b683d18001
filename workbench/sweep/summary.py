"""The log as one table, a row per setting, and two of its runs side by side; both as
lines of at most 100 columns."""

import json
import textwrap

import pandas as pd

from workbench import log
from workbench.errors import InputError
from workbench.log.stats import MEASUREMENT
from workbench.sweep.identity import OPTIONS

WIDTH = 100
IDENTITIES = ("values", "setting", "bundle", "bundle_hash", "bundle_bytes")
"""Columns that identify a bundle or a setting and do not describe it."""
_FIRST = ("checkpoint", "compress", "max_seq_len", "T", "depth", "runtime")
_AFTER = ("precision", "compute_units", "hints", "fast", "reads", "n_gen", "threads")
SETTINGS = (
    *(*_FIRST, *(name for name in OPTIONS if name not in _FIRST), *_AFTER),
    *("min_tokens", "min_seconds", "command", "experiment", "machine", "software"),
)
BUNDLE = ["values", "bundle_hash"]
"""Columns that are equal for runs that compute the same."""
SPEEDS = ["tokens_per_s", "call_ms", "call_p90_ms", "cold_s", "warm_s"]
JUDGED = ["verdict", "worst_update", "worst_cosine", "kl_mean"]


def repeated(
    runs: pd.DataFrame, by: list[str], validated: pd.DataFrame
) -> pd.DataFrame:
    """One row per group of runs: the columns of the newest one; medians over them of
    `SPEEDS`, the `slowest` and `fastest` tok/s and the number `n` of runs; `JUDGED` of
    the newest of the `validated` runs of the same bundle."""
    groups = runs.groupby(by, sort=False, dropna=False)
    rates = groups["tokens_per_s"]
    extent = {"slowest": rates.min(), "fastest": rates.max(), "n": groups.size()}
    speeds = groups[SPEEDS].median().assign(**extent).reset_index()
    last = runs.drop_duplicates(by, keep="last").drop(columns=[*SPEEDS, *JUDGED])
    judged = validated.drop_duplicates(BUNDLE, keep="last")[[*BUNDLE, *JUDGED]]
    return last.merge(speeds, on=by).merge(judged, "left", BUNDLE)


def summary(root: log.Root = None, where: str | dict | None = None) -> pd.DataFrame:
    """One row per setting, machine, software and status of the log's runs that fit
    `where` (see `log.load`); runs without a setting have a row each. The newest are
    last.

    Returns:
        The columns of `repeated`, validations of any machine.
    """
    runs = log.load("runs", root, where).drop(columns=["config", "versions"])
    runs["setting"] = runs["setting"].fillna(runs["run_id"])
    validated = log.load("runs", root).dropna(subset="verdict")
    rows = repeated(runs, ["setting", "machine", "software", "status"], validated)
    rows["verdict"] = rows["verdict"].astype(object).where(rows["status"] == "ok")
    said = rows["verdict"].notna() | rows["tokens_per_s"].notna()
    rows = rows[said | rows["status"].ne("ok")]
    return rows.sort_values("run_id", ignore_index=True)


def table_lines(rows: pd.DataFrame) -> list[str]:
    """Rows of `summary`: what is equal in all of them once, then a table whose first
    column is the short id that every command takes for a run."""
    if rows.empty:
        return []
    names = [name for name in SETTINGS if rows[name].nunique(dropna=False) > 1]
    common = rows[[name for name in SETTINGS if name not in names]].iloc[0].dropna()
    common = "; ".join(f"{name} {value}" for name, value in common.items())
    figures = pd.DataFrame({"n": rows["n"].map(str)})
    ends = zip(rows["slowest"], rows["fastest"], rows["n"])
    figures["tok/s"] = _words(rows["tokens_per_s"], "{:.1f}")
    figures["from–to"] = [f"{a:.0f}–{b:.0f}" if n > 1 else None for a, b, n in ends]
    figures["ms/call"] = _words(rows["call_ms"], "{:.3g}")
    figures["ANE"] = _words(rows["ane_ops_share"], "{:.0%}")
    figures["1−cos"] = _words(rows["worst_update"], "{:.2g}")
    figures["KL"] = _words(rows["kl_mean"], "{:.2g}")
    figures["verdict"] = rows["verdict"].fillna(rows["status"].replace("ok", None))
    figures = figures.dropna(axis="columns", how="all").fillna("–")
    ids, hidden = rows["run_id"].map(log.short), []
    while True:
        settings = rows[names].map(lambda v: shortened(str(v), 14), "ignore")
        table = pd.concat([ids.rename("run"), settings.fillna("–"), figures], axis=1)
        lines = table.to_string(index=False).splitlines()
        if len(lines[0]) <= WIDTH or not names:
            break
        hidden.insert(0, names.pop())
    text = [*textwrap.wrap(common, WIDTH), *lines]
    if hidden:
        more = f"also differing: {', '.join(hidden)} (workbench log --rows)"
        text += textwrap.wrap(more, WIDTH)
    for run_id, reason in zip(ids, rows["reason"]):
        if pd.notna(reason):
            text += textwrap.wrap(f"{run_id}: {reason}", WIDTH)
    return text


def _words(values: pd.Series, form: str) -> pd.Series:
    return values.map(form.format, na_action="ignore").astype(object)


def difference(run_a: str, run_b: str, root: log.Root = None) -> dict:
    """Where two runs differ (see `log.compare`), with what their validations found.

    Returns:
        settings (setting, a, b), measures (as `log.compare`), hidden (how many of them
        show no difference), gates (gate, a, b: verdicts that differ), errors (tensor,
        a, b: the largest error of each at layers, positions and T that both have, and
        layer, position, T where they differ most).

    Raises:
        InputError: the log lacks a run.
    """
    found = log.compare(run_a, run_b, root)
    runs = log.load("runs", root)
    rows = [log.find(run, runs) for run in (run_a, run_b)]
    verdicts = []
    for row in rows:
        config = row["config"] if isinstance(row["config"], str) else "{}"
        gates = json.loads(config).get("gates", [])
        verdicts.append({gate["name"]: gate["verdict"] for gate in gates})
    gates = pd.DataFrame(verdicts, ["a", "b"]).T.rename_axis("gate").reset_index()
    gates = log.plain(gates[gates["a"] != gates["b"]]) if all(verdicts) else gates[:0]
    return {
        "settings": found.settings.to_dict("records"),
        "measures": json.loads(found.measures.to_json(orient="records")),
        "hidden": found.indistinguishable,
        "gates": gates.to_dict("records"),
        "errors": _errors(rows, root),
    }


def _errors(rows: list[pd.Series], root: log.Root) -> list[dict]:
    """The largest errors of two validations of one checkpoint, a row per tensor."""
    keys = ["tensor", "mode", "layer", "position", "T"]
    sides, errors = [], []
    for row in rows:
        cells = log.load("fidelity", root, {"run_id": row["run_id"]})
        cells["error"] = cells["error"].fillna(1 - cells["cosine"])
        sides.append(cells.groupby(keys, dropna=False)["error"].max())
    if rows[0]["checkpoint_hash"] != rows[1]["checkpoint_hash"]:
        return []
    both = pd.concat(sides, axis=1, join="inner", keys=["a", "b"])
    apart = (both["a"] - both["b"]).abs()
    for tensor, own in apart.groupby(level="tensor"):
        worst = {}
        if own.notna().any():
            worst = dict(zip(keys[2:], map(int, own.idxmax()[2:])))
        errors.append({"tensor": tensor, **worst, **both.loc[tensor].max()})
    return errors


def difference_lines(found: dict) -> list[str]:
    """A `difference` as text; a note that holds for all measurements is printed
    once."""
    settings = pd.DataFrame(found["settings"], columns=["setting", "a", "b"])
    described = settings[~settings["setting"].isin(IDENTITIES)]
    lines = ["no setting differs"]
    if len(settings):
        shown = described if len(described) else settings
        lines = _table(shown.map(lambda value: shortened(str(value), 34)))
    if found["measures"]:
        lines += _measure_lines(pd.DataFrame(found["measures"]))
    lines.append(f"{found['hidden']} measurements without a difference left out")
    for row in found["errors"]:
        place = f"layer {row.get('layer')}, position {row.get('position')}"
        errors = f"largest error A {row['a']:.3g}, B {row['b']:.3g}"
        lines.append(f"{row['tensor']:8}{errors}; furthest apart at {place}")
    for row in found["gates"]:
        lines.append(f"gate {row['gate']:29}A {row['a']}, B {row['b']}")
    return lines


def _measure_lines(rows: pd.DataFrame) -> list[str]:
    names = rows["phase"]
    for key in MEASUREMENT:
        if key not in ("phase", "unit") and rows[key].nunique() > 1:
            words = rows[key].astype(object).map(f" {key} {{}}".format, "ignore")
            names = names + words.fillna("")
    rows.insert(0, "measurement", names.map(lambda name: shortened(name, 34)))
    both = rows["median_a"].notna() & rows["median_b"].notna()
    n_a, n_b = rows[["n_a", "n_b"]].max()
    shown = ["measurement", "unit", "median_a", "median_b", "ratio", "low", "high"]
    table = rows.loc[both, shown].dropna(axis="columns", how="all")
    table = table.rename(columns={"median_a": "A", "median_b": "B", "ratio": "B/A"})
    lines = ["", f"medians over runs: {n_a} of A, {n_b} of B", *_table(table)]
    for note, own in rows[both].groupby("note"):
        which = "all" if len(own) == both.sum() else ", ".join(own["measurement"])
        lines += textwrap.wrap(f"{note}: {which}", WIDTH)
    if len(alone := names[~both]):
        lines += textwrap.wrap(f"on one side only: {'; '.join(alone)}", WIDTH)
    return lines


def _table(rows: pd.DataFrame) -> list[str]:
    how = {"index": False, "float_format": "%.4g", "na_rep": "–"}
    return rows.to_string(**how).splitlines() if len(rows) else []


def sorted_rows(rows: pd.DataFrame, by: str | None) -> pd.DataFrame:
    """Rows sorted by a column, descending if `by` begins with "-"; nulls come last.

    Raises:
        InputError: no such column.
    """
    if by is None:
        return rows
    name = by.removeprefix("-")
    if name not in rows:
        needed = f"one of {', '.join(rows)}"
        raise InputError("--sort", repr(by), needed, "name one of these")
    return rows.sort_values(name, ascending=name == by, kind="stable")


def shortened(text: str, most: int) -> str:
    """The text, cut to `most` characters with … at its end."""
    return text if len(text) <= most else f"{text[: most - 1]}…"
