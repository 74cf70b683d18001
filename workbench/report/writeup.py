"""Writes a report of a logged experiment: tables, figures, verdicts, and what was not
measured.

In: a notebook's run and its exhibits (rows of the log). Out: `report.md`, a LaTeX file
per table, and per figure SVG, PDF and PNG with a sidecar that names its runs. All
values come from the log.

A report goes to a folder named after its checkpoint, which git ignores. `publish` alone
changes the shipped reports."""

import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pandas as pd

from workbench import log, plots
from workbench.errors import InputError, check_choice
from workbench.log.machine import machine_names, with_machines
from workbench.sweep.runs import TIMES, varied


@dataclass(frozen=True)
class Experiment:
    """Number, name and question of an experiment; its notebook and its folder have its
    name."""

    number: str
    name: str
    question: str


_QUESTIONS = {
    "05_stateful_kv_cache": "Does one exported layer keep its cache as chapter 5 says it must, "
    "at T = 1 and at T > 1?",
    "29_zaya_probe": "What does a Q→O probe of ZAYA's attention leave unmeasured?",
    "30_zaya_stateful_attention": "Does ZAYA's stateful attention survive the export, judged by "
    "Hugging Face?",
    "31_error_parts": "How much of the error is storage, re-authoring, quantization, precision, "
    "device?",
    "32_fp16_overflow": "Why does Qwen 2.5 give NaN on one compute unit and not on another?",
    "33_cache_reuse": "Does a restored cache go on as the sequence did, and which hypothesis "
    "explains the empty output?",
    "34_decode_sweep": "How do tok/s and ms per layer depend on the export options, and which is "
    "the cheapest that passes?",
    "35_routed_experts": "What does routing experts on the host save?",
    "36_first_light": "What does Core ML do on a Mac that nobody could say before: where do states "
    "run, and what is a call's cost?",
    "37_other_exporters": "Do other exporters' packages compute the model?",
    "38_recurrent_state": "What does a state that does not grow lose, what does undoing cost, "
    "and where does it win?",
    "40_apple_interpreter": "Does Apple's own interpreter say what the portable runtime says?",
}
EXPERIMENTS = {
    name[:2]: Experiment(name[:2], name, text) for name, text in _QUESTIONS.items()
}


def experiment(number: str) -> Experiment:
    check_choice("experiment", number, EXPERIMENTS)
    return EXPERIMENTS[number]


FIGURE_SUBJECT = {
    "checkpoint": "{}",
    "compress": "{}",
    "max_seq_len": "max_seq_len {}",
    "machine": "{}",
}
RESERVED = {"", "figures", "tables", "report.md", "report.html"}
"""Names in the folder of a shipped report; a checkpoint's folder of such a name is prefixed."""


def folder(number: str, checkpoint: str | None, root: Path | str | None = None) -> Path:
    """The folder of a write-up: `experiments/NN_slug/CHECKPOINT` beside the log at
    `root`.

    Args:
        number: of an experiment, or the name of another one, which is its folder's.
        checkpoint: the run's checkpoints (see `subject`); None: the folder of the
            shipped report, `experiments/NN_slug` itself.
    """
    name = EXPERIMENTS[number].name if number in EXPERIMENTS else number
    shipped = log.whole(root).parent / name
    if checkpoint is None:
        return shipped
    name = re.sub(r"[/\\:]", "-", checkpoint).strip(" .")[:100]
    if name in RESERVED:
        name = f"run-{name}".strip("-")
    return shipped / name


def subject(runs: Iterable[Mapping]) -> str:
    """The checkpoints of rows of `runs`, joined by "+": those that a notebook's
    parameters name, else the logged ones."""
    names = []
    for run in runs:
        parameters = {}
        if isinstance(run["config"], str):
            parameters = json.loads(run["config"]).get("parameters", {})
        path = parameters.get("CHECKPOINT", run["checkpoint"])
        paths = parameters.get("CHECKPOINTS", path)
        if not isinstance(paths, list):
            paths = [paths]
        names += [Path(path).name for path in paths if isinstance(path, str)]
    return "+".join(dict.fromkeys(names)) or "run"


def exhibit(
    name: str,
    data: pd.DataFrame,
    caption: str,
    plot: str | None = None,
    options: Mapping | None = None,
    run_ids: Iterable[str] = (),
) -> dict:
    """A row of the log's `exhibits`: a figure's data, function and options (`plot`
    None: a table).

    `run_ids` are the runs of the data, beside those in a column ``run_id`` and the run
    that it is logged with."""
    flat = data.rename(columns=str)
    if data.columns.nlevels > 1:
        flat.columns = flat.columns.map(" ".join)
    if data.index.name or data.index.nlevels > 1:
        flat = flat.reset_index()
    run_ids = set(run_ids)
    if "run_id" in data:
        run_ids |= set(data["run_id"].dropna())
    content = log.plain(flat).to_dict("split", index=False)
    content["run_ids"] = sorted(run_ids)
    return {
        "name": name,
        "caption": caption,
        "plot": plot,
        "data": _json(content),
        "options": _json(options or {}),
    }


