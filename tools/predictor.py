"""How wrong the predicted times of the Neural Engine are, and predictions for any table.

    python tools/predictor.py errors [--json]
    python tools/predictor.py score POINTS.csv [--json]
    python tools/predictor.py public

Files, each with the functions of its tables:

- `predictor_scores.py`: predictions of any table, by route (`score`)
- `predictor_earlier.py`, `predictor_errors.py`, `predictor_speculation.py`: `errors`
- `predictor_public.py`: `public`

`errors` predicts every public measurement (`data/sources/ane_points.csv`) without the
rows of its source, author or chip, by the formula of `workbench/ane/formula.py`, by
the formula with each term taken away, and by the predictor that it replaced; then come
orders, planted faults and speculation. `score` predicts a table with the same columns,
whose `ms` may be empty. `public` reads the packed logs of Macs in
`experiments/log/public`, writes their runs to `data/sources/public_points.csv`, which
the fit reads, too, and the page with every measurement beside its prediction. The exit
code is 2 for a table or a log that cannot be read."""

import json as json_module
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from cyclopts import App
from predictor_errors import (
    compare_orders,
    constants_table,
    double_each_source,
    left_out_errors,
    measure_coverage,
    predict_check_rows,
    predict_other_routes,
    rows_beyond_interval,
)
from predictor_public import POINTS, PUBLIC, write_public
from predictor_scores import read_points, score_points
from predictor_speculation import speculations

from workbench.ane import roofline
from workbench.errors import InputError

app = App(help="How wrong the predicted times are, and predictions for any table.")


@app.command
def errors(*, json: bool = False) -> None:
    """Prints every table."""
    calibration = roofline.calibration()
    rows = calibration.rows
    doubled_sources = double_each_source(rows)
    tables = {
        "constants": constants_table(rows),
        "left-out errors": left_out_errors(rows),
        "intervals": measure_coverage(rows),
        "beyond the interval": rows_beyond_interval(calibration),
        "checks, never fitted": predict_check_rows(),
        "other routes": predict_other_routes(),
        "orders": compare_orders(),
        "doubled times": doubled_sources,
        "speculation": speculations(),
    }
    counts = {
        "rows": len(rows),
        "authors": rows["author"].nunique(),
        "sources": rows["source"].nunique(),
        "models": rows["model"].nunique(),
        "chips": rows["chip"].nunique(),
        "doubled_named": int(doubled_sources["named"].sum()),
        "doubled_beyond": int(doubled_sources["beyond"].sum()),
        "factor": calibration.factor,
        "widths": {
            kind: float(np.exp(w)) for kind, w in calibration.extra_log_widths.items()
        },
    }
    if json:
        records = {name: table.to_dict("records") for name, table in tables.items()}
        print(json_module.dumps(without_nan(counts | records), allow_nan=False))
        return
    print(json_module.dumps(counts))
    for name, table in tables.items():
        print(f"\n## {name}")
        print(table.to_string(index=False, float_format="{:.3g}".format, na_rep="-"))


@app.command
def score(points: Path, *, json: bool = False) -> None:
    """Predicts the rows of a table.

    Args:
        points: A CSV file with the columns of data/sources/ane_points.csv.
    """
    scores = score_points(read_points(points))
    if json:
        print(json_module.dumps(without_nan(scores), allow_nan=False))
        return
    table = pd.DataFrame(scores.pop("rows"))
    table["extrapolates"] = table["extrapolates"].map(
        lambda reasons: "; ".join(reasons)
    )
    print(table.to_string(index=False, float_format="{:.4g}".format, na_rep="-"))
    print(json_module.dumps(without_nan(scores)))


@app.command
def public() -> None:
    """Reads the packed logs of Macs, and writes their points and the page."""
    write_public(PUBLIC, POINTS)


def without_nan(value):
    """A value without NaN, infinities and NumPy's types, which JSON lacks."""
    if isinstance(value, dict):
        return {str(key): without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_nan(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value


def main() -> None:
    try:
        app()
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
