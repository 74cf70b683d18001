"""`plan`: the memory that an export needs, the speed that is predicted for it, and the
compute unit of every operation."""

import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

import workbench
from workbench import checkpoint_checks, paths
from workbench.cli.mixed import MIXED
from workbench.cli.options import (
    Device,
    ExportOptions,
    Json,
    load_checkpoint,
    reject_unused,
)
from workbench.cli.output import command_line, format_result, print_and_exit
from workbench.errors import InputError
from workbench.progress import stage

PLACED_ON = "M4 Max"
"""The chip of placement, advice and gains where none is named; only the table of speeds
then has every chip."""


SIZE_NAMES = {"kv": "KV cache", "side_states": "other states"}
CHIP_TITLES = {
    "tokens_per_s": "tok/s",
    "low_ms": "least ms",
    "high_ms": "most ms",
    "streamed_mib": "MiB read",
}
"""Titles of the table of chips; the others are the names in the JSON."""


@Parameter("*")
@dataclass(frozen=True)
class Drafts:
    """Speculative decoding, whose gain is predicted.

    Args:
        draft_acceptance: The chance that a draft is accepted, from 0 to 1.
        verify: Tokens in a verifying call: the drafted ones and one more.
        draft_cost: The time to draft one token, in calls of one token.
    """

    draft_acceptance: Annotated[
        float | None, Parameter(validator=Number(gte=0, lte=1))
    ] = None
    verify: Annotated[int | None, Parameter(validator=Number(gte=2))] = None
    draft_cost: Annotated[float, Parameter(validator=Number(gte=0))] = 0.0


def plan(
    bundle_or_checkpoint: Path,
    /,
    *,
    options: ExportOptions = ExportOptions(),
    device: Device = Device(),
    drafts: Drafts = Drafts(),
    memory: str | None = None,
    chip: str | None = None,
    json: Json = False,
) -> None:
    """Bytes against a machine's memory, the decode speed predicted for each chip, and
    the compute unit of every operation of a bundle.

    Placement is Core ML's own plan on a Mac, elsewhere a prediction from published
    rules. For a checkpoint, the options are those of the export to predict; a bundle
    has its own. Every predicted time has a 90% interval, and a note if no public
    measurement resembles the export. Exports are listed that are predicted to be faster
    by more than the interval.

    Example: workbench plan data/tiny-llama --max-seq-len 4096 --memory 16G

    Args:
        bundle_or_checkpoint: Folder of a finished bundle, or a Hugging Face folder.
        memory: Memory of the target machine, such as 16G; default: this one's.
        chip: The chip to predict for, such as M1 or M4 Max; default: the speed of every
            chip, and placement, advice and gains on M4 Max.
    """
    path, bundle = bundle_or_checkpoint, None
    if (path / paths.BUNDLE).exists():
        bundle = workbench.Bundle.open(path)
        device.check(bundle)
        reject_unused("a checkpoint in place of a bundle", options)
    else:
        reject_unused("a bundle", device)
        folder = paths.locate_checkpoint(path)
        checkpoint_checks.check_family(folder)
        checkpoint_checks.check_positions(folder, options.max_seq_len)
        if options.compress == MIXED:
            raise InputError(
                "--compress mixed",
                "a checkpoint, whose formats are not chosen yet",
                "a bundle that `export --compress mixed` has made",
                "plan that bundle, or another --compress",
            )
        # before the imports that take seconds
        from workbench.bundle.options import make_options

        chosen = make_options(**asdict(options))
    _check_drafts(drafts)
    stage("plan: memory, speed and placement")
    import psutil

    from workbench.ane import chips

    # before the imports that take seconds
    placed_on = chip or PLACED_ON
    generation = chips.generation(placed_on)
    from workbench.ane import memory as ane_memory

    memory_bytes = psutil.virtual_memory().total
    if memory is not None:
        memory_bytes = ane_memory.parse_bytes(memory)
    if bundle:
        source, chosen = bundle, bundle.manifest.options
    else:
        from workbench import exporter

        source = load_checkpoint(path)
        exporter.read_plan(source, chosen)  # refuses what the export refuses
    sizes = ane_memory.process_bytes(source, chosen) | {"machine": memory_bytes}
    result = ane_memory.fits(sizes["total"], memory_bytes) | {"bytes": sizes}
    if memory is None and sys.platform != "darwin":
        result["fits_mac"] = None  # the memory of this machine is no Mac's
    speed = _predicted_speed(source, chosen, drafts, chip)
    placed = _placement(bundle, device, placed_on, generation)
    lines = [
        _summary(result | speed.json | placed.json, placed_on),
        "",
        *_memory_lines(result, memory),
        *speed.lines,
        *placed.lines,
    ]
    step = _next_step(path, bundle, options, result["fits"])
    print_and_exit(result | speed.json | placed.json, json, lines, next_command=step)


