"""What commands share: groups of options, goldens, and the printing of a result."""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, getdoc, signature
from json import dumps
from pathlib import Path
from typing import Annotated, get_origin

from typer import Exit, Option, Typer, echo

import workbench
from workbench import paths
from workbench.check.gates import Gate, jsonable, verdict
from workbench.errors import InputError

Json = Annotated[bool, Option("--json", help="Print one JSON object instead of text.")]
LogFolder = Annotated[
    Path | None, Option("--log", help="Folder of the experiment log.")
]
Record = Annotated[
    bool, Option("--record", help="Write the run into the experiment log.")
]
GoldenPath = Annotated[
    Path | None, Option(help="Stored values of Hugging Face's model, in its place.")
]
Checkpoint = Annotated[
    Path | None, Option(help="The checkpoint that the bundle was exported from.")
]


@dataclass(frozen=True)
class Prompt:
    """What the model reads.

    Args:
        prompt: Text for the tokenizer.
        prompt_ids: Token ids, comma-separated: 2,42,100.
        text: File of text, UTF-8.
        tokens: Only the first so many tokens of it.
    """

    prompt: str | None = None
    prompt_ids: str | None = None
    text: Path | None = None
    tokens: int | None = None

    def given(self) -> bool:
        """Whether there is one; refuses several and a missing file, before anything
        heavy is imported."""
        sources = (self.prompt, self.prompt_ids, self.text)
        count = sum(source is not None for source in sources)
        if count > 1:
            options = "--prompt, --prompt-ids, --text"
            raise InputError(
                "prompt", f"several of {options}", "at most one", "give one of them"
            )
        if self.text:
            paths.text(self.text)
        return bool(count)

    def required(self) -> None:
        """As `given`; refuses none."""
        if not self.given():
            needed = "one of --prompt, --prompt-ids, --text"
            raise InputError("prompt", "none", needed, "give one of them")

    def ids(self, V: int, tokenizer: Path, bos: int | None = None) -> list[int]:
        """Token ids, all of them in a vocabulary of V; without a prompt 24 seeded
        random ones, the first of them `bos` if it is not None."""
        import numpy as np

        from workbench.check.hf import check_ids
        from workbench.decode.transcript import encode_text

        if self.prompt_ids is not None:
            ids = parse_ids(self.prompt_ids)
        elif self.given():
            text = paths.text(self.text) if self.text else self.prompt
            ids = encode_text(tokenizer, text)
        else:
            ids = np.random.default_rng(0).integers(0, V, 24)
            if bos is not None:
                ids[0] = bos
        return check_ids(ids, V)[: self.tokens].tolist()


@dataclass(frozen=True)
class Where:
    """What runs the shards.

    Args:
        runtime: auto, portable, coreml or stand-in.
        compute_units: Core ML: CPU_AND_NE, CPU_ONLY, CPU_AND_GPU or ALL.
        precision: Portable arithmetic: declared, exact or narrow.
    """

    runtime: str = "auto"
    compute_units: str | None = None
    precision: str = "declared"

    @property
    def units(self) -> str:
        return self.compute_units or "CPU_AND_NE"

    def decoder(self, bundle, **options):
        """A decoder of a bundle."""
        options |= {"compute_units": self.units}
        return workbench.Decoder(bundle, self.runtime, self.precision, **options)


# an entry of a docstring's `Args:`, whose further lines are indented more
ARGUMENT = re.compile(r"^    (\w+): (.+(?:\n {8}.+)*)$", re.MULTILINE)


def register(app: Typer, functions: dict, suffix: str = "_command") -> None:
    """Registers every function whose name ends in `suffix` as the command of the rest
    of its name, under the heading `functions["PANEL"]`.

    The docstring is the help; each entry of its section `Args:` is the help of one
    option. A parameter whose type is a dataclass stands for the options that are its
    fields. A trailing underscore is no part of an option's name."""
    for name, function in functions.items():
        if name.endswith(suffix):
            about, _ = _told(function)
            command = name.removesuffix(suffix).replace("_", "-")
            panel = functions.get("PANEL")
            app.command(command, help=about, rich_help_panel=panel)(_flat(function))


def _told(documented) -> tuple[str, dict[str, str]]:
    """The text of a docstring, and its entries under `Args:`."""
    text, _, entries = getdoc(documented).partition("\n\nArgs:\n")
    told = {name: " ".join(line.split()) for name, line in ARGUMENT.findall(entries)}
    return text, told


def _flat(function: Callable) -> Callable:
    """The function with the fields of its groups of options as parameters."""
    own, options = signature(function).parameters, []
    groups = {
        name: p.annotation for name, p in own.items() if is_dataclass(p.annotation)
    }
    for name, parameter in own.items():
        if name not in groups:
            options.append(_option(parameter, _told(function)[1].get(name)))
    for group in groups.values():
        for field in fields(group):
            parameter = Parameter(
                field.name, Parameter.KEYWORD_ONLY, default=field.default
            )
            parameter = parameter.replace(annotation=field.type)
            options.append(_option(parameter, _told(group)[1][field.name]))

    @wraps(function)
    def run(**given):
        for name, group in groups.items():
            given[name] = group(**{f.name: given.pop(f.name) for f in fields(group)})
        return function(**given)

    options = [option.replace(kind=Parameter.KEYWORD_ONLY) for option in options]
    run.__signature__ = Signature(options)
    run.__annotations__ = {option.name: option.annotation for option in options}
    return run


def _option(parameter: Parameter, told: str | None) -> Parameter:
    """A parameter whose annotation has its help, an option even where it is required; a
    switch has no `--no` form."""
    if told is None or get_origin(parameter.annotation) is Annotated:
        return parameter
    name = "--" + parameter.name.strip("_").replace("_", "-")
    option = Option(name, help=told)
    return parameter.replace(annotation=Annotated[parameter.annotation, option])


def show(result: dict, json: bool, lines: list[str]) -> None:
    """Prints the result as one JSON object, or its text lines; exits 1 when its verdict
    is RED."""
    text = "\n".join(lines)
    if json:
        text = dumps(jsonable(result), default=str, allow_nan=False)
    echo(text)
    if result.get("verdict") == "RED":
        raise Exit(1)


def gate_lines(gates: list) -> list[str]:
    """One line per gate with its value and reason, RED first."""
    lines, order = [], ("RED", "GREEN", "not_run")
    for gate in sorted(gates, key=lambda gate: order.index(gate.verdict)):
        value = "" if gate.value is None else f"{gate.value:<12.6g}"
        lines.append(f"{gate.verdict:8}{gate.name:29}{value}{gate.reason}")
    return lines


def parse_ids(text: str) -> list[int]:
    """Integers as `--prompt-ids` writes them."""
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        needed, step = "integers separated by commas", "write 2,42,100"
        raise InputError("--prompt-ids", repr(text), needed, step) from None


def judged(checks: list[Gate]) -> dict:
    """The verdict of gates, and the gates, as JSON."""
    return {"verdict": verdict(checks), "gates": [gate.json() for gate in checks]}


def record(
    command: str, result: dict, bundle, row: dict, decoder=None, **tables
) -> None:
    """Logs `row` with the columns of bundle and decoder; adds the run's id to
    `result`."""
    from workbench import log
    from workbench.sweep import identity

    row = identity.describe(decoder or bundle) | {"command": command} | row
    result["run_id"] = log.record({"experiment": command} | row, **tables)
