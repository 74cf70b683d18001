"""Gate `weights`: every weight that a bundle stores is the checkpoint's, within the
loss of its preset.

The loss that is allowed is computed from the checkpoint's tensor v and the preset
alone, never from what is stored:

    fp16      half a unit in the last place of fp16 at v (with the offset that storage adds)
    integers  half a step, which is amax / (2^(bits−1) − 1) of the tensor, channel or block, in
              fp16; on top come the fp16 rounding of v / step, 2^-11 of v, and what a
              step that fp16 rounded down cannot reach
    tables    the distance to the nearest entry, and half a unit in the last place of each of the
              two entries that compete

Compressed weights are compared with v rounded to fp16, which precedes compression. A
table must also come within 0.1% of the squared error of the best table there is (exact
k-means in one dimension); rounding its entries to fp16 adds at most the square of half
a unit for each weight, which is taken off first."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf, isnan, prod

import numpy as np
import torch

import miltorch
from miltorch.program import Ref
from workbench.bundle import Bundle, Shard
from workbench.bundle.names import MIN_NORMAL
from workbench.bundle.presets import Preset
from workbench.check import gates
from workbench.check.compare import blocks, over
from workbench.check.gates import Gate
from workbench.check.hf import empty_model
from workbench.models.checkpoint import Checkpoint
from workbench.progress import bar

# Parts of the allowed loss: 1 but for float32 arithmetic; a step too many is at least
# 2.
LIMIT = 1.05
# Distance over the nearest entry's, and squared error over that of the best table.
TABLE_LIMIT = 1.001
Parts = dict[
    str, np.ndarray
]  # of a stored weight, by role: val; data, scale; indices, lut
# What operands that do not fit raise; InputError is a ValueError.
DAMAGED = (KeyError, IndexError, ValueError)
EXPONENT = 0x7F800000  # bits of a float32's exponent
# Tables of the file of embeddings, in the checkpoint.
HOST_TENSORS = {
    "weight": "embed_tokens.weight",
    "bias": "input_hidden_states_bias",
    "scale": "input_hidden_states_scale",
}


def weights_gate(bundle: Bundle, checkpoint: Checkpoint) -> Gate:
    """Compares every stored weight and the host's table of embeddings with the
    checkpoint's, and looks for tensors that nothing covers."""
    manifest = bundle.manifest
    if manifest.foreign:
        return _recognised(bundle, checkpoint)
    preset = manifest.options.preset
    found = []
    problems = []
    covered = {}
    tensors = text_tensors(checkpoint) | {checkpoint.head}
    for name, table in bundle.embedding.items():
        tensor = checkpoint.prefix + HOST_TENSORS[name]
        if tensor != checkpoint.head:
            tensors.discard(tensor)
        found.append(_host_deviation(checkpoint, tensor, torch.from_numpy(table)))
    programs = []
    for shard in manifest.shards:
        programs += [(shard, function) for function in shard.functions or [None]]
    for shard, function in bar(programs, "weights", unit="program"):
        place = shard.name
        try:
            parts_of = stored_parts(bundle, shard, function)
            for tensor in shard.weights:
                place = f"{shard.name}: {tensor}"
                parts = parts_of(tensor)
                stored = torch.from_numpy(dense(parts, preset))
                size = stored.numel()
                values, rows = checkpoint_values(checkpoint, shard, tensor, size)
                stored = stored.reshape(values.shape)
                found.append(worst_deviation(place, parts, stored, values, preset))
                covered.setdefault(tensor, set()).update(rows)
        except DAMAGED as problem:  # nor is what follows in this package compared
            problems.append(f"{place}: {problem}")
    for tensor in () if problems else sorted(tensors):
        rows = (checkpoint.shape(tensor) or [1])[0]
        if len(covered.get(tensor, ())) < rows and not (
            manifest.options.plugin and _is_constant(checkpoint.tensor(tensor).half())
        ):
            problems.append(f"nothing covers tensor {tensor}")
    nothing = deviation("no weights", inf, LIMIT, "")
    worst = max(found, key=_excess, default=nothing)
    problems += [each.reason for each in found if each.verdict == gates.RED]
    fine = (
        f"{len(found)} stored tensors equal the checkpoint's within the rounding of "
        f"their preset; worst: {worst.reason}"
    )
    if problems[8:]:
        problems[8:] = ["…"]
    gate = gates.none("weights", problems, fine, sep="; ")
    return replace(gate, value=worst.value, threshold=worst.threshold)


def _excess(found: Gate) -> float:
    return inf if isnan(found.value) else found.value / found.threshold


