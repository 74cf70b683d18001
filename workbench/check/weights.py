"""Gate `weights`: every weight that a bundle stores is the checkpoint's, within the
loss of its preset, and every tensor of the checkpoint is stored.

`stored_values` compares one weight at a time and has the tolerances. Values that were
fitted to a calibration text are compared last, layer by layer; see `calibrated`."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from math import inf, prod

import numpy as np
import torch

from workbench.bundle import Bundle, Shard
from workbench.bundle.names import PER_LAYER
from workbench.check import gates
from workbench.check.calibrated import fitted_tensors, judge_matrices
from workbench.check.compare import row_blocks
from workbench.check.deviation import Deviation, worst_of
from workbench.check.gates import Gate
from workbench.check.head_rows import describe_lost_rows, lost_rows
from workbench.check.row_statistics import FittedRows
from workbench.check.stored_values import (
    DAMAGED,
    LIMIT,
    Parts,
    fitted_rows,
    fp16_deviation,
    open_parts,
    weight_array,
    worst_deviation,
)
from workbench.models.checkpoint import Checkpoint
from workbench.models.layerwise import empty_model
from workbench.progress import bar

MAX_PROBLEMS = 8  # that the gate's reason names
MAX_DETAILED = 3  # of these problems, the first ones, with their figures
# Tables in the file of embeddings → tensors of the checkpoint.
HOST_TENSORS = {
    "weight": "embed_tokens.weight",
    "bias": "input_hidden_states_bias",
    "scale": "input_hidden_states_scale",
    PER_LAYER: "embed_tokens_per_layer.weight",
}


@dataclass(frozen=True)
class FittedSlice:
    """Where rows of a matrix that was fitted to a text are stored.

    Attributes:
        shard, function: the program that stores them; function None: the package has
            `main` alone.
        rows: their numbers within the matrix.
    """

    shard: Shard
    function: str | None
    rows: range


@dataclass
class _StoredInPrograms:
    """What the programs of a bundle store.

    Attributes:
        deviations: of the tensors that were compared.
        problems: a clause for each damaged package.
        fitted: tensor → its slices that are fitted to a calibration text, which are
            judged after all others.
        rows: tensor → the numbers of its rows that a shard stores.
    """

    deviations: list[Deviation] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    fitted: dict[str, list[FittedSlice]] = field(default_factory=dict)
    rows: dict[str, set[int]] = field(default_factory=dict)


def weights_gate(bundle: Bundle, checkpoint: Checkpoint) -> Gate:
    """Compares every stored weight and the host's table of embeddings with the
    checkpoint's, and looks for tensors that no shard stores."""
    if bundle.manifest.foreign:
        return _count_recognised(bundle, checkpoint)
    host_deviations = _compare_host_tables(bundle, checkpoint)
    stored = _compare_programs(bundle, checkpoint)
    deviations = [*host_deviations.values(), *stored.deviations]
    pass_reason = (
        f"{len(deviations)} stored tensors equal the checkpoint's within the rounding of "
        "their preset"
    )
    problems = [*stored.problems]
    fitted_clause = ""
    if stored.fitted and not problems:
        start = time.process_time()
        try:
            deviations += fitted_deviations(bundle, checkpoint, stored.fitted)
        except DAMAGED as problem:
            problems.append(str(problem))
        seconds = time.process_time() - start
        fitted_clause = (
            f"; {len(stored.fitted)} matrices were fitted to a calibration text and "
            f"judged row by row in {seconds:.0f} CPU s"
        )
    if not problems:
        required = text_tensors(checkpoint) - host_deviations.keys() | {checkpoint.head}
        problems = _unstored(bundle, checkpoint, required, stored.rows)
    problems = _head_problems(bundle, checkpoint) + problems
    wrong = [d for d in deviations if not d.is_sound]
    if deviations:
        worst = worst_of(deviations)
    else:  # nothing is stored, which is among the problems
        worst = Deviation.at("no weights", inf, LIMIT, "")
    if not problems and not wrong:
        reason = f"{pass_reason}; worst: {worst.reason}{fitted_clause}"
        return Gate("weights", gates.GREEN, worst.value, worst.limit, reason)
    # the value is the worst deviation, but a problem without a figure is RED too
    return Gate(
        "weights",
        gates.RED,
        worst.value,
        worst.limit,
        list_problems(problems, wrong),
        tensors=tuple(dict.fromkeys(d.tensor for d in _worst_first(wrong))),
    )


