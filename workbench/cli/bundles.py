"""`export` makes a bundle of a checkpoint, `adopt` one of other exporters' packages,
`golden` the values that it is compared with; `plan` and `doctor` say what a machine can
do with it."""

import time
from dataclasses import asdict, replace
from pathlib import Path

import workbench
from workbench import paths
from workbench.cli.common import (
    Device,
    Json,
    Options,
    Prompt,
    judged,
    opened,
    show,
    text,
    unread,
)
from workbench.progress import stage

PLACED_ON = "M4 Max"
"""The chip whose placement is predicted where none is named."""


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
    folder = paths.checkpoint(checkpoint)
    paths.new(bundle)
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
    paths.writable("--out", out)
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


def plan(
    bundle_or_checkpoint: Path,
    /,
    *,
    options: Options = Options(),
    device: Device = Device(),
    memory: str | None = None,
    chip: str | None = None,
    json: Json = False,
) -> None:
    """Bytes against a machine's memory, the decode speed predicted for each chip, and
    the compute unit of every operation of a bundle.

    Placement is Core ML's own plan on a Mac, elsewhere a prediction from published
    rules. The options are those of an export that a checkpoint would have; a bundle has
    its own.

    Example: workbench plan data/tiny-llama --max-seq-len 4096 --memory 16G

    Args:
        memory: Memory of the target machine, such as 16G; default: this one's.
        chip: The chip to predict for, such as M1 or M4 Max; default: the speed of every
            chip, and the placement on M4 Max.
    """
    path, bundle = bundle_or_checkpoint, None
    if (path / paths.BUNDLE).exists():
        bundle = workbench.Bundle.open(path)
        unread("a checkpoint in place of a bundle", options)
    else:
        unread("a bundle", device)
        paths.check_family(paths.checkpoint(path))
    import psutil

    from workbench import exporter, process
    from workbench.ane import memory as budgets
    from workbench.ane import placement, roofline
    from workbench.runtime import resolve

    placed_on = chip or PLACED_ON
    generation = roofline.generation(placed_on)
    machine = psutil.virtual_memory().total
    if memory is not None:
        machine = budgets.parse_bytes(memory)
    if bundle:
        subject, chosen = [bundle], bundle.manifest.options
    else:
        source = opened(path)
        chosen = exporter.make_options(**asdict(options))
        exporter.read_plan(source, chosen)  # refuses what the export does
        subject = source, chosen
    sizes = budgets.budget(*subject) | {"machine": machine}
    found = budgets.fits(sizes["total"], machine)
    found |= {"bytes": sizes, "chips": [], "predicted_misfit": None, "assumes": None}
    placements, known = [], []
    if not chosen.plugin:  # the rules and speeds are those of Core ML programs
        speeds = roofline.by_chip(budgets.work(*subject))
        if chip:
            speeds = speeds[speeds["chip"] == chip]
        found["chips"] = speeds.to_dict("records")
        found["predicted_misfit"] = float(roofline.misfits()["misfit"].abs().median())
        found["assumes"] = roofline.describe_fit()
    if bundle and not chosen.plugin:
        units, runtime = device.compute_units, resolve(device.runtime)
        if runtime != "portable":
            about = bundle.root, bundle.manifest.shards, runtime, units
            made = process.call(placement.plan, *about)
            placements = made.value
            if made.failure:
                known = [f"Predicted, since Core ML gave no plan: {made.failure}"]
        if not placements:
            placements = placement.predicted_placement(bundle, generation)
    # the sentence says what the number is
    lines, source = text(found | {"predicted_misfit": None}), "predicted"
    if placements:
        source = placements[0].source
        lines += ["", *placement.lines(placements), *known]
    found |= {
        "source": source,
        "chip": placed_on if source == "predicted" else None,
        "known": known,
        "shards": [placed.json() for placed in placements],
    }
    show(found, json, lines)
