"""Names the fault of a tensor that gate `weights` calls wrong, where its stored values
follow from values of the checkpoint: those of another tensor, or its own in another
order, transposed, multiplied or shifted.

Stored values are compared decompressed. A compressed tensor is never equal to what it was
made from, so that an explanation counts if it leaves a small part of the distance
(`EXPLAINED`) that the tensor has from its own values."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from workbench.bundle import Bundle, Manifest
from workbench.bundle.names import split_layer
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
# Tensors that are examined in any case, and at most where they are small: one of 50
# million elements takes a few seconds.
LEAST_TENSORS, MAX_TENSORS = 4, 12
SMALL = 1 << 25  # elements of all that are examined
# Elements of further tensors, which are compared with the faults of the first ones alone.
MAX_ELEMENTS = 1 << 28
MAX_LISTED = 3  # names in a clause
# Faults that a converter makes in every layer alike, and the kinds that need a search.
REPEATED = {"rotary order", "transposed", "reversed", "scaled"}
SEARCHED = {"shifted", "row order"}
# Largest distance that an explanation leaves, in parts of the distance from the tensor's
# own values: unrelated values are √2 of their size away, and those of 4 bits 0.1 to 0.2.
EXPLAINED = 0.3
CORRELATED = 0.95  # least cosine of values that are a multiple of others
SIGNIFICANT = 10.0  # standard deviations of a factor that is not 1
# A row is wrong by itself if it is this many times as far away as the median row, and by
# more than rounding to fp16.
OUTLIER = 2.5
ROUNDING = 2.0**-10
SAMPLED_ROWS = 256  # that are looked up among the checkpoint's
SAMPLED_COLUMNS = 512  # by which rows are compared
MAX_MATCHED_ROWS = 8192  # of a matrix whose rows are all looked up
CANDIDATE_ROWS = 16  # by which tensors of the same shape are compared
LEAST_AGREEMENT = 0.9  # share of rows that have to agree with an order
MIN_COLUMNS = 8  # of rows that can be told apart
# Matrices and biases whose rows are in the order of the rotary pairs.
ROTARY = re.compile(r"\b[qk]_proj\.(weight|bias)$")
Reader = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class WeightFault:
    """How the stored values of a tensor follow from values of the checkpoint.

    Attributes:
        tensor: its name in the checkpoint.
        clause: the fault in words, which go behind the name.
        source: the tensor whose values are stored; None where they are its own.
    """

    tensor: str
    kind: Kind
    clause: str
    source: str | None = None

    def __str__(self) -> str:
        return f"{self.tensor} {self.clause}"


@dataclass(frozen=True, eq=False)
class Explanation:
    """Values [rows, columns] that a tensor may store in place of its own."""

    kind: Kind
    clause: str
    values: torch.Tensor
    source: str | None = None


def describe_weight_faults(
    bundle: Bundle, checkpoint: Checkpoint, stored: Reader, tensors: Sequence[str]
) -> tuple[str, list[WeightFault]]:
    """A clause for each fault of the wrong tensors, joined to a sentence without its stop,
    and the faults. Tensors with one fault have one clause, as has an exchange of two.

    Args:
        stored: reads a tensor as the bundle stores it, decompressed.
        tensors: the wrong ones, worst first.
    """
    faults = find_weight_faults(bundle, checkpoint, stored, tensors)
    sources = {fault.tensor: fault.source for fault in faults}
    names_of: dict[str, list[str]] = {}  # clause → tensors
    for fault in faults:
        names_of.setdefault(fault.clause, []).append(fault.tensor)
    clauses = []
    described = set()
    for fault in faults:
        names = names_of[fault.clause]
        if fault.tensor in described:
            continue
        if fault.source and sources.get(fault.source) == fault.tensor:
            described |= {fault.tensor, fault.source}
            clauses.append(
                f"{fault.tensor} and {fault.source} hold the values of each other"
            )
        elif len(names) > 1:
            described |= {*names}
            clauses.append(
                f"each of {len(names)} tensors ({_list_names(names)}) {fault.clause}"
            )
        else:
            clauses.append(str(fault))
    if others := [name for name in tensors if name not in sources]:
        clauses.append(f"{len(others)} more were not explained ({_list_names(others)})")
    return "; ".join(clauses), faults


def _list_names(names: list[str]) -> str:
    """The first names, and an ellipsis for the rest."""
    return ", ".join([*names[:MAX_LISTED], *(["…"] if len(names) > MAX_LISTED else [])])


def find_weight_faults(
    bundle: Bundle, checkpoint: Checkpoint, stored: Reader, tensors: Sequence[str]
) -> list[WeightFault]:
    """The faults of the first tensors, and of those others which have the same fault
    as one of them and the same place in another layer. See `describe_weight_faults` for
    the arguments.

    The worst tensor of every place in a layer comes first, since a converter that errs in
    one layer does so in all. A tensor whose values another one holds comes next, if it is
    wrong too: the two may be exchanged."""
    manifest = bundle.manifest
    worst = {_place(name): name for name in reversed(tensors)}
    first = [name for name in tensors if worst[_place(name)] == name]
    queue = first + [name for name in tensors if name not in first]
    faults: list[WeightFault] = []
    examined = 0  # elements
    while queue and len(faults) < MAX_TENSORS:
        name = queue.pop(0)
        examined += math.prod(checkpoint.shape(name))
        if len(faults) >= LEAST_TENSORS and examined > SMALL:
            queue.insert(0, name)
            break
        fault = find_weight_fault(manifest, checkpoint, stored, name)
        faults.append(fault)
        if fault.source in queue:
            queue.remove(fault.source)
            queue.insert(0, fault.source)
    same: dict[str, WeightFault] = {}  # place in a layer → a fault that may be repeated
    for fault in faults:
        if fault.kind in REPEATED:
            same.setdefault(_place(fault.tensor), fault)
    elements = 0
    for name in queue:
        elements += math.prod(checkpoint.shape(name))
        fault = same.get(_place(name))
        if fault and elements <= MAX_ELEMENTS:
            actual = _as_matrix(stored(name).float())
            values = _as_matrix(checkpoint.tensor(name))
            limit = EXPLAINED * _distance(actual, values)
            for explanation in _own_arrangements(manifest, name, actual, values):
                is_same = explanation.clause == fault.clause
                if is_same and _distance(actual, explanation.values) <= limit:
                    faults.append(WeightFault(name, fault.kind, fault.clause))
                    break
                if explanation.kind in SEARCHED:  # those that take long come last
                    break
    return faults


def _place(name: str) -> str:
    """The name of a tensor without its layer."""
    return split_layer(name)[1]


def find_weight_fault(
    manifest: Manifest, checkpoint: Checkpoint, stored: Reader, name: str
) -> WeightFault:
    """The fault of one tensor; of kind `unknown` where nothing that is tried fits."""
    actual = _as_matrix(stored(name).float())
    values = _as_matrix(checkpoint.tensor(name))
    if not actual.isfinite().all():
        return WeightFault(name, "unknown", "holds values that are no finite numbers")
    low, high = actual.aminmax()
    if low == high and actual.numel() > 1:
        return WeightFault(name, "constant", f"holds {float(low):.6g} in every element")
    distance_from_own_values = _distance(actual, values)
    candidates = [
        *_own_arrangements(manifest, name, actual, values),
        *_other_tensors(checkpoint, name, actual),
    ]
    distances = [_distance(actual, candidate.values) for candidate in candidates]
    if distances and min(distances) <= EXPLAINED * distance_from_own_values:
        best = candidates[distances.index(min(distances))]
        return WeightFault(name, best.kind, best.clause, best.source)
    fault = _find_wrong_rows(name, actual, values) or _find_factor(name, actual, values)
    if fault:
        return fault
    cosine = _cosine(actual, values)
    clause = (
        f"holds values of an unknown origin (cosine {cosine:.3f} with the checkpoint's)"
    )
    return WeightFault(name, "unknown", clause)


def _as_matrix(values: torch.Tensor) -> torch.Tensor:
    """A tensor as rows of its last axis, [rows, columns]; a vector is one row."""
    return values.reshape(-1, values.shape[-1] if values.ndim else 1)


def _distance(first: torch.Tensor, second: torch.Tensor) -> float:
    """The root of the sum of squared differences."""
    return float((first - second).norm())


def _cosine(first: torch.Tensor, second: torch.Tensor) -> float:
    product = first.norm() * second.norm()
    return float((first * second).sum() / product) if product else 0.0


def _find_wrong_rows(
    name: str, actual: torch.Tensor, values: torch.Tensor
) -> WeightFault | None:
    """The fault of a tensor most of whose rows, or of whose elements where it has one
    row, are the checkpoint's."""
    unit = "rows"
    if len(actual) == 1:
        actual, values, unit = actual.T, values.T, "elements"
    sizes = values.norm(dim=1).clamp(min=1e-9)
    errors = (actual - values).norm(dim=1) / sizes
    limit = max(OUTLIER * float(errors.median()), ROUNDING)
    # where most rows are wrong, the median says so
    if float(errors.median()) > EXPLAINED:
        return None
    wrong = torch.nonzero(errors > limit).flatten().tolist()
    if not wrong or 2 * len(wrong) > len(errors):
        return None
    if _factor_is_significant(actual, values) and len(wrong) > len(errors) // 4:
        return None
    worst = int(errors.argmax())
    detail = f"the worst is number {worst}"
    cosine = _cosine(actual[worst], values[worst])
    if unit == "rows" and abs(cosine) > CORRELATED:
        factor = float(actual[worst] @ values[worst] / values[worst].square().sum())
        detail += f", scaled by {factor:.4g}"
    clause = f"has {len(wrong)} wrong {unit} of {len(errors)}; {detail}"
    return WeightFault(name, "some rows", clause)


