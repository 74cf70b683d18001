"""Tasks: a file of them is read line by line, and what is wrong with it is named; then the gate on the
answers, which asks only a model that was trained on the tasks."""

import json
import os
import shutil
from types import SimpleNamespace

import pytest
from refusal import refused

from workbench import paths
from workbench.check import tasks as answers
from workbench.check.tasks import load_tasks
from workbench.models.checkpoint import Checkpoint

TASK = {"task": "add", "distance": 0, "prompt": "2 + 3 =", "answer": "5"}
GOOD = json.dumps(TASK)


def without(name):
    return json.dumps({key: value for key, value in TASK.items() if key != name})


@pytest.mark.parametrize(
    "text, problem",
    [
        (f"{GOOD}\n{{", "line 2, which is no JSON"),
        (f"{GOOD}\n\n[1]", "line 3, no object"),
        (without("answer"), "line 1 without answer"),
        (json.dumps(TASK | {"prompt": 5}), "line 1 with prompt 5"),
        (f"{GOOD}\n" + "[" * 100_000, "line 2, which is no JSON"),
        (" \n", "no line"),
    ],
)
def test_the_first_faulty_line_is_named(tmp_path, text, problem):
    path = tmp_path / "tasks.jsonl"
    path.write_text(text)
    with refused(f"tasks .*found {problem}"):
        load_tasks(path)


def test_a_file_that_cannot_be_read_is_named_as_what_it_is(tmp_path):
    with refused("no such file"):
        load_tasks(tmp_path / "none")
    with refused("found a folder"):
        load_tasks(tmp_path)
    (tmp_path / "latin").write_bytes("ä".encode("latin-1"))
    with refused("not UTF-8"):
        load_tasks(tmp_path / "latin")
    os.mkfifo(tmp_path / "pipe")
    with refused("no such file|a pipe"):
        load_tasks(tmp_path / "pipe")


def test_a_file_of_tasks_is_its_lines(tmp_path):
    (tmp_path / "t").write_text(f"\n{GOOD}\n{GOOD}\n", encoding="utf-8")
    assert load_tasks(tmp_path / "t") == [TASK, TASK]


# --- the gate on the answers -----------------------------------------------------------------------


def test_a_bundle_of_a_batch_answers_too(tiny_llama, exports, monkeypatch):
    tasks = answers.load_tasks(tiny_llama.path.parent / "tasks" / "heldout.jsonl")[:2]
    monkeypatch.setattr(answers, "golden_answers", lambda *_: [True, True])
    decoder = exports.decoder(tiny_llama.path, max_seq_len=128, batch=2)
    assert answers.answers_gate(decoder, tiny_llama, tasks).verdict == "WITHIN"


@pytest.mark.parametrize("answer", ["5", "[5]", '"5", "prompt": null'])
def test_tasks_whose_texts_are_none_are_refused(answer, tmp_path):
    path = tmp_path / "tasks.jsonl"
    fields = '"task": "a", "distance": 0, "prompt": "2 + 3 ="'
    path.write_text(f'{{{fields}, "answer": {answer}}}')
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
    user_tasks = tmp_path / "own.jsonl"
    user_tasks.write_text(
        '{"task": "a", "distance": 1, "prompt": "2 +", "answer": "3"}'
    )
    *_, tasks_given = answers.trained_answers_gate(None, Checkpoint(folder), user_tasks)
    assert [task["answer"] for task in tasks_given] == ["3"]


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
