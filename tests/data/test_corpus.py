"""Every stated answer is found again from the text alone, without the generator's bookkeeping."""

import json
import random
import re
from pathlib import Path

import corpus
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


def answer_from_text(prompt: str) -> str:
    """The answer that a careful reader gives, written without the generator's tables of pending
    questions."""
    before, end, asked = prompt.rpartition(corpus.END)
    before += end
    asked = re.sub(rf"^( *{corpus.HUM})*", "", asked).split()
    if asked[0] == "get":
        return re.findall(rf"set {asked[1]} (\w+) ;", before)[-1]
    if asked[0] == "echo":
        return re.findall(r"say ([^;]+) ;", before)[-1]
    if asked[0] == "the":
        subject = asked[1]
        return (
            corpus.VERB_OF[subject]
            if subject in corpus.VERB_OF
            else corpus.VERB_OF[subject + "s"] + "s"
        )
    a, b = "".join(asked).rstrip("=").split("+")
    return " ".join(f"{int(a) + int(b):03}")


def distance_from_text(asked: corpus.Question) -> int:
    """Tokens from the deciding word to the first answer token."""
    words = asked.prompt.split()
    first = asked.answer.split()[0]
    if asked.task in ("recall", "latest"):
        return len(words) - (len(words) - 1 - words[-2::-1].index(words[-1]))
    if asked.task == "copy":
        return len(words) - (words.index("say") + 1 + asked.answer.split().index(first))
    statement = len(words) - words[::-1].index(corpus.END) if corpus.END in words else 0
    statement += next(
        i for i, word in enumerate(words[statement:]) if word != corpus.HUM
    )
    return len(words) - (statement + (asked.task == "grammar"))


def test_one_word_means_one_thing():
    assert len(set(corpus.VOCABULARY)) == len(corpus.VOCABULARY) == 256


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    length=st.integers(16, 512),
    again=st.sampled_from([0, 0.5]),
)
def test_every_answer_of_a_document_follows_from_the_words_before_it(
    seed, length, again
):
    words, answers = corpus.document(random.Random(seed), length, again)
    assert (
        len(words) == len(answers) == length
        and words[0] == corpus.BOS
        and words[-1] == corpus.EOS
    )
    for start in (i for i in range(length - 2) if answers[i] and not answers[i - 1]):
        stop = answers.index(False, start)
        if words[start - 1] != "bye":
            assert " ".join(words[start:stop]) == answer_from_text(
                " ".join(words[1:start])
            )


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    cell=st.sampled_from(
        [(t, d) for t, ds in (corpus.DISTANCES | corpus.LATEST).items() for d in ds]
    ),
)
def test_a_question_has_the_stated_answer_and_distance(seed, cell):
    asked = corpus.question(random.Random(seed), *cell)
    assert asked.answer == answer_from_text(asked.prompt)
    assert (asked.task, asked.distance) == cell and distance_from_text(
        asked
    ) == asked.distance
    assert len(asked.prompt.split()) < 500


@given(seed=st.integers(0, 2**32))
def test_sums_asked_are_never_sums_trained(seed):
    trained, asked = (
        corpus.addition(random.Random(seed)),
        corpus.addition(random.Random(seed), held_out=True),
    )
    (a, b), (c, d) = (("".join(s.ask).rstrip("=").split("+")) for s in (trained, asked))
    assert (3 * int(a) + 5 * int(b)) % 8 != 0 == (3 * int(c) + 5 * int(d)) % 8


@pytest.mark.parametrize(
    "name, tasks", [("heldout", corpus.DISTANCES), ("latest", corpus.LATEST)]
)
def test_the_committed_questions_are_the_generated_ones(name, tasks):
    path = Path(corpus.__file__).parent / "tasks" / f"{name}.jsonl"
    committed = [json.loads(line) for line in path.read_text().splitlines()]
    assert [corpus.Question(**row) for row in committed] == corpus.held_out(tasks)
    assert {(q["task"], q["distance"]) for q in committed} == {
        (task, distance) for task, distances in tasks.items() for distance in distances
    }
