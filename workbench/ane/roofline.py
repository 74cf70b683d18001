"""How long a shard should take on a Neural Engine: its bytes, operations and dispatches in,
milliseconds out.

t = dispatches · t_dispatch + max(FLOP / peak, weights / weight stream + 2 · states / activation
stream) / share

Weights are read once, states read and written once a call. How many bytes of weights are read
depends on chip and format: what `weight_streams.csv` does not say a chip streams as stored is
unpacked to fp16 when the model is loaded. Stream rates and peaks are published per chip; t_dispatch
and the share of them that decoding reaches are fitted to the published times of one chip
(`CALIBRATED_ON`, in `data/sources/ane_decode.csv`); `misfits` compares the fit with figures left
out of it, those of other chips included. The result is a prediction, never a measurement, and does
not depend on this machine.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path

import numpy as np
import pandas as pd

import miltorch
from miltorch.graph import Graph
from miltorch.program import Ref
from workbench.bundle import PRESETS, Bundle, Shard
from workbench.errors import InputError, check_choice

FIGURE_SOURCES = Path(__file__).parents[2] / "data" / "sources"
CALIBRATED_ON = "M4 Max"
DISPATCH_MS, SHARES = np.arange(0.0, 3.0, 0.02), np.arange(0.4, 1.3, 0.02)


@dataclass(frozen=True)
class Work:
    """What one call makes the Neural Engine do: bytes of weights as stored and of states,
    multiply-adds counted twice, predictions that wait for each other; the weights' format (of
    `PRESETS`), bytes of the largest value it computes."""

    name: str
    weight_bytes: int
    state_bytes: int
    flops: float
    dispatches: int = 1
    compress: str = "fp16"
    largest_bytes: int = 0


@dataclass(frozen=True)
class Chip:
    """Published rates of one chip; GB/s and TFLOPS are bytes and operations per nanosecond and
    picosecond. `assumed` names the rates that nobody published for it."""

    name: str
    weights_gb_s: float
    states_gb_s: float
    tflops: float
    assumed: tuple[str, ...] = ()

    @property
    def generation(self) -> int:
        """Of the M series."""
        return int(self.name[1])


Figure = tuple[str, Work, Chip, float]  # model, work, chip, published ms


@dataclass(frozen=True)
class LinearFit:
    """The two fitted numbers."""

    dispatch_ms: float
    share: float

    def ms(self, work: Work, chip: Chip) -> float:
        stream = (
            streamed_bytes(work, chip) / chip.weights_gb_s + 2 * work.state_bytes / chip.states_gb_s
        )
        busy = max(work.flops / chip.tflops / 1e9, stream / 1e6)
        return self.dispatch_ms * work.dispatches + busy / self.share


@cache
def _first_generations() -> dict[str, int]:
    """Format → the generation from which it is streamed as stored."""
    return _table("weight_streams.csv").set_index("compress")["from_generation"].to_dict()


def streams_as(compress: str, chip: Chip) -> str:
    """The format in which a chip reads weights that are stored as `compress`: the same, or fp16."""
    if chip.generation >= _first_generations()[compress]:
        return compress
    return "fp16"


def streamed_bytes(work: Work, chip: Chip) -> float:
    """Bytes of weights that a chip reads in one call."""
    stored, streamed = (PRESETS[n] for n in (work.compress, streams_as(work.compress, chip)))
    return work.weight_bytes * streamed.stored_bits / stored.stored_bits


def spills(work: Work, chip: Chip) -> bool | None:
    """Whether the largest value exceeds the chip's working set; None between what is published for
    the oldest and the newest chip, where the chip's own is not."""
    rows = _table("chips.csv")
    sizes = rows[rows["quantity"] == "working set before it spills"].set_index("chip")["low"] * 1e6
    least, most = [sizes.get(f"M{chip.generation}")] * 2
    if least is None:
        least, most = sizes.min(), sizes.max()
    if least < work.largest_bytes <= most:
        return None
    return bool(work.largest_bytes > most)


