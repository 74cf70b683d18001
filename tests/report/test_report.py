"""Write-ups out of the log: the same row gives the same bytes, tables and figures name their rows,
and nothing is typed in."""

import json
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from workbench import log, plots, report
from workbench.errors import InputError
from workbench.report import writeup
from workbench.sweep import runs

ROOT = Path(__file__).parents[2]
# a user's own runs draw no shipped figure
LOG = ROOT / "experiments" / "log" / "shipped"
SHIPPED = sorted((ROOT / "experiments").glob("*/figures/*.json"))
FRAME = pd.DataFrame(
    {
        "part": ["a", "b"],
        "ms": [1.5, np.nan],
        "count": pd.array([1, None], "Int64"),
        "run_id": ["r", None],
    }
)


def test_an_exhibit_comes_back_as_it_was():
    row = report.exhibit(
        "x",
        FRAME.assign(inf=[np.inf, 0.1 + 0.2]),
        "caption",
        "parts_bar",
        {"Ts": range(1, 3), "S": np.int64(4)},
    )
    back = report.data_of(row)
    pd.testing.assert_frame_equal(
        back, FRAME.assign(inf=[np.inf, 0.1 + 0.2]), check_dtype=False
    )
    assert json.loads(row["options"]) == {"Ts": [1, 2], "S": 4}


@pytest.fixture
def written(tmp_path):
    root = tmp_path / "experiments" / "log"
    rows = [
        report.exhibit(
            "bars", FRAME.dropna()[["part", "ms"]], "what it shows", "parts_bar"
        ),
        report.exhibit("numbers", FRAME[["part", "ms"]], "100 % of numbers_"),
    ]
    gates = [
        {
            "name": "update",
            "verdict": "GREEN",
            "value": 0.99,
            "threshold": 0.97,
            "reason": "worst layer 1",
        }
    ]
    config = {
        "gates": gates,
        "conclusion": "It holds.",
        "parameters": {"CHECKPOINT": "data/tiny-llama"},
    }
    run_id = runs.record_run(
        "29",
        {
            "command": "notebook 29",
            "checkpoint": "tiny",
            "verdict": "GREEN",
            "config": config,
        },
        root=root,
        exhibits=rows,
    )
    return run_id, report.write_report("29", root)


def test_a_report_says_question_words_tables_figures_verdicts_gaps_and_commands(
    written,
):
    run_id, path = written
    text = path.read_text()
    for said in (
        report.EXPERIMENTS["29"].question,
        "It holds.",
        "figures/bars.svg",
        "what it shows",
        "worst layer 1",
        "not measured",
        "workbench run 29 --set",
        "workbench report 29",
        "tables/numbers.tex",
    ):
        assert said in text, said
    assert text.count(run_id) >= 3 and f"workbench report 29 --run {run_id}" in text
    latex = (path.parent / "tables" / "numbers.tex").read_text()
    assert (
        r"\toprule" in latex
        and r"100 \% of numbers\_" in latex
        and "nan" not in latex.lower()
    )


def test_only_the_newest_run_of_the_notebook_counts(written):
    _, path = written
    root = path.parents[2] / "log"
    later = runs.record_run(
        "29",
        {"command": "notebook 29", "config": {"conclusion": "It broke."}},
        root=root,
        exhibits=[report.exhibit("numbers", FRAME, "newer")],
    )
    text = report.write_report("29", root).read_text()
    assert (
        "It broke." in text
        and "It holds." not in text
        and "bars.svg" not in text
        and later in text
    )


def finished(root: Path, name: str, number: str = "29", **parameters) -> str:
    """A notebook's run on the checkpoint `name`, with one table `name`; returns its id."""
    config = {"conclusion": f"About {name}.", "parameters": parameters}
    return runs.record_run(
        number,
        {"command": f"notebook {number}", "checkpoint": name, "config": config},
        root=root,
        exhibits=[report.exhibit(name or "none", FRAME[["part", "ms"]], f"of {name}")],
    )


def saved(root: Path, name: str, checkpoint: str) -> str:
    """A table that the Explorer saved while it looked at a checkpoint; returns the run's id."""
    return runs.record_run(
        "29",
        {"command": "explorer", "checkpoint": checkpoint},
        root=root,
        exhibits=[
            report.exhibit(name, FRAME[["part", "ms"]], f"saved of {checkpoint}")
        ],
    )


