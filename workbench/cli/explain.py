"""`workbench explain`: why a bundle's values differ from the model's, on one page."""

from pathlib import Path
from typing import Annotated

from typer import Argument

import workbench
from workbench import paths
from workbench.check import gates
from workbench.cli.common import Checkpoint, Json, Prompt, gate_lines, judged, show
from workbench.errors import InputError, check_choice

PANEL = "Check"
PAGE = ("parts", "variant", "ranges")
KINDS = (*PAGE, "weights")


def explain_command(
    prompt: Prompt,
    bundle: Annotated[Path, Argument(metavar="BUNDLE_OR_PACKAGE")],
    checkpoint: Checkpoint = None,
    only: str | None = None,
    op: bool = False,
    layer: int | None = None,
    position: int | None = None,
    reduce: Path | None = None,
    runtime: str = "auto",
    compute_units: str = "CPU_AND_NE",
    json: Json = False,
) -> None:
    """Splits the error into its parts, names the variant of the model that the bundle
    computes, and the operations nearest to overflow.

    Example: workbench explain build/llama --checkpoint data/tiny-llama

    Args:
        only: One of these: parts (storage, re-authoring, quantization, precision,
            runtime), variant, ranges (the first inf or NaN, headroom in bits; needs no
            checkpoint), weights (whose compression costs most).
        op: Names the operation that the runtime computes wrongly; needs no checkpoint.
        layer: With --op, searches this layer alone.
        position: With --op, searches the calls of this position alone.
        reduce: With --op, writes the smallest package that shows it into this folder.
        runtime: Whose part of the error is measured: auto, portable, coreml, stand-in.
        compute_units: With --op: CPU_AND_NE, CPU_ONLY, CPU_AND_GPU or ALL.
    """
    if op:
        cell = {"layer": layer, "position": position, "compute_units": compute_units}
        cell["runtime"] = runtime
        result, lines = _operation(bundle, prompt, reduce, not json, **cell)
        return show(result, json, lines)
    if only:
        check_choice("--only", only, KINDS)
    kinds = [only] if only else PAGE
    if package := paths.is_package(paths.bundle_or_package(bundle)):
        kinds = [kind for kind in kinds if kind == "ranges"]
    if not kinds:
        needed, step = "a bundle", "give a folder with bundle.json"
        raise InputError(f"--only {only}", "packages without a bundle", needed, step)
    prompt.given()
    if kinds != ["ranges"]:
        if not checkpoint:
            needed, step = "what was exported", "give --checkpoint, or --only ranges"
            raise InputError("explain", "no --checkpoint", needed, step)
        paths.checkpoint(checkpoint)
    if package:
        from workbench.explain import trace

        found = {"ranges": _ranges(trace.trace_package(bundle))}
    else:
        opened = workbench.Bundle.open(bundle)
        if not (only or opened.manifest.shows_hidden):
            kinds = [kind for kind in kinds if kind != "parts"]
        found = _of_bundle(opened, checkpoint, prompt, runtime, kinds, not json)
    result, lines, checks = {}, [], []
    for kind, (part, text, own) in found.items():
        result |= part
        lines += ["", kind, *text]
        checks += own
    if checks:
        result |= judged(checks)
        lines = [result["verdict"], *gate_lines(checks), *lines]
    show(result, json, lines)


def _operation(
    path: Path, prompt: Prompt, reduce: Path | None, progress: bool, **cell
) -> tuple[dict, list[str]]:
    """The result of `--op` and its lines."""
    from tqdm.auto import tqdm

    from workbench.cli.plan import core_ml_only
    from workbench.explain import operation, reduced, trace

    prompt.given()
    bundle = workbench.Bundle.open(path)
    core_ml_only(bundle, "--op")
    ids = prompt.ids(bundle.manifest.dims.V, bundle.tokenizer)
    shards = 1 if cell["layer"] is not None else len(bundle.manifest.shards)
    cost = f"one package a shard ({shards}), about ten more for a wrong one"
    with tqdm(desc=cost, unit="package", disable=not progress) as bar:
        found, search = operation.find_operation(
            bundle, ids, **cell, report=lambda count: bar.update()
        )
        result = {"operation": found.json()}
        if reduce and found.region:
            units = cell["compute_units"]
            result["reduced"] = reduced.reduce(search, found, reduce, units)
    lines = [f"{found.verdict}: {found.reason}", *map(trace.place, found.ops)]
    lines += [f"{name} {value}" for name, value in found.where.items()]
    lines.append(f"{found.packages} packages, {found.seconds:.0f} s")
    verdict = "GREEN" if found.verdict == "none" else "RED"
    return {"verdict": verdict} | result, [verdict, *lines]


