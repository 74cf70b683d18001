"""The verdict on adopted packages, and the cause of a fault by name."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from workbench.adopt import gates as adopted_gates
from workbench.adopt import passes
from workbench.adopt.adapter import EMBEDDING, Adapter
from workbench.adopt.folder import Adopted
from workbench.adopt.weights import stored_weights
from workbench.check import gates, golden, metrics
from workbench.check.gates import Gate
from workbench.check.golden import Golden
from workbench.explain import trial, variants
from workbench.models.checkpoint import Checkpoint

FITS = 0.02  # relative RMS of K and V that rope tables and constants in fp16 explain


@dataclass
class Validation:
    """All gates; rows of the log's `fidelity` table (T: tokens of a pass's largest
    calls); the comparison of the runtime's logits with the checkpoint's (None: no
    package gives logits). No price is measured."""

    gates: list[Gate]
    rows: pd.DataFrame
    logits: dict[str, float] | None
    price = None

    @property
    def verdict(self) -> str:
        return gates.verdict(self.gates)

    def json(self) -> dict:
        kv = self.rows[self.rows["tensor"] != "logits"]
        cosine = kv["cosine"].fillna(-1.0)
        return {
            "verdict": self.verdict,
            "gates": [gate.json() for gate in self.gates],
            "worst": kv.loc[cosine.idxmin()].to_dict(),
            "min_cosine": float(cosine.min()),
            "mean_cosine": float(cosine.mean()),
            "rows": len(self.rows),
            "logits": self.logits,
        }


def validate(
    adopted: Adopted,
    stored: Golden | None = None,
    ids: Sequence[int] | None = None,
    *,
    runtime: str = "auto",
    precision: str = "declared",
    compute_units: str = "CPU_AND_NE",
) -> Validation:
    """Runs every gate.

    The packages run in exact arithmetic on the portable runtime, and Hugging Face's
    model runs on the packages' weights, so that compression is no difference. A gate of
    its own compares the chosen runtime and precision with exact arithmetic.

    Args:
        stored: a golden of the checkpoint's own weights, for its prompt and its logits.
            If the folder names no checkpoint, the packages are compared with it,
            compression included.
        ids: the prompt (default: seeded random ids past every window).
    """
    checkpoint = adopted.checkpoint if stored else adopted.needed_checkpoint()
    exact = Adapter(adopted, "portable", "exact")
    chosen = Adapter(adopted, runtime, precision, compute_units)
    ids = (ids or passes.prompt(exact)) if stored is None else stored.ids
    by_T = passes.run_tiles(exact, ids)
    if checkpoint is None:
        own = stored
        note = "; the golden's weights are the checkpoint's: compression counts too"
    else:
        reader, missing = stored_weights(exact, checkpoint)
        own = passes.reference(checkpoint, ids, reader)
        note = _unrecognised(missing)
    checks = adopted_gates.own_gates(exact)
    if stored is not None and checkpoint is not None:
        checks.append(_of_this_checkpoint(stored, checkpoint))
    checks.append(adopted_gates.same_for_every_T(exact, by_T))
    compared, rows = adopted_gates.golden_gates(exact, by_T, own, note)
    checks += compared
    pass_ = passes.run(chosen, ids, max(by_T))
    checks.append(_runtime(chosen, pass_, by_T[max(by_T)]))
    logits = None
    other = checkpoint and stored and stored.meta["checkpoint"] != checkpoint.sha256
    if pass_.logits is not None and not other:
        source = stored or golden.make_golden(checkpoint, ids)
        there = np.isfinite(pass_.logits).all(-1)
        logits = metrics.compare_logits(source.logits[there], pass_.logits[there])
    rows = rows.assign(T=rows["tile"]).drop(columns=["tile", "function", "distance"])
    return Validation(checks, rows, logits)


def _of_this_checkpoint(stored: Golden, checkpoint: Checkpoint) -> Gate:
    theirs, ours = stored.meta["checkpoint"], checkpoint.sha256
    reason = f"golden of checkpoint {theirs[:12]}, packages of {ours[:12]}"
    return gates.holds("golden_is_of_this_checkpoint", theirs == ours, reason)


def _unrecognised(missing: list[str]) -> str:
    if not missing:
        return ""
    return (
        f"; {len(missing)} matrices were not recognised in the packages ({missing[0]}, …): "
        "there the golden has the checkpoint's, and compression counts too"
    )


def _runtime(adapter: Adapter, own: passes.Pass, exact: passes.Pass) -> Gate:
    """The gate of K and V of a runtime and precision against exact arithmetic."""
    limit = adopted_gates.DISTANCE[adopted_gates.tolerance(adapter)]
    worst, place = 0.0, "no row"
    for layer in range(len(own.k)):
        for name in "kv":
            pair = (p.vectors(name, layer) for p in (exact, own))
            distance = 1 - np.nan_to_num(metrics.cosine(*pair))
            if distance.max() >= worst:
                place = f"layer {layer}, position {distance.argmax()}, {name}"
                worst = float(distance.max())
    how = adapter.runtime
    if adapter.portable:
        how += f", {adapter.precision}"
    reason = f"1 − cosine of K and V against exact arithmetic, {how}: {place}"
    return gates.at_most("runtime", worst, limit, reason)


@dataclass
class Cause:
    """`variants`: every variant's name and relative RMS of K and V, best first; `fits`:
    the best one's name if it explains the packages; `faults`: the reasons of other RED
    gates."""

    variants: pd.DataFrame
    fits: str | None
    faults: list[str]


def explain(adopted: Adopted, progress: bool = False) -> Cause:
    """Finds the variant of Hugging Face's model that the packages compute in their
    smallest calls, and the faults of larger calls."""
    checkpoint = adopted.needed_checkpoint()
    adapter = Adapter(adopted, "portable", "exact")
    reader, _ = stored_weights(adapter, checkpoint)
    ids = passes.prompt(adapter)
    by_T = passes.run_tiles(adapter, ids)
    own = by_T[min(by_T)]

    def errors(variant: trial.Variant, count: int) -> np.ndarray:
        """Worst relative RMS of K and V of the first `count` layers."""

        def read(name: str):
            if name == EMBEDDING:
                return reader(name)
            return variant.read(name, reader)

        scale = variant.embedding
        with trial.changed_model(checkpoint.config, variant, count) as model:
            other = passes.reference(checkpoint, ids, read, model, scale, head=False)
        worst = []
        for layer in range(count):
            k = metrics.relative_rms(other.k[layer], own.k[layer])
            worst.append(max(k, metrics.relative_rms(other.v[layer], own.v[layer])))
        return np.nan_to_num(worst, nan=np.inf)

    tried = variants.try_variants(errors, checkpoint, [], {}, FITS, progress)
    frame = variants.ranking(tried)
    fits = variants.fitting(frame, FITS)
    faults = []
    for gate in (
        adopted_gates.causality(adapter),
        adopted_gates.same_for_every_T(adapter, by_T),
    ):
        if gate.verdict == gates.RED:
            faults.append(f"{gate.name}: {gate.reason}")
    return Cause(frame, fits, faults)


def conclusion(cause: Cause) -> str:
    """The conclusion from the best variant and the faults beside it, in sentences."""
    if cause.fits is None:
        text = "No variant explains these packages: the fault is of another kind, or several are."
    elif cause.fits == variants.CONFIGURED:
        text = "Keys and values are what the checkpoint's configuration says."
    else:
        text = f"The packages compute another model: {cause.fits}."
    for fault in cause.faults:
        text += f" Calls of more tokens differ: {fault}."
    return text
