"""The numbers in the Answers of notebooks 05, 30, 31, 32 and 33, computed again from the
tables and figures that were stored with them.

Every notebook has a list of claims. A claim is a pattern of the Answer's text, whose
groups are the printed numbers, and a function that computes these numbers from the stored
data. Nothing of the package's statistics is used: the formulas are written out here.
`tools/audit.py` calls `check_sentences`; times of notebook 34 are checked there."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from finding import Finding

# rounding to fp16 moves a value by at most 2^-11 of its size
HALF_ULP = 2.0**-11
Tables = dict[str, pd.DataFrame]
"""The stored data of a report by kind and name, such as `figures/fidelity`."""
Compute = Callable[[Tables, re.Match], list[float]]
"""Computes the printed numbers of a sentence, in their order, from the stored data. The named
groups of the match say which data the sentence is about."""


@dataclass(frozen=True)
class Claim:
    """A sentence of an Answer: a pattern whose groups are its printed numbers, and the
    function that computes them."""

    label: str
    pattern: str
    compute: Compute


@dataclass(frozen=True)
class AnswerCheck:
    """The numbers of an Answer beside those of its data."""

    findings: list[Finding]
    count: int
    """The number of those that were computed again."""


def check_sentences(
    notebook: str, answer: str, tables: Tables, place: str = "Answer"
) -> AnswerCheck:
    """Checks the numbers in the Answer of a notebook. A claim whose sentence the Answer
    lacks is skipped: an Answer leaves out what did not happen.

    Args:
        notebook: the two digits of its name.
        answer: the text of the Answer.
        tables: stored data by name, as `figures/fidelity`.
        place: of the findings.
    """
    findings, count = [], 0
    for claim in CLAIMS.get(notebook, []):
        for match in re.finditer(claim.pattern, answer):
            numbers = claim.compute(tables, match)
            printed = printed_numbers(match)
            count += len(numbers)
            for text, number in zip(printed, numbers):
                if not agrees(text, number):
                    computed = f"{number:.6g}"
                    findings.append(Finding(place, claim.label, text, computed))
    return AnswerCheck(findings, count)


def printed_numbers(match: re.Match) -> list[str]:
    """The groups without a name; the named ones identify the data of the numbers."""
    named = set(match.re.groupindex.values())
    groups = enumerate(match.groups(), start=1)
    return [text for place, text in groups if place not in named and text is not None]


def agrees(printed: str, computed: float) -> bool:
    """Whether a number rounds to its printed digits; a last digit may be one off, where
    the stored value lies at the middle of two."""
    text = printed.replace(",", "")
    scale = 0.01 if text.endswith("%") else 1.0
    text = text.removesuffix("%")
    mantissa, _, exponent = text.lower().partition("e")
    decimals = len(mantissa.partition(".")[2])
    last_digit = scale * 10.0 ** (
        int(exponent or 0) - decimals
    )  # what one of it counts
    distance = abs(float(text) * scale - computed)
    return distance <= 0.5000001 * last_digit


# --- notebooks 05 and 31: what compression costs, and fidelity


def error_over_rounding(rows: pd.DataFrame) -> pd.Series:
    """The error over what rounding alone causes: √(budget² + 2⁻²²), the budget and the
    rounding of the result to fp16."""
    return rows["error"] / np.hypot(rows["budget"], HALF_ULP)


def worst_ratio(tables: Tables, match: re.Match) -> list[float]:
    """The worst ratio of the faulty bundle and, where it is printed, of the sound one."""
    T = int(match.group("T"))
    is_late = "late" in match.group("fault")
    rows = tables["figures/write_address" if is_late else "figures/rope"]
    if not rows["T"].eq(T).any():
        # the figure has no calls of one token: by the sentence they are the sound host's
        rows = tables["figures/fidelity"].assign(bundle="one row late")
    tensors = {"an update": "update", "a row of K": "k", "a row of V": "v"}
    tensor = tensors[match.group("tensor")]
    rows = rows[rows["mode"].eq("isolated") & rows["T"].eq(T)]
    rows = rows[rows["tensor"].eq(tensor) & rows["routing_tie"].eq(False)]
    is_sound = rows["bundle"].eq("sound")
    ratios = error_over_rounding(rows)
    worst = [ratios[~is_sound].max()]
    if len(printed_numbers(match)) == 2:
        worst.append(ratios[is_sound].max())
    return worst


def cost(row: str, *columns: str) -> Compute:
    """The KL in nats of these columns in a row of the table `cost`, such as mean."""

    def compute(tables: Tables, match: re.Match) -> list[float]:
        values = tables["tables/cost"].set_index("KL (nats)").loc[row]
        return [values[column] for column in columns]

    return compute


def stream_size(tables: Tables, match: re.Match) -> list[float]:
    """The largest token's RMS over the median token's, and the layer where it is largest."""
    table = tables["tables/largest_token"]
    peak = table.loc[table["times"].idxmax()]
    return [peak["times"], peak["layer"]]


def stream_moved(tables: Tables, match: re.Match) -> list[float]:
    """The largest change of an update, over its size, by rounding of the stream."""
    changes = tables["tables/largest_token"][["update_moved", "others_moved"]]
    return [changes.max().max()]


def sink_share(tables: Tables, match: re.Match) -> list[float]:
    """The share of attention that the largest token receives, and an even share."""
    table = tables["tables/largest_token"]
    return [table["attention"].mean(), table["even"].iloc[0]]


def bundle_text(tables: Tables, match: re.Match) -> list[float]:
    """The share of tokens that a bundle agrees on, and its error over that of rounding."""
    table = tables["tables/verdicts"].set_index("bundle")
    row = table.loc[match.group("bundle")]
    return [row["tokens agreed"], row["error over rounding"]]


def largest_part(tables: Tables, match: re.Match) -> list[float]:
    """Its share of the summed squares, and the share of the cross terms."""
    products = tables["tables/shares"].set_index("part")
    squares = np.diag(products.loc[list(products.columns)])
    return [squares.max() / products.to_numpy().sum(), 1 - squares.sum()]


def reauthoring(tables: Tables, match: re.Match) -> list[float]:
    """The largest part of re-authoring in a layer's update, relative RMS."""
    return [tables["tables/parts"]["reauthoring"].max()]