def _of_bundle(
    bundle, checkpoint: Path | None, prompt: Prompt, runtime: str, kinds, progress: bool
) -> dict[str, tuple]:
    """Of each kind its result, its lines and its gates."""
    from workbench.models import checkpoint as checkpoints

    source = checkpoint and checkpoints.Checkpoint(checkpoint)
    tokenizer = source.path if source else bundle.tokenizer
    ids = prompt.ids(bundle.manifest.dims.V, tokenizer)
    found = {}
    for kind in kinds:
        if kind == "ranges":
            from workbench.explain import trace

            found[kind] = _ranges(trace.trace_bundle(bundle, ids))
        elif kind == "variant":
            found[kind] = _variant(bundle, source, progress)
        elif kind == "parts":
            found[kind] = _parts(bundle, source, ids, runtime, progress)
        else:
            found[kind] = _weights(bundle, source, ids)
    return found


def _parts(bundle, source, ids: list[int], runtime: str, progress: bool) -> tuple:
    from workbench.check.golden import make_golden
    from workbench.check.program import exact_runtime
    from workbench.explain import error
    from workbench.runtime import resolve

    runtime = resolve(runtime, bundle.manifest.options.plugin)
    exact_runtime(bundle)
    how = {"reference": make_golden(source, ids), "runtime": runtime}
    splits = error.split_error(source, bundle, ids, **how, progress=progress)
    frames = {
        "parts": splits["isolated"].layers(),
        "chained": splits["chained"].layers(),
    }
    result, lines = _tables(frames)
    result["shares"] = splits["isolated"].shares().to_dict()
    return result, lines, error.error_gates(splits)


def _weights(bundle, source, ids: list[int]) -> tuple:
    from workbench.check.golden import make_golden
    from workbench.cli.plan import core_ml_only
    from workbench.explain import weights

    core_ml_only(bundle, "--only weights")
    trial = weights.WeightTrial(bundle, source, make_golden(source, ids))
    costs = weights.costs(trial)
    frames = {"weights": costs, "remedies": weights.remedies(trial, costs)}
    return *_tables(frames), []


def _tables(frames: dict) -> tuple[dict, list[str]]:
    """Tables by name as JSON and as lines; the first stands below its kind's name."""
    result, lines = {}, []
    for name, frame in frames.items():
        result[name] = gates.records(frame)
        shown = frame.astype(object).where(frame.notna(), "-")
        table = shown.to_string(index=False, float_format="{:.3g}".format)
        lines += ["", name, *table.splitlines()]
    return result, lines[2:]


def _variant(bundle, source, progress: bool) -> tuple:
    from workbench.explain import variants
    from workbench.explain.calls import call_faults

    frame = variants.explain_bundle(bundle, source, progress=progress)
    fits = variants.fitting(frame, variants.tolerance(bundle))
    lines, faults = [variants.conclusion(fits)], []
    if not bundle.manifest.shows_hidden:
        # the variant is of calls of one token
        decoder = workbench.Decoder(bundle, "portable", "exact")
        ids = Prompt().ids(bundle.manifest.dims.V, source.path)
        faults = call_faults(decoder, ids[: bundle.manifest.options.max_seq_len])
    lines += [f"But {fault}." for fault in faults]
    for row in frame.itertuples():
        lines.append(f"{row.relative_rms:<12.3g}{row.name}")
    result = {"fits": fits, "variants": gates.records(frame), "faults": faults}
    return result, lines, []


def _ranges(ranges) -> tuple:
    from workbench.explain import trace

    result = ranges.json()
    del result["verdict"]
    lines = [f"{result['ops']} results; the largest:"]
    for row in result["worst"]:
        bits, largest = float(row["headroom_bits"]), float(row["max_abs"])
        lines.append(f"{bits:>8.2f} bits  {largest:<12.6g}{trace.place(row)}")
    return {"ranges": result}, lines, ranges.gates()
