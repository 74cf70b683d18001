"""All machines of the log in one table, beside what others published."""

from pathlib import Path

import pandas as pd

from workbench import log
from workbench.log.machine import with_machines
from workbench.sweep.results import VALIDATED, validated_costs
from workbench.sweep.runs import TIMES

SETTING = ("machine", "checkpoint", *TIMES, "status", "reason")
COLD, WARM = ("compile", "cold_load"), ("load",)
SHOWN = (
    *("origin", "machine", "checkpoint"),
    *("compress", "max_seq_len", "T", "depth", "others"),
    *("verdict", "kl_mean", "tokens_per_s", "n", "cold_s", "warm_s", "placement"),
    *("runtime", "precision", "status", "reason"),
)


def all_machines(root: Path | str | None = None) -> pd.DataFrame:
    """One row per machine, checkpoint, setting and end of its runs, failed ones included; then the
    speeds in `data/sources`.

    Columns: ``origin`` (measured or published), what was run (``others``: settings that are not the
    log's most common ones), ``verdict`` and ``kl_mean`` (nats) of its bundle, ``tokens_per_s``
    (median over runs of their medians), ``n`` runs, ``cold_s`` and ``warm_s``, seconds to load all
    shards for the first time (with Core ML's compilation) and again, ``placement`` with its source.
    Null: not measured; of published figures, unknown.
    """
    runs = with_machines(log.load("runs", root=root))
    runs = runs[runs["checkpoint"].notna() | (runs["status"] != "ok")]
    samples = log.load("samples", root=root, where={"run_id": runs["run_id"].tolist()})
    samples = samples[~samples["warmup"].fillna(False)]
    rates = samples[samples["phase"] == "tokens_per_s"].groupby("run_id")["value"].median()
    runs = runs.join(rates.rename("tokens_per_s"), on="run_id")
    for name, phases in (("cold_s", COLD), ("warm_s", WARM)):
        loading = samples[samples["phase"].isin(phases)].groupby("run_id")["value"].sum() / 1e3
        runs = runs.join(loading.rename(name), on="run_id")
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
    common = {name: rows[name].mode() for name in TIMES if name not in SHOWN}
    rows["others"] = [
        ", ".join(
            f"{name} {row[name]}"
            for name, most in common.items()
            if pd.notna(row[name]) and row[name] != most[0]
        )
        for row in rows.to_dict("records")
    ]
    rows["placement"] = [
        None if pd.isna(source) else source + (f": {share:.0%} ANE" if pd.notna(share) else "")
        for source, share in zip(rows["source"], rows["share"])
    ]
    measured = rows.assign(origin="measured")
    return pd.concat([measured, published_speeds(root)], ignore_index=True)[list(SHOWN)]


def published_speeds(root: Path | str | None = None) -> pd.DataFrame:
    """The speeds of `data/sources/decode_speeds.csv` in the columns of `all_machines`."""
    path = log.project(root) / "data" / "sources" / "decode_speeds.csv"
    if not path.is_file():
        return pd.DataFrame(columns=list(SHOWN))
    rows = pd.read_csv(path)
    rates = rows["unit"] == "tok/s"
    return pd.DataFrame(
        {
            "origin": "published, fidelity unknown",
            "machine": rows["machine"],
            "checkpoint": rows["model"],
            "others": rows["condition"]
            .fillna("")
            .where(
                rates, [f"{value:g} {unit}" for value, unit in zip(rows["value"], rows["unit"])]
            ),
            "reason": rows["source"],
            "tokens_per_s": rows["value"].where(rates),
        }
    ).reindex(columns=list(SHOWN))
