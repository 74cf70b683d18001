"""Finds the checkpoint's matrices among the constants of adopted packages, by their
values.

Constants do not have the checkpoint's names, and may be slices of a matrix or several
joined."""

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from workbench.adopt.adapter import EMBEDDING, Adapter
from workbench.check.golden import WeightReader
from workbench.models.checkpoint import Checkpoint

ALIKE = 0.8  # least cosine of a matrix and its compressed copy; of two matrices it is near 0
MAX_SCALE = 1.25  # largest ratio of the norms of a matrix and its compressed copy


def stored_weights(
    adapter: Adapter, checkpoint: Checkpoint
) -> tuple[WeightReader, list[str]]:
    """A reader of the decompressed weights of a portable adapter's packages, and the
    names of the matrices that were not recognised.

    These matrices, and all vectors, are the checkpoint's, rounded to float16.
    `EMBEDDING` is the table of the embedding lookup, since a tied head may be
    compressed in another way."""
    table = f"{checkpoint.prefix}embed_tokens.weight"
    constants, matrices = list(_matrices(adapter, False)), {}
    for name in checkpoint.header:
        if _is_matrix(checkpoint, name):
            matrices[name] = _assemble(checkpoint.tensor(name).float(), constants)
    if adapter.host_embeds:
        matrices[EMBEDDING] = torch.from_numpy(adapter.table)
    else:
        constants = [*_matrices(adapter, True), *constants]
        matrices[EMBEDDING] = _assemble(checkpoint.tensor(table).float(), constants)
    if matrices[table] is None:  # the head reads the same constant, or there is no head
        matrices[table] = matrices[EMBEDDING]
    missing = [name for name, value in matrices.items() if value is None]

    def read(name: str) -> torch.Tensor:
        value = matrices.get(name)
        if value is None:
            source = {EMBEDDING: table}.get(name, name)
            value = checkpoint.tensor(source).half().float()
        return value

    return read, missing


def _is_matrix(checkpoint: Checkpoint, name: str) -> bool:
    text = name.startswith((checkpoint.prefix, "lm_head."))
    return text and name.endswith(".weight") and len(checkpoint.shape(name)) == 2


def _matrices(adapter: Adapter, looked_up: bool) -> Iterator[torch.Tensor]:
    """Every constant of the packages that may contain rows of a matrix, as [rows,
    columns]: those that a gather reads, or all others."""
    for model in adapter.models.values():
        names = set()
        for op in model.program.block.walk():
            if op.kind == "gather":
                names.update(op.reads())
        for name, value in model.executable.body.constants.items():
            weight = isinstance(value, torch.Tensor) and value.is_floating_point()
            if weight and (name in names) == looked_up:
                matrix = value.float().squeeze()
                if matrix.ndim == 2:
                    yield matrix
                    yield matrix.T


def _assemble(
    matrix: torch.Tensor, constants: Iterable[torch.Tensor]
) -> torch.Tensor | None:
    """The matrix assembled from the constants that contain its rows; None if rows are
    missing."""
    stored = matrix.clone()
    filled = np.zeros(len(matrix), bool)
    for constant in constants:
        if constant.shape[1] == matrix.shape[1] and not filled.all():
            rows, values = _overlap(matrix, constant)
            stored[rows], filled[rows] = values, True
    return stored if filled.all() else None


def _overlap(
    matrix: torch.Tensor, constant: torch.Tensor
) -> tuple[slice, torch.Tensor]:
    """The rows of a matrix that a constant contains, with their values: from the place
    of the constant's first row in the matrix on, or of the matrix's first row in the
    constant, if all further rows are alike; else no rows."""
    first = _most_alike(matrix, constant[0])
    later = constant[_most_alike(constant, matrix[0]) :]
    for rows, values in (
        (slice(first, first + len(constant)), constant),
        (slice(len(later)), later),
    ):
        target = matrix[rows]
        values = values[: len(target)]
        norms = float(values.norm()), float(target.norm())
        alike = float((values * target).sum()) >= ALIKE * norms[0] * norms[1] > 0
        if alike and max(norms) <= MAX_SCALE * min(norms):
            return rows, values
    return slice(0), matrix[:0]


def _most_alike(matrix: torch.Tensor, row: torch.Tensor) -> int:
    """The row of a matrix with the largest cosine to `row`."""
    return int((matrix @ row / matrix.norm(dim=1).clamp_min(1e-30)).argmax())
