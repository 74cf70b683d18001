"""Commands that run a bundle: `validate` says whether it is right and what compression
cost, `explain` why its values differ, `generate` prints tokens, `evaluate` how well a
text is predicted."""

import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

from cyclopts.types import ExistingFile, NonNegativeFloat

import workbench
from workbench import paths
from workbench.check import gates
from workbench.cli.common import (
    Device,
    Json,
    Prompt,
    Where,
    judged,
    opened,
    show,
    unread,
)
from workbench.errors import InputError, visible
from workbench.progress import stage

MAX_UNKNOWN = 0.1  # of the tokens of a text that is evaluated


def validate(
    bundle: Path,
    /,
    *,
    prompt: Prompt = Prompt(),
    where: Where = Where(),
    checkpoint: Path | None = None,
    golden: Path | None = None,
    each_unit: bool = False,
    alone: bool = False,
    tasks: ExistingFile | None = None,
    max_kl: NonNegativeFloat = gates.MAX_KL,
    json: Json = False,
) -> None:
    """Tests a bundle for faults and measures what compression and fp16 cost.

    With a checkpoint every gate runs, and the verdict is stored in the bundle. With a
    golden alone the stored verdict is shown and the runtime is compared. Without both
    the stored verdict is shown, or interface, states and cache are tested. A stored
    verdict counts where this checkout wrote it, or the one that wrote the golden.

    Example: workbench validate build/llama --checkpoint data/tiny-llama --max-kl 0.02

    Args:
        checkpoint: The checkpoint that the bundle was exported from.
        golden: Stored values of Hugging Face's model, in its place.
        each_unit: Once for each compute unit, in a process of its own; off a Mac for
            each arithmetic of the portable runtime.
        alone: On Core ML: load no second copy of the bundle as portable.
        tasks: Prompts with known answers (JSON lines); needs --checkpoint.
        max_kl: Your limit on the mean KL from Hugging Face's model, in nats.
    """
    exported = workbench.Bundle.open(bundle)
    if golden:
        paths.check_golden(golden)
        unread("--checkpoint in place of --golden", prompt)
    if each_unit:
        alike = replace(where, runtime="auto")
        unread("a validation without --each-unit", alike, tasks=tasks)
    if not checkpoint:
        unread("--checkpoint, which also answers them", tasks=tasks)
    asked = prompt.given(), prompt.tokens, each_unit, max_kl != gates.MAX_KL
    stage("validate: reading the checkpoint")
    source, reference = opened(checkpoint), None
    from workbench.check import validate as checks
    from workbench.check.interface import interface_gate
    from workbench.check.tasks import answers_gate, load_tasks
    from workbench.check.units import units_verdict, validate_units
    from workbench.runtime import is_device, resolve

    questions = tasks and load_tasks(tasks)
    device = is_device(resolve(where.runtime, exported.manifest.options.plugin))
    if not device:
        unread("a runtime of a device: coreml or stand-in", alone=alone)
    if golden:
        reference = workbench.Golden.load(golden)
    elif source:
        stage("validate: Hugging Face's values")
        reference = workbench.golden.make_golden(source, prompt.of(exported))
    elif any(asked):
        needed = "one of them"
        step = "run: workbench golden CHECKPOINT --out G, then give --golden G"
        raise InputError("golden", "neither --golden nor --checkpoint", needed, step)
    reference = reference and replace(reference, source=source)
    stage("validate: opening the bundle")
    if each_unit:
        how = {"runtime": where.runtime, "alone": alone, "max_kl": max_kl}
        units = validate_units(exported, reference, **how)
        result = {
            "verdict": units_verdict(units),
            "device_measured": bool((units["runtime"] == "coreml").any()),
            "units": gates.records(workbench.log.plain(units)),
        }
        return show(result, json)
    try:
        # before the decoder, so that one copy of the bundle is in memory at a time
        if golden and device:
            checks.device_reference(exported, reference, alone)
        decoder = where.decoder(exported)
        if reference is None:
            checked = judged(checks.stored_gates(decoder))
            stored = gates.stored_verdict(exported)
            if stored and not stored.counts and checked["verdict"] == gates.GREEN:
                checked["verdict"] = gates.NOT_RUN  # what a bundle states is no pass
            return show(checked, json)
        found = workbench.validate(
            decoder, reference, max_kl=max_kl, alone=alone, again=True
        )
    except InputError as problem:
        own = interface_gate(exported)
        if own.verdict != gates.RED:
            raise
        own = [own, *checks.unopened_gates(problem, list(checks.BUG_GATES)[1:])]
        if source:
            own = checks.bug_gates(exported, source)
        empty = "worst", "min_cosine", "mean_cosine", "logits", "cost"
        return show(judged(own) | dict.fromkeys(empty) | {"rows": 0}, json)
    if tasks:
        found.gates.append(answers_gate(decoder, source, questions))
    show(found.json(), json)


