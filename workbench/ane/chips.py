"""Published figures of Neural Engines: the tables of `data/sources`, and the rates of each
chip."""

import csv
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.errors import InputError, check_choice

if TYPE_CHECKING:
    import pandas as pd

FIGURE_SOURCES = Path(__file__).parents[2] / "data" / "sources"
WEIGHT_STREAM = "weight stream through Core ML"
# quantity in `chips.csv` → its column in `chips`
QUANTITIES = {WEIGHT_STREAM: "weights_gb_s", "fp16 convolution": "tflops"}
ASSUMED = "assumed"
"""Begins the condition of a rate that nobody measured."""
PHONE_GENERATIONS = {"A17 Pro": 3, "A19 Pro": 5}
"""Phone → the generation of the M series of the same year."""


@cache
def published(name: str) -> "pd.DataFrame":
    """A table of published figures; empty fields are empty texts."""
    import pandas as pd

    return pd.read_csv(_source_file(name), keep_default_na=False)


def _source_file(name: str) -> Path:
    """The file of a table of published figures.

    Raises:
        InputError: it is not there.
    """
    path = FIGURE_SOURCES / name
    if not path.is_file():
        needed = "the published figures in data/sources"
        raise InputError("plan", f"no {path}", needed, "run from a checkout")
    return path


@cache
def chips() -> "pd.DataFrame":
    """Chips with a rate of weights, in the order of `chip_order`. A missing peak is that
    of the same generation, else of the latest one before it.

    Returns:
        chip, weights_gb_s (GB/s), tflops (of fp16 convolutions), assumed (names of the
        figures that nobody measured on this chip).
    """
    rows = _read_rates()
    rates = rows.pivot_table("rate", "chip", "quantity")
    rates = rates.loc[sorted(rates.index, key=chip_order)]
    assumed = _assumed_figures(rows, rates)
    # the first figure of a generation (M4 Max: M4), or of the one before where it has none
    by_generation = rates.groupby(lambda chip: chip.split()[0])
    of_generation = by_generation.transform("first").ffill()
    has_rate = rates["weights_gb_s"].notna()
    rates = rates.fillna(of_generation).assign(assumed=assumed)
    return rates[has_rate].reset_index()


def _read_rates() -> "pd.DataFrame":
    """The published rates: a row for each measurement and chip, with quantity (a column of
    `chips`, null: another quantity), rate (the middle of its range) and is_assumed."""
    rows = published("chips.csv")
    rows = rows.assign(
        chip=rows["chip"].str.split(" and "),  # a row may be of several chips
        quantity=rows["quantity"].map(QUANTITIES),
        rate=rows[["low", "high"]].mean(axis="columns"),
        is_assumed=rows["condition"].str.startswith(ASSUMED),
    )
    return rows.explode("chip")


def _assumed_figures(rows: "pd.DataFrame", rates: "pd.DataFrame") -> "pd.Series":
    """Chip → the names of the figures that nobody measured on it, separated by commas: a
    figure that is missing, or one of whose rows is assumed.

    Args:
        rows: of `_read_rates`.
        rates: chips × figures.
    """
    guesses = rows[rows["is_assumed"]].pivot_table("rate", "chip", "quantity")
    is_assumed = rates.isna() | guesses.reindex_like(rates).notna()
    return is_assumed.apply(lambda row: ", ".join(row.index[row]), axis="columns")


def chip_order(chip: str) -> tuple[str, int, str]:
    """The series of a chip, its number there, and its name. Chips in this order are phones
    first, then the M series by generation, the base chip of each first.

    Example: "M4 Max" → ("M", 4, "M4 Max")."""
    series, number = re.match(r"([AM])(\d+)", chip).groups()
    return series, int(number), chip


def check_chip(chip: str) -> None:
    """Raises an InputError unless a chip has a published rate."""
    check_choice("chip", chip, sorted(_chip_names()))


def _chip_names() -> set[str]:
    """The chips of `chips`. They are read without pandas, whose import would take most of
    the time until a wrong name is refused."""
    with _source_file("chips.csv").open(encoding="utf-8", newline="") as file:
        rows = [*csv.DictReader(file)]
    streams = [row["chip"] for row in rows if row["quantity"] == WEIGHT_STREAM]
    return {chip for names in streams for chip in names.split(" and ")}


def generation(chip: str) -> int:
    """The generation of the M series that a chip belongs to.

    Raises:
        InputError: a chip without a published rate.
    """
    check_chip(chip)
    return PHONE_GENERATIONS.get(chip) or chip_order(chip)[1]
