"""A gate exists only once a planted fault has turned it RED: every fault is caught, by the gate
that is named for it, and no sound bundle is RED.

Here each fault meets that gate alone, in fp16; `make prove` plants each in every preset and asks
every gate.
"""

import shutil
from types import SimpleNamespace

import cases
import numpy as np
import prove
import pytest
from refusal import refused
from registry import FAULTS
from tiny import edit_json

from workbench import paths
from workbench.check import tasks as answers
from workbench.check.validate import BUG_GATES, bug_gates
from workbench.models.checkpoint import Checkpoint

CLEAN = [case for case in cases.sound_cases() if case.startswith("clean/")]
DRAWS = np.random.default_rng(2).choice(CLEAN, 2).tolist()
SOUND = [
    *(f"base/{name}/fp16" for name in cases.BASES),
    *("massive/-/lut4", "deep/-/int8-tensor", *DRAWS),
]


@pytest.mark.slow("exports a bundle and runs every bug gate")
@pytest.mark.matrix(2, wide=4)
@pytest.mark.parametrize("case", SOUND)
def test_no_sound_bundle_is_red(case, exports):
    found = cases.record(exports, case)
    asked = [gate["name"] for gate in found["gates"]]
    assert asked == [name for names in cases.STEPS for name in names], found["error"]
    assert not prove.fails(found), found["red"]


@pytest.mark.slow("exports a bundle and plants a fault")
@pytest.mark.matrix(10, wide=24)
@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_caught_by_the_gate_named_for_it(name, exports):
    gate = FAULTS[name].gate
    (ask,) = (ask for names, ask in cases.STEPS.items() if gate in names)
    with cases.subject(exports, f"{name}/fp16") as faulty:
        verdicts = {found.name: found.verdict for found in ask(faulty)}
    assert verdicts[gate] == "RED"


def test_every_gate_has_a_fault():
    assert {*BUG_GATES, "budget"} <= {fault.gate for fault in FAULTS.values()}


def test_a_case_fails_when_a_fault_is_green_a_sound_bundle_red_or_a_gate_broken():
    for case, red, error in (
        ("clean/3/fp16", ["weights"], None),
        ("disk/keys_times_1_2/fp16", [], None),
        ("disk/keys_times_1_2/fp16", ["weights"], "broke"),
    ):
        assert prove.fails({"case": case, "red": red, "error": error})


# --- what the checkpoint itself has, which no comparison with it can show --------------------------


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


def test_a_bundle_of_a_batch_answers_too(tiny_llama, exports, monkeypatch):
    tasks = answers.load_tasks(tiny_llama.path.parent / "tasks" / "heldout.jsonl")[:2]
    monkeypatch.setattr(answers, "golden_answers", lambda *_: [True, True])
    decoder = exports.decoder(tiny_llama.path, max_seq_len=128, batch=2)
    assert answers.answers_gate(decoder, tiny_llama, tasks).verdict == "GREEN"


@pytest.mark.parametrize("answer", ["5", "[5]", '"5", "prompt": null'])
def test_tasks_whose_texts_are_none_are_refused(answer, tmp_path):
    path = tmp_path / "tasks.jsonl"
    about = '"task": "a", "distance": 0, "prompt": "2 + 3 ="'
    path.write_text(f'{{{about}, "answer": {answer}}}')
    with refused("as text"):
        answers.load_tasks(path)


def test_a_prompt_s_file_that_is_no_text_is_refused(tiny_llama, tmp_path):
    path = tmp_path / "latin1.txt"
    path.write_bytes("Stra\xdfe".encode("latin1"))
    with refused("latin1.txt"):
        answers.prompt_ids(tiny_llama.path, 8, str(path))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda folder: (folder / "evaluation.json").unlink(), "no evaluation.json"),
        # another project's file of this name
        (
            lambda folder: (folder / "evaluation.json").write_text("[0.9]"),
            "no evaluation.json",
        ),
        (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer"),
    ],
)
def test_tasks_are_asked_only_of_a_checkpoint_that_was_trained_on_them(
    tiny_llama, tmp_path, monkeypatch, change, why
):
    tasks = answers.load_tasks(paths.find(answers.TASKS))
    assert answers.untrained(tiny_llama, tasks) == ""
    folder = shutil.copytree(tiny_llama.path, tmp_path / "other")
    change(folder)
    monkeypatch.setattr(answers, "answers_gate", None)
    gate = answers.trained_answers_gate(None, Checkpoint(folder))
    assert gate.verdict == "not_run" and why in gate.reason
    # the user's own tasks are asked whatever the checkpoint was trained on
    monkeypatch.setattr(answers, "answers_gate", lambda *arguments: arguments)
    own = tmp_path / "own.jsonl"
    own.write_text('{"task": "a", "distance": 1, "prompt": "2 +", "answer": "3"}')
    *_, asked = answers.trained_answers_gate(None, Checkpoint(folder), own)
    assert [task["answer"] for task in asked] == ["3"]


def test_tasks_with_words_that_a_tokenizer_lacks_are_not_asked(tiny_llama):
    task = {"task": "a", "distance": 1, "prompt": "set Reykjavik", "answer": "amber"}
    assert "does not know all words" in answers.untrained(tiny_llama, [task])


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
