"""`validate` tests whether a bundle is right and measures what compression costs."""

import time
from dataclasses import replace
from pathlib import Path

from cyclopts.types import ExistingFile, NonNegativeFloat

import workbench
from workbench import paths
from workbench.check import gates
from workbench.cli.options import (
    Execution,
    Json,
    Prompt,
    TranscriptOptions,
    check_length,
    check_runs_here,
    load_exported_checkpoint,
    reject_unused,
)
from workbench.cli.output import (
    command_line,
    print_and_exit,
    step_after_red,
    step_after_validation,
    validation_json,
)
from workbench.cli.validation_record import describe_command, keep_validation
from workbench.cli.validation_text import (
    NO_RECOMMENDATION,
    format_units,
    format_validation,
)
from workbench.errors import InputError
from workbench.progress import stage


def validate(
    bundle: Path,
    /,
    *,
    prompt: Prompt = Prompt(),
    execution: Execution = Execution(),
    checkpoint: Path | None = None,
    golden: Path | None = None,
    single_copy: bool = False,
    tasks: ExistingFile | None = None,
    transcript_options: TranscriptOptions = TranscriptOptions(),
    max_kl: NonNegativeFloat = gates.MAX_KL,
    fresh: bool = False,
    json: Json = False,
) -> None:
    """Tests a bundle for faults (export: GREEN or RED) and measures what compression
    and fp16 cost (quality: WITHIN or OVER your limits).

    With --checkpoint every gate runs, and the verdict is stored in the bundle. With
    --golden alone, the stored verdict is shown, and this runtime's values are compared
    with the golden. With neither, the stored verdict is shown; if there is none that
    counts, the gates run that need no checkpoint. A stored verdict counts if this
    checkout wrote it, or if the golden was written together with it. The measurements
    are kept in the bundle, for `workbench report BUNDLE`.

    `validate units BUNDLE` compares the compute units. The word `units` is that
    subcommand; a folder of this name is `./units`.

    Example: workbench validate build/llama --checkpoint data/tiny-llama --max-kl 0.02

    Args:
        bundle: Folder of a finished bundle.
        checkpoint: The checkpoint that the bundle was exported from.
        golden: A file of `workbench golden`, in place of --checkpoint.
        single_copy: On Core ML: do not also load the bundle in the portable runtime.
        tasks: Prompts with known answers (JSON lines); needs --checkpoint.
        max_kl: Your limit on the mean KL from Hugging Face's model, in nats.
        fresh: Ignore stored verdicts, whoever wrote them.
    """
    start = time.perf_counter()
    exported = workbench.Bundle.open(bundle)
    _check_options(prompt, checkpoint, golden, tasks, transcript_options, max_kl)
    execution.check(exported)
    _check_files(exported, checkpoint)
    source = load_exported_checkpoint(checkpoint, exported, "validate")
    from workbench.ane.memory import peak_rss
    from workbench.check.tasks import answers_gate, load_tasks
    from workbench.decode.tokenizer import token_labels

    questions = load_tasks(tasks) if tasks else []
    is_device = _is_device(exported, execution.runtime)
    _check_single_copy(is_device, single_copy)
    reference = _load_reference(exported, prompt, source, golden)
    prompts = _load_transcript_prompts(transcript_options, source, reference)
    command = describe_command(
        exported,
        prompt,
        execution,
        has_checkpoint=source is not None,
        golden=golden,
        tasks=tasks,
        transcript_options=transcript_options,
        max_kl=max_kl,
        single_copy=single_copy,
        fresh=fresh,
    )
    # only texts compute logits again and again
    writes_texts = bool(tasks or transcript_options.transcript)
    stage("validate: loading the shards")
    result = None  # of a validation against Hugging Face's values
    try:
        if golden and is_device:
            _store_device_reference(exported, reference, single_copy)
        decoder = execution.decoder(exported, keeps_head=writes_texts)
        if reference is None:
            output = _stored_result(decoder, fresh)
        else:
            result = workbench.validate(
                decoder,
                reference,
                max_kl=max_kl,
                single_copy=single_copy,
                run_on_decoder=True,
                ignore_stored=fresh,
            )
    except InputError as problem:
        # raises the problem again unless packages and manifest disagree, which may show
        # only in the first call
        output = _unopened_result(exported, source, problem)
        decoder = None
    if result is None:
        # a stored verdict that is only shown measures nothing
        if fresh or reference is not None:
            keep_validation(exported, output, command, start, decoder)
        step = None
        # `explain` cannot run what was not opened; gate `interface` says what to correct
        if decoder is not None:
            step = step_after_red(output, bundle, checkpoint, execution.runtime)
            if (
                output["verdict"] == gates.NOT_RUN
            ):  # what compares with the model is left
                step = command_line("validate", bundle, "--checkpoint", "CHECKPOINT")
        print_and_exit(output, json, next_command=step)
        return
    if tasks:
        result.gates.append(answers_gate(decoder, source, questions))
    transcript = None
    if transcript_options.transcript:
        _compare_prompt_ids(result, decoder, reference, prompts)
        transcript = _run_transcript(decoder, reference, prompts)
        limits = transcript_options.min_agreed, transcript_options.min_stops
        result.gates += transcript.judge(*limits)
    recommendation = _recommend(source, exported, result.gates, transcript)
    output = _describe_validation(result, decoder, transcript, recommendation)
    labels = token_labels(exported.tokenizer, reference.ids)
    rows = result.rows.assign(over_rounding=result.cost.over_rounding)
    keep_validation(exported, output, command, start, decoder, labels, rows)
    lines = None if json else format_validation(output, recommendation)
    output |= {"peak_rss_bytes": peak_rss()}
    step = step_after_validation(output, bundle, checkpoint, execution.runtime)
    print_and_exit(output, json, lines, next_command=step)


