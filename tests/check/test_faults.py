"""Every planted fault turns the gate RED that its row names, and no sound bundle is RED.

Here only that gate runs, in fp16; `make prove` plants each fault in every preset and runs every
gate.
"""

import shutil

import cases
import numpy as np
import pytest
from cases import Case
from faults import FAULTS
from tiny import edit_json

from workbench import Bundle
from workbench.check import tasks as answers
from workbench.check.bug_gates import BUG_GATES, bug_gates
from workbench.check.distinct import representatives
from workbench.models.checkpoint import Checkpoint

CLEAN = [case for case in cases.sound_cases() if case.kind == "clean"]
SOUND = [
    *(Case("base", name, cases.presets_of(name)[0]) for name in cases.BASES),
    Case("massive", "-", "lut6-g16"),
    Case("deep", "-", "int8-tensor"),
    *(CLEAN[i] for i in np.random.default_rng(2).choice(len(CLEAN), 2)),
]


@pytest.mark.slow("exports a bundle and runs every bug gate")
@pytest.mark.matrix(2, wide=4)
@pytest.mark.parametrize("case", SOUND, ids=str)
def test_no_sound_bundle_is_red(case, exports):
    record = cases.run_case(exports, case)
    names = [gate["name"] for gate in record.gates]
    assert names == cases.GATE_NAMES, record.error
    assert not record.fails, record.red


@pytest.mark.slow("exports a bundle and plants a fault")
@pytest.mark.matrix(10, wide=24)
@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_caught_by_the_gate_named_for_it(name, exports):
    case = Case.parse(f"{name}/{FAULTS[name].first_preset}")
    with cases.open_subject(exports, case) as subject:
        assert cases.run_gate(subject, case.fault.gate).verdict == "RED"


def test_every_gate_has_a_fault():
    assert {*BUG_GATES, "budget"} <= {fault.gate for fault in FAULTS.values()}


@pytest.mark.slow("exports a bundle and plants a fault")
@pytest.mark.matrix(0, wide=16)
@pytest.mark.parametrize("case", cases.relocated_cases(), ids=str)
def test_a_fault_is_caught_in_another_layer_of_the_same_program(case, exports):
    with cases.open_subject(exports, case) as subject:
        assert cases.run_gate(subject, case.fault.gate).verdict == "RED"


@pytest.mark.matrix(1, wide=4)
@pytest.mark.parametrize("base", cases.ALIKE)
def test_layers_that_are_called_alike_have_one_program(base, exports):
    sound = Case("base", base, cases.presets_of(base)[0])
    folder, checkpoint = cases.export_sound(exports, sound)
    first_layers = {
        f"layers_{layers[0]:02}_{layers[0]:02}" for layers in cases.ALIKE[base]
    }
    assert representatives(Bundle.open(folder), checkpoint) == first_layers


SOUND_CASE, FAULTY_CASE = "clean/3/fp16", "disk/keys_times_1_2/fp16"


@pytest.mark.parametrize(
    ("case", "red", "error", "fails"),
    [
        (SOUND_CASE, [], None, False),
        (SOUND_CASE, ["weights"], None, True),
        (SOUND_CASE, [], "broke", True),
        (FAULTY_CASE, ["weights"], None, False),
        (FAULTY_CASE, [], None, True),
        (FAULTY_CASE, ["weights"], "broke", True),
    ],
)
def test_a_case_fails_when_a_fault_is_green_a_sound_bundle_red_or_a_gate_broken(
    case, red, error, fails
):
    record = cases.Record(Case.parse(case), "", red, error, 0.0, gates=[])
    assert record.fails is fails
    assert cases.Record.parse(record.to_line()) == record


# --- a fault of the checkpoint itself, which no comparison with it can show ---


def test_a_wrong_rope_that_golden_and_bundle_share_shows_only_in_the_answers(
    tiny_llama, tmp_path, exports
):
    folder = shutil.copytree(tiny_llama.path, tmp_path / "wrong-rope")
    edit_json(folder / "config.json", ("rope_parameters/rope_theta", 3.0))
    checkpoint = Checkpoint(folder)
    tasks = answers.load_tasks(tiny_llama.path.parent / "tasks" / "heldout.jsonl")[::6]
    bundle = exports.bundle(folder, max_seq_len=128)
    assert {g.verdict for g in bug_gates(bundle, checkpoint)} == {"GREEN"}
    sound = answers.golden_answers(tiny_llama, tasks)
    assert sum(answers.golden_answers(checkpoint, tasks)) < sum(sound) / 2