def _next_step(path: Path, bundle, options: ExportOptions, fits: bool) -> str:
    """What the user does after a plan: the export that was planned, or the validation of a
    finished bundle; a smaller export where the planned one does not fit in memory.

    Args:
        path: of the checkpoint or the bundle, as the user gave it.
    """
    if not fits:
        return (
            "plan a smaller export: --compress lut6-g16, a smaller --max-seq-len, or more "
            "--memory"
        )
    if bundle:
        return command_line("validate", path, "--checkpoint", "CHECKPOINT")
    name = paths.model_name(paths.locate_checkpoint(path))
    words = ["export", path, Path("build") / name]
    for option in fields(options):
        value = getattr(options, option.name)
        if value != option.default:
            words += [f"--{option.name.replace('_', '-')}", value]
    return command_line(*words)


def _summary(plan_json: dict, chip: str) -> str:
    """The sentence that heads a plan: whether the export fits, how long a call takes on
    `chip`, and how many operations are expected on the Neural Engine."""
    fit = "Fits" if plan_json["fits"] else "Does not fit"
    clauses = [f"{fit} in {plan_json['bytes']['machine'] / 2**30:.3g} GiB"]
    for row in plan_json["chips"]:
        if row["chip"] == chip:
            clauses.append(
                f"about {row['ms']:.3g} ms a call on {chip} ({row['low_ms']:.3g} to "
                f"{row['high_ms']:.3g}, predicted)"
            )
    shards = plan_json["shards"]
    if shards:
        total, engine = (sum(shard[key] for shard in shards) for key in ("ops", "ane"))
        words = (
            f"{engine} of {total} operations {plan_json['source']} on the Neural Engine"
        )
        # a plan that Core ML gave has none that rules dispute
        disputed = [shard["ane_if_disputed_hold"] for shard in shards]
        if None not in disputed and sum(disputed) < engine:
            words += f", {sum(disputed)} if disputed rules hold"
        clauses.append(words)
    return f"{'; '.join(clauses)}."


def _memory_lines(result: dict, memory: str | None) -> list[str]:
    """The bytes of an export against a machine's memory, as lines that say whose memory
    it is.

    Args:
        memory: the option of this name; None: this machine's.
    """
    from workbench.ane.memory import MAC_SHARE

    machine = "this machine's memory" if memory is None else "the target's memory"
    sizes = dict(result["bytes"])
    memory_bytes = sizes.pop("machine")
    sizes = {SIZE_NAMES.get(name, name): size for name, size in sizes.items()}
    fits = {"fits in memory": f"{_yes_or_no(result['fits'])}, in {machine}"}
    if result["fits_mac"] is not None:
        fits["fits in a Mac"] = (
            f"{_yes_or_no(result['fits_mac'])}, in {MAC_SHARE:.0%} of a Mac's memory, "
            "beyond which macOS swaps"
        )
    lines = format_result(fits | {"bytes": sizes | {machine: memory_bytes}})
    if result["fits_mac"] is None:
        lines.append(
            "give --memory, such as --memory 16G, to see whether a Mac fits it"
        )
    return lines


def _yes_or_no(is_true: bool) -> str:
    return "yes" if is_true else "no"


@dataclass(frozen=True)
class Section:
    """A part of the output of `plan`."""

    lines: list[str]
    json: dict


