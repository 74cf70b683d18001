"""`explain` says why the values of a bundle differ from Hugging Face's; its subcommands
answer one question each."""

from dataclasses import asdict, dataclass
from pathlib import Path

import workbench
from workbench import paths
from workbench.check import gates
from workbench.cli.explaining_text import format_explanation
from workbench.cli.options import (
    Device,
    Json,
    Prompt,
    check_runnable,
    load_exported_checkpoint,
    reject_unused,
)
from workbench.cli.output import READ_AND_EXPORT, gates_json, print_and_exit
from workbench.errors import InputError
from workbench.progress import bar, stage

CORRECT_AND_EXPORT = (
    "read the conclusion: it says where to look; correct the exporter, and export again"
)
READ_WEIGHT_FAULTS = (
    "read the conclusion: it says what the wrong tensors hold, and where to correct it"
)


def explain(
    bundle_or_package: Path,
    /,
    *,
    prompt: Prompt = Prompt(),
    checkpoint: Path | None = None,
    device: Device = Device(),
    json: Json = False,
) -> None:
    """Splits a bundle's error into its parts, names the variant of the model that the
    bundle computes, runs gate `program` to say which layer is wrong, and lists the
    operations nearest to overflow. For a single .mlpackage it lists these operations only.

    The words `parts`, `variant`, `ranges` and `op` are subcommands, which answer one
    question each; a folder of such a name is `./parts`.

    Example: workbench explain build/llama --checkpoint data/tiny-llama

    Args:
        bundle_or_package: Folder of a finished bundle, or a .mlpackage.
        checkpoint: The checkpoint that the bundle was exported from.
    """
    prompt.check()
    if paths.is_package(bundle_or_package):
        needed = "a bundle in place of a package"
        reject_unused(needed, prompt, device, checkpoint=checkpoint)
        return _print_answers([_measure_package(bundle_or_package)], json)
    bundle = workbench.Bundle.open(bundle_or_package)
    if not checkpoint:
        needed = "the checkpoint that the bundle was exported from"
        step = "give --checkpoint, or run: workbench explain ranges BUNDLE"
        raise InputError("explain", "no --checkpoint", needed, step)
    device.check(bundle)
    source = load_exported_checkpoint(checkpoint, bundle, "explain")
    check_runnable(bundle)
    ids = prompt.fitting_token_ids(bundle)
    weights = _compare_weights(bundle, source)
    answers = [weights]
    if bundle.manifest.shows_hidden:
        answers.append(_split_error(bundle, source, ids, device))
    variant = _find_variant(bundle, source, ids)
    answers += [variant, _judge_program(bundle, source, weights.gates, variant)]
    if not bundle.manifest.options.plugin:
        answers.append(_measure_bundle(bundle, ids))
    _print_answers(answers, json)


def explain_parts(
    bundle: Path,
    /,
    *,
    checkpoint: Path,
    prompt: Prompt = Prompt(),
    device: Device = Device(),
    json: Json = False,
) -> None:
    """Splits the error by layer into storage, re-authoring, quantization, precision and,
    on a device, runtime.

    Example: workbench explain parts build/llama --checkpoint data/tiny-llama

    Args:
        bundle: Folder of a finished bundle.
        checkpoint: The checkpoint that the bundle was exported from.
    """
    prompt.check()
    exported = workbench.Bundle.open(bundle)
    device.check(exported)
    source = load_exported_checkpoint(checkpoint, exported, "explain")
    check_runnable(exported)
    ids = prompt.fitting_token_ids(exported)
    weights = _compare_weights(exported, source)
    _print_answers([weights, _split_error(exported, source, ids, device)], json)


def explain_variant(
    bundle: Path, /, *, checkpoint: Path, prompt: Prompt = Prompt(), json: Json = False
) -> None:
    """Names the variant of Hugging Face's model (with one thing changed) that the
    bundle computes.

    Adopted packages are also judged: calls of one token, and calls of several tokens,
    which run the prompt.

    Example: workbench explain variant build/llama --checkpoint data/tiny-llama

    Args:
        bundle: Folder of a finished bundle.
        checkpoint: The checkpoint that the bundle was exported from.
    """
    prompt.check()
    exported = workbench.Bundle.open(bundle)
    source = load_exported_checkpoint(checkpoint, exported, "explain")
    check_runnable(exported)
    ids = prompt.token_ids(exported)
    _print_answers([_find_variant(exported, source, ids)], json)


