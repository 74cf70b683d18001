"""What a tensor may store in place of its own values: those of another tensor, or its own
in another order, transposed, multiplied or with a number added."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from workbench.bundle import Manifest
from workbench.bundle.names import split_layer
from workbench.explain.weight_values import (
    as_matrix,
    compute_factor,
    describe_factor,
    measure_distance,
)
from workbench.models.checkpoint import Checkpoint

Kind = Literal[
    "other tensor",
    "rotary order",
    "transposed",
    "reversed",
    "shifted",
    "row order",
    "scaled",
    "added",
    "constant",
    "some rows",
    "unknown",
]
SAMPLED_ROWS = 256  # that are looked up among the checkpoint's
SAMPLED_COLUMNS = 512  # by which rows are compared
MAX_MATCHED_ROWS = 8192  # of a matrix whose rows are all looked up
CANDIDATE_ROWS = 16  # by which tensors of the same shape are compared
LEAST_AGREEMENT = 0.9  # share of rows that have to agree with an order
MIN_COLUMNS = 8  # of rows that can be told apart
# Matrices and biases whose rows are in the order of the rotary pairs.
ROTARY = re.compile(r"\b[qk]_proj\.(weight|bias)$")


@dataclass(frozen=True, eq=False)
class Explanation:
    """Values [rows, columns] that a tensor may store in place of its own."""

    kind: Kind
    clause: str
    values: torch.Tensor
    source: str | None = None


def list_arrangements(
    manifest: Manifest, name: str, actual: torch.Tensor, values: torch.Tensor
) -> Iterator[Explanation]:
    """What may be stored of a tensor's own values, in another order, multiplied or with
    a number added."""
    rows, columns = values.shape
    factor = compute_factor(actual, values)
    yield Explanation("scaled", describe_factor(factor), factor * values)
    added = (actual - values).mean(dim=1, keepdim=True)
    clause = f"has {float(added.mean()):.4g} added to its values"
    if rows > 1:
        clause += " (the mean of the rows, each of which has its own number)"
    yield Explanation("added", clause, values + added)
    if rows > 1:
        transposed = values.T.reshape(rows, columns)
        yield Explanation("transposed", "is transposed", transposed)
        reverse = "has its rows in reverse"
        yield Explanation("reversed", reverse, values.flip(0))
    reverse = "has its columns in reverse" if rows > 1 else "is reversed"
    yield Explanation("reversed", reverse, values.flip(1))
    yield from _rotary_orders(manifest, name, values)
    if rows > 1 and columns >= MIN_COLUMNS:
        yield from _row_orders(manifest, name, actual, values)


def _rotary_orders(
    manifest: Manifest, name: str, values: torch.Tensor
) -> Iterator[Explanation]:
    """The two orders of rotary pairs: halves, as Hugging Face's models have them, and
    pairs side by side, as Meta's checkpoints do."""
    layer, _ = split_layer(name)
    if layer is None or not ROTARY.search(name):
        return
    entry = manifest.layers[layer]
    _, D = entry.heads(manifest.dims)
    rows = values.T if name.endswith("bias") else values  # a bias is one row
    tables = [rope for rope in manifest.rope if rope.name == entry.rope]
    turned = min(D, 2 * len(tables[0].inv_freq)) if tables else D
    if len(rows) % D:
        return  # a layout of another family
    order = torch.arange(turned)
    halves = "interleaved to half-split"
    pairs = "half-split to interleaved"
    for description, inner in (
        (pairs, order.reshape(2, -1).T.ravel()),
        (halves, order.reshape(-1, 2).T.ravel()),
    ):
        inner = torch.cat([inner, torch.arange(turned, D)])
        changed = rows.reshape(-1, D, rows.shape[1])[:, inner].reshape(rows.shape)
        if name.endswith("bias"):
            changed = changed.T
        clause = (
            f"has the rows of its heads permuted from {description} rotary order "
            "(Hugging Face's checkpoints are half-split, Meta's interleaved)"
        )
        yield Explanation("rotary order", clause, changed)


