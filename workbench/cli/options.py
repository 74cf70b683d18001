"""Groups of options that commands share, their checks, and the reading of a checkpoint."""

import re
from dataclasses import dataclass, fields
from json import JSONDecodeError, loads
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.types import ExistingFile, NonNegativeInt, PositiveInt
from cyclopts.validators import Number

import workbench
from workbench import checkpoint_checks, paths
from workbench.check.gates import MIN_AGREED, MIN_STOPS
from workbench.errors import InputError
from workbench.progress import stage

Share = Annotated[float, Parameter(validator=Number(gte=0, lte=1))]
Json = Annotated[bool, Parameter(help="Print one JSON object instead of text.")]


@Parameter("*")
@dataclass(frozen=True)
class Prompt:
    """What the model reads: by default English prose, if the tokenizer knows English.

    Args:
        prompt: Text for the tokenizer.
        prompt_ids: Token ids, comma-separated: 2,42,100.
        text: File of text, UTF-8.
        tokens: Read only this many tokens from the beginning.
    """

    prompt: str | None = None
    prompt_ids: str | None = None
    text: Path | None = None
    tokens: PositiveInt | None = None

    @property
    def sources(self) -> list[str]:
        """The options of a prompt that are given: at most one after `check`."""
        names = "prompt", "prompt_ids", "text"
        return [name for name in names if getattr(self, name) is not None]

    def check(self, required: bool = False) -> None:
        """Checks the options before anything heavy is imported.

        Raises:
            InputError: several prompts, none where one is `required`, an empty one, ids
                that are no numbers, or a file that cannot be read.
        """
        if len(self.sources) > 1 or required and not self.sources:
            one_of = "one of --prompt, --prompt-ids, --text"
            options = (f"--{name.replace('_', '-')}" for name in self.sources)
            actual = ", ".join(options) or "none"
            raise InputError("prompt", actual, one_of, "give one of them")
        text = paths.read_text(self.text) if self.text else self.prompt
        if text == "" or self.prompt_ids == "":
            subject = "prompt" if self.prompt_ids is None else "prompt ids"
            step = "write a prompt"
            if self.text:
                subject, step = f"text {self.text}", "give a file with a text"
            raise InputError(subject, "no text", "at least one token", step)
        for part in (self.prompt_ids or "0").split(","):
            # whether a number is in the vocabulary shows once the model is open
            if not re.fullmatch(r"\s*-?[0-9]+\s*", part):
                needed = "a whole number at each place, such as 2,42,100"
                raise InputError("--prompt-ids", repr(part), needed, "correct it")

    def token_ids(self, source) -> list[int]:
        """Token ids for a `Bundle` or a `Checkpoint`, all of them in its vocabulary.

        Without a prompt they are those of `default_ids`: as many as --tokens says, and
        at most as many as the bundle's `max_seq_len`.
        """
        from workbench.check.hf import check_ids
        from workbench.check.text import COUNT, default_ids
        from workbench.decode.tokenizer import encode_text

        if isinstance(source, workbench.Bundle):
            folder, V = source.tokenizer, source.manifest.dims.V
            longest = source.manifest.options.max_seq_len
        else:
            folder, V, longest = source.tokenizer, source.config.vocab_size, self.tokens
        if self.prompt_ids is not None:
            parts = self.prompt_ids.split(",")
            ids = [int(part) for part in parts]
            _check_vocabulary(ids, V)
        elif self.prompt is not None or self.text:
            text = paths.read_text(self.text) if self.text else self.prompt
            ids = encode_text(folder, text)
        else:
            count = self.tokens or COUNT
            ids = default_ids(source, min(count, longest or count))
        return check_ids(ids, V)[: self.tokens].tolist()

    def fitting_token_ids(self, bundle) -> list[int]:
        """The token ids of `token_ids` for a `Bundle`, where they fit its cache.

        Raises:
            InputError: more tokens than `max_seq_len`, before anything runs.
        """
        ids = self.token_ids(bundle)
        check_length(ids, bundle)
        return ids


def _check_vocabulary(ids: list[int], V: int) -> None:
    """Raises an InputError that names the first id of --prompt-ids outside a vocabulary of V
    tokens."""
    for place, number in enumerate(ids, start=1):
        if not 0 <= number < V:
            raise InputError(
                "--prompt-ids",
                f"{number} at place {place}",
                f"token ids from 0 to {V - 1}: the vocabulary has {V} tokens",
                "correct the id, or give the text instead: --prompt TEXT",
            )


def check_length(ids: list[int], bundle) -> None:
    """Raises an InputError for more token ids of a prompt than the `max_seq_len` of a
    `Bundle`."""
    S = bundle.manifest.options.max_seq_len
    if len(ids) > S:
        raise InputError(
            f"prompt of {len(ids)} tokens",
            f"{len(ids) - S} too many",
            f"at most {S} tokens, the bundle's max_seq_len",
            f"shorten the prompt (--tokens {S}), or export with a larger --max-seq-len",
        )


