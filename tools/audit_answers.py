"""The numbers in the Answers of notebooks 05, 30, 31, 32, 33 and 35, computed again from the
tables and figures that were stored with them.

Every notebook has a list of claims. A claim is a pattern of the Answer's text and, below
it, the function that computes the numbers of that sentence from the stored data, by the
names of the pattern's groups. Groups whose name begins with `which_` are no numbers to
check: they say which data the sentence is about. A measured number that is in no claim's
sentence is a finding as well: a sentence that was reworded would otherwise go unchecked.
Nothing of the package's statistics is used: the formulas are written out here.
`tools/audit.py` calls `check_sentences`; times of notebook 34 are checked in
`audit_times.py`."""

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from audit_times import CONFIDENCE
from finding import Finding
from scipy.stats import sem
from scipy.stats import t as student

# rounding to fp16 moves a value by at most 2^-11 of its size
HALF_ULP = 2.0**-11
WHICH = "which_"
MEASURED = r"(?<![\w.])-?\d[\d,]*(?:\.\d+|e[+-]\d+|\.\d+e[+-]\d+|%)+(?!\w)"
"""A number that was measured: it has a fraction, an exponent or a percent sign. Whole numbers are
counts, sizes and places."""
STATED = (
    r"(?:your|its) limit of [\d.e-]+",
    r"frequencies [\d.]+% too high",
    r"\d+% (?:interval|below|of its tokens)",
    r"keeps? a mean KL of [\d.e-]+ nats",
    r"Qwen 2\.5",
    r"“[^”]*”",
)
"""Phrases whose numbers are parameters of the notebook, parts of a name, or a model's own words."""
Tables = dict[str, pd.DataFrame]
"""The stored data of a report by kind and name, such as `figures/fidelity`."""
Compute = Callable[[Tables, re.Match], dict[str, float]]
"""(stored data, match of the pattern) → the numbers of the sentence by the names of their
groups."""


@dataclass(frozen=True)
class Claim:
    """A sentence of an Answer: a pattern, and the function that computes its numbers."""

    label: str
    pattern: str
    compute: Compute


CLAIMS: dict[str, list[Claim]] = defaultdict(list)
"""The claims of each notebook, by the two digits of its name."""


def claim(*notebooks: str, label: str, pattern: str) -> Callable[[Compute], Compute]:
    """A decorator of a `Compute`, which makes it a claim of these notebooks."""

    def register(compute: Compute) -> Compute:
        for notebook in notebooks:
            CLAIMS[notebook].append(Claim(label, pattern, compute))
        return compute

    return register


def number(name: str) -> str:
    """A group of this name for a number as it is printed: 12, -0.5, 1,024, 3.9e-07, 98.1%."""
    return rf"(?P<{name}>-?[\d,]+(?:\.\d+)?(?:e[+-]\d+)?%?)"


def ends(least: str, most: str) -> str:
    """Groups of these names for the ends of a range, which is one number where both print
    equal: 4.5 to 46, 11.0%."""
    return rf"(?={number(least)})(?:\S+ to )?{number(most)}"


@dataclass(frozen=True)
class AnswerCheck:
    """The numbers of an Answer beside those of its data."""

    findings: list[Finding]
    count: int
    """The number of those that were computed again."""
    unclaimed: list[str]
    """The measured numbers that no claim computes, as they are printed."""


def check_sentences(
    notebook: str, answer: str, tables: Tables, place: str = "Answer"
) -> AnswerCheck:
    """Checks the numbers in the Answer of a notebook. A claim whose sentence the Answer
    lacks is skipped: an Answer leaves out what did not happen. `unclaimed` has the numbers of
    sentences that no claim knows.

    Args:
        notebook: the two digits of its name.
        answer: the text of the Answer.
        tables: stored data by name, as `figures/fidelity`.
        place: of the findings.

    Raises:
        KeyError: a claim does not compute a number of its sentence.
    """
    findings, count = [], 0
    spans = [match.span() for phrase in STATED for match in re.finditer(phrase, answer)]
    for claim in CLAIMS.get(notebook, []):
        for match in re.finditer(claim.pattern, answer):
            spans.append(match.span())
            computed = claim.compute(tables, match)
            for name, text in printed_numbers(match).items():
                count += 1
                if not agrees(text, computed[name]):
                    needed = f"{computed[name]:.6g}"
                    findings.append(Finding(place, claim.label, text, needed))
    unclaimed = [
        match.group()
        for match in re.finditer(MEASURED, answer)
        if not any(start <= match.start() < stop for start, stop in spans)
    ]
    return AnswerCheck(findings, count, unclaimed)