def _row_orders(
    manifest: Manifest, name: str, actual: torch.Tensor, values: torch.Tensor
) -> Iterator[Explanation]:
    """The tensor's rows shifted, and in the order in which they resemble the
    checkpoint's."""
    count = len(values)
    sample = torch.linspace(0, count - 1, min(count, SAMPLED_ROWS)).long()
    matches = _nearest_rows(actual[sample], values)
    shifts = (sample - matches) % count
    shift = int(shifts.mode().values)
    if shift and float((shifts == shift).float().mean()) >= LEAST_AGREEMENT:
        signed = shift if shift <= count // 2 else shift - count
        clause = (
            f"has its rows shifted by {signed}: row {max(0, signed)} holds the "
            f"checkpoint's row {max(0, -signed)}"
        )
        yield Explanation("shifted", clause, values.roll(shift, 0))
    if count > MAX_MATCHED_ROWS:
        return
    order = _nearest_rows(actual, values)
    if len(order.unique()) < LEAST_AGREEMENT * count:
        return
    displaced = torch.nonzero(order != torch.arange(count)).flatten()
    if not len(displaced):
        return
    layer, _ = split_layer(name)
    D = manifest.layers[layer].heads(manifest.dims)[1] if layer is not None else count
    clause = (
        f"has its rows in another order: {_describe_moves(order, displaced, 'row')}"
    )
    if count % D == 0 and count > D:
        heads = order.reshape(-1, D)
        starts = heads[:, :1]
        if bool((heads == starts + torch.arange(D)).all() and (starts % D == 0).all()):
            heads = (starts // D).ravel()
            displaced = torch.nonzero(heads != torch.arange(len(heads))).flatten()
            moves = _describe_moves(heads, displaced, "block")
            clause = f"has its blocks of {D} rows, its heads, in another order: {moves}"
    yield Explanation("row order", clause, values[order])


def _describe_moves(order: torch.Tensor, displaced: torch.Tensor, unit: str) -> str:
    """The first two that were displaced, in words."""
    return ", ".join(
        f"{unit} {int(i)} holds the checkpoint's {unit} {int(order[i])}"
        for i in displaced[:2]
    )


def _nearest_rows(rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """For every row the number of the row of `values` with the largest cosine."""
    step = max(1, values.shape[1] // SAMPLED_COLUMNS)
    directions = torch.nn.functional.normalize(rows[:, ::step], dim=1)
    targets = torch.nn.functional.normalize(values[:, ::step], dim=1)
    return torch.cat([(part @ targets.T).argmax(1) for part in directions.split(1024)])


def list_other_tensors(
    checkpoint: Checkpoint, name: str, actual: torch.Tensor
) -> Iterator[Explanation]:
    """The tensor of the same shape whose values are nearest."""
    shape = checkpoint.shape(name)
    # the first rows are enough to tell tensors apart, and quick to read
    first = slice(0, CANDIDATE_ROWS) if len(shape) > 1 else None
    head = len(as_matrix(checkpoint.tensor(name, first)))
    least, nearest = math.inf, None
    for other in sorted(checkpoint.header):
        if other == name or not _is_text(checkpoint, other):
            continue
        if checkpoint.shape(other) == shape:
            distance = measure_distance(
                actual[:head], as_matrix(checkpoint.tensor(other, first))
            )
            if distance < least:
                least, nearest = distance, other
    if nearest:
        clause = f"holds the values of {nearest}"
        values = as_matrix(checkpoint.tensor(nearest))
        yield Explanation("other tensor", clause, values, nearest)


def _is_text(checkpoint: Checkpoint, name: str) -> bool:
    """Whether a tensor belongs to the text model."""
    return name.startswith(checkpoint.prefix) or name == checkpoint.head
