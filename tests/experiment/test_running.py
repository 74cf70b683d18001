"""Notebooks run headless: a failed run leaves the finished one and its own partial page, and the
command in a report gives the run again."""

import json
import re
import shlex
import shutil

import nbformat
import pandas as pd
import pytest
from experiment import toy
from experiment.toy import NAME, files_of, run_of
from in_process import cli
from refusal import refused
from tiny import DATA

from workbench import log
from workbench.errors import CellError
from workbench.experiment import (
    find_notebook,
    last_run,
    notebook_parameters,
    publish_run,
    run_notebook,
    running,
    write_html,
)


@pytest.mark.slow("a kernel runs a notebook")
def test_a_notebook_runs_with_other_parameters_and_a_failed_run_changes_nothing(
    project, forked
):
    result = run_notebook("7", {"MAX_SEQ_LEN": 32}, progress=False)
    assert (result["experiment"], result["verdict"]) == (NAME, "GREEN")
    assert result["conclusion"] == "32 rows."
    assert run_of(last_run("07"))["seconds"] > 0
    assert [figure["alt"] for figure in result["figures"]] == ["bars of speed"]
    folder = last_run("07")
    assert folder == project / "build" / "experiments" / NAME / "tiny-llama"
    assert "--set MAX_SEQ_LEN=32" in (folder / "report.md").read_text()
    source = project / "notebooks" / f"{NAME}.ipynb"
    assert not nbformat.read(source, 4).cells[2].outputs

    page = write_html(folder).read_text()
    run_id = run_of(folder)["run_id"]
    assert run_id in page and "MAX_SEQ_LEN=32" in page and str(project) not in page
    assert 'alt="bars of speed"' in page
    before = files_of(folder)

    with pytest.raises(
        CellError, match=r"07_toy, cell \[\d\]: AssertionError"
    ) as failed:
        run_notebook("07", {"MAX_KL": -1}, progress=False)
    partial = re.search(r"executed copy: (.*)\)", str(failed.value))[1]
    errors = [
        output.ename
        for cell in nbformat.read(partial, 4).cells
        for output in cell.get("outputs", [])
        if output.output_type == "error"
    ]
    assert errors == ["AssertionError"]
    assert files_of(folder) == before
    assert write_html(folder).read_text() == page


@pytest.mark.slow("a kernel runs a notebook")
def test_a_notebook_that_never_concludes_is_refused(project, forked):
    toy.example().conclude("An earlier run.")
    before = files_of(last_run("07"))
    body = toy.BODY.replace("experiment.conclude", "str")
    toy.write_notebook(project, body=body)
    with refused("end the notebook with experiment.conclude"):
        run_notebook("07", progress=False)
    assert files_of(last_run("07")) == before


def test_the_time_of_a_published_run_is_announced_for_its_parameters_alone(
    project, capsys, monkeypatch
):
    toy.example().conclude("A run.")
    folder = publish_run(last_run("07"))
    values = notebook_parameters("07").values
    run = run_of(folder)
    environment = {"machine": "A chip, 8 GiB, 2 cores"}
    run |= {"parameters": values, "environment": environment}
    # a run before times were recorded, and one that took 75 s
    for seconds, text in (
        (None, ""),
        (75.4, "07_toy: about 1:15 (min:s), the time of its published run on A chip"),
    ):
        (folder / "run.json").write_text(json.dumps(run | {"seconds": seconds}))

        def stop(*_, **__):
            raise CellError("no kernel")

        monkeypatch.setattr("workbench.kernel.execute", stop)
        for parameters, is_same in (({}, True), ({"MAX_SEQ_LEN": 32}, False)):
            for progress in (True, False):
                with pytest.raises(CellError):
                    run_notebook("07", parameters, progress=progress)
                said = capsys.readouterr().err
                if text and is_same and progress:
                    assert said.startswith(text)
                else:
                    assert said == ""


def test_what_a_notebook_does_not_have_is_refused_before_anything_runs(project):
    with refused("names among CHECKPOINT, MAX_KL, MAX_SEQ_LEN, PROMPT, T"):
        run_notebook("07", {"MAX_SEQ_LENGTH": 3}, progress=False)
    with refused("found no such notebook; needs one of 07"):
        run_notebook("99", progress=False)
    assert not (project / "build").exists()


def test_a_parameter_that_no_text_can_give_is_refused(project, monkeypatch):
    parameters = notebook_parameters("07")
    parameters.fixed["FOLDER"] = "PosixPath('data')"
    monkeypatch.setattr(running, "notebook_parameters", lambda number: parameters)
    with refused("FOLDER = PosixPath"):
        run_notebook("07", {"FOLDER": "x"}, progress=False)


