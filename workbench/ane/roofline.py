"""How long a shard should take on a Neural Engine: its bytes, operations and dispatches in, milliseconds out.

t = dispatches · t_dispatch + max(FLOP / peak, weights / weight stream + 2 · states / activation stream) / share

Weights are read once, states read and written once a call. Stream rates and peaks are published per chip; t_dispatch and
the share of them that decoding reaches are fitted to the published times of one chip (`CALIBRATED_ON`, in
`data/sources/ane_decode.csv`), and `judged` says how far off the fit is on figures it has not seen, other chips' too. A prediction, never a measurement; knows nothing of this machine.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path

import numpy as np
import pandas as pd

import miltorch
from miltorch.program import Ref
from workbench.bundle import Bundle, Shard
from workbench.errors import InputError

FIGURE_SOURCES = Path(__file__).parents[2] / "data" / "sources"
CALIBRATED_ON = "M4 Max"
DISPATCH_MS, SHARES = np.arange(0.0, 3.0, 0.02), np.arange(0.4, 1.3, 0.02)


@dataclass(frozen=True)
class Work:
    """What one call makes the Neural Engine do: bytes of weights and states, multiply-adds counted twice, predictions
    that wait for each other."""

    name: str
    weight_bytes: int
    state_bytes: int
    flops: float
    dispatches: int = 1


@dataclass(frozen=True)
class Chip:
    """Published rates of one chip; GB/s and TFLOPS are bytes and operations per nanosecond and picosecond. `assumed`
    names the rates that nobody published for it."""

    name: str
    weights_gb_s: float
    states_gb_s: float
    tflops: float
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True)
class LinearFit:
    """The two fitted numbers."""

    dispatch_ms: float
    share: float

    def ms(self, work: Work, chip: Chip) -> float:
        stream = (work.weight_bytes / chip.weights_gb_s + 2 * work.state_bytes / chip.states_gb_s) / 1e6
        return self.dispatch_ms * work.dispatches + max(work.flops / chip.tflops / 1e9, stream) / self.share


@cache
def chips() -> dict[str, Chip]:
    """Chips whose weight stream is published, by name; what is not known of one is its nearest relative's."""
    rows = _table("chips.csv")
    rows["mean"] = (rows["low"] + rows["high"]) / 2
    rows = rows.assign(chip=rows["chip"].str.split(" and ")).explode("chip")
    rows["chip"] = rows["chip"].replace("Ultra", "M1 Ultra")
    known = {q: group.set_index("chip")["mean"].to_dict() for q, group in rows.groupby("quantity")}
    activation, peak = known["activation stream"], known["fp16 convolution"]
    return {name: Chip(name, rate, _nearest(activation, name), _nearest(peak, name),
                       ("states_gb_s",) * (name not in activation) + ("tflops",) * (name not in peak))
            for name, rate in known["weight stream through Core ML"].items()}  # fmt: skip


def _nearest(known: dict[str, float], chip: str) -> float:
    """A chip's own figure, else its generation's, else the generation's before."""
    generation = int(chip[1])
    order = [chip, *(n for g in range(generation, 0, -1) for n in sorted(known) if n.startswith(f"M{g}"))]
    return next(known[name] for name in order if name in known)


def chip(name: str) -> Chip:
    if name not in chips():
        raise InputError("chip", repr(name), f"one of {', '.join(sorted(chips()))}", "name one of these")
    return chips()[name]


def _table(name: str) -> pd.DataFrame:
    path = FIGURE_SOURCES / name
    if not path.is_file():
        raise InputError("roofline", f"no {path}", "the published figures in data/sources", "run from a checkout")
    return pd.read_csv(path, keep_default_na=False)


def figures() -> list[tuple[str, Work, Chip, float]]:
    """(model, work, chip, published ms) of every figure, whichever chip's."""
    return [(r.model, Work(f"{r.model}, {r.part}", r.weight_bytes, r.state_bytes, r.flops, r.dispatches), chip(r.chip), r.ms)
            for r in _table("ane_decode.csv").itertuples()]  # fmt: skip


def fit(known: Sequence[tuple[str, Work, Chip, float]]) -> LinearFit:
    """The model with the least mean |log(predicted / published)|, over a grid of both numbers."""
    models = [LinearFit(float(d), float(s)) for d in DISPATCH_MS for s in SHARES]
    fixed = np.array([LinearFit(0.0, 1.0).ms(work, chip) for _, work, chip, _ in known])
    calls, ms = np.array([w.dispatches for _, w, _, _ in known]), np.array([ms for *_, ms in known])
    predicted = np.array([m.dispatch_ms * calls + fixed / m.share for m in models])
    return models[int(np.abs(np.log(predicted / ms)).mean(1).argmin())]


