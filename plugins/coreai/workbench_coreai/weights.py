"""A stored weight in torch: its arrays as tensors, the module that computes the weight
from them, and their names in a traced program.

A weight has one *part*, `val`, or two: integers `data` and their `scale`, or `indices`
and the table `lut`. A part has the same bits as in a Core ML shard."""

import numpy as np
import torch
from torch import nn

from workbench.bundle.presets import Preset
from workbench.exporter.weights import WeightSource

# the stored weight of parameter `o.weight` is the submodule `o.weight_stored`
STORED = "_stored"


def part_name(path: str, role: str) -> str:
    """The name of a part in a traced program: (`o.weight`, `scale`) →
    `o.weight_stored.scale`."""
    return f"{path}{STORED}.{role}"


def is_part(name: str | None) -> bool:
    """Whether a traced program's input of this name is a part of a stored weight."""
    return name is not None and STORED in name


def shape_parts(
    weight: WeightSource, arrays: dict[str, np.ndarray], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The stored arrays of a weight, by role, copied in the shapes that Core AI's
    operations take. A `val` has the program's dtype, which its converter would give it
    anyway.

    A weight [O, I, 1, 1] of 4 bits has

    - data, indices: [O, I, 1, 1]
    - scale: [O, blocks of a row, 1, 1]; [1, 1, 1, 1] for the whole weight
    - lut: [groups of rows, 1, 1, 1, 16, 1]
    """
    preset = weight.preset
    trailing = [1] * (len(weight.shape) - 2)
    blocks = weight.shape[1] // preset.block if preset.block else 1
    entries = 1 << preset.bits
    parts = {}
    for role, array in arrays.items():
        shape = weight.shape
        if role == "scale":
            shape = (array.size // blocks, blocks, *trailing)
        elif role == "lut":
            shape = (array.size // entries, 1, *trailing, entries, 1)
        parts[role] = torch.from_numpy(array.reshape(shape).copy())
    if "val" in parts:
        parts["val"] = parts["val"].to(dtype)
    return parts


class StoredWeight(nn.Module):
    """Computes a weight, in the program's dtype, from its parts. Its values are those
    of fp16 arithmetic, whatever that dtype."""

    def __init__(
        self, parts: dict[str, torch.Tensor], preset: Preset, dtype: torch.dtype
    ):
        super().__init__()
        # of `data`, such as torch.int4
        self.integer_type = getattr(torch, f"int{preset.bits}", torch.int8)
        self.dtype = dtype
        for role, part in parts.items():
            self.register_buffer(role, part)

    def forward(self) -> torch.Tensor:
        coreai = torch.ops.coreai
        if hasattr(self, "val"):
            value = self.val
        elif hasattr(self, "lut"):
            value = coreai.lut_to_dense(self.indices, self.lut, 0)
        else:
            value = coreai.constexpr_blockwise_shift_scale(
                self.data, self.scale, None, None, self.integer_type, None
            )
        return value if value.dtype == self.dtype else value.to(self.dtype)


def replace_parameter(module: nn.Module, path: str, stored: StoredWeight) -> None:
    """Replaces the parameter at `path` by a property that computes it from a stored
    weight, so that torch.export traces this computation.

    A property belongs to a class, and other modules of the class keep their parameters:
    the parameter's owner becomes the only instance of a new subclass."""
    parent, _, name = path.rpartition(".")
    owner = module.get_submodule(parent)
    del owner._parameters[name]
    owner.register_module(name + STORED, stored)
    owner_class = type(owner)
    weight = property(lambda self: self.get_submodule(name + STORED)())
    owner.__class__ = type(owner_class.__name__, (owner_class,), {name: weight})
