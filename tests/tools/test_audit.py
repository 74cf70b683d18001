"""The audit finds every planted fault, and nothing in a report whose numbers are right."""

import json
import re
import shutil
import sys

import audit
import audit_times
import numpy as np
import pandas as pd
import pytest
from tiny import ROOT

from workbench import log
from workbench.sweep import conclude

pytestmark = pytest.mark.wide
NAME = "34_made_up"


def logged(root, number: int, S: int, ms: float, rng) -> str:
    """One process: five sequences of four calls after one that compiles."""
    run_id, rows = f"{number:03}-x", []
    for repetition in range(5):
        columns = {"repetition": repetition, "T": 1, "warmup": False, "unit": "ms"}
        rows.append(columns | {"phase": "call", "value": 900.0, "warmup": True})
        calls = ms * (1 + 0.05 * rng.standard_normal(4)) * [1, 1, 1, 1.5]
        rows += [columns | {"phase": "call", "value": value} for value in calls]
        rate = {"phase": "tokens_per_s", "value": 4e3 / calls.sum(), "unit": "tok/s"}
        rows.append(columns | rate)
    log.append("samples", rows, root, run_id)
    budget, error = 0.01, 0.02
    ratio = error / np.hypot(budget, 2.0**-11)
    row = {"tensor": "update", "mode": "chained", "layer": 0, "position": 0, "T": 1}
    row |= {"error": error, "budget": budget, "ratio": ratio, "definition": 2}
    log.append("fidelity", row, root, run_id)
    log.append("runs", {"status": "ok", "batch": 1, "max_seq_len": S}, root, run_id)
    return run_id


@pytest.fixture
def project(tmp_path):
    """A project with one report of times, as notebook 34 writes it."""
    folder, root = tmp_path / "experiments" / NAME, tmp_path / "experiments/log/shipped"
    rng, settings = np.random.default_rng(0), []
    for number in range(6):
        S = (128, 1024)[number % 2]
        settings.append((logged(root, number, S, 4.0 if S == 128 else 5.0, rng), S))
    runs = dict(settings)
    values = log.by_process(log.load("samples", root))
    values = values[values["phase"] == "tokens_per_s"]
    values = values.assign(max_seq_len=values["run_id"].map(runs), T=1, disturbed=None)
    (folder / "figures").mkdir(parents=True)
    (folder / "tables").mkdir()
    part = {"kind": "figures", "options": {"ylabel": "tokens per second"}}
    (folder / "figures/speed.json").write_text(json.dumps(part))
    values.to_parquet(folder / "figures/speed.parquet")
    statement = conclude.describe_axis({"tokens per second": values}, "max_seq_len")
    (folder / "run.json").write_text(json.dumps({"conclusion": statement.text}))
    rows = [
        {
            "name": f"max_seq_len {S}",
            "tokens_per_s": part["value"].median(),
            "slowest": part["value"].min(),
            "fastest": part["value"].max(),
            "run_ids": part["run_id"].tolist(),
        }
        for S, part in values.groupby("max_seq_len")
    ]
    write_table(folder, pd.DataFrame(rows))
    return tmp_path


def write_table(folder, table: pd.DataFrame) -> None:
    (folder / "tables/configurations.json").write_text('{"kind": "tables"}')
    table.to_parquet(folder / "tables/configurations.parquet")
    printed = table.drop(columns="run_ids")
    text = printed.to_markdown(index=False, floatfmt=".4g")
    (folder / "report.md").write_text(f"# Experiment\n\n{text}\n")


def change_run(project, old: str, new: str) -> None:
    path = project / "experiments" / NAME / "run.json"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def change(project, name: str, edit) -> None:
    """Rewrites one Parquet file of the project by `edit`."""
    (path,) = list((project / "experiments").glob(name))
    edit(frame := pd.read_parquet(path))
    frame.to_parquet(path)


def test_right_numbers_give_no_findings(project):
    assert audit.audit(project) == []


