"""Faults of packages and of goldens: what no change of a loaded program can show."""

import json
import shutil
from dataclasses import replace

import pytest

import miltorch
from workbench import Decoder
from workbench.check import checklist
from workbench.check import tasks as answers
from workbench.check.validate import validate
from workbench.models.checkpoint import Checkpoint


def interface(bundle, monkeypatch, change) -> dict[str, str]:
    """Verdicts on the declared interface when every program is read as `change` leaves it."""

    def read(package, *function):
        program = miltorch.read(package, *function)
        change(program)
        return program

    monkeypatch.setattr(
        checklist, "miltorch", type("Reader", (), {"read": staticmethod(read)})
    )
    return {g.name: g.verdict for g in checklist.interface_gates(bundle)}


def test_a_cache_that_is_an_input_is_no_state(llama_bundle, monkeypatch):
    def as_input(program):
        state = program.states.pop("k_state")
        program.inputs["k_state"] = replace(state, kind="tensor")

    assert interface(llama_bundle, monkeypatch, as_input) == {
        "state_shapes": "RED",
        "kv_are_states": "RED",
    }


@pytest.mark.parametrize(
    "wrong", [{"dtype": "FLOAT32"}, {"shape": (1, 2, 31, 32)}], ids=["dtype", "shape"]
)
def test_a_state_of_another_shape_or_dtype_is_red(llama_bundle, monkeypatch, wrong):
    def changed(program):
        program.states["v_state"] = replace(program.states["v_state"], **wrong)

    assert interface(llama_bundle, monkeypatch, changed)["state_shapes"] == "RED"


def test_a_golden_of_another_checkpoint_is_red(llama_bundle, llama_golden):
    other = replace(llama_golden, meta=llama_golden.meta | {"checkpoint": "0" * 64})
    found = {
        g.name: g.verdict
        for g in validate(Decoder(llama_bundle, "portable"), other, (1,)).gates
    }
    assert found["golden_is_of_this_checkpoint"] == "RED"


def test_a_machine_too_small_is_red(llama_bundle):
    assert checklist.fits(llama_bundle, 1 << 10).verdict == "RED"


def test_cache_rows_of_another_golden_are_red(llama_bundle, llama_golden):
    other = replace(llama_golden, k=llama_golden.k[:, :, ::-1])
    assert (
        checklist.cache_contents(Decoder(llama_bundle, "portable"), other).verdict
        == "RED"
    )


def test_a_wrong_rope_that_golden_and_bundle_share_shows_only_in_the_answers(
    tiny_llama, tmp_path, exports
):
    folder = shutil.copytree(tiny_llama.path, tmp_path / "wrong-rope")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 3.0
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint = Checkpoint(folder)
    tasks = answers.load_tasks(tiny_llama.path.parent / "tasks" / "heldout.jsonl")[::6]
    decoder = Decoder(exports.bundle(folder, max_seq_len=128), "portable")
    found = {
        g.name: g.verdict for g in answers.answer_gates(decoder, checkpoint, tasks)
    }
    assert found["golden_answers"] == "RED"
