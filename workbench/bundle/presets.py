"""The presets of `--compress`: their names, bits and scales, in one table. Of the
workbench it imports only the errors.

    >>> find_preset("lut4-g8").for_rows(20).name  # 4 divides 20 rows, 8 does not
    'lut4-g4'
"""

import math
import re
from dataclasses import dataclass, replace
from typing import Literal

from workbench.errors import InputError


@dataclass(frozen=True)
class Preset:
    """How the matrices of a bundle are stored.

    Args:
        kind: `fp16`: the values; `integer`: integers times a scale; `table`: indices
            into lookup tables of fp16 values; `mixed`: each tensor has a preset of its
            own, and none has this one.
        bits: of a stored element. Of `mixed`, whose elements differ, the 16 of an
            uncompressed one.
        granularity: of integers, coremltools' name for the part of a matrix that has one
            fp16 scale, such as `per_channel`. None: not integers.
        block: inputs for which `per_block` has one scale; 0: another granularity.
        group: output rows that share one lookup table, a power of two; 0: the whole
            tensor shares one, or has none.
        needs_calibration: whether `export` demands a calibration text, because rounding
            each weight to the nearest costs too much.
    """

    name: str
    kind: Literal["fp16", "integer", "table", "mixed"]
    bits: int
    granularity: str | None = None
    block: int = 0
    group: int = 0
    needs_calibration: bool = False

    @property
    def is_integer(self) -> bool:
        """Whether weights are integers times a scale."""
        return self.kind == "integer"

    @property
    def is_table(self) -> bool:
        """Whether weights are indices into lookup tables."""
        return self.kind == "table"

    @property
    def stored_bits(self) -> float:
        """Bits per weight, scales of blocks included; scales of tensors and channels
        and the values of tables are few."""
        return self.bits + 16 / self.block if self.block else self.bits

    def for_rows(self, rows: int) -> "Preset":
        """This preset for a tensor of `rows` output rows: its group is halved until it
        divides them."""
        group = math.gcd(self.group, rows)  # the group is a power of two
        if not self.group or group == self.group:
            return self
        name = f"lut{self.bits}-g{group}"
        return replace(self, name=name, group=group)


# Indices of so many bits need a calibration text (see `Preset.needs_calibration`).
TABLE_BITS_THAT_NEED_CALIBRATION = 4


def _table_preset(name: str, bits: int, group: int) -> Preset:
    """The preset of lookup tables for groups of rows."""
    needs_calibration = bits == TABLE_BITS_THAT_NEED_CALIBRATION
    return Preset(name, "table", bits, group=group, needs_calibration=needs_calibration)


# the presets that `export` offers
PRESETS = {
    preset.name: preset
    for preset in (
        Preset("fp16", "fp16", 16),
        Preset("int8-channel", "integer", 8, "per_channel"),
        _table_preset("lut6-g16", 6, 16),
        _table_preset("lut4-g8", 4, 8),
        Preset("int4-block32", "integer", 4, "per_block", 32),
        Preset("int8-tensor", "integer", 8, "per_tensor"),
    )
}
# presets of earlier bundles, with one table for a whole tensor → what `export` offers in
# their place
REPLACED = {"lut4": "lut4-g8", "lut6": "lut6-g16"}
# Bits of an index into a lookup table. Core ML's palettes may have 1, 2, 3, 4, 6 or 8.
TABLE_BITS = (4, 6)
TABLE_NAME = re.compile(
    rf"lut({'|'.join(map(str, TABLE_BITS))})-g(1|2|4|8|16|32|64|128)"
)
FP16 = PRESETS["fp16"]
# `Manifest.formats` has the presets of its tensors
MIXED = Preset("mixed", "mixed", 16, needs_calibration=True)


def find_preset(name: str) -> Preset:
    """The preset of a name: one of `PRESETS`, one of `REPLACED`, or tables for groups
    of another size, such as `lut4-g16`.

    Raises:
        ValueError: no preset has this name. Its text is only the list of names that
            exist, which callers print as what is needed.
    """
    if name in PRESETS:
        return PRESETS[name]
    if name == MIXED.name:
        return MIXED
    if name in REPLACED:
        # bundles that have one exist, whether or not a text decided their weights
        return Preset(name, "table", PRESETS[REPLACED[name]].bits)
    match = TABLE_NAME.fullmatch(name)
    if match is None:
        tables = " or ".join(f"lut{bits}-gN" for bits in TABLE_BITS)
        raise ValueError(
            f"{', '.join(PRESETS)}, {MIXED.name}, or {tables} with another power of two "
            "up to 128 for N"
        )
    return _table_preset(name, bits=int(match[1]), group=int(match[2]))


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
