"""Gates: a figure, a threshold, a verdict and the reason in words; thresholds that
several gates use."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

GREEN, RED, NOT_RUN = "GREEN", "RED", "not_run"


@dataclass(frozen=True)
class Gate:
    """The result of one gate. `value` is None if the gate could not run; `reason` says
    what was compared, or why nothing was compared."""

    name: str
    verdict: str
    value: float | None
    threshold: float | None
    reason: str

    def json(self) -> dict:
        return jsonable(asdict(self))


def jsonable(value):
    """`value` with each float that JSON lacks (nan, inf) replaced by its name, in dicts
    and lists too."""
    if isinstance(value, dict):
        return {name: jsonable(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def records(frame) -> list[dict]:
    """Rows of a DataFrame as JSON has them; what was not measured is null."""
    return jsonable(frame.to_dict("records"))


def _gate(true: bool, name: str, *figures) -> Gate:
    return Gate(name, GREEN if true else RED, *figures)


def at_least(name: str, value: float, threshold: float, reason: str) -> Gate:
    """GREEN where value >= threshold; nan is RED."""
    return _gate(value >= threshold, name, value, threshold, reason)


def at_most(name: str, value: float, threshold: float, reason: str) -> Gate:
    """GREEN where value <= threshold; nan is RED."""
    return _gate(value <= threshold, name, value, threshold, reason)


def worst(figures: Iterable[tuple[float, str]]) -> tuple[float, str]:
    """The largest of (figure, place); nan is larger than any number."""
    return max(figures, key=lambda figure: (math.isnan(figure[0]), figure[0]))


def all_at_most(
    name: str, figures: Iterable[tuple[float, str]], threshold: float, reason: str
) -> Gate:
    """`at_most` of the worst figure, with its place at the end of the reason."""
    value, place = worst(figures)
    return at_most(name, float(value), threshold, reason + place)


def holds(name: str, true: bool, reason: str) -> Gate:
    return _gate(true, name, float(true), 1.0, reason)


def none(
    name: str, faults: Sequence[str], fine: str, heading: str = "", sep: str = ", "
) -> Gate:
    """GREEN, for the reason `fine`, when there are no faults; else RED, with `heading`
    and all of them."""
    if faults:
        return holds(name, False, heading + sep.join(faults))
    return holds(name, True, fine)


def not_run(name: str, reason: str) -> Gate:
    return Gate(name, NOT_RUN, None, None, reason)


def verdict(gates: Iterable[Gate]) -> str:
    """RED if any gate is, not_run if none ran, else GREEN."""
    verdicts = {g.verdict for g in gates}
    return next((v for v in (RED, GREEN) if v in verdicts), NOT_RUN)


# relative RMS of an isolated update in exact arithmetic, on the same weights
REAUTHORING = 1e-5
MAX_KL = 0.05  # nats, mean of a prompt: the default of the limit that is the user's
