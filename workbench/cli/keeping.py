"""The record that `validate` writes beside its verdict: the setup of a validation, in
words that name no place of this machine."""

import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import workbench
from workbench.cli.common import Execution, Prompt
from workbench.errors import one_line
from workbench.files import sha256


@dataclass
class Command:
    """The command that repeats a validation, and the files that it reads.

    Attributes:
        words: behind `workbench validate BUNDLE`.
        files: name → SHA-256 of each file.
    """

    words: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)

    def add(self, option: str, value: object) -> None:
        """Adds an option with its value; a switch that is on, without one."""
        if value is None or value is False:
            return
        if isinstance(value, Path):
            self.files[value.name] = sha256(value)
            value = value.name
        self.words.append(option)
        if value is not True:
            self.words.append(str(value))


def describe_command(
    bundle,
    prompt: Prompt,
    execution: Execution,
    *,
    has_checkpoint: bool,
    golden: Path | None,
    tasks: Path | None,
    transcript_options,
    max_kl: float,
    single_copy: bool,
    fresh: bool,
) -> Command:
    """The options of a validation. Limits stand there although they have their default,
    which a later version may change.

    Args:
        transcript_options: `TranscriptOptions`, which cannot be imported here.
    """
    from workbench.runtime import is_device, resolve

    command = Command()
    if has_checkpoint:
        command.words += ["--checkpoint", "CHECKPOINT"]
    command.add("--golden", golden)
    command.add("--prompt", prompt.prompt)
    command.add("--prompt-ids", prompt.prompt_ids)
    command.add("--text", prompt.text)
    command.add("--tokens", prompt.tokens)
    # `auto` is another runtime on another machine
    runtime = resolve(execution.runtime, bundle.manifest.options.plugin)
    command.add("--runtime", runtime)
    if is_device(runtime):
        command.add("--compute-units", execution.compute_units)
    else:
        command.add("--precision", execution.precision)
    command.add("--single-copy", single_copy)
    command.add("--tasks", tasks)
    command.add("--max-kl", max_kl)
    if transcript_options.transcript:
        command.add("--transcript", True)
        command.add("--prompts", transcript_options.prompts)
        command.add("--min-agreed", transcript_options.min_agreed)
        command.add("--min-stops", transcript_options.min_stops)
    command.add("--fresh", fresh)
    return command


def keep_validation(
    bundle,
    results: dict,
    command: Command,
    start: float,
    decoder=None,
    tokens: list[str] | None = None,
    rows=None,
) -> None:
    """Writes a validation's record into the bundle's folder; warns where that cannot be
    written.

    Args:
        results: the JSON of the command.
        start: `time.perf_counter` at its start.
        decoder: None where no runtime opened the bundle.
        tokens: the label of the token at each position of `rows`.
        rows: a DataFrame, see `Record`; None where nothing was measured.
    """
    from workbench.ane.memory import peak_rss
    from workbench.check.record import Environment, Setup, save_record

    execution = {}
    if decoder:
        execution["runtime"] = decoder.runtime
        if decoder.is_device:
            execution["compute_units"] = decoder.compute_units
        else:
            execution["precision"] = decoder.precision
    columns = workbench.log.environment()
    environment = Environment(
        machine=columns["machine"],
        platform=columns["platform"],
        versions=columns["versions"],
        time=columns["time"].isoformat(timespec="minutes"),
        commit=columns["commit"],
    )
    setup = Setup(
        command=command.words,
        inputs=command.files,
        execution=execution,
        environment=environment,
        seconds=time.perf_counter() - start,
        peak_rss_bytes=peak_rss(),
    )
    try:
        save_record(bundle, results, setup, tokens or [], rows)
    except OSError as problem:
        warnings.warn(
            f"what was measured is not kept in {bundle.root}: {one_line(problem)}",
            stacklevel=2,
        )
