"""A report is written from the files of one run, says how to repeat it, and refuses a mixture."""

import json
import shlex
import shutil

import nbformat
from bs4 import BeautifulSoup
from experiment import toy
from experiment.toy import NAME, example, run_of
from in_process import cli
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from refusal import refused

from workbench.experiment import folders, last_run, report, write_again, write_html
from workbench.files import write_whole


def test_the_report_has_gates_figures_setup_and_a_command_and_few_lines(project):
    experiment = example("/models/01_my model", T=[1])
    experiment.conclude("It holds: 2 * 3 | <b> *x*.\nReally.")
    text = (experiment.folder / "report.md").read_text()
    assert text.startswith(
        "# Experiment 07 · How fast?\n\n**Export RED, quality not judged**\n\nIt holds: 2 \\* 3 \\| \\<b\\>"
    )
    assert "\n\nReally.\n\n" in text
    assert "![bars of ms](figures/times-1.5.svg)" in text
    lines = text.splitlines()
    gates = [line for line in lines if "| budget" in line or "needs a Mac" in line]
    verdicts = [line.split("|")[2].strip() for line in gates]
    assert verdicts == ["✗ RED", "– not run"]  # RED first
    assert "Checkpoint 01_my model" in text and "/models" not in text
    assert "12 more rows" in text and len(lines) <= 200 and "nan" not in text
    run = run_of(experiment.folder)
    assert not any(run_id in text for run_id in set(run["run_ids"]) - {run["run_id"]})


def test_the_command_has_every_parameter_and_no_local_path(project, tmp_path_factory):
    checkpoint = toy.checkpoint(tmp_path_factory.mktemp("secret") / "checkpoint-500")
    prompt = '`a` "b" $c ```'
    experiment = example(str(checkpoint), MAX_KL=0.05, PROMPT=prompt)
    experiment.conclude("It holds.")
    text = (experiment.folder / "report.md").read_text()
    (command,) = [
        line for line in text.splitlines() if line.startswith("workbench run")
    ]
    label = experiment.folder.name
    assert shlex.split(command)[2:] == [
        *("07", "--set", f"CHECKPOINT={label}", "--set", "MAX_SEQ_LEN=64"),
        *("--set", "T=[1, 4]", "--set", "MAX_KL=0.05", "--set", f"PROMPT={prompt}"),
    ]
    assert f"In place of {label}, give the folder" in text
    assert experiment.source.sha256 in text and str(checkpoint.parent) not in text
    assert str(checkpoint.parent) not in (experiment.folder / "run.json").read_text()
    assert text.count("\n````\n") == 2  # the fence is longer than the prompt's


def test_a_mixture_of_runs_is_refused(project):
    first, second = example(), example("data/other")
    first.conclude("First.")
    second.conclude("Second.")
    figure = "figures/times-1.5.json"
    shutil.copy(second.folder / figure, first.folder / figure)
    before = toy.files_of(first.folder)
    shutil.rmtree(second.folder)
    for command in (
        ["report", "7"],
        ["report", "7", "--html"],
        ["report", "7", "--publish"],
    ):
        result = cli(*command)
        assert result.exit_code == 2
        assert (
            f"times-1.5 of run {second.run_id} beside run {first.run_id}"
            in result.stderr
        )
    assert toy.files_of(first.folder) == before
    assert not (project / "experiments" / NAME).exists()


def executed(run_id: str, *outputs) -> bytes:
    """An executed notebook that concluded a run."""
    run = {"run_id": run_id, "folder": "build/experiments/x/y"}
    conclusion = new_output(
        "display_data", {"text/plain": "GREEN"}, metadata={"workbench": run}
    )
    cells = [
        new_markdown_cell("# 07"),
        new_code_cell("", outputs=[*outputs, conclusion]),
    ]
    return nbformat.writes(new_notebook(cells=cells)).encode()


def test_a_page_is_of_the_run_that_it_is_written_beside(project):
    experiment = example()
    experiment.conclude("It holds.")
    with refused("no executed copy"):
        write_html(experiment.folder)
    saved = folders.executed_folder() / f"{NAME}.ipynb"
    saved.parent.mkdir(parents=True)
    write_whole(saved, executed("20200101T000000000000Z-00000000"))
    with refused("of a run 20200101T000000000000Z-00000000"):
        write_html(experiment.folder)
    write_whole(saved, executed(experiment.run_id))
    assert experiment.run_id in write_html(experiment.folder).read_text()


def test_a_page_shows_no_widget_no_progress_and_no_path(project):
    experiment = example("<b>&", MAX_KL=0.05)
    experiment.conclude("It holds.")
    widget = {"text/plain": "Explorer(children=())", report.WIDGET: {"model_id": "a"}}
    svg = '<svg xmlns="http://www.w3.org/2000/svg"/>'
    described = {report.SVG: {"alt": 'cosine of "q" <k>'}}
    outputs = [
        new_output("display_data", widget),
        new_output("stream", name="stderr", text="  0%|      | 0/4"),
        new_output("stream", name="stdout", text=f"saved in {project}/build/x"),
        new_output("display_data", {report.SVG: svg}, metadata=described),
    ]
    copy = experiment.folder / folders.NOTEBOOK
    write_whole(copy, executed(experiment.run_id, *outputs))
    page = write_html(experiment.folder).read_text()
    assert "Explorer(" not in page and "0%" not in page.partition("<body")[2]
    assert "saved in build/x" in page and str(project) not in page
    assert [image["alt"] for image in BeautifulSoup(page, "html.parser")("img")] == [
        'cosine of "q" <k>'
    ]
    assert "No description" not in page
    assert ">MAX_KL</td>" in page and "&lt;b&gt;&amp;" in page


def test_the_newest_run_is_written_again(project):
    with refused("no finished run"):
        last_run("7")
    with refused("needs one of 07"):
        last_run("99")
    experiment = example()
    experiment.conclude("It holds.")
    for unnamed in (".", "..", "/"):
        example(unnamed)  # it has a folder of its own
    assert last_run("07") == experiment.folder
    text = (experiment.folder / "report.md").read_text()
    drawings = [
        experiment.folder / "figures" / f"times-1.5.{s}" for s in ("svg", "png")
    ]
    before = [drawing.read_bytes() for drawing in drawings]
    for drawing in drawings:
        drawing.unlink()
    assert write_again(experiment.folder).read_text() == text
    assert [drawing.read_bytes() for drawing in drawings] == before


def test_a_run_of_before_reports_had_these_keys_is_written_again(project):
    experiment = example()
    experiment.conclude("It holds.")
    folder = experiment.folder
    run = run_of(folder)
    for name in ("experiment", "checkpoint", "options", "fixed_parameters"):
        del run[name]
    (folder / "run.json").write_text(json.dumps(run))
    for path in folder.glob("*/*.json"):
        part = json.loads(path.read_text())
        del part["run_id"]
        path.write_text(json.dumps(part))
    text = write_again(folder).read_text()
    assert text.startswith("# Experiment 07 · How fast?") and "workbench run 07" in text