def _check_files(bundle, checkpoint: Path | None) -> None:
    """Refuses a bundle with a changed file before the checkpoint is read and Hugging
    Face's model runs. Without a checkpoint the files are compared as soon as the shards
    are loaded."""
    if checkpoint:
        paths.locate_checkpoint(checkpoint)
        stage("validate: comparing the bundle's files with their hashes")
        bundle.check_hashes()


def _store_device_reference(bundle, reference, single_copy: bool) -> None:
    """Stores the portable runtime's values beside the golden, where gate `device` reads
    them. This runs before the decoder is made, so that one copy of the bundle is in memory
    at a time."""
    from workbench.check.device import device_reference

    device_reference(bundle, reference, single_copy)


def _describe_validation(result, decoder, transcript, recommendation) -> dict:
    """A validation against Hugging Face's values as JSON."""
    transcript_json = {}
    if transcript is not None:
        figures, stop = transcript.json(decoder)
        transcript_json = {"transcript": figures, "stop": stop}
    tried = recommendation.json() if recommendation else NO_RECOMMENDATION
    return result.json() | transcript_json | tried


def _check_options(
    prompt: Prompt,
    checkpoint: Path | None,
    golden: Path | None,
    tasks: Path | None,
    transcript_options: TranscriptOptions,
    max_kl: float,
) -> None:
    """Checks the options of `validate` before anything heavy is imported.

    Raises:
        InputError: see `_check_reference_options`; or options that nothing reads
            without a checkpoint, a golden or --transcript.
    """
    needs_reference = bool(prompt.sources or prompt.tokens or max_kl != gates.MAX_KL)
    _check_reference_options(prompt, checkpoint, golden, needs_reference)
    if not checkpoint:
        reject_unused("--checkpoint, which also answers them", tasks=tasks)
        needed = "--checkpoint, whose model writes the text"
        reject_unused(needed, prompts=transcript_options.prompts)
        if not golden:
            needed += ", or a --golden that has it"
            reject_unused(needed, transcript=transcript_options.transcript)
    if not transcript_options.transcript:
        reject_unused("--transcript", transcript_options, to_add="--transcript")


