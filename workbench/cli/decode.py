"""`workbench decode` prints tokens; `workbench reuse` compares restored caches with
fresh ones."""

from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Option, echo

import workbench
from workbench import paths
from workbench.cli.common import (
    Ids,
    Json,
    Precision,
    PromptOf,
    RuntimeName,
    Units,
    bundles_only,
    look_at,
    open_folder,
    prompt_of,
    red_first,
    show,
)
from workbench.errors import InputError

PANEL = "Decode"


def decode_command(
    bundle: Path,
    prompt_ids: Ids = None,
    prompt: str | None = None,
    chat: bool = False,
    golden: PromptOf = None,
    max_new: Annotated[int, Option(help="New tokens.", min=0)] = 32,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    logits: Path | None = None,
    runtime: RuntimeName = "auto",
    compute_units: Units = "CPU_AND_NE",
    precision: Precision = "declared",
    literal: bool = False,
    prefill_bundle: Path | None = None,
    json: Json = False,
) -> None:
    """Decodes greedily, or samples with --temperature: tokens, tok/s, ms per layer and
    head.

    Example: workbench decode build/llama --prompt-ids 1,42,100 --max-new 64

    Args:
        prompt: Text; needs the tokenizer in the bundle.
        chat: The prompt is a user's message, in the checkpoint's own chat template.
        temperature: 0: always the most likely token.
        top_k: Only the k most likely tokens; 0: all.
        top_p: Only the most likely tokens up to this probability.
        logits: Write logits [max_new + 1, V] fp32 here (.npy).
        literal: Run the graph as it stands, not the portable decode path.
        prefill_bundle: Bundle that runs the prompt instead; its states are copied once.
    """
    if paths.adopted(bundle):
        bundles_only(literal=literal, prefill_bundle=prefill_bundle)
    bundles = [open_folder(path) for path in (bundle, prefill_bundle) if path]
    _look_at_source(prompt_ids, prompt, golden, chat)
    from workbench.adopt.decoder import open_decoder
    from workbench.decode import Sampling
    from workbench.decode.transcript import encode_chat, encode_text, transcript

    sampling = Sampling(temperature, top_k, top_p, seed)
    if prompt is None:
        ids = prompt_of(golden, prompt_ids, bundles[0].manifest.dims.V)
    elif chat:
        ids = encode_chat(bundles[0].tokenizer, prompt)
    else:
        ids = encode_text(bundles[0].tokenizer, prompt)
    how = {"fast": not literal, "compute_units": compute_units}
    decoder, *source = [open_decoder(b, runtime, precision, **how) for b in bundles]
    on_text = None if json else partial(echo, nl=False)
    what = decoder, ids, max_new, logits, sampling, *source
    result = transcript(*what, on_text=on_text)
    show(result, json, _transcript_lines(result))


def _look_at_source(
    prompt_ids: str | None, prompt: str | None, golden: Path | None, chat: bool
) -> None:
    """Refuses all but one source of the prompt, and --chat without a text."""
    if sum(source is not None for source in (prompt_ids, prompt, golden)) != 1:
        actual = "several or none of --prompt-ids, --prompt and --golden"
        raise InputError("prompt", actual, "one of them", "give one of them")
    look_at(golden, None)
    if chat and prompt is None:
        step = "give --prompt TEXT"
        raise InputError("--chat", "token ids", "a text to answer", step)


def _transcript_lines(result: dict) -> list[str]:
    """The token ids, empty where their text was printed as it came, and the summary
    line."""
    times = result["decode"]
    ids = ""
    if result["text"] is None:
        ids = ",".join(map(str, result["tokens"]))
    summary = f"{times['tokens']} tokens"
    if times["tokens_per_s"] is not None:
        summary += f", {times['tokens_per_s']:.1f} tok/s"
    return [ids, f"{summary} ({result['runtime']}, {result['precision']})"]


def reuse_command(
    bundle: Path,
    batch_bundle: Path | None = None,
    max_new: Annotated[int, Option(help="Tokens decoded by each cell.", min=1)] = 6,
    runtime: RuntimeName = "auto",
    compute_units: Units = "CPU_AND_NE",
    precision: Precision = "exact",
    json: Json = False,
) -> None:
    """The cache-reuse matrix: cold, warm, hot × stream, generate × fp16, q4 × batch ×
    context. Every cell's tokens are compared with the same sequence decoded alone from
    a fresh state.

    Example: workbench reuse build/llama --batch-bundle build/llama-2

    Args:
        batch_bundle: The same export with another --batch.
    """
    if paths.adopted(bundle):
        from workbench.cli.adopt import reuse_adopted

        bundles_only(batch_bundle=batch_bundle)
        return reuse_adopted(bundle, max_new, runtime, compute_units, precision, json)
    bundles = [workbench.Bundle.open(path) for path in (bundle, batch_bundle) if path]
    from workbench.studies.cache_reuse import check_reuse

    decoders = []
    for opened in bundles:
        decoders.append(
            workbench.Decoder(opened, runtime, precision, compute_units=compute_units)
        )
    matrix = check_reuse(*decoders, max_new=max_new, progress=not json)
    lines = map(_cell_line, red_first(matrix.cells))
    show(matrix.json(), json, [matrix.verdict, *lines])


def _cell_line(c) -> str:
    """A cell of the cache-reuse matrix in one line."""
    path = "stream" if c.streaming else "generate"
    how = f"batch {c.batch}  {c.cache:5} {path:9}{c.format:5}context {c.context:<6}"
    return f"{c.verdict:8}{how}{c.reason}"
