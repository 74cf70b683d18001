"""Rows of the log in an order, and comparisons of two runs, as lines of text."""

import textwrap

import pandas as pd

from workbench.errors import InputError
from workbench.log.stats import MEASUREMENT, Comparison

IDENTITIES = ("setting", "bundle", "bundle_hash", "bundle_bytes")
"""Settings that say only that two runs are of two bundles, where the others say how these
differ."""


def sorted_rows(rows: pd.DataFrame, by: str | None) -> pd.DataFrame:
    """Rows in the order of a column, from the largest on where its name begins with "-"; what was
    not measured is last.

    Raises:
        InputError: no such column.
    """
    if by is None:
        return rows
    name = by.removeprefix("-")
    if name not in rows:
        raise InputError("--sort", repr(by), f"one of {', '.join(rows)}", "name one of these")
    return rows.sort_values(name, ascending=name == by, kind="stable", na_position="last")


def comparison_lines(comparison: Comparison) -> list[str]:
    """A comparison in lines of at most 100 columns: the settings that differ, without those that
    only identify a bundle or setting; each measurement by what tells it from the others; what holds
    for all of them once."""
    settings = setting_lines(comparison.settings)
    omitted = f"{comparison.indistinguishable} measurements without a difference left out"
    rows = comparison.measures
    if rows.empty:
        return [*settings, "", omitted]
    keys = [c for c in MEASUREMENT if c not in ("phase", "unit") and rows[c].nunique() > 1]
    names = pd.Series(
        [
            " ".join([row["phase"], *(f"{c} {row[c]}" for c in keys if pd.notna(row[c]))])
            for row in rows.to_dict("records")
        ],
        rows.index,
    )
    both = rows["median_a"].notna() & rows["median_b"].notna()
    alone = "; ".join(names[~both])
    notes = rows.loc[both, "note"].fillna("")
    table = pd.DataFrame({"measurement": names.map(shortened), "unit": rows["unit"]})
    table = table.join(rows[["median_a", "median_b", "ratio", "low", "high"]])[both]
    table = table.rename(columns={"median_a": "A", "median_b": "B", "ratio": "B/A"})
    table = table.dropna(axis="columns", how="all")
    if notes.nunique() > 1:
        table["note"] = notes
    counts = rows[["n_a", "n_b"]].max()
    return [
        *settings,
        "",
        f"medians over runs: {counts['n_a']} of A, {counts['n_b']} of B",
        table.to_string(index=False, float_format="%.4g", na_rep="–"),
        *([f"all of them: {notes.iloc[0]}"] if notes.nunique() == 1 and notes.iloc[0] else []),
        *([textwrap.fill(f"on one side only: {alone}", 100)] if alone else []),
        omitted,
    ]


def setting_lines(settings: pd.DataFrame) -> list[str]:
    """The settings in which two runs differ, side by side; those that only identify a bundle or a
    setting stand alone."""
    shown = settings[~settings["setting"].isin(IDENTITIES)]
    shown = (settings if shown.empty else shown).astype(str).map(shortened)
    return shown.to_string(index=False).splitlines() if len(shown) else ["no setting differs"]


def shortened(text: str, most: int = 34) -> str:
    """At most so many characters of a text, … where it is cut."""
    return text if len(text) <= most else f"{text[: most - 1]}…"
