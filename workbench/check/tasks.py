"""Prompts with known answers. A bundle with a damaged cache answers them wrong, and
Hugging Face's model answers them right."""

import copy
import json
import reprlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from workbench import paths
from workbench.check import gates
from workbench.check.hf import whole_model
from workbench.check.text import TASKS as TASKS
from workbench.check.text import default_ids
from workbench.decode import Decoder
from workbench.decode.tokenizer import encode_text, has_tokenizer, load_tokenizer
from workbench.errors import InputError, one_line
from workbench.models.checkpoint import Checkpoint

# a file beside a checkpoint that was trained on `TASKS`, with its accuracy on them
EVALUATION = "evaluation.json"
# the key in that file of the number of `TASKS` that the model answers right
ACCURACY = "heldout_right"


def load_tasks(path: str | Path) -> list[dict]:
    """Prompts of a JSON-lines file: `task`, `distance`, `prompt`, `answer`.

    Raises:
        InputError: a file that cannot be read, or a line without a task, by its number.
    """
    needed = "JSON lines with task, distance, and as text prompt and answer"
    subject, step = f"tasks {path}", "see data/README.md"
    tasks = []
    for number, line in enumerate(paths.read_text(path, "tasks").splitlines(), 1):
        if not line.strip():
            continue
        try:
            task = json.loads(line)
        except (ValueError, RecursionError) as problem:
            actual = f"line {number}, which is no JSON ({one_line(problem)})"
            raise InputError(subject, actual, needed, step) from None
        if not isinstance(task, dict):
            raise InputError(subject, f"line {number}, no object", needed, step)
        if missing := {"task", "distance", "prompt", "answer"} - task.keys():
            actual = f"line {number} without {', '.join(sorted(missing))}"
            raise InputError(subject, actual, needed, step)
        for name in ("prompt", "answer"):
            if not isinstance(task[name], str):
                actual = f"line {number} with {name} {reprlib.repr(task[name])}"
                raise InputError(subject, actual, needed, step)
        tasks.append(task)
    if not tasks:
        raise InputError(subject, "no line", needed, step)
    return tasks


def prompt_ids(checkpoint: str | Path, count: int, text: str = "") -> list[int]:
    """At most `count` token ids of a prompt.

    Args:
        checkpoint: a Hugging Face folder (see `paths.find`).
        text: the prompt, or the path of a file with it (default: the text of
            `default_ids`).

    Raises:
        InputError: a `text` without a tokenizer, or a file that is not UTF-8.
    """
    source = Checkpoint(paths.find(checkpoint))
    if not text:
        return default_ids(source, count)
    file = None
    with suppress(OSError, ValueError):  # too long or strange a text for a path
        file = paths.find(text)
    if file and file.is_file():
        text = paths.read_text(file)
    return encode_text(source.tokenizer, text)[:count]


def untrained(checkpoint: Checkpoint, tasks: Sequence[dict]) -> str:
    """Why the checkpoint was not trained on `tasks`, so that a wrong answer says nothing
    about its cache; "" if it was. A trained checkpoint has a file with its accuracy on
    the tasks, and its tokenizer knows every word of them."""
    folder = checkpoint.path
    if not has_tokenizer(folder):
        return "the checkpoint has no tokenizer"
    try:
        recorded = json.loads((folder / EVALUATION).read_text())[ACCURACY] > 0
    except (OSError, ValueError, KeyError, TypeError):
        recorded = False
    if not recorded:
        return f"the checkpoint has no {EVALUATION} with its accuracy on these tasks"
    coder = load_tokenizer(checkpoint.tokenizer)
    texts = [task[name] for task in tasks for name in ("prompt", "answer")]
    words = {word for text in texts for word in text.split()}
    ids = coder(sorted(words), add_special_tokens=False)["input_ids"]
    if any(coder.unk_token_id in word_ids for word_ids in ids):
        return "the checkpoint's tokenizer does not know all words of these tasks"
    return ""


def trained_answers_gate(
    decoder: Decoder, checkpoint: Checkpoint, path: str | Path = "", every: int = 1
) -> gates.Gate:
    """`answers_gate` on the tasks of the file `path`. Without a file, the gate runs on
    every `every`th of `TASKS`, and only for a checkpoint that was trained on them."""
    if path:
        return answers_gate(decoder, checkpoint, load_tasks(paths.find(path)))
    tasks = load_tasks(paths.find(TASKS))[::every]
    if obstacle := untrained(checkpoint, tasks):
        reason = f"{obstacle}; ask tasks of your own"
        return gates.not_run("answers", reason)
    return answers_gate(decoder, checkpoint, tasks)


def right_answers(
    folder: Path, tasks: Sequence[dict], generate: Callable[[list[int], int], list[int]]
) -> list[bool]:
    """Whether each task's prompt is continued with its answer.

    Args:
        folder: of the tokenizer.
        generate: (prompt ids, number of tokens) → tokens.
    """
    coder = load_tokenizer(folder)
    is_correct = []
    for task in tasks:
        prompt = coder.encode(task["prompt"])
        prompt_and_answer = coder.encode(task["prompt"] + " " + task["answer"])
        text = coder.decode(generate(prompt, len(prompt_and_answer) - len(prompt)))
        is_correct.append(text.split() == task["answer"].split())
    return is_correct


def golden_answers(checkpoint: Checkpoint, tasks: Sequence[dict]) -> list[bool]:
    """Answers of Hugging Face's model in fp32; the whole model is loaded."""
    model = whole_model(checkpoint)

    def generate(ids: list[int], n: int) -> list[int]:
        length = {"min_new_tokens": n, "max_new_tokens": n}
        with torch.inference_mode():
            tokens = model.generate(torch.tensor([ids]), do_sample=False, **length)
        return tokens[0, len(ids) :].tolist()

    return right_answers(checkpoint.tokenizer, tasks, generate)


def answers_gate(
    decoder: Decoder, checkpoint: Checkpoint, tasks: Sequence[dict]
) -> gates.Gate:
    """The check of quality `answers`: the bundle, with the tokenizer in its folder,
    answers at least as many prompts as Hugging Face's model. Prompts that do not fit
    max_seq_len are left out."""
    encode = load_tokenizer(checkpoint.tokenizer).encode
    S = decoder.options.max_seq_len
    tasks = [t for t in tasks if len(encode(t["prompt"] + " " + t["answer"])) <= S]
    if not tasks:
        return gates.not_run("answers", f"no prompt fits max_seq_len = {S}")
    golden = sum(golden_answers(checkpoint, tasks))
    count = len(tasks)
    if not golden:
        reason = f"Hugging Face's model answers none of the {count} questions"
        return gates.not_run("answers", reason)
    # the caller's decoder keeps its current sequences
    answering = copy.copy(decoder.plain)
    B = decoder.options.batch

    def generate(ids: list[int], n: int) -> list[int]:
        records = answering.stream([ids] * B, n, stop=())
        return [record.token for record in records if record.seq == 0]

    right = sum(right_answers(decoder.bundle.root / "tokenizer", tasks, generate))
    reason = f"{right} of {count} known answers, the golden {golden}"
    return gates.quality_at_least("answers", right / count, golden / count, reason)