def largest_layer(tables: Tables, match: re.Match) -> list[float]:
    """The layer whose error is largest over that of rounding; the ratio, and its T."""
    table = tables["tables/ranked"]
    worst = table.loc[table["ratio"].idxmax()]
    return [worst["layer"], worst["ratio"], worst["T"]]


def lower_layers(tables: Tables, match: re.Match) -> list[float]:
    """The number of layers with a lower error once tensors are in fp16, and of all layers."""
    table = tables["tables/remedies"]
    return [(table["fp16"] < table["error"]).sum(), len(table)]


def remedy(tables: Tables, match: re.Match) -> list[float]:
    """The error of one layer as stored, and with its worst tensors in fp16."""
    row = tables["tables/remedies"].set_index("layer").loc[int(match.group("layer"))]
    return [row["error"], row["fp16"]]


# --- notebook 30: the layers, routing and probes of a mixture of experts


def worst_update(tables: Tables, match: re.Match) -> list[float]:
    """Each layer fed Hugging Face's input; near ties of the router do not count."""
    worst = max(
        furthest_update(tables["figures/cosine"], "isolated"),
        tables["tables/prompts"]["worst 1 − cosine"].max(),
    )
    return [worst]


def worst_in_a_row(tables: Tables, match: re.Match) -> list[float]:
    """The same with layers in a row, each fed the one before it."""
    return [furthest_update(tables["figures/cosine"], "chained")]


def furthest_update(rows: pd.DataFrame, mode: str) -> float:
    """The largest 1 − cosine of an update in a mode, without near ties of the router."""
    chosen = rows["tensor"].eq("update") & rows["mode"].eq(mode)
    return 1 - rows.loc[chosen & rows["routing_tie"].eq(False), "cosine"].min()


def free_routing(tables: Tables, match: re.Match) -> list[float]:
    """With the bundle's own choice of experts: the worst 1 − cosine, the number of choices
    that differ, and the number of all choices."""
    free = tables["tables/routers"].iloc[-1]
    return [free["worst 1 − cosine"], free["choices that differ"], free["choices"]]


def seen_ingredients(tables: Tables, match: re.Match) -> list[float]:
    """The figure's bars are decades above the bundle's own worst update."""
    decades = tables["figures/ingredients"]["update"]
    return [decades.gt(0).sum(), len(decades)]


def probe_shares(tables: Tables, match: re.Match) -> list[float]:
    """The probe's share of the attention's ms, least and most over rounds, and its share of
    the ms of all operations, least and most."""
    rounds = tables["tables/rounds"]
    rows = rounds[rounds["form"].eq("bundle")].select_dtypes("number")
    probe = rows["probe: q_proj, o_proj"]
    of_attention = probe / (probe + rows["attention"])
    of_all = probe / rows.sum(axis=1)
    return [of_attention.min(), of_attention.max(), of_all.min(), of_all.max()]