def of_one_chip(known: Iterable[tuple[str, Work, Chip, float]]) -> list[tuple[str, Work, Chip, float]]:
    """The figures to calibrate on: those of one chip, since times of two are not mixed."""
    return [figure for figure in known if figure[2].name == CALIBRATED_ON]


@cache
def calibrated() -> LinearFit:
    return fit(of_one_chip(figures()))


def judged(by_model: bool = False) -> pd.DataFrame:
    """Every figure predicted by a fit that has not seen it (`by_model`: nor any other of its model).

    Returns:
        figure, chip, published_ms, predicted_ms, misfit (predicted over published, less 1).
    """
    every, rows = figures(), []
    for one in every:
        rest = [f for f in every if (f[0] != one[0] if by_model else f is not one)]
        model, work, on, ms = one
        predicted = fit(of_one_chip(rest)).ms(work, on)
        rows.append({"figure": work.name, "chip": on.name, "published_ms": ms, "predicted_ms": predicted})
    frame = pd.DataFrame(rows)
    return frame.assign(misfit=frame["predicted_ms"] / frame["published_ms"] - 1)


def bundle_work(bundle: Bundle, T: int = 1) -> list[Work]:
    """What one call of T tokens makes each shard do; of experts a token runs one a layer, of head slices all at once."""
    every = [work_of(bundle, shard, T) for shard in bundle.manifest.shards if shard.kind in ("layers", "router")]
    experts: dict[int, list[Shard]] = {}
    for shard in bundle.shards("expert"):
        experts.setdefault(shard.layers[0], []).append(shard)
    every += [work_of(bundle, max(group, key=lambda s: s.bytes), T) for group in experts.values()]
    heads = [work_of(bundle, shard, T) for shard in bundle.shards("head")]
    return [*every, Work("head", sum(h.weight_bytes for h in heads), 0, sum(h.flops for h in heads))]


def work_of(bundle: Bundle, shard: Shard, T: int = 1) -> Work:
    """What one call of T tokens makes one shard do, from its program and files."""
    program = miltorch.read(bundle.package(shard))
    states = sum(2 * prod(t.shape) for t in program.states.values())
    return Work(shard.name, sum(f.bytes for f in shard.files if f.path.endswith(".bin")), states, flops(program, T))


def flops(program: miltorch.Program, T: int) -> float:
    """Operations of a program's products at T columns, a multiply-add as two.

    A program does not say what its varying sizes are: they are T, and what a reshape makes of it where it folds heads in.
    """
    types = program.inputs | program.states
    varying = {name: T for name in types}  # value → its size on the axis that varies
    total = 0.0

    def sizes(value) -> list[int]:
        return [n or varying[value.name] for n in types[value.name].shape] if isinstance(value, Ref) else list(np.shape(value))

    for op in program.block.walk():
        values = [v for v in op.inputs.values() if isinstance(v, Ref)]
        size = next((varying[v.name] for v in values if None in types[v.name].shape), T)
        for name, declared in op.outputs:
            if op.kind == "reshape":
                size = prod(sizes(op.inputs["x"])) // prod(n for n in declared.shape if n)
            types[name], varying[name] = declared, size
        if op.kind in ("conv", "linear", "matmul"):
            made = sizes(Ref(op.outputs[0][0]))
            terms = prod(sizes(op.inputs["x"])[-2:]) / made[-2] if op.kind == "matmul" else prod(sizes(op.inputs["weight"])[1:])
            total += 2 * prod(made) * terms
    return total


def predict_ms(works: Iterable[Work], on: str) -> pd.DataFrame:
    """shard, ms (predicted), of every piece of work on a chip."""
    model, chosen = calibrated(), chip(on)
    return pd.DataFrame([{"shard": w.name, "ms": model.ms(w, chosen)} for w in works])


def by_chip(works: Sequence[Work], T: int = 1) -> pd.DataFrame:
    """chip, ms of one call and tok/s of T tokens a call, predicted, host time left out; which rates were assumed."""
    rows = [{"chip": name, "ms": predict_ms(works, name)["ms"].sum()} for name in sorted(chips())]
    frame = pd.DataFrame(rows).assign(tokens_per_s=lambda f: T * 1e3 / f["ms"])
    return frame.assign(assumed=[", ".join(chips()[name].assumed) for name in frame["chip"]])
