"""A file of prompts is read line by line; what is wrong with it is named."""

import json
import os

import pytest
from refusal import refused

from workbench.check.tasks import load_tasks

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
