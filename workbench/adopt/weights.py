"""Finds the checkpoint's matrices among the constants of packages, by their values.

Constants do not have the checkpoint's names, and may be slices of a matrix or several
joined."""

from collections.abc import Iterator

import numpy as np
import torch

import miltorch
from miltorch.steps import Constants
from workbench.bundle import Bundle, Shard
from workbench.bundle.foreign import Piece
from workbench.bundle.names import EMBEDDING
from workbench.models.checkpoint import Checkpoint

ALIKE = 0.8  # least cosine of a matrix and its compressed copy; of two matrices it is near 0
MAX_SCALE = 1.25  # largest ratio of the norms of a matrix and its compressed copy
Held = tuple[dict, torch.Tensor]  # fields of a Piece, the constant as [rows, columns]


def found_weights(
    bundle: Bundle, shard: Shard, checkpoint: Checkpoint
) -> tuple[dict[str, tuple[Piece, ...]], set[str]]:
    """The matrices of a checkpoint that the packages of a shard hold whole, as the
    pieces they are made of, and the names of all its matrices. `EMBEDDING` is the table
    of a lookup, since a tied head may be compressed in another way."""
    looked_up, others = [], []
    for is_table, held in _constants(bundle, shard):
        (looked_up if is_table else others).append(held)
    table = f"{checkpoint.prefix}embed_tokens.weight"
    names, found = set(), {}
    for name in checkpoint.header:
        text = name.startswith((checkpoint.prefix, "lm_head."))
        if text and name.endswith(".weight") and len(checkpoint.shape(name)) == 2:
            names.add(name)
            found[name] = _pieces(checkpoint.tensor(name).float(), others)
    if looked_up:
        matrix = checkpoint.tensor(table).float()
        found[EMBEDDING] = _pieces(matrix, [*looked_up, *others])
        # a tied head may read the same constant
        found[table] = found[table] or found[EMBEDDING]
    return {name: pieces for name, pieces in found.items() if pieces}, names


def _constants(bundle: Bundle, shard: Shard) -> Iterator[tuple[bool, Held]]:
    """Every constant that may contain rows of a matrix, as [rows, columns] and
    transposed, and whether a gather reads it."""
    for index, part in enumerate(shard.foreign.parts):
        package = bundle.package(shard) / part.package
        for function in dict.fromkeys(f.name for f in part.functions):
            program, gathered = miltorch.read(package, function), set()
            for op in program.block.walk():
                if op.kind == "gather":
                    gathered.update(op.reads())
            for name, value in Constants(program).read():
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    matrix = value.float().squeeze()
                    place = {"part": index, "function": function, "constant": name}
                    if matrix.ndim == 2:
                        yield name in gathered, (place, matrix)
                        turned = place | {"transposed": True}
                        yield name in gathered, (turned, matrix.T)


def _pieces(matrix: torch.Tensor, constants: list[Held]) -> tuple[Piece, ...]:
    """The pieces of constants that make up a matrix; none if rows are missing."""
    filled, pieces = np.zeros(len(matrix), bool), []
    for place, constant in constants:
        if constant.shape[1] == matrix.shape[1] and not filled.all():
            source, target, count = _overlap(matrix, constant)
            rows = slice(target, target + count)
            if count and not filled[rows].any():
                filled[rows] = True
                where = {"source": source, "target": target, "count": count}
                pieces.append(Piece(**place, **where))
    return tuple(pieces) if filled.all() else ()


def _overlap(matrix: torch.Tensor, constant: torch.Tensor) -> tuple[int, int, int]:
    """(first row of the constant, first row of the matrix, number of rows) that are
    alike: from the place of the constant's first row in the matrix on, or of the
    matrix's first row in the constant, if all further rows are; else no rows."""
    starts = (
        (0, _most_alike(matrix, constant[0])),
        (_most_alike(constant, matrix[0]), 0),
    )
    for source, target in starts:
        count = min(len(constant) - source, len(matrix) - target)
        a, b = constant[source : source + count], matrix[target : target + count]
        norms = float(a.norm()), float(b.norm())
        alike = float((a * b).sum()) >= ALIKE * norms[0] * norms[1] > 0
        if alike and max(norms) <= MAX_SCALE * min(norms):
            return source, target, count
    return 0, 0, 0


def _most_alike(matrix: torch.Tensor, row: torch.Tensor) -> int:
    """The row of a matrix with the largest cosine to `row`."""
    return int((matrix @ row / matrix.norm(dim=1).clamp_min(1e-30)).argmax())