def explain_ranges(
    bundle_or_package: Path, /, *, prompt: Prompt = Prompt(), json: Json = False
) -> None:
    """Names the first operation with inf or NaN and those with the least headroom, in
    bits. Needs no checkpoint.

    Example: workbench explain ranges build/llama

    Args:
        bundle_or_package: Folder of a finished bundle, or a .mlpackage.
    """
    prompt.check()
    if paths.is_package(bundle_or_package):
        reject_unused("a bundle in place of a package", prompt)
        return _print_answers([_measure_package(bundle_or_package)], json)
    bundle = workbench.Bundle.open(bundle_or_package)
    stage("explain: opening the bundle")
    check_runnable(bundle)
    _print_answers([_measure_bundle(bundle, prompt.fitting_token_ids(bundle))], json)


def explain_op(
    bundle: Path,
    /,
    *,
    prompt: Prompt = Prompt(),
    device: Device = Device(),
    layer: int | None = None,
    position: int | None = None,
    reduce: Path | None = None,
    json: Json = False,
) -> None:
    """Names the operation that the runtime computes wrongly. Needs no checkpoint.

    Example: workbench explain op build/llama --layer 2

    Args:
        bundle: Folder of a finished bundle.
        layer: Search this layer alone.
        position: Search the calls of this position alone.
        reduce: Write the smallest package that shows it into this folder.
    """
    prompt.check()
    exported = workbench.Bundle.open(bundle)
    device.check(exported)
    _check_index("--layer", layer, exported.manifest.dims.L)
    _check_index("--position", position, exported.manifest.options.max_seq_len)
    if reduce is not None:
        _check_reduced_folder(reduce, bundle)
    stage("explain: opening the bundle")
    check_runnable(exported)
    ids = prompt.fitting_token_ids(exported)
    _check_index("--position", position, len(ids))
    from workbench.explain import operation

    stage("explain: comparing the runtime's operations")
    count, seconds = operation.estimate_cost(exported, layer)
    cost = (
        f"about {seconds:.0f} s, and {operation.EXTRA_PACKAGES} packages more for a "
        "wrong one"
    )
    with bar(desc=cost, total=count, unit="package") as progress:
        finding = operation.find(
            exported,
            ids,
            layer=layer,
            position=position,
            out=reduce,
            report=lambda count: progress.update(),
            **asdict(device),
        )
    result = finding.json()
    verdict = gates.GREEN if finding.verdict == "none" else gates.RED
    reduced = result.pop("reduced")
    lines = [f"{gates.GREEN}  {finding.summary}"] if verdict == gates.GREEN else None
    output = {"verdict": verdict, "reduced": reduced, "operation": result}
    print_and_exit(output, json, lines)


def _check_reduced_folder(folder: Path, bundle: Path) -> None:
    """Refuses a folder for the smallest package that is a file, or that is in the bundle,
    whose files would be mixed with it."""
    subject, step = f"--reduce {folder}", "name another folder"
    if folder.is_file():
        raise InputError(subject, "a file", "a folder", step)
    if folder.resolve().is_relative_to(bundle.resolve()):
        raise InputError(subject, "the bundle", "a folder outside the bundle", step)


def _check_index(option: str, index: int | None, count: int) -> None:
    """Refuses an index of an option that is none of `count` layers or tokens."""
    if index is not None and not 0 <= index < count:
        step = "give one of them, or leave the option out"
        raise InputError(option, str(index), f"a number from 0 to {count - 1}", step)


@dataclass(frozen=True)
class Answer:
    """The answer to one question.

    Attributes:
        json: its keys in the command's JSON.
        gates: those that judge the bundle by it.
    """

    json: dict
    gates: list[gates.Gate]


def _print_answers(answers: list[Answer], json: bool) -> None:
    """Prints the gates of all answers with their verdict, then the answers, and exits with
    the code of the verdict. Without a gate there is no verdict."""
    all_gates = [gate for answer in answers for gate in answer.gates]
    result = gates_json(all_gates) if all_gates else {}
    for answer in answers:
        result |= answer.json
    step = None
    red = {gate.name for gate in gates.red_gates(all_gates)}
    if gates.names_cause(red):
        step = READ_WEIGHT_FAULTS if "conclusion" in result else READ_AND_EXPORT
    elif "program" in red:
        step = CORRECT_AND_EXPORT
    lines = None if json else format_explanation(result)
    print_and_exit(result, json, lines, next_command=step)


