"""What several commands share: option types, prompts, goldens, and the printing of a
result."""

import re
from inspect import cleandoc, signature
from json import dumps
from pathlib import Path
from typing import Annotated

from typer import Exit, Option, Typer, echo

import workbench
from workbench import paths
from workbench.check.gates import jsonable
from workbench.errors import InputError

Json = Annotated[bool, Option("--json", help="Print one JSON object instead of text.")]
Ids = Annotated[str | None, Option(help="Token ids, comma-separated: 2,42,100.")]
RuntimeName = Annotated[
    str, Option(help="auto, portable, coreml, stand-in, stand-in:FAULT or coreai.")
]
Units = Annotated[
    str,
    Option(
        "--compute-units", help="Core ML: CPU_AND_NE, CPU_ONLY, CPU_AND_GPU or ALL."
    ),
]
Only = Annotated[
    str | None,
    Option(
        metavar="RUNTIME",
        help="This runtime alone: no second copy of the bundle in memory.",
    ),
]
PromptOf = Annotated[
    Path | None, Option(help="Golden store whose token ids are the prompt.")
]
Precision = Annotated[
    str, Option(help="Portable arithmetic: declared, exact or narrow.")
]
GoldenPath = Annotated[Path | None, Option(help="Golden store.")]
GoldenOf = Annotated[
    Path | None, Option(help="Make the golden now from this checkpoint.")
]
Prompt = Annotated[
    str | None, Option(help="Text of the prompt, read by the tokenizer.")
]
TextFile = Annotated[Path | None, Option("--text", help="File of text, UTF-8.")]
Tokens = Annotated[
    int | None, Option(help="Only the first so many tokens of the prompt.", min=1)
]
Log = Annotated[bool, Option("--record", help="Write the run into the experiment log.")]
LogFolder = Annotated[
    Path | None, Option("--log", help="Folder of the experiment log.")
]
Publish = Annotated[bool, Option("--publish", help="Make this the shipped write-up.")]
Memory = Annotated[
    str | None, Option(help="Memory of the target machine, such as 16G.")
]


def register(app: Typer, functions: dict, suffix: str) -> None:
    """Registers every function whose name ends in `suffix` as the command of the rest
    of its name.

    The docstring is the help of the command; each line of its section `Args:` is the
    help of one option. An option whose default is False has no `--no` form.
    `functions["PANEL"]` is the heading of the commands in the help."""
    for name, function in functions.items():
        if not name.endswith(suffix):
            continue
        text, _, options = cleandoc(function.__doc__).partition("\n\nArgs:\n")
        defaults = signature(function).parameters
        for option, line in re.findall(r"^    (\w+): (.+)$", options, re.MULTILINE):
            switch = [f"--{option}"] if defaults[option].default is False else []
            kind = function.__annotations__[option]
            help_ = Option(*switch, help=line)
            function.__annotations__[option] = Annotated[kind, help_]
        command = name.removesuffix(suffix).replace("_", "-")
        about = {"help": text, "rich_help_panel": functions.get("PANEL")}
        app.command(command, **about)(function)


def show(result: dict, json: bool, lines: list[str]) -> None:
    """Prints the result as one JSON object, or its text lines; exits 1 when its verdict
    is RED."""
    text = "\n".join(lines)
    if json:
        text = dumps(jsonable(result), default=str, allow_nan=False)
    echo(text)
    if result.get("verdict") == "RED":
        raise Exit(1)


def red_first(rows: list) -> list:
    """Gates or cells in the order RED, GREEN, not_run."""
    return sorted(rows, key=lambda row: ("RED", "GREEN", "not_run").index(row.verdict))


def gate_lines(gates: list) -> list[str]:
    """One line per gate with its value and reason, RED first.

    If the golden is of another checkpoint, that gate is the only line, since all others
    compare two models then."""
    for gate in gates:
        if (gate.name, gate.verdict) == ("golden_is_of_this_checkpoint", "RED"):
            note = ": the other gates compare two models (--json has them)"
            return [gate_line(gate) + note]
    return list(map(gate_line, red_first(gates)))


def gate_line(gate) -> str:
    value = ""
    if gate.value is not None:
        value = f"{gate.value:<12.6g}"
    return f"{gate.verdict:8}{gate.name:29}{value}{gate.reason}"


def price_lines(price: dict) -> list[str]:
    """The KL that a bundle costs, and below it the KL that rounding alone must cost."""

    def figures(kl: dict) -> str:
        return ", ".join(f"{name} {value:.3g}" for name, value in kl.items())

    lines = [
        f"price: KL {figures(price['kl'])}; same top token {price['same_top']:.1%}"
    ]
    if budget := price["budget"]:
        lines.append(f"budget, what rounding alone costs: KL {figures(budget['kl'])}")
    return lines


def parse_ids(
    text: str, option: str = "--prompt-ids", example: str = "2,42,100"
) -> list[int]:
    """Integers as `--prompt-ids` writes them."""
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise InputError(
            option, repr(text), "integers separated by commas", f"write {example}"
        ) from None