def _recognised(bundle: Bundle, checkpoint: Checkpoint) -> Gate:
    """The gate where the loss of a compression is not known: how many of the
    checkpoint's matrices were found in the packages."""
    found = set().union(*(shard.weights for shard in bundle.manifest.shards))
    matrices = checkpoint.matrices
    count = len(found.intersection(matrices))
    return gates.not_run(
        "weights",
        "how another exporter compresses is not known; "
        f"{count} of {len(matrices)} matrices were recognised by their values, which the "
        "other gates use (in place of the rest the checkpoint's)",
    )


def _host_deviation(checkpoint: Checkpoint, tensor: str, table: torch.Tensor) -> Gate:
    """What a table of the host deviates by from `tensor`, read some rows at a time."""
    found = []
    for rows in blocks(table):
        stored = table[rows].reshape(-1, table.shape[-1])
        values = checkpoint.tensor(tensor, rows).reshape(stored.shape)
        found.append(fp16_deviation(f"host: {tensor}", stored, values))
    return max(found, key=_excess)


def _is_constant(values: torch.Tensor) -> bool:
    """Whether a plug-in's conversion drops a tensor: all zeros, or all ones."""
    return bool((values == 0).all() or (values == 1).all())


def stored_parts(
    bundle: Bundle, shard: Shard, function: str | None = None
) -> Callable[[str], Parts]:
    """The parts of each checkpoint tensor that one shard's program, or one function of
    it, stores, read from its package, none of them computed by `miltorch`."""
    package = bundle.package(shard)
    if target := bundle.manifest.options.plugin:
        return lambda tensor: target.parts(package, shard.weights[tensor])
    constants = {}
    for op in miltorch.read(package, function).block.walk():
        if op.constant:
            constants |= {name: op for name, _ in op.outputs}

    def parts(tensor: str) -> Parts:
        name = shard.weights[tensor]
        if name not in constants:
            raise ValueError(f"no constant {name!r} in the program")
        roles = {}
        for role, value in constants[name].inputs.items():
            if isinstance(value, Ref):
                value = constants[value.name].inputs["val"]
            roles[role] = np.asarray(value)
        return roles

    return parts


def worst_deviation(
    place: str, parts: Parts, stored: torch.Tensor, values: torch.Tensor, preset: Preset
) -> Gate:
    """How far `stored` [rows, columns], the dense form of `parts`, is from `values`, the
    checkpoint's with their offset."""
    if "val" in parts:
        return fp16_deviation(place, stored, values)
    if preset.is_integer:
        ratio = integer_ratio(stored, values.half(), preset)
        return deviation(place, ratio, LIMIT, f"of the half step of {preset.name}")
    table = torch.from_numpy(np.float32(parts["lut"]).reshape(-1))
    nearest, error = table_ratios(stored, values.half(), table)
    best = "times the squared error of the best table"
    pair = [
        deviation(
            place, nearest, TABLE_LIMIT, "times the distance to the nearest entry"
        ),
        deviation(place, error, TABLE_LIMIT, best),
    ]
    return max(pair, key=_excess)


def fp16_deviation(place: str, stored: torch.Tensor, values: torch.Tensor) -> Gate:
    ratio = worst_ratio(half_ulp, stored, values)
    return deviation(place, ratio, LIMIT, "halves of an fp16 unit")


def deviation(place: str, value: float, limit: float, unit: str) -> Gate:
    """The worst weight of one stored tensor, in parts of what its preset must lose
    there."""
    return gates.at_most("weights", value, limit, f"{place}: {value:.4g} {unit}")


def dense(parts: Parts, preset: Preset) -> np.ndarray:
    """The stored values, float32: dequantized, but not rounded to fp16 again."""
    if "val" in parts:
        return np.array(parts["val"], np.float32)
    if "data" in parts and preset.is_integer:
        data = np.array(parts["data"], np.float32)
        if "offset" in parts:
            data -= _spread(parts["offset"], data.shape)
        data *= _spread(parts["scale"], data.shape)
        return data
    if "lut" in parts and parts["lut"].size == 1 << preset.bits:
        return np.float32(parts["lut"]).ravel()[parts["indices"]]
    raise ValueError(f"stored as {', '.join(parts)}, not as {preset.name} makes it")


