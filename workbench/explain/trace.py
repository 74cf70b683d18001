"""Traces the range of every operation's results against fp16's limits: one row per
result.

A hook gets every result. Arithmetic differs by compute unit, so a program runs in three
precisions: `exact` has the true magnitudes, `declared` rounds each result once, and
`narrow` also rounds partial sums."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import torch

import miltorch
from workbench.bundle import Bundle
from workbench.bundle.names import MAX_FP16
from workbench.check import gates
from workbench.decode import Decoder
from workbench.runtime import Model, Settings, load_package

# what a precision that rounds does to sums
SUMS = {
    "declared": "one rounding per result",
    "narrow": "sums rounded to fp16 every 32 terms",
}
PRECISIONS = "exact", *SUMS
BAD = {"inf": torch.isinf, "nan": torch.isnan}


class Ranges:
    """The largest finite magnitude and the counts of inf and NaN of every
    floating-point result over all calls of one arithmetic.

    Attributes:
        first: `inf` and `nan` → the operation that made the first one: one whose
            operands have none. An inf that an input or a constant brings, such as a
            mask's, is no overflow. None: there is none.
    """

    def __init__(self):
        self.rows: dict[tuple[str, str], dict] = {}
        self.first: dict[str, dict | None] = dict.fromkeys(BAD)
        self.bad: dict[str, set] = {kind: set() for kind in BAD}
        self.shards: dict[int, object] = {}  # by id of an operation

    def note(self, model: Model, inputs: Iterable[tuple[str, object]] = ()) -> None:
        """Notes a package's operations, and which constants and inputs are infinite."""
        shard = model.shard or SimpleNamespace(name=model.package.stem, modules={})
        for op in model.executable.program.block.walk():
            self.shards[id(op)] = shard
        for name, value in chain(model.executable.constants.read(), inputs):
            # integers have none, and some constants are words
            if not isinstance(value, str) and torch.as_tensor(value).isinf().any():
                self.bad["inf"].add((shard.name, name))

    def add(self, shard, op, outputs) -> None:
        """Adds an operation's floating-point results: a hook. Another exporter's shard
        has several packages, which `note` tells apart."""
        shard = self.shards.get(id(op), shard)
        operands = {(shard.name, name) for name in op.reads()}
        for (name, _), x in zip(op.outputs, outputs, strict=True):
            if not isinstance(x, torch.Tensor) or not x.is_floating_point():
                continue
            value = shard.name, name
            module = shard.modules.get(name, "")
            at = {"shard": shard.name, "op": op.name, "kind": op.kind, "module": module}
            empty = at | {"value": name, "max_abs": 0.0, "inf": 0, "nan": 0}
            row = self.rows.setdefault(value, empty)
            finite = x[x.isfinite()].abs()
            if finite.numel():
                row["max_abs"] = max(row["max_abs"], float(finite.max()))
            for kind, test in BAD.items():
                count = int(test(x).sum())
                row[kind] += count
                self.bad[kind].discard(value)
                if count:
                    if not operands & self.bad[kind]:
                        self.first[kind] = self.first[kind] or at
                    self.bad[kind].add(value)

    def frame(self) -> pd.DataFrame:
        """One row per result in order of execution, with `headroom_bits`: log2(65504 /
        max_abs), inf if all values are zero, -inf if one is inf."""
        frame = pd.DataFrame(list(self.rows.values()))
        with np.errstate(divide="ignore"):
            bits = np.log2(MAX_FP16 / frame["max_abs"])
        frame["headroom_bits"] = bits.mask(frame["inf"] > 0, -np.inf)
        return frame


Traced = dict[str, Ranges]  # by precision


def finite_gates(traced: Traced) -> list[gates.Gate]:
    """Gates: every value is finite in `declared`, and in `narrow`."""
    results = []
    for precision, way in SUMS.items():
        firsts = traced[precision].first.items()
        places = [f"first {kind} at {place(at)}" for kind, at in firsts if at]
        fine = f"{way}: every value is finite"
        results.append(gates.none(f"{precision}_is_finite", places, fine, f"{way}: "))
    return results


def summary(traced: Traced) -> dict:
    """What `workbench explain` prints of the ranges."""
    frame = traced["exact"].frame()
    columns = ["shard", "op", "kind", "module", "max_abs", "headroom_bits"]
    first = traced["declared"].first
    return {
        "ops": len(frame),
        "first_inf": first["inf"],
        "first_nan": first["nan"],
        "min_headroom_bits": gates.jsonable(float(frame["headroom_bits"].min())),
        "worst": gates.records(frame.nlargest(10, "max_abs")[columns]),
    }


def place(at: Mapping) -> str:
    """An operation in words: its MIL name, kind, source module and shard."""
    source = ", ".join(filter(None, (at["kind"], at["module"])))
    return f"{at['op']} ({source}) of {at['shard']}"


def trace_bundle(bundle: Bundle, ids: Sequence[int]) -> Traced:
    """Traces every shard of a bundle over `ids`."""
    load = partial(Decoder, bundle, "portable")
    return {precision: trace_decoder(load(precision), ids) for precision in PRECISIONS}


def trace_decoder(decoder: Decoder, ids: Sequence[int]) -> Ranges:
    """Traces fresh sequences of `ids`, as many tokens a call as the bundle takes."""
    ranges = Ranges()
    # a device shows no operation, which `advance` refuses
    for model in [] if decoder.is_device else [*decoder.layers, *decoder.heads]:
        for own in packages(model):
            ranges.note(own)
    prompts = [list(ids)] * decoder.options.batch
    calls = decoder.new_sequences().advance_calls(prompts, hook=ranges.add)
    for chunk, hidden in calls:
        decoder.logits(hidden[:, :, : len(chunk[0])], hook=ranges.add)
    return ranges


def packages(model: Model) -> list[Model]:
    """The models of a shard's own packages, of which another exporter's has several."""
    parts = getattr(model, "models", [{None: model}])
    return [own for functions in parts for own in functions.values()]


def trace_package(
    path: str | Path, inputs: Mapping[str, np.ndarray] | None = None
) -> Traced:
    """Traces one call of any ML Program package from a fresh state.

    Args:
        inputs: values by name; missing inputs are random normal, or zero if integers,
            at the default shape.
    """
    traced = {}
    for precision in PRECISIONS:
        traced[precision] = ranges = Ranges()
        model = load_package(Path(path), Settings("portable", precision))
        values = random_inputs(model.program) | (inputs or {})
        ranges.note(model, values.items())
        model.predict(values, model.make_state(), partial(ranges.add, None))
    return traced


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
