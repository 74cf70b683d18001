"""Traces the range of every operation's results against fp16's limits: one row per
result.

The interpreter calls a hook with every result. Arithmetic differs by compute unit, so a
program runs in three precisions: `exact` has the true magnitudes, `declared` rounds
each result once, and `narrow` also rounds partial sums. Bundles are traced over a
prompt, any other package over named or random inputs."""

import math
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch

import miltorch
from miltorch.interpret import MOVES
from workbench.bundle import Bundle, Shard
from workbench.bundle.names import MAX_FP16, MIN_NORMAL
from workbench.check import gates
from workbench.decode import Decoder

# a departure is the difference of `declared` from the same call in `exact`, which runs
# first
ORDER = ("exact", "declared", "narrow")
MAX_MASK = 1 << 22  # elements of the largest constant that is searched for infs
ROUNDING = 2.0**-11  # half a unit in the last place of fp16, relative to the value


@dataclass
class Range:
    """The range of one floating-point result over all calls: largest finite magnitude,
    counts of inf, NaN, subnormal and all elements. `inf_at` and `nan_at` are the
    running numbers of the results in which each was first seen (null: never)."""

    shard: str
    op: str  # MIL name
    kind: str
    module: str  # source module, "" if the package has none
    value: str
    max_abs: float = 0.0
    infs: int = 0
    nans: int = 0
    subnormals: int = 0
    elements: int = 0
    inf_at: int | None = None
    nan_at: int | None = None

    def add(self, x: torch.Tensor, now: int) -> None:
        """Adds the elements of a result, the `now`-th of the trace."""
        magnitude = x.abs()
        peak = 0.0
        if x.numel():
            peak = float(magnitude.max())  # nan if any element is
        if not math.isfinite(peak):
            self.nans += int(magnitude.isnan().sum())
            self.infs += int(magnitude.isinf().sum())
            if self.nans and self.nan_at is None:
                self.nan_at = now
            if self.infs and self.inf_at is None:
                self.inf_at = now
            peak = float(magnitude.nan_to_num(0.0, 0.0).max())
        self.max_abs = max(self.max_abs, peak)
        subnormal = (magnitude < MIN_NORMAL) & (magnitude > 0)
        self.subnormals += int(subnormal.sum())
        self.elements += x.numel()


@dataclass
class Ranges:
    """Ranges of results by (shard, value); `count` results so far."""

    results: dict[tuple[str, str], Range] = field(default_factory=dict)
    count: int = 0

    def add(self, source: dict[str, str], value: str, x: torch.Tensor) -> None:
        """Adds a result; `source` has its shard, MIL operation, kind and module."""
        empty = Range(**source, value=value)
        of_value = self.results.setdefault((source["shard"], value), empty)
        of_value.add(x, self.count)
        self.count += 1

    def first(self, what: str) -> dict | None:
        """The operation whose result was the first with an `inf` or `nan`; None if
        there is none."""
        at = f"{what}_at"
        frame = self.frame().dropna(subset=at)
        if frame.empty:
            return None
        first = frame.loc[frame[at].astype(int).idxmin()]
        return first[["shard", "op", "kind", "module"]].to_dict()

    def frame(self) -> pd.DataFrame:
        """One row per result in order of execution, with `headroom_bits`: log2(65504 /
        max_abs), inf if all values are zero, -inf if one is inf."""
        frame = pd.DataFrame(list(self.results.values()))
        with np.errstate(divide="ignore"):
            bits = np.log2(MAX_FP16 / frame["max_abs"])
        frame["headroom_bits"] = bits.mask(frame["infs"] > 0, -np.inf)
        return frame


