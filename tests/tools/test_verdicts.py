"""The table of verdicts: what a row keeps, rows that are there, and the page made of them."""

import json
from dataclasses import replace

import pytest
import verdicts
from tiny import DATA, ROOT

from workbench.models.checkpoint import Checkpoint
from workbench.recommend.candidates import CALIBRATION_TEXT


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """Folders in the place of the project's."""
    monkeypatch.setattr(verdicts, "ROWS", tmp_path / "rows")
    monkeypatch.setattr(verdicts, "WORK", tmp_path / "work")
    return tmp_path / "rows"


def gate(name: str, verdict: str) -> dict:
    return {"name": name, "verdict": verdict, "value": 1.0, "threshold": 1.0}


def row(preset: str, **changes) -> dict:
    """The row of a sound bundle."""
    transcript = {"agreed": 0.99, "interval": [0.98, 1.0], "ties": 4, "error": 1.5}
    sound = {
        "preset": preset,
        "bytes": 2 << 20,
        "verdict": "GREEN",
        "quality": "WITHIN",
        "gates": [gate("device", "not_run"), gate("stop", "WITHIN")],
        "cost": {"kl": {"mean": 0.00458}},
        "transcript": transcript,
        "stop": {"ends": 5, "bundle_ends": 4},
        "recommendation": None,
        "tried": None,
        "cpu_seconds": 72.2,
    }
    return sound | changes


def test_the_table_has_both_words_the_figures_and_the_recommendation(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    chosen = {"compress": "int8-channel", "kl": 0.004, "interval": [0.003, 0.005]}
    chosen["bytes"] = 3 << 20
    over = row("int8-tensor", quality="OVER", recommendation=chosen)
    over["tried"] = {"cpu_seconds": 45.4}
    unjudged = [gate("weights", "not_run"), gate("device", "not_run")]
    unjudged.append(gate("stop", "not_run"))
    fitted = row("lut4-g8", verdict="not_run", quality="OVER", gates=unjudged)
    fitted |= {"stop": {"ends": 0, "bundle_ends": 0}, "tried": {"cpu_seconds": 9.0}}
    red = row("fp16", verdict="RED", quality="not_run", gates=[gate("stop", "not_run")])
    red["gates"].append(gate("program", "RED"))
    for document in (over, fitted, red, row("int8-channel")):
        (folder / f"{document['preset']}.json").write_text(json.dumps(document))
    title, _, head, _, *lines, _ = verdicts.table(tmp_path)
    assert title == "### model" and head.startswith(
        "| preset | MiB | export | quality |"
    )
    line_of = {line.split("`")[1]: line for line in lines}
    assert (
        "| 2.0 | GREEN | WITHIN | 0.00458 | 0.990 [0.980, 1.000] | 4 | 4 of 5 |"
        in (line_of["int8-channel"])
    )
    # the size in the row of int8-channel, not the one that the trial computed
    assert (
        "`int8-channel`: 0.004 [0.003, 0.005], 2.0 MiB | 45 CPU s | 72 CPU s |"
        in (line_of["int8-tensor"])
    )
    (folder / "int8-channel.json").unlink()
    words = "\n".join(verdicts.table(tmp_path))
    assert "`int8-channel`: 0.004 [0.003, 0.005], 3.0 MiB |" in words
    assert "| not run: weights, stop |" not in line_of["lut4-g8"]
    assert "| not run: weights | OVER |" in line_of["lut4-g8"]
    assert "| no end, not run |" in line_of["lut4-g8"]
    assert "| none keeps the limits | 9 CPU s |" in line_of["lut4-g8"]
    assert "| RED: program | not judged |" in line_of["fp16"]


def test_a_row_of_other_files_is_measured_again(tmp_path, tiny_llama):
    inputs = verdicts.Inputs.of(tiny_llama, "lut4-g8")
    assert inputs.calibration == verdicts.sha256(ROOT / CALIBRATION_TEXT)
    assert verdicts.Inputs.of(tiny_llama, "fp16").calibration is None
    path = tmp_path / "lut4-g8.json"
    assert not verdicts.is_current(path, inputs)
    path.write_text(json.dumps({"inputs": vars(inputs)}))
    assert verdicts.is_current(path, inputs)
    for name in ("checkpoint", "prompts", "calibration"):
        assert not verdicts.is_current(path, replace(inputs, **{name: "0"}))


@pytest.mark.wide
@pytest.mark.slow("exports and validates in processes of their own")
def test_a_preset_is_exported_and_judged_without_paths_of_the_machine(rows):
    source = Checkpoint(DATA / "tiny-llama")
    verdicts.measure(source, "int8-tensor")
    path = verdicts.row_path(source, "int8-tensor")
    row = json.loads(path.read_text())
    assert (row["verdict"], row["quality"]) == ("GREEN", "WITHIN")
    assert row["transcript"]["agreed"] > 0.9 and row["prompts"] == 16
    assert row["cpu_seconds"] > 0 and row["bytes"] > 0
    assert verdicts.is_current(path, verdicts.Inputs.of(source, "int8-tensor"))
    assert str(ROOT) not in path.read_text() and "/tmp" not in path.read_text()
    assert not [*verdicts.WORK.rglob("bundle.json")]
    assert "`int8-tensor`" in "\n".join(verdicts.table(rows))


def test_the_page_is_made_of_the_rows(tmp_path):
    page = tmp_path / "verdict.md"
    text = (ROOT / "docs" / "verdict.md").read_text()
    page.write_text(text)
    verdicts.write_page(page)
    assert page.read_text() == text
