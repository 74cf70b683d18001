"""What one call reads and computes: the input of the formula.

The call is one of an export (`on_chip`), or one whose time somebody published: a row of
`data/sources/ane_points.csv`, called a point. The columns of a table of points have the
names of `FEATURES`. A table of calls has the fields of `CallFeatures` as columns
(`read_points` renames them), and `with_rates` adds the rates of the calls' chips."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache

import numpy as np
import pandas as pd

from workbench.ane.chips import chip_order, chips, generation, published
from workbench.ane.work import Work, stored_bits

LEAST_SHARE = 0.05
"""The least share of an export's weights with which a compressed format counts as one of
its formats. fp16 never counts beside others: public rows with an fp16 head and lookup
tables count as lookup tables."""


@dataclass(frozen=True)
class CallFeatures:
    """What one call on a chip reads and computes. Bytes are decimal.

    Args:
        T: tokens of the call, of all sequences together.
        format: the format of most weights; several, such as `lut4 and int8`, where no
            single one has nearly all weights.
        table_share: the share of the weights that are in lookup tables.
        calls: calls in sequence, each of which waits for the one before.
        weights_g: 10⁹ weights of products, the head's among them.
        head_g: 10⁹ weights of the head where it computes one token of the call alone; 0
            where it computes every token, as all other weights do.
        streamed_gb: GB of weights that are read.
        cache_rows: rows of the longest cache.
        cache_mb: K and V as they are stored.
        repeated_cache_mb: K and V repeated for each query head. Grouped-query attention
            stores a head of K and V for several query heads.
        recurrent_mb: matrix states.
        repeats_kv: whether the program repeats K and V before its attention products,
            so that these read `repeated_cache_mb` and not `cache_mb`. Programs of
            published exporters do.
    """

    chip: str
    T: int
    format: str
    table_share: float
    calls: int
    weights_g: float
    head_g: float
    streamed_gb: float
    cache_rows: int
    cache_mb: float
    repeated_cache_mb: float
    recurrent_mb: float
    repeats_kv: bool = True

    def point(self) -> dict:
        """The features under the names of `FEATURES`."""
        return {name: getattr(self, field) for name, field in FEATURES.items()}


FEATURES = {
    "chip": "chip",
    "T": "T",
    "format": "format",
    "table": "table_share",
    "calls": "calls",
    "weights_g": "weights_g",
    "head_g": "head_g",
    "streamed_gb": "streamed_gb",
    "rows": "cache_rows",
    "cache_mb": "cache_mb",
    "spread_mb": "repeated_cache_mb",
    "recurrent_mb": "recurrent_mb",
}
"""Column of a table of points → field of `CallFeatures`. Such a table may also have the
column `repeats`, which is the field `repeats_kv`."""
TEXT_FEATURES = ("chip", "format", "table")
"""Columns of a table of points that are no numbers. Published rows have all weights in
lookup tables or none: their `table` is True or False."""


@cache
def points() -> pd.DataFrame:
    """All public measurements with their features and rates; `ms` of one call. Those that
    others published come first, then those that packed logs of Macs brought."""
    rows = published("ane_points.csv").assign(repeats=True)
    logged = published("public_points.csv")
    if len(logged):
        rows = pd.concat([rows, logged], ignore_index=True)
    return with_rates(read_points(rows.replace("", np.nan)))


def read_points(table: pd.DataFrame) -> pd.DataFrame:
    """Turns a table of points into a table of calls: renames its columns to the fields of
    `CallFeatures`, and parses these fields and `ms` as numbers. Other columns stay as they
    are. The table may already have the names of `CallFeatures`."""
    calls = table.rename(columns=FEATURES | {"repeats": "repeats_kv"})
    text_fields = [FEATURES[name] for name in TEXT_FEATURES]
    for field in (*FEATURES.values(), "ms"):
        if field in calls and field not in text_fields:
            calls[field] = pd.to_numeric(calls[field])
    calls["table_share"] = calls["table_share"].map(_table_share)
    if "repeats_kv" in calls:
        # a CSV file has the words True and False
        calls["repeats_kv"] = calls["repeats_kv"].astype(str) == "True"
    else:
        calls["repeats_kv"] = True
    return calls


def _table_share(cell: bool | float | str) -> float:
    """The share of weights in lookup tables, from a cell of the column `table`: True,
    False, one of these words, or the share itself."""
    shares = {"True": 1.0, "False": 0.0}
    return shares[str(cell)] if str(cell) in shares else float(cell)


def calls_table(calls: Iterable[CallFeatures]) -> pd.DataFrame:
    """A table of calls with the rates of their chips."""
    return with_rates(pd.DataFrame([asdict(call) for call in calls]))


def with_rates(calls: pd.DataFrame) -> pd.DataFrame:
    """Adds to a table of calls what the formula needs beside the features:

    weights_gb_s, tflops: the rates of the call's chip; where it has none, those of the
        first chip of its generation, or of the latest chip.
    measured_rate: whether somebody measured this chip's rate of weights.
    read_cache_mb: the K and V that attention products read (see `repeats_kv`).
    """
    rated = chips().set_index("chip")
    rated["measured_rate"] = ~rated["assumed"].str.contains("weights_gb_s")
    names = calls["chip"].map(lambda name: _nearest_chip(str(name), rated.index))
    rates = rated.loc[names, ["weights_gb_s", "tflops", "measured_rate"]]
    rates = rates.set_axis(calls.index)
    rates["measured_rate"] &= names == calls["chip"]
    read_cache_mb = calls["repeated_cache_mb"].where(
        calls["repeats_kv"], calls["cache_mb"]
    )
    return calls.assign(**rates, read_cache_mb=read_cache_mb)


def _nearest_chip(chip: str, rated: Iterable[str]) -> str:
    """The chip itself if it has a rate, otherwise the first chip of its generation,
    otherwise the latest of the M series."""
    if chip in rated:
        return chip
    of_generation = [name for name in rated if name.split()[0] == chip.split()[0]]
    return of_generation[0] if of_generation else max(rated, key=chip_order)


def on_chip(work: Work, chip: str) -> CallFeatures:
    """The features of an export's call on a chip.

    The head computes every token of the call, as a verification of drafts needs it."""
    total = sum(work.weights.values())
    streamed_bytes, in_tables = 0.0, 0
    for format, count in work.weights.items():
        streamed = _streamed_format(format, chip)
        streamed_bytes += count * stored_bits(streamed) / 8
        if streamed.startswith("lut"):
            in_tables += count
    return CallFeatures(
        chip=chip,
        T=work.T * work.batch,
        format=" and ".join(_main_formats(work.weights)),
        table_share=in_tables / total,
        calls=work.calls,
        weights_g=total / 1e9,
        head_g=0.0,  # it computes every token, so that it counts as all other weights
        streamed_gb=streamed_bytes / 1e9,
        cache_rows=work.cache_rows,
        cache_mb=work.cache_bytes / 1e6,
        repeated_cache_mb=work.repeated_cache_bytes / 1e6,
        recurrent_mb=work.recurrent_bytes / 1e6,
        repeats_kv=False,
    )


def describe_streams(work: Work, chip: str) -> str:
    """The main formats of an export's weights, each as stored and as streamed."""
    return ", ".join(
        f"{name} streamed as {_streamed_format(name, chip)}"
        for name in _main_formats(work.weights)
    )


def _streamed_format(format: str, chip: str) -> str:
    """The format in which a chip streams weights that are stored in `format`: the same, or
    fp16 where the chip unpacks them when it loads them."""
    formats = published("weight_streams.csv").set_index("format")
    first_generation = formats["from_generation"].get(format, np.inf)
    return format if generation(chip) >= first_generation else "fp16"


def _main_formats(weights: dict[str, int]) -> list[str]:
    """The compressed formats that have at least `LEAST_SHARE` of the weights, by falling
    share, if there are several; otherwise the one format that has most weights.

    Args:
        weights: format → their number.
    """
    by_count = sorted(weights, key=weights.get, reverse=True)
    least = LEAST_SHARE * sum(weights.values())
    names = [name for name in by_count if name != "fp16" and weights[name] >= least]
    return names if len(names) > 1 else by_count[:1]
