"""Measures the range of every operation's results against fp16's limits.

A hook sees every result. The arithmetic of a device depends on its compute unit, so the
program runs in three precisions: `exact` gives the true magnitudes, `declared` rounds
each result once, and `narrow` also rounds partial sums."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import pandas as pd
import torch

import miltorch
from miltorch.program import Op
from workbench.bundle import Bundle
from workbench.bundle.names import MAX_FP16
from workbench.check import gates
from workbench.decode import Decoder
from workbench.progress import bar
from workbench.runtime import Model, Settings, load_package

# precision that rounds → how it adds up terms, in words
SUMS = {
    "declared": "one rounding per result",
    "narrow": "sums rounded to fp16 every 32 terms",
}
PRECISIONS = "exact", *SUMS
NON_FINITE = "inf", "nan"


@dataclass(frozen=True)
class OperationPlace:
    """An operation: the name of its shard, its own in the program (`op`), its kind, and
    the source module that it was converted from ("": unknown)."""

    shard: str
    op: str
    kind: str
    module: str

    def __str__(self) -> str:
        source = ", ".join(filter(None, (self.kind, self.module)))
        return f"{self.op} ({source}) of {self.shard}"


@dataclass
class ResultRange:
    """The range of one floating-point result over all calls: its `value`'s name, whether
    it is a sum with a mask, the largest finite magnitude, and the counts of inf and NaN."""

    place: OperationPlace
    value: str
    is_masked: bool = False
    max_abs: float = 0.0
    inf: int = 0
    nan: int = 0


@dataclass(frozen=True)
class PackageNames:
    """The names of a package's parts: its shard, and the source modules of its values
    by the values' names."""

    shard: str
    modules: Mapping[str, str]


def adds_mask(op: Op) -> bool:
    """Whether an operation adds a mask, by the name of an operand, such as `attn_mask`: the
    largest magnitude of the sum is that of the mask's constant."""
    return op.kind == "add" and any("mask" in name.lower() for name in op.reads())


