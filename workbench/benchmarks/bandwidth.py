"""Rates beside the read bandwidth that the machine had at the same time.

The read bandwidth of a virtual machine changes within seconds with the load of its
host. A rate is therefore divided by the bandwidth right before and after it, and two
rates are compared where their bandwidths are alike. What is timed is not known here."""

import statistics
from collections.abc import Callable

import torch

from workbench.benchmarks.stopwatch import bench_row, seconds

PASSES = 3  # over the memory, in one measurement
MAX_QUOTIENT = 1.15  # of two bandwidths that are alike
Sample = tuple[float, float]  # tok/s, and the read bandwidth around it in B/s


def bandwidth_meter() -> Callable[[], float]:
    """A function that measures the bytes per second at which torch's threads read
    memory: the best of `PASSES` passes over a GiB, which is allocated once, here."""
    data = torch.ones(1 << 27, dtype=torch.int64)
    return lambda: data.nbytes / min(seconds(data.sum) for _ in range(PASSES))


def bandwidth_row(bandwidths: list[float]) -> dict:
    """The row of all measured bandwidths, with their range as its `note`."""
    return bench_row("read bandwidth", bandwidths, "B/s") | {"note": _range(bandwidths)}


def share_row(name: str, samples: list[Sample], stored: int) -> dict:
    """The share of the read bandwidth in % that steps of `stored` bytes use, by sample.
    The row has the `bandwidths` too, and their range as its `note`."""
    bandwidths = [bandwidth for _, bandwidth in samples]
    shares = [100 * stored * rate / bandwidth for rate, bandwidth in samples]
    row = bench_row(f"{name} bandwidth share", shares, "%")
    return row | {"bandwidths": bandwidths, "note": _range(bandwidths)}


def rate_row(
    name: str, samples: list[Sample], peer: str, peer_samples: list[Sample]
) -> dict:
    """`bench_row` of tok/s beside a peer's, whatever the bandwidths."""
    rates, peer_rates = ([rate for rate, _ in side] for side in (samples, peer_samples))
    return bench_row(name, rates, "tok/s", peer, peer_rates)


def paired_row(
    name: str, samples: list[Sample], peer: str, peer_samples: list[Sample]
) -> dict:
    """`rate_row` whose `ratio` is the median of the `ratios` of those rounds in which
    the bandwidths of both sides are alike, None without such a round. Its `note` has
    their number and the range of their bandwidths."""
    alike = [
        (rate / peer_rate, ours)
        for (rate, ours), (peer_rate, theirs) in zip(samples, peer_samples)
        if max(ours, theirs) < MAX_QUOTIENT * min(ours, theirs)
    ]
    row = rate_row(name, samples, peer, peer_samples)
    row |= {"ratio": None, "ratios": [ratio for ratio, _ in alike]}
    row["note"] = f"{len(alike)} of {row['n']} rounds at like bandwidth"
    if alike:
        row["ratio"] = statistics.median(row["ratios"])
        row["note"] += f", {_range([bandwidth for _, bandwidth in alike])}"
    return row


def _range(bandwidths: list[float]) -> str:
    return f"{min(bandwidths) / 1e9:.1f} to {max(bandwidths) / 1e9:.1f} GB/s"