def routed_time(tables: Tables, match: re.Match) -> list[float]:
    """The time of routed experts over that of dense ones: the geometric mean of the rounds'
    ratios."""
    rounds = tables["tables/rounds"]
    dense = rounds.loc[rounds["form"].eq("dense"), "experts"].to_numpy()
    routed = rounds.loc[rounds["form"].eq("routed"), "experts"].to_numpy()
    return [float(np.exp(np.log(routed / dense).mean()))]


def routed_bytes(tables: Tables, match: re.Match) -> list[float]:
    """The bytes of weights that dense experts read over those that routed ones read."""
    by_experts = tables["tables/routing"].set_index("experts")
    kib = by_experts["KiB of weights read by a token"]
    return [kib["dense"] / kib["routed"]]


# --- notebook 32: attention in fp16


def rows_of_order(tables: Tables, key: str, multiplies_first: bool) -> pd.DataFrame:
    """The rows of one key bias by rising query norm, in the order that multiplies q kᵀ first
    or the one that scales q first.

    Args:
        key: the norm of the key bias.
    """
    rows = tables["tables/orders"]
    rows = rows[rows["key"].eq(f"key bias of norm {key}")]
    has_product_first = rows["order"].str.startswith("q k")
    is_chosen = has_product_first if multiplies_first else ~has_product_first
    return rows[is_chosen].sort_values("query_norm")


def without_query(tables: Tables, match: re.Match) -> list[float]:
    """The largest value of q kᵀ with a key bias and no query bias."""
    rows = rows_of_order(tables, match.group("key"), multiplies_first=True)
    return [rows.loc[rows["query_norm"].eq(0), "largest"].iloc[0]]


def first_infinite(multiplies_first: bool) -> Compute:
    """The least query norm at which a value overflows fp16, and its neighbour below, for the
    sentence's key bias."""

    def compute(tables: Tables, match: re.Match) -> list[float]:
        rows = rows_of_order(tables, match.group("key"), multiplies_first)
        infinite = rows["largest"].gt(np.finfo(np.float16).max)
        return [
            rows.loc[infinite, "query_norm"].min(),
            rows.loc[~infinite, "query_norm"].max(),
        ]

    return compute


def bits_gained(tables: Tables, match: re.Match) -> list[float]:
    """The bits of headroom that scaling q first gains, in the last row: the largest norms."""
    rows = tables["tables/orders"].pivot_table(
        "headroom_bits", ["key", "query_norm"], "order"
    )
    first = next(name for name in rows if name.startswith("q k"))
    second = next(name for name in rows if name != first)
    return [(rows[second] - rows[first]).iloc[-1]]


def masks(tables: Tables, match: re.Match) -> list[float]:
    """The numbers of all cases of masks, of those that are right, and of those with NaN."""
    leaks = tables["tables/leaks"]
    return [len(leaks), leaks["right"].sum(), leaks["leak"].isna().sum()]


# --- notebook 33: configurations and the first token


def compared_cells(tables: Tables, match: re.Match) -> list[float]:
    """The worst relative difference of the logits."""
    edges = tables["tables/edges"]
    return [edges["worst difference"].max()]


def report_cells(tables: Tables, match: re.Match) -> list[float]:
    """The number of configurations without a token, and of all configurations."""
    reported = tables["tables/report"]
    return [reported["tokens"].eq(0).sum(), len(reported)]


def first_token(tables: Tables, match: re.Match) -> list[float]:
    """The slower over the faster median ms of the first token, with a hot and a cold cache."""
    rows = tables["figures/first_token"]
    rows = rows[rows["context"].astype(int).eq(int(match.group("context")))]
    medians = rows.groupby("cache")["ms"].median()
    slower, faster = sorted((medians["hot"], medians["cold"]), reverse=True)
    return [slower / faster]


# --- the sentences