def test_a_run_is_written_up_in_a_folder_named_after_its_checkpoint(written):
    _, path = written
    place = path.parents[1]
    assert path == place / "tiny-llama" / "report.md" and place.name == "29_zaya_probe"
    # nothing where the shipped write-up lies
    assert sorted(p.name for p in place.iterdir()) == ["tiny-llama"]


@pytest.mark.parametrize(
    "checkpoint,parameters,name",
    [
        (
            "random",
            {"CHECKPOINTS": ["data/tiny-llama", "/models/own/"]},
            "tiny-llama+own",
        ),
        (None, {"CHECKPOINT": "/models/Llama 3.2-1B"}, "Llama 3.2-1B"),
        ("qwen-planted", {}, "qwen-planted"),
        (None, {}, "run"),
        ("figures", {}, "run-figures"),
        ("x", {"CHECKPOINT": ".."}, "run"),
        ("report.md", {}, "run-report.md"),
    ],
)
def test_the_folder_of_a_write_up_is_never_the_shipped_ones(
    checkpoint, parameters, name, tmp_path
):
    root = tmp_path / "experiments" / "log"
    finished(root, checkpoint, **parameters)
    assert (
        report.write_report("29", root).parent
        == tmp_path / "experiments" / "29_zaya_probe" / name
    )


def test_a_run_can_be_named_and_what_was_saved_from_another_checkpoint_stays_out(
    tmp_path,
):
    root = tmp_path / "experiments" / "log"
    first = finished(root, "one")
    saved(root, "zoomed", "one")
    finished(root, "two")
    saved(root, "elsewhere", "one")
    text = report.write_report("29", root, first).read_text()
    assert "About one." in text and "zoomed.tex" in text and "About two." not in text
    text = report.write_report("29", root).read_text()
    assert "About two." in text and "elsewhere" not in text
    for name in (saved(root, "x", "one"), "20260101T000000000000Z-00000000"):
        with pytest.raises(InputError, match=name):
            report.write_report("29", root, name)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file()
    }


def test_publishing_replaces_the_shipped_write_up_and_the_runs_that_nothing_shipped_stands_on(
    tmp_path,
):
    root = tmp_path / "experiments" / "log"
    part = runs.record_run("29", {"command": "sweep", "checkpoint": "one"}, root=root)
    table = report.exhibit("timed", FRAME[["part", "ms"]], "timed", run_ids=[part])
    bars = report.exhibit("bars", FRAME.dropna()[["part", "ms"]], "bars", "parts_bar")
    old = runs.record_run(
        "29",
        {"command": "notebook 29", "checkpoint": "one"},
        root=root,
        exhibits=[table, bars],
    )
    other = finished(root, "three", "35")
    for number in ("29", "35"):
        report.publish(number, root)
    shipped, place = root / "shipped", tmp_path / "experiments" / "29_zaya_probe"
    assert set(log.load("runs", root=shipped)["run_id"]) == {part, old, other}
    assert (place / "report.md").exists() and (place / "figures" / "bars.png").exists()
    own = {
        name: data
        for name, data in contents(root).items()
        if not name.startswith("shipped")
    }

    new = finished(root, "two")
    path = report.publish("29", root)
    assert path == place / "report.md" and "About two." in path.read_text()
    assert set(log.load("runs", root=shipped)["run_id"]) == {new, other}
    assert {p.stem for p in shipped.glob("*/*.parquet")} == {new, other}
    assert sorted(p.name for p in place.iterdir()) == ["report.md", "tables"]
    assert contents(place) == contents(report.write_report("29", root).parent)
    # one's own log keeps what is shipped no longer
    assert own.items() <= contents(root).items()

    report.publish("29", root, old)
    assert set(log.load("runs", root=shipped)["run_id"]) == {part, old, other}


def test_the_shipped_runs_alone_are_written_up_and_published_again(tmp_path):
    root = tmp_path / "experiments" / "log"
    finished(root / "shipped", "one")
    assert (
        report.write_report("29", root).parent
        == report.write_report("29", root / "shipped").parent
    )
    before = contents(root / "shipped")
    report.publish("29", root)
    assert contents(root / "shipped") == before


def test_publishing_what_is_nowhere_touches_nothing(tmp_path):
    root = tmp_path / "experiments" / "log"
    finished(root, "one")
    report.publish("29", root)
    before = contents(tmp_path)
    with pytest.raises(InputError):
        report.publish("29", root, "20260101T000000000000Z-00000000")
    runs.record_run("30", {"command": "sweep"}, root=root)
    with pytest.raises(InputError, match="notebook"):
        report.publish("30", root)
    assert {n: d for n, d in contents(tmp_path).items() if n in before} == before


