"""`workbench reuse`: is a restored cache the cache it was?"""

from pathlib import Path
from typing import Annotated

import typer

from workbench.cli import BundlePath, Json, Precision, RuntimeName, app, show


@app.command()
def reuse(
    bundle: BundlePath,
    batch_bundle: Annotated[Path | None, typer.Option(help="The same export with another --batch.")] = None,
    max_new: Annotated[int, typer.Option("--max-new", help="Tokens decoded by each cell.")] = 6,
    runtime: RuntimeName = "auto",
    precision: Precision = "declared",
    json: Json = False,
) -> None:
    """The cache-reuse matrix: cold, warm, hot × stream, generate × fp16, q4 × batch × context, against sequences alone.

    Example: workbench reuse build/llama --batch-bundle build/llama-2
    """
    from workbench.decode import Decoder
    from workbench.eval import reuse as matrix

    decoders = [Decoder(path, runtime, precision, fast=False) for path in (bundle, batch_bundle) if path]
    found = matrix.run(*decoders, max_new=max_new, progress=not json)
    order = {"RED": 0, "not_run": 2}
    lines = [f"{c.verdict:8}batch {c.batch}  {c.cache:5} {'stream' if c.streaming else 'generate':9}{c.format:5}"
             f"context {c.context:<6}{c.reason}" for c in sorted(found.cells, key=lambda c: order.get(c.verdict, 1))]  # fmt: skip
    show(found.json(), json, [found.verdict, *lines])
