"""BUNDLE/validation.parquet: what a validation of the bundle measured, from which
`workbench report` draws its page.

The rows of the file are those of the log's table `fidelity`; everything else is JSON in
the file's metadata. One file that is renamed into place is the earlier or the new one
whole, whenever a validation is killed. The file is bound to the bundle's identity and to
the gates' source. As for verdict.json, only a file whose hash this checkout noted is a
measurement; any other one is a claim of whoever made the bundle."""

import hashlib
import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd

from workbench import escape
from workbench.bundle import Bundle
from workbench.check.gates import (
    EXPORT_WORDS,
    QUALITY_WORDS,
    Gate,
    gates_version,
    jsonable,
)
from workbench.errors import InputError
from workbench.files import note_verified, read_bytes, was_verified, write_whole

RECORD = "validation.parquet"
NOTES = "validations"  # the folder of this checkout's notes on these files
FORMAT = 1  # of the JSON: raised when a field changes its meaning
KEY = b"workbench-validation"  # of the JSON in the file's metadata
# Bounds of what is read from a bundle of unknown origin. 2,048 tokens of a model of 64
# layers have 2.6 million rows in four kinds of calls.
MAX_FILE_BYTES = 1 << 28
MAX_ROWS = 1 << 23
# the columns of `rows` that a page needs, and what each holds
COLUMNS = {
    "layer": "integer",
    "position": "integer",
    "T": "integer",
    "tensor": "text",
    "mode": "text",
    "cosine": "number",
    "error": "number",
    "budget": "number",
    "ratio": "number",
    "over_rounding": "number",
    "max_abs": "number",
    "finite": "flag",
    "routing_tie": "flag",
    "digest": "integer",
}


@dataclass(frozen=True)
class Kl:
    """Nats over positions."""

    mean: float
    median: float
    p99: float
    max: float


@dataclass(frozen=True)
class ReferenceFigures:
    """Hugging Face's model with its stream rounded to fp16, beside the same model without
    rounding."""

    kl: Kl


@dataclass(frozen=True)
class CostFigures:
    """`Cost.json`, as far as a page needs it.

    Attributes:
        budget: with the weights that the bundle stores.
        rounding: with the checkpoint's own weights.
    """

    kl: Kl
    same_top: float
    budget: ReferenceFigures | None = None
    rounding: ReferenceFigures | None = None


@dataclass(frozen=True)
class PromptFigures:
    """One prompt of `Transcript.json`."""

    prompt: str
    text: str
    agreed: float
    ties: int
    ended: bool
    bundle_ends: bool
    first_difference: int | None = None
    bundle_text: str | None = None
    cause: str | None = None


@dataclass(frozen=True)
class TranscriptFigures:
    """`Transcript.json`."""

    agreed: float
    interval: tuple[float, float]
    ties: int
    sigma: float
    error: float | None
    prompts: list[PromptFigures]


@dataclass(frozen=True)
class StopFigures:
    """How many of Hugging Face's texts end, and after how many of them the bundle's
    does; what the end tokens of the checkpoint contradict, in a sentence."""

    ends: int
    bundle_ends: int
    contradiction: str | None = None


@dataclass(frozen=True)
class RecommendationFigures:
    """The preset that keeps the limits where the bundle's does not.

    Attributes:
        kl: mean, in nats.
        interval: 95%, of `kl`.
        bundle_bytes: of the bundle that was validated.
        command: exports with that preset.
    """

    compress: str
    kl: float
    bytes: int
    interval: tuple[float, float] | None = None
    bundle_bytes: int | None = None
    command: str | None = None


@dataclass(frozen=True)
class TriedPresets:
    """What presets were judged on, and what each was found to cost."""

    text: str
    seconds: float
    presets: list[dict[str, str | float | None]]


@dataclass(frozen=True)
class Results:
    """The JSON of `workbench validate`, as far as a page needs it; the other keys are
    kept in the file."""

    verdict: str
    quality: str
    gates: list[Gate]
    cost: CostFigures | None = None
    min_cosine: float | None = None
    mean_cosine: float | None = None
    transcript: TranscriptFigures | None = None
    stop: StopFigures | None = None
    recommendation: RecommendationFigures | None = None
    tried: TriedPresets | None = None


@dataclass(frozen=True)
class Environment:
    """Of `workbench.log.environment`, what a page needs."""

    machine: str
    platform: str
    versions: dict[str, str | None]
    time: str
    commit: str | None = None


@dataclass(frozen=True)
class Setup:
    """How and where a bundle was validated.

    Attributes:
        command: the words behind `workbench validate BUNDLE` that repeat the
            validation, with names in the place of paths.
        inputs: name → SHA-256 of each file that the command reads.
        execution: runtime, and its arithmetic or its compute units; empty where no
            runtime opened the bundle.
        seconds: wall time of the validation.
        peak_rss_bytes: largest resident memory of the process.
    """

    command: list[str]
    inputs: dict[str, str]
    execution: dict[str, str]
    environment: Environment
    seconds: float
    peak_rss_bytes: int


@dataclass(frozen=True)
class Record:
    """One validation.

    Attributes:
        tokens: the label of the token at each position of `rows`.
        rows: see `workbench.check.fidelity.measure`, with `over_rounding`; empty where
            nothing was measured.
        is_noted: whether this checkout wrote the file.
    """

    bundle: Bundle
    results: Results
    setup: Setup
    tokens: list[str]
    rows: pd.DataFrame
    is_noted: bool


