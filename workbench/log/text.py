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
    omitted = (
        f"{comparison.indistinguishable} measurements without a difference left out"
    )
    rows = comparison.measures
    if rows.empty:
        return [*settings, "", omitted]
    keys = []
    for c in MEASUREMENT:
        if c not in ("phase", "unit") and rows[c].nunique() > 1:
            keys.append(c)
    names = []
    for row in rows.to_dict("records"):
        values = []
        for key in keys:
            if pd.notna(row[key]):
                values.append(f"{key} {row[key]}")
        names.append(" ".join([row["phase"], *values]))
    names = pd.Series(names, rows.index)
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
    lines = [
        *settings,
        "",
        f"medians over runs: {counts['n_a']} of A, {counts['n_b']} of B",
    ]
    lines.append(table.to_string(index=False, float_format="%.4g", na_rep="–"))
    if notes.nunique() == 1 and notes.iloc[0]:
        lines.append(f"all of them: {notes.iloc[0]}")
    if alone:
        lines.append(textwrap.fill(f"on one side only: {alone}", 100))
    return [*lines, omitted]


def setting_lines(settings: pd.DataFrame) -> list[str]:
    """The settings in which two runs differ, side by side; `IDENTITIES` only if nothing
    else differs."""
    shown = settings[~settings["setting"].isin(IDENTITIES)]
    shown = (settings if shown.empty else shown).astype(str).map(shortened)
    if len(shown):
        return shown.to_string(index=False).splitlines()
    return ["no setting differs"]


def shortened(text: str, most: int = 34) -> str:
    """The text, cut to `most` characters with … at its end."""
    return text if len(text) <= most else f"{text[: most - 1]}…"
