"""Finds the checkpoint's matrices among the constants of packages, by their values.

Constants do not have the checkpoint's names, and may be slices of a matrix or several
joined."""

from collections.abc import Sequence

import numpy as np
import torch

import miltorch
from miltorch.steps import Constants
from workbench.bundle.foreign import Piece
from workbench.bundle.names import EMBEDDING
from workbench.models.checkpoint import Checkpoint

# Relative RMS of a compressed copy at most. Tables of 2 bits cost 0.34 of Gaussian
# weights; two matrices that have nothing to do with each other are 1.4 apart.
ALIKE = 0.5
Held = tuple[dict, torch.Tensor]  # fields of a Piece, the constant as [rows, columns]


def found_weights(
    packages: Sequence[dict[str | None, miltorch.Program]], checkpoint: Checkpoint
) -> dict[str, tuple[Piece, ...]]:
    """Every matrix of a checkpoint's text model as the pieces it is made of in the
    programs of packages, none if they do not hold it whole. `EMBEDDING` is the table
    of a lookup, since a tied head may be compressed in another way."""
    tables, others = [], []
    for part, programs in enumerate(packages):
        for function, program in programs.items():
            lookups = [op for op in program.block.walk() if op.kind == "gather"]
            looked_up = {name for op in lookups for name in op.reads()}
            for name, value in Constants(program).read():
                if torch.is_tensor(value) and value.squeeze().ndim == 2:
                    matrix = value.float().squeeze()
                    place = {"part": part, "function": function, "constant": name}
                    held = tables if name in looked_up else others
                    held.append((place, matrix))
                    held.append((place | {"transposed": True}, matrix.t()))
    found = {
        name: _pieces(checkpoint.tensor(name), [*others, *tables])
        for name in checkpoint.matrices
    }
    if tables:
        table = checkpoint.tensor(f"{checkpoint.prefix}embed_tokens.weight")
        found[EMBEDDING] = _pieces(table, [*tables, *others])
    return found


def _pieces(matrix: torch.Tensor, constants: list[Held]) -> tuple[Piece, ...]:
    """The pieces of constants that make up a matrix; none if rows are missing."""
    filled, pieces = np.zeros(len(matrix), bool), {}
    for place, constant in constants:
        if constant.shape[1] == matrix.shape[1] and not filled.all():
            source, target, count = _overlap(matrix, constant)
            rows = slice(target, target + count)
            if count and not filled[rows].any():
                filled[rows] = True
                pieces[target] = Piece(**place, source=source, count=count)
    return tuple(pieces[row] for row in sorted(pieces)) if filled.all() else ()


def _overlap(matrix: torch.Tensor, constant: torch.Tensor) -> tuple[int, int, int]:
    """(first row of the constant, first row of the matrix, number of rows) that are
    alike: the shorter of both from the row of the longer on that is most like its
    first one; else no rows."""
    shorter, longer = sorted((constant, matrix), key=len)
    norms = longer.norm(dim=1).clamp_min(1e-30)
    first = int((longer @ shorter[0] / norms).argmax())
    one, other = longer[first : first + len(shorter)], shorter[: len(longer) - first]
    if (one - other).norm() > ALIKE * one.norm():
        return 0, 0, 0
    source, target = (0, first) if shorter is constant else (first, 0)
    return source, target, len(one)
