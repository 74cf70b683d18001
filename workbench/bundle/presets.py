"""The presets of `--compress`: their names, bits and scales, in one table. A leaf."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """How the matrices of a bundle are stored.

    Args:
        bits: of a stored element.
        granularity: coremltools' name for the part of a matrix that has one fp16 scale,
            such as `per_channel`. None: a lookup table, or fp16.
        block: inputs for which `per_block` has one scale.
    """

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
        """Bits per weight, scales of blocks included; scales of tensors and channels
        and the values of tables are few."""
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
