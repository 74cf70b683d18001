"""The Neural Engine's energy between two moments, by zeus-apple-silicon on a Mac.

The library reads counters of the whole machine that are no public interface of macOS.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Energy:
    """The result of a measurement of energy, filled in once its block has ended."""

    ane_joules: float | None = None
    """Joules of the Neural Engine; None: not measured."""
    reason: str | None = None
    """The reason why they were not measured; None where they were."""


@contextmanager
def metered() -> Iterator[Energy]:
    """Measures the energy of the block; the yielded object is filled in as it ends."""
    energy = Energy()
    try:
        from zeus_apple_silicon import AppleEnergyMonitor

        monitor = AppleEnergyMonitor()
        monitor.begin_window("run")
    except (ImportError, RuntimeError) as problem:
        energy.reason = str(problem)
        yield energy
        return
    yield energy
    try:
        millijoules = monitor.end_window("run").ane_mj
    except RuntimeError as problem:
        energy.reason = str(problem)
        return
    if millijoules:
        energy.ane_joules = millijoules / 1e3
    else:
        energy.reason = "the Neural Engine's counter stayed at zero or is missing"
