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

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf, isnan, prod

import numpy as np
import torch

import miltorch
from miltorch.program import Op, Ref, Type
from workbench.bundle import Bundle, Shard
from workbench.bundle.names import MIN_NORMAL
from workbench.bundle.presets import Preset
from workbench.check import gates
from workbench.check.gates import Gate
from workbench.check.hf import head_weight
from workbench.check.metrics import over
from workbench.errors import InputError
from workbench.models.checkpoint import Checkpoint

# Parts of the allowed loss: 1 but for float32 arithmetic; a step too many is at least
# 2.
LIMIT = 1.05
# Distance over the nearest entry's, and squared error over that of the best table.
TABLE_LIMIT = 1.001
PIECE = 1 << 20  # weights compared at a time
# What operands that do not fit raise; InputError is a ValueError.
DAMAGED = (KeyError, IndexError, ValueError)
# Role of a weight's first part → the operation that makes the weight of its parts.
KINDS = {
    "val": "const",
    "data": "constexpr_blockwise_shift_scale",
    "indices": "constexpr_lut_to_dense",
}
EXPONENT = 0x7F800000  # bits of a float32's exponent
# Tables of the file of embeddings, in the checkpoint.
HOST_TENSORS = {
    "weight": "embed_tokens.weight",
    "bias": "input_hidden_states_bias",
    "scale": "input_hidden_states_scale",
}


@dataclass(frozen=True)
class Deviation:
    """The worst weight of one stored tensor, in parts of what its preset must lose
    there; at most `limit`."""

    place: str
    value: float
    limit: float
    unit: str

    @property
    def excess(self) -> float:
        if isnan(self.value):
            return inf
        return self.value / self.limit


def weights_gate(
    bundle: Bundle, checkpoint: Checkpoint, progress: bool = False
) -> Gate:
    """Compares every stored weight and the host's table of embeddings with the
    checkpoint's, and looks for tensors that nothing covers."""
    from tqdm.auto import tqdm

    manifest = bundle.manifest
    if not manifest.own_programs and not manifest.options.plugin:
        return _recognised(bundle, checkpoint)
    deviations = []
    problems = []
    covered = {}
    tensors = text_tensors(checkpoint)
    for name, table in bundle.embedding.items():
        tensor = checkpoint.prefix + HOST_TENSORS[name]
        tensors.discard(tensor)
        deviations += _host_rows(checkpoint, tensor, torch.from_numpy(table))
    programs = []
    for shard in bundle.manifest.shards:
        programs += [(shard, function) for function in shard.functions or [None]]
    bar = tqdm(programs, desc="weights", unit="program", disable=not progress)
    for shard, function in bar:
        try:
            constants = Constants(bundle, shard, function)
        except InputError as problem:
            problems.append(f"{shard.name}: {problem}")
            continue
        for tensor in shard.weights:
            try:
                size = constants.size(tensor)
                values, rows = checkpoint_values(checkpoint, shard, tensor, size)
                deviations += constants.deviations(tensor, values)
                covered.setdefault(tensor, set()).update(rows)
            except DAMAGED as problem:
                problems.append(f"{shard.name}: {tensor}: {problem}")
    for tensor in sorted(tensors | {head_weight(checkpoint)}):
        rows = (checkpoint.shape(tensor) or [1])[0]
        if len(covered.get(tensor, ())) < rows and not (
            manifest.options.plugin and _is_constant(checkpoint.tensor(tensor).half())
        ):
            problems.append(f"nothing covers tensor {tensor}")
    nothing = Deviation("", inf, LIMIT, "no weights")
    worst = max(deviations, key=lambda d: d.excess, default=nothing)
    problems += [
        f"{d.place}: {d.value:.4g} {d.unit}" for d in deviations if not d.excess <= 1
    ]
    fine = (
        f"{len(deviations)} stored tensors equal the checkpoint's within the rounding of "
        f"their preset; worst: {worst.place}, {worst.value:.4g} {worst.unit}"
    )
    shown = "; ".join(problems[:8]) + " …" * bool(problems[8:])
    gate = gates.none("weights", [shown] if problems else [], fine)
    return replace(gate, value=worst.value, threshold=worst.limit)


