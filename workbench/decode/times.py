"""The times of one call of a decoder."""

import time
from dataclasses import dataclass, field


@dataclass
class Times:
    """Milliseconds of one call: every layer shard, every head slice, and the whole call
    on the host's clock.

    `cpu_ms` and `native_ms` have one value for each layer shard and then one for the
    head: CPU time of the calling thread, and Core ML's own share of the time (None if
    unknown)."""

    layers: list[float] = field(default_factory=list)
    head: float = 0.0
    total: float = 0.0
    cpu_ms: list[float] = field(default_factory=list)
    native_ms: list[float | None] = field(default_factory=list)

    def add_step(self, cpu_start: float, native_ms: list[float | None]) -> None:
        """Adds a step that began at a `time.thread_time` and made predictions of these
        native times."""
        self.cpu_ms.append((time.thread_time() - cpu_start) * 1e3)
        total = None
        if None not in native_ms:
            total = sum(native_ms)
        self.native_ms.append(total)

    def add_chain(self, ms: list[float], cpu_ms: list[float]) -> None:
        """Adds layer shards that ran in one compiled call, which has measured them."""
        self.layers += ms
        self.cpu_ms += cpu_ms
        self.native_ms += [None] * len(ms)
