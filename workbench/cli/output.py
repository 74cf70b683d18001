"""The output of commands: a result as text or as one JSON object, and the exit code of its
verdicts."""

import re
import shlex
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from json import dumps
from pathlib import Path
from typing import TextIO

from workbench.check.gates import (
    NOT_JUDGED,
    REQUIRED,
    Gate,
    describe_verdict,
    jsonable,
    names_cause,
    quality,
    verdict,
)
from workbench.cli import ending
from workbench.errors import InputError, visible
from workbench.progress import end_stage

# Wrong tensors of one layer that make another layer's weights likely: more than half of the
# 8 that gate `weights` names at most.
MANY_TENSORS = 5
READ_AND_EXPORT = "read the RED lines: they name what is wrong; then export again"
"""The next step where the reasons of the RED gates name the cause."""
LEAST_WIDTH = 40
"""Columns of the narrowest terminal that lines are wrapped to."""
LONGEST_LABEL = 20  # characters, with the spaces behind it
# What the further rows of a wrapped line are indented by: the sign of a list, the id of a
# rule, or a label with the spaces up to its value.
LABEL = re.compile(r"- |[A-Z]+\d+ +|\S+(?: \S+)* {2,}| +")
COMMAND = re.compile(r"(?<=: |  )(\S*/)?workbench .*$")
"""A command at the end of a line."""
# The stream for results while `libraries_on_stderr` is active; None: stdout.
document_stream: TextIO | None = None


def gates_json(gates: list[Gate]) -> dict:
    """Gates as JSON, their verdict first."""
    return {"verdict": verdict(gates), "gates": [gate.json() for gate in gates]}


def validation_json(gates: list[Gate]) -> dict:
    """Gates of a bundle as JSON, the verdicts on its export and its quality first."""
    words = {"verdict": verdict(gates), "quality": quality(gates)}
    return words | gates_json(gates)


def print_and_exit(
    result: dict,
    json: bool,
    lines: list[str] | None = None,
    code: int | None = None,
    next_command: str | None = None,
) -> None:
    """Prints a command's result and exits with the code of its verdicts (see `ending`);
    returns where the code is 0.

    Args:
        result: what is printed as one JSON object.
        json: whether it is; else `lines` are printed.
        lines: default: those of `format_result`.
        code: default: the exit code of the result's verdicts.
        next_command: what the user runs or does next, the last line of text.
    """
    if json:
        lines = [dumps(jsonable(result), default=str, allow_nan=False)]
    else:
        lines = lines or format_result(result)
        if next_command:
            lines = [*lines, f"{'next':20}{with_program(next_command)}"]
        lines = fit_terminal(lines)
    print_document("\n".join(lines))
    if code is None:
        code = ending.verdict_code(result.get("verdict"), result.get("quality"))
    if code:
        sys.exit(code)


def fit_terminal(lines: list[str]) -> list[str]:
    """The lines at the width of the terminal on stdout. Elsewhere they stay as they are: a
    pipe has one line for each gate, which `grep` finds. A text that has line breaks, such as
    a page in Markdown, stays too."""
    if not sys.stdout.isatty():
        return lines
    width = max(LEAST_WIDTH, shutil.get_terminal_size().columns)
    return [
        row
        for line in lines
        for row in ([line] if "\n" in line else _wrap(line, width))
    ]


def _wrap(line: str, width: int) -> list[str]:
    """A line in rows of at most `width` characters. Every row but the first is indented to
    the text behind the first label. A command at the end is not broken, since a shell would
    run its first row alone."""
    if len(line) <= width:
        return [line]
    label = LABEL.match(line)
    indent = " " * (label.end() if label and label.end() <= LONGEST_LABEL else 2)
    command = COMMAND.search(line)
    if command and label and command.start() == label.end():
        return [line]
    rows = textwrap.wrap(
        line[: command.start()] if command else line,
        width,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
        expand_tabs=False,
    )
    return [*rows, f"{indent}{command[0]}"] if command else rows


def has_wrong_weights(gates: list[dict]) -> bool:
    """Whether gate `weights` is RED."""
    return any((gate["name"], gate["verdict"]) == ("weights", "RED") for gate in gates)


def command_line(*words: str | Path) -> str:
    """A command of `workbench` as a shell takes it."""
    return shlex.join(["workbench", *map(str, words)])