def test_copies_beside_a_notebook_are_not_run_and_two_of_a_number_are_refused(project):
    source = project / "notebooks" / f"{NAME}.ipynb"
    for copy in (f"{NAME}-Copy1", f"{NAME}.nbconvert", f"{NAME} (1)", f"a{NAME}"):
        shutil.copy(source, source.with_name(f"{copy}.ipynb"))
    assert find_notebook("7") == source
    shutil.copy(source, source.with_name("07_another.ipynb"))
    with refused("found 07_another.ipynb, 07_toy.ipynb; needs one notebook"):
        find_notebook("07")


QUOTED = "\"It is 'so'\" & <s>|\\"


@pytest.mark.slow("a kernel runs a notebook twice")
def test_the_command_of_a_report_gives_the_figures_of_an_edited_notebook_again(
    checkout, forked, monkeypatch, tmp_path_factory
):
    braces = checkout / "a {b} [c] 50%"
    braces.mkdir()
    shutil.copy(checkout / "pyproject.toml", braces)
    monkeypatch.chdir(braces)
    shutil.copytree(DATA / "tiny-llama", braces / "data" / "tiny-llama")
    toy.write_notebook(braces)
    clone = shutil.copytree(braces, tmp_path_factory.mktemp("clone") / "x")
    toy.write_notebook(braces, toy.PARAMETERS.replace("[1, 4]", "[1, 2, 3]"))
    result = cli(
        "run", "7", "--set", f"PROMPT={QUOTED}", "--set", "MAX_KL=6e-2", "--json"
    )
    assert result.exit_code == 0, result.output
    first = last_run("07")
    assert run_of(first)["parameters"]["PROMPT"] == QUOTED
    report = (first / "report.md").read_text()
    (command,) = re.findall("^(workbench run .*)$", report, re.MULTILINE)
    monkeypatch.chdir(clone)
    assert cli(*shlex.split(command)[1:]).exit_code == 0
    second = last_run("07")
    assert second.is_relative_to(clone)
    assert run_of(second)["parameters"] == run_of(first)["parameters"]
    tables = [pd.read_parquet(run / "figures/speed.parquet") for run in (first, second)]
    pd.testing.assert_frame_equal(*tables)
    drawings = [(run / "figures/speed.svg").read_bytes() for run in (first, second)]
    assert drawings[0] == drawings[1] and len(tables[0]) == 3


@pytest.mark.parametrize("command", ["run", "report"])
@pytest.mark.parametrize("folder", ["build", "experiments/log"])
def test_a_checkout_that_cannot_be_written_is_one_message(project, command, folder):
    toy.example().conclude("It holds.")
    shutil.rmtree(project / "experiments")
    if folder == "build":
        shutil.move(
            project / "build" / "experiments" / NAME, project / "experiments" / NAME
        )
        shutil.move(project / "experiments" / NAME / "tiny-llama", project / "x")
        shutil.rmtree(project / "experiments" / NAME)
        shutil.move(project / "x", project / "experiments" / NAME)
    shutil.rmtree(project / folder, ignore_errors=True)
    (project / folder).parent.mkdir(exist_ok=True)
    (project / folder).write_text("no folder can be made here")
    result = cli(command, "7")
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1
    assert f"WORKBENCH_OUT=FOLDER workbench {command}" in result.stderr


@pytest.mark.slow("a kernel runs a notebook")
def test_what_a_run_writes_goes_to_the_folder_that_is_named(
    project, forked, monkeypatch, tmp_path_factory
):
    example = toy.example()
    example.conclude("It holds.")
    publish_run(example.folder)
    shutil.rmtree(project / "build")
    before = files_of(project)
    out = tmp_path_factory.mktemp("out")
    monkeypatch.setenv("WORKBENCH_OUT", str(out))
    assert log.load("runs")["run_id"].tolist() == [example.run_id]
    assert cli("report", "7").stdout.strip() == str(
        out / "build" / "experiments" / NAME / "shipped" / "report.md"
    )
    result = run_notebook("07", progress=False)
    assert result["report"] == str(
        out / "build" / "experiments" / NAME / "tiny-llama" / "report.md"
    )
    assert len(log.load("runs")) == 2 and files_of(project) == before


def test_a_checkpoint_that_is_not_there_is_refused_before_a_kernel_starts(
    project, monkeypatch
):
    monkeypatch.setattr("workbench.experiment.run_notebook", None)
    with refused("checkpoint .*nowhere.*found nothing there"):
        cli("run", "7", "--set", "CHECKPOINT=/nowhere", raises=True)
