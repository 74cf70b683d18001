"""Predicted milliseconds by the formats of an export's matrices, from which a mixed export
chooses."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from workbench.ane.chips import check_chip
from workbench.ane.features import calls_table, on_chip
from workbench.ane.formula import terms
from workbench.ane.roofline import calibration, predict_with_intervals
from workbench.ane.work import ShardWork, Work, stored_format
from workbench.bundle.presets import Preset, find_preset

CHIP = "M4"
"""The chip for which times are predicted where none is named."""
BILLION = 10**9


class MatrixTime(NamedTuple):
    """The milliseconds that a matrix takes in a call. The chip streams and unpacks at the
    same time; each of the two adds up over matrices."""

    stream_ms: float
    unpack_ms: float
    """From lookup tables; 0 for other formats."""


class CallTime(NamedTuple):
    """The predicted milliseconds of a call, and the ends of its 90% interval."""

    ms: float
    low_ms: float
    high_ms: float


@dataclass(frozen=True)
class Timing:
    """Predicts the time of one call of an export on a chip, by the formats in which its
    weights are stored.

    Args:
        work: of one call of the export, in any format.
        chip: its name, such as M4.

    Raises:
        InputError: an unknown chip.
    """

    work: Work
    chip: str

    def __post_init__(self):
        check_chip(self.chip)

    def matrix_time(self, weights: int, preset: Preset) -> MatrixTime:
        """The time of a matrix in a preset.

        Args:
            weights: elements of the matrix.
        """
        per_billion = _time_per_billion_weights(self.chip, stored_format(preset))
        return MatrixTime(
            stream_ms=per_billion.stream_ms * weights / BILLION,
            unpack_ms=per_billion.unpack_ms * weights / BILLION,
        )

    def call_time(self, weights: dict[str, int]) -> CallTime:
        """The predicted time of a call.

        Args:
            weights: preset → number of weights that it stores.
        """
        formats = Counter()
        for name, count in weights.items():
            formats[stored_format(find_preset(name))] += count
        # All weights are put on the first shard: the formula only reads sums over shards.
        first, *others = (replace(shard, weights={}) for shard in self.work.shards)
        first = replace(first, weights=dict(formats))
        work = replace(self.work, shards=(first, *others))
        calls = calls_table([on_chip(work, self.chip)])
        (prediction,) = predict_with_intervals(calls, calibration()).to_dict("records")
        return CallTime(*(prediction[name] for name in CallTime._fields))


@cache
def _time_per_billion_weights(chip: str, format: str) -> MatrixTime:
    """The time of a matrix of a billion weights."""
    work = Work((ShardWork("matrix", {format: BILLION}),))
    call = calls_table([on_chip(work, chip)]).iloc[0]
    ms = terms(call, calibration().constants)
    return MatrixTime(float(ms.stream), float(ms.unpack))
