"""Finds which plane of the packages' states holds which cache, by values: the keys and
values of one token are compared with the checkpoint's. At position 0 neither rope nor
masks matter, so that a fault of the export rarely prevents this."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from workbench.bundle import Bundle, Manifest, StateEntry
from workbench.check import compare, hf
from workbench.check.stretches import state_rows
from workbench.decode import Decoder
from workbench.models.checkpoint import Checkpoint

UNMATCHED = 1e9  # in place of an error that is not finite; larger than any other


def match_caches(
    manifest: Manifest, checkpoint: Checkpoint, root: Path
) -> tuple[Manifest, float]:
    """Assigns every cache to the plane whose row of one token is nearest to the
    checkpoint's.

    Args:
        manifest: of the packages in the folder `root`, with some assignment.

    Returns:
        The manifest, and the largest relative RMS of these rows.
    """
    from scipy.optimize import linear_sum_assignment

    (shard,) = manifest.shards
    names, entries = list(shard.states), list(shard.states.values())
    errors = plane_errors(manifest, checkpoint, root)
    caches, planes = linear_sum_assignment(errors)
    states = {
        names[cache]: entries[cache].model_copy(
            update={"tensor": entries[plane].tensor}
        )
        for cache, plane in zip(caches, planes)
    }
    shards = [shard.model_copy(update={"states": states})]
    manifest = manifest.model_copy(update={"shards": shards})
    return manifest, errors[caches, planes].max()


def plane_errors(manifest: Manifest, checkpoint: Checkpoint, root: Path) -> np.ndarray:
    """Runs one token and returns the errors [caches, planes]: the `row_error` of every
    plane against every cache, both in the order of the shard's states."""
    # an ordinary token: the first ids are special ones
    token = manifest.dims.V // 2
    trace = hf.trace_reference(checkpoint, None, [token], head=False)
    decoder = Decoder(Bundle(root, manifest), "portable", "exact")
    decoder.decode_one_token(token)
    (state,) = decoder.seqs.states
    (shard,) = manifest.shards
    planes = [
        read_first_row(state.read_plane(entry.tensor))
        for entry in shard.states.values()
    ]
    errors = np.empty((len(planes), len(planes)))
    for i, (name, cache) in enumerate(shard.states.items()):
        expected = state_rows(trace, name)
        for j, plane in enumerate(planes):
            errors[i, j] = row_error(expected, cache, plane)
    return errors


@dataclass(frozen=True)
class FirstRow:
    """The first row of a plane, copied: the plane itself may be a large state.

    Args:
        values: [heads, width].
        rows: of the whole plane.
    """

    values: np.ndarray
    rows: int


def read_first_row(plane: np.ndarray) -> FirstRow:
    """The first row of a plane [1, heads, rows, width]."""
    return FirstRow(plane[0, :, 0].copy(), plane.shape[2])


def row_error(expected: np.ndarray, cache: StateEntry, plane: FirstRow) -> float:
    """The relative RMS of a plane's first row, against the row that a cache should have.
    `UNMATCHED` where it is not finite, or where the plane cannot hold the cache.

    Args:
        expected: the checkpoint's keys or values of the token at position 0.
        cache: of shape [1, heads, rows, width].
    """
    _, heads, rows, width = cache.shape
    plane_heads, plane_width = plane.values.shape
    # a plane holds a cache of as many heads and rows, and may be wider
    if (plane_heads, plane.rows) != (heads, rows) or plane_width < width:
        return UNMATCHED
    error = compare.relative_rms(expected, plane.values[:, :width])
    return error if np.isfinite(error) else UNMATCHED