def _json(value: Mapping) -> str:
    def plain(item):
        if hasattr(item, "item"):
            return item.item()
        return list(item)

    return json.dumps(value, default=plain, ensure_ascii=False)


def data_of(row: Mapping) -> pd.DataFrame:
    """The data of a row of `exhibits`."""
    content = json.loads(row["data"])
    return pd.DataFrame(content["data"], columns=content["columns"])


def runs_of(row: Mapping) -> list[str]:
    """The runs of the data in a row of `exhibits`."""
    return [row["run_id"], *json.loads(row["data"])["run_ids"]]


def write_exhibit(
    row: Mapping, place: Path, number: str, runs: pd.DataFrame | None = None
) -> list[Path]:
    """Writes the files of one exhibit below `place`; equal rows give equal bytes. A
    figure's subtitle describes its rows of `runs`."""
    if row["plot"]:
        return _write_figure(row, place, runs)
    path = place / "tables" / f"{row['name']}.tex"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = data_of(row).to_latex(
        index=False,
        escape=True,
        na_rep="--",
        caption=re.sub(r"([&%$#_{}])", r"\\\1", row["caption"]),
        label=f"tab:{number}-{row['name']}",
        float_format="%.4g",
    )
    path.write_text(text)
    return [path]


def _write_figure(row: Mapping, place: Path, runs: pd.DataFrame | None) -> list[Path]:
    """Writes a figure as SVG, PDF and PNG with its sidecar."""
    data = data_of(row)
    draw = partial(getattr(plots, row["plot"]), data, **json.loads(row["options"]))
    facts = {"run_ids": runs_of(row), "alt": row["caption"], "about": ""}
    # other figures are of published values, or of computed sizes of another model
    if runs is not None and "chip" not in data and row["plot"] != "memory_bar":
        facts["about"] = figure_subject(runs[runs["run_id"].isin(facts["run_ids"])])
    return plots.save(draw, place / "figures" / row["name"], **facts)


def figure_subject(runs: pd.DataFrame) -> str:
    """The subtitle of a figure: the checkpoints, compressions, lengths and machines of
    rows of `runs`, and whether a run used the stand-in or has a simulated placement."""
    texts = []
    runs = with_machines(runs)
    for column, text in FIGURE_SUBJECT.items():
        values = sorted(runs[column].dropna().unique())
        if len(values) > 3:
            values = [values[0], "…", values[-1]]
        if values:
            texts.append(text.format(", ".join(map(str, values))))
    if (runs["runtime"] == "stand-in").any():
        texts.append("stand-in, not Core ML")
    if (runs["placement_source"] == "simulated").any():
        texts.append("simulated")
    return " · ".join(texts)


def write_report(
    number: str,
    root: Path | str | None = None,
    run: str | None = None,
    place: Path | None = None,
) -> Path:
    """Writes the report of an experiment with its figures and tables from the log at
    `root`.

    Args:
        run: id of the notebook's run to write up; default: the newest one.
        place: the folder to write to; default: that of the run's checkpoint (see
            `folder`).

    Returns:
        The path of `report.md`.
    """
    question = experiment(number).question
    runs, exhibits = behind(number, root, run)
    if runs.empty:
        raise InputError(
            f"experiment {number}",
            "no run in the log",
            "at least one run",
            f"run the notebook: workbench run {number}",
        )
    again = f"workbench report {number}"
    sources = runs
    config = {}
    notebook = _notebooks(runs).tail(1)
    if len(notebook):
        again += f" --run {notebook['run_id'].item()}"
        sources = notebook
        config = json.loads(notebook["config"].fillna("{}").item())
    place = place or folder(number, subject(sources.to_dict("records")), root)
    place.mkdir(parents=True, exist_ok=True)
    for row in exhibits:
        write_exhibit(row, place, number, runs)
    parameters = config.get("parameters", {})
    anew = f"workbench run {number}"
    for name, value in parameters.items():
        quoted = json.dumps(value).replace("'", "'\"'\"'")
        anew += f" --set '{name}={quoted}'"
    parts = [
        f"# Experiment {number}: {question}",
        config.get("conclusion", ""),
        _setup(runs, parameters),
        _results(exhibits, again),
        _verdicts(runs),
        _speed(runs, root),
        _unmeasured(runs),
        f"## Reproduce\n\nMeasure anew: `{anew}`. From the log alone: `{again}`.",
    ]
    path = place / "report.md"
    path.write_text("\n\n".join(filter(None, parts)) + "\n")
    return path


