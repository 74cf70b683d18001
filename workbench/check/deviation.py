"""How far something that a bundle stores is from what it should be."""

from dataclasses import dataclass
from math import inf, isnan


@dataclass(frozen=True)
class Deviation:
    """A figure of a stored tensor, and its limit.

    Attributes:
        value: of the tensor's worst weight or row, or of the whole tensor; nan is the
            worst of all.
        limit: the largest value of a sound bundle.
        reason: the place, the value and its unit.
        place: a shard or the host, then ": " and the tensor, mostly.
    """

    value: float
    limit: float
    reason: str
    place: str = ""

    @classmethod
    def at(cls, place: str, value: float, limit: float, unit: str) -> "Deviation":
        """The deviation of a place, such as a shard and a tensor."""
        return cls(value, limit, f"{place}: {value:.4g} {unit}", place)

    @property
    def tensor(self) -> str:
        """The tensor of the checkpoint that the place ends with, without its group."""
        return self.place.split(": ")[-1].split(",")[0]

    @property
    def is_of_row(self) -> bool:
        """Whether it is the figure of one row, and not of a whole tensor."""
        return ", row " in self.place

    @property
    def is_sound(self) -> bool:
        return self.value <= self.limit  # False for nan

    @property
    def ratio_to_limit(self) -> float:
        """The value over its limit; inf for nan."""
        return inf if isnan(self.value) else self.value / self.limit


def worst_of(deviations: list[Deviation]) -> Deviation:
    """The one with the largest ratio to its limit."""
    return max(deviations, key=lambda deviation: deviation.ratio_to_limit)