def explain(
    bundle_or_package: Path,
    /,
    *,
    prompt: Prompt = Prompt(),
    checkpoint: Path | None = None,
    only: Literal["parts", "variant", "ranges"] | None = None,
    op: bool = False,
    layer: int | None = None,
    position: int | None = None,
    reduce: Path | None = None,
    device: Device = Device(),
    json: Json = False,
) -> None:
    """Splits the error into its parts, names the variant of the model that the bundle
    computes, and the operations nearest to overflow.

    Example: workbench explain build/llama --checkpoint data/tiny-llama

    Args:
        checkpoint: The checkpoint that the bundle was exported from.
        only: One of these: parts (storage, re-authoring, quantization, precision,
            runtime), variant, ranges (the first inf or NaN, headroom in bits; needs no
            checkpoint).
        op: Names the operation that the runtime computes wrongly; needs no checkpoint.
        layer: With --op, searches this layer alone.
        position: With --op, searches the calls of this position alone.
        reduce: With --op, writes the smallest package that shows it into this folder.
    """
    prompt.given()
    if op:
        unread("explain without --op", only=only)
    else:
        unread("--op", layer=layer, position=position, reduce=reduce)
    if paths.is_package(bundle_or_package) and only in (None, "ranges") and not op:
        needed = "a bundle in place of a package"
        unread(needed, prompt, device, checkpoint=checkpoint)
        from workbench.explain import ranges

        measured = ranges.measure_package(bundle_or_package)
        result = {"ranges": ranges.summarize(measured)}
        return show(judged(ranges.finite_gates(measured)) | result, json)
    bundle = workbench.Bundle.open(bundle_or_package)
    if not checkpoint and only != "ranges" and not op:
        needed, step = "what was exported", "give --checkpoint, or --only ranges"
        raise InputError("explain", "no --checkpoint", needed, step)
    stage("explain: reading the checkpoint")
    source, ids = opened(checkpoint), prompt.of(bundle)
    units = asdict(device)
    if op:
        units |= {"layer": layer, "position": position}
        return show(_operation(bundle, ids, out=reduce, **units), json)
    found, checks = {}, []
    if only == "parts" or not only and bundle.manifest.shows_hidden:
        from workbench.explain import error

        stage("explain: parts of the error")
        splits = error.split_error(source, bundle, ids, **units)
        checks += error.error_gates(splits)
        for name, mode in (("parts", "isolated"), ("chained", "chained")):
            found[name] = gates.records(splits[mode].layers())
    if only in (None, "variant"):
        from workbench.explain import calls, variants

        stage("explain: the variant of the model")
        frame, found["fits"] = variants.explain_bundle(bundle, source)
        found["conclusion"] = variants.conclusion(found["fits"])
        if not bundle.manifest.shows_hidden:  # the variant is of calls of one token
            decoder = workbench.Decoder(bundle, "portable", "exact")
            S = bundle.manifest.options.max_seq_len
            reference = workbench.golden.make_golden(source, ids[:S], head=False)
            found["faults"] = calls.find_call_faults(decoder, reference)
        found["variants"] = gates.records(frame)
    if only == "ranges" or not only and not bundle.manifest.options.plugin:
        from workbench.explain import ranges

        stage("explain: ranges")
        measured = ranges.measure_bundle(bundle, ids)
        checks += ranges.finite_gates(measured)
        found["ranges"] = ranges.summarize(measured)
    show((judged(checks) if checks else {}) | found, json)


def _operation(bundle, ids: list[int], **how) -> dict:
    """What a search for the wrong operation found (see `operation.find`)."""
    from workbench.explain import operation
    from workbench.progress import bar

    count, seconds = operation.estimate_cost(bundle, how["layer"])
    cost = f"about {seconds:.0f} s, and {operation.EXTRA_PACKAGES} packages more for a wrong one"
    with bar(desc=cost, total=count, unit="package") as shown:
        found = operation.find(bundle, ids, **how, report=lambda count: shown.update())
    result = found.json()
    verdict = "GREEN" if found.verdict == "none" else "RED"
    return {"verdict": verdict, "reduced": result.pop("reduced"), "operation": result}


