"""Every stated answer follows from the text alone, without the generator's bookkeeping."""

import json
import re
from pathlib import Path

import corpus
import pytest

TASKS = {"heldout": corpus.DISTANCES, "latest": corpus.LATEST}


def answer_from_text(prompt: str) -> str:
    """Computes the answer from the text of a prompt, without the generator's tables of pending
    questions."""
    before, end, words = prompt.rpartition(corpus.END)
    before += end
    words = re.sub(rf"^( *{corpus.HUM})*", "", words).split()
    if words[0] == "get":
        return re.findall(rf"set {words[1]} (\w+) ;", before)[-1]
    if words[0] == "echo":
        return re.findall(r"say ([^;]+) ;", before)[-1]
    if words[0] == "the":
        verb = corpus.VERB_OF.get(words[1])
        return verb or corpus.VERB_OF[words[1] + "s"] + "s"
    a, b = "".join(words).rstrip("=").split("+")
    assert (3 * int(a) + 5 * int(b)) % 8 == 0  # sums that no training document has
    return " ".join(f"{int(a) + int(b):03}")


@pytest.mark.parametrize("name", TASKS)
def test_the_committed_questions_are_generated_and_have_the_stated_answers(name):
    path = Path(corpus.__file__).parent / "tasks" / f"{name}.jsonl"
    rows = map(json.loads, path.read_text().splitlines())
    committed = [corpus.Question(**row) for row in rows]
    assert committed == corpus.held_out(TASKS[name])
    for question in committed:
        assert question.answer == answer_from_text(question.prompt)
        assert len(question.prompt.split()) < 500
    assert {(question.task, question.distance) for question in committed} == {
        (task, distance) for task, some in TASKS[name].items() for distance in some
    }
