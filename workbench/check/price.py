"""The cost of compression and fp16: the distance of a bundle from the checkpoint,
beside the distance that rounding alone causes.

The budget is Hugging Face's own model in fp32 with the weights that the bundle stores,
its stream rounded to fp16 where it enters and leaves a layer, its cache rows rounded
once. The exported program has no part in it, so that an error far above the budget is
not due to compression."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

from workbench.bundle import Bundle
from workbench.check import gates, metrics
from workbench.check.compare import compared
from workbench.check.gates import Gate
from workbench.check.golden import Golden, stored_weights
from workbench.check.hf import Reference, Values, half, updates
from workbench.models.checkpoint import Checkpoint

# Times the budget that an error may be. Inner results of a layer are rounded as well, which the
# budget leaves out: the worst sound bundle (fp16, trained ZAYA) reaches 2.6, random draws in fp16
# 2.1 and compressed ones 1.05. The limit is at least twice the worst; tests/check/faults.md has the
# margin.
BUDGET_FACTOR = 6.0


@dataclass(frozen=True)
class Price:
    """`kl` [n] nats from the golden to the bundle at each position, `same_top` the
    share of positions with the same top token; nan where the bundle gives no logits.

    `rows`: those of `measure_fidelity` that gates read, with `error`, `budget` and
    `ratio`. `budget` and `ratio` are null and `budget_kl` is None where no budget was
    measured."""

    kl: np.ndarray
    same_top: float
    rows: pd.DataFrame
    budget_kl: np.ndarray | None = None

    @property
    def worst(self) -> pd.Series:
        """Ratio of error to budget of the layer, T and tensor where it is largest: its
        RMS over positions."""
        ratios = self.rows["ratio"].fillna(np.inf).astype(float) ** 2
        rows = self.rows.assign(ratio=ratios)
        means = rows.groupby(["layer", "T", "tensor"])["ratio"].mean()
        return (means**0.5).sort_values(ascending=False).head(1).reset_index().iloc[0]

    def json(self) -> dict:
        budget = None
        if self.budget_kl is not None:
            budget = {
                "kl": summarize_kl(self.budget_kl),
                "update": self._medians("update"),
                "kv": self._medians("k", "v"),
                "worst": self.worst.to_dict(),
                "factor": BUDGET_FACTOR,
            }
        return {
            "kl": summarize_kl(self.kl),
            "same_top": self.same_top,
            "budget": budget,
        }

    def _medians(self, *tensors: str) -> dict[str, float]:
        rows = self.rows[self.rows["tensor"].isin(tensors)]
        return rows[["error", "budget"]].median().to_dict()


def measure_budget(bundle: Bundle, checkpoint: Checkpoint, golden: Golden) -> Values:
    """Runs Hugging Face's model twice over the golden's tokens with the weights that
    `bundle` stores and a rounded stream: the values of layers that are fed the golden's
    input, and the `logits` of layers in a row."""
    reference = Reference(checkpoint, stored_weights(checkpoint, bundle, half=True))
    rounded = half(bundle.manifest.stream_scale)
    chained = reference.run(golden.ids, perturb=rounded)
    values = reference.run(golden.ids, feed=golden.values, perturb=rounded, head=False)
    for name, value in values.items():  # as the bundle holds them
        if name.startswith("hidden."):
            values[name] = rounded(torch.from_numpy(value)).numpy()
        elif name.startswith(("k.", "v.")):
            values[name] = np.float16(value)
    return values | updates(values) | {"logits": chained["logits"]}


def measure_price(
    golden: Golden, rows: pd.DataFrame, chained: Values, budget: Values | None = None
) -> Price:
    """The price of a bundle.

    Args:
        rows, chained: results of `measure_fidelity` with the same `budget`.
    """
    expected, actual = golden["logits"], chained.get("logits")
    same, kl = np.nan, np.full(len(golden.ids), np.nan)
    if actual is not None:
        same = np.mean(np.argmax(expected, -1) == np.argmax(actual, -1))
        kl = metrics.kl_of_rows(expected, actual)
    budget_kl = budget and metrics.kl_of_rows(expected, budget["logits"])
    return Price(kl, float(same), compared(rows), budget_kl)


def price_gates(price: Price, max_kl: float = gates.MAX_KL) -> list[Gate]:
    """`max_kl`: the user's limit on the mean KL; `budget`: errors are what rounding
    alone explains, within a factor."""
    reason = f"mean KL from the golden in nats; --max-kl sets the limit of {max_kl:g}"
    limit = gates.at_most("max_kl", float(np.mean(price.kl)), max_kl, reason)
    if np.isnan(price.same_top):
        limit = gates.not_run("max_kl", "the argmax is inside: no logits come out")
    if price.budget_kl is None:
        return [limit, gates.not_run("budget", "needs --checkpoint")]
    worst = price.worst
    reason = (
        "error over what rounding of weights and stream alone costs Hugging Face's model: "
        f"layer {worst['layer']}, {worst['tensor']}, T = {worst['T']}"
    )
    ratio = float(worst["ratio"])
    return [limit, gates.at_most("budget", ratio, BUDGET_FACTOR, reason)]


def summarize_kl(kl: Sequence[float]) -> dict[str, float]:
    """Mean, median, 99th percentile and maximum."""
    return {
        "mean": float(np.mean(kl)),
        "median": float(np.median(kl)),
        "p99": float(np.percentile(kl, 99)),
        "max": float(np.max(kl)),
    }
