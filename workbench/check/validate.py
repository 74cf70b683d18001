"""The verdict on a bundle against a golden: fidelity rows → gates → one JSON-able result."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from workbench.check import fidelity, gates, metrics, rangedim
from workbench.check.gates import Gate
from workbench.check.golden import Golden
from workbench.decode import Decoder


@dataclass
class Validation:
    """Rows of the `fidelity` table, the gates on them, and the comparison of `chained_logits` [n, V] with the golden's.
    Where experts are routed and choices are recorded, layers go on with the golden's expert, and `free_logits` compares the
    logits of a chained run that goes on with the program's own (else None).
    """

    rows: pd.DataFrame
    gates: list[Gate]
    logits: dict[str, float]
    chained_logits: np.ndarray
    free_logits: dict[str, float] | None = None

    @property
    def verdict(self) -> str:
        return gates.verdict(self.gates)

    @property
    def worst(self) -> dict:
        """The isolated update or cache row that is furthest from the golden."""
        row = _worst(self.rows, "update", "k", "v")
        names = ("layer", "position", "T", "tensor", "mode", "cosine", "psnr_db", "max_abs")
        return {n: row[n].item() if hasattr(row[n], "item") else row[n] for n in names}

    def json(self) -> dict:
        updates = _isolated(self.rows, "update")["cosine"].fillna(-1.0)
        return {
            "verdict": self.verdict,
            "gates": [g.json() for g in self.gates],
            "worst": self.worst,
            "min_cosine": float(updates.min()),
            "mean_cosine": float(updates.mean()),
            "rows": len(self.rows),
            "logits": self.logits,
            "free_logits": self.free_logits,
        }


def validate(
    decoder: Decoder, golden: Golden, Ts: Sequence[int] | None = None, progress: bool = False
) -> Validation:
    """Compares every layer × position × T of a bundle with `golden`, and applies the gates."""
    rows, traces, chained = fidelity.measure_fidelity(decoder, golden, Ts, progress=progress)
    result = Validation(
        rows, [], metrics.compare_logits(golden.logits, chained.logits), chained.logits
    )
    choices = fidelity.choices(
        {f"isolated at T = {T}": t for T, t in traces.items()} | {"chained": chained}, golden
    )
    result.gates = _gates(result, decoder, traces, golden)
    if len(choices):
        free = fidelity.run_golden(decoder, golden, list(traces), "chained", forced=False)
        result.free_logits = metrics.compare_logits(golden.logits, free.logits)
        result.gates += [
            routing(
                choices, gates.LIMITS[decoder.options.compress].routing_margin, result.free_logits
            )
        ]
    return result


def routing(choices: pd.DataFrame, limit: float, free: dict[str, float]) -> Gate:
    """Only near-tied experts are picked differently. No other gate covers another expert's update: they all read layers
    that went on with the golden's choice."""
    differ = choices[choices["differs"]]
    reason = f"{len(differ)} of {len(choices)} choices of an expert differ from the golden's"
    if len(differ):
        worst = differ.loc[differ["margin"].idxmax()]
        reason += f", largest golden margin: layer {worst['layer']}, position {worst['position']}, {worst['run']}"
    reason += f"; going on with them, the logits' worst cosine is {free['cosine_min']:.4f}"
    return gates.at_most(
        "routing", float(differ["margin"].max()) if len(differ) else 0.0, limit, reason
    )


def _gates(result: Validation, decoder: Decoder, traces: dict, golden: Golden) -> list[Gate]:
    limits, rows, logits = gates.LIMITS[decoder.options.compress], result.rows, result.logits
    weights = (
        "the stored weights" if golden.meta["weights"] != "source" else "the checkpoint's weights"
    )
    update, cached = _worst(rows, "update"), _worst(rows, "k", "v")
    result_gates = [
        fidelity.of_this_checkpoint(decoder, golden),
        gates.holds("finite", bool(rows["finite"].all()), _nonfinite(rows)),
        gates.at_least(
            "update",
            update["cosine"],
            limits.update_cosine,
            f"worst isolated update against {weights}: {_row_place(update)}{_ties(rows)}",
        ),
        gates.at_least(
            "kv",
            cached["cosine"],
            limits.kv_cosine,
            f"worst cache row against {weights}: {_row_place(cached)}",
        ),
        gates.at_most(
            "logits_kl", logits["kl_max"], limits.logits_kl, "worst position, chained, nats"
        ),
        gates.at_least(
            "logits_cosine", logits["cosine_min"], limits.logits_cosine, "worst position, chained"
        ),
    ]
    if decoder.options.compress == "fp16":
        reason = "share of positions with the golden's top token, near-ties apart"
        result_gates.append(gates.at_least("logits_top1", logits["top1_agreement"], 1.0, reason))
    return [*result_gates, trend(rows), rangedim.drift_gate(decoder, traces, golden)]


