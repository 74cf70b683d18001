"""Results that validations in one process share: those of gate `weights` and of Hugging
Face's model on the weights that a bundle stores. They depend on the files, the checkpoint
and the golden, and neither on a decoder nor on the rotary frequencies of the host.

A result is found again only under the same facts: the SHA-256 of every file and every
other field of the manifest, such as a ring or a window. None of it is written to a
file."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from workbench.bundle import Bundle
from workbench.check.gates import Gate
from workbench.check.golden import Golden
from workbench.check.stretches import Stretches
from workbench.check.trace import Trace
from workbench.models.checkpoint import Checkpoint

Key = TypeVar("Key")
Result = TypeVar("Result")


@dataclass(frozen=True)
class StoredKey:
    """The facts on which the comparison of stored weights with a checkpoint depends.

    Attributes:
        checkpoint: SHA-256.
        manifest: SHA-256 of the fields, among which are the files' hashes.
    """

    checkpoint: str
    manifest: str

    @classmethod
    def of(cls, bundle: Bundle, checkpoint: Checkpoint) -> "StoredKey":
        manifest = bundle.manifest
        # Neither gate `weights` nor Hugging Face's model reads the host's frequencies.
        # Packages of others are described by more than these two facts.
        own_packages = not (manifest.foreign or manifest.options.plugin)
        unread = {"rope"} if own_packages else set()
        fields = manifest.model_dump(mode="json", exclude=unread)
        text = json.dumps(fields, sort_keys=True)
        return cls(checkpoint.sha256, hashlib.sha256(text.encode()).hexdigest())


@dataclass(frozen=True)
class BudgetKey:
    """The facts on which the budget depends.

    Attributes:
        golden: SHA-256 of its ids and arrays.
        inner: see `measure_budget`.
    """

    stored: StoredKey
    golden: str
    inner: bool


@dataclass(frozen=True)
class RoundingKey:
    """The facts on which the KL of fp16 rounding alone depends.

    Attributes:
        checkpoint: SHA-256.
        golden: see `BudgetKey`.
        stream_scale: a bundle stores the stream divided by this number.
    """

    checkpoint: str
    golden: str
    stream_scale: float


@dataclass(frozen=True)
class StretchesKey:
    """The facts on which the stretches of gate `program` depend; `chained_end`: see
    `reference_stretches`."""

    stored: StoredKey
    chained_end: bool


@dataclass
class SharedResults:
    """The results of the validations that are given this object, by their facts."""

    weights_gates: dict[StoredKey, Gate] = field(default_factory=dict)
    stretches: dict[StretchesKey, Stretches] = field(default_factory=dict)
    budgets: dict[BudgetKey, Trace] = field(default_factory=dict)
    rounding_kls: dict[RoundingKey, np.ndarray] = field(default_factory=dict)


def find_or_compute(
    results: dict[Key, Result], key: Key, compute: Callable[[], Result]
) -> Result:
    """The result under `key`, computed where there is none."""
    if key not in results:
        results[key] = compute()
    return results[key]


def golden_digest(golden: Golden) -> str:
    """The SHA-256 of a golden's ids and arrays, by name, dtype, shape and value."""
    digest = hashlib.sha256()
    arrays = {"ids": golden.ids} | golden.trace.arrays()
    for name, array in sorted(arrays.items()):
        digest.update(repr((name, array.dtype.str, array.shape)).encode())
        digest.update(np.ascontiguousarray(array))
    return digest.hexdigest()
