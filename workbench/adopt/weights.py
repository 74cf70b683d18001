"""Finds the checkpoint's matrices among the constants of packages, by their values.

Constants do not have the checkpoint's names, and may be slices of a matrix."""

from collections.abc import Sequence

import torch

import miltorch
from miltorch.steps import Constants
from workbench.bundle.names import EMBEDDING
from workbench.models.checkpoint import Checkpoint

# Relative RMS of a compressed copy at most. Tables of 2 bits cost 0.34 of Gaussian
# weights; two matrices that have nothing to do with each other are 1.4 apart.
ALIKE = 0.5


def found_weights(
    programs: Sequence[miltorch.Program], checkpoint: Checkpoint
) -> dict[str, list[str]]:
    """Every matrix of a checkpoint's text model that the programs of packages hold
    whole: the constants `part/name` whose rows it is made of. `EMBEDDING` is the table
    of a lookup, since a tied head may be compressed in another way."""
    tables: dict[str, torch.Tensor] = {}
    others: dict[str, torch.Tensor] = {}
    for part, program in enumerate(programs):
        lookups = [op for op in program.block.walk() if op.kind == "gather"]
        looked_up = {name for op in lookups for name in op.reads()}
        for name, value in Constants(program).read():
            if torch.is_tensor(value) and value.squeeze().ndim == 2:
                held = tables if name in looked_up else others
                held[f"{part}/{name}"] = value.float().squeeze()
    table = checkpoint.tensor(f"{checkpoint.prefix}embed_tokens.weight")
    found = {EMBEDDING: pieces(table, tables)}
    for name in checkpoint.matrices:
        found[name] = pieces(checkpoint.tensor(name), others | tables)
    return {name: places for name, places in found.items() if places}


def pieces(matrix: torch.Tensor, constants: dict[str, torch.Tensor]) -> list[str]:
    """The names of constants whose rows are those of a matrix, in order; none if rows
    are missing."""
    found = {}  # by the first row of the matrix that they hold
    for name, constant in constants.items():
        if constant.shape[1] == matrix.shape[1]:
            likeness = matrix @ constant[0] / matrix.norm(dim=1).clamp_min(1e-30)
            first = int(likeness.argmax())
            rows = matrix[first : first + len(constant)]
            alike = len(rows) == len(constant)
            if alike and (rows - constant).norm() <= ALIKE * rows.norm():
                found.setdefault(first, name)
    names, end = [], 0
    while end in found:
        names.append(found[end])
        end += len(constants[found[end]])
    return names if end == len(matrix) else []
