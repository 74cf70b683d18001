"""Every number of an Answer that a claim covers is computed again, and a changed one is
named."""

import json
import re

import audit_answers
import numpy as np
import pandas as pd
import pytest
from experiment.test_notebooks import answer, stored
from tiny import ROOT

from workbench.check import stream
from workbench.check.cost import describe_cost
from workbench.explain import error

pytestmark = pytest.mark.wide
REPORTS = sorted((ROOT / "experiments").glob("*/run.json"))
NUMBERS = {path.parent.name[:2]: path.parent for path in REPORTS}


def read_report(number: str) -> tuple[str, dict[str, pd.DataFrame]]:
    folder = NUMBERS[number]
    tables = {
        f"{path.parent.name}/{path.stem}": pd.read_parquet(path)
        for path in folder.glob("*/*.parquet")
    }
    return json.loads((folder / "run.json").read_text())["conclusion"], tables


def change_number(text: str) -> str:
    """A number of the same form, far enough from it that no rounding hides the step."""
    value, percent = float(text.replace(",", "").rstrip("%")), "%" * text.endswith("%")
    return f"{value * 1.5 + 1:.6g}{percent}"


@pytest.mark.parametrize("number", sorted(audit_answers.CLAIMS))
def test_published_answers_hold_and_every_changed_number_is_named(number):
    answer, tables = read_report(number)
    check = audit_answers.check_sentences(number, answer, tables)
    assert check.findings == [] and check.count > 0
    assert check.unclaimed == []
    for claim in audit_answers.CLAIMS[number]:
        match = re.search(claim.pattern, answer)
        if not match:
            continue  # an Answer leaves out what did not happen
        for name, text in audit_answers.printed_numbers(match).items():
            start, end = match.span(name)
            changed = answer[:start] + change_number(text) + answer[end:]
            check = audit_answers.check_sentences(number, changed, tables)
            labels = {finding.label for finding in check.findings}
            assert claim.label in labels, match[0]


@pytest.mark.parametrize("number", ["05", "30", "31", "32", "35"])
def test_every_measured_number_of_an_answer_as_its_notebook_words_it_is_claimed(number):
    """Of the shipped tables, whose published Answers may have earlier words. The tables of
    33 have texts in the place of numbers."""
    _, tables = read_report(number)
    names = stored(number, NUMBERS[number])
    if number == "35":  # whose shipped table may lack a column of later ones
        tables["tables/choices"] = names["table"]
    words = answer(number, names)
    check = audit_answers.check_sentences(number, words, tables)
    assert check.findings == [] and check.unclaimed == []


def test_a_measured_number_of_a_sentence_that_no_claim_knows_is_named():
    words = (
        "It takes 0.0046 nats, at most your limit of 0.05, in 7 of 30 layers. "
        "12.5% of 1.5e-06 lie there; the model writes “3.5 apples”, and a value is 22,547.5."
    )
    check = audit_answers.check_sentences("05", words, {})
    assert check.unclaimed == ["0.0046", "12.5%", "1.5e-06", "22,547.5"]
    assert check.findings == [] and check.count == 0


def test_a_cost_is_audited_with_three_columns_and_with_two():
    """A report of before the third column has the stored weights as `rounding alone`."""
    cost = pd.DataFrame({"KL (nats)": ["mean"], "bundle": [0.00456]})
    three = cost.assign(**{"stored weights": 0.00446, "fp16 rounding alone": 4.56e-6})
    two = cost.assign(**{"rounding alone": 0.00446})
    old = (
        "Rounding alone causes a mean KL of 0.00446 nats, beside 0.00456 of the bundle."
    )
    new = describe_cost(three)
    for words, table, count in ((new, three, 3), (old, two, 2)):
        for changed, found in (
            (words, []),
            (words.replace("0.00446", "0.00546"), ["0.00546"]),
        ):
            check = audit_answers.check_sentences("31", changed, {"tables/cost": table})
            assert check.count == count
            assert [finding.actual for finding in check.findings] == found


def layer_shares() -> pd.DataFrame:
    """Four layers; precision is the largest part in one of them."""
    rows = [
        (0, 0.5, 0.9, 0.1),
        (1, 0.3, 0.4, 0.6),
        (2, 0.15, 0.8, 0.2),
        (3, 0.05, 1, 0),
    ]
    return pd.DataFrame(rows, columns=["layer", "share", "quantization", "precision"])


def token_shares() -> pd.DataFrame:
    """Three tokens, the first of which carries most of the error."""
    columns = {"position": [0, 1, 2], "token": ["The", "·ferry", "·to"]}
    return pd.DataFrame(columns | {"share": [0.948, 0.04, 0.012]})


def shares() -> pd.DataFrame:
    """Two parts, whose cross terms make up 2%."""
    names = ["quantization", "precision"]
    return pd.DataFrame([[0.72, 0.01], [0.01, 0.26]], names, names)


def largest_token(scale: float = 1.0) -> pd.DataFrame:
    """A stream of two layers, as its report is written and read, of a bundle that stores it
    divided by `scale`."""
    rows = [(0, 2.0, 9.0, 0.01, 5.0, 5.0, 1e-4, 2e-3, 0.1)]
    rows += [(1, 180.0, 22500.0, 16.0, 22500.0, 22495.0, 0.4, 2e-3, 0.5)]
    columns = [stream.MULTIPLE, stream.LARGEST, stream.STEP, stream.VALUE, stream.ADDED]
    columns += [stream.MOVED, stream.OTHERS_MOVED, stream.ATTENTION]
    table = pd.DataFrame(rows, columns=["layer", *columns])
    table.attrs = {"position": 0, "token": "<bos>", "channel": 7, "even": 0.07}
    table.attrs["stream_scale"] = scale
    return table


