"""Published figures of Neural Engines: the tables of `data/sources`, and the rates of each
chip."""

from functools import cache
from pathlib import Path

import pandas as pd

from workbench.errors import InputError, check_choice

FIGURE_SOURCES = Path(__file__).parents[2] / "data" / "sources"
# quantity in `chips.csv` → its column in `chips`
QUANTITIES = {
    "weight stream through Core ML": "weights_gb_s",
    "fp16 convolution": "tflops",
}
ASSUMED = "assumed"
"""Begins the condition of a rate that nobody measured."""
GENERATIONS = {"A17 Pro": 3, "A19 Pro": 5}
"""Phones, as the M series of the same year."""


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
    """Chips with a rate of weights. A missing peak is that of the same generation, else
    of the latest one before it.

    Returns:
        chip, weights_gb_s (GB/s), tflops (of fp16 convolutions), assumed (names of the
        figures that nobody measured on this chip).
    """
    rows = _read_rates()
    rates = rows.pivot_table("rate", "chip", "quantity").sort_index()
    assumed = _assumed_figures(rows, rates)
    # alphabetical order is that of generations, the base chip first
    of_generation = rates.groupby(rates.index.str[:2]).transform("first").ffill()
    has_rate = rates["weights_gb_s"].notna()
    rates = rates.fillna(of_generation).assign(assumed=assumed)
    return rates[has_rate].reset_index()


def _read_rates() -> pd.DataFrame:
    """The published rates: a row for each measurement and chip, with quantity (a column of
    `chips`, null: another quantity), rate (the middle of its range) and is_assumed."""
    rows = published("chips.csv")
    rows = rows.assign(
        chip=rows["chip"].str.split(" and "),  # a row may be of several chips
        quantity=rows["quantity"].map(QUANTITIES),
        rate=rows[["low", "high"]].mean(axis="columns"),
        is_assumed=rows["condition"].str.startswith(ASSUMED),
    ).explode("chip")
    rows["chip"] = rows["chip"].replace("Ultra", "M1 Ultra")
    return rows


def _assumed_figures(rows: pd.DataFrame, rates: pd.DataFrame) -> pd.Series:
    """Chip → the names of the figures that nobody measured on it, separated by commas: a
    figure that is missing, or one of whose rows is assumed.

    Args:
        rows: of `_read_rates`.
        rates: chips × figures.
    """
    guesses = rows[rows["is_assumed"]].pivot_table("rate", "chip", "quantity")
    is_assumed = rates.isna() | guesses.reindex_like(rates).notna()
    return is_assumed.apply(lambda row: ", ".join(row.index[row]), axis="columns")


def generation(chip: str) -> int:
    """The generation of the M series that a chip belongs to."""
    check_choice("chip", chip, sorted(chips()["chip"]))
    return GENERATIONS.get(chip) or int(chip[1])
