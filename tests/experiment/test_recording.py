"""A run is one thing: whole or absent, of one checkpoint, and what a cell gave last counts."""

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pandas as pd
import pytest
from bs4 import BeautifulSoup
from experiment import toy
from experiment.toy import NAME, example, files_of, run_of
from refusal import refused

from workbench import log, plots
from workbench.check import gates
from workbench.experiment import (
    Experiment,
    artifacts,
    entries,
    folders,
    last_run,
    recording,
)

ENDINGS = ("json", "parquet", "svg", "pdf", "png")


def test_a_run_is_a_folder_of_files_with_one_id(project, capsys):
    experiment = example()
    medians = pd.DataFrame({"run_id": ["c"], "run_ids": [["b", "c"]]})
    experiment.table("t-0.5", medians, "each over several runs")
    experiment.conclude("It holds.")
    folder = project / "build" / "experiments" / NAME / "tiny-llama"
    figure = {f"figures/times-1.5.{ending}" for ending in ENDINGS}
    numbers = {f"tables/numbers.{ending}" for ending in ("json", "parquet", "tex")}
    table = numbers | {name.replace("numbers", "t-0.5") for name in numbers}
    assert files_of(folder).keys() == figure | table | {"run.json", "report.md"}
    run = run_of(folder)
    assert {"run-one", "run-two", "b", "c", run["run_id"]} == set(run["run_ids"])
    assert {artifact.run_id for artifact in artifacts.read_artifacts(folder)} == {
        run["run_id"]
    }
    assert run["run_id"] in (folder / "report.md").read_text()
    (row,) = log.load("runs").to_dict("records")
    assert (row["run_id"], row["experiment"]) == (run["run_id"], "07")
    assert row["verdict"] == run["verdict"] == "RED"
    assert row["quality"] == run["quality"] == "not_run"
    printed = capsys.readouterr().out
    assert (
        printed.startswith("export RED, quality not judged\n\nIt holds.")
        and str(project) not in printed
    )


def test_a_conclusion_is_html_in_a_notebook_and_its_lines_are_a_list(
    project, monkeypatch
):
    published = []
    monkeypatch.setattr(recording, "get_ipython", object)
    monkeypatch.setattr(
        recording, "publish_display_data", lambda *given: published.append(given)
    )
    experiment = example()
    experiment.conclude("It is `a<b>`.\n1.5 times.\n\n2 & 3.\n## C & D\nLast.")
    ((contents, metadata),) = published
    assert metadata["workbench"]["run_id"] == experiment.run_id
    assert contents["text/plain"].startswith(
        "export RED, quality not judged\n\nIt is `a"
    )
    page = BeautifulSoup(contents["text/html"], "html.parser")
    verdicts, first, heading, path = page("p")
    assert verdicts.b.text == "export RED, quality not judged"
    assert (first.text, first.code.text) == ("It is a<b>.", "a<b>")
    lists = [[line.text for line in part("li")] for part in page("ul")]
    assert lists == [["1.5 times.", "2 & 3."], ["Last."]]
    assert heading.b.text == "C & D"
    assert path.text == f"report: build/experiments/{NAME}/tiny-llama/report.md"


def test_two_checkpoints_of_one_name_have_two_runs(project):
    runs = []
    for seed, parent in enumerate(("a", "b")):
        checkpoint = toy.checkpoint(project / parent / "checkpoint-500", seed)
        experiment = example(str(checkpoint))
        experiment.conclude(parent)
        runs.append(experiment.folder)
    first, second = runs
    assert first != second and first.name.startswith("checkpoint-500-")
    assert [run_of(run)["conclusion"] for run in runs] == ["a", "b"]
    new_place = shutil.move(
        project / "a" / "checkpoint-500", project / "checkpoint-500"
    )
    assert folders.run_folder(NAME, {"CHECKPOINT": str(new_place)}) == first