def _compare_weights(bundle, checkpoint) -> Answer:
    """Whether a bundle stores the checkpoint's weights. The parts of the error cannot say
    it: exchanged weights look like a coarse preset. Weights that were fitted to a text are
    left to `validate`, which runs layers to judge them; those of another exporter to the
    gates on its calls."""
    if bundle.manifest.foreign:
        return Answer({}, [])
    if bundle.manifest.calibration:
        reason = "weights were fitted to a text; run: workbench validate"
        gate = gates.Gate("weights", gates.NOT_RUN, None, None, reason)
        return Answer({}, [gate])
    from workbench.check.weights import weights_gate

    stage("explain: stored weights")
    return Answer({}, [weights_gate(bundle, checkpoint)])


def _split_error(bundle, checkpoint, ids: list[int], device: Device) -> Answer:
    """The parts of the error by layer: `parts` with each layer fed Hugging Face's input,
    `chained` with each layer fed the output of the one before."""
    from workbench.explain import error

    stage("explain: parts of the error")
    splits = error.split_error(checkpoint, bundle, ids, **asdict(device))
    parts = {
        "parts": gates.records(splits["isolated"].layers()),
        "chained": gates.records(splits["chained"].layers()),
    }
    return Answer(parts, error.error_gates(splits))


def _find_variant(bundle, checkpoint, ids: list[int]) -> Answer:
    """The variants of the model by their distance from the bundle, and the one that
    fits; for adopted packages, the gates on their calls too."""
    from workbench.explain import calls, variants

    stage("explain: the variant of the model")
    fit = variants.find_variant(bundle, checkpoint)
    conclusion = fit.conclusion
    call_gates = []
    if not bundle.manifest.shows_hidden:
        stage("explain: calls of several tokens")
        # variants are compared on calls of one token: those of several are run here
        decoder = workbench.Decoder(bundle, "portable", "exact")
        S = bundle.manifest.options.max_seq_len
        reference = workbench.golden.make_golden(checkpoint, ids[:S], head=False)
        conclusion = f"In calls of one token: {conclusion}"
        call_gates.append(variants.one_token_gate(bundle, fit))
        call_gates.append(calls.calls_gate(decoder, reference))
    result = {
        "fits": fit.variant,
        "conclusion": conclusion,
        "variants": gates.records(fit.errors),
    }
    return Answer(result, call_gates)


def _judge_program(
    bundle, checkpoint, results: list[gates.Gate], variant: Answer
) -> Answer:
    """Gate `program`, which also runs on small inputs. Where it is RED and no variant of
    the model was found, the conclusion says where it is RED instead.

    Args:
        results: the gate on the weights, if it ran.
        variant: the answer of `_find_variant`.
    """
    from workbench.explain import program_fault, variants

    stage("explain: the program")
    answer = program_fault.judge_program(bundle, checkpoint, results)
    variant_json = variant.json
    narrowed = {}
    if answer.conclusion and variant_json["fits"] in (None, variants.CONFIGURED):
        conclusion = answer.conclusion
        if variant_json["fits"] is None and answer.cause is None:
            conclusion = f"{conclusion} {variant_json['conclusion']}"
        narrowed = {"fits": answer.cause, "conclusion": conclusion}
    return Answer(narrowed, [answer.gate])


def _measure_bundle(bundle, ids: list[int]) -> Answer:
    """The range of every operation of a bundle."""
    stage("explain: ranges")
    from workbench.explain import ranges

    return _describe_ranges(ranges.measure_bundle(bundle, ids))


def _measure_package(package: Path) -> Answer:
    """The range of every operation of one package, on random inputs."""
    stage("explain: ranges")
    from workbench.explain import ranges

    return _describe_ranges(ranges.measure_package(package))


def _describe_ranges(measured) -> Answer:
    """Ranges as JSON, and the gates on them.

    Args:
        measured: `RangesByPrecision`.
    """
    from workbench.explain import ranges

    summary = {"ranges": ranges.summarize(measured)}
    return Answer(summary, ranges.finite_gates(measured))