def publish(
    number: str, root: Path | str | None = None, run: str | None = None
) -> Path:
    """Makes the report of a notebook's run the shipped one, and copies its runs to the
    shipped log.

    Shipped runs of this experiment that no shipped report uses any more are removed
    from there; the log's own files stay. Arguments are as in `write_report`; returns
    the shipped `report.md`."""
    whole = log.whole(root)
    place = folder(number, None, root)
    shipped = whole / log.SHIPPED
    runs, exhibits = behind(number, root, run)
    notebook = _notebooks(runs).tail(1)
    if notebook.empty or not exhibits:
        raise InputError(
            f"experiment {number}",
            "no notebook's run with figures or tables in the log",
            "one to publish",
            f"run the notebook: workbench run {number} --publish",
        )
    needed = set(runs["run_id"]).union(*map(runs_of, exhibits))
    for run_id in needed:
        own = {}
        for table in log.SCHEMAS:
            name = f"{table}/{run_id}.parquet"
            if (whole / name).is_file():
                own[name] = (whole / name).read_bytes()
        if own:
            log.adopt(own, shipped)
    place.mkdir(parents=True, exist_ok=True)
    # the old report stays until the new one is complete
    with tempfile.TemporaryDirectory(dir=place) as fresh:
        report = write_report(number, shipped, notebook["run_id"].item(), Path(fresh))
        for part in ("figures", "tables"):
            shutil.rmtree(place / part, ignore_errors=True)
        for path in report.parent.iterdir():
            path.replace(place / path.name)
    _remove_unused(number, shipped, needed)
    return place / report.name


def _remove_unused(number: str, shipped: Path, needed: set[str]) -> None:
    """Removes the shipped runs of an experiment that no shipped report uses."""
    for other in EXPERIMENTS.keys() - {number}:
        needed = needed.union(*map(runs_of, behind(other, shipped)[1]))
    listed = log.load("runs", shipped, {"experiment": number})["run_id"]
    for run_id in set(listed) - needed:
        # `runs` first: listed runs are whole
        for table in sorted(log.SCHEMAS, key="runs".__ne__):
            (shipped / table / f"{run_id}.parquet").unlink(missing_ok=True)