def check_runs_here(runtime: str, bundle) -> None:
    """Raises an InputError unless this machine has a runtime, as its option names it, and
    the runtime runs the programs of a `Bundle`."""
    from workbench.runtime import resolve

    resolve(runtime, bundle.manifest.options.plugin)


def check_runnable(bundle) -> None:
    """Raises an InputError for a `Bundle` whose options do not fit its list of shards, as
    after an edit of bundle.json. A runtime would refuse an input by its shape instead,
    and could not name the file.

    Commands that judge a bundle do not call this: gate `interface` compares the same
    facts."""
    # loads torch, which every caller needs next
    from workbench.check.interface import shard_list_facts

    manifest = bundle.manifest
    facts = shard_list_facts(manifest)
    fault = next(facts.differences("options", "list of shards"), None)
    if fault:
        is_adopted = any(shard.foreign for shard in manifest.shards)
        command = "workbench adopt" if is_adopted else "workbench export"
        raise InputError(
            str(bundle.root / paths.BUNDLE),
            fault,
            "options that fit the shards",
            f"restore the file, or make the bundle again with {command}",
        )


# cyclopts calls a validator with the option's type and its value
def check_units(_, name: str) -> None:
    """Refuses compute units that Core ML lacks, on every runtime."""
    from workbench.runtime import check_compute_units

    check_compute_units(name)


def check_arithmetic(_, name: str) -> None:
    """Refuses an arithmetic that the portable runtime lacks."""
    from miltorch.precision import check_precision

    check_precision(name)


@Parameter("*")
@dataclass(frozen=True)
class Device:
    """What runs the shards.

    Args:
        runtime: auto, portable, coreml or stand-in (an imitation of Core ML for tests).
        compute_units: Core ML: CPU_AND_NE, CPU_ONLY, CPU_AND_GPU or ALL.
    """

    runtime: str = "auto"
    compute_units: Annotated[str, Parameter(validator=check_units)] = "CPU_AND_NE"

    def check(self, bundle) -> None:
        """Checks that this machine has the runtime and that it runs the programs of a
        `Bundle`, before anything heavy is imported.

        Raises:
            InputError: it does not.
        """
        check_runs_here(self.runtime, bundle)


@Parameter("*")
@dataclass(frozen=True)
class Execution(Device):
    """What runs the shards, and in which arithmetic.

    Args:
        runtime: auto, portable, coreml or stand-in (an imitation of Core ML for tests).
        compute_units: Core ML: CPU_AND_NE, CPU_ONLY, CPU_AND_GPU or ALL.
        precision: Portable arithmetic: declared (as the programs say), exact (float32)
            or narrow (sums in fp16).
    """

    precision: Annotated[str, Parameter(validator=check_arithmetic)] = "declared"

    def decoder(self, bundle, **options):
        """A decoder of a bundle; `options` are further keywords of `Decoder`."""
        from workbench.runtime import is_device, resolve

        if is_device(resolve(self.runtime, bundle.manifest.options.plugin)):
            # a device computes as its programs declare
            is_other = self.precision != "declared"
            reject_unused("the portable runtime", precision=is_other)
        options["compute_units"] = self.compute_units
        return workbench.Decoder(bundle, self.runtime, self.precision, **options)