def printed_numbers(match: re.Match) -> dict[str, str]:
    """The printed numbers of a sentence by the names of their groups, without those that a
    form of the sentence leaves out."""
    return {
        name: text
        for name, text in match.groupdict().items()
        if text is not None and not name.startswith(WHICH)
    }


def agrees(printed: str, computed: float) -> bool:
    """Whether a number rounds to its printed digits. A number in the middle between two
    printed ones agrees with both."""
    text = printed.replace(",", "")
    scale = 0.01 if text.endswith("%") else 1.0
    text = text.removesuffix("%")
    mantissa, _, exponent = text.lower().partition("e")
    decimals = len(mantissa.partition(".")[2])
    # the value of one step of the last printed digit
    last_digit = scale * 10.0 ** (int(exponent or 0) - decimals)
    distance = abs(float(text) * scale - computed)
    # a little more than half a step, because the middle has no exact floating-point number
    return distance <= 0.5000001 * last_digit


# --- notebooks 05 and 31: what compression costs


@claim(
    *("05", "31"),
    label="mean KL",
    pattern=rf"\b[Ii]t costs a mean KL of {number('bundle')} nats",
)
def cost_of_bundle(tables: Tables, match: re.Match) -> dict[str, float]:
    return {"bundle": mean_kl(tables, "bundle")}


@claim(
    *("05", "31"),
    label="mean KL by part",
    pattern=rf"The bundle has a mean KL of {number('bundle')} nats, Hugging Face's model "
    rf"{number('stored_weights')} with the stored weights and {number('rounding')} with its own",
)
def cost_by_part(tables: Tables, match: re.Match) -> dict[str, float]:
    return {
        "bundle": mean_kl(tables, "bundle"),
        "stored_weights": mean_kl(tables, "stored weights"),
        "rounding": mean_kl(tables, "fp16 rounding alone"),
    }


# of a report with two columns, the second of which is `stored weights` in later ones
@claim(
    *("05", "31"),
    label="mean KL of rounding alone",
    pattern=rf"Rounding alone causes a mean KL of {number('rounding')} nats, beside "
    rf"{number('bundle')} of",
)
def cost_of_rounding(tables: Tables, match: re.Match) -> dict[str, float]:
    return {
        "rounding": mean_kl(tables, "rounding alone"),
        "bundle": mean_kl(tables, "bundle"),
    }


def mean_kl(tables: Tables, column: str) -> float:
    """The mean KL in nats of a column of the table `cost`."""
    return tables["tables/cost"].set_index("KL (nats)").loc["mean", column]


# --- notebook 05: fidelity


@claim(
    "05",
    label="error over rounding",
    pattern=r"Planted fault “(?P<which_fault>[^”]*)”, T = (?P<which_T>\d+): the error of "
    rf"(?P<which_tensor>an update|a row of [KV]) is at most {number('faulty')} times what "
    rf"rounding causes, (?:beside {number('sound')} in|as in)",
)
@claim(
    "05",
    label="error over rounding",
    # in reports of before
    pattern=r"With (?P<which_fault>[^,.]*?)(?: \(planted\))?, T = (?P<which_T>\d+) and "
    r"each layer fed Hugging Face's input, the error of (?P<which_tensor>an update|a row of [KV]) "
    rf"is at most {number('faulty')} times what rounding (?:alone )?causes, "
    rf"(?:beside {number('sound')} in|as in)",
)
def worst_ratio(tables: Tables, match: re.Match) -> dict[str, float]:
    """The worst ratio of the faulty bundle and of the sound one."""
    T = int(match["which_T"])
    rows = rows_of_fault(tables, match["which_fault"], T)
    tensors = {"an update": "update", "a row of K": "k", "a row of V": "v"}
    tensor = tensors[match["which_tensor"]]
    rows = rows[rows["mode"].eq("isolated") & rows["T"].eq(T)]
    rows = rows[rows["tensor"].eq(tensor) & rows["routing_tie"].eq(False)]
    is_sound = rows["bundle"].eq("sound")
    # what rounding alone causes: the budget and the rounding of the result to fp16
    ratios = rows["error"] / np.hypot(rows["budget"], HALF_ULP)
    return {"faulty": ratios[~is_sound].max(), "sound": ratios[is_sound].max()}


