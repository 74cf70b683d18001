"""The verdict on a bundle against a golden: fidelity rows → gates → one JSON-able result."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from workbench.decode import Decoder

from . import fidelity, gates, metrics
from .gates import Gate
from .golden import Golden


@dataclass
class Validation:
    """Rows of the `fidelity` table, the gates judged on them, and the comparison of logits (worst over T, chained)."""

    rows: pd.DataFrame
    gates: list[Gate]
    logits: dict[str, float]

    @property
    def verdict(self) -> str:
        return gates.verdict(self.gates)

    @property
    def worst(self) -> dict:
        """The isolated update or cache row that is furthest from the golden."""
        judged = self.rows[(self.rows["mode"] == "isolated") & self.rows["tensor"].isin(["update", "k", "v"])]
        row = judged.loc[judged["cosine"].fillna(-2).idxmin()]
        names = ("layer", "position", "T", "tensor", "mode", "cosine", "psnr_db", "max_abs")
        return {n: row[n].item() if hasattr(row[n], "item") else row[n] for n in names}

    def json(self) -> dict:
        updates = self._cosines("update")
        return {
            "verdict": self.verdict, "gates": [g.json() for g in self.gates], "worst": self.worst,
            "min_cosine": float(updates.min()), "mean_cosine": float(updates.mean()), "rows": len(self.rows),
            "logits": self.logits,
        }  # fmt: skip

    def _cosines(self, *tensors: str) -> pd.Series:
        chosen = (self.rows["mode"] == "isolated") & self.rows["tensor"].isin(tensors)
        return self.rows.loc[chosen, "cosine"].fillna(-1.0)


def validate(decoder: Decoder, golden: Golden, Ts: Sequence[int] | None = None, progress: bool = False) -> Validation:
    """Judges every layer × position × T of a bundle against `golden`."""
    rows, traces = fidelity.measure(decoder, golden, Ts, progress=progress)
    chained = [trace.logits for (_, mode), trace in traces.items() if mode == "chained"]
    compared = [metrics.compare_logits(golden.logits, found) for found in chained]
    worst = {
        name: (max if name == "kl_max" else min)(c[name] for c in compared) for name in compared[0]
    }  # fmt: skip
    result = Validation(rows, [], worst)
    result.gates = _gates(result, decoder, traces, golden)
    return result


def _gates(result: Validation, decoder: Decoder, traces: dict, golden: Golden) -> list[Gate]:
    limits = gates.LIMITS[decoder.options.compress]
    weights = "the stored weights" if golden.meta["weights"] != "source" else "the checkpoint's weights"
    where = _where(result.rows, ["update"])
    theirs, ours = golden.meta["checkpoint"], decoder.manifest.checkpoint["sha256"]
    found = [
        gates.holds("golden_is_of_this_checkpoint", theirs == ours, f"golden of checkpoint {theirs[:12]}, bundle of {ours[:12]}"),
        gates.holds("finite", bool(result.rows["finite"].all()), _nonfinite(result.rows)),
        gates.at_least("update", result._cosines("update").min(), limits.update_cosine,
                       f"worst isolated update against {weights}: {where}"),
        gates.at_least("kv", result._cosines("k", "v").min(), limits.kv_cosine,
                       f"worst cache row against {weights}: {_where(result.rows, ['k', 'v'])}"),
        gates.at_most("logits_kl", result.logits["kl_max"], limits.logits_kl, "worst position, chained, nats"),
        gates.at_least("logits_cosine", result.logits["cosine_min"], limits.logits_cosine, "worst position, chained"),
    ]  # fmt: skip
    if decoder.options.compress == "fp16":
        found.append(gates.at_least("logits_top1", result.logits["top1_agreement"], 1.0,
                                    "share of positions with the golden's top token, near-ties apart"))  # fmt: skip
    return [*found, _same_for_every_t(decoder, traces, golden)]


def _same_for_every_t(decoder: Decoder, traces: dict, golden: Golden) -> Gate:
    """Chapter 5's hazard: right at T = 1, silently wrong at T > 1. Same program, same inputs, so no golden is needed."""
    tolerance = gates.T_TOLERANCE["coreml" if decoder.runtime == "coreml" else decoder.precision]
    base = traces.get((1, "isolated"))
    others = {T: trace for (T, mode), trace in traces.items() if mode == "isolated" and T > 1}
    if base is None or not others:
        return gates.not_run("same_for_every_T", "needs T = 1 and at least one T > 1")
    worst, at = 0.0, ""
    for T, trace in others.items():
        for layer, hidden in trace.hidden.items():
            pairs = (("update", base.hidden[layer] - golden.x[layer], hidden - golden.x[layer]),
                     ("k", base.k[layer], trace.k[layer]), ("v", base.v[layer], trace.v[layer]))  # fmt: skip
            for name, one, many in pairs:
                difference = metrics.relative_rms(np.nan_to_num(one), np.nan_to_num(many))
                if difference > worst:
                    worst, at = difference, f"layer {layer}, {name}, T = {T}"
    advice = "" if worst <= tolerance else "; export fixed-T shards (--t fixed) for prefill and decode"
    return gates.at_most("same_for_every_T", worst, tolerance, f"T > 1 against T = 1, relative RMS: {at or 'equal'}{advice}")


def _where(rows: pd.DataFrame, tensors: list[str]) -> str:
    judged = rows[(rows["mode"] == "isolated") & rows["tensor"].isin(tensors)]
    row = judged.loc[judged["cosine"].fillna(-2).idxmin()]
    return f"layer {row['layer']}, position {row['position']}, T = {row['T']}, {row['tensor']}"


def _nonfinite(rows: pd.DataFrame) -> str:
    bad = rows[~rows["finite"]]
    if bad.empty:
        return "every value is finite"
    row = bad.iloc[0]
    return f"{len(bad)} rows hold inf or nan, first: layer {row['layer']}, position {row['position']}, {row['tensor']}"
