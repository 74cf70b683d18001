"""A gate exists only once a planted fault has turned it RED: every fault is caught, by the gate
that is named for it, and no sound bundle is RED.

Here each fault meets that gate alone, in fp16; `make prove` plants each in every preset and asks
every gate.
"""

import json
import shutil
from types import SimpleNamespace

import cases
import numpy as np
import prove
import pytest
from copies import Copy
from registry import FAULTS

from workbench import Bundle
from workbench.check import tasks as answers
from workbench.check.validate import BUG_GATES, bug_gates
from workbench.models.checkpoint import Checkpoint

CLEAN = [case for case in cases.sound_cases() if case.startswith("clean/")]
DRAWS = np.random.default_rng(2).choice(CLEAN, 2).tolist()
SOUND = [
    *(f"base/{name}/fp16" for name in cases.BASES),
    *("massive/-/lut4", "deep/-/int8-tensor", *DRAWS),
]


@pytest.mark.matrix(2, wide=8)
@pytest.mark.parametrize("case", SOUND)
def test_no_sound_bundle_is_red(case, exports):
    found = cases.record(exports, case)
    assert not prove.fails(found), found["error"] or found["red"]


@pytest.mark.matrix(24, wide=60)
@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_caught_by_the_gate_named_for_it(name, exports):
    gate = FAULTS[name].gate
    (ask,) = (ask for names, ask in cases.STEPS.items() if gate in names)
    with cases.subject(exports, f"{name}/fp16") as faulty:
        verdicts = {found.name: found.verdict for found in ask(faulty)}
    assert verdicts[gate] == "RED"


def test_every_gate_has_a_fault():
    assert {*BUG_GATES, "budget"} <= {fault.gate for fault in FAULTS.values()}


def test_a_fault_that_one_gate_alone_shows_is_planted_for_that_gate():
    """So that the tests above name each with its gate; those that `make prove` found."""
    kinds, alone = {"files": "disk", "memory": "memory"}, {}
    for line in prove.TABLES.read_text().splitlines():
        row = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(row) == 5 and row[1] in kinds and "," not in row[4]:
            alone[f"{kinds[row[1]]}/{row[0].replace(' ', '_')}"] = row[4].strip("`")
    assert alone == {name: FAULTS[name].gate for name in alone} != {}


def test_a_fault_meets_every_gate(exports):
    found = cases.record(exports, "disk/rms_epsilon_times_100/fp16")
    asked = [gate["name"] for gate in found["gates"]]
    assert asked == [name for names in cases.STEPS for name in names]
    assert {"program", "budget"} <= {*found["red"]}
    assert not {"interface", "weights", "undo"} & {*found["red"]}


def test_a_sealed_copy_is_the_bundle_until_it_is_edited(exports, tmp_path):
    source, _ = cases.unharmed(exports, "base/llama/fp16")
    copy = Copy(source, tmp_path / "copy")
    identity = Bundle.open(source).identity
    assert Bundle.open(copy.seal()).identity == identity
    copy.weight("layers.1.mlp.up_proj.weight").scale(0.5)
    assert Bundle.open(copy.seal()).identity != identity


def record(case: str, *gates: tuple, error: str | None = None) -> dict:
    """A stored case; gates as (name, verdict, value, limit)."""
    names = ("name", "verdict", "value", "threshold")
    gates = [dict(zip(names, gate, strict=True)) for gate in gates]
    red = [gate["name"] for gate in gates if gate["verdict"] == "RED"]
    return {"case": case, "red": red, "error": error, "gates": gates}


GREEN, RED = ("program", "GREEN", 2e-6, 1e-5), ("weights", "RED", 5.005, 1.001)


def test_a_case_fails_when_a_fault_is_green_a_sound_bundle_red_or_a_gate_broken():
    assert not prove.fails(record("clean/3/fp16", GREEN))
    assert not prove.fails(record("disk/keys_times_1_2/fp16", RED))
    assert prove.fails(record("clean/3/fp16", RED))
    assert prove.fails(record("disk/keys_times_1_2/fp16", GREEN))
    assert prove.fails(record("disk/keys_times_1_2/fp16", RED, error="broke"))


def test_tables_show_the_margins_of_each_gate_and_how_many_cases_ran():
    made = record("clean/3/fp16", GREEN), record("disk/keys_times_1_2/lut4", GREEN, RED)
    tables = prove.tables({each["case"]: each for each in made})
    rows = [[cell.strip() for cell in line.split("|")] for line in tables.splitlines()]
    mildest = "5 (disk/keys times 1 2/lut4)"
    assert ["", "`weights`", "1.001", "–", mildest, "1", "1", ""] in rows
    assert ["", "keys times 1 2", "files", "1 of 1", "5", "`weights`", ""] in rows


# --- what the checkpoint itself has, which no comparison with it can show --------------------------


def test_a_wrong_rope_that_golden_and_bundle_share_shows_only_in_the_answers(
    tiny_llama, tmp_path, exports
):
    folder = shutil.copytree(tiny_llama.path, tmp_path / "wrong-rope")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 3.0
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint = Checkpoint(folder)
    tasks = answers.load_tasks(tiny_llama.path.parent / "tasks" / "heldout.jsonl")[::6]
    bundle = exports.bundle(folder, max_seq_len=128)
    assert {g.verdict for g in bug_gates(bundle, checkpoint)} == {"GREEN"}
    sound = answers.golden_answers(tiny_llama, tasks)
    assert sum(answers.golden_answers(checkpoint, tasks)) < sum(sound) / 2


def test_a_model_that_knows_no_answer_is_not_judged_by_its_answers(
    tiny_llama, monkeypatch
):
    tasks = answers.load_tasks(tiny_llama.path.parent / "tasks" / "heldout.jsonl")[:3]
    monkeypatch.setattr(
        answers, "golden_answers", lambda _, tasks: [False] * len(tasks)
    )
    decoder = SimpleNamespace(options=SimpleNamespace(max_seq_len=128))
    gate = answers.answers_gate(decoder, tiny_llama, tasks)
    assert gate.verdict == "not_run" and "none of the 3 questions" in gate.reason
