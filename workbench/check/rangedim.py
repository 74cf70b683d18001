"""Chapter 5's hazard, measured and placed: right at T = 1, silently wrong at T > 1.

One program on the same inputs must compute the same for every T, so no golden is needed to see that it does not. Where
a device shows a difference, the portable runtime runs the same program and tells whose fault it is.
"""

import math
from dataclasses import dataclass

from workbench.check import fidelity, gates, metrics
from workbench.check.fidelity import ForwardPass
from workbench.check.gates import Gate
from workbench.check.golden import Golden
from workbench.decode import Decoder


@dataclass(frozen=True)
class Drift:
    """The largest relative RMS between a result at T and the same at T = 1, and where it is."""

    value: float
    T: int
    where: str


def drift(decoder: Decoder, traces: dict[int, ForwardPass], golden: Golden) -> Drift | None:
    """The worst drift of isolated updates, keys and values by T; None without T = 1 and some T > 1."""
    base, near_ties = traces.get(1), fidelity.near_ties(decoder, golden)
    found = []
    for T, trace in traces.items():
        if base is not None and T > 1:
            for layer, hidden in trace.hidden.items():
                x, sure = base.x[layer], slice(None) if trace.chosen else ~near_ties[layer]
                pairs = (("update", (base.hidden[layer] - x)[sure], (hidden - x)[sure]), ("k", base.k[layer], trace.k[layer]),
                         ("v", base.v[layer], trace.v[layer]))  # fmt: skip
                found += [Drift(metrics.relative_rms(one, many), T, f"layer {layer}, {name}, T = {T}") for name, one, many in pairs]
    return max(found, key=lambda d: math.inf if math.isnan(d.value) else d.value, default=None)


def drift_gate(decoder: Decoder, traces: dict[int, ForwardPass], golden: Golden) -> Gate:
    """GREEN when every T agrees with T = 1; RED names the worst place, whose fault it is, and the way round."""
    found = drift(decoder, traces, golden)
    if found is None:
        return gates.not_run("same_for_every_T", "needs T = 1 and at least one T > 1")
    tolerance = gates.T_TOLERANCE["coreml" if decoder.runtime == "coreml" else decoder.precision]
    reason = f"T > 1 against T = 1, relative RMS: {found.where if found.value else 'equal'}"
    if not found.value <= tolerance:
        reason += f"; {at_fault(decoder, golden, found.T)}; export fixed-T shards (--t fixed) for prefill and decode"
    return gates.at_most("same_for_every_T", found.value, tolerance, reason)


def at_fault(decoder: Decoder, golden: Golden, T: int) -> str:
    """Whose fault a drift is: the program's when the portable runtime shows it too, else the runtime's."""
    if decoder.runtime == "portable":
        return "the program is wrong (portable runtime; no device was run)"
    portable = Decoder(decoder.bundle, "portable")
    again = drift(portable, {t: fidelity.run_golden(portable, golden, t) for t in (1, T)}, golden)
    if again.value > gates.T_TOLERANCE["declared"]:
        return f"the program is wrong: the portable runtime drifts too ({again.value:.3g})"
    return f"the runtime is wrong: the portable runtime runs the same program right ({again.value:.3g})"
