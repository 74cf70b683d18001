"""Rows of the head that a bundle has lost.

A row of zeros gives its token the logit 0, so that the token wins nowhere; where it is
the row of an end token, the text never ends. A row counts as lost where its stored values
differ from the checkpoint's by `LOST` of the row's norm. Rows that are equal to each other
in the checkpoint itself, as those of unused tokens are, are stored as they are and are no
fault."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from workbench.bundle import Bundle
from workbench.check.compare import row_blocks
from workbench.decode.tokenizer import token_labels
from workbench.models.checkpoint import Checkpoint
from workbench.runtime import constants

# A row of zeros is at 1. Sound rows of SmolLM2-135M-Instruct and Gemma 3 270M reach 0.06
# (int8-tensor), 0.19 (int4-block32), 0.32 (lut4) and 0.60 (lut6, Gemma).
LOST = 0.8
MAX_ROWS = 8  # that a sentence names


@dataclass(frozen=True)
class LostRow:
    """A lost row of the head.

    Attributes:
        token: whose logit the row computes.
        error: norm of the difference from the checkpoint's row, over that row's norm.
        is_end: whether the token ends a text.
    """

    token: int
    error: float
    is_end: bool


def lost_rows(bundle: Bundle, checkpoint: Checkpoint) -> list[LostRow]:
    """The lost rows of a bundle's head, end tokens first. Packages whose head was not
    recognised have none.

    Raises:
        KeyError, ValueError: a head that does not fit its entry in the manifest.
    """
    ends = {*checkpoint.tokens.eos, *bundle.manifest.tokens.eos}
    rows = []
    for shard in bundle.manifest.shards:
        if checkpoint.head not in shard.weights:
            continue
        stored = constants(bundle, shard)(shard.weights[checkpoint.head])
        stored = stored.reshape(-1, stored.shape[1])
        whole = len(stored) == checkpoint.shape(checkpoint.head)[0]
        first = 0 if whole else shard.rows[0]
        for part in row_blocks(stored):
            place = slice(first + part.start, first + part.stop)
            original = checkpoint.tensor(checkpoint.head, place)
            if original.shape != stored[part].shape:
                raise ValueError(f"a head of shape {[*stored.shape]}")
            norms = torch.linalg.vector_norm(original, dim=1)
            distances = torch.linalg.vector_norm(stored[part].float() - original, dim=1)
            # not `>=`: a distance that is not finite is a lost row too
            lost = ~(distances < LOST * norms) & ~((norms == 0) & (distances == 0))
            for row in torch.nonzero(lost).flatten().tolist():
                error = float(distances[row] / norms[row])
                token = place.start + row
                rows.append(LostRow(token, error, token in ends))
    return sorted(rows, key=lambda row: not row.is_end)


def describe_lost_rows(rows: Sequence[LostRow], checkpoint: Checkpoint) -> str:
    """One sentence that names the lost rows; empty without one."""
    if not rows:
        return ""
    labels = token_labels(checkpoint.tokenizer, [row.token for row in rows[:MAX_ROWS]])
    named = []
    for row, label in zip(rows, labels):
        token = f"{row.token}" if label == str(row.token) else f"{row.token} {label!r}"
        kind = ", an end token" if row.is_end else ""
        named.append(f"{token}{kind} ({row.error:.2g} of its norm)")
    more = f" and {len(rows) - MAX_ROWS} more" if len(rows) > MAX_ROWS else ""
    noun = "row" if len(rows) == 1 else "rows"
    count = np.count_nonzero([row.is_end for row in rows])
    ends = "; a text cannot end with a lost end token" if count else ""
    return (
        f"{noun} of the head that differ from the checkpoint's by at least {LOST:g} of "
        f"their norm: token {', '.join(named)}{more}{ends}"
    )