def _recognised(bundle: Bundle, checkpoint: Checkpoint) -> Gate:
    """The gate where the loss of a compression is not known: how many of the
    checkpoint's matrices were found in the packages."""
    found = set().union(*(shard.weights for shard in bundle.manifest.shards))
    matrices = []
    for tensor in checkpoint.header:
        text = tensor.startswith((checkpoint.prefix, "lm_head."))
        if text and len(checkpoint.shape(tensor)) == 2:
            matrices.append(tensor)
    count = len(found.intersection(matrices))
    return gates.not_run(
        "weights",
        "how another exporter compresses is not known; "
        f"{count} of {len(matrices)} matrices were recognised by their values, which the "
        "other gates use (in place of the rest the checkpoint's)",
    )


def _host_rows(
    checkpoint: Checkpoint, tensor: str, table: torch.Tensor
) -> Iterator[Deviation]:
    """What a table of the host deviates by from `tensor`, some rows at a time."""
    for rows in _pieces(len(table), table[0].numel()):
        stored = table[rows].reshape(-1, table.shape[-1])
        values = checkpoint.tensor(tensor, rows).reshape(stored.shape)
        ratio = worst_ratio(stored, values, lambda values, rows: half_ulp(values))
        yield Deviation(f"host: {tensor}", ratio, LIMIT, "halves of an fp16 unit")


def _is_constant(values: torch.Tensor) -> bool:
    """Whether a plug-in's conversion drops a tensor: all zeros, or all ones."""
    return bool((values == 0).all() or (values == 1).all())


class Constants:
    """The constants of one shard's program, or of one function of it, read from its
    package, none of them computed by `miltorch`."""

    def __init__(self, bundle: Bundle, shard: Shard, function: str | None = None):
        self.shard = shard
        self.manifest = bundle.manifest
        self.preset = bundle.manifest.options.preset
        package = bundle.package(shard)
        if target := bundle.manifest.options.plugin:
            places = shard.weights.values()
            self.ops = [stored_op(p, target.parts(package, p)) for p in places]
        else:
            self.ops = list(miltorch.read(package, function).block.walk())
        self.constants = [op for op in self.ops if op.constant]
        self.by_name = {name: op for op in self.constants for name, _ in op.outputs}

    def op(self, tensor: str) -> Op:
        name = self.shard.weights[tensor]
        if name not in self.by_name:
            raise _refusal(
                tensor, f"no constant {name!r} in the program", "the one that holds it"
            )
        return self.by_name[name]

    def size(self, tensor: str) -> int:
        return prod(n or 0 for n in self.op(tensor).outputs[0][1].shape)

    def deviations(self, tensor: str, values: torch.Tensor) -> list[Deviation]:
        """What `tensor` deviates by from `values` [rows, columns], the checkpoint's
        with their offset."""
        op = self.op(tensor)
        place = f"{self.shard.name}: {tensor}"
        stored = torch.from_numpy(self._dense(tensor, op)).reshape(values.shape)
        if op.kind == "const":
            ratio = worst_ratio(stored, values, lambda values, rows: half_ulp(values))
            return [Deviation(place, ratio, LIMIT, "halves of an fp16 unit")]
        if self.preset.is_integer:
            ratio = integer_ratio(stored, values.half(), self.preset)
            return [Deviation(place, ratio, LIMIT, f"half steps of {self.preset.name}")]
        table = torch.from_numpy(self._value(op, "lut").reshape(-1))
        nearest, error = table_ratios(stored, values.half(), table)
        to_nearest = "distances to the nearest entry"
        to_best = "times the squared error of the best table"
        return [
            Deviation(place, nearest, TABLE_LIMIT, to_nearest),
            Deviation(place, error, TABLE_LIMIT, to_best),
        ]

    def _dense(self, tensor: str, op: Op) -> np.ndarray:
        """The stored values, float32: dequantized, but not rounded to fp16 again."""
        if op.kind == "const":
            return self._value(op, "val")
        if op.kind == "constexpr_blockwise_shift_scale" and self.preset.is_integer:
            data = self._value(op, "data")
            if "offset" in op.inputs:
                data -= _spread(self._value(op, "offset"), data.shape)
            data *= _spread(self._value(op, "scale"), data.shape)
            return data
        if op.kind == "constexpr_lut_to_dense":
            table = self._value(op, "lut").ravel()
            if len(table) == 1 << self.preset.bits:
                return table[self._value(op, "indices", np.uint8)]
        raise _refusal(tensor, f"stored as {op.kind}", f"what {self.preset.name} makes")

    def _value(self, op: Op, role: str, dtype: type = np.float32) -> np.ndarray:
        """A copy of an operand of a constant."""
        value = op.inputs[role]
        if isinstance(value, Ref):
            value = self.by_name[value.name].inputs["val"]
        return np.array(value, dtype)


