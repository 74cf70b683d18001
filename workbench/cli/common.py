"""What commands share: groups of options, and the printing of a result."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, fields
from json import dumps
from pathlib import Path
from typing import Annotated, TextIO

from cyclopts import Parameter
from cyclopts.types import PositiveInt

import workbench
from workbench import paths
from workbench.check.gates import jsonable, verdict
from workbench.cli import ending
from workbench.errors import InputError, visible
from workbench.progress import end_stage

# where results are printed while `libraries_on_stderr` holds; None: on stdout
document_stream: TextIO | None = None

Json = Annotated[bool, Parameter(help="Print one JSON object instead of text.")]


@Parameter("*")
@dataclass(frozen=True)
class Prompt:
    """What the model reads: by default English prose, where its tokenizer knows that.

    Args:
        prompt: Text for the tokenizer.
        prompt_ids: Token ids, comma-separated: 2,42,100.
        text: File of text, UTF-8.
        tokens: Only the first so many tokens of it.
    """

    prompt: str | None = None
    prompt_ids: str | None = None
    text: Path | None = None
    tokens: PositiveInt | None = None

    def given(self, needed: bool = False) -> bool:
        """Whether there is one; refuses several, none where one is `needed`, and a
        missing file, before anything heavy is imported."""
        sources = "prompt", "prompt_ids", "text"
        given = [name for name in sources if getattr(self, name) is not None]
        if not needed <= len(given) <= 1:
            one_of = "one of --prompt, --prompt-ids, --text"
            found = ", ".join(given) or "none"
            raise InputError("prompt", found, one_of, "give one of them")
        text = paths.read_text(self.text) if self.text else self.prompt
        if text == "" or self.prompt_ids == "":
            subject = "prompt" if self.prompt_ids is None else "prompt ids"
            raise InputError(subject, "no text", "at least one token", "write a prompt")
        return bool(given)

    def of(self, source) -> list[int]:
        """Token ids for a `Bundle` or a `Checkpoint`, all of them in its vocabulary;
        without a prompt those of `default_ids`, as many as --tokens says and the bundle
        takes."""
        from workbench.check.hf import check_ids
        from workbench.check.text import COUNT, default_ids
        from workbench.decode.transcript import encode_text

        if isinstance(source, workbench.Bundle):
            folder, V = source.tokenizer, source.manifest.dims.V
            longest = source.manifest.options.max_seq_len
        else:
            folder, V, longest = source.tokenizer, source.config.vocab_size, self.tokens
        if self.prompt_ids is not None:
            parts = self.prompt_ids.split(",")
            # `check_ids` refuses what is no number by name
            ids = [int(part) if part.strip().isdecimal() else part for part in parts]
        elif self.prompt is not None or self.text:
            text = paths.read_text(self.text) if self.text else self.prompt
            ids = encode_text(folder, text)
        else:
            count = self.tokens or COUNT
            ids = default_ids(source, min(count, longest or count))
        return check_ids(ids, V)[: self.tokens].tolist()


def known_units(_, name: str) -> None:
    """Refuses compute units that Core ML lacks, on every runtime."""
    from workbench.runtime import check_compute_units

    check_compute_units(name)


@Parameter("*")
@dataclass(frozen=True)
class Device:
    """What runs the shards.

    Args:
        runtime: auto, portable, coreml or stand-in.
        compute_units: Core ML: CPU_AND_NE, CPU_ONLY, CPU_AND_GPU or ALL.
    """

    runtime: str = "auto"
    compute_units: Annotated[str, Parameter(validator=known_units)] = "CPU_AND_NE"


@Parameter("*")
@dataclass(frozen=True)
class Where(Device):
    """What runs the shards, and in which arithmetic.

    Args:
        runtime: auto, portable, coreml or stand-in.
        compute_units: Core ML: CPU_AND_NE, CPU_ONLY, CPU_AND_GPU or ALL.
        precision: Portable arithmetic: declared, exact or narrow.
    """

    precision: str = "declared"

    def decoder(self, bundle, **options):
        """A decoder of a bundle."""
        from workbench.runtime import is_device, resolve

        if is_device(resolve(self.runtime, bundle.manifest.options.plugin)):
            unread("the portable runtime", precision=self.precision != "declared")
        options["compute_units"] = self.compute_units
        return workbench.Decoder(bundle, self.runtime, self.precision, **options)


@Parameter("*")
@dataclass(frozen=True)
class Options:
    """Of an export; `workbench.bundle.Options` checks them.

    Args:
        max_seq_len: Rows S of the cache.
        tokens: Tokens of a call: 1-4 any number up to 4, 4 always four, 1,64 one or 64
            (a function for each over the same weights).
        batch: Sequences that are decoded together.
        layers_per_shard: Decoder layers in one .mlpackage.
        compress: fp16, int8-tensor, int8-channel, int4-block32, lut4, lut6.
        kv_write: mask (one-hot columns) or slice (at a dynamic index).
        layout: bct1 (channels, then tokens) or bc1t.
        moe: dense (all experts in one graph) or routed (the host picks).
        sliding: mask (whole caches) or ring (caches of the window).
        target: coreml, or a target that an installed plug-in offers.
    """

    max_seq_len: int = 512
    tokens: str = "1-4"
    batch: int = 1
    layers_per_shard: int = 1
    compress: str = "int8-channel"
    kv_write: str = "mask"
    layout: str = "bct1"
    moe: str = "dense"
    sliding: str = "mask"
    target: str = "coreml"


def unread(needed: str, *groups, **options) -> None:
    """Refuses options that are given (neither None nor False) and that only `needed`
    reads, and those of groups that are not the defaults: one that is given with the
    default's own value is not told from it."""
    for group in groups:
        for field in fields(group):
            options[field.name] = getattr(group, field.name) != field.default
    for name, value in options.items():
        if value is not None and value is not False:
            option = f"--{name.replace('_', '-')}"
            step = f"leave {option} out"
            raise InputError(option, "an option that is not read here", needed, step)


