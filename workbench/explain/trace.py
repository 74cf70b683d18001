"""How near every operation comes to fp16's limits: programs and inputs in, one row per operation out.

The interpreter's hook sees every result. Arithmetic differs by compute unit, so a program is run three ways: `exact`
says how large values really are, `declared` where one rounding per result makes inf or NaN, `narrow` whether sums
rounded on the way would. Works on bundles, fed a prompt, and on any package, fed given or random inputs.
"""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import torch

import miltorch
from workbench.bundle import Bundle
from workbench.check import gates
from workbench.decode import Decoder

MAX_FP16, MIN_NORMAL = 65504.0, 2.0**-14
ROUNDING = 2.0**-11  # half a unit in the last place of fp16, relative to the value


@dataclass
class Range:
    """What one floating-point result was over all calls: largest finite magnitude, counts of inf, NaN, subnormal and
    all elements; `inf_at`, `nan_at` say when each was first seen, as a running number of results (null: never)."""

    shard: str
    op: str  # MIL name
    kind: str
    module: str  # source module, "" where the package does not say
    value: str
    max_abs: float = 0.0
    infs: int = 0
    nans: int = 0
    subnormals: int = 0
    elements: int = 0
    inf_at: int | None = None
    nan_at: int | None = None

    def see(self, x: torch.Tensor, now: int) -> None:
        magnitude = x.abs()
        peak = float(magnitude.max()) if x.numel() else 0.0  # nan if any element is
        if not math.isfinite(peak):
            nans, infs = int(magnitude.isnan().sum()), int(magnitude.isinf().sum())
            self.nan_at = now if nans and self.nan_at is None else self.nan_at
            self.inf_at = now if infs and self.inf_at is None else self.inf_at
            self.nans, self.infs = self.nans + nans, self.infs + infs
            peak = float(magnitude.nan_to_num(0.0, 0.0).max())
        self.max_abs = max(self.max_abs, peak)
        self.subnormals += int(((magnitude < MIN_NORMAL) & (magnitude > 0)).sum())
        self.elements += x.numel()


@dataclass
class Ranges:
    """Collects the ranges of every operation that its hooks see."""

    seen: dict[tuple[str, str], Range] = field(default_factory=dict)
    count: int = 0

    def hook(self, shard: str, modules: dict[str, str]):
        """A hook for one program, whose values are filed under the name `shard`."""

        def look(op, outputs):
            for (value, _), x in zip(op.outputs, outputs, strict=True):
                if isinstance(x, torch.Tensor) and x.is_floating_point():
                    if (shard, value) not in self.seen:
                        self.seen[shard, value] = Range(shard, op.name, op.kind, modules.get(value, ""), value)
                    self.seen[shard, value].see(x, self.count)
                    self.count += 1

        return look

    def first(self, what: str) -> dict | None:
        """Where `inf` or `nan` was first seen, in time."""
        when = f"{what}_at"
        found = min((r for r in self.seen.values() if getattr(r, when) is not None), key=lambda r: getattr(r, when), default=None)
        return None if found is None else {"shard": found.shard, "op": found.op, "kind": found.kind, "module": found.module}

    def frame(self) -> pd.DataFrame:
        """One row per result in order of execution, with `headroom_bits`, log2(65504 / max_abs), inf for zeros, -inf
        where an inf was seen."""
        frame = pd.DataFrame([vars(r) for r in self.seen.values()])
        with np.errstate(divide="ignore"):
            frame["headroom_bits"] = np.where(frame["infs"] > 0, -np.inf, np.log2(MAX_FP16 / frame["max_abs"]))
        return frame


@dataclass
class Trace:
    """`ranges` by precision, and where `declared` first leaves `exact` by more than its own rounding (null: nowhere)."""

    ranges: dict[str, Ranges]
    departure: dict | None

    def frame(self) -> pd.DataFrame:
        """One row per result: its range in exact arithmetic, and whether it stays finite in `declared` and `narrow`."""
        frame = self.ranges["exact"].frame()
        keys = ["shard", "value"]
        for precision in ("declared", "narrow"):
            other = self.ranges[precision].frame()
            other[f"finite_{precision}"] = (other["infs"] + other["nans"]) == 0
            frame = frame.merge(other[[*keys, f"finite_{precision}"]], on=keys, how="left")
        return frame.drop(columns=["inf_at", "nan_at"])

    def _finite(self, precision: str, how: str) -> gates.Gate:
        places = [f"first {what} at {place(at)}" for what in ("inf", "nan") if (at := self.ranges[precision].first(what))]
        return gates.holds(f"{precision}_is_finite", not places, f"{how}: {', '.join(places) or 'every value is finite'}")

    def gates(self) -> list[gates.Gate]:
        """Finite with one rounding per result, and finite with sums rounded on the way."""
        return [self._finite("declared", "one rounding per result"), self._finite("narrow", "sums rounded to fp16 every 32 terms")]

    def json(self) -> dict:
        frame, found = self.frame(), self.gates()
        worst = frame.sort_values("max_abs", ascending=False, kind="stable").head(10)
        columns = ["shard", "op", "kind", "module", "max_abs", "headroom_bits"]
        return {
            "verdict": gates.verdict(found), "gates": [g.json() for g in found], "ops": len(frame),
            "first_inf": self.ranges["declared"].first("inf"), "first_nan": self.ranges["declared"].first("nan"),
            "narrow": {f"first_{w}": self.ranges["narrow"].first(w) for w in ("inf", "nan")},
            "first_departure": self.departure, "min_headroom_bits": gates.jsonable(float(frame["headroom_bits"].min())),
            "worst": gates.records(worst[columns]),
        }  # fmt: skip


