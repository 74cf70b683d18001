"""`workbench doctor`, `memory` and `residency`: this machine's abilities, the bytes
that a model needs, and the compute unit of every operation."""

from pathlib import Path
from typing import Annotated

from typer import Argument

import workbench
from workbench import paths
from workbench.cli.common import (
    Json,
    Log,
    Memory,
    RuntimeName,
    Units,
    bundles_only,
    core_ml_only,
    of_core_ai,
    open_folder,
    record,
    show,
)
from workbench.errors import InputError

PANEL = "Machine, memory, placement, cost"


def doctor_command(json: Json = False) -> None:
    """What this machine can do, and what a Mac would add.

    Example: workbench doctor --json
    """
    from workbench.report.doctor import examine

    result = examine()
    lines = []
    for name, value in result.items():
        if name != "notes":
            lines.append(f"{name:20}{'–' if value is None else value}")
    show(result, json, lines + [f"- {note}" for note in result["notes"]])


def memory_command(
    source: Annotated[Path, Argument(metavar="BUNDLE_OR_CHECKPOINT")],
    max_seq_len: int = 512,
    t_max: int = 4,
    batch: int = 1,
    compress: str = "fp16",
    memory: Memory = None,
    json: Json = False,
) -> None:
    """Bytes of weights, caches, embedding and buffers against a machine's memory, and
    the decode speed that is predicted for each chip.

    Example: workbench memory data/tiny-llama --max-seq-len 4096 --compress int8-tensor
    --memory 16G"""
    bundle = None
    if (
        paths.adopted(source)
        or (paths.bundle_or_checkpoint(source) / paths.BUNDLE).exists()
    ):
        bundle = open_folder(source)
    from workbench.ane import memory as budgets
    from workbench.ane import roofline

    if memory is None:
        size = budgets.machine_bytes()
    else:
        size = budgets.parse_bytes(memory)
    if bundle:
        budget, core_ai = budgets.budget_of_bundle(bundle, size), of_core_ai(bundle)
        works = None if core_ai else roofline.bundle_work(bundle)
    else:
        from workbench.models.checkpoint import Checkpoint

        checkpoint = Checkpoint(source)
        options = workbench.export.options(
            max_seq_len=max_seq_len, t_max=t_max, batch=batch, compress=compress
        )
        budget = budgets.budget_of_checkpoint(checkpoint, options, size)
        works = budgets.decode_work(checkpoint, options)
    sizes = budget.json()
    lines = []
    for name, value in sizes.items():
        if not name.startswith("fits"):
            lines.append(f"{name:14}{value / 2**20:12.2f} MiB")
    answers = {True: "fits", False: "does not fit"}
    share = f"a Mac of as much memory, of which it may take {budgets.MAC_SHARE:.0%}"
    lines += [
        answers[bool(sizes["fits"])],
        f"{answers[bool(sizes['fits_mac'])]} {share}",
    ]
    if works is None:
        lines.append("no speed is predicted of Core AI programs")
        return show(sizes | {"predicted": None, "predicted_misfit": None}, json, lines)
    speeds = roofline.by_chip(works)
    misfit = float(roofline.misfits()["misfit"].abs().median())
    lines += [
        "",
        f"predicted on the Neural Engine, T = 1 (median misfit {misfit:.0%}):",
        speeds.to_string(index=False, float_format="%.3g"),
    ]
    show(
        sizes | {"predicted": speeds.to_dict("records"), "predicted_misfit": misfit},
        json,
        lines,
    )


def residency_command(
    bundle: Annotated[Path, Argument(metavar="BUNDLE_OR_PACKAGE")],
    chip: str = "M4 Max",
    compute_units: Units = "CPU_AND_NE",
    runtime: RuntimeName = "auto",
    function: str | None = None,
    log: Log = False,
    json: Json = False,
) -> None:
    """The compute unit of every operation: Core ML's compute plan on a Mac, else a
    prediction from published rules, with advice.

    Example: workbench residency build/llama --chip M1

    Args:
        chip: Chip to predict for, such as M1 or M4 Max.
        function: Only this function of a package.
    """
    if packages := _packages(bundle):
        bundles_only(record=log)
        return show(*_package_residency(packages, chip, function, json))
    opened = workbench.Bundle.open(bundle)
    core_ml_only(opened, "residency")
    from workbench.ane import placement, roofline
    from workbench.runtime import check_compute_units, named, resolve
    from workbench.sweep.plans import planned_placement

    check_compute_units(compute_units)
    (name, fault), facts = named(resolve(runtime)), []
    planned = name != "portable"
    if planned:
        try:
            how = name, compute_units, fault
            placements = planned_placement(opened, opened.manifest.shards, *how)
        except InputError as problem:
            planned, facts = (
                False,
                [f"Predicted, since Core ML gave no plan: {problem}"],
            )
    if not planned:
        generation = int(roofline.chip(chip).name[1])
        placements = placement.predicted_placement(opened, generation=generation)
    facts += placement.contradictions(placements)
    result = {
        "source": placements[0].source,
        "chip": None if planned else chip,
        "known": facts,
        "shards": [p.json() for p in placements],
    }
    if log:
        record("residency", result, opened, placement.columns(placements))
    show(result, json, [*placement.lines(placements), *facts])


def _packages(path: Path) -> list[Path]:
    """The package at `path`, or those of an adopted folder; none where a bundle is
    there."""
    if paths.adopted(path):
        from workbench.adopt.folder import Adopted

        adopted = Adopted.open(path)
        return list(
            dict.fromkeys(adopted.package(part) for part in adopted.foreign.parts)
        )
    if paths.is_package(paths.bundle_or_package(path)):
        return [path]
    return []


def _package_residency(
    packages: list[Path], chip: str, function: str | None, json: bool
) -> tuple:
    """The arguments of `show` for the predicted placement of packages without a
    bundle."""
    from workbench.ane import placement, roofline

    generation = int(roofline.chip(chip).name[1])
    placements = []
    for package in packages:
        placements += placement.package_placement(
            package, generation, function=function
        )
    facts = placement.contradictions(placements)
    shards = [placed.json() for placed in placements]
    result = {"source": "predicted", "chip": chip, "known": facts, "shards": shards}
    return result, json, [*placement.lines(placements), *facts]
