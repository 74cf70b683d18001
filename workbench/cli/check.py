"""`workbench check` and `validate`: whether a bundle keeps its cache, and computes what the
checkpoint computes."""

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


def handover_of(prefill_bundle: Path | None, decoder) -> list[gates.Gate]:
    """Gates of the hand-over from a bundle to `decoder`, none where no bundle is given."""
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
    """Chapter 5's checklist, gate by gate: interface, state lifetime, write addresses, stale rows,
    memory.

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
    result = {"verdict": gates.verdict(checks), "gates": [gate.json() for gate in checks]}
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
    tasks: Annotated[
        Path | None, Option(help="Known-answer prompts (JSON lines); needs --checkpoint.")
    ] = None,
    prefill_bundle: PrefillBundle = None,
    runtime: RuntimeName = "auto",
    compute_units: Units = "CPU_AND_NE",
    only: Only = None,
    precision: Precision = "declared",
    max_kl: Annotated[
        float, Option(help="Your limit on the mean KL from the golden, in nats.", min=0)
    ] = gates.MAX_KL,
    log: Log = False,
    json: Json = False,
) -> None:
    """Is the bundle faulty, and what does it cost? With a checkpoint the answer to the first is
    kept in the bundle; a golden alone shows it and compares the runtime.

    Example: workbench validate build/llama --checkpoint data/tiny-llama --max-kl 0.02
    """
    if paths.adopted(bundle):
        from workbench.cli.adopt import validate_adopted

        bundles_only(prompt=prompt, text=text, tokens=tokens, all_t=all_t, tasks=tasks)
        bundles_only(prefill_bundle=prefill_bundle, only=only)
        bundles_only(max_kl=max_kl != gates.MAX_KL)
        how = runtime, compute_units, precision, json, log
        return validate_adopted(bundle, checkpoint, golden, prompt_ids, *how)
    opened = workbench.Bundle.open(bundle)
    look_at(golden, checkpoint)
    look_at_prompt(prompt_ids, prompt, text)
    if tasks:
        paths.file("--tasks", tasks, "prompts with answers (JSON lines)", "correct the path")
        if not checkpoint:
            raise InputError(
                "--tasks",
                "no --checkpoint",
                "the checkpoint that also answers them",
                "give --checkpoint",
            )
    from workbench.check import verdict
    from workbench.check.device import load_reference, stored_reference
    from workbench.models.checkpoint import Checkpoint
    from workbench.runtime import resolve

    source = Checkpoint(checkpoint) if checkpoint else None
    options = opened.manifest.options
    every_t = [T for T in range(1, options.t_max + 1) if options.tokens(T) == T]
    Ts = every_t if all_t else None
    runtime = another(only) if only else resolve(runtime, options.target)
    portable = None
    try:
        dims, bos = opened.manifest.dims, opened.manifest.tokens.bos
        reference = load_golden(
            golden, checkpoint, prompt_ids, dims.V, bos, prompt=prompt, text=text, tokens=tokens
        )
        if golden and runtime not in (
            "portable",
            "coreai",
        ):  # before the decoder: one copy of the bundle at a time
            portable = (load_reference if only else stored_reference)(opened, reference, golden)
        decoder = workbench.Decoder(opened, runtime, precision, compute_units=compute_units)
        echo(_expectation(decoder, reference, source, Ts), err=True)
        validation = workbench.validate(
            decoder,
            reference,
            Ts,
            checkpoint=source,
            reference=portable,
            only=bool(only),
            max_kl=max_kl,
            progress=not json,
        )
    except InputError as problem:
        checks = _unopened(opened, source, problem)
        return show(_unopened_result(checks), json, ["RED", *gate_lines(checks)])
    if source and gates.verdict(validation.bug_gates) != gates.NOT_RUN:
        verdict.save(opened, validation.bug_gates)
    validation.gates += handover_of(prefill_bundle, decoder)
    if tasks:
        from workbench.check.tasks import answer_gates, load_tasks

        validation.gates += answer_gates(decoder, source, load_tasks(tasks))
    result = validation.json()
    if log:
        row = {"verdict": validation.verdict, "config": {"gates": result["gates"]}}
        record("validate", result, opened, row, decoder, fidelity=validation.rows)
    worst = (
        "worst: layer {layer}, position {position}, T = {T}, {tensor}: cosine {cosine:.7f}".format(
            **result["worst"]
        )
    )
    lines = [result["verdict"], *gate_lines(validation.gates), *price_lines(result["price"]), worst]
    show(result, json, lines)


def _unopened(bundle, checkpoint, problem: InputError) -> list[gates.Gate]:
    """Bug gates of a bundle that no decoder runs; raises `problem` unless its interface is RED."""
    from workbench.check.interface import interface_gate
    from workbench.check.validate import BUG_GATES, bug_gates, unopened_gates

    interface = interface_gate(bundle, checkpoint)
    if interface.verdict != gates.RED:
        raise problem
    if checkpoint:
        return bug_gates(bundle, checkpoint)
    return [interface, *unopened_gates(problem, BUG_GATES[1:])]


def _unopened_result(checks: list[gates.Gate]) -> dict:
    """The result of a bundle that no decoder runs: nothing of it was compared."""
    nothing = dict.fromkeys(
        ("worst", "min_cosine", "mean_cosine", "logits", "free_logits", "price")
    )
    return {"verdict": "RED", "gates": [gate.json() for gate in checks], "rows": 0} | nothing


def _expectation(decoder, golden, checkpoint, Ts) -> str:
    """How many positions are compared, and about how long that takes, from the time of one call."""
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
        # Hugging Face's side runs each position three times and costs about two calls of one token
        # each; causality makes up to 16 calls, undo up to 26
        calls += reach.calls(Ts) + 6 * reach.count + 42
    with decoder.set_aside():
        decoder.begin()
        chunk = [golden.ids[: 1 if options.t == "range" else options.t_max].tolist()]
        times = []
        for _ in range(2):  # the first call loads
            decoder.begin()
            start = perf_counter()
            decoder.advance(chunk * options.batch, len(chunk[0]))
            times.append(perf_counter() - start)
    return f"{text}: about {max(1, round(calls * times[-1]))} s"
