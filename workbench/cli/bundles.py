"""`export` makes a bundle of a checkpoint, `adopt` one of other exporters' packages,
`golden` the values that it is compared with; `doctor` says what a machine can do."""

import time
from dataclasses import asdict, replace
from pathlib import Path

from cyclopts.types import ExistingFile

import workbench
from workbench import checkpoint_checks, paths
from workbench.cli.mixed import MIXED, FormatTarget, describe_choice
from workbench.cli.options import (
    CalibrationText,
    ExportOptions,
    Json,
    Prompt,
    check_runnable,
    load_checkpoint,
    load_exported_checkpoint,
    reject_unused,
)
from workbench.cli.output import (
    command_line,
    format_result,
    format_value,
    gates_json,
    label,
    print_and_exit,
    step_after_red,
)
from workbench.progress import stage

SIZES_OF_PARTS = (
    "shard_bytes",
    "embedding_bytes",
    "tokenizer_bytes",
    "calibration_bytes",
)
"""The sizes of a bundle's parts, which add up to `bytes`."""


def export(
    checkpoint: Path,
    bundle: Path,
    /,
    *,
    options: ExportOptions = ExportOptions(),
    calibration_text: CalibrationText = CalibrationText(),
    format_target: FormatTarget = FormatTarget(),
    json: Json = False,
) -> None:
    """Exports a Hugging Face folder as a bundle of stateful shards.

    --compress mixed gives every matrix a format of its own and needs --calibrate and one
    target: --max-kl, --bytes or --ms-on.

    Example: workbench export data/tiny-llama build/llama --max-seq-len 256

    Args:
        checkpoint: The folder of a model: config.json and *.safetensors; or the name of
            a model in the local cache of the Hugging Face Hub.
        bundle: Folder of the new bundle, where nothing may be yet.
    """
    folder = paths.locate_checkpoint(checkpoint)
    paths.check_new_bundle(bundle)
    checkpoint_checks.check_family(folder)
    checkpoint_checks.check_quantization(folder)
    checkpoint_checks.check_positions(folder, options.max_seq_len)
    calibration_text.check(options.compress)
    format_target.check(options.compress)
    # before the imports that take seconds
    from workbench.bundle.options import make_options

    chosen_options = make_options(**asdict(options))
    stage("export: reading the checkpoint")
    from workbench.ane.memory import peak_rss

    start = time.perf_counter()
    calibration = search = None
    if calibration_text.calibrate or calibration_text.calibrate_ids:
        calibration = calibration_text.read(load_checkpoint(checkpoint))
    if options.compress == MIXED:
        source = load_checkpoint(checkpoint)
        search = format_target.search_settings(source, chosen_options, calibration)
    exported = workbench.export(
        checkpoint, bundle, calibration=calibration, search=search, **asdict(options)
    )
    result = _describe_bundle(exported, bundle)
    result |= {"seconds": time.perf_counter() - start, "peak_rss_bytes": peak_rss()}
    if search is not None:
        result["mixed"] = describe_choice(exported)
    record = exported.manifest.calibration
    if record:
        result["rounded_to_nearest"] = len(record.nearest)
    lines = format_result(_format_sizes(result))
    if record and record.nearest:
        lines.append(
            f"Not fitted to the text but rounded to the nearest: {record.nearest[0]} "
            "and the other tensors under calibration.nearest in bundle.json."
        )
    if options.layers_per_shard > result["layers"]:
        lines.append(
            "One shard has every decoder layer: the checkpoint has "
            f"{result['layers']}, fewer than --layers-per-shard "
            f"{options.layers_per_shard}."
        )
    if not result["tokenizer"]:
        lines.append(
            "The checkpoint has no tokenizer, so that prompts are token ids: --prompt-ids."
        )
    step = command_line("validate", bundle, "--checkpoint", checkpoint)
    print_and_exit(result, json, lines, next_command=step)


def _describe_bundle(exported, path: Path) -> dict:
    """A new bundle as JSON; `path` as the user gave it. The sizes of its parts add up to
    `bytes`."""
    manifest, shards = exported.manifest, exported.manifest.shards
    # a table of embeddings can be larger than all layers
    shard_bytes = sum(file.bytes for shard in shards for file in shard.files)
    embedding_bytes = manifest.embedding.file.bytes
    tokenizer_bytes = sum(file.bytes for file in manifest.tokens.files)
    # the rest: the ids of a calibration text, and the records of a search for formats
    calibration_bytes = exported.bytes - shard_bytes - embedding_bytes - tokenizer_bytes
    converted = len({shard.template for shard in shards})
    return {
        "bundle": str(path),
        "family": exported.manifest.family,
        "shards": len(shards),
        "layers": exported.manifest.dims.L,
        "bytes": exported.bytes,
        "shard_bytes": shard_bytes,
        "embedding_bytes": embedding_bytes,
        "tokenizer_bytes": tokenizer_bytes,
        "calibration_bytes": calibration_bytes,
        "converted": converted,
        "stamped": len(shards) - converted,
        "tokenizer": exported.tokenizer.is_dir(),
    }


