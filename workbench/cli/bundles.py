"""`export` makes a bundle of a checkpoint, `adopt` one of other exporters' packages,
`golden` the values that it is compared with; `doctor` says what a machine can do with
it."""

import time
from dataclasses import asdict, replace
from pathlib import Path

import workbench
from workbench import paths
from workbench.cli.common import Json, Options, Prompt, judged, opened, show, text
from workbench.progress import stage


def export(
    checkpoint: Path,
    bundle: Path,
    /,
    *,
    options: Options = Options(),
    json: Json = False,
) -> None:
    """Exports a Hugging Face folder as a bundle of stateful shards.

    Example: workbench export data/tiny-llama build/llama --max-seq-len 256
    """
    folder = paths.locate_checkpoint(checkpoint)
    paths.check_new_bundle(bundle)
    paths.check_family(folder)
    paths.check_quantization(folder)
    stage("export: reading the checkpoint")
    from workbench.ane.memory import peak_rss

    start = time.perf_counter()
    made = workbench.export(checkpoint, bundle, **asdict(options))
    shards = made.manifest.shards
    converted = len({shard.template for shard in shards})
    result = {
        "bundle": str(bundle),
        "family": made.manifest.family,
        "shards": len(shards),
        "layers": made.manifest.dims.L,
        "bytes": made.bytes,
        "converted": converted,
        "stamped": len(shards) - converted,
        "tokenizer": made.tokenizer.is_dir(),
        "seconds": time.perf_counter() - start,
        "peak_rss_bytes": peak_rss(),
    }
    lines = text(result)
    if not result["tokenizer"]:
        lines.append(
            "The checkpoint has no tokenizer, so that prompts are token ids: --prompt-ids."
        )
    show(result, json, lines)


def golden(
    checkpoint: Path,
    /,
    *,
    out: Path,
    prompt: Prompt = Prompt(),
    for_: Path | None = None,
    json: Json = False,
) -> None:
    """Writes Hugging Face's per-layer values once; comparing commands take them with
    --golden.

    Example: workbench golden data/tiny-llama --out build/llama.golden --for build/llama

    Args:
        out: File to write.
        for_: Also writes what `validate` needs for this bundle on a machine without the
            checkpoint: its verdict, and the portable runtime's results.
    """
    prompt.given()
    target = workbench.Bundle.open(for_) if for_ else None
    source = opened(checkpoint)
    from workbench.check import gates, validate
    from workbench.check.golden import VERDICT_HASH

    ids = prompt.of(target or source)
    paths.prepare_output("--out", out)
    # before the golden, since another checkpoint than the bundle's is refused here
    checks = target and validate.bug_gates(target, source)
    made = workbench.golden.make_golden(source, ids)
    result = {"golden": str(out), "tokens": len(ids), "layers": made.layers}
    result |= made.meta
    if target:
        verdict = gates.save_verdict(target, checks)
        made = replace(made, file=out, meta=made.meta | {VERDICT_HASH: verdict})
    made.save(out)
    result["bytes"] = out.stat().st_size
    if target:
        validate.device_reference(target, made)
        result["reference"] = str(validate.reference_path(target, made))
        result |= judged(checks)
    show(result, json)


def adopt(*packages: Path, checkpoint: Path, out: Path, json: Json = False) -> None:
    """Makes a bundle of another exporter's packages: its manifest describes them, so
    that every command takes it. Prints what it assumed; edit bundle.json to correct it.

    Example: workbench adopt anemll/ --checkpoint data/tiny-llama --out build/adopted

    Args:
        checkpoint: The checkpoint that was exported.
        out: Folder of the new bundle; the packages are linked into it.
    """
    source = opened(checkpoint)
    from workbench.adopt import propose

    bundle, assumed = propose(packages, source, out)
    show({"bundle": str(bundle.root), "assumed": assumed}, json)


def doctor(*, json: Json = False) -> None:
    """What this machine can do, and what a Mac would add.

    Example: workbench doctor --json
    """
    from workbench.doctor import examine

    show(examine(), json)