def rows_of_fault(tables: Tables, fault: str, T: int) -> pd.DataFrame:
    """The rows of the figure of a fault, `one row late` or another. That figure may have no
    calls of one token: then the sentence says that they are the sound host's, which another
    figure has."""
    rows = tables["figures/write_address" if "late" in fault else "figures/rope"]
    if rows["T"].eq(T).any():
        return rows
    return tables["figures/fidelity"].assign(bundle="one row late")


@claim(
    "05",
    label="tokens of Hugging Face's text",
    pattern=r"Bundle “(?P<which_bundle>[^”]*)”: export [^.]*\. Fed Hugging Face's text, it picks "
    rf"the same next token, or a tied one, at {number('tokens')} of the positions; the error "
    r"of its logits"
    rf"(?:, in exact arithmetic,)? is {number('ratio')} times that of rounding",
)
def bundle_text(tables: Tables, match: re.Match) -> dict[str, float]:
    """The share of tokens that a bundle agrees on, and its error over that of rounding."""
    row = tables["tables/verdicts"].set_index("bundle").loc[match["which_bundle"]]
    return {"tokens": row["tokens agreed"], "ratio": row["logit error over rounding"]}


@claim(
    "05",
    label="size of the stream",
    pattern=rf"is up to {number('times')} times as large as the median token's "
    rf"\(RMS, behind layer {number('layer')}\)",
)
def stream_size(tables: Tables, match: re.Match) -> dict[str, float]:
    """The largest token's RMS over the median token's, and the layer where it is largest."""
    table = tables["tables/largest_token"]
    multiple = column_of(table, "RMS over the median", "times")
    peak = multiple.idxmax()
    return {"times": multiple[peak], "layer": table.loc[peak, "layer"]}


def column_of(table: pd.DataFrame, name: str, earlier_name: str) -> pd.Series:
    """A column that reports of before have by another name."""
    return table[name if name in table else earlier_name]


@claim(
    "05",
    label="largest value of the stream",
    pattern=rf"Its channel {number('channel')} reaches {number('value')}:",
)
def stream_peak(tables: Tables, match: re.Match) -> dict[str, float]:
    """The channel of the largest value of the largest token, and this value."""
    table = tables["tables/largest_token"]
    return {
        "channel": table.attrs["channel"],
        "value": peak_row(table)["channel's value"],
    }


@claim(
    "05", label="step of fp16", pattern=rf"fp16's numbers are {number('step')} apart"
)
def stream_step(tables: Tables, match: re.Match) -> dict[str, float]:
    """The step from the largest value of the stream to the next number of fp16."""
    return {"step": peak_row(tables["tables/largest_token"])["fp16 step"]}


@claim(
    "05",
    label="scale of the stored stream",
    pattern=rf"Such a value is stored divided by {number('scale')}, so",
)
def stored_scale(tables: Tables, match: re.Match) -> dict[str, float]:
    """The number by which the bundle divides the stream. Reports of before do not name it."""
    return {"scale": tables["tables/largest_token"].attrs["stream_scale"]}


def peak_row(table: pd.DataFrame) -> pd.Series:
    """The row of the layer behind which the largest token's channel has its largest value."""
    return table.loc[table["channel's value"].abs().idxmax()]


@claim(
    "05",
    label="what a layer adds to the stream",
    pattern=rf"\b(?P<which_layer>\d+) \(\+?{number('added')}\)",
)
def stream_added(tables: Tables, match: re.Match) -> dict[str, float]:
    """What a layer adds to the largest token's channel."""
    table = tables["tables/largest_token"].set_index("layer")
    return {"added": table.loc[int(match["which_layer"]), "layer adds"]}


@claim(
    "05",
    label="what rounding of the stream moves",
    pattern=rf"moves no update by more than {number('change')} of its size",
)
@claim(
    "05",
    label="what rounding of the stream moves",
    pattern=rf"moves an update of this token by up to {number('largest_change')} of its size "
    rf"\(layer {number('layer')}\), and an update of any other token by at most {number('others')}",
)
def stream_moved(tables: Tables, match: re.Match) -> dict[str, float]:
    """The largest change of an update over its size by rounding of the stream: of any token,
    of the largest token, with its layer, and of the others."""
    table = tables["tables/largest_token"]
    changes = column_of(table, "update moved, relative RMS", "update_moved")
    others = column_of(table, "others moved, at most", "others_moved")
    return {
        "change": max(changes.max(), others.max()),
        "largest_change": changes.max(),
        "layer": table.loc[changes.idxmax(), "layer"],
        "others": others.max(),
    }


