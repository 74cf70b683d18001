"""The version of what the columns of `fidelity` mean, and the selection of older rows
that still mean the same.

The column `definition` of `fidelity` has the version of a row:

    1   Older rows, in which the column is null. A chained update was the layer's output
        minus the golden's input, so that it counts the error of all earlier layers again.
    2   A chained update is the layer's output minus the input that the layer was given.
"""

import pandas as pd

DEFINITION = 2
"""The version of rows that are written now."""


def select_current(rows: pd.DataFrame) -> tuple[pd.DataFrame, str | None]:
    """Selects the rows of `fidelity` that mean what rows written now mean.

    Rows of another definition are left out, because their present value cannot be computed
    from the log.

    Returns:
        The selected rows, and a sentence on the number of rows that were left out (None
        where there are none).
    """
    version = rows["definition"].fillna(1)  # older rows have no version
    is_chained_update = rows["tensor"].eq("update") & rows["mode"].eq("chained")
    has_other_definition = (version < 2) & is_chained_update | (version > DEFINITION)
    if not has_other_definition.any():
        return rows, None
    runs = rows.loc[has_other_definition, "run_id"].nunique()
    sentence = (
        f"{has_other_definition.sum()} rows of {runs} runs were left out: chained "
        "updates of another definition. Measure them again: validate the bundles with this version"
    )
    return rows[~has_other_definition].reset_index(drop=True), sentence
