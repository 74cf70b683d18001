"""Predicts the milliseconds of a shard on a Neural Engine from its bytes, products and
dispatches.

    t    = dispatches · t_dispatch + max(FLOP / peak, stream) / share
    stream = weights / weight rate + 2 · states / activation rate

Weights are read once per call; states are read and written once. A chip reads weights
as they are stored if `weight_streams.csv` says so of their format; other formats are
unpacked to fp16 when the model is loaded. Rates and peaks are published per chip.
`t_dispatch` and `share`, the part of the rates that decoding reaches, are fitted to the
published times of one chip (`CALIBRATED_ON`, in `data/sources/ane_decode.csv`);
`misfits` compares the fit with figures left out of it, those of other chips included.
The result is a prediction and does not depend on this machine.

Work is a table with a row for each shard that one call runs: name, weight_bytes (as
stored in the format `compress`, a key of `PRESETS`), state_bytes, flops (two for a
multiply-add), dispatches (predictions in sequence)."""

from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

from workbench.bundle import PRESETS
from workbench.errors import InputError, check_choice

FIGURE_SOURCES = Path(__file__).parents[2] / "data" / "sources"
CALIBRATED_ON = "M4 Max"
TERMS = ["dispatches", "busy_ms"]
QUANTITIES = {
    "weight stream through Core ML": "weights_gb_s",
    "activation stream": "states_gb_s",
    "fp16 convolution": "tflops",
}


@cache
def published(name: str) -> pd.DataFrame:
    """A table of published figures; empty fields are empty texts."""
    path = FIGURE_SOURCES / name
    if not path.is_file():
        needed = "the published figures in data/sources"
        raise InputError("plan", f"no {path}", needed, "run from a checkout")
    return pd.read_csv(path, keep_default_na=False)


@cache
def chips() -> pd.DataFrame:
    """Chips whose weight rate is published. A missing rate is that of the same
    generation, else of the latest one before it.

    Returns:
        chip, weights_gb_s, states_gb_s, tflops, assumed (the rates of a related chip).
    """
    rows = published("chips.csv")
    rows = rows.assign(
        chip=rows["chip"].str.split(" and "),  # a row may be of several chips
        quantity=rows["quantity"].map(QUANTITIES),  # null: another quantity
        mean=rows[["low", "high"]].mean(axis="columns"),
    )
    rates = rows.explode("chip").pivot_table("mean", "chip", "quantity")
    rates = rates.rename({"Ultra": "M1 Ultra"}).sort_index()
    unknown = rates.isna()
    # alphabetical order is that of generations, the base chip first
    base = rates.groupby(rates.index.str[:2]).transform("first").ffill()
    assumed = unknown.apply(lambda row: ", ".join(row.index[row]), axis="columns")
    rates = rates.fillna(base).assign(assumed=assumed)
    return rates[~unknown["weights_gb_s"]].reset_index()


def generation(chip: str) -> int:
    """The generation of a chip's M series."""
    check_choice("chip", chip, sorted(chips()["chip"]))
    return int(chip[1])


def on_chips(works: pd.DataFrame) -> pd.DataFrame:
    """Work on the chip that its column `chip` names.

    Returns:
        The columns of `works` and `chips`; weights (the formats stored and streamed);
        streamed_bytes (of weights); busy_ms (at the full rates, without dispatches).
    """
    formats = published("weight_streams.csv")[["compress", "from_generation"]]
    rows = works.merge(chips(), on="chip").merge(formats, on="compress")
    as_stored = rows["chip"].str[1].astype(int) >= rows["from_generation"]
    streams = rows["compress"].where(as_stored, "fp16")
    bits = {name: preset.stored_bits for name, preset in PRESETS.items()}
    streamed = rows["weight_bytes"] * streams.map(bits) / rows["compress"].map(bits)
    states_ns = 2 * rows["state_bytes"] / rows["states_gb_s"]
    stream_ns = streamed / rows["weights_gb_s"] + states_ns
    products_ns = rows["flops"] / rows["tflops"] / 1e3
    return rows.assign(
        weights=rows["compress"] + " streamed as " + streams,
        streamed_bytes=streamed,
        busy_ms=np.maximum(stream_ns, products_ns) / 1e6,
    )


def figures() -> pd.DataFrame:
    """Every published time `ms`, of all chips, with its work (see `on_chips`)."""
    return on_chips(published("ane_decode.csv"))


def fit(figures: pd.DataFrame) -> np.ndarray:
    """The coefficients of `TERMS`, which are t_dispatch in ms and 1 / share, of the
    least squares of the relative errors.

    Only the figures of the chip `CALIBRATED_ON` enter, so that times of two chips are
    not mixed."""
    own = figures[figures["chip"] == CALIBRATED_ON]
    terms = own[TERMS].div(own["ms"], axis="index")
    return np.linalg.lstsq(terms, np.ones(len(own)), rcond=None)[0]


def misfits() -> pd.DataFrame:
    """Every figure, predicted by a fit without it.

    Returns:
        The columns of `figures`, `ms` as published_ms; predicted_ms; misfit (predicted
        over published, less 1).
    """
    rows = figures().rename(columns={"ms": "published_ms"})
    rows["predicted_ms"] = [
        rows.loc[i, TERMS] @ fit(figures().drop(i)) for i in rows.index
    ]
    return rows.assign(misfit=rows["predicted_ms"] / rows["published_ms"] - 1)


def describe_fit() -> str:
    """What the predictions assume and how far they were from published times."""
    found = misfits()
    sizes = found["misfit"].abs()
    worst = found.loc[sizes.idxmax()]
    return (
        "ms and tok/s by chip assume that every operation runs on the Neural Engine, "
        "whatever the placement says. Each of "
        f"{len(found)} published times was predicted from the others: the prediction is "
        f"off by {sizes.median():.1%} in the median and by {worst['misfit']:+.0%} at worst "
        f"({worst['model']}, {worst['part']})."
    )


def by_chip(works: pd.DataFrame) -> pd.DataFrame:
    """The prediction of every chip for all work, one after the other, without host time.

    Returns:
        chip, ms (of one call), tokens_per_s (at one token per call), weights (the
        formats stored and streamed), streamed_mib (per call), assumed (the rates of a
        related chip).
    """
    rows = on_chips(works.merge(chips()[["chip"]], how="cross"))
    rows["ms"] = rows[TERMS] @ fit(figures())
    rows["streamed_mib"] = rows["streamed_bytes"] / 2**20
    sums = {"ms": "sum", "weights": "first", "streamed_mib": "sum", "assumed": "first"}
    table = rows.groupby("chip", sort=False).agg(sums).reset_index()
    table.insert(2, "tokens_per_s", 1e3 / table["ms"])
    return table
