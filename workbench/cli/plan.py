"""`workbench plan`: bytes, predicted speed and placement before anything runs; `doctor`:
this machine's abilities."""

from pathlib import Path
from typing import Annotated

from typer import Argument

import workbench
from workbench import paths
from workbench.cli.common import Json, show
from workbench.errors import InputError

PANEL = "Machine"


def doctor_command(json: Json = False) -> None:
    """What this machine can do, and what a Mac would add.

    Example: workbench doctor --json
    """
    from workbench.doctor import examine

    result = examine()
    lines = []
    for name, value in result.items():
        if name != "notes":
            lines.append(f"{name:20}{'–' if value is None else value}")
    show(result, json, lines + [f"- {note}" for note in result["notes"]])


def plan_command(
    source: Annotated[Path, Argument(metavar="BUNDLE_OR_CHECKPOINT")],
    max_seq_len: int = 512,
    tokens: str = "1-4",
    batch: int = 1,
    compress: str = "fp16",
    memory: str | None = None,
    chip: str = "M4 Max",
    compute_units: str = "CPU_AND_NE",
    runtime: str = "auto",
    json: Json = False,
) -> None:
    """Bytes against a machine's memory, the decode speed predicted for each chip, and
    the compute unit of every operation.

    Placement is Core ML's own plan on a Mac, elsewhere a prediction from published
    rules. A single .mlpackage has a placement alone.

    Example: workbench plan data/tiny-llama --max-seq-len 4096 --memory 16G

    Args:
        max_seq_len: Of a checkpoint: rows of the cache.
        tokens: Of a checkpoint: tokens of a call, as export takes them.
        batch: Of a checkpoint: sequences that are decoded together.
        compress: Of a checkpoint: how weights are stored.
        memory: Memory of the target machine, such as 16G; default: this one's.
        chip: Chip to predict placement for, such as M1 or M4 Max.
        compute_units: Core ML: CPU_AND_NE, CPU_ONLY, CPU_AND_GPU or ALL.
        runtime: Whose plans are read: auto, portable, coreml, stand-in.
    """
    folder, result, lines = None, {}, []
    if (source / paths.BUNDLE).exists():
        folder = workbench.Bundle.open(source)
    if folder or not paths.is_package(source):
        if not folder:
            paths.bundle_or_checkpoint(source)
        options = {"max_seq_len": max_seq_len, "tokens": tokens}
        options |= {"batch": batch, "compress": compress}
        result, lines = _bytes(folder, source, options, memory)
    placements, facts = [], []
    if folder:
        if not folder.manifest.options.plugin:
            placements, facts = _placements(folder, chip, compute_units, runtime)
    elif paths.is_package(source):
        from workbench.ane import placement, roofline

        generation = roofline.chip(chip).generation
        placements = placement.package_placement(source, generation=generation)
    result |= {"source": "predicted", "chip": chip, "shards": [], "known": facts}
    if placements:
        from workbench.ane import placement

        result["source"] = placements[0].source
        result["shards"] = [placed.json() for placed in placements]
        lines += ["", *placement.lines(placements), *facts]
    if result["source"] != "predicted":
        result["chip"] = None
    show(result, json, lines)


def _bytes(folder, source: Path, options: dict, memory: str | None):
    """Sizes against the memory, and predicted speeds; result and lines."""
    from workbench.ane import memory as budgets
    from workbench.ane import roofline

    size = (
        budgets.parse_bytes(memory) if memory is not None else budgets.machine_bytes()
    )
    works = None
    if folder:
        budget = budgets.budget(folder, machine=size)
        if not folder.manifest.options.plugin:
            works = budgets.work(folder)
    else:
        from workbench.models.checkpoint import Checkpoint

        checkpoint = Checkpoint(source)
        chosen = workbench.export.options(**options)
        budget = budgets.budget(checkpoint, chosen, size)
        works = budgets.work(checkpoint, chosen)
    sizes, lines = budget.json(), []
    result = {name: sizes.pop(name) for name in ("fits", "fits_mac")}
    for name, value in sizes.items():
        lines.append(f"{name:14}{value / 2**20:12.2f} MiB")
    answers = {True: "fits", False: "does not fit"}
    mac = f"a Mac of as much memory, of which it may take {budgets.MAC_SHARE:.0%}"
    lines += [answers[result["fits"]], f"{answers[result['fits_mac']]} {mac}"]
    result |= {"bytes": sizes, "chips": [], "predicted_misfit": None}
    if works is None:
        target = folder.manifest.options.target
        return result, [*lines, f"no speed is predicted of target {target}"]
    speeds = roofline.by_chip(works)
    misfit = float(roofline.misfits()["misfit"].abs().median())
    result |= {"chips": speeds.to_dict("records"), "predicted_misfit": misfit}
    title = f"predicted on the Neural Engine, T = 1 (median misfit {misfit:.0%}):"
    return result, [*lines, "", title, plain(speeds)]


def plain(table) -> str:
    """A table as text; numbers from 100 on are whole, smaller ones have three
    digits."""

    def number(value: float) -> str:
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"

    return table.to_string(index=False, float_format=number, na_rep="-")


def _placements(bundle, chip: str, units: str, runtime: str) -> tuple[list, list[str]]:
    """Core ML's plans for a bundle, or predictions where there is no Core ML; and the
    reason if its plans are missing."""
    from workbench.ane import placement, roofline
    from workbench.runtime import check_compute_units, resolve

    check_compute_units(units)
    name, facts = resolve(runtime), []
    generation = roofline.chip(chip).generation
    if name != "portable":
        try:
            return placement.planned(bundle, name, units), []
        except InputError as problem:
            facts = [f"Predicted, since Core ML gave no plan: {problem}"]
    return placement.predicted_placement(bundle, generation), facts


def core_ml_only(bundle, subject: str) -> None:
    """Refuses a bundle of another target."""
    options = bundle.manifest.options
    if options.plugin:
        raise InputError(
            subject,
            f"a bundle exported with --target {options.target}",
            "the operations of Core ML programs",
            "export the checkpoint once more, without --target",
        )
