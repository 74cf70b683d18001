"""`workbench decode` and `workbench reuse`: tokens, and whether a restored cache goes on with the same ones."""

from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.app import BundlePath, Ids, Json, Precision, RuntimeName, app, parse_ids, show
from workbench.errors import InputError


@app.command()
def decode(
    bundle: BundlePath, prompt_ids: Ids = None,
    prompt: Annotated[str | None, typer.Option(help="Text; needs the tokenizer in the bundle.")] = None,
    max_new: Annotated[int, typer.Option("--max-new", help="New tokens.", min=0)] = 32,
    temperature: Annotated[float, typer.Option(help="0: always the most likely token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Only the k most likely tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Only the most likely tokens up to this probability.")] = 1.0,
    seed: int = 0, logits: Annotated[Path | None, typer.Option(help="Write logits [max_new + 1, V] fp32 here (.npy).")] = None,
    runtime: RuntimeName = "auto", precision: Precision = "declared",
    literal: Annotated[bool, typer.Option("--literal", help="Run the graph as it stands, not the portable decode path.")] = False,
    json: Json = False,
) -> None:  # fmt: skip
    """Decoding, greedy unless told otherwise: tokens, tok/s, per-layer ms, head ms.

    Example: workbench decode build/llama --prompt-ids 1,42,100 --max-new 64
    """
    from workbench.decode import Decoder, Sampling
    from workbench.decode.transcript import transcript

    sampling = Sampling(temperature, top_k, top_p, seed)
    decoder = Decoder(bundle, runtime, precision, fast=not literal)
    result = transcript(decoder, _prompt(decoder, prompt_ids, prompt), max_new, logits, sampling)
    d = result["decode"]
    rate = "" if d["tokens_per_s"] is None else f", {d['tokens_per_s']:.1f} tok/s"
    show(result, json, [result["text"] if result["text"] is not None else ",".join(map(str, result["tokens"])),
                        f"{d['tokens']} tokens{rate} ({result['runtime']}, {result['precision']})"])  # fmt: skip


def _prompt(decoder, prompt_ids: str | None, prompt: str | None) -> list[int]:
    from workbench.decode.transcript import load_tokenizer

    if (prompt_ids is None) == (prompt is None):
        raise InputError("prompt", "both or neither of --prompt-ids and --prompt", "one of them", "give one of them")
    return parse_ids(prompt_ids) if prompt_ids is not None else load_tokenizer(decoder.bundle.root / "tokenizer").encode(prompt)


@app.command()
def reuse(
    bundle: BundlePath,
    batch_bundle: Annotated[Path | None, typer.Option(help="The same export with another --batch.")] = None,
    max_new: Annotated[int, typer.Option("--max-new", help="Tokens decoded by each cell.", min=1)] = 6,
    runtime: RuntimeName = "auto", precision: Precision = "exact", json: Json = False,
) -> None:  # fmt: skip
    """The cache-reuse matrix: cold, warm, hot × stream, generate × fp16, q4 × batch × context, against sequences alone.

    Example: workbench reuse build/llama --batch-bundle build/llama-2
    """
    from workbench.bundle import Bundle

    bundles = [Bundle.open(path) for path in (bundle, batch_bundle) if path]
    from workbench.decode import Decoder
    from workbench.studies import cache_reuse as matrix

    decoders = [Decoder(each, runtime, precision) for each in bundles]
    found = matrix.check_reuse(*decoders, max_new=max_new, progress=not json)
    order = {"RED": 0, "not_run": 2}
    lines = [f"{c.verdict:8}batch {c.batch}  {c.cache:5} {'stream' if c.streaming else 'generate':9}{c.format:5}"
             f"context {c.context:<6}{c.reason}" for c in sorted(found.cells, key=lambda c: order.get(c.verdict, 1))]  # fmt: skip
    show(found.json(), json, [found.verdict, *lines])
