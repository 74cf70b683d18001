"""Commands that run a bundle as a language model: `generate` prints tokens, `evaluate`
measures how well a text is predicted."""

import warnings
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.types import NonNegativeFloat, NonNegativeInt
from cyclopts.validators import Number

import workbench
from workbench import paths
from workbench.check.windows import check_sizes
from workbench.cli.options import (
    Execution,
    Json,
    Prompt,
    check_length,
    check_runnable,
    load_exported_checkpoint,
    reject_unused,
)
from workbench.cli.output import command_line, print_and_exit
from workbench.errors import InputError, visible
from workbench.progress import end_stage, stage

# Share of tokens that the tokenizer does not know, above which `evaluate` warns.
MAX_UNKNOWN = 0.1

LEAST_TIMED = 3
"""New tokens of which a rate is measured: the first is the prompt's, and the step that gives
the second is a first call."""


def generate(
    bundle: Path,
    /,
    *,
    prompt: Prompt = Prompt(),
    execution: Execution = Execution(),
    chat: bool = False,
    max_new: NonNegativeInt = 32,
    temperature: NonNegativeFloat = 0.0,
    top_k: NonNegativeInt = 0,
    top_p: Annotated[float, Parameter(validator=Number(gt=0, lte=1))] = 1.0,
    seed: NonNegativeInt = 0,
    logits: Path | None = None,
    json: Json = False,
) -> None:
    """Continues a prompt, greedily or with --temperature by sampling, and prints the
    text and tok/s. --json also has the milliseconds of layers and head.

    Example: workbench generate build/llama --prompt-ids 1,42,100 --max-new 64

    Args:
        bundle: Folder of a finished bundle.
        chat: The prompt is a user's message, in the checkpoint's own chat template.
        max_new: New tokens; 0 with --logits alone, for those behind the prompt.
        temperature: 0: always the most likely token.
        top_k: Sample from the k most likely tokens; 0: from all.
        top_p: Sample from the most likely tokens whose probabilities add up to this.
        seed: The seed of the sampling.
        logits: Write logits [max_new + 1, V] fp32 here (.npy).
    """
    exported = workbench.Bundle.open(bundle)
    prompt.check(required=True)
    if logits is not None:
        paths.check_output("--logits", logits)
    elif not max_new:
        step = "ask for more tokens, or write the prompt's logits with --logits FILE"
        raise InputError("--max-new", "0", "a number from 1 on", step)
    if prompt.prompt is None:
        reject_unused("--prompt, a message to answer", chat=chat)
    if not temperature:
        reject_unused(
            "--temperature above 0", top_k=top_k > 0, top_p=top_p < 1, seed=seed > 0
        )
    execution.check(exported)
    stage("generate: opening the bundle")
    check_runnable(exported)
    from workbench.decode import Sampling
    from workbench.decode.timed import timed_generation
    from workbench.decode.tokenizer import encode_chat

    sampling = Sampling(temperature, top_k, top_p, seed)
    if chat:
        _check_chat_template(exported.tokenizer)
        ids = encode_chat(exported.tokenizer, prompt.prompt)
    else:
        ids = prompt.token_ids(exported)
    check_length(ids, exported)
    _check_room(ids, exported, max_new, keeps_logits=logits is not None)
    if prompt.prompt:
        _warn_of_unknown_words(exported.tokenizer, prompt.prompt)
    decoder = execution.decoder(exported, fast=True)
    on_text = None if json else _print_piece
    result = timed_generation(decoder, ids, max_new, logits, sampling, on_text=on_text)
    times = result["decode"]
    summary = f"{times['tokens']} token{'' if times['tokens'] == 1 else 's'}"
    if times["tokens_per_s"] is not None:
        summary += f", {times['tokens_per_s']:.1f} tok/s"
    elif times["tokens"]:
        summary += f", no tok/s with fewer than {LEAST_TIMED} new tokens"
    summary += f" ({result['runtime']}, {result['precision']})"
    printed = ""  # the text was printed piece by piece
    if result["text"] is None:
        printed = ",".join(map(str, result["tokens"]))
    lines = [printed, summary]
    if not chat and _is_empty_answer(exported, result["tokens"]):
        lines.append(
            "The model ended at once and wrote no text. Its tokenizer has a chat "
            "template: with --chat, --prompt is a user's message in that template."
        )
    print_and_exit(result, json, lines)