@claim(
    "05",
    label="attention received",
    pattern=rf"give it {number('share')} of their attention, the mean of heads and layers, "
    rf"where an even share is {number('even')}",
)
def sink_share(tables: Tables, match: re.Match) -> dict[str, float]:
    """The share of attention that the largest token receives, and an even share."""
    table = tables["tables/largest_token"]
    share = column_of(table, "attention, share", "attention").mean()
    even = table.attrs["even"] if table.attrs else table["even"].iloc[0]
    return {"share": share, "even": even}


# --- notebook 30: the layers, routing and probes of a mixture of experts


@claim(
    "30",
    label="worst update",
    pattern=rf"the worst update lies {number('distance')} \(1 − cosine\)",
)
def worst_update(tables: Tables, match: re.Match) -> dict[str, float]:
    """Each layer fed Hugging Face's input; near ties of the router do not count."""
    of_figure = furthest(tables["figures/cosine"], "isolated")
    of_prompts = tables["tables/prompts"]["worst 1 − cosine"].max()
    return {"distance": max(of_figure, of_prompts)}


@claim(
    "30",
    label="with its own routing",
    pattern=rf"With the bundle's own choice it lies {number('distance')}: "
    rf"{number('differ')} of {number('choices')} choices",
)
def free_routing(tables: Tables, match: re.Match) -> dict[str, float]:
    """With the bundle's own choice of experts: the worst 1 − cosine, the number of choices
    that differ, and the number of all choices."""
    free = tables["tables/routers"].iloc[-1]
    return {
        "distance": free["worst 1 − cosine"],
        "differ": free["choices that differ"],
        "choices": free["choices"],
    }


@claim(
    "30",
    label="layers in a row",
    pattern=rf"the worst update of the first prompt lies {number('distance')}\.",
)
def worst_in_a_row(tables: Tables, match: re.Match) -> dict[str, float]:
    """The same with layers in a row, each fed the one before it."""
    return {"distance": furthest(tables["figures/cosine"], "chained")}


def furthest(rows: pd.DataFrame, mode: str, tensor: str = "update") -> float:
    """The largest 1 − cosine of a tensor in a mode, without near ties of the router."""
    chosen = rows["tensor"].eq(tensor) & rows["mode"].eq(mode)
    return 1 - rows.loc[chosen & rows["routing_tie"].eq(False), "cosine"].min()


@claim(
    "30",
    label="ingredients seen",
    pattern=rf"{number('seen')} of {number('all')} ingredients, left out one at a time",
)
def seen_ingredients(tables: Tables, match: re.Match) -> dict[str, float]:
    """The figure's bars are decades above the bundle's own worst update."""
    decades = tables["figures/ingredients"]["update"]
    return {"seen": decades.gt(0).sum(), "all": len(decades)}


@claim(
    "30",
    label="worst of the first prompt",
    pattern=rf"than the bundle's worst update on the same prompt, {number('update')}\. The hidden "
    rf"state, judged by the bundle's worst there, {number('hidden')},",
)
def first_prompt(tables: Tables, match: re.Match) -> dict[str, float]:
    """The bundle's largest 1 − cosine of an update on the first prompt, and that of a hidden
    state."""
    rows = tables["figures/cosine"]
    return {
        "update": furthest(rows, "isolated", "update"),
        "hidden": furthest(rows, "isolated", "hidden"),
    }


@claim(
    "30",
    label="share of the probe",
    pattern=rf"take {ends('attention_least', 'attention_most')} of the milliseconds of the "
    rf"attention's operations and {ends('all_least', 'all_most')} of those of all operations",
)
def probe_shares(tables: Tables, match: re.Match) -> dict[str, float]:
    """The probe's share of the attention's ms, least and most over rounds, and its share of
    the ms of all operations, least and most."""
    rounds = tables["tables/rounds"]
    rows = rounds[rounds["form"].eq("bundle")].select_dtypes("number")
    probe = rows["probe: q_proj, o_proj"]
    of_attention = probe / (probe + rows["attention"])
    of_all = probe / rows.sum(axis=1)
    return {
        "attention_least": of_attention.min(),
        "attention_most": of_attention.max(),
        "all_least": of_all.min(),
        "all_most": of_all.max(),
    }


