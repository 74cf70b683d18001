"""Sorted rows of the log, and comparisons of two runs as lines of text."""

import textwrap

import pandas as pd

from workbench.errors import InputError
from workbench.log.stats import MEASUREMENT, Comparison

IDENTITIES = ("setting", "bundle", "bundle_hash", "bundle_bytes")
"""Settings that identify a bundle or setting and do not describe it."""


def sorted_rows(rows: pd.DataFrame, by: str | None) -> pd.DataFrame:
    """Rows sorted by a column, descending if `by` begins with "-"; nulls come last.

    Raises:
        InputError: no such column.
    """
    if by is None:
        return rows
    name = by.removeprefix("-")
    if name not in rows:
        raise InputError(
            "--sort", repr(by), f"one of {', '.join(rows)}", "name one of these"
        )
    return rows.sort_values(
        name, ascending=name == by, kind="stable", na_position="last"
    )


def comparison_lines(comparison: Comparison) -> list[str]:
    """A comparison in lines of at most 100 columns.

    The lines are the settings that differ, then each measurement, named by the columns
    in which measurements differ; a note that holds for all of them is printed once."""
    settings = setting_lines(comparison.settings)
    count = comparison.indistinguishable
    omitted = f"{count} measurements without a difference left out"
    rows = comparison.measures
    if rows.empty:
        return [*settings, "", omitted]
    names = rows["phase"]
    for key in MEASUREMENT:
        if key not in ("phase", "unit") and rows[key].nunique() > 1:
            words = rows[key].astype(object).map(f" {key} {{}}".format, "ignore")
            names = names + words.fillna("")
    both = rows["median_a"].notna() & rows["median_b"].notna()
    alone = "; ".join(names[~both])
    notes = rows.loc[both, "note"].fillna("")
    table = pd.DataFrame({"measurement": names.map(shortened), "unit": rows["unit"]})
    table = table.join(rows[["median_a", "median_b", "ratio", "low", "high"]])[both]
    table = table.rename(columns={"median_a": "A", "median_b": "B", "ratio": "B/A"})
    table = table.dropna(axis="columns", how="all")
    if notes.nunique() > 1:
        table["note"] = notes
    n_a, n_b = rows[["n_a", "n_b"]].max()
    lines = [*settings, "", f"medians over runs: {n_a} of A, {n_b} of B"]
    lines.append(table.to_string(index=False, float_format="%.4g", na_rep="–"))
    if notes.nunique() == 1 and notes.iloc[0]:
        lines.append(f"all of them: {notes.iloc[0]}")
    if alone:
        lines.append(textwrap.fill(f"on one side only: {alone}", 100))
    return [*lines, omitted]


def setting_lines(settings: pd.DataFrame) -> list[str]:
    """The settings in which two runs differ, side by side; `IDENTITIES` only if nothing
    else differs."""
    if settings.empty:
        return ["no setting differs"]
    shown = settings[~settings["setting"].isin(IDENTITIES)]
    if shown.empty:
        shown = settings
    return shown.map(str).map(shortened).to_string(index=False).splitlines()


def shortened(text: str, most: int = 34) -> str:
    """The text, cut to `most` characters with … at its end."""
    if len(text) <= most:
        return text
    return f"{text[: most - 1]}…"
