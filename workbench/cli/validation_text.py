"""The text of a validation: each figure of its JSON in words, with its unit."""

import re
from math import isnan
from textwrap import shorten

from workbench.cli.output import format_result, format_value, has_wrong_weights

NO_RECOMMENDATION = {"recommendation": None, "tried": None}
"""`Recommendation.json` where no preset was tried."""

TENSORS = {"update": "the update", "k": "a row of K", "v": "a row of V"}
"""A tensor of the table `fidelity` → in words."""

STORED_WEIGHTS = " with the stored weights (gate weights judges the weights)"
"""What follows an error over what rounding causes where the stored weights are wrong: they
change the error and what rounding causes alike."""

WRONG_TENSOR = re.compile(r"(?:^|; )\S+: ([\w.]+): ")
"""The checkpoint's tensor in a clause of the reason of gate `weights`, behind the shard."""

UNIT_COLUMNS = {
    "over_rounding": "error over rounding",
    "min_cosine": "lowest cosine",
    "kl_mean": "mean KL (nats)",
    "kl_max": "largest KL (nats)",
    "kl_portable": "KL from portable (nats)",
}
"""A figure of a compute unit's validation → the heading of its column."""


def format_validation(result: dict, recommendation) -> list[str]:
    """The lines of text of a validation against Hugging Face's values.

    Args:
        result: its JSON.
        recommendation: a `Recommendation`; None where no preset was tried.
    """
    lines = format_result(_replace_keys(result | NO_RECOMMENDATION))
    if recommendation:
        from workbench.recommend import describe_recommendation

        sentences = describe_recommendation(recommendation)
        lines += ["", *(f"- {sentence}" for sentence in sentences)]
    return lines


def format_units(result: dict) -> list[str]:
    """The lines of text of the validations of a bundle's compute units."""
    rows = [
        {UNIT_COLUMNS.get(name, name): value for name, value in row.items()}
        for row in result["units"]
    ]
    measured = "measured" if result["device_measured"] else "not measured"
    texts = {"device": measured, "units": rows}
    return format_result(
        {name: result[name] for name in ("verdict", "quality")} | texts
    )


def _replace_keys(result: dict) -> dict:
    """A result whose figures have names and units in words; tables stay tables."""
    texts = {}
    is_wrong = has_wrong_weights(result.get("gates", []))
    for name, value in result.items():
        match name:
            case "gates":
                texts[name] = value
                if is_wrong:
                    texts["place of the fault"] = _describe_wrong_weights(value)
            case "min_cosine":  # stands in the line of the mean
                pass
            case "worst" if value:
                texts["worst value"] = _describe_worst(value, is_wrong)
            case "mean_cosine":
                texts["cosine"] = (
                    f"mean {format_value(value)}, lowest {format_value(result['min_cosine'])}"
                )
            case "rows":
                texts["compared"] = (
                    f"{value:,} tensors, each of one layer or the head, at one position, "
                    "in calls of one T"
                )
            case "logits" if value:
                texts[name] = _describe_logits(value)
            case "cost" if value:
                has_logits = bool(result["logits"])
                texts |= _describe_cost(value, is_wrong, has_logits=has_logits)
            case "transcript" if value:
                texts[name] = _describe_transcript(value)
            case "stop" if value:
                texts["ends of texts"] = _describe_stops(value)
            case _:
                texts[name] = value
    return texts


def _describe_wrong_weights(gates: list[dict]) -> str:
    """The place of the fault where gate `weights` is RED: the tensors that it names."""
    (reason,) = [gate["reason"] for gate in gates if gate["name"] == "weights"]
    names = [*dict.fromkeys(WRONG_TENSOR.findall(reason))]
    tensors = ", ".join(names) or "what it names"
    return (
        f"gate weights: {tensors}. The errors below are those of a program with these "
        "weights, and do not show the place"
    )


def _describe_worst(worst: dict, is_wrong: bool) -> str:
    """The value that is furthest from Hugging Face's.

    Args:
        is_wrong: whether the stored weights are wrong.
    """
    place = (
        f"{TENSORS.get(worst['tensor'], worst['tensor'])} of layer {worst['layer']} at "
        f"position {worst['position']}, T = {worst['T']}"
    )
    excess = worst["over_rounding"]
    if excess is None or isnan(excess):
        ratio = ""
    else:
        ratio = f", {excess:.4g} times what rounding causes"
        if is_wrong:
            ratio += STORED_WEIGHTS
    return (
        f"{place}: relative error {worst['error']:.4g}{ratio}; cosine "
        f"{worst['cosine']:.7g}, peak signal-to-noise ratio {worst['psnr_db']:.1f} dB, "
        f"largest difference {worst['max_abs']:.4g}"
    )


def _describe_logits(logits: dict) -> str:
    """How far the logits are from Hugging Face's."""
    return (
        f"same top token at {logits['top1_agreement']:.2%} of the positions, mean KL "
        f"{logits['kl_mean']:.4g} nats, largest KL {logits['kl_max']:.4g} nats, lowest "
        f"cosine {logits['cosine_min']:.7g}"
    )


def _describe_cost(cost: dict, is_wrong: bool, has_logits: bool) -> dict:
    """The cost as a table, what its columns are, and its other figures.

    Args:
        is_wrong: whether the stored weights are wrong.
        has_logits: whether another line has the share of equal top tokens.
    """
    from workbench.check.cost import COLUMNS, cost_table
    from workbench.experiment.stored_weights import COLUMNS_OF_WRONG

    columns = COLUMNS_OF_WRONG if is_wrong else COLUMNS
    texts = {"cost": cost_table(cost).to_dict("records"), "columns": [columns]}
    if not has_logits:
        texts["same top token"] = f"at {cost['same_top']:.2%} of the positions"
    if cost["budget"] and not is_wrong:  # wrong weights have another place
        worst = cost["budget"]["worst"]
        texts["worst layer"] = (
            f"{TENSORS.get(worst['tensor'], worst['tensor'])} of layer {worst['layer']}, "
            f"T = {worst['T']}: over positions, the RMS error is {worst['ratio']:.4g} "
            "times what rounding causes"
        )
    return texts


def _describe_transcript(transcript: dict) -> dict:
    """The figures of texts beside Hugging Face's, and a table with a row for each
    prompt."""
    low, high = transcript["interval"]
    names = ("agreed", "ties", "first_difference", "cause")
    rows = [
        {"prompt": shorten(row["prompt"], 40)}
        | {name.replace("_", " "): row[name] for name in names}
        for row in transcript["prompts"]
    ]
    texts = {
        "tokens agreed": f"{transcript['agreed']:.2%} (95% interval {low:.2%} to {high:.2%})",
        "ties": (
            f"{transcript['ties']} of these tokens, which are other ones than Hugging "
            "Face's, with logits too close to tell"
        ),
        "rounding": (
            "changes the difference between the two best logits by "
            f"{transcript['sigma']:.4g} (RMS)"
        ),
    }
    if transcript["error"] is not None:
        texts["error of logits"] = (
            f"{transcript['error']:.4g} times what rounding to fp16 causes; that of a right "
            "program in exact arithmetic is far below 1"
        )
    return texts | {"prompts": rows}


def _describe_stops(stop: dict) -> dict:
    """How many texts of Hugging Face's model ended, and how many the bundle ended."""
    return {
        "Hugging Face's": f"{stop['ends']} texts",
        "the bundle's": f"{stop['bundle_ends']} of these",
        "end tokens": stop["end_tokens"],
        "contradiction": stop["contradiction"],
    }
