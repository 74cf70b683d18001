"""Compares three implementations of one checkpoint: Hugging Face's model, its Core ML
bundle on the portable runtime, and the Core AI twin of that bundle on Apple's
interpreter.

fp32 programs show re-authoring errors alone, fp16 programs add those of the arithmetic.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from workbench.bundle import Bundle
from workbench.check import gates
from workbench.check.compare import compare, compared
from workbench.check.gates import Gate
from workbench.check.golden import check_exported_from, make_golden, stored_weights
from workbench.check.validate import measure, measure_budget
from workbench.decode import Decoder
from workbench.errors import InputError
from workbench.export import export
from workbench.models.checkpoint import Checkpoint

# portable precision → target of the twin, largest 1 − cosine of an isolated update,
# without near ties of a router
ARITHMETICS = {"exact": ("coreai-fp32", 1e-11), "declared": ("coreai", 1e-4)}


class Crosscheck(NamedTuple):
    """`errors`: one row per `pair` of implementations, precision, layer, position, T
    and tensor (update, k, v) with the relative RMS `error` and the `budget`, the error
    of rounding alone. `runtimes`: one row per runtime and precision, compared with the
    golden."""

    errors: pd.DataFrame
    runtimes: pd.DataFrame
    gates: list[Gate]

    def json(self) -> dict:
        return {
            "verdict": gates.verdict(self.gates),
            "runtimes": gates.records(self.runtimes),
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
    own = bundle.manifest.options
    options = own.model_dump() | {"target": target}
    if own.functions:
        options["tokens"] = f"1-{own.t_max}"
    path = (folder or bundle.root.parent) / f"{bundle.root.name}.{target}"
    if not path.exists():
        return export(checkpoint.path, path, **options)
    other = Bundle.open(path)
    check_exported_from(checkpoint, other)
    if other.manifest.options != type(own)(**options):
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
) -> Crosscheck:
    """Compares every layer × position × T of the bundle and its twins in two
    arithmetics with Hugging Face's model on the bundle's weights, and with each
    other."""
    check_exported_from(checkpoint, bundle)
    weights = stored_weights(checkpoint, bundle)
    golden = make_golden(checkpoint, ids, weights, bundle.identity)
    budget = measure_budget(bundle, checkpoint, golden)
    errors, runtimes, results = [], [], []
    for precision, (target, limit) in ARITHMETICS.items():
        decoders = {
            "portable": Decoder(bundle, "portable", precision),
            "Apple": Decoder(twin(bundle, checkpoint, target, folder)),
        }
        passes = {}
        for name, decoder in decoders.items():
            cost = measure(decoder, golden, None, budget)
            passes[name], table = cost.isolated, compared(cost.rows)
            table = table.assign(pair=f"HF ↔ {name}", precision=precision)
            errors.append(table)
            distance = 1 - table.loc[table["tensor"] == "update", "cosine"].fillna(-1)
            logits = cost.summary()
            row = {
                "name": name,
                "precision": precision,
                "worst_update": float(distance.max()),
                "median_update": float(distance.median()),
                "worst_kv": float(
                    table.loc[table["tensor"] != "update", "error"].max()
                ),
            } | logits
            runtimes.append(row)
            about = f"{name} {precision}: update", row["worst_update"], limit
            results.append(gates.at_most(*about, "1 − cosine, worst isolated update"))
            if precision == "exact":
                about = f"{name}: kv", row["worst_kv"], gates.REAUTHORING
                results.append(gates.at_most(*about, "relative RMS of K or V, worst"))
                about = f"{name}: greedy", logits["top1_agreement"], 1.0
                results.append(gates.at_least(*about, "positions of equal top token"))
        between, equal = [], []
        for T, values in passes["portable"].items():
            other = passes["Apple"][T]
            rows = compare(golden.values | values, other).assign(T=T, mode="isolated")
            between.append(compared(rows))
            for name in values:
                if name.startswith(("k.", "v.")):
                    same = np.float16(values[name]) == np.float16(other[name])
                    equal.append(same.ravel())
        table = pd.concat(between).assign(pair="portable ↔ Apple", precision=precision)
        errors.append(table)
        runtimes[-1]["kv_bits_equal"] = float(np.concatenate(equal).mean())
        if precision == "exact":
            about = "runtimes_agree", float(table["error"].max()), gates.REAUTHORING
            results.append(gates.at_most(*about, "relative RMS, worst"))
    whole = pd.concat(errors, ignore_index=True)
    return Crosscheck(whole, pd.DataFrame(runtimes), results)
