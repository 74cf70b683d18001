"""The text of an explanation: the answer first, then each table with what its columns
mean."""

from workbench.cli.output import (
    format_judgement,
    format_result,
    format_table,
    has_wrong_weights,
)

PARTS_LEGEND = (
    "Relative RMS error of what each layer adds to the stream, without a unit. storage: "
    "weights rounded to fp16; quantization: weights as the bundle stores them; "
    "reauthoring: the bundle's program in place of Hugging Face's; precision: results "
    "rounded to fp16; runtime: the device; total: all parts together."
)
WRONG_WEIGHTS = (
    "The stored weights are wrong (gate weights is RED): quantization and total contain "
    "this fault."
)
"""What follows `PARTS_LEGEND` where gate `weights` is RED."""
TABLES = {
    "parts": ("error by part, each layer fed Hugging Face's input", PARTS_LEGEND),
    "chained": (
        "error by part, each layer fed the output of the one before",
        "The columns are those of the table above.",
    ),
    "variants": (
        "variants of Hugging Face's model, the nearest first",
        "relative_rms: the error of the bundle's worst K, V or update against a variant.",
    ),
}
"""A table of the JSON → its title, and what its columns mean."""
MAX_VARIANTS = 10
"""Variants in the text; the JSON has all."""
RANGES_LEGEND = (
    "max_abs: the largest absolute value of a result; headroom_bits: how often it may "
    "double before it exceeds 65504, the largest number in fp16."
)
RANGE_COLUMNS = ("max_abs", "headroom_bits", "kind", "module", "shard", "op")
"""Columns of the operations with the least headroom; long names come last."""


def format_explanation(result: dict) -> list[str]:
    """The lines of text of what `explain` and its subcommands for layers, variants and
    ranges found."""
    lines = []
    if "verdict" in result:
        lines.append(f"{'export':20}{result['verdict']}")
        lines += format_judgement(result, "gates")
    answer = ("fits", "conclusion")
    lines += format_result({name: result.get(name) for name in answer})
    for name, (title, legend) in TABLES.items():
        rows = result.get(name)
        if not rows:
            continue
        if name == "parts" and has_wrong_weights(result.get("gates", [])):
            legend = f"{legend} {WRONG_WEIGHTS}"
        if name == "variants" and len(rows) > MAX_VARIANTS:
            title += f" ({MAX_VARIANTS} of {len(rows)}; --json prints all)"
            rows = rows[:MAX_VARIANTS]
        lines += ["", title, *format_table(rows), legend]
    if "ranges" in result:
        lines += ["", *_format_ranges(result["ranges"])]
    return lines


def _format_ranges(ranges: dict) -> list[str]:
    """The lines of the ranges of operations: the first one with inf or NaN, and those
    with the least headroom."""
    lines = [f"{'operations':20}{ranges['ops']}"]
    for kind in ("inf", "nan"):
        lines += format_result({f"first {kind}": ranges[f"first_{kind}"]})
    bits = ranges["min_headroom_bits"]
    if bits is not None:
        lines.append(f"{'least headroom':20}{bits:.4g} bits below fp16's overflow")
    if ranges["worst"]:
        rows = [{name: row[name] for name in RANGE_COLUMNS} for row in ranges["worst"]]
        lines += ["", "operations with the largest values"]
        lines += [*format_table(rows), RANGES_LEGEND]
    return lines