def _check_room(ids: list[int], bundle, max_new: int, keeps_logits: bool) -> None:
    """Refuses more new tokens than the cache has room for behind a prompt.

    Args:
        keeps_logits: whether the last new token runs too, for the logits behind it.
    """
    S = bundle.manifest.options.max_seq_len
    room = S - len(ids) + (0 if keeps_logits else 1)
    if max_new > room:
        raise InputError(
            f"prompt of {len(ids)} tokens",
            f"room for {room} new tokens, {max_new} asked for",
            f"at most {S} tokens together, the bundle's max_seq_len",
            f"lower --max-new to {room}, shorten the prompt (--tokens), or export with a "
            "larger --max-seq-len",
        )


def _check_chat_template(tokenizer: Path) -> None:
    """Refuses a tokenizer without a chat template in one line; transformers describes how
    to write a template. `encode_chat` refuses a folder without a tokenizer."""
    from workbench.decode.tokenizer import has_chat_template, has_tokenizer

    if has_tokenizer(tokenizer) and not has_chat_template(tokenizer):
        needed = "a checkpoint that was trained for chat, with its template"
        step = "leave --chat out, or export a checkpoint that has one"
        raise InputError("--chat", f"no chat template in {tokenizer}", needed, step)


def _is_empty_answer(bundle, tokens: list[int]) -> bool:
    """Whether new tokens have no text, or begin with the one that ends a text, although
    the bundle's tokenizer has a chat template, in which the model would answer."""
    from workbench.decode.tokenizer import has_chat_template, text_of

    if not tokens or not has_chat_template(bundle.tokenizer):
        return False
    if tokens[0] in bundle.manifest.tokens.eos:
        return True
    return not text_of(bundle.tokenizer, tokens).strip()


def _warn_of_unknown_words(tokenizer: Path, text: str) -> None:
    """Warns of words that become the tokenizer's unknown token."""
    from workbench.decode.tokenizer import load_tokenizer

    reader = load_tokenizer(tokenizer)
    unknown = [
        word
        for word in text.split()
        if reader.unk_token_id in reader.encode(word, add_special_tokens=False)
    ]
    if unknown:
        message = f"unknown to the tokenizer: {', '.join(unknown)}"
        warnings.warn(message, stacklevel=1)


def _print_piece(text: str) -> None:
    """Prints a piece of a model's answer as soon as it is decoded."""
    end_stage()
    print(visible(text), end="", flush=True)


def evaluate(
    bundle: Path,
    /,
    *,
    prompt: Prompt = Prompt(),
    execution: Execution = Execution(),
    checkpoint: Path | None = None,
    window: int | None = None,
    stride: int | None = None,
    json: Json = False,
) -> None:
    """Perplexity of a text, KL and same top token against Hugging Face's model, 95%
    intervals.

    Token ids are the tokenizer's; each one but the first is scored once. Finished
    windows are stored in data/evaluations, where an interrupted run resumes.

    Example: workbench evaluate build/llama --text data/tasks/heldout.txt

    Args:
        bundle: Folder of a finished bundle.
        checkpoint: The checkpoint that the bundle was exported from.
        window: Tokens of a window; default: max_seq_len.
        stride: Tokens between two windows' beginnings; default: half a window.
    """
    exported = workbench.Bundle.open(bundle)
    prompt.check(required=True)
    check_sizes(exported.manifest.options.max_seq_len, window, stride)
    execution.check(exported)
    source = load_exported_checkpoint(checkpoint, exported, "evaluate")
    check_runnable(exported)
    from workbench.check.evaluate import evaluate
    from workbench.check.text import check_held_out
    from workbench.decode.tokenizer import unknown_share

    ids = prompt.token_ids(exported)
    stage("evaluate: loading the shards")
    decoder = execution.decoder(exported)
    check_held_out(exported, ids)
    share = unknown_share(exported.tokenizer, ids)
    if share > MAX_UNKNOWN:
        message = (
            f"{share:.0%} of the tokens are unknown to the tokenizer: the perplexity "
            "says nothing of the text; give one in the checkpoint's own words"
        )
        warnings.warn(message, stacklevel=1)
    folder = workbench.log.project() / "data/evaluations"
    result = evaluate(decoder, ids, source, window=window, stride=stride, folder=folder)
    step = None
    if source is None:  # the command adds KL and equal top tokens
        (name,) = prompt.sources
        text = [f"--{name.replace('_', '-')}", getattr(prompt, name)]
        if prompt.tokens:
            text += ["--tokens", prompt.tokens]
        step = command_line("evaluate", bundle, *text, "--checkpoint", "CHECKPOINT")
    print_and_exit(result, json, next_command=step)
