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
        if value is None:
            value = "–"
        if name != "notes":
            lines.append(f"{name:20}{value}")
    for note in result["notes"]:
        lines.append(f"- {note}")
    show(result, json, lines)


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
    works = None
    if bundle:
        budget = budgets.budget_of_bundle(bundle, size)
        if not of_core_ai(bundle):
            works = roofline.bundle_work(bundle)
    else:
        from workbench.models.checkpoint import Checkpoint

        checkpoint = Checkpoint(source)
        options = workbench.export.options(
            max_seq_len=max_seq_len, t_max=t_max, batch=batch, compress=compress
        )
        budget = budgets.budget_of_checkpoint(checkpoint, options, size)
        works = budgets.decode_work(checkpoint, options)
    result = budget.json()
    lines = _size_lines(result, budgets.MAC_SHARE)
    result |= {"predicted": None, "predicted_misfit": None}
    if works is None:
        lines.append("no speed is predicted of Core AI programs")
    else:
        speeds = roofline.by_chip(works)
        misfit = float(roofline.misfits()["misfit"].abs().median())
        result["predicted"] = speeds.to_dict("records")
        result["predicted_misfit"] = misfit
        lines += [
            "",
            f"predicted on the Neural Engine, T = 1 (median misfit {misfit:.0%}):",
            speeds.to_string(index=False, float_format="%.3g"),
        ]
    show(result, json, lines)


def _size_lines(sizes: dict, share: float) -> list[str]:
    """A budget as text, and whether the machine has as much memory."""
    lines = []
    for name, value in sizes.items():
        if not name.startswith("fits"):
            lines.append(f"{name:14}{value / 2**20:12.2f} MiB")
    answers = {True: "fits", False: "does not fit"}
    mac = f"a Mac of as much memory, of which it may take {share:.0%}"
    return [*lines, answers[sizes["fits"]], f"{answers[sizes['fits_mac']]} {mac}"]


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
        placements, facts = _package_placements(packages, chip, function), []
    else:
        opened = workbench.Bundle.open(bundle)
        core_ml_only(opened, "residency")
        placements, facts = _placements(opened, chip, compute_units, runtime)
    from workbench.ane import placement

    facts += placement.contradictions(placements)
    source = placements[0].source
    result = {
        "source": source,
        "chip": chip if source == "predicted" else None,
        "known": facts,
        "shards": [placed.json() for placed in placements],
    }
    if log:
        record("residency", result, opened, placement.columns(placements))
    show(result, json, [*placement.lines(placements), *facts])


def _placements(
    bundle, chip: str, compute_units: str, runtime: str
) -> tuple[list, list[str]]:
    """Core ML's plans for a bundle, or predictions where there is no Core ML; and the
    reason if its plans are missing."""
    from workbench.ane import placement, roofline
    from workbench.runtime import check_compute_units, named, resolve
    from workbench.sweep.plans import planned_placement

    check_compute_units(compute_units)
    (name, fault), facts = named(resolve(runtime)), []
    if name != "portable":
        try:
            how = name, compute_units, fault
            return planned_placement(bundle, bundle.manifest.shards, *how), []
        except InputError as problem:
            facts = [f"Predicted, since Core ML gave no plan: {problem}"]
    generation = roofline.chip(chip).generation
    return placement.predicted_placement(bundle, generation), facts


def _package_placements(packages: list[Path], chip: str, function: str | None) -> list:
    """The predicted placements of packages without a bundle."""
    from workbench.ane import placement, roofline

    how = {"generation": roofline.chip(chip).generation, "function": function}
    placements = []
    for package in packages:
        placements += placement.package_placement(package, **how)
    return placements


def _packages(path: Path) -> list[Path]:
    """The package at `path`, or those of an adopted folder; none where a bundle is
    there."""
    if paths.adopted(path):
        from workbench.adopt.folder import Adopted

        adopted = Adopted.open(path)
        return list(dict.fromkeys(map(adopted.package, adopted.foreign.parts)))
    if paths.is_package(paths.bundle_or_package(path)):
        return [path]
    return []