def list_problems(problems: list[str], wrong: list[Deviation]) -> str:
    """The reason of a RED gate: the first problems in full, then how many more there are,
    and the names of the next ones. Figures of more tensors would hide the first ones.

    Args:
        problems: clauses without a figure, which come first.
        wrong: the deviations over their limit, in the order of the bundle. The tensors
            with the worst ones are detailed; the others are named in this order, in
            which the tensors of a layer are neighbours, as where one layer has another's.
    """
    of_tensors: dict[str, list[Deviation]] = {}
    for deviation in wrong:
        of_tensors.setdefault(deviation.tensor, []).append(deviation)
    tensors = dict.fromkeys(deviation.tensor for deviation in _worst_first(wrong))
    detailed = [*tensors][: max(0, MAX_DETAILED - len(problems))]
    clauses = problems[:MAX_DETAILED]
    for tensor in detailed:
        worst, *others = _worst_first(of_tensors[tensor])
        # a figure of the whole tensor tells a fault of all rows from that of one
        clauses += [d.reason for d in (worst, *others) if d is worst or not d.is_of_row]
    reason = "; ".join(clauses)
    more = problems[MAX_DETAILED:] + [t for t in of_tensors if t not in detailed]
    if not more:
        return reason
    named = more[: MAX_PROBLEMS - MAX_DETAILED]
    ellipsis = ", …" if len(more) > len(named) else ""
    return f"{reason}; and {len(more)} more: {', '.join(named)}{ellipsis}"


def _worst_first(deviations: list[Deviation]) -> list[Deviation]:
    return sorted(deviations, key=lambda deviation: -deviation.ratio_to_limit)


def _compare_host_tables(
    bundle: Bundle, checkpoint: Checkpoint
) -> dict[str, Deviation]:
    """The deviation of each table in the file of embeddings, by the name of the tensor of
    the checkpoint that it stores."""
    deviations = {}
    for name in bundle.embedding:
        tensor = checkpoint.prefix + HOST_TENSORS[name]
        table = bundle.table_rows(name)
        deviations[tensor] = _host_deviation(checkpoint, tensor, table)
    return deviations


def _compare_programs(bundle: Bundle, checkpoint: Checkpoint) -> _StoredInPrograms:
    """Compares what every program stores, and lists the fitted matrices. Once a package
    is damaged, its other tensors are not compared."""
    manifest = bundle.manifest
    can_be_fitted: set[str] = set()
    if manifest.calibration:
        can_be_fitted = fitted_tensors(checkpoint) - {*manifest.calibration.nearest}
    programs = []
    for shard in manifest.shards:
        programs += [(shard, function) for function in shard.functions or [None]]
    stored = _StoredInPrograms()
    for shard, function in bar(programs, "weights", unit="program"):
        place = shard.name  # what is read, for the message of an error
        try:
            read_parts = open_parts(bundle, shard, function)
            for tensor in shard.weights:
                place = f"{shard.name}: {tensor}"
                parts = read_parts(tensor)
                preset = manifest.preset_of(tensor)
                size = weight_array(parts, preset).size
                rows = stored_rows(checkpoint, shard, tensor, size)
                if tensor in can_be_fitted and "val" not in parts:
                    # its values are read when its layer runs
                    slices = stored.fitted.setdefault(tensor, [])
                    slices.append(FittedSlice(shard, function, rows))
                else:
                    values = checkpoint_values(checkpoint, shard, tensor, rows)
                    worst = worst_deviation(place, parts, values, preset, rows.start)
                    stored.deviations.append(worst)
                stored.rows.setdefault(tensor, set()).update(rows)
        except DAMAGED as problem:
            stored.problems.append(f"{place}: {problem}")
    return stored


def _unstored(
    bundle: Bundle,
    checkpoint: Checkpoint,
    required: set[str],
    rows_stored: dict[str, set[int]],
) -> list[str]:
    """A clause for each required tensor that no shard stores whole.

    Args:
        rows_stored: tensor → the numbers of its rows that a shard stores.
    """
    plugin = bundle.manifest.options.plugin
    clauses = []
    for tensor in sorted(required):
        count = (checkpoint.shape(tensor) or [1])[0]
        if len(rows_stored.get(tensor, ())) >= count:
            continue
        # a plug-in's conversion leaves out products with ones and sums with zeros
        if plugin and _is_constant(checkpoint.tensor(tensor).half()):
            continue
        clauses.append(f"no shard stores {tensor}")
    return clauses


def _head_problems(bundle: Bundle, checkpoint: Checkpoint) -> list[str]:
    """The sentence that names lost rows of the head, in a list; empty where no row is
    lost. A head that cannot be read is among the problems of `_compare_programs`."""
    try:
        sentence = describe_lost_rows(lost_rows(bundle, checkpoint), checkpoint)
    except DAMAGED:
        return []
    return [sentence] if sentence else []