@claim(
    "30",
    label="time of routed experts",
    pattern=rf"Routed experts take {number('times')} times "
    rf"(?:\({number('low')} to {number('high')}\) )?",
)
def routed_time(tables: Tables, match: re.Match) -> dict[str, float]:
    """The time of routed experts over that of dense ones: the geometric mean of the rounds'
    ratios, and both ends of Student's interval of it."""
    rounds = tables["tables/rounds"]
    dense = rounds.loc[rounds["form"].eq("dense"), "experts"].to_numpy()
    routed = rounds.loc[rounds["form"].eq("routed"), "experts"].to_numpy()
    logs = np.log(routed / dense)
    interval = student.interval(CONFIDENCE, len(logs) - 1, logs.mean(), sem(logs))
    low, high = np.exp(interval)
    return {"times": float(np.exp(logs.mean())), "low": float(low), "high": float(high)}


@claim(
    "30",
    label="bytes of routed experts",
    pattern=rf"Routed experts read {number('times')} times fewer bytes",
)
def routed_bytes(tables: Tables, match: re.Match) -> dict[str, float]:
    """The bytes of weights that dense experts read over those that routed ones read."""
    by_experts = tables["tables/routing"].set_index("experts")
    kib = by_experts["KiB of weights read by a token"]
    return {"times": kib["dense"] / kib["routed"]}


# --- notebook 31: the parts of the error


@claim(
    "31",
    label="largest part",
    # a report of before, in which this sentence ends with the cross terms
    pattern=rf"whose largest part is \w+: {number('largest')}; products of two parts "
    rf"make up \+?{number('cross_terms')}",
)
@claim(
    "31",
    label="largest part",
    pattern=rf"[\w-]+ makes up {number('largest')} of the squared error",
)
@claim(
    "31",
    label="products of two parts",
    pattern=rf"input; products of two parts make up \+?{number('cross_terms')}",
)
def largest_part(tables: Tables, match: re.Match) -> dict[str, float]:
    """Its share of the summed squares, and the share of the cross terms."""
    products = tables["tables/shares"].set_index("part")
    squares = np.diag(products.loc[list(products.columns)])
    return {
        "largest": squares.max() / products.to_numpy().sum(),
        "cross_terms": 1 - squares.sum(),
    }


@claim(
    "31",
    label="layers that carry the error",
    pattern=rf"{number('named')} of {number('layers')} layers carry {number('carried')} of "
    "(?:it|the squared error)",
)
def carrying_layers(tables: Tables, match: re.Match) -> dict[str, float]:
    """How many layers are named, how many there are, and the share of the squared error
    that the largest carry."""
    shares = tables["tables/layer_shares"]["share"]
    named = min(3, len(shares))
    return {
        "named": named,
        "layers": len(shares),
        "carried": np.sort(shares)[-named:].sum(),
    }


@claim(
    "31",
    label="token that carries the error",
    pattern=rf"of it, and token {number('token')} alone {number('carried')}\.",
)
def carrying_token(tables: Tables, match: re.Match) -> dict[str, float]:
    """The token with the largest share of the squared error, and that share."""
    largest = tables["tables/token_shares"].nlargest(1, "share").iloc[0]
    return {"token": largest["position"], "carried": largest["share"]}


@claim(
    "31",
    label="share of a layer without that token",
    pattern=rf"(?P<which_layer>\d+) \({number('share')}\)(?=[^;:]*carry most of the rest)",
)
def share_without_token(tables: Tables, match: re.Match) -> dict[str, float]:
    """The share of a layer in the squared error of all other tokens."""
    shares = tables["tables/layer_shares_without"].set_index("layer")["share"]
    return {"share": shares[int(match["which_layer"])]}


