"""The version of what the columns of `fidelity` mean, and which older rows still mean
the same.

Null: before versions were written. A chained update was what a layer adds to the golden's
input, which counts the error of all earlier layers again.
2: it is what the layer adds to the input that it was given.
"""

import pandas as pd

DEFINITION = 2
"""Of rows that are written now."""


def select_current(rows: pd.DataFrame) -> tuple[pd.DataFrame, str | None]:
    """Rows of `fidelity` that mean what rows written now mean, and a sentence that says
    how many others were left out; they cannot be computed again from the log."""
    older = rows["definition"].fillna(1) < 2
    changed = older & rows["tensor"].eq("update") & rows["mode"].eq("chained")
    newer = rows["definition"].fillna(1) > DEFINITION
    refused = changed | newer
    if not refused.any():
        return rows, None
    runs = rows.loc[refused, "run_id"].nunique()
    words = (
        f"{refused.sum()} rows of {runs} runs were left out: chained updates of another "
        "definition. Measure them again: validate the bundles with this version"
    )
    return rows[~refused].reset_index(drop=True), words
