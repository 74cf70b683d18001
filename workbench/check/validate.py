"""Validates a bundle: whether it is faulty (`bug_gates`, `device`), and what it costs
(`fidelity`). The limits of the bug gates follow from arithmetic and do not depend on the
compression; their results are stored in the bundle's verdict.json."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import pandas as pd

from workbench.check import gates
from workbench.check.bug_gates import load_or_run_gates
from workbench.check.compare import judged_rows
from workbench.check.device import run_device_gate
from workbench.check.fidelity import Cost, measure, measure_budget, measure_rounding
from workbench.check.gates import Gate
from workbench.check.golden import Golden, StoredWeights, check_fits, stored_weights
from workbench.check.shared import (
    BudgetKey,
    RoundingKey,
    SharedResults,
    StoredKey,
    find_or_compute,
    golden_digest,
)
from workbench.check.trace import Trace
from workbench.decode import Decoder
from workbench.progress import stage


@dataclass
class Validation:
    """All gates of a bundle, and its cost."""

    gates: list[Gate]
    cost: Cost

    @property
    def rows(self) -> pd.DataFrame:
        """Rows of the `fidelity` table."""
        return self.cost.rows

    @property
    def verdict(self) -> str:
        """The verdict on the export."""
        return gates.verdict(self.gates)

    @property
    def quality(self) -> str:
        """The verdict on the cost."""
        return gates.quality(self.gates)

    @property
    def worst(self) -> dict:
        """The isolated update or cache row with the largest `over_rounding`. The worst
        cosine would select a small update beside a huge residual, which rounding alone
        changes much."""
        rows = judged_rows(self.rows.assign(over_rounding=self.cost.over_rounding))
        # a value that is not finite counts as the largest
        row = rows.loc[rows["over_rounding"].fillna(np.inf).idxmax()]
        names = ["layer", "position", "T", "tensor", "mode"]
        names += ["cosine", "psnr_db", "max_abs", "error", "over_rounding"]
        return row[names].to_dict()

    def json(self) -> dict:
        """The JSON of `workbench validate`."""
        rows = judged_rows(self.rows)
        cosines = rows["cosine"].fillna(-1.0)
        updates = cosines[rows["tensor"] == "update"]
        if updates.empty:  # the bundle outputs caches alone
            updates = cosines
        return {
            "verdict": self.verdict,
            "quality": self.quality,
            "gates": [g.json() for g in self.gates],
            "worst": self.worst,
            "min_cosine": float(updates.min()),
            "mean_cosine": float(updates.mean()),
            "rows": len(self.rows),
            "logits": self.cost.summary(),
            "cost": self.cost.json(),
        }


def validate(
    decoder: Decoder,
    golden: Golden,
    Ts: Sequence[int] | None = None,
    *,
    max_kl: float = gates.MAX_KL,
    run_on_decoder: bool = False,
    single_copy: bool = False,
    ignore_stored: bool = False,
    shared: SharedResults | None = None,
) -> Validation:
    """Validates a bundle: bug gates, every layer × position × T against `golden`, and
    the cost.

    With the golden's `source` the bug gates that the bundle's verdict.json lacks are
    run and stored there, and the budget is measured.

    Args:
        Ts: tokens per call of the compared passes, each up to t_max (default:
            `default_ts`).
        max_kl: the user's limit on the mean KL of the chained logits, in nats.
        run_on_decoder: run the bug gates even where a stored verdict counts, on this
            decoder where its runtime can run them. Otherwise they run on a decoder that
            is opened for them, since this one may have been changed in memory.
        single_copy: do not load a second copy of the bundle as portable. Gate `device`
            is then not_run if `device_reference` has no file.
        ignore_stored: let no stored verdict count, whoever wrote it.
        shared: gives each of several validations the results that they share; None:
            all are computed.
    """
    bundle = decoder.bundle
    source = golden.source
    check_fits(golden, bundle)  # before the gates, which take minutes
    # Read at the first call: gate `program` and the budget need the same values.
    read_weights = cache(
        partial(stored_weights, source, bundle, keep_dtype=True, head=False)
    )
    bugs = load_or_run_gates(
        decoder,
        source,
        run_on_decoder=run_on_decoder,
        ignore_stored=ignore_stored,
        trusted_hash=golden.verdict_sha256,
        read_weights=read_weights,
        shared=shared,
    )
    budget_trace = rounding_kl = None
    if source is not None:
        stage("validate: rounding of Hugging Face's model")
        budget_trace, rounding_kl = _measure_reference(
            decoder, golden, read_weights, shared or SharedResults()
        )
    read_weights.cache_clear()
    stage("validate: every layer and position")
    cost = measure(decoder, golden, Ts, budget_trace, rounding_kl)
    device = run_device_gate(decoder, golden, single_copy)
    return Validation([*bugs, device, *cost.judge(max_kl)], cost)


def _measure_reference(
    decoder: Decoder,
    golden: Golden,
    read_weights: Callable[[], StoredWeights],
    shared: SharedResults,
) -> tuple[Trace, np.ndarray]:
    """The results of `measure_budget` and `measure_rounding` for a golden with a
    checkpoint, those of `shared` where it has them."""
    bundle, source = decoder.bundle, golden.source
    inner, digest = decoder.shows_inner_layers, golden_digest(golden)
    budget_trace = find_or_compute(
        shared.budgets,
        BudgetKey(StoredKey.of(bundle, source), digest, inner),
        lambda: measure_budget(bundle, source, golden, inner, read_weights()),
    )
    scale = bundle.manifest.stream_scale
    rounding_kl = find_or_compute(
        shared.rounding_kls,
        RoundingKey(source.sha256, digest, scale),
        lambda: measure_rounding(source, golden, scale),
    )
    return budget_trace, rounding_kl
