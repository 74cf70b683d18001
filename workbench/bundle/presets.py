"""The presets of `--compress`: the one table of their names, bits and scales. A
leaf."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """How the matrices of a bundle are stored.

    `bits` are those of a stored element. An integer preset has fp16 scales, at
    coremltools' `granularity`, of `block` inputs each for `per_block`. A lookup table
    has neither; fp16 neither."""

    name: str
    bits: int
    granularity: str | None = None
    block: int = 0

    @property
    def is_integer(self) -> bool:
        """Whether weights are integers times a scale."""
        return self.granularity is not None

    @property
    def stored_bits(self) -> float:
        """Bits per weight with the scales of blocks; those of tensors, channels and
        tables are few."""
        return self.bits + 16 / self.block if self.block else self.bits


PRESETS = {
    preset.name: preset
    for preset in (
        Preset("fp16", 16),
        Preset("int8-tensor", 8, "per_tensor"),
        Preset("int8-channel", 8, "per_channel"),
        Preset("int4-block32", 4, "per_block", 32),
        Preset("lut4", 4),
        Preset("lut6", 6),
    )
}
FP16 = PRESETS["fp16"]
