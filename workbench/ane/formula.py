"""The formula for the milliseconds of one call on a Neural Engine, and its fit.

    ms = calls · call + max(stream, unpack, products) + cache + state

    stream    streamed bytes ÷ the chip's published rate; formats that the chip unpacks
              when it loads them count as fp16
    unpack    weights in lookup tables ÷ unpack
    products  2 · multiply-adds ÷ half the chip's published peak
    cache     bytes of K and V that the attention products read ÷ attend
    state     bytes of recurrent states ÷ recur

The four constants call, unpack, attend and recur are fitted to public measurements of
decoding. Input is a table of calls with rates (`features.with_rates`)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

REACHED_SHARE = 0.5
"""The share of the published peak that products reach (two rows: M1 Max at T = 64, M5 Pro
at T = 128)."""
LINEAR_FROM = 0.15
"""The log error beyond which an error counts linearly, not squared. The same package was
published with times that differ by 2 to 26%."""
TERM_COLUMNS = """T table_share calls weights_g head_g streamed_gb recurrent_mb
weights_gb_s tflops read_cache_mb""".split()
"""Columns of a table of calls that `terms` reads."""


@dataclass(frozen=True)
class Constants:
    """The fitted constants of the formula. Each default leaves its term out.

    Args:
        call: ms of a call.
        unpack: 10⁹ weights a second from lookup tables.
        attend: GB/s of K and V.
        recur: GB/s of recurrent states.
    """

    call: float = 0.0
    unpack: float = np.inf
    attend: float = np.inf
    recur: float = np.inf


# `chips.csv` has 0.5 to 2.3 ms for a call and 22 GB/s of activations on an M4 Max; the
# other two are orders of magnitude
PRIORS = Constants(call=1.0, unpack=100.0, attend=22.0, recur=5.0)
"""Medians of the constants before any row is seen."""
PRIOR_WIDTH = 3.0
"""The standard deviation of their logarithms. It is wide enough that a prior decides only
where no row has the term."""
CONSTANT_NAMES = ("call", "unpack", "attend", "recur")


Calls = Mapping[str, Any] | pd.DataFrame
"""One call, with a number for each of `TERM_COLUMNS`; or a table of calls, with a column
for each."""
Milliseconds = float | np.ndarray | pd.Series
"""The ms of one call, or of each call of a table."""


@dataclass(frozen=True)
class Terms:
    """The ms of every term of the formula (see the module)."""

    call: Milliseconds
    stream: Milliseconds
    unpack: Milliseconds
    products: Milliseconds
    cache: Milliseconds
    state: Milliseconds

    @property
    def total(self) -> Milliseconds:
        """The predicted ms."""
        weights = np.maximum(np.maximum(self.stream, self.unpack), self.products)
        return self.call + weights + self.cache + self.state


def terms(calls: Calls, constants: Constants) -> Terms:
    """The ms of every term of the formula, for one call or for a table of calls."""
    unpack_s = calls["table_share"] * calls["weights_g"] / constants.unpack
    body_g = calls["weights_g"] - calls["head_g"]
    # 10⁹ multiply-adds: `head_g` is of a head that computes one token alone
    products_g = body_g * calls["T"] + calls["head_g"]
    return Terms(
        call=constants.call * calls["calls"],
        stream=1e3 * calls["streamed_gb"] / calls["weights_gb_s"],
        unpack=1e3 * unpack_s,
        # two operations a multiply-add; 10⁹ operations over 10¹² a second are ms
        products=2 * products_g / (REACHED_SHARE * calls["tflops"]),
        # MB over GB/s are ms
        cache=calls["read_cache_mb"] / constants.attend,
        state=calls["recurrent_mb"] / constants.recur,
    )


def predict_ms(calls: Calls, constants: Constants) -> Milliseconds:
    """The predicted ms of one call, or of each call of a table."""
    return terms(calls, constants).total


def fit(
    rows: pd.DataFrame,
    names: tuple[str, ...] = CONSTANT_NAMES,
    base: Constants = Constants(),
) -> Constants:
    """The constants `names` by robust least squares of log(predicted ÷ published); the
    others are those of `base`. The logarithm of a constant has the prior `PRIORS` with
    the width `PRIOR_WIDTH`.

    Args:
        rows: a table of calls with rates, with their author and published ms.
    """
    from scipy.optimize import least_squares

    medians = np.log([getattr(PRIORS, name) for name in names])
    arrays = {name: rows[name].to_numpy() for name in TERM_COLUMNS}
    published_log = np.log(rows["ms"].to_numpy())
    # squared residuals count n^-1/2, so that the n rows of an author count as √n rows
    weight = rows.groupby("author")["ms"].transform("size").to_numpy() ** -0.25

    def residuals(logs: np.ndarray) -> np.ndarray:
        """The residuals of the rows, then those of the priors."""
        constants = replace(base, **dict(zip(names, np.exp(logs))))
        log_errors = np.log(predict_ms(arrays, constants)) - published_log
        scaled = log_errors / LINEAR_FROM
        # Half of its square is the pseudo-Huber loss √(1 + x²) − 1: a square near 0, a
        # line far from it (Charbonnier et al., 1997).
        robust = np.sign(scaled) * np.sqrt(2 * (np.sqrt(1 + scaled**2) - 1))
        return np.concatenate([weight * robust, (logs - medians) / PRIOR_WIDTH])

    solution = least_squares(residuals, medians)
    return replace(base, **dict(zip(names, np.exp(solution.x).tolist())))


def cross_validated_ms(
    rows: pd.DataFrame,
    by: str,
    names: tuple[str, ...] = CONSTANT_NAMES,
    base: Constants = Constants(),
) -> pd.Series:
    """The ms of every row, predicted by a fit without the rows that share its value of
    the column `by`. `names` and `base` are those of `fit`."""
    result = pd.Series(np.nan, rows.index)
    for _, group in rows.groupby(by, sort=False):
        others = rows.drop(group.index)
        if len(others):
            result[group.index] = predict_ms(group, fit(others, names, base))
    return result
