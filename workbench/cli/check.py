"""`workbench check` and `validate`: whether a bundle keeps its cache, and computes what the checkpoint computes."""

from pathlib import Path
from typing import Annotated

from typer import Option

import workbench
from workbench import paths
from workbench.check import gates
from workbench.cli.common import (
    GoldenOf,
    GoldenPath,
    Ids,
    Json,
    Log,
    Memory,
    Precision,
    RuntimeName,
    gate_lines,
    load_golden,
    look_at,
    record,
    show,
)
from workbench.errors import InputError

PrefillBundle = Annotated[
    Path | None, Option(help="Also: its prompts continued here, states copied.")
]


def handover_of(prefill_bundle: Path | None, decoder, golden) -> list[gates.Gate]:
    """Gates of the hand-over from a bundle to `decoder`, none where no bundle is given."""
    if prefill_bundle is None:
        return []
    from workbench.check.handover import handover_gates

    opened = workbench.Bundle.open(prefill_bundle)
    how = {name: getattr(decoder, name) for name in ("runtime", "precision", "compute_units")}
    source = workbench.Decoder(opened, **how)
    return handover_gates(source, decoder, golden)


def check_command(
    bundle: Path,
    golden: Annotated[
        Path | None, Option(help="Golden store: what the cache holds is checked too.")
    ] = None,
    memory: Memory = None,
    prefill_bundle: PrefillBundle = None,
    runtime: RuntimeName = "auto",
    json: Json = False,
) -> None:
    """Chapter 5's checklist, gate by gate: interface, state lifetime, write addresses, stale rows, memory.

    Example: workbench check build/llama --memory 16G
    """
    opened = workbench.Bundle.open(bundle)
    look_at(golden, None)
    from workbench.ane.memory import parse_bytes
    from workbench.check.checklist import check_bundle
    from workbench.check.golden import Golden

    decoder, reference = workbench.Decoder(opened, runtime), golden and Golden.load(golden)
    checks = check_bundle(
        decoder,
        golden=reference,
        machine=None if memory is None else parse_bytes(memory),
        progress=not json,
    )
    checks += handover_of(prefill_bundle, decoder, reference)
    result = {"verdict": gates.verdict(checks), "gates": [gate.json() for gate in checks]}
    show(result, json, [result["verdict"], *gate_lines(checks)])


def validate_command(
    bundle: Path,
    checkpoint: GoldenOf = None,
    golden: GoldenPath = None,
    prompt_ids: Ids = None,
    all_t: Annotated[bool, Option("--all-t", help="Every T from 1 to t_max.")] = False,
    tasks: Annotated[
        Path | None, Option(help="Known-answer prompts (JSON lines); needs --checkpoint.")
    ] = None,
    prefill_bundle: PrefillBundle = None,
    runtime: RuntimeName = "auto",
    precision: Precision = "declared",
    log: Log = False,
    json: Json = False,
) -> None:
    """Every layer × position × T against the golden.

    Example: workbench validate build/llama --checkpoint data/tiny-llama --tasks data/tasks/heldout.jsonl
    """
    opened = workbench.Bundle.open(bundle)
    look_at(golden, checkpoint)
    if tasks:
        paths.file("--tasks", tasks, "prompts with answers (JSON lines)", "correct the path")
        if not checkpoint:
            raise InputError(
                "--tasks",
                "no --checkpoint",
                "the checkpoint that also answers them",
                "give --checkpoint",
            )
    decoder = workbench.Decoder(opened, runtime, precision)
    reference = load_golden(golden, checkpoint, prompt_ids, opened.manifest.dims.V)
    options = opened.manifest.options
    every_t = [T for T in range(1, options.t_max + 1) if options.tokens(T) == T]
    Ts = every_t if all_t else None
    validation = workbench.validate(decoder, reference, Ts, progress=not json)
    validation.gates += handover_of(prefill_bundle, decoder, reference)
    if tasks:
        from workbench.check.tasks import answer_gates, load_tasks
        from workbench.models.checkpoint import Checkpoint

        validation.gates += answer_gates(decoder, Checkpoint(checkpoint), load_tasks(tasks))
    result = validation.json()
    if log:
        row = {"verdict": validation.verdict, "config": {"gates": result["gates"]}}
        record("validate", result, opened, row, decoder, fidelity=validation.rows)
    worst = (
        "worst: layer {layer}, position {position}, T = {T}, {tensor}: cosine {cosine:.7f}".format(
            **result["worst"]
        )
    )
    show(result, json, [result["verdict"], *gate_lines(validation.gates), worst])