def _factor(actual: torch.Tensor, values: torch.Tensor) -> float:
    """The factor of `values` that is nearest to `actual`."""
    square = float(values.square().sum())
    return float((actual * values).sum()) / square if square else 1.0


def _factor_is_significant(actual: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether the factor differs from 1 by more than the rounding of a preset."""
    factor = _factor(actual, values)
    noise = _distance(actual, factor * values) / max(float(values.norm()), 1e-9)
    # entries of a table are means of what they stand for, which shortens a vector
    shrinkage = 2 * noise**2
    spread = SIGNIFICANT * noise / math.sqrt(values.numel())
    return abs(factor - 1) > max(shrinkage, spread, ROUNDING)


def _find_factor(
    name: str, actual: torch.Tensor, values: torch.Tensor
) -> WeightFault | None:
    """The fault of a tensor that is a multiple of its own values."""
    if abs(_cosine(actual, values)) < CORRELATED:
        return None
    if not _factor_is_significant(actual, values):
        return None
    return WeightFault(name, "scaled", _describe_factor(_factor(actual, values)))


def _describe_factor(factor: float) -> str:
    return f"is scaled by {factor:.4g}"


def _own_arrangements(
    manifest: Manifest, name: str, actual: torch.Tensor, values: torch.Tensor
) -> Iterator[Explanation]:
    """What may be stored of a tensor's own values, in another order, multiplied or with
    a number added."""
    rows, columns = values.shape
    factor = _factor(actual, values)
    yield Explanation("scaled", _describe_factor(factor), factor * values)
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


def _other_tensors(
    checkpoint: Checkpoint, name: str, actual: torch.Tensor
) -> Iterator[Explanation]:
    """The tensor of the same shape whose values are nearest."""
    shape = checkpoint.shape(name)
    # the first rows are enough to tell tensors apart, and quick to read
    first = slice(0, CANDIDATE_ROWS) if len(shape) > 1 else None
    head = len(_as_matrix(checkpoint.tensor(name, first)))
    least, nearest = math.inf, None
    for other in sorted(checkpoint.header):
        if other == name or not _is_text(checkpoint, other):
            continue
        if checkpoint.shape(other) == shape:
            distance = _distance(
                actual[:head], _as_matrix(checkpoint.tensor(other, first))
            )
            if distance < least:
                least, nearest = distance, other
    if nearest:
        clause = f"holds the values of {nearest}"
        values = _as_matrix(checkpoint.tensor(nearest))
        yield Explanation("other tensor", clause, values, nearest)


def _is_text(checkpoint: Checkpoint, name: str) -> bool:
    """Whether a tensor belongs to the text model."""
    return name.startswith(checkpoint.prefix) or name == checkpoint.head
