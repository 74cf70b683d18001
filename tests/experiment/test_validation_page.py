"""The page of a bundle shows what was measured; names, prompts and tokens arrive as they are."""

from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest
from bs4 import BeautifulSoup
from hypothesis import example, given, settings
from hypothesis import strategies as some
from markdown_it import MarkdownIt

from workbench.check.gates import Gate, not_run, within
from workbench.check.record import (
    Environment,
    PromptFigures,
    Record,
    Results,
    Setup,
    TranscriptFigures,
    TriedPresets,
)
from workbench.errors import visible
from workbench.experiment import page
from workbench.experiment.validation import validation_page

ODD = some.text(
    some.sampled_from("<>&\"'`|*_#\\[]() \n\t\r\0\x1b\u202e\ud800é中😀✗")
    | some.characters()
)


@pytest.fixture(scope="module")
def record(exports) -> Record:
    """A validation with one prompt, whose texts part."""
    bundle = exports.bundle(exports.checkpoint("llama"))
    prompt = PromptFigures(
        "Who?", "The owl sat up", 0.5, 1, True, False, 2, "The owl fell", "the weights"
    )
    results = Results(
        verdict="GREEN",
        quality="OVER",
        gates=[
            Gate("interface", "GREEN", 1.0, 1.0, "as in /home/somebody/bundle/x"),
            within("max_kl", 0.2, 0.05, "mean KL"),
            not_run("device", "needs a Mac"),
        ],
        transcript=TranscriptFigures(0.5, (0.4, 0.6), 1, 0.01, 2.0, [prompt]),
    )
    environment = Environment("a machine", "a system", {"python": "3.11"}, "today")
    command = ["--checkpoint", "CHECKPOINT", "--max-kl", "0.05"]
    setup = Setup(command, {}, {"runtime": "portable"}, environment, 1.0, 1 << 20)
    return Record(bundle, results, setup, [], pd.DataFrame(), True)


def read(record: Record) -> BeautifulSoup:
    return BeautifulSoup(page.html(validation_page(record)), "html.parser")


def test_both_words_the_first_difference_and_the_commands_stand_there(record):
    soup = read(record)
    cards = [card.b.text for card in soup(class_="verdict")]
    assert cards == ["GREEN", "OVER"]
    (texts,) = soup(class_="continuation")
    assert texts.find(class_="reference").text == "sat up"
    assert texts.find(class_="bundle").text == "fell"
    assert "at token 2, cause: the weights" in texts.text
    assert "--max-seq-len" in soup.pre.text and "--max-kl 0.05" in soup.pre.text
    assert "/home/somebody" not in soup.text and "…/x" in soup.text
    assert not soup(["script", "link", "iframe"])
    assert "size: A4" in soup.style.text


def test_a_red_export_withholds_the_quality_and_keeps_the_figures(record):
    red = Gate("budget", "RED", 9.0, 6.0, "error")
    results = replace(record.results, verdict="RED", gates=[*record.results.gates, red])
    soup = read(replace(record, results=results))
    assert [card.b.text for card in soup(class_="verdict")] == ["RED", "not judged"]
    assert "0.2" in soup.text


def test_texts_that_utf_8_cannot_hold_are_written_as_escapes(record):
    """Reasons of gates, causes, labels of tokens and names of presets."""
    odd = "a\ud800"
    (row,) = record.results.transcript.prompts
    results = replace(
        record.results,
        gates=[replace(gate, reason=odd) for gate in record.results.gates],
        transcript=replace(
            record.results.transcript, prompts=[replace(row, cause=odd)]
        ),
        tried=TriedPresets(odd, 1.0, [{"compress": odd, "outcome": "over", "kl": 0.2}]),
    )
    written = validation_page(replace(record, results=results))
    html = page.html(written)
    assert html.count("a\\ud800") >= 5
    page.markdown(written).encode("utf-8", "surrogatepass")
    assert "\ud800" not in html


def squeezed(text: str) -> str:
    return " ".join(text.split())


@settings(deadline=None, max_examples=60)
@given(name=ODD, prompt=ODD, token=ODD)
@example(name="\ud800", prompt="\ud800", token="\ud800")
def test_odd_names_prompts_and_texts_are_read_back(record, name, prompt, token):
    manifest = record.bundle.manifest
    named = SimpleNamespace(
        manifest=manifest.model_copy(update={"checkpoint": {"name": name or "a"}}),
        identity=record.bundle.identity,
        bytes=1,
    )
    row = PromptFigures(
        prompt, "a", 1.0, 0, False, False, 0, f"b{token}", "the program"
    )
    figures = replace(record.results.transcript, prompts=[row])
    odd = replace(
        record, bundle=named, results=replace(record.results, transcript=figures)
    )
    written = validation_page(odd)
    text = page.html(written)
    text.encode()  # a lone surrogate is written as its escape
    soup = BeautifulSoup(text, "html.parser")
    assert squeezed(soup.h1.text) == squeezed(
        visible(f"{name or 'a'} · {manifest.options.compress}")
    )
    texts = soup.find(class_="continuation")
    assert squeezed(texts.b.text) == squeezed(visible(prompt))
    assert squeezed(texts.find(class_="bundle").text) == squeezed(visible(f"b{token}"))
    assert not soup(["script", "img"])
    # Markdown lets no tag through
    rendered = MarkdownIt("gfm-like", {"linkify": False}).render(page.markdown(written))
    assert not BeautifulSoup(rendered, "html.parser")(["script", "img", "a"])
