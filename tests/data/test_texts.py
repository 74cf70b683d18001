"""The texts for calibration and for selection share no passage with each other, nor with
the texts on which models are measured."""

import re
from itertools import combinations
from pathlib import Path

import pytest

from workbench.check.text import paragraphs, task_text
from workbench.decode.tokenizer import encode_text

ROOT = Path(__file__).parents[2]
DATA = ROOT / "data"
REAL = DATA / "smollm2-135m-instruct"
# words and signs in a row; 64 tokens of any text hold more of them
PASSAGE = 16
# a shorter sentence may occur twice by chance
SENTENCE = 40


def texts() -> dict[str, str]:
    """Every text that calibrates, selects or measures, and every page of prose."""
    result = {
        name: (DATA / name).read_text(encoding="utf-8")
        for name in (
            "calibration.txt",
            "selection.txt",
            "prompts.jsonl",
            "tasks/heldout.txt",
        )
    }
    result["paragraphs"] = paragraphs()
    result["tasks"] = task_text()
    for page in (ROOT / "README.md", *DATA.glob("*.md"), *ROOT.glob("docs/*.md")):
        result[page.name] = page.read_text(encoding="utf-8")
    return result


def pieces(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text.lower())


def passages(text: str) -> set[tuple[str, ...]]:
    words = pieces(text)
    return {tuple(words[i : i + PASSAGE]) for i in range(len(words) - PASSAGE + 1)}


def sentences(text: str) -> set[str]:
    parts = re.split(r"(?<=[.!?])\s+|\n+", text)
    return {part.strip().lower() for part in parts if len(part.strip()) >= SENTENCE}


def pairs():
    """Pairs of texts of which at least one calibrates or selects."""
    names = texts()
    used = {"calibration.txt", "selection.txt"}
    return [pair for pair in combinations(names, 2) if used & set(pair)]


@pytest.mark.parametrize("split", [passages, sentences])
def test_no_passage_or_sentence_is_in_two_texts(split):
    parts = {name: split(text) for name, text in texts().items()}
    shared = {pair: parts[pair[0]] & parts[pair[1]] for pair in pairs()}
    assert not {pair: both for pair, both in shared.items() if both}


def test_a_shared_passage_would_be_noticed():
    quoted = " ".join(pieces(paragraphs())[100 : 100 + 2 * PASSAGE])
    assert passages(paragraphs()) & passages(f"Someone wrote: {quoted}, and left.")


@pytest.mark.parametrize("name", ["calibration.txt", "selection.txt"])
def test_a_text_does_not_repeat_itself(name):
    words = pieces(texts()[name])
    assert len(passages(texts()[name])) == len(words) - PASSAGE + 1


@pytest.mark.parametrize(
    "name, tokens", [("calibration.txt", 8192), ("selection.txt", 2048)]
)
def test_a_text_is_long_enough(name, tokens):
    text = texts()[name]
    # English and code take at most 4.6 letters for a token of a large vocabulary
    assert len(text) >= 4.6 * tokens
    if (REAL / "tokenizer.json").is_file():
        assert len(encode_text(REAL, text)) >= tokens
