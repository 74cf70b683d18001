"""The record of a validation, which `validate` keeps beside its verdict:
`describe_command` collects the options that repeat the command, and `keep_validation`
writes them with the machine, the results and the measured rows. Nothing in it names a
place of this machine."""

import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import workbench
from workbench.cli.options import Execution, Prompt, TranscriptOptions
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

    def add_value(self, option: str, value: object) -> None:
        """Adds an option with its value; None: it is not given."""
        if value is not None:
            self.words += [option, str(value)]

    def add_switch(self, option: str, is_on: bool) -> None:
        """Adds an option without a value, if it is given."""
        if is_on:
            self.words.append(option)

    def add_file(self, option: str, file: Path | None) -> None:
        """Adds an option with the name of a file, and the hash of the file; None: it is not
        given."""
        if file is not None:
            self.files[file.name] = sha256(file)
            self.words += [option, file.name]


def describe_command(
    bundle,
    prompt: Prompt,
    execution: Execution,
    *,
    has_checkpoint: bool,
    golden: Path | None,
    tasks: Path | None,
    transcript_options: TranscriptOptions,
    max_kl: float,
    single_copy: bool,
    fresh: bool,
) -> Command:
    """The command that repeats a validation, from the options of `validate`. Limits stand
    there although they have their default, which a later version may change."""
    from workbench.runtime import is_device, resolve

    command = Command()
    if has_checkpoint:
        command.words += ["--checkpoint", "CHECKPOINT"]
    command.add_file("--golden", golden)
    command.add_value("--prompt", prompt.prompt)
    command.add_value("--prompt-ids", prompt.prompt_ids)
    command.add_file("--text", prompt.text)
    command.add_value("--tokens", prompt.tokens)
    # `auto` is another runtime on another machine
    runtime = resolve(execution.runtime, bundle.manifest.options.plugin)
    command.add_value("--runtime", runtime)
    if is_device(runtime):
        command.add_value("--compute-units", execution.compute_units)
    else:
        command.add_value("--precision", execution.precision)
    command.add_switch("--single-copy", single_copy)
    command.add_file("--tasks", tasks)
    command.add_value("--max-kl", max_kl)
    if transcript_options.transcript:
        command.add_switch("--transcript", True)
        command.add_file("--prompts", transcript_options.prompts)
        command.add_value("--min-agreed", transcript_options.min_agreed)
        command.add_value("--min-stops", transcript_options.min_stops)
    command.add_switch("--fresh", fresh)
    return command


def keep_validation(
    bundle,
    results: dict,
    command: Command,
    start: float,
    decoder=None,
    token_labels: list[str] | None = None,
    rows=None,
) -> None:
    """Writes a validation's record into the bundle's folder; warns where that cannot be
    written.

    Args:
        results: the JSON of the command.
        start: `time.perf_counter` at its start.
        decoder: None where no runtime opened the bundle.
        token_labels: the label of the token at each position of `rows`.
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
        save_record(bundle, results, setup, token_labels or [], rows)
    except OSError as problem:
        warnings.warn(
            f"what was measured is not kept in {bundle.root}: {one_line(problem)}",
            stacklevel=2,
        )
