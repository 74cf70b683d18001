"""The packed logs of Macs in `experiments/log/public`: their points for the fit, and the
page with every measurement beside its prediction."""

import json
import tempfile
from pathlib import Path

import pandas as pd
from predictor_scores import score_points

from workbench import log
from workbench.ane import features, roofline
from workbench.ane.chips import FIGURE_SOURCES, chips, published
from workbench.ane.roofline import ROUTE
from workbench.ane.work import Work

PUBLIC = Path(__file__).parents[1] / "experiments" / "log" / "public"
POINTS = FIGURE_SOURCES / "public_points.csv"
MIN_ANE_SHARE = 0.5  # of operations, for a run to count as one on the Neural Engine


def public_rows(folder: Path) -> pd.DataFrame:
    """A row for each setting of the runs on a Neural Engine in the packed logs of a
    folder, with the median of the processes' ms of a call; the columns of POINTS.

    Raises:
        InputError: a file that is no packed log.
    """
    columns = pd.read_csv(POINTS, nrows=0).columns
    lines = []
    for path in sorted(folder.glob("*.zip")):
        with tempfile.TemporaryDirectory() as root:
            log.unpack(path, Path(root))
            runs = log.load("runs", Path(root))
        runs = runs[(runs["runtime"] == "coreml") & (runs["status"] == "ok")]
        runs = runs[runs["compute_units"] == "CPU_AND_NE"].dropna(subset=["call_ms"])
        groups = runs.groupby(["machine", "software", "setting"], dropna=False)
        for number, (_, rows) in enumerate(groups, 1):
            lines.append(public_row(f"{path.stem}-{number}", path.stem, rows))
    return pd.DataFrame(lines, columns=columns)


def public_row(id: str, source: str, runs: pd.DataFrame) -> dict:
    """The point of the runs of one setting on one machine."""
    run = runs.iloc[0]
    published_chip = run["machine"].split(",")[0]
    chip = published_chip.removeprefix("Apple ")
    row = {
        "id": id,
        "source": source,
        "author": source,
        "model": run["checkpoint"],
        "precision": run["compress"],
        "chip_as_published": published_chip,
        "chip": chip,
        "route": ROUTE,
        "unit": "ANE, Core ML CPU_AND_NE",
        "context": run["max_seq_len"],
        "T": int(run["T"]),
        "ms": round(float(runs["call_ms"].median()), 4),
        "repeats": False,
        "note": f"{len(runs)} processes; {run['software']}",
    }
    share = run["ane_ops_share"]
    work = json.loads(run["config"] or "{}").get("work")
    if pd.isna(share) or share < MIN_ANE_SHARE:
        return row | {
            "use": "no",
            "why": "most operations are not on the Neural Engine",
        }
    if work is None:
        return row | {"use": "no", "why": "logged by a version that notes no features"}
    if chip not in set(chips()["chip"]):
        return row | {"use": "no", "why": f"no rate of an {chip}"}
    point = features.on_chip(Work.from_json(work), chip).point()
    row |= {name: value for name, value in point.items() if name != "T"}
    if row["T"] > 1:
        return row | {"use": "check", "why": f"T = {row['T']}"}
    return row | {"use": "fit", "why": None}


def format_page() -> str:
    """The page of every measurement beside its prediction, as Markdown."""
    rows = features.points()
    rows = rows[rows["use"] != "no"].reset_index(drop=True)
    predictions = score_points(rows)["rows"]
    # id → predicted by a fit without the rows of the same author
    left_out_ms = roofline.calibration().rows.set_index("id")["author_ms"]
    published_ids = set(published("ane_points.csv")["id"])
    others, macs = [], []
    for row, prediction in zip(rows.to_dict("records"), predictions):
        first_cells = [row["id"], row["model"], row["format"], row["chip"]]
        last_cells = [
            f"{row['T']:.0f}",
            f"{row['ms']:.3g}",
            f"{prediction['predicted_ms']:.3g}",
            f"{prediction['low_ms']:.3g} to {prediction['high_ms']:.3g}",
            format_ms(left_out_ms.get(row["id"])),
        ]
        if row["id"] in published_ids:
            others.append([*first_cells, row["route"], *last_cells])
        else:
            macs.append([*first_cells, *last_cells])
    first_names = ["id", "model", "weights", "chip"]
    last_names = ["T", "measured ms", "predicted ms"]
    last_names += ["90% interval", "without its author"]
    empty = [[""] * (len(first_names) + len(last_names))]
    return PAGE.format(
        macs=markdown([*first_names, *last_names], macs or empty),
        others=markdown([*first_names, "route", *last_names], others),
    )


def format_ms(ms: float | None) -> str:
    """Three digits; nothing for a missing time."""
    return "" if ms is None or pd.isna(ms) else f"{ms:.3g}"


def markdown(names: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


PAGE = """# Measurements on Neural Engines beside their predictions

Written by `python tools/predictor.py public`. A prediction is that of
`workbench/ane/roofline.py`; the last column has the one of a fit without the rows of
the same author.

## Measured with this workbench

On a Mac, `workbench sweep first-light` or any grid measures exports, and
`workbench log pack FILE.zip` writes the log as one file without names of user, host and
paths. Put the file into this folder, run the script and open a pull request with the
file, this page and `data/sources/public_points.csv`. Nobody has sent one so far if the
table is empty.

{macs}

## Published by others

{others}
"""


def write_public(folder: Path, points: Path) -> None:
    """Writes the points of the packed logs in a folder, and the folder's page."""
    rows = public_rows(folder)
    rows.to_csv(points, index=False)
    published.cache_clear()
    features.points.cache_clear()
    roofline.calibration.cache_clear()
    (folder / "README.md").write_text(format_page(), encoding="utf-8")
    print(f"{len(rows)} measurements in {len(list(folder.glob('*.zip')))} packed logs")