@cache
def chips() -> dict[str, Chip]:
    """Chips whose weight stream is published, by name; a rate that nobody published is its nearest
    relative's."""
    rows = _table("chips.csv")
    rows["mean"] = (rows["low"] + rows["high"]) / 2
    rows = (
        rows.assign(chip=rows["chip"].str.split(" and "))
        .explode("chip")
        .replace("Ultra", "M1 Ultra")
    )
    rates = {q: group.set_index("chip")["mean"].to_dict() for q, group in rows.groupby("quantity")}
    others = {"states_gb_s": rates["activation stream"], "tflops": rates["fp16 convolution"]}
    chips = {}
    for name, rate in rates["weight stream through Core ML"].items():
        assumed = tuple(other for other, known in others.items() if name not in known)
        nearest = (_nearest(known, name) for known in others.values())
        chips[name] = Chip(name, rate, *nearest, assumed)
    return chips


def _nearest(rates: dict[str, float], chip: str) -> float:
    """A chip's own rate, else its generation's, else the generation's before."""
    older = []
    for g in range(int(chip[1]), 0, -1):
        for n in sorted(rates):
            if n.startswith(f"M{g}"):
                older.append(n)
    return rates[chip if chip in rates else older[0]]


def chip(name: str) -> Chip:
    check_choice("chip", name, sorted(chips()))
    return chips()[name]


def _table(name: str) -> pd.DataFrame:
    path = FIGURE_SOURCES / name
    if not path.is_file():
        raise InputError(
            "roofline", f"no {path}", "the published figures in data/sources", "run from a checkout"
        )
    return pd.read_csv(path, keep_default_na=False)


def figures() -> list[Figure]:
    """Every published figure, whichever chip's."""
    every = []
    for r in _table("ane_decode.csv").itertuples():
        name = f"{r.model}, {r.part}"
        work = Work(name, r.weight_bytes, r.state_bytes, r.flops, r.dispatches, r.compress)
        every.append((r.model, work, chip(r.chip), r.ms))
    return every


def fit(figures: Iterable[Figure]) -> LinearFit:
    """The model with the least mean |log(predicted / published)|, over a grid of both numbers.

    It is calibrated on the figures of one chip alone: times of two chips are not mixed.
    """
    numbers = [
        (work.dispatches, LinearFit(0.0, 1.0).ms(work, chip), ms)
        for _, work, chip, ms in figures
        if chip.name == CALIBRATED_ON
    ]
    calls, busy, ms = np.array(numbers).T
    models = []
    for d in DISPATCH_MS:
        for s in SHARES:
            models.append(LinearFit(float(d), float(s)))
    predicted = np.array([m.dispatch_ms * calls + busy / m.share for m in models])
    return models[int(np.abs(np.log(predicted / ms)).mean(1).argmin())]


@cache
def calibrated() -> LinearFit:
    return fit(figures())


def misfits(by_model: bool = False) -> pd.DataFrame:
    """Every figure predicted by a fit from which it was left out (`by_model`: with all others of
    its model).

    Returns:
        figure, chip, weights (the format stored, and that streamed), published_ms, predicted_ms,
        misfit (predicted over published, less 1).
    """
    rows, every = [], figures()
    for figure in every:
        model, work, on, ms = figure
        others = (f for f in every if (f[0] != model if by_model else f is not figure))
        rows.append((work.name, on.name, _weights(work, on), ms, fit(others).ms(work, on)))
    columns = ["figure", "chip", "weights", "published_ms", "predicted_ms"]
    table = pd.DataFrame(rows, columns=columns)
    return table.assign(misfit=table["predicted_ms"] / table["published_ms"] - 1)


def _weights(work: Work, chip: Chip) -> str:
    return f"{work.compress} streamed as {streams_as(work.compress, chip)}"


