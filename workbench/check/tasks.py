"""Known-answer prompts: a damaged cache shows as a wrong answer, in the bundle and not in the golden."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from workbench.check import gates
from workbench.check.golden import whole_prompt
from workbench.decode import Decoder
from workbench.decode.transcript import load_tokenizer as checkpoint_tokenizer
from workbench.errors import InputError
from workbench.models.checkpoint import Checkpoint

Generate = Callable[[list[int], int], list[int]]  # prompt ids, number of tokens → tokens


def load_tasks(path: str | Path) -> list[dict]:
    """Prompts of a JSON-lines file: `task`, `distance`, `prompt`, `answer`."""
    try:
        tasks = [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]
        if not tasks or any(not {"task", "distance", "prompt", "answer"} <= t.keys() for t in tasks):
            raise ValueError
    except (OSError, ValueError, AttributeError):
        raise InputError(f"tasks {path}", "no such file, or not one prompt a line", "JSON lines with task, distance, "
                         "prompt, answer", "see data/README.md") from None  # fmt: skip
    return tasks


def answer(tasks: Sequence[dict], encode: Callable[[str], list[int]], decode: Callable[[list[int]], str],
           generate: Generate) -> list[bool]:  # fmt: skip
    """Whether each task's answer is what greedy decoding says after its prompt."""
    right = []
    for task in tasks:
        length = len(encode(task["prompt"] + " " + task["answer"])) - len(encode(task["prompt"]))
        said = decode(generate(encode(task["prompt"]), length))
        right.append(said.split() == task["answer"].split())
    return right


def bundle_answers(decoder: Decoder, tasks: Sequence[dict]) -> list[bool]:
    """Answers of a bundle, with the tokenizer it carries."""
    coder = checkpoint_tokenizer(decoder.bundle.root / "tokenizer")
    with decoder.set_aside():
        return answer(tasks, coder.encode, coder.decode, lambda ids, n: decoder.generate(ids, n, stop=()))


def golden_answers(checkpoint: Checkpoint, tasks: Sequence[dict]) -> list[bool]:
    """Answers of Hugging Face's model in fp32; the whole model is loaded."""
    coder, model = checkpoint_tokenizer(checkpoint.path), whole_prompt(checkpoint)

    def generate(ids: list[int], n: int) -> list[int]:
        with torch.inference_mode():
            made = model.generate(torch.tensor([ids]), min_new_tokens=n, max_new_tokens=n, do_sample=False)
        return made[0, len(ids) :].tolist()

    return answer(tasks, coder.encode, coder.decode, generate)


def fitting(tasks: Sequence[dict], encode: Callable[[str], list[int]], S: int) -> list[dict]:
    """Tasks whose prompt and answer fit max_seq_len."""
    return [t for t in tasks if len(encode(t["prompt"] + " " + t["answer"])) <= S]


def answer_gates(decoder: Decoder, checkpoint: Checkpoint, tasks: Sequence[dict]) -> list[gates.Gate]:
    """The bundle answers as many prompts as the golden, and the golden as many as the checkpoint's evaluation says.

    The second gate is the only one that a fault shared by golden and bundle (a wrong rope in config.json) cannot pass:
    against each other they agree. Prompts that do not fit max_seq_len are left out.
    """
    chosen = fitting(tasks, checkpoint_tokenizer(checkpoint.path).encode, decoder.options.max_seq_len)
    if not chosen:
        return [gates.not_run("answers", f"no prompt fits max_seq_len = {decoder.options.max_seq_len}")]
    golden, found = golden_answers(checkpoint, chosen), bundle_answers(decoder, chosen)
    return [gates.at_least("answers", sum(found) / len(chosen), sum(golden) / len(chosen),
                           f"{sum(found)} of {len(chosen)} known answers, the golden {sum(golden)}"),
            _as_evaluated(checkpoint, sum(golden), len(chosen))]  # fmt: skip


def _as_evaluated(checkpoint: Checkpoint, right: int, count: int) -> gates.Gate:
    """At least the recorded accuracy, less three standard errors of a sample of `count`."""
    try:
        recorded = json.loads((checkpoint.path / "evaluation.json").read_text())
        expected = recorded["heldout_right"] / recorded["heldout_questions"]
    except (OSError, ValueError, KeyError, TypeError):
        return gates.not_run("golden_answers", "the checkpoint records no accuracy (evaluation.json)")
    slack = 3 * (max(expected * (1 - expected), 0.01) / count) ** 0.5
    return gates.at_least("golden_answers", right / count, expected - slack,
                          f"the golden answers {right} of {count}, its evaluation says {expected:.3f}")  # fmt: skip
