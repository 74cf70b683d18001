"""Traces the range of every operation's results against fp16's limits: one row per
result.

The interpreter calls a hook with every result. Arithmetic differs by compute unit, so a
program runs in three precisions: `exact` has the true magnitudes, `declared` rounds
each result once, and `narrow` also rounds partial sums. Bundles are traced over a
prompt, any other package over named or random inputs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch

import miltorch
from workbench.bundle import Bundle
from workbench.bundle.names import MAX_FP16, MIN_NORMAL
from workbench.check import gates
from workbench.decode import Decoder

ORDER = ("exact", "declared", "narrow")
MAX_MASK = 1 << 22  # elements of the largest constant that is searched for infs


@dataclass
class Range:
    """The range of one floating-point result over all calls: largest finite magnitude,
    counts of inf, NaN, subnormal and all elements."""

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

    def add(self, x: torch.Tensor) -> None:
        magnitude = x.abs()
        finite = magnitude.nan_to_num(0.0, 0.0)
        self.infs += int(magnitude.isinf().sum())
        self.nans += int(magnitude.isnan().sum())
        self.max_abs = max(self.max_abs, float(finite.max()) if x.numel() else 0.0)
        subnormal = (magnitude < MIN_NORMAL) & (magnitude > 0)
        self.subnormals += int(subnormal.sum())
        self.elements += x.numel()


class Ranges:
    """Ranges of results by (shard, value), and where the first inf and NaN were made."""

    def __init__(self):
        self.results: dict[tuple[str, str], Range] = {}
        self.origins: dict[str, dict] = {}
        self.bad: dict[str, set] = {"inf": set(), "nan": set()}

    def feed(self, shard: str, values: dict) -> None:
        """Notes which inputs or constants hold an inf."""
        for name, value in values.items():
            if torch.as_tensor(value).isinf().any():  # integers have none
                self.bad["inf"].add((shard, name))

    def add(self, shard, op, outputs) -> None:
        """Adds an operation's floating-point results: a hook."""
        operands = {(shard.name, name) for name in op.reads()}
        for (name, _), x in zip(op.outputs, outputs, strict=True):
            if not isinstance(x, torch.Tensor) or not x.is_floating_point():
                continue
            value, module = (shard.name, name), shard.modules.get(name, "")
            empty = Range(shard.name, op.name, op.kind, module, name)
            row = self.results.setdefault(value, empty)
            for kind, found in (("inf", x.isinf().any()), ("nan", x.isnan().any())):
                self.bad[kind].discard(value)
                inherited = bool(operands & self.bad[kind])
                if found:
                    self.bad[kind].add(value)
                if found and not inherited:
                    at = {"op": op.name, "kind": op.kind, "module": module}
                    self.origins.setdefault(kind, {"shard": shard.name} | at)
            row.add(x)

    def first(self, what: str) -> dict | None:
        """The operation that made the first `inf` or `nan`: one whose operands have
        none. An inf that an input brings, such as a mask's, is no overflow. None: there
        is none."""
        return self.origins.get(what)

    def frame(self) -> pd.DataFrame:
        """One row per result in order of execution, with `headroom_bits`: log2(65504 /
        max_abs), inf if all values are zero, -inf if one is inf."""
        frame = pd.DataFrame(list(self.results.values()))
        with np.errstate(divide="ignore"):
            bits = np.log2(MAX_FP16 / frame["max_abs"])
        frame["headroom_bits"] = bits.mask(frame["infs"] > 0, -np.inf)
        return frame


@dataclass(frozen=True)
class Source:
    """A package that no bundle describes, as the shard of its operations."""

    name: str
    modules: dict[str, str] = field(default_factory=dict)


@dataclass
class Trace:
    """`ranges` by precision."""

    ranges: dict[str, Ranges]

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
        return frame

    def _first(self, precision: str) -> dict[str, dict | None]:
        alone = next(iter(self.ranges.values()))
        ranges = self.ranges.get(precision, alone)
        return {f"first_{what}": ranges.first(what) for what in ("inf", "nan")}

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
            "min_headroom_bits": gates.jsonable(float(frame["headroom_bits"].min())),
            "worst": gates.records(worst[columns]),
        }


def place(at: dict) -> str:
    """An operation in words: its MIL name, kind, source module and shard."""
    source = at["kind"]
    if at["module"]:
        source += f", {at['module']}"
    return f"{at['op']} ({source}) of {at['shard']}"


def trace_bundle(bundle: Bundle, ids: Sequence[int], tile: int | None = None) -> Trace:
    """Traces every shard of a bundle over `ids` in calls of `tile` tokens (default:
    t_max).

    Of a plug-in's target the values that its runtime shows are traced, in its own
    arithmetic."""
    if bundle.manifest.options.plugin:
        decoders = [Decoder(bundle)]
    else:
        decoders = [Decoder(bundle, "portable", precision) for precision in ORDER]
    return trace_ranges({d.precision: d for d in decoders}, ids, tile)


def trace_ranges(
    decoders: dict[str, Decoder], ids: Sequence[int], tile: int | None = None
) -> Trace:
    """Traces fresh sequences of `ids`, call by call, on each of the decoders."""
    ranges = {precision: Ranges() for precision in decoders}
    size = tile or next(iter(decoders.values())).options.t_max

    sequences = {precision: each.fresh() for precision, each in decoders.items()}
    for start in range(0, len(ids), size):
        chunk = list(ids[start : start + size])
        for precision, decoder in decoders.items():
            hook = ranges[precision].add
            batch = [chunk] * decoder.options.batch
            hidden, _ = decoder.advance(sequences[precision], batch, hook)
            decoder.logits(hidden[:, :, : len(chunk)], hook=hook)
    return Trace(ranges)


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
    ranges = {precision: Ranges() for precision in ORDER}
    for precision in ranges:
        executable = miltorch.Executable(program, precision)
        ranges[precision].feed(name, tensors | small_constants(executable))
        hook = partial(ranges[precision].add, Source(name))
        executable.run(tensors, executable.make_state(), hook)
    return Trace(ranges)


def small_constants(executable: miltorch.Executable) -> dict[str, torch.Tensor]:
    """A program's constants of at most `MAX_MASK` elements, which may be masks."""
    return {
        name: value
        for name, value in executable.constants.read()
        if isinstance(value, torch.Tensor) and value.numel() <= MAX_MASK
    }


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
