"""The times of one call of a decoder."""

import time
from dataclasses import dataclass, field


@dataclass
class Times:
    """Milliseconds of one call.

    `parts` has one entry for every layer shard and, last, one for the head: time on the
    host's clock, CPU time of the calling thread, and Core ML's own share (None where the
    runtime reports none). `total` is the time of the whole call."""

    parts: list[tuple[float, float, float | None]] = field(default_factory=list)
    total: float = 0.0

    def add(self, start: tuple[float, float], native_ms: list[float | None]) -> None:
        """Adds the part that began at `start`, a result of `clock`; `native_ms` are
        Core ML's times of its predictions."""
        ms, cpu_ms = (1e3 * (now - then) for now, then in zip(clock(), start))
        native = None if None in native_ms else sum(native_ms)
        self.parts.append((ms, cpu_ms, native))


def clock() -> tuple[float, float]:
    """Seconds of the host's clock, and of this thread's CPU."""
    return time.perf_counter(), time.thread_time()
