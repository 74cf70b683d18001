"""The Neural Engine's energy between two moments, by zeus-apple-silicon on a Mac.

The library reads counters of the whole machine that are no public interface of macOS.
"""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def metered() -> Iterator[dict]:
    """Yields a dict that has after the block ``ane_joules``, None if they were not
    measured, and ``reason``, None if they were."""
    used = {"ane_joules": None, "reason": None}
    monitor = None
    try:
        from zeus_apple_silicon import AppleEnergyMonitor

        monitor = AppleEnergyMonitor()
        monitor.begin_window("run")
    except (ImportError, RuntimeError) as problem:
        used["reason"] = str(problem)
    yield used
    if used["reason"]:
        return
    try:
        millijoules = monitor.end_window("run").ane_mj
        used["ane_joules"] = millijoules / 1e3 if millijoules else None
        stuck = "the Neural Engine's counter stayed at zero or is missing"
        used["reason"] = None if millijoules else stuck
    except RuntimeError as problem:
        used["reason"] = str(problem)