@dataclass
class Trace:
    """`ranges` by precision, and the first operation whose `declared` result differs
    from `exact` by more than its own rounding (null: none)."""

    ranges: dict[str, Ranges]
    departure: dict | None

    def frame(self) -> pd.DataFrame:
        """One row per result: its range in exact arithmetic, or in the only precision
        that ran, and whether it is finite in the others."""
        first, *others = sorted(self.ranges, key=ORDER.index)
        frame = self.ranges[first].frame()
        for precision in others:
            other = self.ranges[precision].frame()
            finite = f"finite_{precision}"
            other[finite] = (other["infs"] + other["nans"]) == 0
            frame = frame.merge(other[["shard", "value", finite]], how="left")
        return frame.drop(columns=["inf_at", "nan_at"])

    def _first(self, precision: str) -> dict[str, dict | None]:
        alone = next(iter(self.ranges.values()))
        ranges = self.ranges.get(precision, alone)
        return {"first_inf": ranges.first("inf"), "first_nan": ranges.first("nan")}

    def gates(self) -> list[gates.Gate]:
        """Gates: every value is finite in `declared`, and in `narrow`."""
        ways = {
            "declared": "one rounding per result",
            "narrow": "sums rounded to fp16 every 32 terms",
        }
        results = []
        for precision, way in ways.items():
            if precision not in self.ranges:
                continue
            places = []
            for what, at in self._first(precision).items():
                if at:
                    places.append(f"{what.replace('_', ' ')} at {place(at)}")
            name = f"{precision}_is_finite"
            fine = f"{way}: every value is finite"
            results.append(gates.none(name, places, fine, f"{way}: "))
        return results

    def json(self) -> dict:
        frame = self.frame()
        results = self.gates()
        worst = frame.nlargest(10, "max_abs")
        columns = ["shard", "op", "kind", "module", "max_abs", "headroom_bits"]
        return {
            "verdict": gates.verdict(results),
            "gates": [g.json() for g in results],
            "ops": len(frame),
            **self._first("declared"),
            "narrow": self._first("narrow") if "narrow" in self.ranges else None,
            "first_departure": self.departure,
            "min_headroom_bits": gates.jsonable(float(frame["headroom_bits"].min())),
            "worst": gates.records(worst[columns]),
        }


def place(at: dict) -> str:
    """An operation in words: its MIL name, kind, source module and shard."""
    source = at["kind"]
    if at["module"]:
        source += f", {at['module']}"
    return f"{at['op']} ({source}) of {at['shard']}"


def _floats(op, outputs) -> dict[str, torch.Tensor]:
    """An operation's floating-point results by name."""
    floats = {}
    for (name, _), x in zip(op.outputs, outputs, strict=True):
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            floats[name] = x
    return floats


class Departure:
    """Compares the results of `declared` with those of `exact`, call by call, until one
    differs by more than one rounding."""

    def __init__(self):
        self.exact: dict[tuple[str, str], torch.Tensor] = {}
        self.first: dict | None = None
        # by shard and value: the places of infs that come from an input or a constant,
        # such as a mask's −inf
        self.inherited: dict[tuple[str, str], torch.Tensor] = {}

    def feed(self, shard: str, values: dict) -> None:
        """Records the infs of inputs or constants; an inf that descends from them is no
        overflow."""
        for name, value in values.items():
            infs = torch.as_tensor(value).isinf()  # integers have none
            if infs.any():
                self.inherited[shard, name] = infs

    def _without_inherited(self, shard: str, value: str, x: torch.Tensor):
        """A result with 0 in place of infs that descend from an input's. An inf at a
        place where `exact` has none is an overflow and stays."""
        infs = self.inherited.get((shard, value))
        if infs is None or infs.shape != x.shape:
            return x
        return x.masked_fill(infs & x.isinf(), 0.0)

    def _inherit(self, shard: str, op, value: str, x: torch.Tensor) -> None:
        """Records the infs of an exact result that come from an operand: all of them if
        the operation only moves values, else those at the places of an operand's
        infs."""
        self.inherited.pop((shard, value), None)
        sources = []
        for name in op.reads():
            if (shard, name) in self.inherited:
                sources.append(self.inherited[shard, name])
        infs = x.isinf()
        if not sources or not infs.any():
            return
        if op.kind not in MOVES:
            # of operands with other shapes the places of their infs in the result are
            # not known
            with suppress(RuntimeError):
                sources = torch.broadcast_tensors(infs, *sources)[1:]
                infs &= torch.stack(sources).any(0)
        self.inherited[shard, value] = infs

    def hook(self, precision: str, ranges: Ranges, shard: str, modules: dict[str, str]):
        """The hook of a program run in `precision`: records ranges, and compares
        results until the first departure."""

        def record(op, outputs):
            source = {"shard": shard, "op": op.name, "kind": op.kind}
            for value, x in _floats(op, outputs).items():
                source["module"] = modules.get(value, "")
                if self.inherited and precision == "exact":
                    self._inherit(shard, op, value, x)
                x = self._without_inherited(shard, value, x)
                ranges.add(source, value, x)
                if self.first is not None:
                    continue
                if precision == "exact":
                    self.exact[shard, value] = x
                elif precision == "declared" and (shard, value) in self.exact:
                    reference = self.exact.pop((shard, value))
                    self._compare(source, reference, x)

        return record

    def _compare(
        self, source: dict[str, str], reference: torch.Tensor, x: torch.Tensor
    ) -> None:
        rounding = ROUNDING * float(reference.abs().max())
        error = float((x - reference).abs().max())
        if not error <= rounding:
            roundings = error / rounding if rounding else math.inf
            self.first = source | {"roundings": gates.jsonable(roundings)}


