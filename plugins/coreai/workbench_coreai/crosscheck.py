"""Compares three implementations of one checkpoint: Hugging Face's model, its Core ML
bundle on the portable runtime, and the Core AI twin of that bundle on Apple's
interpreter.

fp32 programs show re-authoring errors alone, fp16 programs add those of the arithmetic.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from workbench.bundle import Bundle
from workbench.check import gates, metrics, price
from workbench.check.compare import compare, compared
from workbench.check.gates import Gate
from workbench.check.golden import check_exported_from, make_golden, stored_weights
from workbench.check.hf import Values
from workbench.check.run import measure_fidelity
from workbench.decode import Decoder
from workbench.errors import InputError
from workbench.export import export
from workbench.models.checkpoint import Checkpoint

# portable precision → target of the twin
ARITHMETICS = {"exact": "coreai-fp32", "declared": "coreai"}
WITNESSES = {"portable": "portable", "coreai": "Apple"}  # in figures, beside HF
# largest 1 − cosine of an isolated update, without near ties of a router
UPDATE_LIMITS = {"exact": 1e-11, "declared": 1e-4}


@dataclass(frozen=True)
class Crosscheck:
    """`errors`: one row per `pair` of implementations, precision, layer, position, T
    and tensor (update, k, v) with the relative RMS `error` and the `budget`, the error
    of rounding alone. `runtimes`: one dict per runtime and precision, compared with the
    golden."""

    errors: pd.DataFrame
    runtimes: list[dict]
    gates: list[Gate]

    def json(self) -> dict:
        return {
            "verdict": gates.verdict(self.gates),
            "runtimes": self.runtimes,
            "gates": [gate.json() for gate in self.gates],
        }


def twin(
    bundle: Bundle, checkpoint: Checkpoint, target: str, folder: Path | None = None
) -> Bundle:
    """The Core AI bundle of the same checkpoint and options, beside `bundle` or in
    `folder`; exported if it is missing.

    Raises:
        InputError: an option that Core AI lacks, or another bundle there.
    """
    options = bundle.manifest.options.model_dump() | {"target": target}
    if bundle.manifest.options.functions:
        options["tokens"] = f"1-{bundle.manifest.options.t_max}"
    path = (folder or bundle.root.parent) / f"{bundle.root.name}.{target}"
    if not path.exists():
        return export(checkpoint.path, path, progress=False, **options)
    other = Bundle.open(path)
    check_exported_from(checkpoint, other)
    if other.manifest.options != type(bundle.manifest.options)(**options):
        raise InputError(
            f"bundle {path}",
            "other options",
            "the options of the bundle",
            "remove it, or give another --folder",
        )
    return other


def crosscheck(
    bundle: Bundle,
    checkpoint: Checkpoint,
    ids: Sequence[int],
    *,
    folder: Path | None = None,
    progress: bool = False,
) -> Crosscheck:
    """Compares every layer × position × T of the bundle and its twins in two
    arithmetics with Hugging Face's model on the bundle's weights, and with each
    other."""
    check_exported_from(checkpoint, bundle)
    weights = stored_weights(checkpoint, bundle)
    golden = make_golden(checkpoint, ids, weights, bundle.identity)
    budget = price.measure_budget(bundle, checkpoint, golden)
    errors = []
    runtimes = []
    results = []
    for precision, target in ARITHMETICS.items():
        decoders = {
            "portable": Decoder(bundle, "portable", precision),
            "coreai": Decoder(twin(bundle, checkpoint, target, folder)),
        }
        passes = {}
        for name, decoder in decoders.items():
            rows, passes[name], chained = measure_fidelity(
                decoder, golden, None, budget, progress
            )
            table = compared(rows)
            errors.append(
                table.assign(pair=f"HF ↔ {WITNESSES[name]}", precision=precision)
            )
            logits = metrics.compare_logits(golden["logits"], chained["logits"])
            runtimes.append(figures(name, precision, table, logits))
            results += runtime_gates(runtimes[-1])
        table = between(golden.values, *passes.values())
        errors.append(table.assign(pair="portable ↔ Apple", precision=precision))
        runtimes[-1]["kv_bits_equal"] = bits_equal(*passes.values())
        if precision == "exact":
            about = gates.REAUTHORING, "relative RMS of portable ↔ coreai, worst"
            worst = float(table["error"].max())
            results.append(gates.at_most("runtimes_agree", worst, *about))
    return Crosscheck(pd.concat(errors, ignore_index=True), runtimes, results)


def runtime_table(result: Crosscheck) -> pd.DataFrame:
    """`Crosscheck.runtimes` as a table, one row per runtime and precision."""
    rows = [row | row["logits"] for row in result.runtimes]
    return pd.DataFrame(rows).drop(columns="logits")


def figures(name: str, precision: str, table: pd.DataFrame, logits: dict) -> dict:
    """A runtime's errors against the golden, without near ties: the worst isolated
    update as 1 − cosine, and the worst relative error of a row of K or V."""
    updates = table[table["tensor"] == "update"]
    return {
        "name": name,
        "precision": precision,
        "worst_update": float(1 - updates["cosine"].fillna(-1.0).min()),
        "median_update": float(1 - updates["cosine"].median()),
        "worst_kv": float(table.loc[table["tensor"] != "update", "error"].max()),
        "logits": logits,
    }


def runtime_gates(row: dict) -> list[Gate]:
    """Gates of a runtime's updates and, in exact arithmetic, of its caches and tokens
    against the golden."""
    of = f"{row['name']} {row['precision']}"
    limit = UPDATE_LIMITS[row["precision"]]
    update = row["worst_update"]
    results = [
        gates.at_most(
            f"{of}: update", update, limit, "1 − cosine, worst isolated update"
        )
    ]
    if row["precision"] == "exact":
        kv = row["worst_kv"]
        top = row["logits"]["top1_agreement"]
        reason = "relative RMS of a row of K or V, worst"
        results.append(gates.at_most(f"{of}: kv", kv, gates.REAUTHORING, reason))
        results.append(
            gates.at_least(f"{of}: greedy", top, 1.0, "positions of equal top token")
        )
    return results


def between(
    golden: Values, portable: dict[int, Values], apple: dict[int, Values]
) -> pd.DataFrame:
    """The comparison of the Core AI values by T with the portable ones."""
    tables = []
    for T, values in portable.items():
        rows = compare(golden | values, apple[T]).assign(T=T, mode="isolated")
        tables.append(compared(rows))
    return pd.concat(tables, ignore_index=True)


def bits_equal(portable: dict[int, Values], apple: dict[int, Values]) -> float:
    """Share of K and V values that are the same fp16 number on both."""
    equal = []
    for T, values in portable.items():
        for name, rows in values.items():
            if name.startswith(("k.", "v.")):
                equal.append(np.ravel(np.float16(rows) == np.float16(apple[T][name])))
    return float(np.mean(np.concatenate(equal)))
