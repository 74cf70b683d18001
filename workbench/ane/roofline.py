"""Predicts the milliseconds of a shard on a Neural Engine from its bytes, products and
dispatches.

    t    = dispatches · t_dispatch + max(FLOP / peak, stream) / share
    stream = weights / weight rate + 2 · states / activation rate

Weights are read once per call; states are read and written once. A chip reads weights
as they are stored if `weight_streams.csv` says so of their format; other formats are
unpacked to fp16 when the model is loaded. Rates and peaks are published per chip.
`t_dispatch` and `share`, the part of the rates that decoding reaches, are fitted to the
published times of one chip (`CALIBRATED_ON`, in `data/sources/ane_decode.csv`);
`misfits` compares the fit with figures left out of it, those of other chips included.
The result is a prediction and does not depend on this machine."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

from workbench.bundle import PRESETS
from workbench.errors import InputError, check_choice

FIGURE_SOURCES = Path(__file__).parents[2] / "data" / "sources"
CALIBRATED_ON = "M4 Max"
DISPATCH_MS, SHARES = np.arange(0.0, 3.0, 0.02), np.arange(0.4, 1.3, 0.02)
QUANTITIES = {
    "weight stream through Core ML": "weights_gb_s",
    "activation stream": "states_gb_s",
    "fp16 convolution": "tflops",
}


@dataclass(frozen=True)
class Work:
    """The work of one call on the Neural Engine.

    Bytes of weights are as stored, in the format `compress`, a key of `PRESETS`. A
    multiply-add counts as two flops. Dispatches are predictions in sequence."""

    name: str
    weight_bytes: int
    state_bytes: int
    flops: float
    dispatches: int = 1
    compress: str = "fp16"


@dataclass(frozen=True)
class Chip:
    """Published rates of one chip, in GB/s and TFLOPS. `assumed` names the rates that
    are taken from a related chip, since none is published for this one."""

    name: str
    weights_gb_s: float
    states_gb_s: float
    tflops: float
    assumed: tuple[str, ...] = ()

    @property
    def generation(self) -> int:
        """The generation of the M series."""
        return int(self.name[1])


Figure = tuple[str, Work, Chip, float]  # model, work, chip, published ms


@dataclass(frozen=True)
class LinearFit:
    """The model of the module's docstring with its two fitted numbers."""

    dispatch_ms: float
    share: float

    def ms(self, work: Work, chip: Chip) -> float:
        weights_ns = streamed_bytes(work, chip) / chip.weights_gb_s
        states_ns = 2 * work.state_bytes / chip.states_gb_s
        products_ps = work.flops / chip.tflops
        busy_ms = max(products_ps / 1e9, (weights_ns + states_ns) / 1e6)
        return self.dispatch_ms * work.dispatches + busy_ms / self.share


def streams_as(compress: str, chip: Chip) -> str:
    """The format in which a chip reads weights that are stored as `compress`: the same,
    or fp16."""
    first = _table("weight_streams.csv").set_index("compress")["from_generation"]
    return compress if chip.generation >= first[compress] else "fp16"


def streamed_bytes(work: Work, chip: Chip) -> float:
    """Bytes of weights that a chip reads in one call."""
    streamed_bits = PRESETS[streams_as(work.compress, chip)].stored_bits
    return work.weight_bytes * streamed_bits / PRESETS[work.compress].stored_bits


@cache
def chips() -> dict[str, Chip]:
    """Chips whose weight rate is published, by name. A missing rate is that of the same
    generation, else of the latest one before it."""
    rows = _table("chips.csv").replace({"quantity": QUANTITIES})
    rows = rows[rows["quantity"].isin(QUANTITIES.values())]
    rows["mean"] = (rows["low"] + rows["high"]) / 2
    rows["chip"] = rows["chip"].str.split(" and ")  # a row may be of several chips
    rows = rows.explode("chip").replace({"chip": {"Ultra": "M1 Ultra"}})
    rates = rows.pivot_table("mean", "chip", "quantity").sort_index()
    known = rates.notna()
    # alphabetical order is that of generations, the base chip first
    base = rates.groupby(rates.index.str[:2]).transform("first").ffill()
    chips = {}
    for name, rate in rates.fillna(base)[known["weights_gb_s"]].iterrows():
        assumed = tuple(rates.columns[~known.loc[name]])
        chips[name] = Chip(name, **rate, assumed=assumed)
    return chips