def test_a_table_that_the_report_leaves_out_is_not_looked_for_there(project):
    folder = project / "experiments" / NAME
    pd.DataFrame({"raw": [1.5]}).to_parquet(folder / "tables/raw.parquet")
    description = folder / "tables/raw.json"
    description.write_text('{"kind": "tables", "in_report": false}')
    assert audit.audit(project) == []
    description.write_text('{"kind": "tables"}')
    (finding,) = audit.audit(project)
    assert "tables/raw" in str(finding) and "no such columns" in str(finding)


def pool(project) -> None:
    """The median of all repetitions of a setting's processes in place of the median over
    processes."""
    root = project / "experiments/log/shipped"
    samples, folder = log.load("samples", root), project / "experiments" / NAME
    table = pd.read_parquet(folder / "tables/configurations.parquet")
    for place, ids in enumerate(table["run_ids"]):
        rates = samples[
            samples["run_id"].isin(ids) & samples["phase"].eq("tokens_per_s")
        ]
        table.loc[place, "tokens_per_s"] = rates["value"].median()
    write_table(folder, table)


def swap_ratio_of_the_answer(project) -> None:
    text = json.loads((project / f"experiments/{NAME}/run.json").read_text())[
        "conclusion"
    ]
    (ratio,) = [match["ratio"] for match in audit_times.RATIO.finditer(text)]
    change_run(project, f"{ratio} times", f"{1 / float(ratio):.3g} times")


def swap_ratio_of_the_log(project) -> None:
    def swap(frame):
        frame["ratio"] = 1 / frame["ratio"]

    change(project, "log/shipped/fidelity/000-x.parquet", swap)


def name_seconds(project) -> None:
    def rename(frame):
        frame["unit"] = frame["unit"].replace("ms", "s")

    change(project, "log/shipped/samples/003-x.parquet", rename)


def draw_seconds(project) -> None:
    def divide(frame):
        frame["value"] /= 1e3

    change(project, f"{NAME}/figures/speed.parquet", divide)


def age(project) -> None:
    def forget(frame):
        frame["definition"] = 1

    change(project, "log/shipped/fidelity/002-x.parquet", forget)


def mislabel(project) -> None:
    path = project / "experiments" / NAME / "figures/speed.json"
    path.write_text(path.read_text().replace("tokens per second", "ms of a call"))


def reverse(project) -> None:
    change_run(project, "has fewer than", "has more than")


def misprint(project) -> None:
    path = project / "experiments" / NAME / "report.md"
    text = path.read_text()
    path.write_text(text.replace("tokens_per_s", "call_ms", 1))


def reword(project) -> None:
    """Another report, with a sentence that no claim knows."""
    folder = project / "experiments" / "35_least_bytes"
    folder.mkdir()
    words = {"conclusion": "The mean KL fell to 0.0123 nats."}
    (folder / "run.json").write_text(json.dumps(words))
    (folder / "report.md").write_text("# Experiment\n")


@pytest.mark.parametrize(
    ("plant", "place"),
    [
        (reword, "35_least_bytes/Answer: measured number: 0.0123"),
        (pool, "tables/configurations: tokens_per_s of"),
        (swap_ratio_of_the_answer, "Answer: 1024 over 128"),
        (reverse, "Answer: 1024 over 128"),
        (swap_ratio_of_the_log, "log/fidelity/000-x: error over its budget"),
        (name_seconds, "log/samples: unit of call: s; computed ms"),
        (draw_seconds, "figures/speed: run"),
        (age, "log/fidelity: chained updates, 1 rows of 1 runs"),
        (mislabel, "figures/speed: label of the axis"),
        (misprint, "tables/configurations: table of the report"),
    ],
)
def test_a_planted_fault_is_found(project, plant, place):
    plant(project)
    findings = [str(finding) for finding in audit.audit(project)]
    assert any(place in text for text in findings), findings


def named_processes(rates: dict[str, tuple]) -> pd.DataFrame:
    """The processes of settings, one of each in every round."""
    rows = [
        {"name": name, "run_id": f"{number}{place}", "value": value, "disturbed": None}
        for place, (name, values) in enumerate(rates.items())
        for number, value in enumerate(values)
    ]
    return pd.DataFrame(rows)


