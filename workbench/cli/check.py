"""`workbench check` tests a bundle's cache, `validate` compares it with its
checkpoint."""

from pathlib import Path
from typing import Annotated

from typer import Option, echo

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
    Only,
    Precision,
    Prompt,
    RuntimeName,
    TextFile,
    Tokens,
    Units,
    another,
    bundles_only,
    gate_lines,
    load_golden,
    look_at,
    look_at_prompt,
    price_lines,
    record,
    show,
)
from workbench.errors import InputError

PANEL = "Check"

PrefillBundle = Annotated[
    Path | None, Option(help="Also: its prompts continued here, states copied.")
]

Tasks = Annotated[
    Path | None, Option(help="Known-answer prompts (JSON lines); needs --checkpoint.")
]

MaxKl = Annotated[
    float, Option(help="Your limit on the mean KL from the golden, nats.", min=0)
]


def handover_of(prefill_bundle: Path | None, decoder) -> list[gates.Gate]:
    """Gates of copying prefilled states from a bundle to `decoder`; none without a
    bundle."""
    if prefill_bundle is None:
        return []
    from workbench.check.handover import handover_gates

    opened = workbench.Bundle.open(prefill_bundle)
    runtime = ":".join(filter(None, (decoder.runtime, decoder.fault)))
    source = workbench.Decoder(
        opened, runtime, decoder.precision, compute_units=decoder.compute_units
    )
    return handover_gates(source, decoder)


def check_command(
    bundle: Path,
    golden: Annotated[
        Path | None, Option(help="Golden store: what the cache holds is checked too.")
    ] = None,
    memory: Memory = None,
    prefill_bundle: PrefillBundle = None,
    runtime: RuntimeName = "auto",
    compute_units: Units = "CPU_AND_NE",
    json: Json = False,
) -> None:
    """Chapter 5's checklist: gates on interface, state lifetime, write addresses and
    stale rows.

    Example: workbench check build/llama --memory 16G
    """
    if paths.adopted(bundle):
        from workbench.cli.adopt import check_adopted

        bundles_only(memory=memory, prefill_bundle=prefill_bundle)
        return check_adopted(bundle, golden, runtime, compute_units, json)
    opened = workbench.Bundle.open(bundle)
    look_at(golden, None)
    from workbench.ane.memory import parse_bytes
    from workbench.check.checklist import check_bundle
    from workbench.check.golden import Golden

    decoder = workbench.Decoder(opened, runtime, compute_units=compute_units)
    reference = golden and Golden.load(golden)
    checks = check_bundle(
        decoder,
        golden=reference,
        machine=None if memory is None else parse_bytes(memory),
        progress=not json,
    )
    checks += handover_of(prefill_bundle, decoder)
    result = {
        "verdict": gates.verdict(checks),
        "gates": [gate.json() for gate in checks],
    }
    show(result, json, [result["verdict"], *gate_lines(checks)])


def validate_command(
    bundle: Path,
    checkpoint: GoldenOf = None,
    golden: GoldenPath = None,
    prompt_ids: Ids = None,
    prompt: Prompt = None,
    text: TextFile = None,
    tokens: Tokens = None,
    all_t: Annotated[bool, Option("--all-t", help="Every T from 1 to t_max.")] = False,
    tasks: Tasks = None,
    prefill_bundle: PrefillBundle = None,
    runtime: RuntimeName = "auto",
    compute_units: Units = "CPU_AND_NE",
    only: Only = None,
    precision: Precision = "declared",
    max_kl: MaxKl = gates.MAX_KL,
    log: Log = False,
    json: Json = False,
) -> None:
    """Tests a bundle for faults and measures what compression and fp16 cost.

    With a checkpoint the bug gates run, and their verdict is stored in the bundle. With
    a golden alone the stored verdict is shown and the runtime is compared.

    Example: workbench validate build/llama --checkpoint data/tiny-llama --max-kl 0.02
    """
    prompts = {"prompt": prompt, "text": text, "tokens": tokens}
    if paths.adopted(bundle):
        from workbench.cli.adopt import validate_adopted

        bundles_only(**prompts, all_t=all_t, tasks=tasks, prefill_bundle=prefill_bundle)
        bundles_only(only=only, max_kl=max_kl != gates.MAX_KL)
        how = runtime, compute_units, precision, json, log
        return validate_adopted(bundle, checkpoint, golden, prompt_ids, *how)
    opened = workbench.Bundle.open(bundle)
    look_at(golden, checkpoint)
    look_at_prompt(prompt_ids, prompt, text)
    _look_at_tasks(tasks, checkpoint)
    from workbench.models.checkpoint import Checkpoint

    source = checkpoint and Checkpoint(checkpoint)
    m = opened.manifest
    runtime = _runtime(runtime, only, m.options.target)
    try:
        ids = prompt_ids, m.dims.V, m.tokens.bos
        reference = load_golden(golden, checkpoint, *ids, **prompts)
        # before the decoder: one copy of the bundle is in memory at a time
        portable = _portable_logits(opened, reference, golden, runtime, only)
        decoder = workbench.Decoder(
            opened, runtime, precision, compute_units=compute_units
        )
        how = {"reference": portable, "only": bool(only)}
        how |= {"max_kl": max_kl, "progress": not json}
        validation = _validate(decoder, reference, source, all_t, how)
    except InputError as problem:
        return _show_unopened(opened, source, problem, json)
    _save_verdict(opened, source, validation.bug_gates)
    validation.gates += handover_of(prefill_bundle, decoder)
    validation.gates += _task_gates(tasks, decoder, source)
    _show_validation(validation, decoder, log, json)


