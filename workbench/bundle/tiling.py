"""The calls that tokens are cut into. Imports nothing of the workbench."""

import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Tiling:
    """The sizes of calls that the shards of a bundle take.

    Args:
        t_max: the most tokens of a call.
        fixed_sizes: the only numbers of columns that a call can have, ascending: (1, 64) of
            `1,64`. Empty where any number up to t_max is one: `1-64`.
        takes_dummies: whether a call may have columns without a token, which write
            nothing. A slice write takes none.
    """

    t_max: int
    fixed_sizes: tuple[int, ...]
    takes_dummies: bool

    @classmethod
    def parse(cls, tokens: str, takes_dummies: bool) -> "Tiling":
        """The tiling of the option `tokens`: `1-4`, `4` or `1,64`."""
        sizes = tuple(int(size) for size in re.split("[-,]", tokens))
        fixed_sizes = () if "-" in tokens else sizes
        return cls(sizes[-1], fixed_sizes, takes_dummies)

    @property
    def functions(self) -> dict[str, int]:
        """The functions of a shard, name → T: {"t1": 1, "t64": 64} of `1,64`. Empty where
        calls of every size run the one function `main`."""
        if len(self.fixed_sizes) <= 1:
            return {}
        return {f"t{T}": T for T in self.fixed_sizes}

    def width(self, T: int) -> int:
        """The number of columns of a call of `T` tokens: T or, with fixed sizes, the next
        one, whose further columns are dummies. T is not checked; above t_max it is
        returned."""
        return next((n for n in self.fixed_sizes if n >= T), T)

    def call_size(self, limit: int) -> int:
        """How many of `limit` tokens the next call takes: all of them or, without dummy
        columns, the largest fixed size that they fill."""
        if self.takes_dummies:
            return limit
        return max((n for n in self.fixed_sizes if n <= limit), default=limit)

    def calls(self, count: int, tile: int | None = None) -> Iterator[tuple[int, int]]:
        """Yields the start and the end of each call for `count` tokens, at most `tile` tokens
        in a call (default t_max)."""
        start = 0
        while start < count:
            end = start + self.call_size(min(tile or self.t_max, count - start))
            yield start, end
            start = end
