"""`workbench error`, `trace` and `matrix`: where a bundle's error comes from, how near it comes to fp16's limits, and what
each compute unit makes of it."""

from pathlib import Path
from typing import Annotated

import typer

from workbench import paths
from workbench.cli.app import BundlePath, GoldenOf, GoldenPath, Ids, Json, Log, app, gate_lines, ids_for, load_golden, look_at, show
from workbench.errors import InputError


@app.command()
def error(
    bundle: BundlePath, checkpoint: Annotated[Path, typer.Option(help="The checkpoint that the bundle was exported from.")],
    prompt_ids: Ids = None,
    plain: Annotated[Path | None, typer.Option(help="fp16 export with the same options (default: made in data/bundles).")] = None,
    weights: Annotated[bool, typer.Option(help="Also find which weights' compression costs most.")] = False,
    log: Log = False, json: Json = False,
) -> None:  # fmt: skip
    """The error of every layer's update, split into storage, re-authoring, quantization, precision and runtime.

    Example: workbench error build/llama --checkpoint data/tiny-llama --weights
    """
    from workbench.bundle import Bundle

    opened, twin = Bundle.open(bundle), Bundle.open(plain) if plain else None
    paths.checkpoint(checkpoint)
    from workbench.check import gates, golden
    from workbench.explain import error as splitting
    from workbench.explain import weights as weighing
    from workbench.models.checkpoint import Checkpoint
    from workbench.runtime import coreml_available

    source = Checkpoint(checkpoint)
    ids = ids_for(prompt_ids, opened.manifest.dims.V)
    twin = twin or _uncompressed(opened, source, progress=not json)
    splits = splitting.split_error(source, opened, twin, ids, device=coreml_available(), progress=not json)
    frames = {"layers": splits["isolated"].layers(), "chained": splits["chained"].layers()}
    if weights:
        trial = weighing.WeightTrial(opened, twin, golden.make_golden(source, ids))
        frames["weights"] = weighing.costs(trial)
        frames["remedies"] = weighing.remedies(trial, frames["weights"])
    found = splitting.error_gates(splits)
    result = {"verdict": gates.verdict(found), "gates": [g.json() for g in found]}
    result |= {name: gates.records(frame) for name, frame in frames.items()}
    result |= {"shares": splits["isolated"].shares().to_dict(), "residual": max(s.residual for s in splits.values())}
    if log:
        result["run_id"] = _record(opened, "error", result)
    shown = [line for name, frame in frames.items() for line in ("", name, frame.to_string(index=False, float_format="%.3g"))]
    show(result, json, [result["verdict"], *gate_lines(found), *shown])


def _uncompressed(bundle, checkpoint, progress: bool):
    """The fp16 export that differs from `bundle` in nothing else: itself, or one kept in data/bundles."""
    from workbench import log, sweep

    options = bundle.manifest.options
    if options.compress == "fp16":
        return bundle
    folder = log.project() / "data" / "bundles"
    return sweep.bundle_for(checkpoint, options.model_copy(update={"compress": "fp16"}), folder, progress)


def _record(bundle, command: str, result: dict) -> str:
    from workbench.check.gates import jsonable
    from workbench.sweep import runs

    row = runs.describe(bundle) | {"verdict": result["verdict"], "command": command, "runtime": "portable"}
    return runs.record_run(command, row | {"config": jsonable(result)})


@app.command()
def trace(
    source: Annotated[Path, typer.Argument(metavar="BUNDLE_OR_PACKAGE")], prompt_ids: Ids = None,
    inputs: Annotated[Path | None, typer.Option(help="Inputs of a package by name (.npz); missing ones are random.")] = None,
    log: Log = False, json: Json = False,
) -> None:  # fmt: skip
    """Range of every operation, headroom in bits, first inf and NaN, with one rounding per result and with narrow sums.

    Example: workbench trace build/llama --prompt-ids 1,42,100
    """
    from workbench.bundle import Bundle

    paths.bundle_or_package(source)
    bundle = Bundle.open(source) if (source / paths.BUNDLE).exists() else None
    from workbench.explain import trace as tracing

    if bundle:
        found = tracing.trace_bundle(bundle, ids_for(prompt_ids, bundle.manifest.dims.V))
    else:
        found = tracing.trace_package(source, _package_inputs(inputs, source) if inputs else None)
    result = found.json()
    if log and bundle:
        result["run_id"] = _record(bundle, "trace", result)
    worst = [f"{float(w['headroom_bits']):>8.2f} bits  {float(w['max_abs']):<12.6g}{tracing.place(w)}" for w in result["worst"]]
    show(result, json, [result["verdict"], *gate_lines(found.gates()), f"{result['ops']} results; the largest:", *worst])


def _package_inputs(path: Path, package: Path) -> dict:
    """The arrays of an .npz, all of them numbers, and inputs of the package."""
    import zipfile

    import numpy as np

    import miltorch

    try:
        found = {name: np.array(value) for name, value in np.load(path).items()}
    except (OSError, ValueError, AttributeError, EOFError, zipfile.BadZipFile) as problem:  # AttributeError: a single array
        raise InputError(f"--inputs {path}", type(problem).__name__, "arrays by name (.npz)", "write it with numpy.savez") from None
    known = miltorch.read(package).inputs
    if unknown := sorted(found.keys() - known.keys()):
        raise InputError(f"--inputs {path}", f"inputs {', '.join(unknown)}", f"some of {', '.join(known)}", "correct the names")
    if wrong := sorted(name for name, value in found.items() if value.dtype.kind not in "biuf"):
        raise InputError(f"--inputs {path}", f"no numbers in {', '.join(wrong)}", "arrays of numbers", "convert them")
    return {name: value.astype(np.float64) for name, value in found.items()}


@app.command()
def matrix(bundle: BundlePath, checkpoint: GoldenOf = None, golden: GoldenPath = None, prompt_ids: Ids = None,
           log: Log = False, json: Json = False) -> None:  # fmt: skip
    """The validation once per compute unit, each in a process that may die; off a Mac the portable arithmetics alone.

    Example: workbench matrix build/llama --checkpoint data/tiny-llama
    """
    from workbench.bundle import Bundle

    opened = Bundle.open(bundle)
    look_at(golden, checkpoint)
    from workbench.check import gates, units

    table = units.validate_units(opened, load_golden(golden, checkpoint, prompt_ids, opened.manifest.dims.V))
    device = bool((table["runtime"] == "coreml").any())
    result = {
        "verdict": units.units_verdict(table),
        "device_measured": device,
        "units": gates.records(table.astype(object).where(table.notna(), None)),
    }
    if log:
        result["run_id"] = _record(opened, "matrix", result)
    note = [] if device else ["no compute unit was measured: there is no Core ML here"]
    show(
        result,
        json,
        [result["verdict"], table.drop(columns="runtime").to_string(index=False, na_rep="-", float_format="%.4g"), *note],
    )
