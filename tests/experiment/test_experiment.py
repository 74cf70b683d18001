"""An experiment is a folder of files: figures drawn from the data beside them, tables,
the run and its report; a published run takes its log rows with it."""

import json
import shlex
import shutil

import nbformat
import numpy as np
import pandas as pd
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from refusal import refused

from workbench import log, plots
from workbench.check import gates
from workbench.errors import CellError
from workbench.experiment import (
    Experiment,
    last_run,
    publish_run,
    run_folder,
    run_notebook,
    write_again,
)

NAME = "07_toy"
PARAMETERS = (
    'CHECKPOINT = "data/tiny-llama"\nMAX_SEQ_LEN = 64\nT = [1, 4]\nMAX_KL = 0.05'
)
BODY = """
import pandas as pd
from workbench import plots
from workbench.check import gates
from workbench.experiment import Experiment

experiment = Experiment("07_toy", globals())
assert MAX_KL > 0
speed = pd.DataFrame({"T": T, "tok/s": [float(MAX_SEQ_LEN)] * len(T)})
experiment.figure("speed", plots.bars, speed.set_index("T"), alt="bars of speed")
experiment.add_gates([gates.at_most("max_kl", 0.01, MAX_KL, "mean KL")])
experiment.conclude(f"{MAX_SEQ_LEN} rows.")
"""


@pytest.fixture
def project(checkout):
    """A checkout with one notebook and an empty log."""
    (checkout / "notebooks").mkdir()
    cells = [new_markdown_cell("# 07 · How fast?\n\nAn example.")]
    cells.append(new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]}))
    cells.append(new_code_cell(BODY))
    words = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = new_notebook(cells=cells, metadata={"kernelspec": words})
    nbformat.write(notebook, checkout / "notebooks" / f"{NAME}.ipynb")
    return checkout


def example(checkpoint="data/tiny-llama", **more) -> Experiment:
    names = {"CHECKPOINT": checkpoint, "MAX_SEQ_LEN": 64, "T": [1, 4], "LIMIT": 2}
    experiment = Experiment(NAME, names | more)
    data = pd.DataFrame({"ms": [2.0, np.nan], "run_id": ["run-one", "run-two"]})
    experiment.figure(
        "times-1.5", plots.bars, data[["ms"]], alt="bars of ms", title="ms"
    )
    data = pd.concat([data, pd.DataFrame({"T": range(30)})])
    experiment.table("numbers", data, "100 % of numbers_")
    gate = gates.at_most("max_kl", 0.1, 0.05, "mean KL from the golden in nats")
    experiment.add_gates([gates.not_run("device", "needs a Mac"), gate])
    return experiment


def run_of(folder) -> dict:
    return json.loads((folder / "run.json").read_text())


def test_a_run_is_a_folder_of_files(project, capsys):
    experiment = example()
    medians = pd.DataFrame({"run_id": ["c"], "run_ids": [["b", "c"]]})
    experiment.table("t-0.5", medians, "each over several runs")
    experiment.conclude("It holds.")
    folder = project / "build" / "experiments" / NAME / "tiny-llama"
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*.*")}
    figure = {
        f"figures/times-1.5.{s}" for s in ("json", "parquet", "svg", "pdf", "png")
    }
    numbers = {f"tables/numbers.{s}" for s in ("json", "parquet", "tex")}
    table = numbers | {name.replace("numbers", "t-0.5") for name in numbers}
    assert names == figure | table | {"run.json", "report.md"}
    assert r"100 \% of numbers\_" in (folder / "tables" / "numbers.tex").read_text()
    run = run_of(folder)
    assert {"run-one", "run-two", "b", "c", run["run_id"]} == set(run["run_ids"])
    (row,) = log.load("runs").to_dict("records")
    assert (row["run_id"], row["experiment"]) == (run["run_id"], "07")
    assert row["verdict"] == run["verdict"] == "RED"
    assert capsys.readouterr().out.startswith("RED\n\nIt holds.")