def opened(checkpoint: Path | None):
    """The `Checkpoint` at a path, None without one. Imports torch, but for a path that
    is refused."""
    if checkpoint:
        paths.locate_checkpoint(checkpoint)
        return workbench.Checkpoint(checkpoint)


def judged(checks: list) -> dict:
    """Gates as JSON, their verdict first."""
    return {"verdict": verdict(checks), "gates": [gate.json() for gate in checks]}


def show(result: dict, json: bool, lines: list[str] | None = None) -> None:
    """Prints the result as one JSON object, or `lines` (default: its text); exits
    with the code of its verdict (see `ending`)."""
    if json:
        lines = [dumps(jsonable(result), default=str, allow_nan=False)]
    print_result("\n".join(lines or text(result)))
    if code := ending.VERDICT_CODES.get(result.get("verdict")):
        sys.exit(code)


@contextmanager
def libraries_on_stderr() -> Iterator[None]:
    """Within the block, what a library prints on stdout goes to stderr, and stdout has
    the command's own document alone (see `print_result`)."""
    global document_stream
    before, document_stream = document_stream, sys.stdout
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        document_stream = before


def print_result(text: str) -> None:
    """Prints a command's result."""
    end_stage()
    print(visible(text), file=document_stream or sys.stdout)


LABELS = {
    "bytes": "size",
    "peak_rss_bytes": "peak memory",
    "converted": "programs converted",
    "stamped": "programs reused",
}
"""Of names in JSON whose words alone would not say what the value is."""


def label(name: str) -> str:
    """The name of a value as text says it: bytes are printed in MiB."""
    return LABELS.get(name, name.removesuffix("_bytes").replace("_", " "))


def text(result: dict) -> list[str]:
    """A result as lines: gates with their reasons, RED first, rows as a table, sentences
    one below the other, and everything else as its name and value. What was not
    measured is left out."""
    lines = []
    for name, value in result.items():
        title = label(name)
        match value:
            case None | "" | []:
                pass
            case str() if name == "verdict":
                lines.append(value)
            case list() if name == "gates":
                lines += map(
                    gate_line, sorted(value, key=lambda g: g["verdict"] != "RED")
                )
            case [dict(), *_]:
                lines += ["", title, *table(value)]
            case [str(), *_]:
                lines += [f"- {sentence}" for sentence in value]
            case dict() if any(isinstance(v, dict | list) for v in value.values()):
                lines += ["", title, *text(value)]
            case _:
                lines.append(f"{title:20}{plain(value, name)}")
    return lines


def gate_line(gate: dict) -> str:
    value = plain(gate["value"])
    return f"{gate['verdict']:8}{gate['name']:20}{value:14}{gate['reason']}"


def plain(value, name: str = "") -> str:
    """A value in words: what has parts as `name value, …`, floats with seven digits,
    bytes, as its name calls them, in MiB, null as -."""
    if value is None:
        return "-"
    if isinstance(value, dict):
        return ", ".join(f"{part} {plain(own, name)}" for part, own in value.items())
    if isinstance(value, list):
        return " … ".join(map(plain, value))
    if "bytes" in name:
        return f"{value / 2**20:,.1f} MiB"
    return f"{value:.7g}" if isinstance(value, float) else str(value)


def table(rows: list[dict]) -> list[str]:
    """Rows as text, without the columns in which none has a value."""
    import pandas as pd

    frame = pd.DataFrame(rows).dropna(axis="columns", how="all")
    how = {"na_rep": "-", "float_format": "{:.4g}".format}
    return frame.to_string(index=False, **how).splitlines()