def with_program(command: str) -> str:
    """A command of `workbench` with the path of the program where a shell would not find it,
    as before `. .venv/bin/activate`; another text as it is."""
    program, space, words = command.partition(" ")
    script = Path(sys.executable).with_name("workbench")
    if program != "workbench" or shutil.which(program) or not script.is_file():
        return command
    with suppress(ValueError):  # not below the working folder
        script = script.relative_to(Path.cwd())
    return f"{shlex.quote(str(script))}{space}{words}"


def step_after_red(
    result: dict, bundle: Path, checkpoint: Path | None, runtime: str = "auto"
) -> str | None:
    """What the user does next to find the cause of a RED result, mostly a command; None
    where it is not RED.

    Args:
        bundle, checkpoint: as the user gave them; without a checkpoint its place is
            named.
        runtime: that of the result.
    """
    if result["verdict"] != "RED":
        return None
    red = {gate["name"] for gate in result.get("gates", []) if gate["verdict"] == "RED"}
    if _names_a_layer(result.get("gates", [])):  # as where layers were exchanged
        words = "explain", "variant", bundle, "--checkpoint", checkpoint or "CHECKPOINT"
        return command_line(*words)
    if names_cause(red) and ("weights" not in red or _is_fitted(bundle)):
        return READ_AND_EXPORT
    if red == {"device"}:  # the program is right, and the runtime computes another
        words = "explain", "op", bundle
    else:
        words = "explain", bundle, "--checkpoint", checkpoint or "CHECKPOINT"
    device = () if runtime == "auto" else ("--runtime", runtime)
    return command_line(*words, *device)


def step_after_validation(
    result: dict, bundle: Path, checkpoint: Path | None, runtime: str
) -> str | None:
    """What the user does next after a validation: the command that writes its page after
    GREEN and WITHIN; else see `step_after_red`."""
    if (result["verdict"], result["quality"]) == ("GREEN", "WITHIN"):
        page = f"{Path(bundle).absolute().name}.html"
        return command_line("report", bundle, "--html", Path(bundle).parent / page)
    return step_after_red(result, bundle, checkpoint, runtime)


def _is_fitted(bundle: Path) -> bool:
    """Whether the weights of a bundle were fitted to a text: `explain` leaves them to
    `validate`."""
    from workbench.bundle import Bundle

    with suppress(InputError):
        return Bundle.open(bundle).manifest.calibration is not None
    return False


def _names_a_layer(gates: list[dict]) -> bool:
    """Whether gate `weights` alone is RED and its reason names so many tensors of one layer
    that they may be another layer's, which `explain variant` finds out."""
    reasons = {
        gate["name"]: gate["reason"] for gate in gates if gate["verdict"] == "RED"
    }
    if reasons.keys() != {"weights"}:
        return False
    named = {*re.findall(r"layers\.(\d+)\.([\w.]+)", reasons["weights"])}
    counts = Counter(layer for layer, _ in named)
    return max(counts.values(), default=0) >= MANY_TENSORS


@contextmanager
def libraries_on_stderr() -> Iterator[None]:
    """Sends what libraries print on stdout to stderr while the block runs, so that
    stdout has the command's own document alone (see `print_document`)."""
    global document_stream
    before, document_stream = document_stream, sys.stdout
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        document_stream = before


def print_document(text: str) -> None:
    """Prints a command's result."""
    end_stage()
    print(visible(text), file=document_stream or sys.stdout)


LABELS = {
    "bytes": "size",
    "shard_bytes": "size of shards",
    "embedding_bytes": "size of embeddings",
    "tokenizer_bytes": "size of tokenizer",
    "calibration_bytes": "size of calibration",
    "peak_rss_bytes": "peak memory",
    "converted": "programs converted",
    "stamped": "programs reused",
    "kl": "KL (nats)",
    "kl_mean": "mean KL (nats)",
    "intervals": "95% intervals",
    "same_top": "same top token",
    "resumed": "windows resumed",
}
"""Labels of JSON keys whose own words would be unclear."""


def label(name: str) -> str:
    """The name of a JSON key's value in a command's text. It has no word "bytes", since
    text gives sizes in MiB."""
    return LABELS.get(name, name.removesuffix("_bytes").replace("_", " "))


