"""`workbench validate`: is a bundle right, and what did compression cost?"""

from pathlib import Path

import workbench
from workbench import paths
from workbench.check import gates
from workbench.cli.common import (
    Checkpoint,
    GoldenPath,
    Json,
    Prompt,
    Record,
    Where,
    gate_lines,
    judged,
    record,
    show,
)
from workbench.errors import InputError

PANEL = "Check"


def validate_command(
    bundle: Path,
    prompt: Prompt,
    where: Where,
    checkpoint: Checkpoint = None,
    golden: GoldenPath = None,
    each_unit: bool = False,
    alone: bool = False,
    tasks: Path | None = None,
    max_kl: float = gates.MAX_KL,
    log: Record = False,
    json: Json = False,
) -> None:
    """Tests a bundle for faults and measures what compression and fp16 cost.

    Without --checkpoint and --golden its interface, states and cache are tested. With a
    checkpoint every gate runs, and the verdict is stored in the bundle. With a golden
    alone the stored verdict is shown and the runtime is compared.

    Example: workbench validate build/llama --checkpoint data/tiny-llama --max-kl 0.02

    Args:
        each_unit: Once for each compute unit, in a process of its own; off a Mac for
            each arithmetic of the portable runtime.
        alone: On Core ML: load no second copy of the bundle as portable.
        tasks: Prompts with known answers (JSON lines); needs --checkpoint.
        max_kl: Your limit on the mean KL from Hugging Face's model, in nats.
    """
    special = {"each_unit": each_unit, "alone": alone, "tasks": tasks}
    if max_kl < 0:
        step = "give a limit such as 0.05"
        raise InputError("--max-kl", f"{max_kl:g}", "0 or more nats", step)
    opened = workbench.Bundle.open(bundle)
    if golden:
        paths.golden(golden)
    if checkpoint:
        paths.checkpoint(checkpoint)
    _check_tasks(tasks, checkpoint)
    from workbench.runtime import is_device, resolve

    device = is_device(resolve(where.runtime, opened.manifest.options.plugin))
    if alone and not device:
        step = "leave --alone out"
        raise InputError("--alone", "runtime portable", "coreml or stand-in", step)
    asked = [golden, checkpoint, prompt.given(), log, max_kl != gates.MAX_KL]
    if not any([*asked, *special.values()]):
        return _own_gates(opened, where, json)
    from workbench.check.tasks import answers_gate, load_tasks
    from workbench.models import checkpoint as checkpoints

    source = checkpoint and checkpoints.Checkpoint(checkpoint)
    try:
        reference = reference_of(golden, source, prompt, opened)
        if each_unit:
            result, lines = _each_unit(opened, reference, golden, where, alone)
            return show(result, json, lines)
        # before the decoder: one copy of the bundle is in memory at a time
        portable = None
        if golden and device:
            from workbench.check.device import stored_reference

            portable = stored_reference(opened, reference, golden, alone)
        decoder = where.decoder(opened)
        how = {"reference": portable, "only": alone, "max_kl": max_kl}
        validation = workbench.validate(
            decoder, reference, checkpoint=source, progress=not json, **how
        )
    except InputError as problem:
        return _show_unopened(opened, source, problem, json)
    if source and gates.verdict(validation.bug_gates) != gates.NOT_RUN:
        from workbench.check import verdict

        verdict.save(opened, validation.bug_gates)
    if tasks:
        validation.gates.append(answers_gate(decoder, source, load_tasks(tasks)))
    result = validation.json()
    if log:
        row = {"verdict": validation.verdict, "config": {"gates": result["gates"]}}
        record("validate", result, opened, row, decoder, fidelity=validation.rows)
    lines = [result["verdict"], *gate_lines(validation.gates)]
    place = "layer {layer}, position {position}, T = {T}, {tensor}: cosine {cosine:.7f}"
    worst = place.format(**result["worst"])
    show(result, json, [*lines, *_cost_lines(result["price"]), f"worst: {worst}"])