def ids_for(
    prompt_ids: str | None,
    V: int,
    bos: int | None = None,
    *,
    prompt: str | None = None,
    text: Path | None = None,
    tokens: int | None = None,
    tokenizer: Path | None = None,
) -> list[int]:
    """The ids of a prompt, all of them in the vocabulary, at most `tokens` of them.

    Args:
        prompt_ids: ids as `--prompt-ids` writes them.
        bos: without any prompt the ids are 24 seeded random ones, the first of them
            `bos` if it is not None.
        prompt: text that the tokenizer in the folder `tokenizer` encodes; `text` is a
            file of it.
    """
    import numpy as np

    from workbench.check.golden import check_ids

    if prompt is not None or text:
        from workbench.decode.transcript import encode_text

        ids = encode_text(tokenizer, paths.text(text) if text else prompt)
    elif prompt_ids is not None:
        ids = parse_ids(prompt_ids)
    else:
        ids = np.random.default_rng(0).integers(0, V, 24)
        if bos is not None:
            ids[0] = bos
    return check_ids(ids, V)[:tokens].tolist()


def open_folder(path: Path):
    """The bundle or the adopted packages at `path`; refuses a wrong path before torch
    is loaded."""
    if not paths.adopted(path):
        return workbench.Bundle.open(path)
    from workbench.adopt.folder import Adopted

    return Adopted.open(path)


def prompt_of(
    golden: Path | None, prompt_ids: str | None, V: int, **prompt
) -> list[int]:
    """The token ids of the stored `golden` if there is one, else those of `ids_for`."""
    from workbench.check.golden import Golden, check_ids

    if golden and (
        prompt_ids is not None or prompt.get("prompt") or prompt.get("text")
    ):
        raise InputError(
            "prompt", "--golden beside a prompt", "one of them", "leave the prompt out"
        )
    if golden:
        return check_ids(Golden.load(golden).ids, V).tolist()
    return ids_for(prompt_ids, V, **prompt)


def bundles_only(**options) -> None:
    """Refuses every one of these options that is set, since packages without a bundle
    lack it."""
    for name, value in options.items():
        if value:
            subject, actual = f"--{name.replace('_', '-')}", "packages without a bundle"
            raise InputError(subject, actual, "a bundle", "leave the option out")


def look_at(golden: Path | None, checkpoint: Path | None) -> None:
    """Refuses a path without a golden or without a checkpoint before torch is
    imported."""
    if golden:
        paths.golden(golden)
    if checkpoint:
        paths.checkpoint(checkpoint)


def look_at_prompt(
    prompt_ids: str | None, prompt: str | None, text: Path | None
) -> None:
    """Refuses several prompts and a path without a text file before torch is
    imported."""
    if sum(value is not None for value in (prompt_ids, prompt, text)) > 1:
        options = "--prompt-ids, --prompt, --text"
        raise InputError(
            "prompt", f"several of {options}", "at most one", "give one of them"
        )
    if text:
        paths.text(text)


def load_golden(
    golden: Path | None,
    checkpoint: Path | None,
    prompt_ids: str | None,
    V: int,
    bos: int | None = None,
    **prompt,
):
    """The stored `golden`, or one made now from a checkpoint and a prompt (see
    `ids_for`)."""
    from workbench.check.golden import Golden, make_golden

    if golden:
        return Golden.load(golden)
    if checkpoint:
        folder = paths.checkpoint(checkpoint)
        return make_golden(
            folder, ids_for(prompt_ids, V, bos, tokenizer=folder, **prompt)
        )
    raise InputError(
        "golden",
        "neither --golden nor --checkpoint",
        "one of them",
        "run: workbench golden CHECKPOINT --out G, then give --golden G",
    )


def another(only: str) -> str:
    """The runtime that `--only` names; refuses portable, beside which nothing could be
    left out."""
    from workbench.runtime import resolve

    if (runtime := resolve(only)) == "portable":
        raise InputError(
            "--only", "portable", "coreml or stand-in", "use --runtime portable"
        )
    return runtime


def of_core_ai(bundle) -> bool:
    """Whether a bundle, which may be an adopted one, holds Core AI programs."""
    return bundle.manifest.options.target == "coreai"


def core_ml_only(bundle, subject: str) -> None:
    """Refuses a bundle of Core AI programs."""
    if of_core_ai(bundle):
        raise InputError(
            subject,
            "a bundle exported with --target coreai",
            "the operations of Core ML programs",
            "export the checkpoint once more, without --target coreai",
        )


def record(
    command: str, result: dict, bundle, row: dict, decoder=None, **tables
) -> None:
    """Logs `row` with the columns of bundle and decoder; adds the run's id to
    `result`."""
    from workbench.sweep import runs

    row = runs.describe(bundle, decoder) | {"command": command} | row
    if decoder and decoder.fault:
        row["config"] = row.get("config", {}) | {"fault": decoder.fault}
    result["run_id"] = runs.record_run(command, row, **tables)
