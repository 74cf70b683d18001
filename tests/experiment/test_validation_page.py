"""The page of a bundle shows what was measured; names, prompts and tokens arrive as they are."""

from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest
from bs4 import BeautifulSoup
from hypothesis import example, given, settings
from hypothesis import strategies as some
from markdown_it import MarkdownIt

from workbench.check.gates import Gate, not_run, quality_at_most
from workbench.check.record import (
    CostFigures,
    Environment,
    Kl,
    PromptFigures,
    Record,
    ReferenceFigures,
    Results,
    Setup,
    TranscriptFigures,
    TriedPresets,
)
from workbench.errors import visible
from workbench.experiment import page
from workbench.experiment.validation import draw_errors, validation_page

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
            quality_at_most("max_kl", 0.2, 0.05, "mean KL"),
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
    rows = [[cell.text for cell in row("td")] for row in soup("tr") if row("td")]
    verdicts = {row[0]: row[1] for row in rows if row[0] in ("budget", "max_kl")}
    assert verdicts == {"budget": "✗ RED", "max_kl": "– not judged"}


def test_the_name_of_a_shard_at_the_beginning_of_a_reason_is_not_capitalised(record):
    reason = "layers_01_01: model.layers.1.mlp.up_proj.weight: wrong"
    red = Gate("weights", "RED", 9.0, 1.0, reason)
    results = replace(record.results, verdict="RED", gates=[red])
    text = read(replace(record, results=results)).text
    assert f"weights: {reason}." in text and "Layers_01_01" not in text
    reason = "layers_01_01 has no program"
    missing = replace(not_run("weights", reason), applies=True)
    results = replace(record.results, verdict="not_run", gates=[missing])
    assert f"weights: {reason}." in read(replace(record, results=results)).text


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


TOKENS = ["<bos>", "the", "owl"]


@pytest.fixture(scope="module")
def measured(record) -> Record:
    """A validation with the rows of two layers, whose first token is an attention sink:
    the smallest cosine lies there, and the largest error over rounding does not."""
    cells = pd.MultiIndex.from_product([(1, 2, 3), range(2), range(3)])
    rows = cells.to_frame(index=False, name=["T", "layer", "position"])
    rows = rows.assign(tensor="update", mode="isolated", error=0.01, budget=0.01)
    rows = rows.assign(cosine=1 - 1.23456e-5, ratio=1.0, finite=True, routing_tie=False)
    sink = rows["layer"].eq(1) & rows["position"].eq(0)
    rows.loc[sink, ["cosine", "error", "budget"]] = [0.9, 0.4, 0.4]
    rows.loc[rows["position"].eq(2) & rows["T"].eq(3), ["error", "ratio"]] = [0.02, 2.0]
    rows = rows.assign(over_rounding=rows["ratio"], max_abs=0.1, digest=1)
    cost = CostFigures(
        Kl(0.2, 0.1, 0.4, 0.5),
        0.9,
        ReferenceFigures(Kl(0.19, 0.1, 0.4, 0.5)),
        ReferenceFigures(Kl(2e-5, 1e-5, 4e-5, 5e-5)),
    )
    budget = Gate("budget", "GREEN", 1.25, 6.0, "error")
    results = replace(
        record.results,
        gates=[*record.results.gates, budget],
        cost=cost,
        min_cosine=0.9,
        mean_cosine=0.99,
    )
    return replace(record, results=results, tokens=TOKENS, rows=rows)


def test_the_page_begins_with_its_answer_the_heatmap_and_the_cost(measured):
    soup = read(measured)
    headings = [heading.text for heading in soup("h2")]
    assert headings[:3] == ["Where the error lies", "Cost", "What was run"]
    sentence = soup.p.text
    assert sentence == (
        "No gate found a fault in the export (GREEN), whose worst layer errs by 1.25 times "
        "what rounding causes (RMS over positions; limit 6), and its cost is above your limits (OVER): mean KL "
        "0.2 (limit 0.05)."
    )
    assert sentence in page.markdown(validation_page(measured)).replace("\\", "")
    red = replace(measured.results, verdict="RED")
    red.gates[0] = replace(red.gates[0], verdict="RED")
    faulty = read(replace(measured, results=red)).p.text
    assert "faulty (RED: interface), and its cost is not judged" in faulty
    stated = read(replace(measured, is_noted=False))
    assert "The bundle states: " in stated.text