NUMBER = r"(-?[\d,]+(?:\.\d+)?(?:e[+-]\d+)?%?)"
COST = [
    Claim("mean KL", rf"It costs a mean KL of {NUMBER} nats", cost("mean", "bundle")),
    Claim(
        "mean KL by part",
        rf"The bundle has a mean KL of {NUMBER} nats, Hugging Face's model {NUMBER} with "
        rf"the stored weights and {NUMBER} with its own",
        cost("mean", "bundle", "stored weights", "fp16 rounding alone"),
    ),
    # of a report with two columns, the second of which is `stored weights` in later ones
    Claim(
        "mean KL of rounding alone",
        rf"Rounding alone causes a mean KL of {NUMBER} nats, beside {NUMBER} of",
        cost("mean", "rounding alone", "bundle"),
    ),
]
CLAIMS = {
    "05": COST
    + [
        Claim(
            "error over rounding",
            r"With (?P<fault>[^,.]*?), T = (?P<T>\d+) and each layer fed Hugging Face's "
            r"input, the error of "
            r"(?P<tensor>an update|a row of [KV]) is at most "
            rf"{NUMBER} times what rounding alone causes, (?:beside {NUMBER} in|as in)",
            worst_ratio,
        ),
        Claim(
            "tokens of Hugging Face's text",
            r"Bundle “(?P<bundle>[^”]*)”: export [^.]*\. Along Hugging Face's own text it "
            rf"takes {NUMBER} of the tokens; its error is {NUMBER} times",
            bundle_text,
        ),
        Claim(
            "size of the stream",
            rf"is up to {NUMBER} times as large as the median token's "
            rf"\(RMS, behind layer {NUMBER}\)",
            stream_size,
        ),
        Claim(
            "what rounding of the stream moves",
            rf"moves no update by more than {NUMBER} of its size",
            stream_moved,
        ),
        Claim(
            "attention received",
            rf"give it {NUMBER} of their attention, the mean of heads and layers, "
            rf"where an even share is {NUMBER}",
            sink_share,
        ),
    ],
    "30": [
        Claim(
            "worst update",
            rf"the worst update lies {NUMBER} \(1 − cosine\)",
            worst_update,
        ),
        Claim(
            "with its own routing",
            rf"With the bundle's own choice it lies {NUMBER}: {NUMBER} of {NUMBER} choices",
            free_routing,
        ),
        Claim(
            "layers in a row",
            rf"the worst update of the first prompt lies {NUMBER}\.",
            worst_in_a_row,
        ),
        Claim(
            "ingredients seen",
            rf"{NUMBER} of {NUMBER} ingredients, left out one at a time",
            seen_ingredients,
        ),
        Claim(
            "share of the probe",
            rf"take {NUMBER} to {NUMBER} of the milliseconds of the attention's "
            rf"operations and {NUMBER} to {NUMBER} of those of all operations",
            probe_shares,
        ),
        Claim(
            "time of routed experts",
            rf"Routed experts take {NUMBER} times",
            routed_time,
        ),
        Claim(
            "bytes of routed experts",
            rf"Routed experts read {NUMBER} times fewer bytes",
            routed_bytes,
        ),
    ],
    "31": COST
    + [
        Claim(
            "largest part",
            r"the largest part of the squared error is \w+: "
            rf"{NUMBER}; cross terms make up {NUMBER}",
            largest_part,
        ),
        Claim(
            "re-authoring",
            rf"Re-authoring is {NUMBER} of a layer's update at most",
            reauthoring,
        ),
        Claim(
            "layer with the largest error",
            rf"over what rounding alone causes is {NUMBER}: {NUMBER} times "
            rf"\(update, T = {NUMBER}\)",
            largest_layer,
        ),
        Claim(
            "layers that fp16 helps",
            rf"lowers the error of quantization in {NUMBER} of {NUMBER} layers",
            lower_layers,
        ),
        Claim(
            "remedy",
            rf"Layer (?P<layer>\d+), [^:]*: {NUMBER} as stored, {NUMBER} with these",
            remedy,
        ),
    ],
    "32": [
        Claim(
            "without a query bias",
            r"A key bias of norm (?P<key>\d+) alone .* q kᵀ reaches "
            rf"{NUMBER} of 65,504",
            without_query,
        ),
        Claim(
            "first inf of q kᵀ",
            rf"is infinite in fp16 at a query norm of {NUMBER} \(not of {NUMBER}, its "
            r"neighbour\) per head, key bias of norm (?P<key>\d+)",
            first_infinite(multiplies_first=True),
        ),
        Claim(
            "bits gained", rf"Scaling q first leaves {NUMBER} bits more", bits_gained
        ),
        Claim(
            "first inf with q scaled",
            rf"it overflows at a query norm of {NUMBER} \(not of {NUMBER}, its "
            r"neighbour\), key bias of norm (?P<key>\d+)",
            first_infinite(multiplies_first=False),
        ),
        Claim(
            "masks",
            rf"Of {NUMBER} cases of masks {NUMBER} are right; {NUMBER} are NaN",
            masks,
        ),
    ],
    "33": [
        Claim(
            "worst difference of the trained model's logits",
            r"The worst relative difference of the logits is "
            rf"{NUMBER}\.\n",
            compared_cells,
        ),
        Claim(
            "configurations without a token",
            rf"In the report {NUMBER} of {NUMBER} configurations gave no token",
            report_cells,
        ),
        Claim(
            "first token",
            r"first token after (?P<context>\d+) tokens "
            rf"{NUMBER} times (?:faster|slower) than a cold one",
            first_token,
        ),
    ],
}
"""The claims of each notebook, by the two digits of its name."""