def generate(
    bundle: Path,
    /,
    *,
    prompt: Prompt = Prompt(),
    where: Where = Where(),
    chat: bool = False,
    max_new: int = 32,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    logits: Path | None = None,
    json: Json = False,
) -> None:
    """Prints the next tokens and tok/s, with --json ms per layer and head too: greedy,
    or sampled with --temperature.

    Example: workbench generate build/llama --prompt-ids 1,42,100 --max-new 64

    Args:
        chat: The prompt is a user's message, in the checkpoint's own chat template.
        max_new: New tokens.
        temperature: 0: always the most likely token.
        top_k: Only the k most likely tokens; 0: all.
        top_p: Only the most likely tokens up to this probability.
        seed: Of the sampling.
        logits: Write logits [max_new + 1, V] fp32 here (.npy).
    """
    exported = workbench.Bundle.open(bundle)
    prompt.given(needed=True)
    if prompt.prompt is None:
        unread("--prompt, a message to answer", chat=chat)
    if not temperature:
        own = {"top_k": top_k > 0, "top_p": top_p < 1, "seed": seed > 0}
        unread("--temperature above 0", **own)
    from workbench.decode import Sampling
    from workbench.decode.transcript import encode_chat, load_tokenizer, transcript

    sampling = Sampling(temperature, top_k, top_p, seed)
    if chat:
        ids = encode_chat(exported.tokenizer, prompt.prompt)
    else:
        ids = prompt.of(exported)
    S = exported.manifest.options.max_seq_len
    if len(ids) + max(max_new - 1, 0) > S:
        raise InputError(
            f"prompt of {len(ids)} tokens",
            f"{max_new} new tokens asked for",
            f"at most {S} tokens together, the bundle's max_seq_len",
            "shorten the prompt (--tokens), lower --max-new, or export with a larger "
            "--max-seq-len",
        )
    if prompt.prompt:
        reader = load_tokenizer(exported.tokenizer)
        unknown = [
            word
            for word in prompt.prompt.split()
            if reader.unk_token_id in reader.encode(word, add_special_tokens=False)
        ]
        if unknown:
            text = f"unknown to the tokenizer: {', '.join(unknown)}"
            warnings.warn(text, stacklevel=1)
    decoder = where.decoder(exported, fast=True)
    on_text = None if json else _print_piece
    result = transcript(decoder, ids, max_new, logits, sampling, on_text=on_text)
    times, written = result["decode"], ""
    if result["text"] is None:  # else it was printed as it came
        written = ",".join(map(str, result["tokens"]))
    summary = f"{times['tokens']} tokens"
    if times["tokens_per_s"] is not None:
        summary += f", {times['tokens_per_s']:.1f} tok/s"
    end = f"{summary} ({result['runtime']}, {result['precision']})"
    show(result, json, [written, end])


def _print_piece(text: str) -> None:
    """Prints a part of a model's answer as soon as it is there."""
    print(visible(text), end="", flush=True)


def evaluate(
    bundle: Path,
    /,
    *,
    prompt: Prompt = Prompt(),
    where: Where = Where(),
    checkpoint: Path | None = None,
    window: int | None = None,
    stride: int | None = None,
    json: Json = False,
) -> None:
    """Perplexity of a text, KL and same top token against Hugging Face's model, 95%
    intervals.

    Token ids are the tokenizer's; each one but the first is scored once. Finished
    windows are stored in data/evaluations, where an interrupted run resumes.

    Example: workbench evaluate build/llama --text data/tasks/heldout.txt

    Args:
        checkpoint: The checkpoint that the bundle was exported from.
        window: Tokens of a window; default: max_seq_len.
        stride: Tokens between two windows' beginnings; default: half a window.
    """
    exported = workbench.Bundle.open(bundle)
    prompt.given(needed=True)
    source = opened(checkpoint)
    from workbench.check.evaluate import evaluate
    from workbench.decode.transcript import unknown_share

    folder = workbench.log.project() / "data/evaluations"
    decoder, ids = where.decoder(exported), prompt.of(exported)
    share = unknown_share(exported.tokenizer, ids)
    if share > MAX_UNKNOWN:
        text = (
            f"{share:.0%} of the tokens are unknown to the tokenizer: the perplexity "
        )
        text += "says nothing of the text; give one in the checkpoint's own words"
        warnings.warn(text, stacklevel=1)
    show(
        evaluate(decoder, ids, source, window=window, stride=stride, folder=folder),
        json,
    )