@claim(
    "31",
    label="layers by their largest part",
    # reports of before have the sum: "29 (23.3%), together 96.0%, where even shares would be"
    pattern=r"(?P<which_layers>\d+ \((?:(?!rest)[^;])*?\))"
    rf"(?:;|, together {number('carried')}, where) even shares would be "
    rf"{number('even')}(?: together)?\. By layer, (?P<which_part>\w+) is the largest part in "
    rf"{number('largest_in')} of {number('layers')}; its unweighted mean share over layers "
    rf"is {number('mean')}",
)
def parts_of_layers(tables: Tables, match: re.Match) -> dict[str, float]:
    """The share of the squared error that the named layers carry, the share of the layers
    that is named, in how many layers the part is the largest, the number of layers, and
    the part's mean share."""
    table = tables["tables/layer_shares"].set_index("layer")
    parts = table.drop(columns="share")
    part = match["which_part"]
    layers = re.findall(r"(\d+) \(", match["which_layers"])
    return {
        "carried": table.loc[[int(layer) for layer in layers], "share"].sum(),
        "even": len(layers) / len(table),
        "largest_in": parts.idxmax(axis=1).eq(part).sum(),
        "layers": len(table),
        "mean": parts[part].mean(),
    }


@claim(
    "31",
    label="share of a layer",
    pattern=rf"(?P<which_layer>\d+) \({number('share')}\)"
    r"(?=[^.;]*(?:\.\d[^.;]*)*(?:;|, where) even shares)",
)
def share_of_layer(tables: Tables, match: re.Match) -> dict[str, float]:
    """The share of the squared error of all layers that one layer carries."""
    shares = tables["tables/layer_shares"].set_index("layer")["share"]
    return {"share": shares[int(match["which_layer"])]}


@claim(
    "31",
    label="re-authoring",
    pattern=rf"Re-authoring is {number('part')} of a layer's update at most",
)
def reauthoring(tables: Tables, match: re.Match) -> dict[str, float]:
    """The largest part of re-authoring in a layer's update, relative RMS."""
    return {"part": tables["tables/parts"]["reauthoring"].max()}


@claim(
    "31",
    label="layer with the largest error",
    pattern=rf"over what rounding alone causes is {number('layer')}: {number('ratio')} times "
    rf"\(update, T = {number('T')}\)",
)
def largest_layer(tables: Tables, match: re.Match) -> dict[str, float]:
    """The layer whose error is largest over that of rounding; the ratio, and its T."""
    table = tables["tables/ranked"]
    worst = table.loc[table["ratio"].idxmax()]
    return {"layer": worst["layer"], "ratio": worst["ratio"], "T": worst["T"]}


@claim(
    "31",
    label="layers that fp16 helps",
    pattern=rf"lowers the error of quantization in {number('lower')} of {number('all')} layers",
)
def lower_layers(tables: Tables, match: re.Match) -> dict[str, float]:
    """The number of layers with a lower error once tensors are in fp16, and of all layers."""
    table = tables["tables/remedies"]
    return {"lower": (table["fp16"] < table["error"]).sum(), "all": len(table)}


@claim(
    "31",
    label="remedy",
    # in reports of before: "Layer 3, v_proj: 2.46% as stored, 1.34% with these"
    pattern=rf"[Ll]ayer (?P<which_layer>\d+)[^:]*: {number('stored')} as stored, "
    rf"{number('fp16')} with ",
)
def remedy(tables: Tables, match: re.Match) -> dict[str, float]:
    """The error of one layer as stored, and with its worst tensors in fp16."""
    row = tables["tables/remedies"].set_index("layer").loc[int(match["which_layer"])]
    return {"stored": row["error"], "fp16": row["fp16"]}


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


def first_infinite(rows: pd.DataFrame) -> dict[str, float]:
    """The least query norm at which a value of these rows overflows fp16, and its neighbour
    below."""
    infinite = rows["largest"].gt(np.finfo(np.float16).max)
    return {
        "infinite": rows.loc[infinite, "query_norm"].min(),
        "finite": rows.loc[~infinite, "query_norm"].max(),
    }


@claim(
    "32",
    label="without a query bias",
    pattern=r"A key bias of norm (?P<which_key>\d+) alone .* q kᵀ reaches "
    rf"{number('largest')} of 65,504",
)
def without_query(tables: Tables, match: re.Match) -> dict[str, float]:
    """The largest value of q kᵀ with a key bias and no query bias."""
    rows = rows_of_order(tables, match["which_key"], multiplies_first=True)
    return {"largest": rows.loc[rows["query_norm"].eq(0), "largest"].iloc[0]}


