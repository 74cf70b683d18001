"""Inputs of a package without a description, and the trace of adopted packages."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

import miltorch
from workbench.adopt import arrays, passes
from workbench.adopt.adapter import Adapter
from workbench.adopt.folder import Adopted
from workbench.adopt.propose import kind_of
from workbench.adopt.schema import Input
from workbench.explain import trace
from workbench.runtime.base import attribute


def inputs(
    package: Path, function: str | None = None, position: int = 0
) -> dict[str, np.ndarray]:
    """Masks, write addresses and positions of a call at `position`, for the inputs
    whose names indicate them, at the default shapes; other inputs are left out."""
    program, values = miltorch.read(package, function), {}
    for feature in program.description.input:
        shape = list(feature.type.multiArrayType.shape)
        kind = kind_of(feature.name)
        value = None
        if kind in ("mask", "write") and len(shape) > 1:
            T, rows = min(shape[-2:]), max(shape[-2:])
            start = max(0, min(position, rows - T))
            make = {"mask": arrays.mask, "write": arrays.write_columns}[kind]
            value = make(Input(kind=kind), start, T, rows)
            if list(value.shape) != shape[-2:]:
                value = value.T
        elif kind == "positions":
            value = position + np.arange(shape[-1])
        elif kind == "start":
            value = np.array(position)
        if value is not None:
            dtype = np.int32
            if program.inputs[feature.name].dtype.startswith("FLOAT"):
                dtype = np.float32
            values[feature.name] = np.empty(shape, dtype)
            values[feature.name][...] = value
    return values


def trace_adopted(adopted: Adopted, ids: Sequence[int] | None = None) -> trace.Trace:
    """Traces the packages over `ids` (default: the gates' prompt), in the largest
    tiles, with the inputs of the description."""
    departure = trace.Departure()
    ranges = {p: trace.Ranges() for p in trace.ORDER}
    adapters = {p: Adapter(adopted, "portable", p) for p in trace.ORDER}
    exact = adapters["exact"]
    ids = ids or passes.prompt(exact)
    with ExitStack() as contexts:
        for precision, adapter in adapters.items():
            for (index, function), model in adapter.models.items():
                package = Path(adopted.foreign.parts[index].package).stem
                name = " ".join(filter(None, (package, function)))
                hook = departure.hook(precision, ranges[precision], name, {})
                contexts.enter_context(attribute(model, "hook", hook))
                if precision == "exact":
                    departure.feed(name, trace.small_constants(model.executable))
                    feed = lambda values, name=name: departure.feed(name, values)  # noqa: E731
                    contexts.enter_context(attribute(model, "fed", feed))
        states = {p: adapter.begin() for p, adapter in adapters.items()}
        start = 0
        for size in exact.plan(len(ids), max(exact.tiles), logits="last"):
            for precision, adapter in adapters.items():
                adapter.advance(states[precision], ids[start : start + size], start)
            start += size
    return trace.Trace(ranges, departure.first)
