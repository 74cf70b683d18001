"""Published speculative decoding beside the predictions of `workbench/ane/speculation.py`:
the last table of `predictor.py errors`."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from workbench.ane import features, formula, roofline, speculation
from workbench.ane.chips import published

DESCRIBED = ("dense", "experts called for each token")
"""Kinds of programs whose verification the formula predicts."""
ZAYA_LAYERS = 40
"""Layers of ZAYA1-8B, the one published model whose experts are called for each token
(experiment 32 of ane-book). The attention and the experts of a layer have a shard each."""


@dataclass(frozen=True)
class Round:
    """A round of speculation. Costs are in units of the time of one plain token.

    Args:
        drafts: their number; the verification checks one token more.
        draft_cost: of one draft; NaN where it was not published.
    """

    drafts: int
    verification_cost: float
    draft_cost: float

    def gain(self, acceptance: float) -> float:
        """Tokens per second over those of plain decoding."""
        return float(speculation.gain(acceptance, *self._costs))

    def implied_acceptance(self, gain: float) -> float | None:
        """The acceptance at which the gain is this one."""
        return speculation.implied_acceptance(gain, *self._costs)

    def pays_from(self) -> float | None:
        """The least acceptance at which the gain is 1."""
        return speculation.pays_from(*self._costs)

    @property
    def _costs(self) -> tuple[int, float, float]:
        return self.drafts, self.verification_cost, self.draft_cost


def speculations() -> pd.DataFrame:
    """Published verifications, acceptances and gains beside the formula's. The cost of a
    program that the formula does not describe is the published one."""
    rows = published("speculation.csv").replace("", np.nan)
    numbers = ["verify_cost", "acceptance", "draft_cost", "gain"]
    rows[numbers] = rows[numbers].astype(float)
    return pd.DataFrame([speculation_line(row) for row in rows.to_dict("records")])


def speculation_line(row: dict) -> dict:
    """The line of the table for a line of `speculation.csv`. A published acceptance gives
    the predicted gain, a published gain alone gives the acceptance that it implies."""
    is_described = row["program"] in DESCRIBED
    cost = verification_cost(row) if is_described else row["verify_cost"]
    line = {
        "model": row["model"],
        "chip": row["chip"],
        "program": row["program"],
        "tokens": row["tokens"],
        "published_cost": row["verify_cost"],
        "cost": cost,
        "cost_from": "formula" if is_described else "published",
    }
    if np.isnan(row["draft_cost"]):
        return line
    round_ = Round(row["tokens"] - 1, cost, row["draft_cost"])
    line |= {"acceptance": row["acceptance"], "published_gain": row["gain"]}
    if np.isnan(row["acceptance"]):
        line["implied_acceptance"] = round_.implied_acceptance(row["gain"])
    else:
        line["gain"] = round_.gain(row["acceptance"])
    return line | {"pays_from": round_.pays_from()}


def verification_cost(row: dict) -> float:
    """The predicted time of the verification in a line of `speculation.csv`, in units of
    the time of one plain token."""
    if row["program"] == "dense":
        return dense_verification_cost(row)
    return zaya_verification_cost(row)


def dense_verification_cost(row: dict) -> float:
    """The cost where every program computes all tokens of the verification at once."""
    shards = shard_points(row)
    verification_ms = predict_ms(for_tokens(shards, row["tokens"]))
    return float(verification_ms.sum() / predict_ms(shards).sum())


def zaya_verification_cost(row: dict) -> float:
    """The cost where the shards of attention run for all tokens at once, and experts and
    head for each token. The points of the line are one shard of each kind, in the order
    of `speculation.csv`: attention, experts, head."""
    shards = shard_points(row)
    attention_ms, expert_ms, head_ms = predict_ms(shards)
    attention_of_all_ms = predict_ms(for_tokens(shards, row["tokens"])).iloc[0]
    experts_ms = ZAYA_LAYERS * expert_ms + head_ms
    plain_ms = ZAYA_LAYERS * attention_ms + experts_ms
    verification_ms = ZAYA_LAYERS * attention_of_all_ms + row["tokens"] * experts_ms
    return float(verification_ms / plain_ms)


def shard_points(row: dict) -> pd.DataFrame:
    """The public points that a line of `speculation.csv` names, in its order."""
    points = features.points().set_index("id", drop=False)
    return points.loc[row["points"].split()]


def for_tokens(points: pd.DataFrame, T: int) -> pd.DataFrame:
    """The points as a verification of T tokens, which computes the head of every token:
    `head_g` would count it once."""
    return points.assign(T=T, head_g=0.0)


def predict_ms(points: pd.DataFrame) -> pd.Series:
    """The formula's times."""
    return formula.predict_ms(points, roofline.calibration().constants)
