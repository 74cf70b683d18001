"""The two verdicts of rows of `runs` that were written before the column `quality`.

Such a row has one verdict, which any RED gate made RED. Now `verdict` is on the export
and `quality` on its cost. Both are computed from the gates in the row's `config`."""

import json

import pyarrow as pa
import pyarrow.compute as pc

OLDER_QUALITY_CHECKS = ("max_kl", "answers")
"""The checks of quality whose RED made the one verdict of an older run RED. Checks that
came later, as `transcript` and `stop`, are in no such run."""

UNDECIDED = "export or limit"
"""The quality of an older RED run that does not say which of its gates was RED."""


def with_both_verdicts(runs: pa.Table) -> pa.Table:
    """Fills in the two verdicts of rows written before the column `quality`; other rows
    stay as they are."""
    is_older = pc.and_(pc.is_null(runs["quality"]), pc.is_valid(runs["verdict"]))
    if not pc.any(is_older).as_py():
        return runs
    verdicts, qualities = runs["verdict"].to_pylist(), runs["quality"].to_pylist()
    configs = runs["config"]
    for row in pc.indices_nonzero(is_older).to_pylist():
        both = split_verdict(verdicts[row], configs[row].as_py())
        verdicts[row], qualities[row] = both
    for name, values in (("verdict", verdicts), ("quality", qualities)):
        place = runs.schema.get_field_index(name)
        array = pa.array(values, runs.schema.field(name).type)
        runs = runs.set_column(place, runs.schema.field(name), array)
    return runs


def split_verdict(verdict: str, config: str | None) -> tuple[str, str]:
    """The export's verdict and the quality of an older run with one verdict, from the
    gates in its `config`: the quality counts `OLDER_QUALITY_CHECKS`, the verdict on the
    export all other gates. An export that is RED is not judged by its quality."""
    gates = json.loads(config).get("gates", []) if config else []
    if not gates:
        return verdict, UNDECIDED if verdict == "RED" else "not_run"
    of_export, of_quality = set(), set()
    for gate in gates:
        is_check = gate["name"] in OLDER_QUALITY_CHECKS
        (of_quality if is_check else of_export).add(gate["verdict"])
    if "RED" in of_export:
        return "RED", "not_run"
    export = "GREEN" if "GREEN" in of_export else "not_run"
    if "RED" in of_quality:
        return export, "OVER"
    return export, "WITHIN" if "GREEN" in of_quality else "not_run"
