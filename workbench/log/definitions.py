"""The version of what the columns of `fidelity` mean, and the selection of older rows
that still mean the same; the two verdicts of older runs.

The column `definition` of `fidelity` has the version of a row:

    null   of older rows. A chained update was the layer's output minus the golden's input,
           so that it counts the error of all earlier layers again.
    2      A chained update is the layer's output minus the input that the layer was given.
"""

import json

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

DEFINITION = 2
"""The version of rows that are written now."""

OLDER_QUALITY_CHECKS = ("max_kl", "answers")
"""The checks of quality whose RED made the one verdict of an older run RED. Checks that
came later, as `transcript` and `stop`, are in no such run."""

UNDECIDED = "export or limit"
"""The quality of an older RED run that does not say which of its gates was RED."""


def with_both_verdicts(runs: pa.Table) -> pa.Table:
    """Rows of `runs` in which those of before the column `quality` have both verdicts:
    the quality counts `OLDER_QUALITY_CHECKS`, and the verdict on the export all other
    gates that their `config` holds."""
    is_older = pc.and_(pc.is_null(runs["quality"]), pc.is_valid(runs["verdict"]))
    if not pc.any(is_older).as_py():
        return runs
    columns = {name: runs[name].to_pylist() for name in ("verdict", "quality")}
    configs = runs["config"]
    for row in pc.indices_nonzero(is_older).to_pylist():
        verdict = columns["verdict"][row]
        both = split_verdict(verdict, configs[row].as_py())
        columns["verdict"][row], columns["quality"][row] = both
    for name, values in columns.items():
        place = runs.schema.get_field_index(name)
        array = pa.array(values, runs.schema.field(name).type)
        runs = runs.set_column(place, runs.schema.field(name), array)
    return runs


def split_verdict(verdict: str, config: str | None) -> tuple[str, str]:
    """The export's verdict and the quality of an older run with one verdict, from the
    gates in its `config`."""
    gates = json.loads(config).get("gates", []) if config else []
    if not gates:
        return verdict, UNDECIDED if verdict == "RED" else "not_run"
    export = {
        gate["verdict"] for gate in gates if gate["name"] not in OLDER_QUALITY_CHECKS
    }
    checks = {gate["verdict"] for gate in gates if gate["name"] in OLDER_QUALITY_CHECKS}
    verdict = next((word for word in ("RED", "GREEN") if word in export), "not_run")
    if verdict == "RED":
        return verdict, "not_run"
    words = {"RED": "OVER", "GREEN": "WITHIN"}
    quality = next((words[word] for word in words if word in checks), "not_run")
    return verdict, quality


def select_current(rows: pd.DataFrame) -> tuple[pd.DataFrame, str | None]:
    """Rows of `fidelity` that mean what rows written now mean, and a sentence on the
    number of others (None without others). Those cannot be computed from the log."""
    version = rows["definition"].fillna(1)
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
