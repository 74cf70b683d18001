"""What a bundle and its decoder are as columns of the table `runs`, and the two hashes
by which runs are found again."""

import hashlib
import json
from collections.abc import Mapping, Sequence

from workbench.bundle import Bundle, Options
from workbench.bundle.manifest import COREML
from workbench.decode import Decoder
from workbench.runtime import is_device

COUNTS = ("threads", "T", "depth", "n_gen", "min_tokens", "min_seconds")
"""Columns that say how much a run measured."""
HASH_BASE = Options().model_dump(mode="json") | {"compress": "fp16", "target": COREML}
"""The options that the hashes of a log leave out. They are the defaults of an export
but for the preset: `fp16` was the default when the first runs were logged, and another
base would give their settings other hashes."""
RUNTIMES = "coreml", "portable", "stand-in"
"""What auto may mean, the preferred first."""


def digest(*parts) -> str:
    """16 hexadecimal digits of the hash of JSON values."""
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def prompt(ids: Sequence[int]) -> str | None:
    """The column `prompt` of a validation on these token ids; None of no ids."""
    return digest(*ids)[:6] if ids else None


def describe(subject: Bundle | Decoder) -> dict:
    """The columns of `runs` for a bundle and, if it ran, its decoder; placement stays
    null."""
    bundle = subject if isinstance(subject, Bundle) else subject.bundle
    manifest = bundle.manifest
    row = exported(manifest.options) | {
        "checkpoint": manifest.checkpoint["name"],
        "checkpoint_hash": manifest.checkpoint["sha256"],
        "bundle": bundle.root.name,
        "bundle_hash": bundle.identity,
        "bundle_bytes": bundle.bytes,
        "family": manifest.family,
    }
    if subject is not bundle:
        row |= executed(**vars(subject))
        options = chosen(manifest.options)
        row["values"] = values(row["checkpoint_hash"], options, row)
    return row


def exported(options: Options) -> dict:
    """The columns of `runs` for export options; null is a default that is not
    written."""
    return dict.fromkeys(Options.model_fields) | options.model_dump()


def chosen(options: Options) -> dict:
    """The options that differ from `HASH_BASE`. Hashes are made of these, so that an
    option that comes or goes leaves those of all other bundles as they are."""
    settings = options.model_dump(mode="json")
    return {name: value for name, value in settings.items() if value != HASH_BASE[name]}


def executed(
    runtime: str,
    precision: str,
    fast: bool,
    reads: str,
    compute_units: str,
    hints: Mapping,
    **_,
) -> dict:
    """The columns of `runs` for a decoder's arguments, null where the runtime has no
    such thing. `reads` says which rows of a cache attention reads, `used` or `all`."""
    columns = dict.fromkeys(("precision", "fast", "reads", "compute_units", "hints"))
    columns["runtime"] = runtime
    if runtime == "portable":
        fuses = bool(fast and precision == "declared")
        reads = reads if fuses else "all"
        columns |= {"precision": precision, "fast": fuses, "reads": reads}
    elif is_device(runtime):
        hints = json.dumps(hints, sort_keys=True)
        columns |= {"compute_units": compute_units, "hints": hints, "reads": "all"}
    return columns


def values(checkpoint_hash: str, options: Mapping, how: Mapping) -> str:
    """The hash of everything that decides what an export's checkpoint, options and
    runtime compute, on any machine; finished bundles are told apart by `bundle_hash`.

    Args:
        checkpoint_hash: the checkpoint's hash.
        options: those of the export that are not the default ones.
        how: at least the columns runtime, precision, compute_units and hints.
    """
    names = ("runtime", "precision", "compute_units", "hints")
    return digest(checkpoint_hash, options, [how[name] for name in names])


def setting(contents: str, options: Mapping, how: Mapping, counts: Mapping) -> str:
    """The hash of everything that decides the times of a run on one machine.

    Args:
        contents: hash of the checkpoint; of a finished bundle its identity.
        how: as in `values`, and the columns fast and reads.
        counts: `COUNTS`, null for those that are left open.
    """
    counts = {name: count for name, count in counts.items() if count is not None}
    fused = "all rows" if how["fast"] and how["reads"] == "all" else how["fast"]
    return digest(values(contents, options, how), fused, counts)
