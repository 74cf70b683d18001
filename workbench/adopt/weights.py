"""Finds the checkpoint's matrices among the constants of packages, by their values.

Constants do not have the checkpoint's names, and may be slices of a matrix."""

from collections.abc import Sequence

import torch

import miltorch
from miltorch.constants import Constants
from workbench.bundle.names import EMBEDDING
from workbench.models.checkpoint import Checkpoint

# Largest relative RMS distance of a compressed copy. Tables of 2 bits cost 0.34 of
# Gaussian weights; two unrelated matrices are 1.4 apart.
ALIKE = 0.5


def find_weights(
    programs: Sequence[miltorch.Program], checkpoint: Checkpoint
) -> dict[str, list[str]]:
    """Every matrix of a checkpoint's text model that the programs of packages contain
    whole, with the constants `part/name` that its rows consist of. `EMBEDDING` is the
    table of a lookup, since a tied head may be compressed in another way."""
    tables: dict[str, torch.Tensor] = {}
    other_matrices: dict[str, torch.Tensor] = {}
    for part, program in enumerate(programs):
        lookups = [op for op in program.block.walk() if op.kind == "gather"]
        table_names = {name for op in lookups for name in op.reads()}
        for name, value in Constants(program).items_read_at_run_time():
            if torch.is_tensor(value) and value.squeeze().ndim == 2:
                matrices = tables if name in table_names else other_matrices
                matrices[f"{part}/{name}"] = value.float().squeeze()
    table = checkpoint.tensor(f"{checkpoint.prefix}embed_tokens.weight")
    pieces_of = {EMBEDDING: find_pieces(table, tables)}
    for name in checkpoint.matrices:
        pieces_of[name] = find_pieces(checkpoint.tensor(name), other_matrices | tables)
    return {name: pieces for name, pieces in pieces_of.items() if pieces}


def find_pieces(matrix: torch.Tensor, constants: dict[str, torch.Tensor]) -> list[str]:
    """The names of constants whose rows are those of a matrix, in order; none if rows
    are missing.

    A constant's place is looked for by its first row alone: if another row of the
    matrix has the same direction, the constant may not be found."""
    pieces: dict[int, str] = {}  # first row of the matrix that it contains → constant
    for name, constant in constants.items():
        if constant.shape[1] != matrix.shape[1]:
            continue
        # The row that the constant's first row has the largest cosine with. The norm of
        # the constant's row scales all cosines alike, so that it is left out.
        cosines = matrix @ constant[0] / matrix.norm(dim=1).clamp_min(1e-30)
        first = int(cosines.argmax())
        rows = matrix[first : first + len(constant)]
        if len(rows) < len(constant):
            continue
        if (rows - constant).norm() <= ALIKE * rows.norm():
            pieces.setdefault(first, name)
    names, next_row = [], 0
    while next_row in pieces:
        names.append(pieces[next_row])
        next_row += len(constants[pieces[next_row]])
    return names if next_row == len(matrix) else []
