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
)
from workbench.errors import InputError

PANEL = "Check"


def evaluate_command(
    bundle: Path,
    text: TextFile = None,
    ids: Annotated[
        Path | None,
        Option(help="File of token ids instead of text, run as they stand."),
    ] = None,
    checkpoint: GoldenOf = None,
    golden: GoldenPath = None,
    window: Annotated[
        int | None, Option(help="Tokens of a window; default: max_seq_len.")
    ] = None,
    stride: Annotated[
        int | None,
        Option(help="Tokens between two windows' beginnings; default: half a window."),
    ] = None,
    runtime: RuntimeName = "auto",
    compute_units: Units = "CPU_AND_NE",
    precision: Precision = "declared",
    log: Log = False,
    json: Json = False,
) -> None:
    """Perplexity of a text, KL and same top token against Hugging Face's model, 95%
    intervals.

    A beginning-of-sequence token comes first where the checkpoint has one; every other
    token is scored once. Finished windows are stored in data/evaluations, where an
    interrupted run resumes.

    Example: workbench evaluate build/llama --text README.md --checkpoint data/tiny-llama
    """
    opened = open_folder(bundle)
    look_at(golden, checkpoint)
    if (text is None) == (ids is None):
        actual = "both or neither of --text and --ids"
        raise InputError("text", actual, "one of them", "give one of them")
    words = paths.text(text or ids)
    from workbench.adopt.decoder import open_decoder
    from workbench.check.evaluate import evaluate
    from workbench.decode.transcript import encode_text
    from workbench.log import project
    from workbench.sweep.caches import EVALUATIONS

    if ids:
        tokens = parse_ids(words, "--ids")
    elif checkpoint:
        tokens = encode_text(paths.checkpoint(checkpoint), words)
    else:
        tokens = encode_text(opened.tokenizer, words)
    reference = _reference(golden, checkpoint)
    decoder = open_decoder(opened, runtime, precision, compute_units=compute_units)
    options = {"window": window, "stride": stride, "folder": project() / EVALUATIONS}
    result = evaluate(decoder, tokens, reference, **options, progress=not json)
    if log:
        row = {"config": {"evaluation": dict(result)}}
        record("evaluate", result, opened, row, decoder)
    show(result, json, _lines(result))


def _reference(golden: Path | None, checkpoint: Path | None):
    """The stored golden, else the checkpoint, else None: the text is scored without a
    reference."""
    from workbench.check.golden import Golden
    from workbench.models.checkpoint import Checkpoint

    if golden:
        return Golden.load(golden)
    return Checkpoint(checkpoint) if checkpoint else None


def _lines(result: dict) -> list[str]:
    """An evaluation as lines of text."""
    intervals = result["intervals"] or {}

    def figure(name: str, value: float) -> str:
        text = f"{value:.6g}"
        if low_high := intervals.get(name):
            text += " (95%: {:.6g} – {:.6g})".format(*low_high)
        return text

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
    if not intervals:
        lines.append("too few windows for intervals")
    return lines