def _runtime(runtime: str, only: str | None, target: str) -> str:
    """The runtime that `--only` names, else what `--runtime` stands for here."""
    from workbench.runtime import resolve

    if only:
        return another(only)
    return resolve(runtime, target)


def _save_verdict(bundle, checkpoint, bug_gates: list[gates.Gate]) -> None:
    """Stores the bug gates in the bundle, if any of them ran with the checkpoint."""
    from workbench.check import verdict

    if checkpoint and gates.verdict(bug_gates) != gates.NOT_RUN:
        verdict.save(bundle, bug_gates)


def _validate(decoder, golden, checkpoint, all_t: bool, options: dict):
    """The validation of a decoder; its positions, Ts and estimated time go to stderr
    first."""
    settings = decoder.options
    Ts = None
    if all_t:
        Ts = [T for T in range(1, settings.t_max + 1) if settings.tokens(T) == T]
    echo(_expectation(decoder, golden, checkpoint, Ts), err=True)
    return workbench.validate(decoder, golden, Ts, checkpoint=checkpoint, **options)


def _show_validation(validation, decoder, log: bool, json: bool) -> None:
    """Prints a validation and, with `log`, writes it into the experiment log."""
    result = validation.json()
    if log:
        row = {"verdict": validation.verdict, "config": {"gates": result["gates"]}}
        record(
            "validate", result, decoder.bundle, row, decoder, fidelity=validation.rows
        )
    place = "layer {layer}, position {position}, T = {T}, {tensor}: cosine {cosine:.7f}"
    lines = [
        result["verdict"],
        *gate_lines(validation.gates),
        *price_lines(result["price"]),
    ]
    show(result, json, [*lines, f"worst: {place.format(**result['worst'])}"])


def _look_at_tasks(tasks: Path | None, checkpoint: Path | None) -> None:
    """Refuses a missing file of tasks, and tasks without the checkpoint that also
    answers them."""
    if not tasks:
        return
    paths.file(
        "--tasks", tasks, "prompts with answers (JSON lines)", "correct the path"
    )
    if not checkpoint:
        needed = "the checkpoint that also answers them"
        raise InputError("--tasks", "no --checkpoint", needed, "give --checkpoint")


def _task_gates(tasks: Path | None, decoder, checkpoint) -> list[gates.Gate]:
    """Gates of the known-answer prompts; none without a file of them."""
    if not tasks:
        return []
    from workbench.check.tasks import answer_gates, load_tasks

    return answer_gates(decoder, checkpoint, load_tasks(tasks))


def _portable_logits(bundle, golden, path: Path | None, runtime: str, only: str | None):
    """The portable runtime's results beside a stored golden, which the device gate
    compares with.

    None where the runtime is no device, or the golden was made now. With `only` they
    are read, so that the bundle is not loaded a second time; else they are computed
    where they are missing."""
    from workbench.check.device import stored_reference

    if not path or runtime in ("portable", "coreai"):
        return None
    return stored_reference(bundle, golden, path, bool(only))


def _show_unopened(bundle, checkpoint, problem: InputError, json: bool) -> None:
    """Prints the gates of a bundle that no decoder runs; none of its values are
    compared."""
    checks = _unopened(bundle, checkpoint, problem)
    result = {"verdict": "RED", "gates": [gate.json() for gate in checks], "rows": 0}
    result |= dict.fromkeys(
        ("worst", "min_cosine", "mean_cosine", "logits", "free_logits", "price")
    )
    show(result, json, ["RED", *gate_lines(checks)])


def _unopened(bundle, checkpoint, problem: InputError) -> list[gates.Gate]:
    """Bug gates of a bundle that no decoder runs; raises `problem` unless its interface
    is RED."""
    from workbench.check.interface import interface_gate
    from workbench.check.validate import BUG_GATES, bug_gates, unopened_gates

    interface = interface_gate(bundle, checkpoint)
    if interface.verdict != gates.RED:
        raise problem
    if checkpoint:
        return bug_gates(bundle, checkpoint)
    return [interface, *unopened_gates(problem, BUG_GATES[1:])]


def _expectation(decoder, golden, checkpoint, Ts) -> str:
    """How many positions are compared, and an estimate of the seconds from the time of
    one call."""
    from time import perf_counter

    from workbench.check.fidelity import default_ts
    from workbench.check.reach import plan_reach

    options = decoder.options
    Ts = list(Ts or default_ts(options))
    positions = len(golden.ids)
    calls = sum(-(-positions // T) for T in [*Ts, options.t_max])
    text = f"{positions} positions against the golden at T = {', '.join(map(str, Ts))}"
    if checkpoint:
        reach = plan_reach(decoder.manifest)
        text += f", {reach.count} to reach every row of the cache"
        # Hugging Face's side runs each position three times and costs about two calls
        # of one token each; causality makes up to 16 calls, undo up to 26
        calls += reach.calls(Ts) + 6 * reach.count + 42
    with decoder.set_aside():
        chunk = [golden.ids[: 1 if options.t == "range" else options.t_max].tolist()]
        for _ in range(2):  # the first call loads
            decoder.begin()
            start = perf_counter()
            decoder.advance(chunk * options.batch, len(chunk[0]))
            seconds = perf_counter() - start
    return f"{text}: about {max(1, round(calls * seconds))} s"
