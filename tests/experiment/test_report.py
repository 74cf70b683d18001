"""A report is written from the files of one run, says how to repeat it, and refuses a mixture."""

import base64
import json
import shlex
import shutil
from dataclasses import replace

import pandas as pd
import pytest
from bs4 import BeautifulSoup
from experiment import toy
from experiment.toy import NAME, example, run_of
from in_process import cli
from matplotlib.figure import Figure
from refusal import refused

from workbench import plots
from workbench.check import gates
from workbench.experiment import (
    Experiment,
    draw_figure,
    last_run,
    publish_run,
    redraw_run,
    write_html,
)
from workbench.experiment.page import Page, Picture, Table, html, markdown
from workbench.experiment.report import APPENDIX


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


def test_figures_and_tables_are_numbered_in_both_formats():
    picture = Picture(b"<svg/>", "Bars & dots.", "figures/a b.svg")
    table = Table(pd.DataFrame({"a": [1]}), "Medians.")
    page = Page("Title", (picture, table, replace(picture, alt="Lines."), table))
    text = markdown(page)
    shown = "Bars \\& dots."
    assert f"![{shown}](figures/a%20b.svg)\n\n*Figure 1. {shown}*" in text
    assert "*Figure 2. Lines.*" in text
    assert text.index("Table 1. Medians.") < text.index("Table 2. Medians.")
    assert "<figcaption>Figure 1. Bars &amp; dots.</figcaption>" in html(page)
    assert 'alt="Bars &amp; dots."' in html(page) and "Table 2. Medians." in html(page)


def test_a_table_of_raw_values_has_files_and_no_place_in_the_report(project):
    experiment = example()
    raw = pd.DataFrame({"process": ["a", "b"], "value": [1.25, 2.5]})
    experiment.table("raw", raw, "Each process.", in_report=False)
    experiment.table("medians", raw.iloc[:1], "Medians.")
    experiment.conclude("It holds.")
    text = (experiment.folder / "report.md").read_text()
    assert "Each process." not in text and "Medians." in text
    assert pd.read_parquet(experiment.folder / "tables/raw.parquet").equals(raw)


def test_a_section_follows_the_other_figures_and_tables_and_the_appendix_is_last(
    project,
):
    experiment = example()
    values = pd.DataFrame({"layer": [0], "error": [0.5]})
    experiment.table("layers", values, "By layer.", section=APPENDIX)
    experiment.figure(
        "predicted",
        plots.bars,
        values[["error"]],
        alt="predicted",
        section="Predictions",
    )
    experiment.table("medians", values, "Medians.")
    experiment.conclude("It holds.\n## The bundle\nIt *is* sound.\n## Faults\nNone.")
    text = (experiment.folder / "report.md").read_text()
    parts = ["It holds.", "## The bundle", "It \\*is\\* sound.", "## Faults", "None."]
    parts += ["## Figures and tables", "(figures/times-1.5.svg)", "Medians."]
    parts += ["## Predictions", "(figures/predicted.svg)", "## Gates", "## Setup"]
    parts += ["## Reproduce", "## Appendix", "By layer."]
    places = [text.find(part) for part in parts]
    assert -1 not in places and places == sorted(places)


def test_gates_of_an_experiment_are_no_verdict_on_an_export(project, capsys):
    experiment = Experiment(NAME, {"NORMS": [605.0]})
    experiment.add_gates([gates.holds("stays_finite", True, "every result is finite")])
    experiment.conclude("It overflows.")
    sentence = (
        "Gates of this experiment: GREEN. They are no verdict on a single export."
    )
    assert capsys.readouterr().out.startswith(f"{sentence}\n\nIt overflows.")
    text = (experiment.folder / "report.md").read_text()
    assert (
        "Gates of this experiment: GREEN. They are no verdict on a single export.\n\nIt overflows."
        in text
    )
    assert "quality" not in text and "\n\nNo checkpoint. " in text


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


