"""One run in the log: what a bundle, a decoder and their results look like as rows."""

from pathlib import Path

import pandas as pd

from workbench import log
from workbench.bundle import Bundle
from workbench.decode import Decoder

OPTIONS = ("max_seq_len", "t_max", "batch", "layers_per_shard", "compress", "kv_write", "layout", "states", "moe")
"""Export options that are columns of `runs`."""


def describe(bundle: Bundle, decoder: Decoder | None = None) -> dict:
    """Columns of `runs` that a bundle and the way it was run determine. Placement stays null: nothing here sees it."""
    m, o = bundle.manifest, bundle.manifest.options
    row = {"checkpoint": m.checkpoint["name"], "checkpoint_hash": m.checkpoint["sha256"], "bundle": bundle.root.name,
           "bundle_hash": bundle.identity, "family": m.family} | {name: getattr(o, name) for name in OPTIONS}  # fmt: skip
    if decoder is not None:
        row |= {"runtime": decoder.runtime, "precision": decoder.precision if decoder.runtime == "portable" else None,
                "fast": decoder.fast and decoder.precision == "declared" if decoder.runtime == "portable" else None,
                "compute_units": decoder.compute_units if decoder.runtime == "coreml" else None}  # fmt: skip
    return row


def record(experiment: str, row: dict, *, root: str | Path | None = None, fidelity: pd.DataFrame | None = None,
           samples: pd.DataFrame | None = None, layers: pd.DataFrame | None = None,
           exhibits: list[dict] | None = None) -> str:  # fmt: skip
    """Writes one run and its tables; the `runs` row goes last, so a run that is listed is whole.

    Returns:
        The run id.
    """
    run_id = log.new_run_id()
    for table, rows in (("fidelity", fidelity), ("samples", samples), ("layers", layers), ("exhibits", exhibits)):
        if rows is not None and len(rows):
            log.append(table, rows, root=root, run_id=run_id)
    log.append("runs", log.environment() | {"experiment": experiment, "status": "ok"} | row, root=root, run_id=run_id)
    return run_id


SETTINGS = ["family", "checkpoint", *OPTIONS, "runtime", "precision", "fast", "compute_units", "chip", "round"]


def table(name: str, experiment: str | None = None, root: str | Path | None = None) -> pd.DataFrame:
    """Rows of a log table with their run's settings joined on; of runs that ended well, the latest of each setting and
    round."""
    found = log.load("runs", root=root)
    found = found[(found["status"] == "ok") & ((found["experiment"] == experiment) if experiment else True)]
    rows = log.load(name, root=root, where={"run_id": found["run_id"].tolist()})
    joined = rows.merge(found[["run_id", "bundle", *(c for c in SETTINGS if c not in rows)]], on="run_id")
    by = [c for c in (*SETTINGS, "T", "depth") if c in joined]
    newest = joined.groupby(by, dropna=False)["run_id"].transform("max")  # run ids sort by time
    return joined[joined["run_id"] == newest].reset_index(drop=True)


def footer(*run_ids: str, **more) -> pd.DataFrame:
    """The last cell of a notebook: the log rows it stands on and the versions that made them."""
    versions = {k: v for k, v in log.environment().items() if k in ("versions", "commit", "platform")}
    rows = [("log rows", ", ".join(run_ids)), *more.items(), *versions.items()]
    return pd.DataFrame(rows, columns=["", "value"]).set_index("")