def test_a_run_of_an_older_layout_is_found_until_there_is_a_newer_one(project):
    checkpoint = toy.checkpoint(project / "tiny")
    experiment = example(str(checkpoint))
    experiment.conclude("Old.")
    older = experiment.folder.rename(experiment.folder.with_name("tiny"))
    assert last_run("07") == older
    newer = example(str(checkpoint))
    newer.conclude("New.")
    assert last_run("07") == newer.folder != older
    assert run_of(older)["conclusion"] == "Old."


def test_a_run_that_does_not_conclude_leaves_the_finished_one_whole(project):
    finished = example()
    finished.conclude("It holds.")
    before = files_of(finished.folder)
    other = example()
    other.add_gates([gates.holds("wrong", False, "it does not")])
    assert last_run("07") == finished.folder and files_of(finished.folder) == before
    assert other.folder != finished.folder
    other.conclude("It does not.")
    assert other.folder == finished.folder
    assert run_of(other.folder)["conclusion"] == "It does not."


def test_an_unfinished_run_goes_with_its_notebook(project):
    experiment = example()
    unfinished = experiment.folder
    assert unfinished.is_dir()
    del experiment
    assert not unfinished.exists()


def test_an_abandoned_run_is_removed_and_one_that_goes_on_is_not(project):
    going_on = example()
    abandoned = folders.make_staging_folder(NAME)
    for folder in (going_on.folder, abandoned):
        os.utime(folder, (0, 0))
    folders.remove_abandoned()
    assert going_on.folder.is_dir() and not abandoned.exists()


@pytest.fixture
def run_cell(monkeypatch):
    """Names the cell that runs, and counts its executions."""
    numbers = itertools.count()

    def set_cell(cell: str | None) -> None:
        message_id = f"m{next(numbers)}" if cell else None
        current = entries.CellExecution(cell, message_id)
        monkeypatch.setattr(recording, "current_cell", lambda: current)

    return set_cell


def bars(experiment: Experiment, name: str, value: float) -> None:
    data = pd.DataFrame({"ms": [value]})
    experiment.figure(name, plots.bars, data, alt=f"{name} {value}")


def test_a_cell_that_runs_again_replaces_what_it_gave_in_its_place(project, run_cell):
    experiment = Experiment(NAME, toy.names())
    run_cell("a")
    bars(experiment, "first", 1.0)
    experiment.add_gates([gates.holds("early", True, "")])
    run_cell("b")
    experiment.add_gates(
        [gates.holds("wrong", False, ""), gates.holds("same", True, "")]
    )
    experiment.add_gates([gates.holds("more", True, "")])
    run_cell("c")
    bars(experiment, "second", 1.0)
    experiment.add_gates([gates.holds("late", True, "")])
    run_cell("b")
    experiment.add_gates(
        [gates.holds("right", True, ""), gates.holds("same", True, "")]
    )
    run_cell("a")
    bars(experiment, "renamed", 2.0)
    experiment.add_gates([gates.holds("early", True, "")])
    assert [gate.name for gate in experiment.gates] == [
        "early",
        "right",
        "same",
        "late",
    ]
    experiment.conclude("It holds.")
    figures = [
        (artifact.name, artifact.alt)
        for artifact in artifacts.read_artifacts(experiment.folder)
    ]
    assert figures == [("renamed", "renamed 2.0"), ("second", "second 1.0")]
    assert run_of(experiment.folder)["verdict"] == "GREEN"


def test_without_cells_the_name_tells_what_is_given_again(project):
    experiment = Experiment(NAME, toy.names())
    bars(experiment, "first", 1.0)
    experiment.add_gates([gates.holds("a", False, ""), gates.holds("b", True, "")])
    bars(experiment, "second", 1.0)
    experiment.add_gates([gates.holds("a", True, "")])
    bars(experiment, "first", 2.0)
    verdicts = {gate.name: gate.verdict for gate in experiment.gates}
    assert verdicts == {"a": "GREEN", "b": "GREEN"} and len(experiment.gates) == 2
    experiment.conclude("It holds.")
    saved = artifacts.read_artifacts(experiment.folder)
    descriptions = [artifact.alt for artifact in saved]
    assert descriptions == ["first 2.0", "second 1.0"]