@claim(
    "32",
    label="first inf of q kᵀ",
    pattern=rf"is infinite in fp16 at a query norm of {number('infinite')} "
    rf"\(at {number('finite')} it is finite\)(?: per head, |\. That is with a )"
    r"key bias of norm (?P<which_key>\d+)",
)
def first_infinite_product(tables: Tables, match: re.Match) -> dict[str, float]:
    return first_infinite(
        rows_of_order(tables, match["which_key"], multiplies_first=True)
    )


@claim(
    "32",
    label="bits gained",
    pattern=rf"Scaling q first leaves {number('bits')} bits more",
)
def bits_gained(tables: Tables, match: re.Match) -> dict[str, float]:
    """The bits of headroom that scaling q first gains, in the last row: the largest norms."""
    rows = tables["tables/orders"].pivot_table(
        "headroom_bits", ["key", "query_norm"], "order"
    )
    first = next(name for name in rows if name.startswith("q k"))
    second = next(name for name in rows if name != first)
    return {"bits": (rows[second] - rows[first]).iloc[-1]}


@claim(
    "32",
    label="first inf with q scaled",
    pattern=rf"it overflows at a query norm of {number('infinite')} "
    rf"\(at {number('finite')} it is finite\), key bias of norm (?P<which_key>\d+)",
)
def first_infinite_scaled(tables: Tables, match: re.Match) -> dict[str, float]:
    return first_infinite(
        rows_of_order(tables, match["which_key"], multiplies_first=False)
    )


@claim(
    "32",
    label="masks",
    pattern=rf"Of {number('all')} cases of masks {number('right')} are right; "
    rf"{number('nan')} are NaN",
)
def masks(tables: Tables, match: re.Match) -> dict[str, float]:
    """The numbers of all cases of masks, of those that are right, and of those with NaN."""
    leaks = tables["tables/leaks"]
    return {
        "all": len(leaks),
        "right": leaks["right"].sum(),
        "nan": leaks["leak"].isna().sum(),
    }


# --- notebook 33: configurations and the first token


@claim(
    "33",
    label="worst difference of the trained model's logits",
    pattern=rf"The worst relative difference of the logits is {number('difference')}\.\s",
)
def compared_cells(tables: Tables, match: re.Match) -> dict[str, float]:
    """The worst relative difference of the logits."""
    return {"difference": tables["tables/edges"]["worst difference"].max()}


@claim(
    "33",
    label="configurations without a token",
    pattern=r"In the (?:batch-2 cache bug )?report (?:\([^)]*\) )?"
    rf"{number('without')} of {number('all')} configurations gave no token",
)
def report_cells(tables: Tables, match: re.Match) -> dict[str, float]:
    """The number of configurations without a token, and of all configurations."""
    reported = tables["tables/report"]
    return {"without": reported["tokens"].eq(0).sum(), "all": len(reported)}


@claim(
    "33",
    label="first token",
    pattern=r"first token (?:of the random Llama(?:, which has \d+ layers,)? )?"
    r"after (?P<which_context>\d+) tokens "
    # reports of before have "faster than"
    rf"{number('times')} times (?:as (?:fast|slow) as|(?:faster|slower) than) a cold one",
)
def first_token(tables: Tables, match: re.Match) -> dict[str, float]:
    """The slower over the faster median ms of the first token, with a hot and a cold cache."""
    rows = tables["figures/first_token"]
    rows = rows[rows["context"].astype(int).eq(int(match["which_context"]))]
    medians = rows.groupby("cache")["ms"].median()
    slower, faster = sorted((medians["hot"], medians["cold"]), reverse=True)
    return {"times": slower / faster}


# --- notebook 35: both bundles on a third text


@claim(
    "35",
    label="bundle on a third text",
    # reports of before do not name the text, and have the 99% KL and the same top token too
    pattern=rf"On {number('tokens')} tokens of a third text(?:, held out \(\S+\),)? "
    r"(?P<which_bundle>[\w-]+)(?: \((?:not )?calibrated\))? has a mean KL "
    rf"of {number('kl')}(?:, 99% below {number('p99')},|\. Its perplexity is) {number('ratio')} "
    rf"times Hugging Face's(?: perplexity)?(?: \(95% interval {ends('low', 'high')}, from "
    rf"{number('windows')} windows\)| \([^)]*\))?"
    rf"(?:, and the same top token in {number('same_top')})?",
)
def third_text(tables: Tables, match: re.Match) -> dict[str, float]:
    """Tokens, KL in nats, ratio of perplexities with the ends of its interval, and the share
    of equal top tokens. A report of before has no interval, and its sentence names none."""
    row = tables["tables/judged"].set_index("bundle").loc[match["which_bundle"]]
    columns = {
        "tokens": "tokens",
        "kl": "kl_mean",
        "p99": "kl_p99",
        "ratio": "perplexity_ratio",
        "low": "ratio_low",
        "high": "ratio_high",
        "windows": "windows",
        "same_top": "same_top",
    }
    return {name: row.get(column, np.nan) for name, column in columns.items()}


