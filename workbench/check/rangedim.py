"""Gate `same_for_every_T`, for the hazard that chapter 5 (see README, "The course")
describes: results right at T = 1 and silently wrong at T > 1.

One program on the same inputs must compute the same for every T, so no golden is needed
to find a difference. Where a device shows one, the portable runtime runs the same
program, which separates a wrong program from a wrong runtime."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from workbench.check import fidelity, gates, metrics
from workbench.check.fidelity import ForwardPass
from workbench.check.gates import Gate
from workbench.check.golden import Golden
from workbench.decode import Decoder


@dataclass(frozen=True)
class Drift:
    """The largest relative RMS between a result at T and the same at T = 1, and where
    it is."""

    value: float
    T: int
    where: str


def drift(
    decoder: Decoder, traces: dict[int, ForwardPass], golden: Golden
) -> Drift | None:
    """The worst drift of isolated updates, keys and values by T; None without T = 1 and some T >
    1."""
    if 1 not in traces:
        return None
    near_ties = fidelity.near_ties(decoder, golden)
    drifts = []
    for T, trace in traces.items():
        if T > 1:
            for place, *pair in _pairs(traces[1], trace, near_ties):
                error = metrics.relative_rms(*pair)
                drifts.append(Drift(error, T, f"{place}, T = {T}"))
    return max(drifts, key=lambda d: (math.isnan(d.value), d.value), default=None)


def _pairs(
    base: ForwardPass, trace: ForwardPass, near_ties: np.ndarray
) -> Iterator[tuple]:
    """(place, values of `base`, values of `trace`) of every layer's keys, values and
    update; the update where no near-tied choice of an expert can have turned it."""
    for layer, hidden in trace.hidden.items():
        if layer in base.k:
            yield f"layer {layer}, k", base.k[layer], trace.k[layer]
            yield f"layer {layer}, v", base.v[layer], trace.v[layer]
        x = base.x[layer]
        clear = ~near_ties[layer] | bool(trace.experts)
        if clear.any():
            updates = base.hidden[layer] - x, hidden - x
            yield f"layer {layer}, update", updates[0][clear], updates[1][clear]


def drift_gate(
    decoder: Decoder,
    traces: dict[int, ForwardPass],
    golden: Golden,
    portable: Mapping[str, np.ndarray] | None = None,
) -> Gate:
    """GREEN if every T agrees with T = 1; RED names the worst place, whether program or
    runtime is at fault, and a workaround.

    `portable`: drifts of the portable runtime by T (see `device.Reference`); without
    them the bundle is loaded there where another runtime drifts."""
    worst = drift(decoder, traces, golden)
    if worst is None:
        return gates.not_run("same_for_every_T", "needs T = 1 and at least one T > 1")
    tolerance = gates.T_TOLERANCE[decoder.arithmetic]
    reason = "T > 1 against T = 1, relative RMS: "
    reason += worst.where if worst.value else "equal"
    if not worst.value <= tolerance:
        culprit = at_fault(decoder, golden, worst.T, portable)
        reason += f"; {culprit}; export fixed shapes for prefill and "
        reason += f"decode (--functions 1,{worst.T})"
    return gates.at_most("same_for_every_T", worst.value, tolerance, reason)


def at_fault(
    decoder: Decoder,
    golden: Golden,
    T: int,
    portable: Mapping[str, np.ndarray] | None = None,
) -> str:
    """Whether the program or the runtime causes a drift: the program if the portable
    runtime shows it too, else the runtime."""
    if decoder.runtime in ("portable", "coreai"):
        return f"the program is wrong (runtime {decoder.runtime}; no device was run)"
    if portable is None:
        other = Decoder(decoder.bundle, "portable")
        traces = {t: fidelity.run_golden(other, golden, t) for t in (1, T)}
        value = drift(other, traces, golden).value
    elif str(T) in portable:
        value = float(portable[str(T)][0])
    else:
        return "the cause is open: the portable runtime was not run at this T"
    if value > gates.T_TOLERANCE["declared"]:
        return f"the program is wrong: the portable runtime drifts too ({value:.3g})"
    return f"the runtime is wrong: the portable runtime runs the same program right ({value:.3g})"
