"""The version of what the columns of `fidelity` mean, and the selection of older rows
that still mean the same.

Null: rows older than this column. A chained update was the layer's output less the
golden's input, which counts the error of all earlier layers again.
2: a chained update is the layer's output less the input that the layer was given.
"""

import pandas as pd

DEFINITION = 2
"""The version of rows that are written now."""


def select_current(rows: pd.DataFrame) -> tuple[pd.DataFrame, str | None]:
    """Rows of `fidelity` that mean what rows written now mean, and a sentence on the
    number of others (None without others). Those cannot be computed from the log."""
    version = rows["definition"].fillna(1)
    is_chained_update = rows["tensor"].eq("update") & rows["mode"].eq("chained")
    is_other = (version < 2) & is_chained_update | (version > DEFINITION)
    if not is_other.any():
        return rows, None
    runs = rows.loc[is_other, "run_id"].nunique()
    sentence = (
        f"{is_other.sum()} rows of {runs} runs were left out: chained updates of another "
        "definition. Measure them again: validate the bundles with this version"
    )
    return rows[~is_other].reset_index(drop=True), sentence