def chip(name: str) -> Chip:
    check_choice("chip", name, sorted(chips()))
    return chips()[name]


@cache
def _table(name: str) -> pd.DataFrame:
    path = FIGURE_SOURCES / name
    if not path.is_file():
        needed = "the published figures in data/sources"
        raise InputError("roofline", f"no {path}", needed, "run from a checkout")
    return pd.read_csv(path, keep_default_na=False)


def figures() -> list[Figure]:
    """Every published figure, of all chips."""
    every = []
    for r in _table("ane_decode.csv").itertuples():
        sizes = r.weight_bytes, r.state_bytes, r.flops, r.dispatches
        work = Work(f"{r.model}, {r.part}", *sizes, r.compress)
        every.append((r.model, work, chip(r.chip), r.ms))
    return every


def fit(figures: Iterable[Figure]) -> LinearFit:
    """The model with the least mean |log(predicted / published)|, over a grid of both numbers.

    Only the figures of the chip `CALIBRATED_ON` enter, so that times of two chips are
    not mixed."""
    rows = []
    for _, work, chip, ms in figures:
        if chip.name == CALIBRATED_ON:
            rows.append((work.dispatches, LinearFit(0.0, 1.0).ms(work, chip), ms))
    calls, busy, ms = np.array(rows).T
    waiting = DISPATCH_MS[:, None, None] * calls
    predicted = waiting + busy / SHARES[:, None]  # [dispatch ms, shares, figures]
    error = np.abs(np.log(predicted / ms)).mean(2)
    i, j = np.unravel_index(error.argmin(), error.shape)
    return LinearFit(float(DISPATCH_MS[i]), float(SHARES[j]))


@cache
def calibrated() -> LinearFit:
    return fit(figures())


def misfits() -> pd.DataFrame:
    """Every figure, predicted by a fit without it.

    Returns:
        figure, chip, weights (the format stored, and that streamed), published_ms,
        predicted_ms, misfit (predicted over published, less 1).
    """
    rows, every = [], figures()
    for i, (_, work, on, ms) in enumerate(every):
        predicted = fit(every[:i] + every[i + 1 :]).ms(work, on)
        rows.append(
            {
                "figure": work.name,
                "chip": on.name,
                "weights": _weights(work, on),
                "published_ms": ms,
                "predicted_ms": predicted,
                "misfit": predicted / ms - 1,
            }
        )
    return pd.DataFrame(rows)


def _weights(work: Work, chip: Chip) -> str:
    return f"{work.compress} streamed as {streams_as(work.compress, chip)}"


def predict_ms(works: Iterable[Work], on: str) -> float:
    """The predicted ms of all work, one after the other, on a chip."""
    return sum(calibrated().ms(work, chip(on)) for work in works)


def by_chip(works: list[Work]) -> pd.DataFrame:
    """The prediction of every chip, without host time.

    Returns:
        chip, ms (of one call), tokens_per_s (at one token per call), weights (the
        formats stored and streamed), streamed_mib (per call), assumed (the rates of a
        related chip).
    """
    rows = []
    for name, on in chips().items():
        ms = predict_ms(works, name)
        row = {"chip": name, "ms": ms, "tokens_per_s": 1e3 / ms}
        streamed = sum(streamed_bytes(work, on) for work in works)
        row |= {"weights": _weights(works[0], on), "streamed_mib": streamed / 2**20}
        rows.append(row | {"assumed": ", ".join(on.assumed)})
    return pd.DataFrame(rows)