def test_wrong_weights_are_named_before_the_cells_which_cannot_show_them(measured):
    tensor = "model.layers.1.mlp.up_proj.weight"
    red = Gate("weights", "RED", 9.0, 1.0, f"layers_01_01: {tensor}: wrong")
    results = replace(measured.results, verdict="RED")
    results = replace(results, gates=[*measured.results.gates, red])
    text = read(replace(measured, results=results)).text
    section = text.partition("Where the error lies")[2].partition("Cost")[0]
    assert section.strip().startswith("The stored weights are wrong")
    assert section.index(tensor) < section.index("The cells whose error is the largest")
    assert "cannot show a fault of the weights" in section
    assert "the cost of the stored weights, which are wrong" in text
    assert "the cost of compression" not in text
    right = read(measured).text
    assert "the cost of compression" in right and "weights are wrong" not in right


@pytest.mark.parametrize(
    ("command", "source"),
    [
        (["--golden", "g.golden"], "the text of the golden g.golden"),
        (["--text", "novel.txt", "--tokens", "3"], "the file novel.txt"),
        (["--prompt-ids", "1,2,3"], "the ids of --prompt-ids"),
        (["--prompt", "the owl"], "the text of --prompt"),
        ([], "random ids, since the bundle has no tokenizer"),
    ],
)
def test_the_page_says_of_which_text_the_tokens_are(measured, command, source):
    record = replace(measured, setup=replace(measured.setup, command=command))
    text = read(record).text
    prompt = f"3 tokens of {source}, “<bos> the owl”"
    assert text.count(prompt) == 2  # below the cost, and under What was run
    assert f"KL from Hugging Face's logits over {prompt}, layers in a row." in text


def test_tokens_that_have_their_spaces_are_joined_as_they_are(measured):
    record = replace(measured, tokens=["A", "·fer", "ry·"])
    assert "“A ferry”" in read(record).text


def test_both_panels_of_the_page_s_figure_have_a_title(measured):
    titles = [ax.get_title(loc="left") for ax in draw_errors(measured).axes[:2]]
    assert titles == [
        "Size: error over what rounding causes",
        "Direction: 1 − cosine from Hugging Face's",
    ]


def test_the_caption_says_which_panel_judges_and_where_the_cosine_is_smallest(measured):
    soup = read(measured)
    caption = soup.figcaption.text
    assert "worst of T = 1 to 3 tokens in a call" in caption
    assert (
        "Upper panel: the error over what rounding causes. This panel judges" in caption
    )
    assert "Lower panel: 1 − cosine, which judges nothing" in caption
    place = "0.90000 (1 − cosine 0.1): layer 1, token 0 “<bos>”, T = 1"
    assert f"The smallest cosine is {place}" in caption
    # Markdown has no drawing, and names the place too
    assert "token 0" in page.markdown(validation_page(measured))
    without = measured.rows.assign(budget=float("nan"), ratio=float("nan"))
    caption = read(replace(measured, rows=without)).figcaption.text
    assert "panel" not in caption and "1 − cosine. It judges nothing" in caption


def test_the_worst_cells_have_the_digits_of_a_cosine_near_1(measured):
    worst, *_ = read(measured)("table")
    names = [cell.text for cell in worst("th")]
    first = [cell.text for cell in worst("tr")[1]("td")]
    row = dict(zip(names, first))
    assert (row["1 − cosine"], row["error over rounding"]) == ("1.2×10⁻⁵", "2")
    assert "cosine" not in row and row["token"] == "owl"


def test_a_cost_that_was_not_measured_says_so(measured):
    def cells(record) -> list[str]:
        table = read(record)("table")[1]
        return [cell.text for cell in table("tr")[1]("td")]

    assert cells(measured) == ["mean", "0.2", "0.19", "2×10⁻⁵"]
    alone = replace(measured.results.cost, budget=None, rounding=None)
    results = replace(measured.results, cost=alone)
    shown = cells(replace(measured, results=results))
    assert shown == ["mean", "0.2", "not measured", "not measured"]


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
