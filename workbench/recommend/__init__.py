"""Advice on the verdicts of a bundle: whether the export is faulty, whether its cost exceeds
the user's limits, and which preset keeps them.

A preset is judged by Hugging Face's model with the weights that an export in it would
store. For sound bundles of SmolLM2-135M-Instruct that KL was within 0.4% of the bundle's
own. Every figure has a 95% interval, and a limit is kept only where the whole interval
keeps it.

    candidates  the ways to store a checkpoint's matrices: their bytes and weights
    scores      the figures of such weights on a text, with intervals; the user's limits
    trials      `recommend`: candidates by size, each scored, until one keeps the limits
    sentences   the verdicts and the trials in words"""

from workbench.recommend.scores import (
    EXCEEDED,
    KEPT,
    NOT_MEASURED,
    ON_LIMIT,
    Estimate,
    Figures,
    Limits,
)
from workbench.recommend.sentences import describe_recommendation, describe_verdict
from workbench.recommend.trials import (
    COLUMNS,
    Recommendation,
    Trial,
    as_table,
    recommend,
)

__all__ = [
    "COLUMNS",
    "EXCEEDED",
    "KEPT",
    "NOT_MEASURED",
    "ON_LIMIT",
    "Estimate",
    "Figures",
    "Limits",
    "Recommendation",
    "Trial",
    "as_table",
    "describe_recommendation",
    "describe_verdict",
    "recommend",
]