CLOSE = {
    "compress int8, layers 4, T 1": (31.2, 30.7, 28.9),
    "compress fp16, layers 4, T 1": (30.6, 29.0, 27.9),
    "compress fp16, layers 1, T 1": (31.3, 27.7, 27.5),
}
FAR = {
    "compress int8, layers 4, T 1": (31.2, 30.7, 30.9),
    "compress fp16, layers 4, T 1": (20.6, 20.0, 20.1),
}


def fastest_of(processes: pd.DataFrame) -> conclude.Statement:
    costs = pd.DataFrame({"name": processes["name"].unique(), "bundle_bytes": 2**20})
    return conclude.describe_fastest(processes, costs.assign(kl_mean=0.01))


@pytest.mark.parametrize(("rates", "count"), [(CLOSE, 3), (FAR, 2)])
def test_every_median_of_the_fastest_and_of_those_named_beside_it_is_computed(
    rates, count
):
    processes = named_processes(rates)
    words = "Other work disturbed 1 process.\n"
    words += f"{conclude.describe_most(processes)}\n{fastest_of(processes).text}"

    def find(text: str) -> list:
        return audit_times.check_fastest("Answer", text, processes)

    assert find(words) == []
    medians = list(re.finditer(r"(?<= )\(?(\d\d\.\d)(?=\)| tok/s)", words))
    assert len(medians) == count
    for match in medians:
        start, end = match.span(1)
        (finding,) = find(f"{words[:start]}33.3{words[end:]}")
        assert finding.actual == "33.3"
    unknown = words.replace("compress fp16", "compress lut4")
    assert {finding.needed for finding in find(unknown)} == {"no setting"}


def test_the_interval_of_an_undecided_order_is_computed():
    rates = {"compress int8, T 1": (29.2, 28.1, 28.2)}
    rates["compress fp16, T 1"] = (21.8, 26.3, 25.7)
    processes = named_processes(rates)
    text = fastest_of(processes).text
    (match,) = audit_times.INTERVAL.finditer(text)

    def find(text: str) -> list:
        return audit_times.check_intervals("Answer", text, {}, processes)

    assert find(text) == []
    for end in match.groups():
        (finding,) = find(text.replace(end, "0.5"))
        assert "0.5" in finding.actual


def test_every_number_of_the_ratio_of_both_paths_is_computed():
    rng, rows = np.random.default_rng(0), []
    for number in range(3):
        for place, (path, mean) in enumerate(
            {"all rows": 6.0, "some rows": 4.0}.items()
        ):
            ms = mean * (1 + 0.01 * rng.standard_normal())
            rows.append((f"{number}{place}", path, 1024, 1, ms, None))
    columns = ["run_id", "rows", "max_seq_len", "T", "value", "disturbed"]
    calls = pd.DataFrame(rows, columns=columns)
    text = conclude.describe_paths(calls, "rows", "max_seq_len").text
    (match,) = audit_times.RATIO_OF_PATHS.finditer(text)
    assert audit_times.check_paths("Answer", text, calls) == []
    for name in ("ratio", "low", "high", "length"):
        start, end = match.span(name)
        wrong = (
            f"{text[:start]}7.5{text[end:]}"
            if name != "length"
            else text[:start] + "64"
        )
        (finding,) = audit_times.check_paths("Answer", wrong, calls)
        assert finding.label == "paths"


@pytest.mark.parametrize("lacking", ["experiments", "samples", "runs"])
def test_a_project_without_a_log_is_refused(project, lacking, monkeypatch, capsys):
    shipped = project / "experiments/log/shipped"
    shutil.rmtree(project / lacking if lacking == "experiments" else shipped / lacking)
    monkeypatch.setattr(sys, "argv", ["audit.py", str(project)])
    with pytest.raises(SystemExit) as ended:
        audit.main()
    output = capsys.readouterr()
    assert ended.value.code == 2 and output.out == ""
    assert output.err.count("\n") == 1 and "needs the shipped log. Next:" in output.err


def test_what_this_project_publishes():
    assert audit.audit(ROOT) == []


def test_old_rows_of_an_experiment_that_is_not_published_are_left(project):
    age(project)

    def name_experiment(frame):
        frame["experiment"] = "29"

    change(project, "log/shipped/runs/002-x.parquet", name_experiment)
    assert audit.audit(project) == []