JUDGED = pd.DataFrame(
    {"bundle": ["mixed"], "tokens": [732], "windows": [9], "kl_mean": [0.0356]}
).assign(
    kl_p99=0.205, perplexity_ratio=1.04, ratio_low=1.02, ratio_high=1.06, same_top=0.857
)
THIRD_TEXT = (
    "On 732 tokens of a third text mixed has a mean KL of 0.0356. Its perplexity is 1.040 "
    "times Hugging Face's (95% interval 1.020 to 1.060, from 9 windows)."
)
HELD_OUT = THIRD_TEXT.replace(
    "text mixed has",
    "text, held out (`workbench/check/paragraphs.txt`), mixed (calibrated) has",
)
OLD_THIRD_TEXT = (
    "On 732 tokens of a third text mixed has a mean KL of 0.0356, 99% below 0.205, 1.040 "
    "times Hugging Face's perplexity (95% interval 1.020 to 1.060, from 9 windows), and "
    "the same top token in 85.7%."
)

ROUNDS = pd.DataFrame(
    {"form": "bundle", "attention": [0.89, 0.89], "probe: q_proj, o_proj": 0.11}
).assign(rest=[0.75, 0.79])
PROBE = (
    "In 2 rounds the probe's two projections take 11.0% of the milliseconds of the "
    "attention's operations and 6.1% to 6.3% of those of all operations."
)
"""One range whose ends print equal, and one whose ends do not."""

EDGES = pd.DataFrame({"worst difference": [1e-7, 3e-7]})
TIMES = pd.DataFrame({"cache": ["cold", "hot"], "context": 64, "ms": [10.0, 2.0]})
CELLS = (
    "Yes. 4 of 4 cells give the logits of the same sequence alone. The worst relative "
    "difference of the logits is 3e-07. In exact arithmetic a hot cache gives the first token "
    "of the random Llama after 64 tokens 5 times as fast as a cold one (medians; rounds: 3)."
)
OLD_CELLS = CELLS.replace("as fast as", "faster than")

OLD_LAYERS = (
    "The layers that carry most are 0 (50.0%), 1 (30.0%), 2 (15.0%), together 95.0%, where "
    "even shares would be 75.0% together. By layer, quantization is the largest part in 3 of "
    "4; its unweighted mean share over layers is 77.5%."
)
"""As reports of before have it."""


@pytest.mark.parametrize(
    ("number", "sentence", "table", "count"),
    [
        (
            "31",
            error.describe_layers(layer_shares(), "quantization"),
            {"tables/layer_shares": layer_shares()},
            7,
        ),
        ("31", OLD_LAYERS, {"tables/layer_shares": layer_shares()}, 8),
        (
            "31",
            error.describe_largest(shares(), layer_shares(), token_shares()),
            {
                "tables/layer_shares": layer_shares(),
                "tables/token_shares": token_shares(),
            }
            | {"tables/shares": shares().rename_axis("part").reset_index()},
            7,
        ),
        (
            "31",
            error.describe_without_token(token_shares(), layer_shares()),
            {"tables/layer_shares_without": layer_shares()},
            3,
        ),
        (  # both stand in the same Answer
            "31",
            error.describe_without_token(token_shares(), layer_shares())
            + "\n"
            + error.describe_layers(layer_shares(), "quantization"),
            {
                "tables/layer_shares_without": layer_shares(),
                "tables/layer_shares": layer_shares(),
            },
            10,
        ),
        (
            "05",
            " ".join(stream.describe_stream(largest_token())),
            {"tables/largest_token": largest_token()},
            11,
        ),
        (
            "05",
            " ".join(stream.describe_stream(largest_token(8.0))),
            {"tables/largest_token": largest_token(8.0)},
            12,
        ),
        ("35", THIRD_TEXT, {"tables/judged": JUDGED}, 6),
        ("35", HELD_OUT, {"tables/judged": JUDGED}, 6),
        ("35", OLD_THIRD_TEXT, {"tables/judged": JUDGED}, 8),
        ("30", PROBE, {"tables/rounds": ROUNDS}, 4),
        ("33", CELLS, {"tables/edges": EDGES, "figures/first_token": TIMES}, 2),
        ("33", OLD_CELLS, {"tables/edges": EDGES, "figures/first_token": TIMES}, 2),
    ],
)
def test_every_number_of_a_new_sentence_is_computed_again(
    number, sentence, table, count
):
    """Of sentences that shipped reports may not have yet, and of their earlier forms."""
    check = audit_answers.check_sentences(number, sentence, table)
    assert check.findings == [] and check.count == count
    assert check.unclaimed == []
    for claim in audit_answers.CLAIMS[number]:
        for match in re.finditer(claim.pattern, sentence):
            for name, text in audit_answers.printed_numbers(match).items():
                start, end = match.span(name)
                wrong = sentence[:start] + change_number(text) + sentence[end:]
                assert audit_answers.check_sentences(number, wrong, table).findings


@pytest.mark.parametrize(
    ("printed", "computed", "right"),
    [
        ("0.034", 0.0336, True),
        ("0.034", 0.0346, False),
        ("98.1%", 0.98133, True),
        ("98.1%", 0.9826, False),
        ("1,602", 1602.4, True),
        ("3.9e-07", 3.93e-7, True),
        ("3.9e-07", 4.1e-7, False),
        ("72", 73, False),
        ("0.5", np.nan, False),
    ],
)
def test_a_number_agrees_where_it_rounds_to_the_printed_digits(
    printed, computed, right
):
    assert audit_answers.agrees(printed, computed) is right