def format_result(result: dict) -> list[str]:
    """A result as lines of text, in the order of its keys. The verdicts and the gates are
    recognised by their keys (see `format_judgement`), everything else by its type: rows
    are a table, sentences a list, every other value stands behind its name. A value that
    was not measured is left out."""
    lines = []
    for name, value in result.items():
        title = label(name)
        match value:
            case None | "" | []:
                pass
            case dict() if not value:
                pass
            case str() | list() if name in JUDGEMENT:
                lines += format_judgement(result, name)
            case [dict(), *_]:
                lines += ["", title, *format_table(value)]
            case [str(), *_]:
                lines += [f"- {sentence}" for sentence in value]
            case dict() if any(isinstance(v, dict | list) for v in value.values()):
                lines += ["", title, *format_result(value)]
            case _:
                lines.append(f"{title:20}{format_value(value, name)}")
    return lines


JUDGEMENT = ("verdict", "quality", "gates")
"""The keys of a result that judge a bundle."""


def format_judgement(result: dict, name: str) -> list[str]:
    """The lines of a key of `JUDGEMENT`: both verdicts at `verdict`, none at `quality`, and
    gates with their reasons, RED and OVER first."""
    if name == "verdict":
        if "quality" in result:
            return format_verdicts(result)
        # without gates, the verdict is not that of an export
        word = f"{'export':20}" if "gates" in result else ""
        return [f"{word}{result['verdict']}"]
    if name == "quality":
        return []
    export = result.get("verdict")
    words = [describe_verdict(gate["verdict"], export) for gate in result["gates"]]
    worst_first = sorted(zip(words, result["gates"]), key=lambda pair: _RANKS[pair[0]])
    return [format_gate(gate, word) for word, gate in worst_first]


_RANKS = {"RED": 0, "OVER": 1} | dict.fromkeys(
    ("GREEN", "WITHIN", "not_run", NOT_JUDGED), 2
)


def format_verdicts(result: dict) -> list[str]:
    """Two lines: the verdict on the export, with the required gates that did not run,
    and the quality."""
    export, quality = result["verdict"], result["quality"]
    idle = [
        gate["name"]
        for gate in result.get("gates", [])
        if gate["verdict"] == "not_run"
        and gate["name"] in REQUIRED
        and gate.get("applies", True)
    ]
    if export == "not_run":
        export = "not run" + (f": {', '.join(idle)}" if idle else "")
    if quality == "not_run":
        quality = NOT_JUDGED if export == "RED" else "not run"
    return [f"{'export':20}{export}", f"{'quality':20}{quality}"]


def format_gate(gate: dict, word: str) -> str:
    """One line: the verdict as `word`, name, value with its limit, and reason of a
    gate."""
    value = format_value(gate["value"])
    if gate["value"] is not None and gate["threshold"] is not None:
        value += f" (limit {format_value(gate['threshold'])})"
    return f"{word:12}{gate['name']:20}{value:28}{gate['reason']}"


def format_value(value, name: str = "") -> str:
    """A value in words: the parts of an object as `name value, …`, floats with seven
    digits, null as -, booleans as yes and no. Bytes, recognised by the value's `name`,
    are in MiB."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        parts = (f"{key} {format_value(part, name)}" for key, part in value.items())
        return ", ".join(parts)
    if isinstance(value, list):
        return " … ".join(map(format_value, value))
    if "bytes" in name:
        return f"{value / 2**20:,.1f} MiB"
    return f"{value:.7g}" if isinstance(value, float) else str(value)


def format_table(rows: list[dict]) -> list[str]:
    """Rows as lines of text, without columns that have no value at all. Texts begin at the
    left of their column, numbers end at its right."""
    import pandas as pd

    frame = pd.DataFrame(rows).dropna(axis="columns", how="all")
    titles = {}
    for name, column in frame.items():
        if column.map(lambda value: isinstance(value, str)).all():
            width = max(len(name), column.str.len().max())
            frame[name] = column.str.ljust(width)
            titles[name] = name.ljust(width)
    text = frame.rename(columns=titles).to_string(
        index=False, na_rep="-", float_format=lambda number: f"{number:.4g}"
    )
    return [line.rstrip() for line in text.splitlines()]
