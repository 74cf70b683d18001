"""What a planted fault is."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Fault:
    """A fault, and the gate that must be RED once it is planted; other gates may be RED as well.

    `plant` changes its argument in place: a `Decoder` where the fault is in memory, a
    `copies.Copy` of a bundle's files where it is on disk. `bundle` is the key of `cases.BASES`
    that says what the fault is planted in."""

    name: str
    gate: str
    plant: Callable[[Any], None]
    bundle: str = "llama"

    @property
    def slug(self) -> str:
        """The name as one word, which cases and commands use: "T of 2" → "t_of_2"."""
        return re.sub(r"\W+", "_", self.name.lower())
