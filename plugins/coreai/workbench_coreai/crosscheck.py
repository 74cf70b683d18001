"""Compares three implementations of one checkpoint: Hugging Face's model, its Core ML
bundle on the portable runtime, and the *twin* of that bundle, a Core AI bundle with the
same options, on Apple's interpreter.

fp32 programs show re-authoring errors alone, fp16 programs add those of the arithmetic.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from workbench.bundle import Bundle
from workbench.check import gates
from workbench.check.compare import judged_rows
from workbench.check.fidelity import measure, measure_budget
from workbench.check.gates import Gate
from workbench.check.golden import (
    Golden,
    check_exported_from,
    make_golden,
    stored_weights,
)
from workbench.check.trace import Trace
from workbench.decode import Decoder
from workbench.exporter import bundle_for, make_options
from workbench.models.checkpoint import Checkpoint


@dataclass(frozen=True)
class Arithmetic:
    """One arithmetic of both runtimes.

    Attributes:
        portable_precision: in which the portable runtime runs the Core ML bundle.
        target: of the twin.
        max_update_distance: the limit on 1 − cosine of isolated updates without near
            ties of a router.
    """

    portable_precision: str
    target: str
    max_update_distance: float


ARITHMETICS = (
    Arithmetic("exact", "coreai-fp32", max_update_distance=1e-11),
    Arithmetic("declared", "coreai", max_update_distance=1e-4),
)


@dataclass(frozen=True)
class RuntimeErrors:
    """The differences of one runtime, `portable` or `Apple`, from Hugging Face's model in
    one arithmetic.

    Attributes:
        rows: its part of `Crosscheck.errors`.
        worst_update: the largest 1 − cosine of an isolated update.
        worst_kv: the largest relative RMS error of a row of K or V.
        logits: see `workbench.check.validate.Cost.summary`.
    """

    name: str
    arithmetic: Arithmetic
    rows: pd.DataFrame
    worst_update: float
    worst_kv: float
    logits: dict[str, float]

    def summary(self) -> dict:
        """A row of `Crosscheck.runtimes`."""
        return {
            "name": self.name,
            "precision": self.arithmetic.portable_precision,
            "worst_update": self.worst_update,
            "worst_kv": self.worst_kv,
        } | self.logits

    def judge(self) -> Iterator[Gate]:
        """The gates: of updates in both arithmetics; of the cache and the greedy tokens in
        exact arithmetic alone, where only the order of sums differs."""
        precision = self.arithmetic.portable_precision
        yield gates.at_most(
            f"{self.name} {precision}: update",
            self.worst_update,
            self.arithmetic.max_update_distance,
            "1 − cosine, worst isolated update",
        )
        if precision == "exact":
            yield gates.at_most(
                f"{self.name}: kv",
                self.worst_kv,
                gates.REAUTHORING,
                "relative RMS of K or V, worst",
            )
            yield gates.at_least(
                f"{self.name}: greedy",
                self.logits["top1_agreement"],
                1.0,
                "positions of equal top token",
            )


class Crosscheck(NamedTuple):
    """`errors`: one row per runtime (`name`), precision, layer, position, T and tensor
    (update, k, v) with the relative RMS `error` and the `budget`, the error of rounding
    alone. `runtimes`: one row per runtime and precision."""

    errors: pd.DataFrame
    runtimes: pd.DataFrame
    gates: list[Gate]


def crosscheck(
    bundle: Bundle,
    checkpoint: Checkpoint,
    ids: Sequence[int],
    *,
    folder: Path | None = None,
) -> Crosscheck:
    """Compares every layer × position × T of the bundle and its twins in two
    arithmetics with Hugging Face's model on the bundle's weights. A twin is exported
    beside the bundle, or into `folder`, unless it is there.

    Raises:
        InputError: another checkpoint, or an option that Core AI lacks.
    """
    check_exported_from(checkpoint, bundle)
    weights = stored_weights(checkpoint, bundle)
    golden = make_golden(checkpoint, ids, weights, bundle.identity)
    budget = measure_budget(bundle, checkpoint, golden)
    measured = []
    for arithmetic in ARITHMETICS:
        # first, because it refuses options that Core AI lacks
        twin = export_twin(
            bundle, checkpoint, arithmetic.target, folder or bundle.root.parent
        )
        portable = Decoder(bundle, "portable", arithmetic.portable_precision)
        for name, decoder in (("portable", portable), ("Apple", Decoder(twin))):
            measured.append(measure_runtime(name, arithmetic, decoder, golden, budget))
    return Crosscheck(
        errors=pd.concat([runtime.rows for runtime in measured], ignore_index=True),
        runtimes=pd.DataFrame([runtime.summary() for runtime in measured]),
        gates=[gate for runtime in measured for gate in runtime.judge()],
    )


def export_twin(
    bundle: Bundle, checkpoint: Checkpoint, target: str, folder: Path
) -> Bundle:
    """The bundle of the same options for a Core AI target, exported unless `folder` has
    it. Core AI programs run every T, so that a list of sizes becomes the range up to the
    largest."""
    options = bundle.manifest.options
    chosen = options.model_dump() | {"target": target}
    if options.tiling.functions:
        chosen["tokens"] = f"1-{options.t_max}"
    return bundle_for(checkpoint, make_options(**chosen), folder)


def measure_runtime(
    name: str, arithmetic: Arithmetic, decoder: Decoder, golden: Golden, budget: Trace
) -> RuntimeErrors:
    """Runs the golden's tokens through a decoder and compares, also with the budget of
    `measure_budget`."""
    cost = measure(decoder, golden, None, budget)
    rows = judged_rows(cost.rows)
    is_update = rows["tensor"] == "update"
    # nan counts as the largest distance
    distances = 1 - rows["cosine"].fillna(-1)
    precision = arithmetic.portable_precision
    return RuntimeErrors(
        name=name,
        arithmetic=arithmetic,
        rows=rows.assign(name=name, precision=precision),
        worst_update=float(distances[is_update].max()),
        worst_kv=float(rows["error"][~is_update].max()),
        logits=cost.summary(),
    )