def test_a_page_shows_what_the_report_shows_and_no_path(project):
    experiment = example("<b>&", MAX_KL=0.05)
    experiment.conclude(f"It holds, in {project}/build/x.")
    path = write_html(experiment.folder)
    assert path == experiment.folder / "report.html"
    text = path.read_text()
    assert str(project) not in text and "It holds, in …/x." in text
    page = BeautifulSoup(text, "html.parser")
    (picture,) = page("img")
    assert picture["alt"] == "bars of ms"
    kind, _, encoded = picture["src"].partition(",")
    drawn = (experiment.folder / "figures" / "times-1.5.svg").read_bytes()
    assert kind == "data:image/svg+xml;base64" and base64.b64decode(encoded) == drawn
    # nothing is loaded from elsewhere
    assert not page(["script", "link", "iframe"]) and "http" not in page.body.text
    report = (experiment.folder / "report.md").read_text()
    (command,) = [
        line for line in report.splitlines() if line.startswith("workbench run")
    ]
    assert command in page.pre.text and "MAX_KL=0.05" in command
    verdicts = [cell.text for cell in page("td", class_=["good", "bad"])]
    assert verdicts == ["✗ RED"]
    (folded,) = page("details")
    assert folded.summary.text == "All 32 rows" and not folded.has_attr("open")
    assert len(folded("tr")) == 33 and "run-one" not in folded.text
    assert ".parquet" not in page.text
    assert [card.b.text for card in page(class_="verdict")] == ["RED", "not judged"]


def test_a_page_has_up_to_200_rows_of_a_table():
    rows = pd.DataFrame({"token": range(512)})
    table = Table(rows.head(20), "", 492, "tables/t.parquet", rows.head(200))
    (folded,) = BeautifulSoup(html(Page("", (table,))), "html.parser")("details")
    assert folded.summary.text.startswith("The first 200 of 512 rows;")
    assert len(folded("tr")) == 201


def test_a_page_goes_to_the_file_that_is_named(project, tmp_path):
    experiment = example()
    experiment.conclude("It holds.")
    target = tmp_path / "page.html"
    result = cli("report", "7", "--html", target)
    assert result.exit_code == 0 and str(target) in result.stdout
    assert not (experiment.folder / "report.html").exists()
    result = cli("report", "7", "--html")
    assert (experiment.folder / "report.html").read_bytes() == target.read_bytes()


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
    assert redraw_run(experiment.folder).read_text() == text
    assert [drawing.read_bytes() for drawing in drawings] == before


def test_a_figure_is_drawn_in_another_width_with_its_stored_options(project):
    experiment = example()
    path = next((experiment.folder / "figures").glob("*.svg"))
    options = json.loads(path.with_suffix(".json").read_text())["options"]
    figure = draw_figure(path, width=plots.COLUMN)
    assert figure.get_figwidth() == plots.COLUMN
    assert options["title"] in figure.get_suptitle().replace("\n", " ")
    assert draw_figure(str(path)).get_figwidth() == plots.PAGE
    assert draw_figure(path, title="").get_suptitle() == ""
    part = Figure(layout="constrained").subfigures()
    assert draw_figure(path, figure=part) is part and not part.artists
    for no_figure in (experiment.folder / "report.md", path.with_name("other.svg")):
        with refused("no figure of a run"):
            draw_figure(no_figure)


@pytest.mark.parametrize("width", [plots.COLUMN, plots.PAGE])
def test_a_figure_that_is_drawn_again_has_its_subtitle(project, width):
    experiment = example()
    path = next((experiment.folder / "figures").glob("*.json"))
    stored = "tiny-llama · fp16 · portable runtime · 64 tokens in the cache"
    contents = json.loads(path.read_text()) | {"subtitle": stored}
    path.write_text(json.dumps(contents))

    def subtitles(**options) -> list[str]:
        figure = draw_figure(path, width=width, **options)
        parts = figure.findobj(lambda part: part.get_gid() == "subtitle")
        return [" ".join(part.get_text().split()) for part in parts]

    assert subtitles() == subtitles(title="") == [stored]
    assert subtitles(subtitle="fp16") == ["fp16"]
    assert subtitles(subtitle="") == []


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
    text = redraw_run(folder).read_text()
    assert text.startswith("# Experiment 07 · How fast?") and "workbench run 07" in text


def test_a_shipped_run_is_left_alone_unless_redraw_asks_for_it(project, tmp_path):
    """Its files are tracked by git, and a clone without runs has no other one."""
    experiment = example()
    experiment.conclude("It holds.")
    shipped = publish_run(experiment.folder)
    shutil.rmtree(project / "build")
    drawing = next((shipped / "figures").glob("*.svg"))
    drawing.write_text(drawing.read_text() + "<!-- of another matplotlib -->")
    before = toy.files_of(shipped)
    for options in ([], ["--html"], ["--html", tmp_path / "page.html"]):
        result = cli("report", "7", *options)
        assert result.exit_code == 0 and str(shipped / "report.md") in result.stdout
        assert toy.files_of(shipped) == before
    assert cli("report", "7", "--redraw").exit_code == 0
    assert toy.files_of(shipped) != before
    assert "another matplotlib" not in drawing.read_text()