def fitted_deviations(
    bundle: Bundle, checkpoint: Checkpoint, fitted: dict[str, list[FittedSlice]]
) -> list[Deviation]:
    """The deviations of matrices that were fitted to the bundle's calibration text.

    Args:
        fitted: a tensor's name → where each of its slices is stored, in the order of
            the shards.

    Raises:
        ValueError: arrays that do not fit together, or tables that are not ascending
            numbers.
    """
    # (name of a shard, function) → its reader; those of one shard at a time, since each
    # holds the shard's weights
    readers: dict[tuple[str, str | None], Callable[[str], Parts]] = {}

    def read_slice(tensor: str, part: FittedSlice) -> tuple[str, Parts, torch.Tensor]:
        """The place for messages, the stored parts, and the checkpoint's values."""
        shard = part.shard
        key = shard.name, part.function
        if key not in readers:
            if any(name != shard.name for name, _ in readers):
                readers.clear()
            readers[key] = open_parts(bundle, shard, part.function)
        values = checkpoint_values(checkpoint, shard, tensor, part.rows)
        return f"{shard.name}: {tensor}", readers[key](tensor), values

    def read_rows(tensor: str) -> Iterator[FittedRows]:
        preset = bundle.manifest.preset_of(tensor)
        for part in fitted[tensor]:
            place, parts, values = read_slice(tensor, part)
            rounded = values.half().float()
            try:
                rows = fitted_rows(place, part.rows.start, parts, rounded, preset)
            except DAMAGED as problem:
                raise ValueError(f"{place}: {problem}") from None
            yield rows

    judged = judge_matrices(bundle, checkpoint, {*fitted}, read_rows)
    deviations = [*chain.from_iterable(judged.values())]
    for tensor in sorted(fitted.keys() - judged.keys()):
        # no linear module reads it, so that nothing can be fitted to its inputs
        preset = bundle.manifest.preset_of(tensor)
        for part in fitted[tensor]:
            place, parts, values = read_slice(tensor, part)
            deviations.append(worst_deviation(place, parts, values, preset))
    return deviations


def _count_recognised(bundle: Bundle, checkpoint: Checkpoint) -> Gate:
    """The gate for packages of another exporter, whose compression is unknown: how many
    of the checkpoint's matrices were recognised in them."""
    if problems := _head_problems(bundle, checkpoint):
        return gates.no_faults("weights", problems, "")
    matrices = checkpoint.matrices
    unrecognised = unrecognised_matrices(bundle, checkpoint)
    reason = (
        "how another exporter compresses is not known; "
        f"{len(matrices) - len(unrecognised)} of {len(matrices)} matrices were recognised "
        "by their values, which the other gates use"
    )
    if unrecognised:
        reason += (
            f"; they use the checkpoint's in place of {list_names(unrecognised)}, which "
            "the packages hold with other values or not at all"
        )
    return gates.not_run("weights", reason, applies=False)


def unrecognised_matrices(bundle: Bundle, checkpoint: Checkpoint) -> list[str]:
    """The checkpoint's matrices whose values `adopt` did not find in the packages of
    another exporter."""
    names = set().union(*(shard.weights for shard in bundle.manifest.shards))
    return [name for name in checkpoint.matrices if name not in names]


def list_names(names: list[str]) -> str:
    """The first names, and how many more there are."""
    named = ", ".join(names[:MAX_DETAILED])
    more = len(names) - MAX_DETAILED
    return named if more <= 0 else f"{named} and {more} more"


def _host_deviation(
    checkpoint: Checkpoint, tensor: str, table: Iterator[tuple[slice, np.ndarray]]
) -> Deviation:
    """The deviation of a table of the host from the checkpoint's `tensor`; both are read
    some rows at a time."""
    deviations = []
    for place, part in table:
        for rows in row_blocks(part):
            stored = torch.from_numpy(part[rows])
            original = slice(place.start + rows.start, place.start + rows.stop)
            values = checkpoint.tensor(tensor, original).reshape(stored.shape)
            deviations.append(fp16_deviation(f"host: {tensor}", stored, values))
    return worst_of(deviations)


def _is_constant(values: torch.Tensor) -> bool:
    """Whether a tensor is all zeros, or all ones."""
    return bool((values == 0).all() or (values == 1).all())


def stored_rows(checkpoint: Checkpoint, shard: Shard, tensor: str, size: int) -> range:
    """The rows of `tensor` that a shard stores, which has `size` elements of it; row 0
    of a tensor without axes.

    Raises:
        ValueError: no such tensor, or neither all of its elements nor those of the
            shard's rows.
    """
    if tensor not in checkpoint:
        raise ValueError("no such tensor in the checkpoint")
    shape = checkpoint.shape(tensor)
    rows = slice(None)
    if size != prod(shape):
        rows = slice(*shard.rows)
    if size != prod(checkpoint.shape(tensor, rows)):
        raise ValueError(f"{size} stored values for those of shape {shape}")
    return range(*rows.indices((shape or [1])[0]))


def checkpoint_values(
    checkpoint: Checkpoint, shard: Shard, tensor: str, rows: range
) -> torch.Tensor:
    """The checkpoint's values of some rows of `tensor`, float32 [rows, columns], with
    the offset with which `shard` stores them."""
    shape = checkpoint.shape(tensor)
    values = checkpoint.tensor(tensor, slice(rows.start, rows.stop) if shape else None)
    if offset := shard.offsets.get(tensor):
        values = values + offset
    return values.reshape(-1, shape[-1] if shape else 1)


def text_tensors(checkpoint: Checkpoint) -> set[str]:
    """Tensors of the checkpoint that Hugging Face's text model loads."""
    names = set()
    for name in empty_model(checkpoint.config).state_dict():
        if name.startswith("model."):
            name = checkpoint.prefix + name.removeprefix("model.")
        names.add(name)
    return {name for name in names if name in checkpoint}
