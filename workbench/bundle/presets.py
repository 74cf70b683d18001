"""The presets of `--compress`: their names, bits and scales, in one table. Of the
workbench it imports only the errors."""

import math
import re
from dataclasses import dataclass, replace

from workbench.errors import InputError


@dataclass(frozen=True)
class Preset:
    """How the matrices of a bundle are stored.

    Args:
        bits: of a stored element.
        granularity: coremltools' name for the part of a matrix that has one fp16 scale,
            such as `per_channel`. None: a lookup table, or fp16.
        block: inputs for which `per_block` has one scale.
        group: output rows that share one lookup table, a power of two; 0: the whole
            tensor shares one.
        needs_calibration: whether weights that are rounded one by one cost so much that
            `export` demands a text to calibrate with.
    """

    name: str
    bits: int
    granularity: str | None = None
    block: int = 0
    group: int = 0
    needs_calibration: bool = False

    @property
    def is_integer(self) -> bool:
        """Whether weights are integers times a scale."""
        return self.granularity is not None

    @property
    def is_table(self) -> bool:
        """Whether weights are indices into lookup tables."""
        return self.granularity is None and self.bits < 16

    @property
    def stored_bits(self) -> float:
        """Bits per weight, scales of blocks included; scales of tensors and channels
        and the values of tables are few."""
        return self.bits + 16 / self.block if self.block else self.bits

    def fitted(self, rows: int) -> "Preset":
        """The preset of a tensor with this many output rows: the group is halved until
        it divides them."""
        group = math.gcd(self.group, rows)  # of a power of two: the halved group
        if not self.group or group == self.group:
            return self
        name = f"lut{self.bits}-g{group}"
        return replace(self, name=name, group=group)


# the presets that `export` offers
PRESETS = {
    preset.name: preset
    for preset in (
        Preset("fp16", 16),
        Preset("int8-channel", 8, "per_channel"),
        Preset("lut6-g16", 6, group=16),
        Preset("lut4-g8", 4, group=8, needs_calibration=True),
        Preset("int4-block32", 4, "per_block", 32),
        Preset("int8-tensor", 8, "per_tensor"),
    )
}
# presets of earlier bundles, with one table for a whole tensor → what `export` offers in
# their place
REPLACED = {"lut4": "lut4-g8", "lut6": "lut6-g16"}
TABLE_NAME = re.compile(r"lut(4|6)-g(1|2|4|8|16|32|64|128)")
FP16 = PRESETS["fp16"]
# a preset for each tensor, which the manifest names; no tensor has this one
MIXED = Preset("mixed", 16, needs_calibration=True)


def find_preset(name: str) -> Preset:
    """The preset of a name: one of `PRESETS`, one of `REPLACED`, or tables for groups
    of another size, such as `lut4-g16`.

    Raises:
        ValueError: no preset has this name.
    """
    if name in PRESETS:
        return PRESETS[name]
    if name == MIXED.name:
        return MIXED
    if name in REPLACED:
        return Preset(name, PRESETS[REPLACED[name]].bits)
    match = TABLE_NAME.fullmatch(name)
    if match is None:
        raise ValueError(
            f"{', '.join(PRESETS)}, {MIXED.name}, or lut4-gN or lut6-gN with another "
            "power of two up to 128 for N"
        )
    bits = int(match[1])
    needs_calibration = PRESETS[REPLACED[f"lut{bits}"]].needs_calibration
    return Preset(name, bits, group=int(match[2]), needs_calibration=needs_calibration)


def check_calibrated(preset: Preset, has_text: bool, next_step: str) -> None:
    """Checks that a preset which needs a text to calibrate with has one.

    Args:
        next_step: how the caller takes a text.

    Raises:
        InputError: it has none.
    """
    if preset.needs_calibration and not has_text:
        subject = f"compress = {preset.name}"
        needed = "a text of about 8,192 tokens to calibrate with"
        raise InputError(subject, "no text", needed, next_step)