def test_an_experiment_without_runs_has_no_report(tmp_path):
    with pytest.raises(InputError, match="no run in the log"):
        report.write_report("29", tmp_path / "log")


@pytest.fixture(scope="module")
def drawn_again(tmp_path_factory) -> Path:
    """Every exhibit of the shipped log, drawn by another process into a folder per experiment."""
    place = tmp_path_factory.mktemp("drawn")
    code = (
        "import sys; from pathlib import Path; from workbench import report\n"
        "root, place = Path(sys.argv[1]), Path(sys.argv[2])\n"
        "for number in report.EXPERIMENTS:\n"
        "    runs, exhibits = report.behind(number, root)\n"
        "    for row in exhibits:\n"
        "        report.write_exhibit(row, place / number, number, runs)\n"
    )
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    subprocess.run(
        [sys.executable, "-c", code, LOG, place], check=True, cwd=ROOT, env=environment
    )
    return place


@pytest.mark.parametrize("number", report.EXPERIMENTS)
def test_every_shipped_figure_and_table_comes_out_of_the_log_byte_for_byte(
    number, drawn_again
):
    place = ROOT / "experiments" / report.experiment(number).name
    shipped = {
        str(p.relative_to(place)): p
        for folder in ("figures", "tables")
        for p in (place / folder).glob("*")
    }
    again = {
        str(p.relative_to(drawn_again / number)): p
        for p in (drawn_again / number).rglob("*")
        if p.is_file()
    }
    if not shipped and not again:
        pytest.skip("no run of this notebook is shipped")
    assert set(again) == set(shipped)
    sidecars = [
        json.loads(path.read_text())
        for name, path in shipped.items()
        if name.endswith(".json")
    ]
    same_writer = all(about["written_by"] == plots.writer() for about in sidecars)
    for name, path in again.items():
        if same_writer or name.endswith((".svg", ".tex")):
            assert content(path) == content(shipped[name]), name


def content(path: Path) -> bytes | list[bytes]:
    """A file's bytes; a PDF's without lengths and offsets, its streams unpacked, coordinates with
    seven of their ten digits: the last one differs between processors, as NumPy's products do."""
    data = path.read_bytes()
    if path.suffix != ".pdf":
        return data
    stream = re.compile(rb"stream\n(.*?)\nendstream", re.DOTALL)
    rest = re.sub(
        rb"\n\d+\nendobj|\d{10} 00000 n|startxref\n\d+", b"", stream.sub(b"", data)
    )
    unpacked = [zlib.decompress(found) for found in stream.findall(data)]
    digits = re.compile(rb"(\.\d{7})\d{3}\b")
    return [rest, *(digits.sub(rb"\1", each) for each in unpacked)]


def test_coordinates_of_a_pdf_are_compared_to_seven_digits(tmp_path):
    def drawn(text: bytes):
        path = tmp_path / "figure.pdf"
        path.write_bytes(b"stream\n" + zlib.compress(text) + b"\nendstream")
        return content(path)

    assert drawn(b"1 47.2905273437 cm") == drawn(b"1 47.2905273438 cm")
    assert drawn(b"1 47.2905273437 cm") != drawn(b"1 47.2905283437 cm")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: f"{p.parts[-3][:2]}-{p.stem}")
def test_shipped_figures_name_runs_that_the_shipped_log_has(path):
    about = json.loads(path.read_text())
    assert about["alt"] and about["run_ids"]
    assert set(about["run_ids"]) <= set(log.load("runs", root=LOG)["run_id"])


def test_every_plot_can_be_an_exhibit():
    assert all(callable(getattr(plots, name)) for name in plots.__all__)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"runtime": "coreml", "placement_source": "measured"}, "one"),
        ({"runtime": "stand-in"}, "one · stand-in, not Core ML"),
        (
            {"runtime": "stand-in", "placement_source": "simulated"},
            "one · stand-in, not Core ML · simulated",
        ),
    ],
)
def test_a_saved_figure_says_that_it_shows_no_core_ml(columns, words, tmp_path):
    row = {
        "checkpoint": "one",
        "chip": None,
        "memory_bytes": None,
        "cores": None,
        "model": None,
    }
    runs.record_run("34", row | columns, root=tmp_path)
    subject = writeup.figure_subject(log.load("runs", tmp_path))
    assert subject == words.replace("one", "one · unknown chip", 1)