def test_the_report_has_gates_figures_and_a_command_and_few_lines(project):
    experiment = example("/models/01_my model", T=[1])
    experiment.conclude("It holds.")
    report = (experiment.folder / "report.md").read_text()
    assert report.startswith("# Experiment 07 · How fast?\n\nIt holds.\n")
    assert "![bars of ms](figures/times-1.5.svg)" in report
    lines = report.splitlines()
    gates = [line for line in lines if "max_kl" in line or "needs a Mac" in line]
    verdicts = [line.split("|")[2].strip() for line in gates]
    assert verdicts == ["✗ RED", "– not run"]  # RED first
    command = next(line for line in lines if line.startswith("workbench run"))
    values = shlex.split(command)[2:]
    assert values == ["07", "--set", "CHECKPOINT=/models/01_my model", "--set", "T=[1]"]
    assert "12 more rows" in report and len(lines) <= 200 and "nan" not in report
    run = run_of(experiment.folder)
    assert not any(run_id in report for run_id in set(run["run_ids"]) - {run["run_id"]})


def test_publishing_moves_the_run_and_its_rows_and_removes_unused_ones(project):
    old = example()
    old.conclude("Old.")
    publish_run(old.folder)
    new = example("/models/tiny-llama")
    new.conclude("New, of /home/someone/secret/tiny-llama.")
    shipped = publish_run(new.folder)
    assert shipped == project / "experiments" / NAME
    report = (shipped / "report.md").read_text()
    assert "New" in report and "/home/someone" not in report
    assert "--set CHECKPOINT=/path/to/tiny-llama" in report
    run = run_of(shipped)
    rows = log.load("runs", project / "experiments" / "log" / log.SHIPPED)
    assert rows["run_id"].tolist() == [run["run_id"]]


def test_a_notebook_runs_with_other_parameters(project, forked):
    result = run_notebook("7", {"MAX_SEQ_LEN": 32}, progress=False)
    assert (result["experiment"], result["verdict"]) == (NAME, "GREEN")
    assert result["conclusion"] == "32 rows."
    assert [figure["alt"] for figure in result["figures"]] == ["bars of speed"]
    report = (run_folder(NAME, {"CHECKPOINT": "tiny-llama"}) / "report.md").read_text()
    assert "workbench run 07 --set MAX_SEQ_LEN=32" in report
    source = project / "notebooks" / f"{NAME}.ipynb"
    assert not nbformat.read(source, 4).cells[2].outputs
    with pytest.raises(CellError, match=r"07_toy, cell \[\d\]: AssertionError"):
        run_notebook("07", {"MAX_KL": -1}, progress=False)


def test_a_notebook_that_never_concludes_is_refused(project, forked):
    example().conclude("An earlier run.")
    source = project / "notebooks" / f"{NAME}.ipynb"
    source.write_text(source.read_text().replace("experiment.conclude", "str"))
    with refused("end the notebook with experiment.conclude"):
        run_notebook("07", progress=False)


def test_what_a_notebook_does_not_have_is_refused_before_anything_runs(project):
    with refused("some of CHECKPOINT, MAX_KL, MAX_SEQ_LEN, T"):
        run_notebook("07", {"MAX_SEQ_LENGTH": 3}, progress=False)
    with refused("no such notebook"):
        run_notebook("99", progress=False)
    assert not (project / "build").exists()


def test_the_newest_run_is_written_again_and_the_shipped_one_without_it(project):
    with refused("no finished run"):
        last_run("7")
    experiment = example()
    experiment.conclude("It holds.")
    for unnamed in (".", "..", "/"):
        example(unnamed)  # its folder is emptied, no other
    assert last_run("07") == experiment.folder
    report = (experiment.folder / "report.md").read_text()
    drawings = [
        experiment.folder / "figures" / f"times-1.5.{s}" for s in ("svg", "png")
    ]
    before = [drawing.read_bytes() for drawing in drawings]
    for drawing in drawings:
        drawing.unlink()
    assert write_again(experiment.folder).read_text() == report
    assert [drawing.read_bytes() for drawing in drawings] == before
    shipped = publish_run(experiment.folder)
    shutil.rmtree(project / "build")
    assert last_run("7") == shipped
    with refused("a run of your own"):
        publish_run(shipped)