def save_record(
    bundle: Bundle,
    results: dict,
    setup: Setup,
    tokens: list[str],
    rows: pd.DataFrame | None = None,
) -> Path:
    """Writes what a validation measured into the bundle's folder, and notes in this
    checkout that it did. Returns the path.

    Args:
        results: the JSON of `workbench validate`.
        rows: see `Record`; None where nothing was measured.

    Raises:
        OSError: a folder that cannot be written. An earlier file stays.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    fields = {
        "format": FORMAT,
        "version": gates_version(),
        "bundle": bundle.identity,
        "results": results,
        "setup": asdict(setup),
        "tokens": tokens,
    }
    text = json.dumps(jsonable(fields), default=str, allow_nan=False)
    if rows is None:
        rows = pd.DataFrame(columns=[*COLUMNS])
    # not the frame's own metadata, which name the machine's version of pandas
    table = pa.Table.from_pandas(rows, preserve_index=False)
    contents = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({KEY: text.encode()}), contents)
    path = bundle.root / RECORD
    write_whole(path, contents.getvalue())
    digest = hashlib.sha256(contents.getvalue()).hexdigest()
    note_verified(NOTES, {"bundle": bundle.identity, "record": digest})
    return path


def load_record(bundle: Bundle) -> Record:
    """The validation that is kept in the folder of a bundle, whose files are compared
    with the manifest's hashes.

    Raises:
        InputError: there is none, it is of another bundle or of gates with another
            source, it is damaged, or a file of the bundle is. The next step is the
            command that measures again.
    """
    bundle.verify()
    path = bundle.root / RECORD
    subject = f"validation of bundle {bundle.root.name}"
    needed = "what workbench validate measured of these files with these gates"
    words = ["workbench", "validate", str(bundle.root), "--checkpoint", "CHECKPOINT"]
    step = f"run: {escape.shell(words)}"
    try:
        contents = read_bytes(path, MAX_FILE_BYTES)
    except FileNotFoundError:
        raise InputError(subject, "none in its folder", needed, step) from None
    try:
        fields, rows = _parse(contents)
        version, identity = fields["version"], fields["bundle"]
        if fields["format"] != FORMAT or version != gates_version():
            raise InputError(subject, "one by gates of another version", needed, step)
        if identity != bundle.identity:
            raise InputError(subject, "one of another bundle", needed, step)
        results, setup, tokens = _parse_fields(fields, rows, bundle)
    except InputError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError, OSError) as problem:
        actual = f"a damaged {RECORD} ({type(problem).__name__})"
        raise InputError(subject, actual, needed, step) from None
    digest = hashlib.sha256(contents).hexdigest()
    facts = {"bundle": bundle.identity, "record": digest}
    return Record(bundle, results, setup, tokens, rows, was_verified(NOTES, facts))


def _parse(contents: bytes) -> tuple[dict, pd.DataFrame]:
    """The JSON and the rows of a file.

    Raises:
        ValueError: no Parquet file (pyarrow's errors are of this class), or one of too
            many rows.
        KeyError: no JSON, or a column is missing.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = [name for name, kind in COLUMNS.items() if kind == "text"]
    # a repeated text of a dictionary is not copied for each row
    file = pq.ParquetFile(pa.BufferReader(contents), read_dictionary=texts)
    fields = json.loads(file.schema_arrow.metadata[KEY])
    if file.metadata.num_rows > MAX_ROWS:
        raise ValueError(f"{file.metadata.num_rows} rows")
    if not file.metadata.num_rows:
        return fields, pd.DataFrame()
    fits = {
        "text": lambda t: pa.types.is_dictionary(t) or pa.types.is_string(t),
        "integer": pa.types.is_integer,
        "number": lambda t: pa.types.is_floating(t) or pa.types.is_null(t),
        "flag": pa.types.is_boolean,
    }
    for name, kind in COLUMNS.items():
        stored_type = file.schema_arrow.field(name).type
        if not fits[kind](stored_type):
            raise ValueError(f"column {name} of {stored_type}")
    rows = file.read([*COLUMNS]).to_pandas()
    return fields, rows.astype(dict.fromkeys(texts, object))


def _parse_fields(
    fields: dict, rows: pd.DataFrame, bundle: Bundle
) -> tuple[Results, Setup, list[str]]:
    """Results, setup and tokens in the JSON of a file, checked against the bundle.

    Raises:
        ValueError: a value of another type (pydantic's errors are of this class), a
            word that no verdict is, or a row of a layer, position or T that the bundle
            lacks.
        KeyError: a value is missing.
    """
    from pydantic import TypeAdapter

    # "nan" is nan again
    results = TypeAdapter(Results).validate_python(fields["results"])
    setup = TypeAdapter(Setup).validate_python(fields["setup"])
    tokens = TypeAdapter(list[str]).validate_python(fields["tokens"])
    words = {gate.verdict for gate in results.gates}
    if not words <= EXPORT_WORDS | QUALITY_WORDS:
        raise ValueError("a verdict of another word")
    if results.verdict not in EXPORT_WORDS or results.quality not in QUALITY_WORDS:
        raise ValueError("a verdict of another word")
    options = bundle.manifest.options
    ranges = {
        "layer": (-1, bundle.manifest.dims.L - 1),
        "position": (0, min(len(tokens), options.max_seq_len) - 1),
        "T": (1, options.t_max),
    }
    for name, (least, most) in ranges.items():
        if len(rows) and not rows[name].between(least, most).all():
            raise ValueError(f"a {name} that the bundle lacks")
    return results, setup, tokens
