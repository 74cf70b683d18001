"""`workbench error` splits a bundle's error into parts, `explain` names the model that
a faulty bundle computes, `trace` the range of every operation, `matrix` validates each
compute unit."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

import workbench
from workbench import paths
from workbench.check import gates
from workbench.cli.common import (
    GoldenOf,
    GoldenPath,
    Ids,
    Json,
    Log,
    Only,
    Prompt,
    PromptOf,
    RuntimeName,
    TextFile,
    Tokens,
    Units,
    another,
    bundles_only,
    core_ml_only,
    gate_lines,
    load_golden,
    look_at,
    look_at_prompt,
    prompt_of,
    record,
    show,
)
from workbench.errors import InputError

PANEL = "Where an error comes from"

ExportedFrom = Annotated[
    Path, Option(help="The checkpoint that the bundle was exported from.")
]


def error_command(
    bundle: Path,
    checkpoint: ExportedFrom,
    golden: GoldenPath = None,
    prompt_ids: Ids = None,
    prompt: Prompt = None,
    text: TextFile = None,
    tokens: Tokens = None,
    runtime: RuntimeName = "auto",
    compute_units: Units = "CPU_AND_NE",
    weights: Annotated[
        bool, Option(help="Also find which weights' compression costs most.")
    ] = False,
    log: Log = False,
    json: Json = False,
) -> None:
    """Splits the error of every layer's update into storage, quantization,
    re-authoring, precision and runtime.

    Example: workbench error build/llama --checkpoint data/tiny-llama --weights
    """
    opened = workbench.Bundle.open(bundle)
    look_at(golden, checkpoint)
    look_at_prompt(prompt_ids, prompt, text)
    from workbench.check.golden import Golden, make_golden
    from workbench.check.program import exact_runtime
    from workbench.explain import error
    from workbench.explain import weights as weighing
    from workbench.models.checkpoint import Checkpoint
    from workbench.runtime import resolve

    if weights:
        core_ml_only(opened, "--weights")
    source = Checkpoint(checkpoint)
    runtime = resolve(runtime, opened.manifest.options.target)
    exact_runtime(opened)
    texts = {"prompt": prompt, "text": text, "tokens": tokens, "tokenizer": source.path}
    ids = prompt_of(golden, prompt_ids, opened.manifest.dims.V, **texts)
    reference = Golden.load(golden) if golden else make_golden(source, ids)
    how = {"runtime": runtime, "compute_units": compute_units}
    splits = error.split_error(
        source, opened, ids, reference=reference, **how, progress=not json
    )
    frames = {"layers": splits["isolated"].layers()}
    frames["chained"] = splits["chained"].layers()
    if weights:
        trial = weighing.WeightTrial(opened, source, reference)
        frames["weights"] = weighing.costs(trial)
        frames["remedies"] = weighing.remedies(trial, frames["weights"])
    checks = error.error_gates(splits)
    result = {"verdict": gates.verdict(checks), "gates": [g.json() for g in checks]}
    lines = [result["verdict"], *gate_lines(checks)]
    for name, frame in frames.items():
        result[name] = gates.records(frame)
        lines += ["", name, frame.to_string(index=False, float_format="%.3g")]
    result["shares"] = splits["isolated"].shares().to_dict()
    result["residual"] = max(split.residual for split in splits.values())
    if log:
        _record(opened, "error", result, **how)
    show(result, json, lines)


def _record(
    bundle,
    command: str,
    result: dict,
    runtime: str = "portable",
    compute_units: str | None = None,
) -> None:
    """Logs a result; `runtime` may name a stand-in's fault behind a colon."""
    name, _, fault = runtime.partition(":")
    config = gates.jsonable(result)
    if fault:
        config["fault"] = fault
    row = {"verdict": result["verdict"], "runtime": name, "config": config}
    if name not in ("portable", "coreai"):
        row["compute_units"] = compute_units
    record(command, result, bundle, row)


def explain_command(
    bundle: Path, checkpoint: ExportedFrom, log: Log = False, json: Json = False
) -> None:
    """Finds the variant of the checkpoint's model that a faulty bundle computes:
    another rope, norm, window, scale, order of layers …

    Example: workbench explain build/llama --checkpoint data/tiny-llama
    """
    if paths.adopted(bundle):
        from workbench.cli.adopt import explain_adopted

        bundles_only(record=log)
        return explain_adopted(bundle, checkpoint, json)
    opened = workbench.Bundle.open(bundle)
    paths.checkpoint(checkpoint)
    from workbench.explain import variants
    from workbench.models.checkpoint import Checkpoint

    frame = variants.explain_bundle(opened, Checkpoint(checkpoint), progress=not json)
    fits = variants.fitting(frame)
    result = {"fits": fits, "variants": gates.records(frame)}
    if log:
        row = {"runtime": "portable", "precision": "exact"}
        row["config"] = gates.jsonable(result)
        record("explain", result, opened, row)
    lines = [variants.conclusion(fits)]
    for row in frame.itertuples():
        lines.append(f"{row.relative_rms:<12.3g}{row.name}")
    show(result, json, lines)