@claim(
    "35",
    label="chosen formats",
    pattern=rf"A bundle of {number('bundle')} MiB, of which matrices take {number('mib')}, keeps a "
    rf"mean KL of (?P<which_limit>[\d.e-]+) nats: {number('kl')} on the text for selection\. 99% "
    rf"of its tokens lie below {number('p99')}\. The matrices have {number('bits')} bits per "
    rf"weight\. The other {number('others')} MiB are",
)
@claim(
    "35",
    label="chosen formats",
    # reports of before, which have the matrices alone
    pattern=rf"{number('mib')} MiB of matrices, {number('bits')} bits per weight, keep a mean KL "
    rf"of (?P<which_limit>[\d.e-]+) nats: {number('kl')} on the text for selection"
    rf"(?:, 99% of its tokens|\. 99% of its tokens lie) below {number('p99')}",
)
def chosen_formats(tables: Tables, match: re.Match) -> dict[str, float]:
    """MiB, bits per weight and KL in nats of the choice, as the bundle stores it."""
    row = chosen_row(tables)
    return {
        "bundle": row.get("bundle_mib", np.nan),
        "others": row.get("bundle_mib", np.nan) - row["mib"],
        "mib": row["mib"],
        "bits": row["bits"],
        "kl": row["kl"],
        "p99": row["kl_p99"],
    }


@claim(
    "35",
    label="smallest format alone",
    pattern=r"The smallest format alone within the limit is (?P<which_format>[\w-]+) with "
    rf"{number('mib')} MiB(?: of matrices, a bundle of {number('bundle')} MiB)?[;.] [aA] format "
    rf"for each matrix needs {number('less')} less(?: for the matrices, "
    rf"{number('bundle_less')} less for the bundle)?",
)
@claim(
    "35",
    label="predicted milliseconds",
    pattern=rf"Predicted for (?P<which_chip>\w+): {number('ms')} in place of "
    rf"{number('alone_ms')} ms a call, with a 90% interval of {ends('low', 'high')} ms",
)
def smallest_format(tables: Tables, match: re.Match) -> dict[str, float]:
    """MiB of the smallest format alone whose KL is at most the limit, which the Answer's first
    sentence has; the shares of matrices and bundle that the choice does without; and the
    milliseconds of both."""
    limit = float(re.search(r"keeps? a mean KL of ([\d.e-]+) nats", match.string)[1])
    choices = tables["tables/choices"]
    within = choices[choices["kind"].eq("one format") & choices["kl"].le(limit)]
    least, row = within.loc[within["mib"].idxmin()], chosen_row(tables)
    # reports of before do not have the bundle
    bundle, least_bundle = (part.get("bundle_mib", np.nan) for part in (row, least))
    return {
        "mib": least["mib"],
        "less": 1 - row["mib"] / least["mib"],
        "bundle": least_bundle,
        "bundle_less": 1 - bundle / least_bundle,
        "ms": row["ms"],
        "alone_ms": least["ms"],
        "low": row["low_ms"],
        "high": row["high_ms"],
    }


def chosen_row(tables: Tables) -> pd.Series:
    choices = tables["tables/choices"]
    return choices[choices["kind"].eq("chosen")].iloc[0]


@claim(
    "35",
    label="kind with the largest loss",
    pattern=r"The kind with the largest loss in four bits is (?P<which_kind>\w+): "
    rf"{number('weights')} of the weights cause {number('loss')} of the loss; it gets "
    rf"{number('bits')} bits",
)
def largest_loss(tables: Tables, match: re.Match) -> dict[str, float]:
    """Shares of weights and loss, and bits per weight, of the kind with the largest loss."""
    kinds = tables["tables/kinds"]
    row = kinds.loc[kinds["loss"].idxmax()]
    return {name: row[name] for name in ("weights", "loss", "bits")}
