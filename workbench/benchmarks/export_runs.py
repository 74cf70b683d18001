"""The child processes of `workbench bench export`: one whole export, or single
layers."""

from pathlib import Path

WARM_UP = dict(
    hidden_size=64,
    intermediate_size=64,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=32,
    num_experts=2,
    moe_intermediate_size=64,
    router_hidden_size=32,
    num_hidden_layers=2,
    vocab_size=64,
)


def export_once(checkpoint: str, target: str, plain: bool, options: dict) -> dict:
    """One export, timed after a tiny one has imported and warmed up everything; meant
    for a process of its own."""
    import tempfile
    import time

    from workbench import export as exports
    from workbench.ane.memory import peak_rss
    from workbench.models import checkpoint as checkpoints

    source = checkpoints.Checkpoint(checkpoint)
    with tempfile.TemporaryDirectory() as folder:
        tiny = checkpoints.random(f"{folder}/tiny", source.config.model_type, **WARM_UP)
        exports.export(tiny, f"{folder}/bundle", progress=False, **options)
    clock, start = exports.Clock(), time.perf_counter()
    bundle = exports.export(
        checkpoint, target, progress=False, plain=plain, clock=clock, **options
    )
    seconds, shards = time.perf_counter() - start, bundle.manifest.shards
    kinds = "template", "read", "compress", "write"
    return {
        "seconds": seconds,
        "identity": bundle.identity,
        "bytes": bundle.bytes,
        "stamped": sum(shard.how == "stamped" for shard in shards),
        "shards": len(shards),
        "split": {kind: clock.total(kind) for kind in kinds},
        "peak_rss_bytes": peak_rss(),
    }


def export_layers(checkpoint: str, folder: str, count: int, options: dict) -> dict:
    """Seconds of each of `count` decoder layers, converted and stamped in turn, one
    thread, after their template."""
    from contextlib import closing
    from functools import partial

    from miltorch.quiet import coremltools
    from workbench import export as exports
    from workbench.benchmarks.stopwatch import seconds
    from workbench.bundle import Writer
    from workbench.models.checkpoint import Checkpoint

    coremltools()
    source, options = Checkpoint(checkpoint), exports.options(**options)
    plan, make = exports.read_plan(source, options), exports.MAKERS[options.target]
    times = {"plain": [], "stamped": []}
    with closing(Writer(Path(folder))) as writer:
        maker = make(source, plan, options, writer, plain=False)
        plainly = make(source, plan, options, writer, plain=True)

        def stamp(spec):
            maker.stamp(spec) or maker.convert(spec)

        first, *others = [spec for spec in maker.specs if spec.kind == "layers"]
        maker.convert(first)
        for spec in others[:count]:
            times["plain"].append(seconds(partial(plainly.convert, spec)))
            times["stamped"].append(seconds(partial(stamp, spec)))
    return times