def trace_bundle(bundle: Bundle, ids: Sequence[int], tile: int | None = None) -> Trace:
    """Traces every shard of a bundle over `ids` in calls of `tile` tokens (default:
    t_max).

    Of a Core AI program only the values that Apple's interpreter logs are traced, in
    its own arithmetic."""
    if bundle.manifest.options.target == "coreai":
        decoders = [Decoder(bundle, "coreai")]
    else:
        decoders = [Decoder(bundle, "portable", precision) for precision in ORDER]
    for decoder in decoders:
        decoder.begin()
    return trace_ranges({d.precision: d for d in decoders}, ids, tile)


def trace_decoder(decoder: Decoder, ids: Sequence[int]) -> Ranges:
    """Ranges of every shard of a portable decoder, routed experts included, over one
    prompt from a fresh state; the decoder's own sequences stay as they were."""
    with decoder.set_aside():
        decoder.begin()
        return trace_ranges({decoder.precision: decoder}, ids).ranges[decoder.precision]


def trace_ranges(
    decoders: dict[str, Decoder], ids: Sequence[int], tile: int | None = None
) -> Trace:
    """Traces `ids` as the continuation of every decoder's sequences, call by call in
    the order of `decoders`.

    Args:
        decoders: portable decoders by precision, `exact` before `declared`.
    """
    departure = Departure()
    ranges = {precision: Ranges() for precision in decoders}
    size = tile or next(iter(decoders.values())).options.t_max

    def hook(precision: str, shard: Shard):
        return departure.hook(precision, ranges[precision], shard.name, shard.modules)

    with ExitStack() as hooks:
        for precision, decoder in decoders.items():
            hooks.enter_context(decoder.hooked(partial(hook, precision)))
        for start in range(0, len(ids), size):
            for decoder in decoders.values():
                chunk = list(ids[start : start + size])
                batch = [chunk] * decoder.options.batch
                hidden = decoder.advance(batch, len(chunk))
                decoder.logits(hidden[:, :, : len(chunk)])
    return Trace(ranges, departure.first)


def trace_package(
    path: str | Path,
    inputs: dict[str, np.ndarray] | None = None,
    seed: int = 0,
    function: str | None = None,
) -> Trace:
    """Traces one call of any ML Program package from a fresh state.

    Args:
        inputs: values by name; missing inputs are random normal, or zero if integers,
            at the default shape.
        function: the function to run (default: the package's own default).
    """
    program = miltorch.read(path, function)
    name = Path(path).stem
    rng = np.random.default_rng(seed)
    tensors = {}
    arrays = _random_inputs(program, rng) | (inputs or {})
    for value, array in arrays.items():
        tensors[value] = torch.from_numpy(np.array(array))
    departure = Departure()
    ranges = {precision: Ranges() for precision in ORDER}
    for precision in ranges:
        executable = miltorch.Executable(program, precision)
        if precision == "exact":
            departure.feed(name, tensors | small_constants(executable))
        hook = departure.hook(precision, ranges[precision], name, {})
        executable.run(tensors, executable.make_state(), hook)
    return Trace(ranges, departure.first)


def small_constants(executable: miltorch.Executable) -> dict[str, torch.Tensor]:
    """A program's constants of at most `MAX_MASK` elements, which may be masks."""
    tensors = {}
    for name, value in executable.body.constants.items():
        if isinstance(value, torch.Tensor) and value.numel() <= MAX_MASK:
            tensors[name] = value
    return tensors


def _random_inputs(program: miltorch.Program, rng) -> dict[str, np.ndarray]:
    """Random normal inputs of a program at their default shapes, zeros for integers."""
    inputs = program.description.input
    shapes = {entry.name: list(entry.type.multiArrayType.shape) for entry in inputs}
    values = {}
    for name, kind in program.inputs.items():
        if kind.dtype.startswith("FLOAT"):
            normal = rng.standard_normal(shapes[name])
            values[name] = normal.astype(np.float32)
        else:
            values[name] = np.zeros(shapes[name], np.int32)
    return values