def measure_values(x: torch.Tensor) -> tuple[float, int, int]:
    """The largest finite magnitude of a tensor, 0 where there is none, and the counts of inf
    and NaN."""
    if not x.numel():
        return 0.0, 0, 0
    # both are NaN where any element is
    low, high = x.aminmax()
    largest = max(-float(low), float(high))
    if math.isfinite(largest):
        return largest, 0, 0
    finite = x[x.isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    return largest, int(torch.isinf(x).sum()), int(torch.isnan(x).sum())


class Ranges:
    """The ranges of all floating-point results in one precision, and where the first inf
    and the first NaN arise.

    An inf or NaN arises in the first operation that has one among its results and none
    among its operands. An inf in an input or a constant, such as a mask's, is no overflow.

    Attributes:
        rows: by shard and name of the value, in order of execution.
        first: `inf` and `nan` → the operation in which the first one arises; None: there
            is none.
        tainted: `inf` and `nan` → the shard and the name of every value that contained one
            when it was last computed.
        names: id of an operation → the names of its package's parts. No name of an
            operation is unique among packages. Registered executables keep their
            operations alive, so that no other object gets one of these ids.
    """

    def __init__(self):
        self.rows: dict[tuple[str, str], ResultRange] = {}
        self.first: dict[str, OperationPlace | None] = dict.fromkeys(NON_FINITE)
        self.tainted: dict[str, set] = {kind: set() for kind in NON_FINITE}
        self.names: dict[int, PackageNames] = {}

    def register(self, model: Model, inputs: Iterable[tuple[str, object]] = ()) -> None:
        """Registers the operations of a package under its shard's name, and notes which
        of its constants and inputs are infinite."""
        names = PackageNames(model.path.stem, {})
        if model.shard:
            names = PackageNames(model.shard.name, model.shard.modules)
        for op in model.executable.program.block.walk():
            self.names[id(op)] = names
        constants = model.executable.constants.items_read_at_run_time()
        for name, value in chain(constants, inputs):
            # integers are always finite, and some constants are text
            if not isinstance(value, str) and torch.as_tensor(value).isinf().any():
                self.tainted["inf"].add((names.shard, name))

    def add(self, shard, op, outputs) -> None:
        """Adds the floating-point results of an operation: a hook of `Decoder.advance`.
        A shard of another exporter has several packages, each registered under a name
        of its own; an expert's shard, which is loaded late, may not be registered."""
        names = self.names.get(id(op))
        if names is None:
            names = PackageNames(shard.name, shard.modules)
        operands = {(names.shard, name) for name in op.reads()}
        for (name, _), x in zip(op.outputs, outputs, strict=True):
            if not isinstance(x, torch.Tensor) or not x.is_floating_point():
                continue
            key = names.shard, name
            if key not in self.rows:
                module = names.modules.get(name, "")
                place = OperationPlace(names.shard, op.name, op.kind, module)
                self.rows[key] = ResultRange(place, name, adds_mask(op))
            row = self.rows[key]
            largest, infinite, undefined = measure_values(x)
            row.max_abs = max(row.max_abs, largest)
            row.inf += infinite
            row.nan += undefined
            self._update_taint("inf", infinite > 0, key, operands, row.place)
            self._update_taint("nan", undefined > 0, key, operands, row.place)

    def _update_taint(
        self, kind: str, is_tainted: bool, key, operands: set, place: OperationPlace
    ) -> None:
        """Notes whether a result has an inf, or a NaN, and its operation if the first one
        arises there.

        Args:
            kind: inf or nan.
            key: the shard and the name of the result.
            operands: the shard and the name of each value that the operation reads.
            place: of the operation.
        """
        tainted = self.tainted[kind]
        tainted.discard(key)
        if not is_tainted:
            return
        if operands.isdisjoint(tainted) and self.first[kind] is None:
            self.first[kind] = place
        tainted.add(key)

    def frame(self) -> pd.DataFrame:
        """One row per result in order of execution, with `headroom_bits`: log2(65504 /
        max_abs), inf if all values are zero, -inf if one is inf."""
        rows = []
        for row in self.rows.values():
            columns = asdict(row)
            rows.append(columns.pop("place") | columns)
        frame = pd.DataFrame(rows)
        with np.errstate(divide="ignore"):
            bits = np.log2(MAX_FP16 / frame["max_abs"])
        frame["headroom_bits"] = bits.mask(frame["inf"] > 0, -np.inf)
        return frame


RangesByPrecision = dict[str, Ranges]


def finite_gates(measured: RangesByPrecision) -> list[gates.Gate]:
    """Gates: every value is finite in `declared`, and in `narrow`."""
    results = []
    for precision, sums in SUMS.items():
        firsts = measured[precision].first.items()
        faults = [f"first {kind} at {place}" for kind, place in firsts if place]
        fine = f"{sums}: every value is finite"
        results.append(
            gates.no_faults(f"{precision}_is_finite", faults, fine, f"{sums}: ")
        )
    return results


def summarize(measured: RangesByPrecision) -> dict:
    """The ranges as `workbench explain` prints them. Finite sums with a mask are not
    ranked, since they say nothing about the headroom of what a model computes; the scores
    that are added are ranked where they are computed."""
    frame = measured["exact"].frame()
    is_finite = (frame["inf"] == 0) & (frame["nan"] == 0)
    ranked = frame[~(frame["is_masked"] & is_finite)]
    columns = ["shard", "op", "kind", "module", "max_abs", "headroom_bits"]
    first = {}
    for kind, place in measured["declared"].first.items():
        first[kind] = asdict(place) if place else None
    return {
        "ops": len(frame),
        "first_inf": first["inf"],
        "first_nan": first["nan"],
        "min_headroom_bits": gates.jsonable(float(ranked["headroom_bits"].min())),
        "worst": gates.records(ranked.nlargest(10, "max_abs")[columns]),
    }


def measure_bundle(bundle: Bundle, ids: Sequence[int]) -> RangesByPrecision:
    """The ranges of every shard of a bundle over `ids`."""
    measured = {}
    call_count = len([*bundle.manifest.options.tiling.calls(len(ids))])
    total = len(PRECISIONS) * call_count
    with bar(desc="ranges", total=total, unit="call") as progress:
        for precision in PRECISIONS:
            decoder = Decoder(bundle, "portable", precision)
            measured[precision] = measure_decoder(decoder, ids, progress.update)
    return measured


def measure_decoder(
    decoder: Decoder, ids: Sequence[int], report: Callable[[], object] = lambda: None
) -> Ranges:
    """The ranges over `ids` on fresh sequences, t_max tokens a call.

    Args:
        report: called after each call of the layers and the head.

    Raises:
        InputError: a device, which shows no operation.
    """
    ranges = Ranges()
    if not decoder.is_device:  # `advance` refuses one
        for model in (*decoder.layer_shards, *decoder.heads):
            for package in model.package_models:
                ranges.register(package)
    prompts = [list(ids)] * decoder.options.batch
    calls = decoder.new_sequences().advance_calls(prompts, hook=ranges.add)
    for chunk, hidden in calls:
        decoder.logits(hidden[:, :, : len(chunk[0])], hook=ranges.add)
        report()
    return ranges


def measure_package(
    path: str | Path, inputs: Mapping[str, np.ndarray] | None = None
) -> RangesByPrecision:
    """The ranges in one call of any ML Program package from a state of zeros.

    Args:
        inputs: values by name; missing inputs are random normal, or zero if integers,
            at the default shape.
    """
    measured = {}
    for precision in PRECISIONS:
        ranges = Ranges()
        model = load_package(Path(path), Settings("portable", precision))
        values = random_inputs(model.program) | (inputs or {})
        ranges.register(model, values.items())
        model.predict(values, model.make_state(), partial(ranges.add, None))
        measured[precision] = ranges
    return measured


def random_inputs(program: miltorch.Program) -> dict[str, np.ndarray]:
    """Random normal inputs of a program at their default shapes, zeros for integers."""
    rng = np.random.default_rng(0)
    values = {}
    for entry in program.description.input:
        shape = list(entry.type.multiArrayType.shape)
        values[entry.name] = np.zeros(shape, np.int32)
        if program.inputs[entry.name].dtype.startswith("FLOAT"):
            values[entry.name] = rng.standard_normal(shape, np.float32)
    return values
