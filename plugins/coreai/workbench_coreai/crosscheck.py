"""Compares three implementations of one checkpoint: Hugging Face's model, its Core ML
bundle on the portable runtime, and the Core AI twin of that bundle on Apple's
interpreter.

fp32 programs show re-authoring errors alone, fp16 programs add those of the arithmetic.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from workbench.bundle import Bundle
from workbench.check import gates
from workbench.check.compare import compared
from workbench.check.gates import Gate
from workbench.check.golden import check_exported_from, make_golden, stored_weights
from workbench.check.validate import measure, measure_budget
from workbench.decode import Decoder
from workbench.exporter import bundle_for, make_options
from workbench.models.checkpoint import Checkpoint

# portable precision → target of the twin, largest 1 − cosine of an isolated update,
# without near ties of a router
ARITHMETICS = {"exact": ("coreai-fp32", 1e-11), "declared": ("coreai", 1e-4)}


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
    bundle_options = bundle.manifest.options
    chosen = bundle_options.model_dump()
    if bundle_options.tiling.functions:
        chosen["tokens"] = f"1-{bundle_options.t_max}"
    errors, runtimes, checks = [], [], []
    for precision, (target, limit) in ARITHMETICS.items():
        twin = make_options(**chosen | {"target": target})
        twin = bundle_for(checkpoint, twin, folder or bundle.root.parent)
        portable = Decoder(bundle, "portable", precision)
        for name, decoder in (("portable", portable), ("Apple", Decoder(twin))):
            cost = measure(decoder, golden, None, budget)
            table = compared(cost.rows)
            errors.append(table.assign(name=name, precision=precision))
            is_update, logits = table["tensor"] == "update", cost.summary()
            worst = float((1 - table["cosine"].fillna(-1))[is_update].max())
            worst_kv = float(table["error"][~is_update].max())
            row = {"name": name, "precision": precision, "worst_update": worst}
            runtimes.append(row | {"worst_kv": worst_kv} | logits)
            reason = "1 − cosine, worst isolated update"
            title = f"{name} {precision}: update"
            checks.append(gates.at_most(title, worst, limit, reason))
            if precision == "exact":
                title, reason = f"{name}: kv", "relative RMS of K or V, worst"
                checks.append(gates.at_most(title, worst_kv, gates.REAUTHORING, reason))
                title, share = f"{name}: greedy", logits["top1_agreement"]
                reason = "positions of equal top token"
                checks.append(gates.at_least(title, share, 1.0, reason))
    whole = pd.concat(errors, ignore_index=True)
    return Crosscheck(whole, pd.DataFrame(runtimes), checks)
