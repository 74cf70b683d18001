"""Predicts the milliseconds of a shard on a Neural Engine from its bytes, operations,
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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
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
    """The work of one call on the Neural Engine.

    Bytes of weights are as stored, in the format `compress`, a key of `PRESETS`. A
    multiply-add counts as two flops. Dispatches are predictions in sequence.
    `largest_bytes` is the size of the largest value that is computed."""

    name: str
    weight_bytes: int
    state_bytes: int
    flops: float
    dispatches: int = 1
    compress: str = "fp16"
    largest_bytes: int = 0


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


@cache
def _first_generations() -> dict[str, int]:
    """Format → the generation from which it is streamed as stored."""
    return (
        _table("weight_streams.csv").set_index("compress")["from_generation"].to_dict()
    )


def streams_as(compress: str, chip: Chip) -> str:
    """The format in which a chip reads weights that are stored as `compress`: the same,
    or fp16."""
    if chip.generation >= _first_generations()[compress]:
        return compress
    return "fp16"


def streamed_bytes(work: Work, chip: Chip) -> float:
    """Bytes of weights that a chip reads in one call."""
    streamed_bits = PRESETS[streams_as(work.compress, chip)].stored_bits
    return work.weight_bytes * streamed_bits / PRESETS[work.compress].stored_bits


def spills(work: Work, chip: Chip) -> bool | None:
    """Whether the largest value exceeds the chip's working set.

    If none is published for the chip's generation, the answer is None for values
    between the smallest and the largest published working set."""
    rows = _table("chips.csv").set_index("chip")
    sizes = rows.loc[rows["quantity"] == "working set before it spills", "low"] * 1e6
    own = f"M{chip.generation}"
    if own in sizes:
        sizes = sizes[[own]]
    if sizes.min() < work.largest_bytes <= sizes.max():
        return None
    return bool(work.largest_bytes > sizes.max())


@cache
def chips() -> dict[str, Chip]:
    """Chips whose weight rate is published, by name; a missing rate is its nearest
    relative's."""
    rows = _table("chips.csv")
    rows["mean"] = (rows["low"] + rows["high"]) / 2
    rows["chip"] = rows["chip"].str.split(" and ")  # a row may be of several chips
    rows = rows.explode("chip").replace("Ultra", "M1 Ultra")
    rates = {}
    for quantity, group in rows.groupby("quantity"):
        rates[quantity] = group.set_index("chip")["mean"].to_dict()
    related = {
        "states_gb_s": rates["activation stream"],
        "tflops": rates["fp16 convolution"],
    }
    chips = {}
    for name, weights in rates["weight stream through Core ML"].items():
        own, assumed = {}, []
        for rate, published in related.items():
            own[rate] = _nearest(published, name)
            if name not in published:
                assumed.append(rate)
        chips[name] = Chip(name, weights, **own, assumed=tuple(assumed))
    return chips


def _nearest(rates: dict[str, float], chip: str) -> float:
    """A chip's own rate, else that of its generation, else of the latest generation
    before it."""
    if chip in rates:
        return rates[chip]
    for generation in range(int(chip[1]), 0, -1):
        for name in sorted(rates):
            if name.startswith(f"M{generation}"):
                return rates[name]
    raise AssertionError(f"no rate of {chip} or of an older chip")


def chip(name: str) -> Chip:
    check_choice("chip", name, sorted(chips()))
    return chips()[name]


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
        rows.append((work.name, on.name, _weights(work, on), ms, predicted))
    columns = ["figure", "chip", "weights", "published_ms", "predicted_ms"]
    table = pd.DataFrame(rows, columns=columns)
    return table.assign(misfit=table["predicted_ms"] / table["published_ms"] - 1)


def _weights(work: Work, chip: Chip) -> str:
    return f"{work.compress} streamed as {streams_as(work.compress, chip)}"


def bundle_work(bundle: Bundle, T: int = 1) -> list[Work]:
    """The work of one call of T tokens, by shard: one expert per layer, and all head
    slices as one piece of work."""
    shards = bundle.manifest.shards
    layers = [shard for shard in shards if shard.kind in ("layers", "router")]
    by_size = sorted(bundle.shards("expert"), key=lambda shard: shard.bytes)
    largest = {shard.layers[0]: shard for shard in by_size}  # of each layer
    works = [work_of(bundle, shard, T) for shard in [*layers, *largest.values()]]
    head = Work("head", 0, 0, 0.0, 1, bundle.manifest.options.compress)
    for shard in bundle.shards("head"):
        part = work_of(bundle, shard, T)
        head = replace(
            head,
            weight_bytes=head.weight_bytes + part.weight_bytes,
            flops=head.flops + part.flops,
            largest_bytes=max(head.largest_bytes, part.largest_bytes),
        )
    # other exporters may have the head in the last layer's package
    if head.weight_bytes:
        works.append(head)
    return works


def work_of(bundle: Bundle, shard: Shard, T: int = 1) -> Work:
    """The work of one call of T tokens of one shard, from its program and files."""
    program = miltorch.read(bundle.package(shard))
    weights = sum(f.bytes for f in shard.files if f.path.endswith(".bin"))
    states = sum(2 * prod(t.shape) for t in program.states.values())
    largest = 0
    for op in Graph(program).ops:
        for _, result in op.outputs:
            if result.dtype == "FLOAT16":
                largest = max(largest, 2 * prod(n or T for n in result.shape))
    compress = bundle.manifest.options.compress
    return Work(shard.name, weights, states, flops(program, T), 1, compress, largest)


def flops(program: miltorch.Program, T: int) -> float:
    """Flops of a program's products at T columns; a multiply-add counts as two.

    The program leaves varying sizes open. They are T, or after a reshape the size that
    the other axes leave."""
    types, total = program.inputs | program.states, 0.0
    varying = dict.fromkeys(types, T)  # value → its size on the axis that varies

    def sizes(value) -> list[int]:
        if not isinstance(value, Ref):
            return list(np.shape(value))
        return [n or varying[value.name] for n in types[value.name].shape]

    for op in program.block.walk():
        size = T
        for value in reversed(op.inputs.values()):  # the first one that varies decides
            if isinstance(value, Ref) and None in types[value.name].shape:
                size = varying[value.name]
        for name, declared in op.outputs:
            if op.kind == "reshape":
                size = prod(sizes(op.inputs["x"])) // prod(
                    n for n in declared.shape if n
                )
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
    """The predicted ms of every piece of work on a chip: columns shard, ms."""
    rows = [(work.name, calibrated().ms(work, chip(on))) for work in works]
    return pd.DataFrame(rows, columns=["shard", "ms"])


def by_chip(works: Sequence[Work]) -> pd.DataFrame:
    """The prediction of every chip, without host time.

    Returns:
        chip, ms (of one call), tokens_per_s (at one token per call), weights (the
        formats stored and streamed), streamed_mib (per call), spills (null: not known
        of this chip), assumed (the rates of a related chip).
    """
    rows, largest = [], max(works, key=lambda work: work.largest_bytes)
    for name, on in sorted(chips().items()):
        ms = predict_ms(works, name)["ms"].sum()
        streamed = sum(streamed_bytes(work, on) for work in works)
        rows.append(
            {
                "chip": name,
                "ms": ms,
                "tokens_per_s": 1e3 / ms,
                "weights": _weights(works[0], on),
                "streamed_mib": streamed / 2**20,
                "spills": spills(largest, on),
                "assumed": ", ".join(on.assumed),
            }
        )
    return pd.DataFrame(rows).astype({"spills": object})