def checkpoint_values(
    checkpoint: Checkpoint, shard: Shard, tensor: str, size: int
) -> tuple[torch.Tensor, range]:
    """The checkpoint's values of what `shard` stores of `tensor`, `size` elements,
    float32 [rows, columns] with their offset, and which rows of the tensor they are.
    """
    if tensor not in checkpoint:
        raise ValueError("no such tensor in the checkpoint")
    shape = checkpoint.shape(tensor)
    rows = None
    if size != prod(shape):
        rows = slice(*shard.rows)
    if size != prod(checkpoint.shape(tensor, rows)):
        raise ValueError(f"{size} stored values for those of shape {shape}")
    values = checkpoint.tensor(tensor, rows) + shard.offsets.get(tensor, 0.0)
    covered = range(*(rows or slice(None)).indices((shape or [1])[0]))
    return values.reshape(-1, shape[-1] if shape else 1), covered


def text_tensors(checkpoint: Checkpoint) -> set[str]:
    """Tensors of the checkpoint that Hugging Face's text model loads."""
    names = set()
    for name in empty_model(checkpoint.config).state_dict():
        if name.startswith("model."):
            name = checkpoint.prefix + name.removeprefix("model.")
        names.add(name)
    return {name for name in names if name in checkpoint}


def half_ulp(values: torch.Tensor) -> torch.Tensor:
    """Half of the distance between the two fp16 values around each of `values`
    (float32)."""
    bits = values.abs().clamp(min=MIN_NORMAL).view(torch.int32) & EXPONENT
    return bits.view(torch.float32) * 2.0**-11


def worst_ratio(
    room: Callable, stored: torch.Tensor, values: torch.Tensor, *more: torch.Tensor
) -> float:
    """Largest |stored − values| over room(values, more) of matrices with the same rows;
    nan if a value is nan."""
    worst = [0.0]
    for part, some, *rest in _pieces(stored, values, *more):
        some = some.float()
        off = (part - some).abs()
        ratios = torch.where(off == 0, 0.0, off / room(some, *rest))
        worst.append(float(ratios.max()))
    return float(np.max(worst))


def integer_ratio(stored: torch.Tensor, rounded: torch.Tensor, preset: Preset) -> float:
    """Largest deviation of integers times a scale, in parts of what `preset` must lose
    on `rounded` (fp16) [rows, n]."""
    width = preset.block or stored.shape[1]
    stored = stored.reshape(-1, width)
    rounded = rounded.reshape(-1, width)
    largest = 2 ** (preset.bits - 1) - 1
    peak = torch.maximum(rounded.amax(1), -rounded.amin(1)).float()[:, None]
    if preset.granularity == "per_tensor":
        peak = peak.amax().expand(len(rounded), 1)
    steps = (peak / largest).half().float()

    def room(values: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        size = values.abs()
        return step / 2 + size * 2.0**-11 + (size - largest * step).clamp(min=0)

    return worst_ratio(room, stored, rounded, steps)


def table_ratios(
    stored: torch.Tensor, rounded: torch.Tensor, table: torch.Tensor
) -> tuple[float, float]:
    """Largest distance to the entry that is used, over that to the nearest one, and the
    squared error over the least that a table of this length can have on `rounded`
    (fp16)."""
    entries = table.sort().values
    middles = (entries[1:] + entries[:-1]) / 2
    worst = [0.0]
    error = 0.0
    rounding = 0.0
    for used, values in _pieces(stored, rounded):
        values = values.float()
        nearest = entries[torch.bucketize(values, middles)]
        off = (used - values).abs()
        least = (nearest - values).abs()
        room = least + half_ulp(used) + half_ulp(nearest)
        worst.append(float((off / room).max()))
        error += float((off.double() ** 2).sum())
        rounding += float((half_ulp(used).double() ** 2).sum())
    best = least_squared_error(rounded, len(table))
    above = max(0.0, error - rounding)
    return float(np.max(worst)), float(over(above, best))


def least_squared_error(values: torch.Tensor, count: int) -> float:
    """Sum of squared distances of fp16 `values` to the best `count` points there
    are."""
    from coremltools._deps import kmeans1d

    distinct, counts = np.unique(values.numpy(), return_counts=True)
    points = distinct.astype(np.float64)
    count = min(count, len(points))
    clusters = kmeans1d.cluster(points, count, weights=counts).clusters
    weights = np.bincount(clusters, counts)
    means = np.bincount(clusters, counts * points) / np.maximum(weights, 1)
    return float((counts * (points - means[clusters]) ** 2).sum())


def _pieces(*matrices: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Matrices with the same rows, some rows at a time."""
    for rows in blocks(matrices[0]):
        yield tuple(matrix[rows] for matrix in matrices)


def _spread(factor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """`factor`, float32, repeated to line up with `shape`: each of its axes divides
    that of `shape`."""
    factor = np.float32(factor)
    for axis, size in enumerate(shape):
        if factor.shape[axis] not in (1, size):
            factor = factor.repeat(size // factor.shape[axis], axis)
    return factor
