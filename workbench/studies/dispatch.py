"""The cost of one more shard per call, from bundles with the same layers in different
numbers of shards."""

import numpy as np
import pandas as pd

from workbench.log.machine import only_machine
from workbench.sweep import runs

CLOCKS = {"wall": "value", "native": "native_ms", "cpu": "cpu_ms"}
CONFIDENCE = 0.95
# equal in bundles that differ only in their shards
_ALIKE = ["checkpoint_hash", *runs.TIMES]
_ALIKE.remove("layers_per_shard")
_ALIKE.remove("T")


def dispatch_cost(samples: pd.DataFrame) -> pd.DataFrame:
    """The ms that each layer shard adds to a call, for each T and clock.

    The slope is a least-squares fit of a call's time in its layer shards against their
    number, with one value (the median over calls) per run. Bundles that differ in
    anything but layers per shard have an intercept each and the slope in common.

    Args:
        samples: the log's samples with their runs' settings, of one machine (see
            `sweep.stored_tables`); invalid runs and warm-ups are left out.

    Returns:
        T, clock (wall; native: Core ML's own; cpu: of the calling thread), dispatch_ms,
        its 95% interval low, high (null: fewer than two runs more than intercepts),
        runs, least_shards, most_shards; only for T and clocks with bundles of different
        numbers of shards.
    """
    machine = only_machine(samples)
    timed = samples[(samples["phase"] == "layer") & ~samples["warmup"].fillna(False)]
    names = {column: clock for clock, column in CLOCKS.items()}
    timed = timed[timed["invalid"].isna()].rename(columns=names)
    rows = []
    for clock in CLOCKS:
        steps = timed.dropna(subset=clock)
        calls = steps.groupby(
            [*_ALIKE, "T", "run_id", "repetition", "order"], dropna=False
        )
        calls = calls.agg(shards=("shard", "nunique"), ms=(clock, "sum")).reset_index()
        by_run = calls.groupby([*_ALIKE, "T", "run_id"], dropna=False)[
            ["shards", "ms"]
        ].median()
        for T, of_T in by_run.groupby(level="T"):
            alike = of_T.groupby(level=_ALIKE, dropna=False)
            shards, ms = (
                (of_T[c] - alike[c].transform("mean")).to_numpy() for c in of_T
            )
            if shards.any():
                slope, low, high = _slope(shards, ms, len(of_T) - alike.ngroups - 1)
                extent = int(of_T["shards"].min()), int(of_T["shards"].max())
                rows.append((T, clock, slope, low, high, len(of_T), *extent))
    columns = [
        "T",
        "clock",
        "dispatch_ms",
        "low",
        "high",
        "runs",
        "least_shards",
        "most_shards",
    ]
    return pd.DataFrame(rows, columns=columns).assign(machine=machine)


def _slope(x: np.ndarray, y: np.ndarray, freedom: int) -> tuple[float, float, float]:
    """Slope of y on x, both centred, and its interval, NaN without a degree of
    freedom."""
    from scipy import stats

    slope = float(x @ y / (x @ x))
    if freedom < 1:
        return slope, np.nan, np.nan
    error = np.sqrt(((y - slope * x) ** 2).sum() / freedom / (x @ x))
    width = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom) * error)
    return slope, slope - width, slope + width