def trend(rows: pd.DataFrame) -> Gate:
    """A cache that is damaged as it is used errs more and more over its rows, or less and less (the oldest were hit most
    often); compression errs alike in all. Rank correlation of position and error of chained K and V rows, position 0
    apart: attention sinks there are unlike any other row. Some tokens are harder than others wherever they stand, so a small
    trend counts only in what the hidden state's error at the same position does not explain."""
    chained = rows[(rows["mode"] == "chained") & (rows["position"] > 0)].dropna(subset="cosine")
    error = np.log((1 - chained["cosine"]).clip(lower=1e-14)) / 2
    errors = error.groupby([chained["tensor"], chained["position"]]).mean()
    caches = [tensor for tensor in ("k", "v") if tensor in errors]
    if min((len(errors[tensor]) for tensor in caches), default=0) < gates.TREND_POSITIONS:
        return gates.not_run("trend", f"needs {gates.TREND_POSITIONS} positions after the first")
    trends = [
        (
            *_trend(_unexplained(errors[t], errors.get("hidden"))),
            gates.TREND_GROWTH,
            f"{t}, the hidden state's apart",
        )
        for t in caches
    ]
    trends += [(*_trend(errors[t]), gates.TREND_WHOLE, t) for t in caches]
    growth, correlation, limit, tensor = max(trends, key=lambda t: (t[0] >= t[2]) * abs(t[1]))
    verdict, words = gates.GREEN, ", flat"
    if growth >= limit and abs(correlation) > gates.TREND:
        verdict, words = gates.RED, ": a fault of the cache"
    return Gate(
        "trend",
        verdict,
        correlation,
        gates.TREND,
        f"rank correlation of position and error, {tensor}; "
        f"newest and oldest quarter differ by a factor of {growth:.2f}{words}",
    )


def _unexplained(error: pd.Series, hidden: pd.Series | None) -> pd.Series:
    """Log errors by position, less what the error of the hidden state at the same position explains."""
    if hidden is None:
        return error
    hard = hidden.reindex(error.index)
    return error - np.clip(error.cov(hard) / hard.var(), 0, 1) * (hard - hard.mean())


def _trend(error: pd.Series) -> tuple[float, float]:
    """Factor between the newest and the oldest quarter of log errors by position, and their rank correlation with it."""
    quarter = -(-len(error) // 4)
    correlation = error.rank().corr(error.index.to_series().rank())
    growth = np.exp(abs(error.iloc[-quarter:].mean() - error.iloc[:quarter].mean()))
    return float(growth), float(np.nan_to_num(correlation))


def _isolated(rows: pd.DataFrame, *tensors: str) -> pd.DataFrame:
    """Isolated rows that gates read: updates where the router had a clear choice, and all cache rows."""
    isolated = rows[(rows["mode"] == "isolated") & rows["tensor"].isin(tensors)]
    return isolated[~_tied(isolated)]


def _tied(rows: pd.DataFrame) -> pd.Series:
    """Updates that may be another expert's, where the runtime does not show the choice."""
    return rows.get("routing_tie", False) & (rows["tensor"] == "update")


def _ties(rows: pd.DataFrame) -> str:
    """How many updates the gate leaves out, in words."""
    count = (_tied(rows) & (rows["mode"] == "isolated")).sum()
    return f"; {count} with a near-tied choice of expert apart" if "routing_tie" in rows else ""


def _worst(rows: pd.DataFrame, *tensors: str) -> pd.Series:
    return fidelity.worst_row(_isolated(rows, *tensors))


def _row_place(row: pd.Series) -> str:
    return f"layer {row['layer']}, position {row['position']}, T = {row['T']}, {row['tensor']}"


def _nonfinite(rows: pd.DataFrame) -> str:
    bad = rows[~rows["finite"]]
    return (
        f"{len(bad)} rows hold inf or nan, first: {_row_place(bad.iloc[0])}"
        if len(bad)
        else "every value is finite"
    )