def _notebooks(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs that a notebook's `conclude` logged."""
    return runs[runs["command"].fillna("").str.startswith("notebook")]


def behind(
    number: str, root: Path | str | None = None, run: str | None = None
) -> tuple[pd.DataFrame, list[dict]]:
    """The runs of a report and its exhibits: those of a notebook's run, then those
    saved from widgets with its checkpoint until the notebook ran on it again.

    Args:
        run: id of the notebook's run; default: the newest one. If the notebook never
            ran: all runs of the experiment and all saved exhibits.
    """
    runs = log.load("runs", root, {"experiment": number}).sort_values("run_id")
    notebooks = _notebooks(runs)
    if run is not None and run not in set(notebooks["run_id"]):
        raise InputError(
            f"run {run}",
            "no such run in the log",
            f"a run of notebook {number}",
            f"list them: workbench log --where \"command == 'notebook {number}'\"",
        )
    rows = runs[runs["command"].eq("explorer")]
    if len(notebooks):
        run = run or notebooks["run_id"].max()
        subjects = [subject([row]) for row in runs.to_dict("records")]
        about = pd.Series(subjects, runs["run_id"])
        same = runs[(about == about[run]).to_numpy()]
        later = [i for i in _notebooks(same)["run_id"] if i > run]
        end = min(later, default="~")  # "~" is later than any
        since = same["run_id"].between(run, end)
        rows = same[same["run_id"].eq(run) | since & same["command"].eq("explorer")]
    table = log.load("exhibits", root, {"run_id": rows["run_id"].tolist()})
    table = table.sort_values("run_id", kind="stable")
    kind = table.assign(plot=table["plot"].isna())
    table = table[~kind.duplicated(["name", "plot"], keep="last")]
    exhibits = log.plain(table).to_dict("records")
    if len(notebooks):
        used = set(rows["run_id"]).union(*map(runs_of, exhibits))
        runs = runs[runs["run_id"].isin(used)]
    return runs, exhibits


def _setup(runs: pd.DataFrame, parameters: dict) -> str:
    """The settings of the runs, and the notebook's parameters."""
    names = "checkpoint family compress max_seq_len t_max runtime precision platform machine"
    runs = with_machines(runs)
    values = {}
    for name in (*names.split(), "power_source"):
        texts = sorted(runs[name].dropna().astype(str).unique())
        values[name] = ", ".join(texts) or "not measured"
    for name, value in parameters.items():
        values[f"parameter {name}"] = str(value) or "(empty)"
    table = pd.DataFrame(values.items(), columns=["setting", "value"])
    return "## Setup\n\n" + table.to_markdown(index=False)


def _results(exhibits: list[dict], again: str) -> str:
    """Tables and figures in the order the notebook showed them."""
    if not exhibits:
        return ""
    parts = ["## Results"]
    for row in exhibits:
        name = row["name"]
        caption = row["caption"]
        rows = f"Log rows {', '.join(runs_of(row))}"
        if row["plot"]:
            parts.append(f"![{caption}](figures/{name}.svg)")
            parts.append(f"{caption} {rows}; drawn again by `{again}`.")
        else:
            parts.append(caption)
            parts.append(data_of(row).to_markdown(index=False, floatfmt=".4g"))
            latex = f"[`tables/{name}.tex`](tables/{name}.tex)"
            parts.append(f"LaTeX: {latex}. {rows}.")
    return "\n\n".join(parts)


def _latest(runs: pd.DataFrame) -> pd.DataFrame:
    """The newest run of each setting."""
    by = "checkpoint checkpoint_hash compress max_seq_len t_max T command bundle setting round"
    by = [*by.split(), *runs.columns.intersection(["machine", "software"])]
    return runs.groupby(by, dropna=False).tail(1)


def _verdicts(runs: pd.DataFrame) -> str:
    latest = _latest(runs[runs["verdict"].notna()])
    if latest.empty:
        return ""
    parts = ["## Verdicts"]
    title = (
        "**{verdict}** {checkpoint}, {compress}, max_seq_len {max_seq_len}, "
        "{layers_per_shard} layers per shard, {kv_write}, {layout} (log row {run_id})"
    )
    for run in latest.to_dict("records"):
        gates = pd.DataFrame(json.loads(run["config"]).get("gates", []))
        parts.append(title.format(**run))
        if len(gates) and (run["verdict"] == "RED" or len(latest) <= 4):
            table = gates[["verdict", "name", "value", "threshold", "reason"]]
            parts.append(table.to_markdown(index=False, floatfmt=".6g", missingval="–"))
    return "\n\n".join(parts)


def _speed(runs: pd.DataFrame, root) -> str:
    """A table of speeds per machine, since times of two are not compared; invalid runs
    are only listed."""
    measured = runs[runs["command"] == "sweep"]
    if measured.empty:
        return ""
    named = with_machines(measured[measured["status"] != "invalid"])
    parts = ["## Speed"]
    for name in machine_names(named):
        parts.append(_speed_of(named[named["machine"] == name], root))
    for reason, rows in measured[measured["status"] == "invalid"].groupby("reason"):
        parts.append(f"Invalid, {reason}: log rows {', '.join(rows['run_id'])}.")
    return "\n\n".join(parts)


def _speed_of(runs: pd.DataFrame, root) -> str:
    phases = ["tokens_per_s", "call"]
    where = {"run_id": _latest(runs)["run_id"].tolist(), "phase": phases}
    samples = log.load("samples", root, where)
    settings = ("checkpoint", "checkpoint_hash", *TIMES, "software")
    options = [name for name in settings if name not in samples]
    speeds = log.summary(samples).merge(runs[["run_id", *options]], on="run_id")
    doubts = speeds[["drifting", "unstable"]].astype(bool)
    speeds["doubtful"] = doubts.dot(doubts.columns + " ").str.strip()
    names = varied(speeds, options)
    figures = ["T", "depth", "phase", "unit", "median", "mad", "n", "doubtful"]
    table = speeds.sort_values(["phase", *names, "T"])[[*names, *figures, "run_id"]]
    return f"On {runs['machine'].iloc[0]}:\n\n{table.to_markdown(index=False, floatfmt='.4g')}"


def _unmeasured(runs: pd.DataFrame) -> str:
    missing = ""
    if not (runs["runtime"] == "coreml").any():
        missing += (
            "\n- No run on Core ML: device values, Neural Engine placement and its tok/s are "
            "*not measured*. Times above are the portable runtime's on the machine named above."
        )
    if not runs["placement"].notna().any():
        missing += "\n- Placement (ANE, GPU, CPU): *not measured*."
    return missing and f"## Not measured\n{missing}"