def place(at: dict) -> str:
    """An operation in words: its MIL name, what it is, and the module it came from."""
    return f"{at['op']} ({at['kind']}{', ' + at['module'] if at['module'] else ''}) of {at['shard']}"


class Departure:
    """Watches `exact`, then `declared`, call by call, until their results are further apart than one rounding."""

    def __init__(self):
        self.exact: dict[tuple[str, str], torch.Tensor] = {}
        self.first: dict | None = None

    def hook(self, precision: str, ranges: Ranges, shard: str, modules: dict[str, str]):
        """What a program run in `precision` calls: the ranges, and this comparison as long as it has not ended."""
        look = ranges.hook(shard, modules)
        beside = {"exact": self._keep, "declared": self._compare}.get(precision)

        def both(op, outputs):
            look(op, outputs)
            if beside and self.first is None:
                beside(op, outputs, shard, modules)

        return both

    def _keep(self, op, outputs, shard, modules) -> None:
        self.exact.update({(shard, value): x for (value, _), x in zip(op.outputs, outputs, strict=True)})

    def _compare(self, op, outputs, shard, modules) -> None:
        for (value, _), x in zip(op.outputs, outputs, strict=True):
            reference = self.exact.pop((shard, value), None)
            if reference is None or not isinstance(x, torch.Tensor) or not x.is_floating_point():
                continue
            own, away = ROUNDING * float(reference.abs().max()), float((x - reference).abs().max())
            if not away <= own and self.first is None:
                self.first = {"shard": shard, "op": op.name, "kind": op.kind, "module": modules.get(value, ""),
                              "roundings": gates.jsonable(away / own if own else math.inf)}  # fmt: skip


def trace_bundle(bundle: Bundle, ids: Sequence[int], tile: int | None = None) -> Trace:
    """Traces every shard of a bundle while `ids` pass through it, `tile` tokens a call (default t_max)."""
    decoders = {p: Decoder(bundle, "portable", p) for p in ("exact", "declared", "narrow")}
    for decoder in decoders.values():
        decoder.begin()
    return trace_ranges(decoders, ids, tile)


def trace_decoder(decoder: Decoder, ids: Sequence[int], tile: int | None = None) -> Ranges:
    """Ranges of every shard of a portable decoder, routed experts included, over one prompt from a
    fresh state; the decoder's own sequences go on afterwards."""
    with decoder.set_aside():
        decoder.begin()
        return trace_ranges({decoder.precision: decoder}, ids, tile).ranges[decoder.precision]


def trace_ranges(decoders: dict[str, Decoder], ids: Sequence[int], tile: int | None = None) -> Trace:
    """Continues every decoder's sequences by `ids`, call by call side by side, in the order given.

    Args:
        decoders: portable ones by precision; `exact`, where there is one, before `declared`.
    """
    found, ranges = Departure(), {p: Ranges() for p in decoders}
    size = tile or next(iter(decoders.values())).options.t_max
    with ExitStack() as hooks:
        for precision, decoder in decoders.items():
            hooks.enter_context(
                decoder.hooked(
                    lambda shard, p=precision: found.hook(p, ranges[p], shard.name, shard.modules)
                )
            )
        for start in range(0, len(ids), size):
            for decoder in decoders.values():
                chunk = [list(ids[start : start + size])] * decoder.options.batch
                hidden = decoder.advance(chunk, len(chunk[0]))
                decoder.logits(hidden[:, :, : len(chunk[0])])
    return Trace(ranges, found.first)


def trace_package(path: str | Path, inputs: dict[str, np.ndarray] | None = None, seed: int = 0) -> Trace:
    """Traces one call of any ML Program package from a fresh state.

    Args:
        inputs: values by name; what is missing is drawn at random (normal, or zeros for integers) at the default shape.
    """
    program, name = miltorch.read(path), Path(path).stem
    rng = np.random.default_rng(seed)
    given = {n: torch.from_numpy(np.array(v)) for n, v in (_random_inputs(program, rng) | (inputs or {})).items()}
    ranges, found = {p: Ranges() for p in ("exact", "declared", "narrow")}, Departure()
    for precision, seen in ranges.items():
        executable = miltorch.Executable(program, precision)
        executable.run(given, executable.make_state(), found.hook(precision, seen, name, {}))
    return Trace(ranges, found.first)


def _random_inputs(program: miltorch.Program, rng) -> dict[str, np.ndarray]:
    shapes = {f.name: list(f.type.multiArrayType.shape) for f in program.description.input}
    return {name: rng.standard_normal(shapes[name]).astype(np.float32) if kind.dtype.startswith("FLOAT")
            else np.zeros(shapes[name], np.int32) for name, kind in program.inputs.items()}  # fmt: skip