def _recommend(source, bundle, results, transcript):
    """The presets that were tried for a bundle whose quality is OVER; None otherwise."""
    if gates.quality(results) != gates.OVER:
        return None
    from workbench.recommend import recommend

    return recommend(source, bundle, results, transcript)


def _load_transcript_prompts(
    options: TranscriptOptions, source, reference
) -> dict[str, list[int]]:
    """The prompts of a transcript, and the ids that the checkpoint's tokenizer makes of
    them, or that the golden stored; none without --transcript.

    Raises:
        InputError: a golden alone, without texts; see `load_prompts`.
    """
    if not options.transcript:
        return {}
    from workbench.check.transcript import encode_prompts, load_prompts

    if source:
        return encode_prompts(source, load_prompts(options.prompts or ""))
    if reference.texts is None:
        raise InputError(
            f"golden {reference.file}",
            "no texts of Hugging Face's model",
            "a golden with them, or --checkpoint",
            "run: workbench golden CHECKPOINT --transcript --out G",
        )
    return {stored.prompt: stored.ids for stored in reference.texts.texts}


def _compare_prompt_ids(
    result, decoder, reference, prompts: dict[str, list[int]]
) -> None:
    """Replaces a gate of a validation, and of the verdict that the validation has just
    stored, if the bundle's tokenizer gives other ids for the prompts of a transcript."""
    from workbench.check.transcript import differing_ids

    wrong = differing_ids(decoder, prompts)
    if not wrong:
        return
    result.gates = _with_gate(result.gates, wrong)
    if reference.source:
        stored = gates.stored_verdict(decoder.bundle).gates
        gates.save_verdict(decoder.bundle, _with_gate(stored, wrong))


def _with_gate(results: list[gates.Gate], gate: gates.Gate) -> list[gates.Gate]:
    """The gates with `gate` first, in place of the one of its name."""
    return [gate, *(other for other in results if other.name != gate.name)]


def _run_transcript(decoder, reference, prompts: dict[str, list[int]]):
    """The transcript of a bundle: beside the checkpoint's model, where there is one, and
    otherwise beside the texts of the golden."""
    from workbench.check.transcript import transcribe, transcribe_golden

    if reference.source:
        return transcribe(decoder, reference.source, [*prompts])
    return transcribe_golden(decoder, reference.texts)


def validate_units(
    bundle: Path,
    /,
    *,
    prompt: Prompt = Prompt(),
    checkpoint: Path | None = None,
    golden: Path | None = None,
    runtime: str = "auto",
    single_copy: bool = False,
    max_kl: NonNegativeFloat = gates.MAX_KL,
    json: Json = False,
) -> None:
    """Validates a bundle once on each compute unit, in a process of its own; off a Mac
    once in each arithmetic of the portable runtime.

    Needs a checkpoint or a golden.

    Example: workbench validate units build/llama --checkpoint data/tiny-llama

    Args:
        bundle: Folder of a finished bundle.
        checkpoint: The checkpoint that the bundle was exported from.
        golden: A file of `workbench golden`, in place of --checkpoint.
        runtime: auto, portable, coreml or stand-in.
        single_copy: On Core ML: do not also load the bundle in the portable runtime.
        max_kl: Your limit on the mean KL from Hugging Face's model, in nats.
    """
    exported = workbench.Bundle.open(bundle)
    _check_reference_options(prompt, checkpoint, golden, needs_reference=True)
    check_runs_here(runtime, exported)
    _check_files(exported, checkpoint)
    source = load_exported_checkpoint(checkpoint, exported, "validate")
    from workbench.check.units import units_quality, units_verdict
    from workbench.check.units import validate_units as run_units

    _check_single_copy(_is_device(exported, runtime), single_copy)
    reference = _load_reference(exported, prompt, source, golden)
    stage("validate: loading the shards")
    units = run_units(
        exported, reference, runtime=runtime, single_copy=single_copy, max_kl=max_kl
    )
    result = {
        "verdict": units_verdict(units),
        "quality": units_quality(units),
        "device_measured": bool((units["runtime"] == "coreml").any()),
        "units": gates.records(workbench.log.plain(units)),
    }
    step = step_after_red(result, bundle, checkpoint, runtime)
    lines = None if json else format_units(result)
    print_and_exit(result, json, lines, next_command=step)


