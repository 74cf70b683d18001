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
    """All gates, rows of the log's `fidelity` table (T: tokens of the largest calls that a pass
    makes), the comparison of the runtime's logits with the checkpoint's (None: no package puts any
    out). A price is not measured: the weights that packages store are no gate's limit."""

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

    The packages run in exact arithmetic on the portable runtime, and Hugging Face's model runs on
    the weights that they hold: what then differs is no compression. What the chosen runtime and
    precision add is a gate of its own.

    Args:
        stored: a golden of the checkpoint's own weights: its prompt, and its logits; where the
            folder names no checkpoint it is compared with, compression included.
        ids: the prompt (default: seeded random ids past every window).
    """
    if stored:
        checkpoint = adopted.checkpoint
    else:
        checkpoint = adopted.needed_checkpoint()
    exact = Adapter(adopted, "portable", "exact")
    chosen = Adapter(adopted, runtime, precision, compute_units)
    if stored is not None:
        ids = stored.ids
    else:
        ids = ids or passes.prompt(exact)
    by_T = {T: passes.run(exact, ids, T) for T in exact.tiles if T <= len(ids)}
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
        f"; {len(missing)} matrices were not recognised in the packages ({missing[0]}, …): there "
        "the golden has the checkpoint's, and compression counts too"
    )


def _runtime(adapter: Adapter, own: passes.Pass, exact: passes.Pass) -> Gate:
    """What a runtime and its precision add to the keys and values of exact arithmetic."""
    limit = adopted_gates.DISTANCE[adopted_gates.tolerance(adapter)]
    worst, place = 0.0, "no row"
    for layer in range(len(own.k)):
        for name in "kv":
            cosine = metrics.cosine(exact.vectors(name, layer), own.vectors(name, layer))
            distance = 1 - np.nan_to_num(cosine)
            if distance.max() >= worst:
                place = f"layer {layer}, position {int(distance.argmax())}, {name}"
                worst = float(distance.max())
    if adapter.portable:
        how = f"{adapter.runtime}, {adapter.precision}"
    else:
        how = adapter.runtime
    reason = f"1 − cosine of K and V against exact arithmetic, {how}: {place}"
    return gates.at_most("runtime", worst, limit, reason)


@dataclass
class Cause:
    """`variants`: every variant's name and relative RMS of K and V, best first. `fits`: the best
    one's name if it explains the packages; `faults`: what is wrong beside it, in sentences."""

    variants: pd.DataFrame
    fits: str | None
    faults: list[str]


def explain(adopted: Adopted, progress: bool = False) -> Cause:
    """Which variant of Hugging Face's model the packages compute, called with the fewest tokens;
    and where calls of more tokens leave it."""
    checkpoint = adopted.needed_checkpoint()
    adapter = Adapter(adopted, "portable", "exact")
    reader, _ = stored_weights(adapter, checkpoint)
    ids, T = passes.prompt(adapter), min(adapter.tiles)
    own = passes.run(adapter, ids, T)

    def errors(variant: trial.Variant, count: int) -> np.ndarray:
        """Worst relative RMS of K and V of the first `count` layers."""
        with trial.changed_model(checkpoint.config, variant, count) as model:
            other = passes.reference(
                checkpoint,
                ids,
                lambda name: reader(name) if name == EMBEDDING else variant.read(name, reader),
                model,
                variant.embedding,
                head=False,
            )
        pairs = [[(getattr(other, n)[i], getattr(own, n)[i]) for n in "kv"] for i in range(count)]
        worst = [max(metrics.relative_rms(*pair) for pair in layer) for layer in pairs]
        return np.nan_to_num(worst, nan=np.inf)

    frame = variants.ranking(variants.try_variants(errors, checkpoint, [], {}, FITS, progress))
    fits = variants.fitting(frame, FITS)
    passed = {T: own} | {t: passes.run(adapter, ids, t) for t in adapter.tiles if t <= len(ids)}
    checks = [adopted_gates.causality(adapter), adopted_gates.same_for_every_T(adapter, passed)]
    faults = [f"{g.name}: {g.reason}" for g in checks if g.verdict == gates.RED]
    return Cause(frame, fits, faults)


def conclusion(cause: Cause) -> str:
    """What was errors_of, in a sentence or two."""
    if cause.fits is None:
        text = "No variant explains these packages: the fault is of another kind, or several are."
    elif cause.fits == variants.CONFIGURED:
        text = "Keys and values are what the checkpoint's configuration says."
    else:
        text = f"The packages compute another model: {cause.fits}."
    return " ".join([text, *(f"Calls of more tokens differ: {f}." for f in cause.faults)])
