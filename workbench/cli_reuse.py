"""`workbench reuse` and `workbench bench reuse`: is a restored cache the cache it was, and what does it save?"""

from pathlib import Path
from typing import Annotated

import typer

from workbench.cli import BundlePath, Json, Precision, RuntimeName, app, show
from workbench.cli_bench import QWEN_05B, Folder, bench, show_rows, source


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


@bench.command("reuse")
def bench_reuse(
    layers: Annotated[int, typer.Option(help="Decoder layers of the stack.")] = 24,
    context: Annotated[int, typer.Option(help="The longest context, in tokens.")] = 2048,
    rounds: Annotated[int, typer.Option(help="Rounds in which every contestant runs once.")] = 5,
    folder: Folder = Path("build/bench"),
    json: Json = False,
) -> None:
    """Time to the first token cold, warm and hot, snapshot sizes and bandwidths, on Qwen2.5-0.5B's dimensions.

    Example: workbench bench reuse --layers 4
    """
    from workbench import sweep
    from workbench.decode import Decoder
    from workbench.eval import bench_reuse as benches
    from workbench.export import options

    opened = source(folder, "qwen2", "qwen2", layers, **QWEN_05B)
    bundle = sweep.bundle_for(opened, options(max_seq_len=context, t_max=64), folder, progress=not json)
    contexts = [n for n in (256, 512, 1024, 2048) if n < context] + [context]
    show_rows(benches.reuse(Decoder(bundle), contexts=contexts, rounds=rounds, progress=not json), json)
