"""The columns of the table `runs` for a bundle and its decoder, and the two hashes by
which runs are found again."""

import hashlib
import json
from collections.abc import Mapping, Sequence

from workbench.bundle import Bundle, Options
from workbench.bundle.manifest import COREML
from workbench.decode import Decoder
from workbench.runtime import is_device

COUNTS = ("threads", "T", "depth", "n_gen", "min_tokens", "min_seconds")
"""Columns for the amount of a measurement."""
HASHED_DEFAULTS = Options().model_dump(mode="json") | {
    "compress": "fp16",
    "target": COREML,
}
"""The option values that the hashes leave out: the defaults of an export when the first
runs were logged. `compress` has another default since; it stays `fp16` here, since another
base would change the hashes of logged settings."""
RUNTIMES = "coreml", "portable", "stand-in"
"""The runtimes that `auto` may stand for, the preferred one first."""


COST_KEY = "price"
"""The key of a validation's cost in the column `config`; "price" is an older word for it,
which stored rows have."""


def digest(*parts) -> str:
    """16 hexadecimal digits of the SHA-256 of JSON values."""
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def prompt_hash(ids: Sequence[int]) -> str | None:
    """The column `prompt` for a validation on these token ids; None for no ids."""
    return digest(*ids)[:6] if ids else None


def run_columns(subject: Bundle | Decoder) -> dict:
    """The columns of `runs` for a bundle and, given a decoder, for the way it runs.

    The placement stays null. `setting`, which needs the counts of a run too, is a column
    of `Cell.columns`."""
    bundle = subject if isinstance(subject, Bundle) else subject.bundle
    manifest = bundle.manifest
    row = export_columns(manifest.options) | {
        "checkpoint": manifest.checkpoint["name"],
        "checkpoint_hash": manifest.checkpoint["sha256"],
        "bundle": bundle.root.name,
        "bundle_hash": bundle.identity,
        "bundle_bytes": bundle.bytes,
        "family": manifest.family,
    }
    if subject is not bundle:
        decoder = subject
        row |= decoder_columns(
            runtime=decoder.runtime,
            precision=decoder.precision,
            fast=decoder.fast,
            reads=decoder.reads,
            compute_units=decoder.compute_units,
            hints=decoder.hints,
        )
        options = non_default_options(manifest.options)
        row["values"] = values_hash(row["checkpoint_hash"], options, row)
    return row


def export_columns(options: Options) -> dict:
    """The columns of `runs` for export options. An option that the manifest does not
    store, since it has its default, is null."""
    return dict.fromkeys(Options.model_fields) | options.model_dump()


def non_default_options(options: Options) -> dict:
    """The options that differ from `HASHED_DEFAULTS`. Hashes contain these alone, so that
    new options leave other hashes unchanged."""
    settings = options.model_dump(mode="json")
    return {
        name: value
        for name, value in settings.items()
        if value != HASHED_DEFAULTS[name]
    }


def decoder_columns(
    runtime: str,
    precision: str,
    fast: bool,
    reads: str,
    compute_units: str,
    hints: Mapping,
    **_,
) -> dict:
    """The columns of `runs` for a decoder's arguments.

    A column is null where the runtime has no such setting. `reads` names the rows of a
    cache that attention reads, `used` or `all`."""
    columns = dict.fromkeys(("precision", "fast", "reads", "compute_units", "hints"))
    columns["runtime"] = runtime
    if runtime == "portable":
        fuses = bool(fast and precision == "declared")
        # only fused steps leave out the rows that hold no token yet
        reads = reads if fuses else "all"
        columns |= {"precision": precision, "fast": fuses, "reads": reads}
    elif is_device(runtime):
        hints = json.dumps(hints, sort_keys=True)
        columns |= {"compute_units": compute_units, "hints": hints, "reads": "all"}
    return columns


def values_hash(checkpoint_hash: str, options: Mapping, execution: Mapping) -> str:
    """The hash of everything that decides what a run computes, on any machine. Finished
    bundles are told apart by `bundle_hash`.

    Args:
        options: of the export (see `non_default_options`).
        execution: at least the columns runtime, precision, compute_units and hints.
    """
    names = ("runtime", "precision", "compute_units", "hints")
    return digest(checkpoint_hash, options, [execution[name] for name in names])


def setting_hash(
    contents: str, options: Mapping, execution: Mapping, counts: Mapping
) -> str:
    """The hash of everything that decides the times of a run on one machine.

    Args:
        contents: the checkpoint's hash, or the identity of a finished bundle.
        options: of the export (see `non_default_options`).
        execution: as in `values_hash`, and the columns fast and reads.
        counts: a value for each of `COUNTS`; a null one is left out.
    """
    counts = {name: count for name, count in counts.items() if count is not None}
    fast_and_reads = hashed_fast_and_reads(execution["fast"], execution["reads"])
    return digest(values_hash(contents, options, execution), fast_and_reads, counts)


def hashed_fast_and_reads(fast: bool | None, reads: str | None) -> bool | str | None:
    """What stands in the hash of a setting for the columns `fast` and `reads`. It must
    never change, since logged runs are found by their hashes:

        fast           reads   in the hash
        True           used    True
        True           all     "all rows"
        False or null  any     fast

    Runs that were logged before the column `reads` existed have `fast` alone in their
    hashes. They read the used rows, so that a run that does so still has the value of
    `fast`, and only one that reads all rows has a value of its own."""
    return "all rows" if fast and reads == "all" else fast