@Parameter("*")
@dataclass(frozen=True)
class ExportOptions:
    """The form of an export; `workbench.bundle.Options` checks it.

    Args:
        max_seq_len: The most tokens of a sequence: rows of the KV cache.
        tokens: Tokens in a call. 1-4: any number from 1 to 4. 4: always 4. 1,64: 1 or
            64, as two functions that share their weights.
        batch: Sequences that are decoded together.
        layers_per_shard: Decoder layers in one .mlpackage.
        compress: fp16, int8-channel, lut6-g16, lut4-g8, int4-block32, int8-tensor, or
            mixed, a format for each matrix.
        kv_write: mask (one-hot columns) or slice (at a dynamic index).
        layout: bct1 (channels, then tokens) or bc1t.
        moe: dense (one program computes all experts) or routed (each expert is a shard,
            and the host runs those that the router picks; one layer per shard).
        sliding: For layers with an attention window: mask (a cache of max_seq_len rows)
            or ring (a cache of about the window's rows, overwritten in turn).
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


@Parameter("*")
@dataclass(frozen=True)
class CalibrationText:
    """What weights are calibrated with.

    Args:
        calibrate: File of text, UTF-8, about 8,192 tokens, that compression is fitted
            to.
        calibrate_ids: The text as token ids, for a checkpoint without a tokenizer: a
            NumPy file, or a JSON list.
        seed: The seed with which 64 windows of 128 tokens are drawn from a longer text.
    """

    calibrate: Path | None = None
    calibrate_ids: Path | None = None
    seed: NonNegativeInt = 0

    def check(self, compress: str) -> None:
        """Checks the options before anything heavy is imported.

        Raises:
            InputError: both a text and ids, a file that cannot be read, a seed without
                a text, or a preset that needs a text and has none.
        """
        from workbench.bundle.presets import check_calibrated, find_preset

        if self.calibrate and self.calibrate_ids:
            subject, step = "--calibrate, --calibrate-ids", "leave one of them out"
            raise InputError(subject, "both", "one calibration text", step)
        path = self.calibrate or self.calibrate_ids
        if path is None:
            reject_unused("--calibrate TEXT", seed=self.seed > 0)
        elif not path.is_file():
            step = "check the path"
            raise InputError(str(path), "no file", "a text to calibrate with", step)
        try:
            preset = find_preset(compress)
        except ValueError:
            return  # `export` names the presets that there are
        step = (
            "give one: --calibrate TEXT, such as data/calibration.txt of a checkout, "
            "or --calibrate-ids FILE without a tokenizer"
        )
        check_calibrated(preset, path is not None, step)

    def read(self, source):
        """The windows of the text for a `Checkpoint`."""
        from workbench.check.hf import check_ids
        from workbench.decode.tokenizer import encode_text
        from workbench.exporter.calibrate import draw_windows

        if self.calibrate:
            ids = encode_text(source.tokenizer, paths.read_text(self.calibrate))
        else:
            ids = read_ids(self.calibrate_ids)
        ids = check_ids(ids, source.config.vocab_size)
        name = (self.calibrate or self.calibrate_ids).name
        bos = source.config.bos_token_id
        return draw_windows(ids, name, bos=bos, seed=self.seed)


def read_ids(path: Path) -> list[int]:
    """The token ids in a NumPy file of integers or a JSON list."""
    import numpy as np

    try:
        if path.suffix == ".npy":
            ids = np.load(path, allow_pickle=False)
        else:
            ids = np.array(loads(paths.read_text(path)))
        if ids.dtype.kind not in "iu":
            raise ValueError(f"values of {ids.dtype}")
    except (OSError, ValueError) as problem:
        needed = "token ids in a .npy file or a JSON list"
        reason = str(problem)
        if isinstance(problem, JSONDecodeError):
            reason = f"a text that is no JSON ({problem})"
        raise InputError(str(path), reason, needed, "check the file") from None
    return ids.reshape(-1).tolist()


@Parameter("*")
@dataclass(frozen=True)
class TranscriptOptions:
    """The comparison with Hugging Face's own text.

    Args:
        transcript: Also compare with 48 new tokens of Hugging Face's greedy text after
            each of 16 prompts; needs a checkpoint, or a golden that has the texts.
        prompts: Prompts of your own (JSON lines); needs a checkpoint.
        min_agreed: The least share of that text's tokens that the bundle must pick too;
            a tie counts as the same token.
        min_stops: The least share of that text's ends at which the bundle must end too.
    """

    transcript: bool = False
    prompts: ExistingFile | None = None
    min_agreed: Share = MIN_AGREED
    min_stops: Share = MIN_STOPS


def reject_unused(needed: str, *groups, to_add: str | None = None, **options) -> None:
    """Refuses options that have no effect, because another value decides that they are
    not read.

    Args:
        needed: what would give them an effect, as the message says it.
        groups: groups of options such as `Prompt`; a field that differs from its
            default counts as given. One that is given with the default's value cannot
            be recognised.
        to_add: the option that would give them an effect, where the user may add it.
        options: by name, whether (or with which value) the option is given; None and
            False: it is not.

    Raises:
        InputError: names the first such option.
    """
    for group in groups:
        for field in fields(group):
            options[field.name] = getattr(group, field.name) != field.default
    for name, value in options.items():
        if value is not None and value is not False:
            option = f"--{name.replace('_', '-')}"
            step = f"leave {option} out"
            if to_add:
                step = f"add {to_add}, or {step}"
            actual = "an option that has no effect here"
            raise InputError(option, actual, needed, step)


def load_checkpoint(path: Path | None, command: str | None = None):
    """The `Checkpoint` at a path; None without a path. A wrong path is refused before
    torch is imported.

    Args:
        command: shows the reading as a stage of this command, once the path is right.
    """
    if path is None:
        return None
    paths.locate_checkpoint(path)
    if command:
        stage(f"{command}: reading the checkpoint")
    return workbench.Checkpoint(path)


def load_exported_checkpoint(path: Path | None, bundle, command: str):
    """The `Checkpoint` at a path, from which a `Bundle` was exported; None without a path.
    The two are compared here, before anything is computed with them. Shows the first
    stage of the command, once the path is right.

    Raises:
        InputError: a wrong path, or another checkpoint than the bundle's.
    """
    if path is None:
        stage(f"{command}: opening the bundle")
        return None
    # before the imports that take seconds
    folder = paths.locate_checkpoint(path)
    name = paths.model_name(folder)
    checkpoint_checks.check_exported_family(folder, name, bundle)
    source = load_checkpoint(path, command)
    from workbench.check.golden import check_exported_from

    check_exported_from(source, bundle)
    return source