def test_gates_of_one_name_in_one_cell_all_stay(project):
    experiment = Experiment(NAME, toy.names())
    experiment.add_gates([gates.holds("a", True, "x"), gates.holds("a", False, "y")])
    assert [gate.reason for gate in experiment.gates] == ["x", "y"]


def test_the_kernel_s_message_names_the_cell(monkeypatch):
    message = {
        "header": {"msg_type": "execute_request", "msg_id": "m1"},
        "metadata": {"cellId": "a"},
    }
    kernel = SimpleNamespace(get_parent=lambda channel: message)
    shell = SimpleNamespace(kernel=kernel)
    monkeypatch.setattr(entries, "get_ipython", lambda: shell)
    first, again = entries.current_cell(), entries.current_cell()
    assert first == again and first.id == "a"
    message["header"]["msg_id"] = "m2"
    assert entries.current_cell() != first
    message["header"]["msg_type"] = "comm_msg"  # a callback of a widget
    assert entries.current_cell().id is None


def test_a_figure_that_is_saved_later_joins_the_run_and_one_made_again_waits(
    project, run_cell
):
    run_cell("a")
    experiment = Experiment(NAME, toy.names())
    bars(experiment, "first", 1.0)
    experiment.conclude("It holds.")
    run_cell(None)
    bars(experiment, "explorer", 3.0)
    run_cell("a")
    bars(experiment, "first", 2.0)
    saved = artifacts.read_artifacts(experiment.folder)
    assert [artifact.alt for artifact in saved] == ["first 1.0", "explorer 3.0"]
    assert {artifact.run_id for artifact in saved} == {experiment.run_id}
    report = (experiment.folder / "report.md").read_text()
    assert "explorer" in report and len(log.load("runs")) == 1
    experiment.conclude("It holds again.")
    saved = artifacts.read_artifacts(experiment.folder)
    assert [artifact.alt for artifact in saved] == ["first 2.0", "explorer 3.0"]
    newer = example()
    newer.conclude("Of another kernel.")
    run_cell(None)
    before = files_of(newer.folder)
    with refused("run all cells of the notebook again"):
        bars(experiment, "explorer-2", 4.0)
    assert files_of(newer.folder) == before


RUN = """
import sys
from experiment import toy
for number in range(1000):
    experiment = toy.example()
    print(number, flush=True)
    experiment.conclude(f"run {number}")
"""


@pytest.mark.wide
@pytest.mark.slow("ten processes draw figures until they are killed")
def test_a_killed_process_leaves_a_whole_run_and_the_next_run_finishes(
    project, forking_python
):
    first = example()
    first.conclude("The first.")
    names = files_of(first.folder).keys()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    missing = []
    for number in range(10):
        with subprocess.Popen(
            [forking_python, "-c", RUN],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
        ) as process:
            assert process.stdout.readline() == "0\n"  # it goes on to write runs
            if number >= 5:  # it has finished one
                assert "1\n" in iter(process.stdout.readline, "")
            end = time.monotonic() + 0.15 * number
            while time.monotonic() < end:
                missing += [
                    name for name in names if not (first.folder / name).exists()
                ]
            signals = signal.SIGKILL, signal.SIGTERM, signal.SIGINT
            process.send_signal(signals[number % 3])
        missing += [name for name in names if not (first.folder / name).exists()]
        artifacts.check_one_run(first.finished)
        run = run_of(first.finished)
        assert run["run_id"] in (first.finished / "report.md").read_text()
    assert missing == [] and run["conclusion"] != "The first."
    last = example()
    last.conclude("The last.")
    assert run_of(last.folder)["conclusion"] == "The last."
