"""Names the fault of a tensor that gate `weights` calls wrong, where its stored values
follow from values of the checkpoint: those of another tensor, or its own in another
order, transposed, multiplied or shifted, or with some rows or columns wrong.

Stored values are compared decompressed. A compressed tensor is never equal to what it was
made from, so that an explanation counts if it leaves a small part of the distance
(`EXPLAINED`) that the tensor has from its own values. arrangements.py lists what a tensor
may store in place of its own values; wrong_rows.py finds wrong parts of a right tensor."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from workbench.bundle import Bundle, Manifest
from workbench.bundle.names import split_layer
from workbench.explain.arrangements import Kind, list_arrangements, list_other_tensors
from workbench.explain.weight_values import (
    CORRELATED,
    EXPLAINED,
    as_matrix,
    compute_cosine,
    compute_factor,
    describe_factor,
    is_factor_significant,
    measure_distance,
)
from workbench.explain.wrong_rows import describe_wrong_rows
from workbench.models.checkpoint import Checkpoint

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
# Ends of the names of matrices whose rows, or whose columns, are those of heads.
HEAD_ROWS = "q_proj.weight", "k_proj.weight", "v_proj.weight"
HEAD_COLUMNS = ("o_proj.weight",)
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


def describe_weight_faults(
    bundle: Bundle, checkpoint: Checkpoint, stored: Reader, tensors: Sequence[str]
) -> tuple[list[str], list[WeightFault]]:
    """A clause for each fault of the wrong tensors, and the faults. Tensors with one fault
    have one clause, as has an exchange of two.

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
    return clauses, faults


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
    worst = {_place(name): name for name in reversed(tensors)}
    first = [name for name in tensors if worst[_place(name)] == name]
    queue = first + [name for name in tensors if name not in first]
    faults: list[WeightFault] = []
    examined = 0  # elements
    while queue and len(faults) < MAX_TENSORS:
        examined += math.prod(checkpoint.shape(queue[0]))
        if len(faults) >= LEAST_TENSORS and examined > SMALL:
            break
        name = queue.pop(0)
        fault = find_weight_fault(bundle.manifest, checkpoint, stored, name)
        faults.append(fault)
        if fault.source in queue:
            queue.remove(fault.source)
            queue.insert(0, fault.source)
    return faults + _find_repeated(bundle.manifest, checkpoint, stored, queue, faults)


def _find_repeated(
    manifest: Manifest,
    checkpoint: Checkpoint,
    stored: Reader,
    tensors: Sequence[str],
    faults: Sequence[WeightFault],
) -> list[WeightFault]:
    """The faults of those `tensors` which have one of `faults`, that of a tensor with the
    same place in another layer. No other fault is looked for, which takes less time."""
    same: dict[str, WeightFault] = {}  # place in a layer → a fault that may be repeated
    for fault in faults:
        if fault.kind in REPEATED:
            same.setdefault(_place(fault.tensor), fault)
    repeated = []
    elements = 0
    for name in tensors:
        elements += math.prod(checkpoint.shape(name))
        fault = same.get(_place(name))
        if fault and elements <= MAX_ELEMENTS:
            actual = as_matrix(stored(name).float())
            values = as_matrix(checkpoint.tensor(name))
            if _has_fault(manifest, name, actual, values, fault.clause):
                repeated.append(WeightFault(name, fault.kind, fault.clause))
    return repeated


def _has_fault(
    manifest: Manifest,
    name: str,
    actual: torch.Tensor,
    values: torch.Tensor,
    clause: str,
) -> bool:
    """Whether the arrangement of a tensor's own values with this clause explains what it
    stores."""
    limit = EXPLAINED * measure_distance(actual, values)
    for explanation in list_arrangements(manifest, name, actual, values):
        is_same = explanation.clause == clause
        if is_same and measure_distance(actual, explanation.values) <= limit:
            return True
        if explanation.kind in SEARCHED:  # those that take long come last
            return False
    return False


def _place(name: str) -> str:
    """The name of a tensor without its layer."""
    return split_layer(name)[1]


def find_weight_fault(
    manifest: Manifest, checkpoint: Checkpoint, stored: Reader, name: str
) -> WeightFault:
    """The fault of one tensor; of kind `unknown` where nothing that is tried fits."""
    actual = as_matrix(stored(name).float())
    values = as_matrix(checkpoint.tensor(name))
    if not actual.isfinite().all():
        return WeightFault(name, "unknown", "holds values that are no finite numbers")
    low, high = actual.aminmax()
    if low == high and actual.numel() > 1:
        return WeightFault(name, "constant", f"holds {float(low):.6g} in every element")
    distance_from_own_values = measure_distance(actual, values)
    candidates = [
        *list_arrangements(manifest, name, actual, values),
        *list_other_tensors(checkpoint, name, actual),
    ]
    distances = [measure_distance(actual, candidate.values) for candidate in candidates]
    if distances and min(distances) <= EXPLAINED * distance_from_own_values:
        best = candidates[distances.index(min(distances))]
        return WeightFault(name, best.kind, best.clause, best.source)
    if clause := describe_wrong_rows(actual, values, *_head_sizes(manifest, name)):
        return WeightFault(name, "some rows", clause)
    if fault := _find_factor(name, actual, values):
        return fault
    cosine = compute_cosine(actual, values)
    clause = (
        f"holds values of an unknown origin (cosine {cosine:.3f} with the checkpoint's)"
    )
    return WeightFault(name, "unknown", clause)


def _head_sizes(manifest: Manifest, name: str) -> tuple[int | None, int | None]:
    """How many rows and how many columns of a tensor belong to one head; None where they
    are not those of heads."""
    layer, place = split_layer(name)
    if layer is None:
        return None, None
    _, D = manifest.layers[layer].heads(manifest.dims)
    has_head_rows = place.endswith(HEAD_ROWS)
    has_head_columns = place.endswith(HEAD_COLUMNS)
    return D if has_head_rows else None, D if has_head_columns else None


def _find_factor(
    name: str, actual: torch.Tensor, values: torch.Tensor
) -> WeightFault | None:
    """The fault of a tensor that is a multiple of its own values."""
    if abs(compute_cosine(actual, values)) < CORRELATED:
        return None
    if not is_factor_significant(actual, values):
        return None
    return WeightFault(name, "scaled", describe_factor(compute_factor(actual, values)))
