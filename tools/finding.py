"""The record that the audits share."""

from typing import NamedTuple


class Finding(NamedTuple):
    """Something published that is not as it should be, most often a number.

    Args:
        place: a page, or a report and the part of it: `34_decode_sweep/Answer`.
        label: what is wrong there, in words or as its text.
        actual: what is published, or that it is missing.
        needed: what belongs there: the computed number, or in words.
    """

    place: str
    label: str
    actual: str
    needed: str

    def __str__(self) -> str:
        return f"{self.place}: {self.label}: {self.actual}; computed {self.needed}"
