"""Known-answer prompts: with a damaged cache the bundle gives wrong answers where
Hugging Face's model gives right ones."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from workbench.check import gates
from workbench.check.golden import whole_prompt
from workbench.decode import Decoder
from workbench.decode.transcript import load_tokenizer
from workbench.errors import InputError
from workbench.models.checkpoint import Checkpoint

# prompt ids, number of tokens → tokens
Generate = Callable[[list[int], int], list[int]]


def load_tasks(path: str | Path) -> list[dict]:
    """Prompts of a JSON-lines file: `task`, `distance`, `prompt`, `answer`."""
    try:
        tasks = [
            json.loads(line)
            for line in Path(path).read_text().splitlines()
            if line.strip()
        ]
        if not tasks or any(
            not {"task", "distance", "prompt", "answer"} <= t.keys() for t in tasks
        ):
            raise ValueError
    except (OSError, ValueError, AttributeError):
        raise InputError(
            f"tasks {path}",
            "no such file, or not one prompt a line",
            "JSON lines with task, distance, prompt, answer",
            "see data/README.md",
        ) from None
    return tasks


def answer(
    tasks: Sequence[dict],
    encode: Callable[[str], list[int]],
    decode: Callable[[list[int]], str],
    generate: Generate,
) -> list[bool]:
    """Whether greedy decoding continues each task's prompt with its answer."""

    def right(task: dict) -> bool:
        prompt = encode(task["prompt"])
        whole = encode(task["prompt"] + " " + task["answer"])
        text = decode(generate(prompt, len(whole) - len(prompt)))
        return text.split() == task["answer"].split()

    return [right(task) for task in tasks]


def bundle_answers(decoder: Decoder, tasks: Sequence[dict]) -> list[bool]:
    """Answers of a bundle, with the tokenizer it carries."""
    coder = load_tokenizer(decoder.bundle.root / "tokenizer")
    with decoder.set_aside():
        return answer(
            tasks,
            coder.encode,
            coder.decode,
            lambda ids, n: decoder.generate(ids, n, stop=()),
        )


def golden_answers(checkpoint: Checkpoint, tasks: Sequence[dict]) -> list[bool]:
    """Answers of Hugging Face's model in fp32; the whole model is loaded."""
    coder = load_tokenizer(checkpoint.path)
    model = whole_prompt(checkpoint)

    def generate(ids: list[int], n: int) -> list[int]:
        with torch.inference_mode():
            tokens = model.generate(
                torch.tensor([ids]), min_new_tokens=n, max_new_tokens=n, do_sample=False
            )
        return tokens[0, len(ids) :].tolist()

    return answer(tasks, coder.encode, coder.decode, generate)


def answer_gates(
    decoder: Decoder, checkpoint: Checkpoint, tasks: Sequence[dict]
) -> list[gates.Gate]:
    """Gates on whether the bundle answers as many prompts as the golden, and the golden
    as many as the checkpoint's recorded accuracy predicts.

    Only the second gate shows a fault that golden and bundle share (a wrong rope in
    config.json), because the two agree with each other. Prompts that do not fit
    max_seq_len are left out."""
    encode = load_tokenizer(checkpoint.path).encode
    S = decoder.options.max_seq_len
    tasks = [t for t in tasks if len(encode(t["prompt"] + " " + t["answer"])) <= S]
    if not tasks:
        return [gates.not_run("answers", f"no prompt fits max_seq_len = {S}")]
    golden = sum(golden_answers(checkpoint, tasks))
    right = sum(bundle_answers(decoder, tasks))
    count = len(tasks)
    reason = f"{right} of {count} known answers, the golden {golden}"
    return [
        gates.at_least("answers", right / count, golden / count, reason),
        _as_evaluated(checkpoint, golden, count),
    ]


def _as_evaluated(checkpoint: Checkpoint, right: int, count: int) -> gates.Gate:
    """Gate `golden_answers`: the accuracy is at least the recorded one minus three
    standard errors of a sample of `count`."""
    try:
        recorded = json.loads((checkpoint.path / "evaluation.json").read_text())
        expected = recorded["heldout_right"] / recorded["heldout_questions"]
    except (OSError, ValueError, KeyError, TypeError):
        return gates.not_run(
            "golden_answers", "the checkpoint records no accuracy (evaluation.json)"
        )
    slack = 3 * (max(expected * (1 - expected), 0.01) / count) ** 0.5
    return gates.at_least(
        "golden_answers",
        right / count,
        expected - slack,
        f"the golden answers {right} of {count}, its evaluation has {expected:.3f}",
    )
