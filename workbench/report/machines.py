"""All machines of the log in one table, and below it published speeds."""

from pathlib import Path

import pandas as pd

from workbench import log
from workbench.log.machine import with_machines
from workbench.sweep.results import VALIDATED, validated_costs
from workbench.sweep.runs import TIMES

SETTING = ("machine", "checkpoint", *TIMES, "status", "reason")
SHOWN = (
    *("origin", "machine", "checkpoint"),
    *("compress", "max_seq_len", "T", "depth", "others"),
    *("verdict", "kl_mean", "tokens_per_s", "n", "cold_s", "warm_s", "placement"),
    *("runtime", "precision", "status", "reason"),
)


def all_machines(root: Path | str | None = None) -> pd.DataFrame:
    """One row per machine, checkpoint, setting and status of its runs; then the
    published speeds in `data/sources`.

    Columns: ``origin`` (measured or published), the setting (``others``: settings that
    are not the log's most common ones), ``verdict`` and ``kl_mean`` (nats) of its
    bundle, ``tokens_per_s`` (median over runs of their medians), ``n`` runs, ``cold_s``
    and ``warm_s`` (seconds of the first loading of all shards, with Core ML's
    compilation, and of the second), ``placement`` with its source. Null: not measured;
    of published figures, unknown."""
    runs = with_machines(log.load("runs", root))
    runs = runs[runs["checkpoint"].notna() | (runs["status"] != "ok")]
    samples = log.load("samples", root, {"run_id": runs["run_id"].tolist()})
    samples = samples[~samples["warmup"].fillna(False)]

    def by_run(*phases: str):
        of_phases = samples[samples["phase"].isin(phases)]
        return of_phases.groupby("run_id")["value"]

    times = {
        "tokens_per_s": by_run("tokens_per_s").median(),
        "cold_s": by_run("compile", "cold_load").sum() / 1e3,
        "warm_s": by_run("load").sum() / 1e3,
    }
    runs = runs.join(pd.DataFrame(times), on="run_id")
    runs = runs.drop(columns="verdict").merge(validated_costs(root), "left", VALIDATED)
    rows = runs.groupby(list(SETTING), dropna=False, sort=False).agg(
        verdict=("verdict", "last"),
        kl_mean=("kl_mean", "last"),
        tokens_per_s=("tokens_per_s", "median"),
        n=("run_id", "size"),
        cold_s=("cold_s", "median"),
        warm_s=("warm_s", "median"),
        share=("ane_ops_share", "last"),
        source=("placement_source", "last"),
    )
    rows = rows.reset_index().sort_values(
        ["machine", "checkpoint", "tokens_per_s"], ascending=[True, True, False]
    )
    rows["others"] = _uncommon_settings(rows)
    rows["placement"] = list(map(_placement, rows["source"], rows["share"]))
    measured = rows.assign(origin="measured")
    return pd.concat([measured, published_speeds(root)], ignore_index=True)[list(SHOWN)]


def _placement(source: str | None, share: float | None) -> str | None:
    """The source of a placement and the Neural Engine's share where it is known."""
    if pd.isna(source):
        return None
    if pd.isna(share):
        return source
    return f"{source}: {share:.0%} ANE"


def _uncommon_settings(rows: pd.DataFrame) -> list[str]:
    """Each row's settings that are not the most common ones of all rows."""
    common = {name: rows[name].mode() for name in TIMES if name not in SHOWN}
    texts = []
    for row in rows.to_dict("records"):
        others = []
        for name, most in common.items():
            if pd.notna(row[name]) and row[name] != most[0]:
                others.append(f"{name} {row[name]}")
        texts.append(", ".join(others))
    return texts


def published_speeds(root: Path | str | None = None) -> pd.DataFrame:
    """The speeds of `data/sources/decode_speeds.csv` in the columns of
    `all_machines`."""
    path = log.project(root) / "data" / "sources" / "decode_speeds.csv"
    if not path.is_file():
        return pd.DataFrame(columns=list(SHOWN))
    rows = pd.read_csv(path)
    rates = rows["unit"] == "tok/s"
    values = rows["value"].map("{:g}".format) + " " + rows["unit"]
    columns = {
        "origin": "published, fidelity unknown",
        "machine": rows["machine"],
        "checkpoint": rows["model"],
        "others": rows["condition"].fillna("").where(rates, values),
        "reason": rows["source"],
        "tokens_per_s": rows["value"].where(rates),
    }
    return pd.DataFrame(columns).reindex(columns=list(SHOWN))
