"""`workbench generate` prints tokens, `evaluate` how well a text is predicted."""

import warnings
from functools import partial
from pathlib import Path

from typer import echo

import workbench
from workbench import paths
from workbench.cli.common import Checkpoint, Json, Prompt, Record, Where, record, show
from workbench.errors import InputError

PANEL = "Run"


def generate_command(
    bundle: Path,
    prompt: Prompt,
    where: Where,
    chat: bool = False,
    max_new: int = 32,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    logits: Path | None = None,
    json: Json = False,
) -> None:
    """Prints the next tokens, tok/s, ms per layer and head: greedy, or sampled with
    --temperature.

    Example: workbench generate build/llama --prompt-ids 1,42,100 --max-new 64

    Args:
        chat: The prompt is a user's message, in the checkpoint's own chat template.
        max_new: New tokens.
        temperature: 0: always the most likely token.
        top_k: Only the k most likely tokens; 0: all.
        top_p: Only the most likely tokens up to this probability.
        seed: Of the sampling.
        logits: Write logits [max_new + 1, V] fp32 here (.npy).
    """
    opened = workbench.Bundle.open(bundle)
    prompt.required()
    if chat and prompt.prompt is None:
        step = "give --prompt TEXT"
        raise InputError("--chat", "no --prompt", "a text to answer", step)
    from workbench.decode import Sampling
    from workbench.decode.transcript import encode_chat, transcript

    sampling = Sampling(temperature, top_k, top_p, seed)
    if chat:
        ids = encode_chat(opened.tokenizer, prompt.prompt)
    else:
        ids = prompt.ids(opened.manifest.dims.V, opened.tokenizer)
        if prompt.prompt and (
            unknown := unknown_words(opened.tokenizer, prompt.prompt)
        ):
            words = ", ".join(unknown)
            warnings.warn(f"unknown to the tokenizer: {words}", stacklevel=1)
    decoder = where.decoder(opened, fast=True)
    on_text = None if json else partial(echo, nl=False)
    result = transcript(decoder, ids, max_new, logits, sampling, on_text=on_text)
    times, written = result["decode"], ""
    if result["text"] is None:  # else it was printed as it came
        written = ",".join(map(str, result["tokens"]))
    summary = f"{times['tokens']} tokens"
    if times["tokens_per_s"] is not None:
        summary += f", {times['tokens_per_s']:.1f} tok/s"
    end = f"{summary} ({result['runtime']}, {result['precision']})"
    show(result, json, [written, end])


def unknown_words(tokenizer: Path, prompt: str) -> list[str]:
    """The parts of a prompt that the tokenizer in a folder reads as its unknown
    token."""
    from workbench.decode.transcript import load_tokenizer

    reader = load_tokenizer(tokenizer)
    read = reader(prompt, add_special_tokens=False, return_offsets_mapping=True)
    spans = zip(read["input_ids"], read["offset_mapping"])
    unknown = [prompt[slice(*span)] for i, span in spans if i == reader.unk_token_id]
    return list(dict.fromkeys(unknown))


def evaluate_command(
    bundle: Path,
    prompt: Prompt,
    where: Where,
    checkpoint: Checkpoint = None,
    window: int | None = None,
    stride: int | None = None,
    log: Record = False,
    json: Json = False,
) -> None:
    """Perplexity of a text, KL and same top token against Hugging Face's model, 95%
    intervals.

    A beginning-of-sequence token comes first where the tokenizer has one; every other
    token is scored once. Finished windows are stored in data/evaluations, where an
    interrupted run resumes.

    Example: workbench evaluate build/llama --text README.md --checkpoint data/tiny-llama

    Args:
        window: Tokens of a window; default: max_seq_len.
        stride: Tokens between two windows' beginnings; default: half a window.
    """
    opened = workbench.Bundle.open(bundle)
    if checkpoint:
        paths.checkpoint(checkpoint)
    prompt.required()
    from workbench.check.evaluate import evaluate
    from workbench.log import project
    from workbench.models import checkpoint as checkpoints

    source = checkpoint and checkpoints.Checkpoint(checkpoint)
    tokenizer = source.path if source else opened.tokenizer
    ids = prompt.ids(opened.manifest.dims.V, tokenizer)
    decoder = where.decoder(opened)
    how = {"window": window, "stride": stride, "folder": project() / "data/evaluations"}
    result = evaluate(decoder, ids, source, **how, progress=not json)
    if log:
        row = {"config": {"evaluation": dict(result)}}
        record("evaluate", result, opened, row, decoder)
    show(result, json, evaluation_lines(result))


def evaluation_lines(result: dict) -> list[str]:
    """An evaluation as lines of text."""
    intervals = result["intervals"] or {}

    def figure(name: str, value: float) -> str:
        text = f"{value:.6g}"
        if low_high := intervals.get(name):
            text += " (95%: {:.6g} – {:.6g})".format(*low_high)
        return text

    lines = [f"{result['tokens']} tokens scored in {result['windows']} windows"]
    if "not_run" in result:
        lines.append(f"not_run      {result['not_run']}")
    else:
        lines.append(f"perplexity   {figure('perplexity', result['perplexity'])}")
    if result["kl"]:
        kl = dict(result["kl"])
        mean = figure("kl_mean", kl.pop("mean"))
        rest = ", ".join(f"{name} {value:.3g}" for name, value in kl.items())
        lines += [
            f"Hugging Face {figure('golden_perplexity', result['golden_perplexity'])}",
            f"ratio        {figure('perplexity_ratio', result['perplexity_ratio'])}",
            f"KL           mean {mean}, {rest}",
        ]
    if result["golden_perplexity"]:
        lines.append(f"same top     {figure('same_top', result['same_top'])}")
    if "not_run" not in result and not intervals:
        lines.append("too few windows for intervals")
    return lines
