"""The times of one call of a decoder."""

import time
from dataclasses import dataclass, field
from typing import NamedTuple


class PartTimes(NamedTuple):
    """Milliseconds of one shard's part of a call.

    Attributes:
        ms: on the host's clock.
        cpu_ms: CPU time of the calling thread.
        native_ms: Core ML's own share; None where the runtime reports none.
    """

    ms: float
    cpu_ms: float
    native_ms: float | None


@dataclass
class Times:
    """The times of one call.

    Attributes:
        parts: of every layer shard and, last, of the head.
        total: milliseconds of the whole call.
    """

    parts: list[PartTimes] = field(default_factory=list)
    total: float = 0.0

    def end_part(
        self, start: tuple[float, float], native_ms: list[float | None]
    ) -> None:
        """Adds the part of the call that ends now.

        Args:
            start: when it began, a result of `clock`.
            native_ms: Core ML's times, one for each prediction of the part.
        """
        ms, cpu_ms = (1e3 * (now - then) for now, then in zip(clock(), start))
        native = None if None in native_ms else sum(native_ms)
        self.parts.append(PartTimes(ms, cpu_ms, native))


def clock() -> tuple[float, float]:
    """Seconds of the host's clock, and of this thread's CPU."""
    return time.perf_counter(), time.thread_time()
