"""The columns of the table `runs` for a bundle and its decoder, and the two hashes by
which runs are found again."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Protocol

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
TOKENS_KEY = "prompt_tokens"
"""The key of the texts of a prompt's tokens in the column `config`, one by position."""


def digest(*parts) -> str:
    """16 hexadecimal digits of the SHA-256 of JSON values."""
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def prompt_hash(ids: Sequence[int]) -> str | None:
    """The column `prompt` for a validation on these token ids; None for no ids."""
    return digest(*ids)[:6] if ids else None


def run_columns(decoder: Decoder) -> dict:
    """The columns of `runs` for a decoder: those of its bundle, and its settings.

    `Cell.columns` adds the column `setting`, for which the counts of a run are needed."""
    row = bundle_columns(decoder.bundle) | execution_columns(decoder)
    options = non_default_options(decoder.bundle.manifest.options)
    row["values"] = values_hash(row["checkpoint_hash"], options, row)
    return row


def bundle_columns(bundle: Bundle) -> dict:
    """The columns of `runs` for a bundle."""
    manifest = bundle.manifest
    return export_columns(manifest.options) | {
        "checkpoint": manifest.checkpoint["name"],
        "checkpoint_hash": manifest.checkpoint["sha256"],
        "bundle": bundle.root.name,
        "bundle_hash": bundle.identity,
        "bundle_bytes": bundle.bytes,
        "family": manifest.family,
    }


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


class Execution(Protocol):
    """The settings of a decoder, which `Decoder` and `grid.RunSettings` have."""

    runtime: str
    precision: str
    fast: bool
    reads: str
    """The rows of a cache that attention reads, `used` or `all`."""
    compute_units: str
    hints: Mapping


def execution_columns(execution: Execution) -> dict:
    """The columns of `runs` for the settings of a decoder. A column is null where the
    runtime has no such setting."""
    columns = dict.fromkeys(("precision", "fast", "reads", "compute_units", "hints"))
    columns["runtime"] = execution.runtime
    if execution.runtime == "portable":
        fuses = bool(execution.fast and execution.precision == "declared")
        columns |= {
            "precision": execution.precision,
            "fast": fuses,
            # only fused steps leave out the rows that hold no token yet
            "reads": execution.reads if fuses else "all",
        }
    elif is_device(execution.runtime):
        columns |= {
            "compute_units": execution.compute_units,
            "hints": json.dumps(execution.hints, sort_keys=True),
            "reads": "all",
        }
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
    contents_hash: str, options: Mapping, execution: Mapping, counts: Mapping
) -> str:
    """The hash of everything that decides the times of a run on one machine.

    Args:
        contents_hash: the checkpoint's hash, or the identity of a finished bundle.
        options: of the export (see `non_default_options`).
        execution: the columns of `execution_columns`.
        counts: a value for each of `COUNTS`; a null one is left out.
    """
    counts = {name: count for name, count in counts.items() if count is not None}
    fast_and_reads = hashed_fast_and_reads(execution["fast"], execution["reads"])
    # `values_hash` takes the identity of a bundle here in place of a checkpoint's hash
    values = values_hash(contents_hash, options, execution)
    return digest(values, fast_and_reads, counts)


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