def _placement(bundle, device: Device, chip: str, generation: int) -> Section:
    """The compute unit of every operation of a bundle, measured where Core ML has a plan
    and otherwise predicted for a chip; none for a checkpoint (`bundle` is None) and for
    programs of a plug-in's target."""
    from workbench.ane import placement

    placements, notes = [], []
    if bundle and not bundle.manifest.options.plugin:
        placements, notes = _measured_placement(bundle, device)
        if not placements:
            placements = placement.predicted_placement(bundle, generation)
    origin, lines = "predicted", []
    if placements:
        origin = placements[0].source
        lines = ["", *placement.describe(placements), *notes]
    figures = {
        "source": origin,
        "chip": chip if origin == "predicted" else None,
        "known": notes,
        "shards": [placed.json() for placed in placements],
    }
    return Section(lines, figures)


def _check_drafts(drafts: Drafts) -> None:
    """Refuses half of what a gain needs."""
    if drafts.draft_acceptance is None:
        reject_unused(
            "--draft-acceptance",
            to_add="--draft-acceptance SHARE, such as 0.7",
            verify=drafts.verify,
            draft_cost=drafts.draft_cost or None,
        )
    elif drafts.verify is None:
        raise InputError(
            "--draft-acceptance",
            "no --verify",
            "the tokens of a verification",
            "add, for three drafts a round, --verify 4",
        )


def _predicted_speed(source, options, drafts: Drafts, chip: str | None) -> Section:
    """The predicted times of an export by chip, with the reasons why a prediction
    extrapolates; faster exports; the gain of speculation."""
    result = {"chips": [], "predicted_misfit": None, "assumes": None}
    result |= {"advice": [], "speculation": None}
    if options.plugin:  # rules and speeds are those of Core ML programs
        return Section([], result)
    from workbench.ane import advice, roofline
    from workbench.ane.work import call_work

    placed_on = chip or PLACED_ON
    work = call_work(source, options)
    speeds = roofline.by_chip(work, [chip] if chip else None)
    result["chips"] = speeds.to_dict("records")
    result["predicted_misfit"] = roofline.calibration().median_error
    result["assumes"] = roofline.describe_fit()
    # a table with these columns would be wider than a terminal of 80 columns
    table = speeds.drop(columns=["extrapolates", "assumed"])
    table = table.rename(columns=CHIP_TITLES).to_dict("records")
    proposals = advice.advise(work, options, placed_on)
    result["advice"] = [asdict(proposal) for proposal in proposals]
    lines = []
    if proposals:  # what a user can act on comes before the tables
        lines += ["", "proposed exports"]
        lines += [f"- {proposal.sentence(placed_on)}" for proposal in proposals]
    lines += format_result({"chips": table, "assumes": result["assumes"]})
    lines += ["", *roofline.describe_extrapolations(speeds)]
    lines += roofline.describe_assumed_rates(speeds)
    if drafts.draft_acceptance is not None:
        gains = _predicted_gain(source, options, work, drafts, placed_on)
        result["speculation"] = asdict(gains)
        lines += ["", gains.sentence()]
    return Section(lines, result)


def _predicted_gain(source, options, work, drafts: Drafts, chip: str):
    """The `Speculation` of an export on a chip.

    Args:
        work: of a call of one token.

    Raises:
        InputError: a verification of more tokens than a call of the export takes.
    """
    from workbench.ane import speculation
    from workbench.ane.work import call_work

    if drafts.verify > options.t_max:
        raise InputError(
            "--verify",
            f"{drafts.verify} tokens",
            f"at most {options.t_max}, the most tokens of a call of this export",
            f"add --tokens 1,{drafts.verify}",
        )
    verification = call_work(source, options, drafts.verify)
    return speculation.speculate(
        work, verification, chip, drafts.draft_acceptance, drafts.draft_cost
    )


def _measured_placement(bundle, device: Device) -> tuple[list, list[str]]:
    """Core ML's own placement of a bundle's operations, and notes on it; no placement on
    the portable runtime, and none where Core ML gives no plan."""
    from workbench import process
    from workbench.ane import placement
    from workbench.runtime import resolve

    runtime = resolve(device.runtime)
    if runtime == "portable":
        return [], []
    # in a process of its own, because reading a plan has aborted a process
    outcome = process.call(
        placement.read_compute_plan,
        bundle.root,
        bundle.manifest.shards,
        runtime,
        device.compute_units,
    )
    if outcome.failure:
        reason = f"Predicted, since Core ML gave no plan: {outcome.failure}"
        return [], [reason]
    return outcome.value, []