def _check_reference_options(
    prompt: Prompt, checkpoint: Path | None, golden: Path | None, needs_reference: bool
) -> None:
    """Checks the source of Hugging Face's values, before anything heavy is imported.

    Raises:
        InputError: neither checkpoint nor golden where `needs_reference`, a prompt
            beside a golden, which has its own, or a wrong prompt or path of a golden.
    """
    prompt.check()
    if golden:
        paths.check_golden(golden)
        reject_unused("--checkpoint in place of --golden", prompt)
    elif needs_reference and not checkpoint:
        needed = "one of --checkpoint, --golden"
        step = (
            "give --checkpoint CHECKPOINT; or run: workbench golden CHECKPOINT --out G, "
            "then give --golden G"
        )
        raise InputError("reference", "none", needed, step)


def _is_device(bundle, runtime: str) -> bool:
    """Whether the runtime, as the option names it, is a device for this bundle."""
    from workbench.runtime import is_device, resolve

    return is_device(resolve(runtime, bundle.manifest.options.plugin))


def _check_single_copy(is_device: bool, single_copy: bool) -> None:
    """Refuses --single-copy on a runtime that is no device, where the bundle is loaded
    once anyway."""
    if not is_device:
        needed = "a runtime of a device: coreml or stand-in"
        reject_unused(needed, single_copy=single_copy)


def _load_reference(bundle, prompt: Prompt, checkpoint, golden: Path | None):
    """Hugging Face's values as a `Golden`: stored ones, else the checkpoint's for the
    prompt; None without both.

    Raises:
        InputError: a golden of another checkpoint than the bundle's, before a shard is
            loaded.
    """
    from workbench.check.golden import check_exported_from
    from workbench.check.text import check_held_out

    if golden:
        reference = workbench.Golden.load(golden)
        check_exported_from(reference, bundle)
        check_held_out(bundle, reference.ids)
    elif checkpoint:
        ids = prompt.token_ids(bundle)
        # both before Hugging Face's model runs
        check_held_out(bundle, ids)
        check_length(ids, bundle)
        stage("validate: Hugging Face's values")
        reference = workbench.golden.make_golden(checkpoint, ids)
    else:
        return None
    return replace(reference, source=checkpoint)


def _stored_result(decoder, fresh: bool) -> dict:
    """The result without a reference: the stored verdict, or the gates that need the
    bundle alone."""
    from workbench.check.bug_gates import load_or_run_gates

    return validation_json(load_or_run_gates(decoder, ignore_stored=fresh))


def _unopened_result(bundle, checkpoint, problem: InputError) -> dict:
    """The result for a bundle that a runtime refuses because its packages do not agree
    with its manifest.

    Raises:
        InputError: `problem`, where gate `interface` finds nothing wrong.
    """
    from workbench.check.bug_gates import BUG_GATES, bug_gates, unopened_gates
    from workbench.check.interface import interface_gate

    interface = interface_gate(bundle)
    if interface.verdict != gates.RED:
        raise problem
    if checkpoint:
        results = bug_gates(bundle, checkpoint)
    else:
        others = [name for name in BUG_GATES if name != interface.name]
        results = [interface, *unopened_gates(problem, others)]
    not_measured = "worst", "min_cosine", "mean_cosine", "logits", "cost"
    return validation_json(results) | dict.fromkeys(not_measured) | {"rows": 0}
