"""Predicted milliseconds by the formats of an export's matrices, from which a mixed export
chooses."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache

import pandas as pd

from workbench.ane.chips import generation
from workbench.ane.roofline import (
    calibration,
    on_chip,
    predict_with_intervals,
    terms,
    with_rates,
)
from workbench.ane.work import ShardWork, Work, stored_format
from workbench.bundle.presets import Preset, find_preset

CHIP = "M4"
"""The chip for which times are predicted where none is named."""
BILLION = 10**9


@dataclass(frozen=True)
class Timing:
    """The time of one call of an export on a chip, as `roofline` predicts it.

    Args:
        work: of one call of the export, in any format.
        chip: its name, such as M4.

    Raises:
        InputError: an unknown chip.
    """

    work: Work
    chip: str

    def __post_init__(self):
        generation(self.chip)  # refuses a chip that is none

    def prices(self, weights: int, preset: Preset) -> tuple[float, float]:
        """The milliseconds in which the chip streams a matrix, and those in which it
        unpacks the matrix from lookup tables (0 for other formats). Both go on at the
        same time; each adds up over matrices.

        Args:
            weights: elements of the matrix.
        """
        stream, unpack = _ms_of_a_billion(self.chip, stored_format(preset))
        return stream * weights / BILLION, unpack * weights / BILLION

    def milliseconds(self, weights: dict[str, int]) -> float:
        """The predicted milliseconds of a call.

        Args:
            weights: preset → number of weights that are stored by it.
        """
        formats = Counter()
        for name, count in weights.items():
            formats[stored_format(find_preset(name))] += count
        # the formula reads nothing but sums over the shards
        first, *others = (replace(shard, weights={}) for shard in self.work.shards)
        first = replace(first, weights=dict(formats))
        work = replace(self.work, shards=(first, *others))
        row = pd.DataFrame([on_chip(work, self.chip)])
        return float(predict_with_intervals(row)["ms"].iloc[0])


@cache
def _ms_of_a_billion(chip: str, format: str) -> tuple[float, float]:
    """The milliseconds of streaming and of unpacking a billion weights."""
    work = Work((ShardWork("matrix", {format: BILLION}),))
    row = with_rates(pd.DataFrame([on_chip(work, chip)]))
    ms = terms(row, calibration().constants)
    return float(ms["stream"].iloc[0]), float(ms["unpack"].iloc[0])