def reference_of(golden: Path | None, checkpoint, prompt: Prompt, bundle):
    """The stored golden, or one made now from a checkpoint and a prompt."""
    from workbench.check.golden import Golden, make_golden

    if golden:
        return Golden.load(golden)
    if not checkpoint:
        needed = "one of them"
        step = "run: workbench golden CHECKPOINT --out G, then give --golden G"
        raise InputError("golden", "neither --golden nor --checkpoint", needed, step)
    m = bundle.manifest
    ids = prompt.ids(m.dims.V, checkpoint.path, m.tokens.bos)
    return make_golden(checkpoint, ids)


def _check_tasks(tasks: Path | None, checkpoint: Path | None) -> None:
    """Refuses a missing file of tasks, and tasks without the checkpoint that also
    answers them."""
    if not tasks:
        return
    needed = "prompts with answers (JSON lines)"
    paths.file("--tasks", tasks, needed, "correct the path")
    if not checkpoint:
        needed = "the checkpoint that also answers them"
        raise InputError("--tasks", "no --checkpoint", needed, "give --checkpoint")


def _own_gates(bundle, where: Where, json: bool) -> None:
    """Prints the gates that need the bundle alone."""
    from workbench.check.interface import interface_gate
    from workbench.check.states import state_gates

    checks = [interface_gate(bundle), *state_gates(where.decoder(bundle))]
    result = judged(checks)
    hint = "not compared with a model: give --checkpoint or --golden"
    show(result, json, [result["verdict"], *gate_lines(checks), hint])


def _each_unit(bundle, golden, path: Path | None, where: Where, alone: bool):
    """One validation for each compute unit; result and lines."""
    from workbench.check.units import units_verdict, validate_units
    from workbench.runtime import COMPUTE_UNITS, check_compute_units, resolve

    units = COMPUTE_UNITS
    if where.compute_units:
        check_compute_units(where.compute_units)
        units = [where.compute_units]
    how = {"runtime": resolve(where.runtime), "compute_units": units}
    table = validate_units(bundle, golden, path=path, only=alone, **how)
    measured = bool((table["runtime"] == "coreml").any())
    rows = gates.records(table.astype(object).where(table.notna(), None))
    verdict = units_verdict(table)
    result = {"verdict": verdict, "device_measured": measured, "units": rows}
    lines = [verdict, unit_table(table.drop(columns="runtime"))]
    if not measured:
        lines.append("no compute unit was measured: there is no Core ML here")
    return result, lines


def unit_table(units) -> str:
    """Rows of compute units as text, without the columns in which none has a value."""
    filled = units.dropna(axis="columns", how="all").astype(object)
    shown = filled.where(filled.notna(), "-")
    return shown.to_string(index=False, float_format="{:.4g}".format)


def _show_unopened(bundle, checkpoint, problem: InputError, json: bool) -> None:
    """Prints the gates of a bundle that no decoder runs; raises `problem` unless its
    interface is RED."""
    from workbench.check.interface import interface_gate
    from workbench.check.validate import BUG_GATES, bug_gates, unopened_gates

    interface = interface_gate(bundle)
    if interface.verdict != gates.RED:
        raise problem
    if checkpoint:
        checks = bug_gates(bundle, checkpoint)
    else:
        checks = [interface, *unopened_gates(problem, BUG_GATES[1:])]
    empty = "worst", "min_cosine", "mean_cosine", "logits", "price"
    result = judged(checks) | dict.fromkeys(empty) | {"rows": 0}
    show(result, json, ["RED", *gate_lines(checks)])


def _cost_lines(price: dict) -> list[str]:
    """The KL that a bundle costs, and below it the KL that rounding alone must cost."""

    def figures(kl: dict) -> str:
        return ", ".join(f"{name} {value:.3g}" for name, value in kl.items())

    kl = figures(price["kl"])
    lines = [f"cost: KL {kl}; same top token {price['same_top']:.1%}"]
    if budget := price["budget"]:
        lines.append(f"of which rounding alone: KL {figures(budget['kl'])}")
    return lines
