"""A study keeps what a notebook showed: one log row with every exhibit, files drawn from it, a
verdict from its gates."""

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

from workbench import log, plots
from workbench.check import gates, golden
from workbench.errors import InputError
from workbench.models.checkpoint import Checkpoint
from workbench.report.study import Study

ROOT = Path(__file__).parents[2]
PARTS = pd.DataFrame({"part": ["attention", "rest"], "ms": [1.5, 0.5]})


@pytest.fixture
def study(tmp_path, monkeypatch):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "data").symlink_to(ROOT / "data")
    monkeypatch.chdir(tmp_path)
    return Study("29", {"DEPTH": 4, "depth": 5, "_": 6})


def test_what_was_shown_is_logged_and_written(study, exports, capsys):
    study.figure("parts", plots.parts_bar, PARTS, alt="time by part")
    study.table("parts", PARTS, "time by part, in numbers")
    study.add_gates(
        [
            gates.at_least("update", 0.99, 0.97, "worst of all"),
            gates.not_run("kv", "nothing to compare"),
        ]
    )
    study.conclude(
        exports.bundle(exports.checkpoint("llama")), "It took two.", extra={"n": 1}
    )
    (run,) = log.load("runs").to_dict("records")
    config = json.loads(run["config"])
    assert (run["verdict"], config["parameters"], config["extra"]) == (
        "GREEN",
        {"DEPTH": 4},
        {"n": 1},
    )
    assert log.load("exhibits")["plot"].isna().tolist() == [False, True]
    place = study.project / "experiments" / "29_zaya_probe" / run["checkpoint"]
    assert json.loads((place / "figures" / "parts.json").read_text())["run_ids"] == [
        run["run_id"]
    ]
    assert (place / "tables" / "parts.tex").exists()
    assert (
        "It took two." in (place / "report.md").read_text()
        and "It took two." in capsys.readouterr().out
    )


def test_a_run_is_red_when_one_gate_is(study, exports):
    study.add_gates([gates.at_least("update", 0.9, 0.97, "worst of all")])
    study.add_gates([gates.holds("finite", True, "every value")])
    study.conclude(exports.bundle(exports.checkpoint("llama")))
    assert log.load("runs")["verdict"].tolist() == ["RED"]


def test_only_functions_of_plots_draw_figures(study):
    with pytest.raises(InputError, match="workbench.plots"):
        study.figure("x", lambda data: None, PARTS, alt="nothing")


def test_a_checkpoint_without_a_tokenizer_gets_ids_and_no_questions(study, exports):
    path = exports.checkpoint("llama")
    checkpoint = Checkpoint(path)
    ids, tokens = study.prompt(checkpoint, 9)
    assert (
        len(ids) == 9
        and tokens == [str(i) for i in ids]
        and max(ids) < checkpoint.config.vocab_size
    )
    assert [
        gate.verdict for gate in study.answers(exports.decoder(path), checkpoint)
    ] == ["not_run"]


def test_a_checkpoint_with_a_tokenizer_gets_a_question(study):
    ids, tokens = study.prompt(Checkpoint(ROOT / "data" / "tiny-llama"), 6)
    assert len(ids) == len(tokens) == 6 and tokens[:2] == ["<bos>", "set"]


@pytest.mark.parametrize("prompt", [5, [1, 4, 69]])
def test_open_exports_and_gives_decoder_prompt_and_golden(study, tmp_path, prompt):
    study.bundles, study.goldens = tmp_path / "bundles", tmp_path / "golden"
    model = study.open("data/tiny-llama", prompt, precision="exact", max_seq_len=16)
    again = study.open("data/tiny-llama", prompt, max_seq_len=16)
    assert (
        again.bundle.root == model.bundle.root
        and model.bundle.manifest.options.max_seq_len == 16
    )
    assert (model.decoder.precision, model.decoder.fast, again.decoder.precision) == (
        "exact",
        False,
        "declared",
    )
    assert (
        len(model.ids)
        == len(model.tokens)
        == (prompt if isinstance(prompt, int) else 3)
    )
    assert (
        not list(tmp_path.glob("golden/*")) and model.golden.ids.tolist() == model.ids
    )


def test_the_front_door_offers_the_module_and_the_class():
    import workbench

    assert (
        workbench.study.Study is workbench.Study is Study and workbench.gates is gates
    )


def test_a_prompt_is_text_or_the_file_of_it(study, tiny_llama, exports):
    ids, tokens = study.prompt(tiny_llama, 5, "set river amber ; get river")
    assert tokens == ["<bos>", "set", "river", "amber", ";"]
    (study.project / "prompt.txt").write_text("set river amber ; get river")
    assert study.prompt(tiny_llama, 5, "prompt.txt")[0] == ids
    assert study.prompt(tiny_llama, 5)[0] != ids
    with pytest.raises(InputError, match="no tokenizer.json"):
        study.prompt(Checkpoint(exports.checkpoint("llama")), 5, "set river")


@pytest.mark.shim
def test_runtime_units_and_golden_are_parameters_of_whatever_is_opened(
    study, tmp_path, capsys
):
    goldens, ids = tmp_path / "golden", [1, 4, 69, 42]
    checkpoint = Checkpoint(ROOT / "data" / "tiny-llama")
    golden.make_golden(checkpoint, ids).save(goldens / "g")
    chosen = {
        "RUNTIME": "stand-in",
        "COMPUTE_UNITS": "ALL",
        "GOLDEN": str(goldens / "g"),
    }
    for names, units in (
        (chosen, "ALL"),
        (chosen | {"COMPUTE_UNITS": None}, "CPU_ONLY"),
    ):
        study = Study("29", names)
        study.bundles, study.goldens = tmp_path / "bundles", goldens
        model = study.open("data/tiny-llama", 3, max_seq_len=16)
        assert (model.decoder.runtime, model.decoder.compute_units) == (
            "stand-in",
            units,
        )
        assert study.axes("data/tiny-llama") == {
            "runtime": ["stand-in"],
            "compute_units": [units],
        }
        assert model.ids == ids == model.golden.ids.tolist()
    study.add_gates(model.validate([1]).gates)
    assert {g.name: g.verdict for g in study.gates}["device"] == "GREEN"
    assert {path.name[0] for path in goldens.glob("*")} == {"g"}, (
        "a golden of its own was made"
    )
    study.conclude(model.decoder)
    said = capsys.readouterr().out
    assert "a stand-in for Core ML, which measures nothing, on CPU_ONLY" in said
    assert "too small for the Neural Engine" in said


def test_without_those_parameters_a_portable_grid_is_what_it_was(study):
    # the keys of cells stand on them
    axes = {"runtime": ["auto"], "compute_units": ["CPU_AND_NE"]}
    assert study.axes("data/tiny-llama") == axes
    with pytest.raises(InputError, match="compute units"):
        Study("29", {"COMPUTE_UNITS": "ANE"}).how("data/tiny-llama")