def trace_command(
    source: Annotated[Path, Argument(metavar="BUNDLE_OR_PACKAGE")],
    golden: PromptOf = None,
    prompt_ids: Ids = None,
    inputs: Annotated[
        Path | None,
        Option(help="Inputs of a package by name (.npz); missing ones are random."),
    ] = None,
    function: Annotated[str | None, Option(help="The function of a package.")] = None,
    position: Annotated[int, Option(help="Position of a package's call.", min=0)] = 0,
    log: Log = False,
    json: Json = False,
) -> None:
    """Range and headroom in bits of every operation, and the first inf and NaN, with
    one rounding per result and with narrow sums.

    Example: workbench trace build/llama --prompt-ids 1,42,100
    """
    adopted = paths.adopted(source)
    if not adopted:
        paths.bundle_or_package(source)
    look_at(golden, None)
    bundle = None
    if (source / paths.BUNDLE).exists():
        bundle = workbench.Bundle.open(source)
    from workbench.explain import trace

    if bundle:
        ids = prompt_of(golden, prompt_ids, bundle.manifest.dims.V)
        ranges = trace.trace_bundle(bundle, ids)
    elif adopted:
        from workbench.cli.adopt import traced

        bundles_only(
            golden=golden,
            inputs=inputs,
            function=function,
            position=position,
            record=log,
        )
        ranges = traced(source, prompt_ids)
    else:
        bundles_only(record=log)
        from workbench.adopt import probe

        values = probe.inputs(source, function, position)
        if inputs:
            values |= _package_inputs(inputs, source, function)
        ranges = trace.trace_package(source, values, function=function)
    result = ranges.json()
    if log:
        _record(bundle, "trace", result)
    lines = [result["verdict"], *gate_lines(ranges.gates())]
    lines.append(f"{result['ops']} results; the largest:")
    for row in result["worst"]:
        bits = float(row["headroom_bits"])
        largest = float(row["max_abs"])
        lines.append(f"{bits:>8.2f} bits  {largest:<12.6g}{trace.place(row)}")
    show(result, json, lines)


def _package_inputs(path: Path, package: Path, function: str | None) -> dict:
    """The arrays of an .npz as float64; refuses what is no number or no input of the
    package."""
    import zipfile

    import numpy as np

    import miltorch

    subject = f"--inputs {path}"
    names = miltorch.read(package, function).inputs
    # AttributeError: the file holds a single array
    unreadable = (OSError, ValueError, AttributeError, EOFError, zipfile.BadZipFile)
    try:
        arrays = dict(np.load(path).items())
    except unreadable as problem:
        needed = "arrays by name (.npz)"
        step = "write it with numpy.savez"
        raise InputError(subject, type(problem).__name__, needed, step) from None
    if unknown := ", ".join(sorted(arrays.keys() - names.keys())):
        needed = f"some of {', '.join(names)}"
        raise InputError(subject, f"inputs {unknown}", needed, "correct the names")
    others = [name for name in sorted(arrays) if arrays[name].dtype.kind not in "biuf"]
    if text := ", ".join(others):
        raise InputError(
            subject, f"no numbers in {text}", "arrays of numbers", "convert them"
        )
    return {name: value.astype(np.float64) for name, value in arrays.items()}


def matrix_command(
    bundle: Path,
    checkpoint: GoldenOf = None,
    golden: GoldenPath = None,
    prompt_ids: Ids = None,
    runtime: RuntimeName = "auto",
    compute_units: Annotated[
        str | None,
        Option("--compute-units", help="Only these compute units; default: each."),
    ] = None,
    only: Only = None,
    log: Log = False,
    json: Json = False,
) -> None:
    """Validates once per compute unit, each in a process of its own; off a Mac the
    portable runtime's precisions alone.

    Example: workbench matrix build/llama --checkpoint data/tiny-llama
    """
    opened = workbench.Bundle.open(bundle)
    look_at(golden, checkpoint)
    from workbench.check.units import units_verdict, validate_units
    from workbench.runtime import COMPUTE_UNITS, check_compute_units, resolve

    if compute_units:
        check_compute_units(compute_units)
    reference = load_golden(golden, checkpoint, prompt_ids, opened.manifest.dims.V)
    table = validate_units(
        opened,
        reference,
        runtime=another(only) if only else resolve(runtime),
        compute_units=[compute_units] if compute_units else COMPUTE_UNITS,
        path=golden,
        only=bool(only),
    )
    device = bool((table["runtime"] == "coreml").any())
    result = {
        "verdict": units_verdict(table),
        "device_measured": device,
        "units": gates.records(table.astype(object).where(table.notna(), None)),
    }
    if log:
        _record(opened, "matrix", result)
    text = table.drop(columns="runtime").to_string(
        index=False, na_rep="-", float_format="%.4g"
    )
    lines = [result["verdict"], text]
    if not device:
        lines.append("no compute unit was measured: there is no Core ML here")
    show(result, json, lines)