def stored_op(place: str, parts: dict[str, np.ndarray]) -> Op:
    """The stored parts of a weight, by role, as the operation that a Core ML program
    has for it."""
    role, array = next(iter(parts.items()))
    return Op(KINDS[role], place, parts, [(place, Type("FLOAT16", array.shape))])


def checkpoint_values(
    checkpoint: Checkpoint, shard: Shard, tensor: str, size: int
) -> tuple[torch.Tensor, range]:
    """The checkpoint's values of what `shard` stores of `tensor`, `size` elements,
    float32 [rows, columns] with their offset, and which rows of the tensor they are.
    """
    if tensor not in checkpoint:
        raise _refusal(
            tensor, "no such tensor in the checkpoint", "a tensor of the checkpoint"
        )
    shape = checkpoint.shape(tensor)
    rows = None
    if size != prod(shape):
        rows = slice(*shard.rows)
    if size != prod(checkpoint.shape(tensor, rows)):
        raise _refusal(tensor, f"{size} stored values", f"those of shape {shape}")
    values = checkpoint.tensor(tensor, rows) + shard.offsets.get(tensor, 0.0)
    covered = range(*(rows or slice(None)).indices((shape or [1])[0]))
    return values.reshape(-1, shape[-1] if shape else 1), covered


def text_tensors(checkpoint: Checkpoint) -> set[str]:
    """Tensors of the checkpoint that Hugging Face's text model loads."""
    import transformers

    config = checkpoint.config
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    names = set()
    for name in model.state_dict():
        if name.startswith("model."):
            name = checkpoint.prefix + name.removeprefix("model.")
        names.add(name)
    if config.tie_word_embeddings:
        names.discard("lm_head.weight")
    return {name for name in names if name in checkpoint}


def half_ulp(values: torch.Tensor) -> torch.Tensor:
    """Half of the distance between the two fp16 values around each of `values`
    (float32)."""
    bits = values.abs().clamp(min=MIN_NORMAL).view(torch.int32) & EXPONENT
    return bits.view(torch.float32) * 2.0**-11


def worst_ratio(stored: torch.Tensor, values: torch.Tensor, room) -> float:
    """Largest |stored − values| over room(values of some rows, these rows), of [rows, columns]; nan
    if a value is nan."""
    worst = [0.0]
    for rows in _pieces(*stored.shape):
        some = values[rows].float()
        off = (stored[rows] - some).abs()
        worst.append(float(torch.where(off == 0, 0.0, off / room(some, rows)).max()))
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

    def room(values: torch.Tensor, rows: slice) -> torch.Tensor:
        step = steps[rows]
        size = values.abs()
        return step / 2 + size * 2.0**-11 + (size - largest * step).clamp(min=0)

    return worst_ratio(stored, rounded, room)


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
    for rows in _pieces(*stored.shape):
        used = stored[rows]
        values = rounded[rows].float()
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


def _pieces(rows: int, columns: int) -> Iterator[slice]:
    height = max(1, PIECE // max(1, columns))
    return (slice(start, start + height) for start in range(0, rows, height))


def _spread(factor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """`factor` repeated to line up with `shape`: each of its axes divides that of
    `shape`."""
    for axis, size in enumerate(shape):
        if factor.shape[axis] not in (1, size):
            factor = factor.repeat(size // factor.shape[axis], axis)
    return factor


def _refusal(tensor: str, actual: str, needed: str) -> InputError:
    return InputError(f"tensor {tensor!r}", actual, needed, "export the bundle again")
