"""What every benchmark shares: the clock, rounds in which all contestants take their
turn, and the row of results."""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context


def seconds(step: Callable[[], object]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def in_turn(
    samplers: Mapping[Hashable, Callable[[], float]], rounds: int
) -> dict[Hashable, list[float]]:
    """The samples of every contestant by its key; each round takes one sample of each,
    in their order. An interrupt ends the rounds and keeps the samples, once every
    contestant has one."""
    samples = {key: [] for key in samplers}
    try:
        for _ in range(rounds):
            for key, sample in samplers.items():
                samples[key].append(sample())
    except KeyboardInterrupt:
        if not all(samples.values()):
            raise
    return samples


def bench_row(
    name: str,
    values: list[float],
    unit: str,
    peer: str | None = None,
    peer_values: list[float] = (),
) -> dict:
    """One row of `workbench bench`: medians of both sides, and peer / value for times
    (value / peer for rates)."""
    value, peer_value, ratio = statistics.median(values), None, None
    if peer:
        peer_value = statistics.median(peer_values)
        ratio = value / peer_value if unit.endswith("/s") else peer_value / value
    return {
        "name": name,
        "value": value,
        "unit": unit,
        "peer": peer,
        "peer_value": peer_value,
        "ratio": ratio,
        "n": len(values),
        "samples": values,
        "peer_samples": list(peer_values),
    }


def apart(function: Callable, *arguments):
    """`function(*arguments)` in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()
