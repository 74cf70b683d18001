"""`workbench bench export`: what an export costs, beside the plain loop over coremltools and the disk."""

from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.app import Json, show
from workbench.cli.bench import Folder, bench, line, source

WARM_UP = dict(hidden_size=64, intermediate_size=64, num_attention_heads=2, num_key_value_heads=2, head_dim=32,
               num_experts=2, moe_intermediate_size=64, router_hidden_size=32, num_hidden_layers=2, vocab_size=64)  # fmt: skip


@bench.command()
def export(
    family: Annotated[str, typer.Option(help="qwen2 (Qwen2.5-0.5B) or zaya (ZAYA1-8B): real dimensions, random weights.")] = "qwen2",
    layers: Annotated[int | None, typer.Option(help="Decoder layers (default: the model's own).")] = None,
    compress: Annotated[str, typer.Option(help="As for export.")] = "int8-tensor",
    moe: Annotated[str, typer.Option(help="dense or routed.")] = "dense",
    plain: Annotated[bool, typer.Option(help="Also export plainly and compare times and bytes.")] = True,
    rounds: Annotated[int, typer.Option(min=1)] = 1, folder: Folder = Path("build/bench"), json: Json = False,
) -> None:  # fmt: skip
    """Stamped against plain export, against the disk, and one layer against one layer.

    Example: workbench bench export --compress fp16
    """
    from workbench.benchmarks import export

    dims, count = export.model(family)
    checkpoint = source(folder, f"{family}-bf16", family, layers or count, dtype="bfloat16", **dims)
    chosen = {"compress": compress} | ({"moe": moe} if family == "zaya" else {})
    found = export.compare_exports(export_once, export_layers if plain else None, checkpoint.path, folder / "export", rounds, chosen)
    lines = [*map(line, found["rows"]), *(f"{name}: {value}" for name, value in found.items() if name != "rows")]
    show(found, json, lines)


def export_once(checkpoint: str, target: str, plain: bool, chosen: dict) -> dict:
    """One export, timed after a tiny one has imported and warmed up everything; meant for a process of its own."""
    import tempfile
    import time

    from workbench import export as exports
    from workbench.ane.memory import peak_rss
    from workbench.models import checkpoint as checkpoints

    source = checkpoints.Checkpoint(checkpoint)
    with tempfile.TemporaryDirectory() as folder:
        tiny = checkpoints.random(f"{folder}/tiny", source.config.model_type, **WARM_UP)
        exports.export(tiny, f"{folder}/bundle", progress=False, **chosen)
    clock, start = exports.Clock(), time.perf_counter()
    made = exports.export(checkpoint, target, progress=False, plain=plain, clock=clock, **chosen)
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds, "identity": made.identity, "bytes": made.bytes,
        "stamped": sum(s.how == "stamped" for s in made.manifest.shards), "shards": len(made.manifest.shards),
        "split": {kind: clock.total(kind) for kind in ("template", "read", "compress", "write")}, "peak_rss_bytes": peak_rss(),
    }  # fmt: skip


def export_layers(checkpoint: str, folder: str, count: int, chosen: dict) -> dict:
    """Seconds of each of `count` decoder layers, converted and stamped in turn, one thread, after their template."""
    import time
    from contextlib import closing

    from miltorch.quiet import coremltools
    from workbench import export as exports
    from workbench.bundle import Writer
    from workbench.export.make import Maker
    from workbench.models.checkpoint import Checkpoint

    coremltools()
    source, options = Checkpoint(checkpoint), exports.options(**chosen)
    plan, found = exports.read_plan(source, options), {"plain": [], "stamped": []}
    with closing(Writer(Path(folder))) as writer:
        maker, plainly = (Maker(source, plan, options, writer, plain) for plain in (False, True))
        first, *others = [spec for spec in maker.specs if spec.kind == "layers"]
        maker.convert(first)
        for spec in others[:count]:
            for how, work in (("plain", plainly.convert), ("stamped", lambda spec: maker.stamp(spec) or maker.convert(spec))):
                start = time.perf_counter()
                work(spec)
                found[how].append(time.perf_counter() - start)
    return found
