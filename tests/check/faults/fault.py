"""What a planted fault is."""

import re
from collections.abc import Callable
from dataclasses import dataclass


def slug(name: str) -> str:
    """A fault's name as one word, which cases and commands use: "T of 2" → "t_of_2"."""
    return re.sub(r"\W+", "_", name.lower())


@dataclass(frozen=True)
class Fault:
    """A fault, and the gate that must be RED once it is planted; other gates may be RED as well.

    Attributes:
        name: says what is wrong. Two faults in memory, or two on disk, cannot have the same name.
        gate: name of the gate that must be RED.
        plant: changes its first argument in place: a `Decoder` where the fault is in memory
            (`Plant` of decoders.py), a `copies.Copy` of a bundle where it is on disk (`Plant` of
            copies.py). Where the fault has a `layer`, `plant` gets it as the second argument
            (`LayerPlant` of the same files).
        bundle: key of `cases.BASES`, the bundle that the fault is planted in.
        layer: for a fault in the shard of a single layer. `make prove` also plants it in other
            layers of the same program.
        presets: the presets whose bundles can have the fault; None: all.
    """

    name: str
    gate: str
    plant: Callable[..., None]
    bundle: str = "llama"
    layer: int | None = None
    presets: tuple[str, ...] | None = None

    @property
    def slug(self) -> str:
        return slug(self.name)

    @property
    def first_preset(self) -> str:
        """The preset of a test that plants the fault once."""
        return self.presets[0] if self.presets else "fp16"

    def plant_in(self, target) -> None:
        """Plants the fault in a decoder or in a copy of files."""
        if self.layer is None:
            self.plant(target)
        else:
            self.plant(target, self.layer)
