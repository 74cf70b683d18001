"""`workbench evaluate`: perplexity and KL over a text of any length."""

from pathlib import Path
from typing import Annotated

from typer import Option

from workbench import paths
from workbench.cli.common import (
    GoldenOf,
    GoldenPath,
    Json,
    Log,
    Precision,
    RuntimeName,
    TextFile,
    Units,
    look_at,
    open_folder,
    parse_ids,
    record,
    show,
    tokenizer_folder,
)
from workbench.errors import InputError

PANEL = "Check"


def evaluate_command(
    bundle: Path,
    text: TextFile = None,
    ids: Annotated[
        Path | None, Option(help="File of token ids instead of text, run as they stand.")
    ] = None,
    checkpoint: GoldenOf = None,
    golden: GoldenPath = None,
    window: Annotated[int | None, Option(help="Tokens of a window; default: max_seq_len.")] = None,
    stride: Annotated[
        int | None, Option(help="Tokens between two windows' beginnings; default: half a window.")
    ] = None,
    runtime: RuntimeName = "auto",
    compute_units: Units = "CPU_AND_NE",
    precision: Precision = "declared",
    log: Log = False,
    json: Json = False,
) -> None:
    """Perplexity over a text of any length, KL and same top token against Hugging Face's model,
    with 95% intervals.

    A beginning-of-sequence token comes first where the checkpoint has one; every other token is
    scored once. Finished windows are stored in data/evaluations: an interrupted run goes on.

    Example: workbench evaluate build/llama --text README.md --checkpoint data/tiny-llama
    """
    opened = open_folder(bundle)
    look_at(golden, checkpoint)
    if (text is None) == (ids is None):
        raise InputError(
            "text", "both or neither of --text and --ids", "one of them", "give one of them"
        )
    words = paths.text(text or ids)
    from workbench.adopt.decoder import open_decoder
    from workbench.check.evaluate import evaluate
    from workbench.check.golden import Golden
    from workbench.decode.transcript import encode_text
    from workbench.log import project
    from workbench.models.checkpoint import Checkpoint
    from workbench.sweep.caches import EVALUATIONS

    if text:
        tokens = encode_text(tokenizer_folder(opened, checkpoint), words)
    else:
        tokens = parse_ids(words, "--ids")
    reference = None
    if golden:
        reference = Golden.load(golden)
    elif checkpoint:
        reference = Checkpoint(checkpoint)
    decoder = open_decoder(opened, runtime, precision, compute_units=compute_units)
    result = evaluate(
        decoder,
        tokens,
        reference,
        window=window,
        stride=stride,
        folder=project() / EVALUATIONS,
        progress=not json,
    )
    if log:
        record("evaluate", result, opened, {"config": {"evaluation": dict(result)}}, decoder)
    show(result, json, _lines(result))


def _lines(result: dict) -> list[str]:
    intervals = result["intervals"] or {}

    def figure(name: str, value: float) -> str:
        low_high = intervals.get(name)
        return f"{value:.6g}" + (
            "" if low_high is None else " (95%: {:.6g} – {:.6g})".format(*low_high)
        )

    lines = [f"{result['tokens']} tokens scored in {result['windows']} windows"]
    if "not_run" in result:
        lines += [f"not_run      {result['not_run']}"]
        if result["golden_perplexity"]:
            lines += [f"same top     {figure('same_top', result['same_top'])}"]
        return lines
    lines += [f"perplexity   {figure('perplexity', result['perplexity'])}"]
    if result["kl"]:
        kl = ", ".join(f"{name} {value:.3g}" for name, value in result["kl"].items())
        lines += [
            f"Hugging Face {figure('golden_perplexity', result['golden_perplexity'])}",
            f"ratio        {figure('perplexity_ratio', result['perplexity_ratio'])}",
            f"KL           {kl}; mean {figure('kl_mean', result['kl']['mean'])}",
            f"same top     {figure('same_top', result['same_top'])}",
        ]
    return lines + ([] if intervals else ["too few windows for intervals"])