def _format_sizes(result: dict) -> dict:
    """The JSON of a new bundle with the sizes that add up in MiB and in bytes, which have
    no rounding, and with the tokenizer in words. A part without bytes is left out."""
    texts = {}
    for name, value in result.items():
        if name == "bytes" or name in SIZES_OF_PARTS:
            size = f"{format_value(value, name):12}{value:>16,} bytes"
            texts[label(name)] = size if value else None
        elif name == "tokenizer":
            texts[name] = "stored" if value else None
        else:
            texts[name] = value
    return texts


def golden(
    checkpoint: Path,
    /,
    *,
    out: Path,
    prompt: Prompt = Prompt(),
    for_: Path | None = None,
    transcript: bool = False,
    prompts: ExistingFile | None = None,
    json: Json = False,
) -> None:
    """Stores what Hugging Face's model computes in each layer for a prompt, so that
    `validate --golden` does not need the model.

    Example: workbench golden data/tiny-llama --out build/llama.golden --for build/llama

    Args:
        checkpoint: The Hugging Face folder whose model computes the values.
        out: File to write.
        for_: Also writes what `validate` needs for this bundle on a machine without the
            checkpoint: its verdict, and the portable runtime's results.
        transcript: Also writes 48 new tokens of Hugging Face's greedy text after each
            of 16 prompts, for `validate --transcript`.
        prompts: Prompts of your own (JSON lines).
    """
    prompt.check()
    paths.check_output("--out", out)
    if not transcript:
        reject_unused("--transcript", to_add="--transcript", prompts=prompts)
    bundle = workbench.Bundle.open(for_) if for_ else None
    if bundle:
        source = load_exported_checkpoint(checkpoint, bundle, "golden")
        check_runnable(bundle)
    else:
        source = load_checkpoint(checkpoint, "golden")
    from workbench.ane.memory import peak_rss
    from workbench.check import device, gates
    from workbench.check.bug_gates import bug_gates
    from workbench.check.golden import VERDICT_HASH
    from workbench.check.transcript import load_prompts

    openings = load_prompts(prompts or "") if transcript else []
    ids = prompt.token_ids(bundle or source)
    paths.prepare_output("--out", out)
    if bundle:
        results = bug_gates(bundle, source)
    stage("golden: Hugging Face's values")
    reference = workbench.golden.make_golden(source, ids)
    result = {"golden": str(out), "tokens": len(ids), "layers": reference.layer_count}
    result |= reference.meta
    if bundle:
        verdict = gates.save_verdict(bundle, results)
        meta = reference.meta | {VERDICT_HASH: verdict}
        reference = replace(reference, file=out, meta=meta)
    if openings:
        texts = _greedy_texts(source, openings)
        reference = replace(reference, texts=texts)
        result["prompts"] = len(texts.texts)
        result["new_tokens"] = sum(len(text.tokens) for text in texts.texts)
        result["sigma"] = texts.sigma
    reference.save(out)
    result["bytes"] = out.stat().st_size
    if bundle:
        # writes a file beside the golden, at the path that is printed
        device.device_reference(bundle, reference)
        result["reference"] = str(device.reference_path(bundle, reference))
        result |= gates_json(results)  # bug gates alone, so that there is no quality
    result["peak_rss_bytes"] = peak_rss()
    step = step_after_red(result, for_, checkpoint) if bundle else None
    print_and_exit(result, json, next_command=step)


def _greedy_texts(source, openings: list[str]):
    """Hugging Face's texts after prompts. The plan of an export says how a bundle
    stores the stream, whose rounding is measured, and whether layers are recurrent."""
    from workbench.bundle.options import make_options
    from workbench.check.transcript import greedy_texts
    from workbench.exporter import read_plan

    # no option decides either; every checkpoint has so many positions
    plan = read_plan(source, make_options(max_seq_len=8))
    scale = 2.0**plan.residual_exponent
    batched = not any(plan.side_states)
    return greedy_texts(source, openings, scale, batched=batched)


def adopt(*packages: Path, checkpoint: Path, out: Path, json: Json = False) -> None:
    """Turns another exporter's packages into a bundle that every command accepts.
    Prints what it assumed; edit bundle.json to correct it.

    Example: workbench adopt anemll/ --checkpoint data/tiny-llama --out build/adopted

    Args:
        packages: Core ML packages (.mlpackage), or folders with some.
        checkpoint: The checkpoint that was exported.
        out: Folder of the new bundle; the packages are linked into it.
    """
    paths.check_packages(packages)
    paths.check_new_bundle(out)
    source = load_checkpoint(checkpoint, "adopt")
    from workbench.adopt import adopt_packages

    stage("adopt: reading the packages and running one token")
    bundle, assumptions = adopt_packages(packages, source, out)
    rows = [assumption.json() for assumption in assumptions]
    result = {"bundle": str(bundle.root), "assumed": rows}
    step = command_line("validate", out, "--checkpoint", checkpoint)
    print_and_exit(result, json, next_command=step)


def doctor(*, json: Json = False) -> None:
    """What this machine can do, and what a Mac would add.

    Example: workbench doctor --json
    """
    stage("doctor: examining this machine")
    from workbench.doctor import examine

    print_and_exit(examine(), json)