def bundle_work(bundle: Bundle, T: int = 1) -> list[Work]:
    """What one call of T tokens makes each shard do; of experts a token runs one a layer, of head
    slices all at once."""
    layers = [shard for shard in bundle.manifest.shards if shard.kind in ("layers", "router")]
    by_size = sorted(bundle.shards("expert"), key=lambda shard: shard.bytes)
    largest = {shard.layers[0]: shard for shard in by_size}  # of each layer's experts
    works = [work_of(bundle, shard, T) for shard in [*layers, *largest.values()]]
    heads = [work_of(bundle, shard, T) for shard in bundle.shards("head")]
    if not heads:  # another exporter's packages may have it behind their last layer
        return works
    weights = sum(h.weight_bytes for h in heads)
    flops = sum(h.flops for h in heads)
    largest = max(h.largest_bytes for h in heads)
    return [*works, Work("head", weights, 0, flops, 1, bundle.manifest.options.compress, largest)]


def work_of(bundle: Bundle, shard: Shard, T: int = 1) -> Work:
    """What one call of T tokens makes one shard do, from its program and files."""
    program = miltorch.read(bundle.package(shard))
    weights = sum(f.bytes for f in shard.files if f.path.endswith(".bin"))
    states = sum(2 * prod(t.shape) for t in program.states.values())
    results = (t for op in Graph(program).ops for _, t in op.outputs if t.dtype == "FLOAT16")
    largest = max((2 * prod(n or T for n in t.shape) for t in results), default=0)
    compress = bundle.manifest.options.compress
    return Work(shard.name, weights, states, flops(program, T), 1, compress, largest)


def flops(program: miltorch.Program, T: int) -> float:
    """Operations of a program's products at T columns, a multiply-add as two.

    A program does not say what its varying sizes are: they are T, and what a reshape makes of it
    where it folds heads in.
    """
    types, total = program.inputs | program.states, 0.0
    varying = dict.fromkeys(types, T)  # value → its size on the axis that varies

    def sizes(value) -> list[int]:
        if not isinstance(value, Ref):
            return list(np.shape(value))
        return [n or varying[value.name] for n in types[value.name].shape]

    for op in program.block.walk():
        names = (v.name for v in op.inputs.values() if isinstance(v, Ref))
        size = next((varying[name] for name in names if None in types[name].shape), T)
        for name, declared in op.outputs:
            if op.kind == "reshape":
                size = prod(sizes(op.inputs["x"])) // prod(n for n in declared.shape if n)
            types[name], varying[name] = declared, size
        if op.kind in ("conv", "linear", "matmul"):
            output = sizes(Ref(op.outputs[0][0]))
            if op.kind == "matmul":
                terms = prod(sizes(op.inputs["x"])[-2:]) / output[-2]
            else:
                terms = prod(sizes(op.inputs["weight"])[1:])
            total += 2 * prod(output) * terms
    return total


def predict_ms(works: Iterable[Work], on: str) -> pd.DataFrame:
    """shard, ms (predicted), of every piece of work on a chip."""
    return pd.DataFrame([{"shard": w.name, "ms": calibrated().ms(w, chip(on))} for w in works])


def by_chip(works: Sequence[Work]) -> pd.DataFrame:
    """chip, ms of one call and tok/s of one token a call, predicted, host time left out; weights:
    the format stored and that streamed, and MiB of them a call; whether a value spills (null: not
    known of this chip); which rates were assumed."""
    rows, largest = [], max(works, key=lambda work: work.largest_bytes)
    for name, on in sorted(chips().items()):
        ms = predict_ms(works, name)["ms"].sum()
        row = {"chip": name, "ms": ms, "tokens_per_s": 1e3 / ms, "weights": _weights(works[0], on)}
        row["streamed_mib"] = sum(streamed_bytes(work, on) for work in works) / 2**20
        row["spills"], row["assumed"] = spills(largest, on), ", ".join(on.assumed)
        rows.append(row)
    return pd.DataFrame(rows).astype({"spills": object})
