"""Exports that the formula predicts to be faster than one, by more than its interval: fewer
calls, a shorter cache, another format of weights."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from workbench.ane.features import calls_table, on_chip
from workbench.ane.formula import predict_ms
from workbench.ane.roofline import calibration, predict_with_intervals
from workbench.ane.work import ShardWork, Work, join_shards, stored_bits, stored_format
from workbench.bundle import PRESETS, Options, find_preset
from workbench.bundle.presets import Preset

MAX_SHARD_BYTES = 1_000_000_000
"""The most bytes of weights in a proposed shard: rule G4 reports larger packages on the
GPU."""
MIN_CACHE_ROWS = 256
"""Rows of the shortest cache that is proposed."""
SAME_TIME_RATIO = 1.05
"""Times whose ratio is smaller are called the same."""


@dataclass(frozen=True)
class Advice:
    """An export with another value of one option, and both predicted times.

    Args:
        option: the option's name, such as max_seq_len.
        value: the other value.
        reason: why the other export is faster, in words.
        ms, low_ms, high_ms: of a call of the other export, with its 90% interval.
        ms_now, low_ms_now, high_ms_now: of a call of the export as it is.
    """

    option: str
    value: str | int
    reason: str
    ms: float
    low_ms: float
    high_ms: float
    ms_now: float
    low_ms_now: float
    high_ms_now: float

    def sentence(self, chip: str) -> str:
        """The advice in words, for the chip that it was predicted for."""
        return (
            f"{self.option} {self.value}: {self.ms:.3g} ms a call on {chip} "
            f"({self.low_ms:.3g} to {self.high_ms:.3g}) in place of {self.ms_now:.3g} "
            f"({self.low_ms_now:.3g} to {self.high_ms_now:.3g}): {self.reason}"
        )


def advise(work: Work, options: Options, chip: str) -> list[Advice]:
    """Other exports that are faster by more than the factor of the 90% interval, both if
    attention reads K and V as stored and if it reads them repeated for each query head.
    A finer lookup table is also advised if it takes the same time.

    An uncertainty that both predictions share, such as an unmeasured chip, does not enter
    the comparison."""
    current = _predict(work, chip)
    advice: dict[str, Advice] = {}  # by option
    for alternative in _alternatives(work, options):
        option, value = alternative.option, alternative.value
        if option in advice:
            continue
        reason = alternative.reason
        least_speedup = calibration().factor
        if option == "compress" and _is_finer(value, options.compress):
            least_speedup = 1 / SAME_TIME_RATIO
            reason = "the same time within 5% with finer weights"
        proposed = _predict(alternative.work, chip)
        if _speedup(current, proposed) > least_speedup:
            advice[option] = Advice(
                option,
                value,
                reason,
                ms=proposed.ms,
                low_ms=proposed.low_ms,
                high_ms=proposed.high_ms,
                ms_now=current.ms,
                low_ms_now=current.low_ms,
                high_ms_now=current.high_ms,
            )
    return list(advice.values())


def _speedup(current: "_Prediction", proposed: "_Prediction") -> float:
    """How many times as fast the proposed export is: the smaller of the ratios with K and V
    as stored and with K and V repeated."""
    return min(current.ms / proposed.ms, current.repeated_ms / proposed.repeated_ms)


def _is_finer(value: str, compress: str) -> bool:
    """Whether both are lookup tables and the first has more entries."""
    finer, coarser = find_preset(value), find_preset(compress)
    return finer.is_table and coarser.is_table and finer.bits > coarser.bits


@dataclass(frozen=True)
class _Prediction:
    """The predicted ms of one call, with the ends of its interval.

    Attributes:
        ms: if attention reads K and V as they are stored.
        repeated_ms: if attention reads K and V repeated for each query head.
    """

    ms: float
    low_ms: float
    high_ms: float
    repeated_ms: float


def _predict(work: Work, chip: str) -> _Prediction:
    features = on_chip(work, chip)
    predicted = predict_with_intervals(calls_table([features]), calibration()).iloc[0]
    repeating = calls_table([replace(features, repeats_kv=True)]).iloc[0]
    return _Prediction(
        ms=float(predicted["ms"]),
        low_ms=float(predicted["low_ms"]),
        high_ms=float(predicted["high_ms"]),
        repeated_ms=float(predict_ms(repeating, calibration().constants)),
    )


@dataclass(frozen=True)
class _Alternative:
    """An export with another value of one option."""

    option: str
    value: str | int
    reason: str
    """The saving, in words."""
    work: Work


def _alternatives(work: Work, options: Options) -> Iterator[_Alternative]:
    """Yields other exports, those of one option in the order of preference: `advise` takes
    the first one that is fast enough. The longest cache and the format with most bits
    come first, since they change least."""
    yield from _fewer_shards(work, options)
    yield from _shorter_caches(work, options)
    # of presets with equal bits the one with more scales
    presets = sorted(PRESETS.values(), key=lambda preset: -preset.stored_bits)
    for preset in presets:
        shards = tuple(_stored_as(shard, options, preset) for shard in work.shards)
        other = replace(work, shards=shards)
        yield _Alternative("compress", preset.name, "less time for weights", other)


def _fewer_shards(work: Work, options: Options) -> Iterator[_Alternative]:
    """Yields the export with as many layers in a shard as `MAX_SHARD_BYTES` allows, if it
    has fewer shards."""
    heads = [shard for shard in work.shards if shard.is_head]
    layers = [shard for shard in work.shards if not shard.is_head]
    if options.moe != "dense" or len(layers) < 2:
        return
    stacked = _stacked(layers)
    if len(stacked) < len(layers):
        per_shard = math.ceil(len(layers) * options.layers_per_shard / len(stacked))
        fewer = replace(work, shards=(*stacked, *heads))
        reason = f"{work.calls} calls to {fewer.calls}"
        yield _Alternative("layers_per_shard", per_shard, reason, fewer)


def _shorter_caches(work: Work, options: Options) -> Iterator[_Alternative]:
    """Yields the exports with a half, a quarter and so on of the rows of the cache."""
    rows = options.max_seq_len // 2
    while rows >= max(MIN_CACHE_ROWS, options.t_max):
        shards = tuple(_shortened(shard, options, rows) for shard in work.shards)
        shorter = replace(work, shards=shards)
        reason = "every call reads all rows of the cache"
        yield _Alternative("max_seq_len", rows, reason, shorter)
        rows //= 2


def _stacked(layers: list[ShardWork]) -> list[ShardWork]:
    """The layers in as few shards of equal numbers of them as `MAX_SHARD_BYTES` allows."""
    largest = max(map(_weight_bytes, layers))
    per_shard = max(1, int(MAX_SHARD_BYTES // largest))
    stacked = []
    for start in range(0, len(layers), per_shard):
        group = layers[start : start + per_shard]
        stacked.append(join_shards(group[0].name, group))
    return stacked


def _weight_bytes(shard: ShardWork) -> float:
    """The bytes of a shard's weights as they are stored."""
    return sum(
        count * stored_bits(format) / 8 for format, count in shard.weights.items()
    )


def _shortened(shard: ShardWork, options: Options, rows: int) -> ShardWork:
    """A shard whose caches of `max_seq_len` rows have `rows`; shorter ones, of a sliding
    window, stay."""
    if shard.cache_rows < options.max_seq_len:
        return shard
    share = rows / options.max_seq_len
    return replace(
        shard,
        cache_bytes=int(shard.cache_bytes * share),
        repeated_cache_bytes=int(shard.repeated_cache_bytes * share),
        cache_rows=rows,
    )


def _stored_as(shard: ShardWork, options: Options, preset: Preset) -> ShardWork:
    """A shard with the weights of its preset stored by another one."""
    present_format = stored_format(options.preset)
    weights = Counter()
    for format, count in shard.weights.items():
        if format == present_format:
            format = stored_format(preset)
        weights[format] += count
    return replace(shard, weights=dict(weights))
