"""The weights of a shard: the source of each in the checkpoint (`weight_sources`), its
values in fp16 (`load_values`), the arrays that coremltools 9.0 stores for them, bit for
bit (`encode_weight`), and their bytes (`pack_bits`).

Linear presets: scale = fp16(fp16(2·amax) / (2^bits − 2)) for each tensor, output
channel or block of 32 inputs; q = clip(rne(fp16(w / scale))), 0 / 0 = 0.

Lookup tables are k-means over the distinct values, weighted by the number of times
that they occur. Tables for groups of rows come from the solver in `tables.py`. One
table for a whole tensor, which only earlier bundles have, comes from coremltools' exact
solver, whatever the size of the tensor: by default coremltools passes tensors below
10,000 values to scikit-learn, whose tables had 5% to 23% more squared error on normal
draws of 1,024 to 8,192 values (five sizes, three seeds, 4 and 6 bits).

tests/exporter/test_compress.py compares integers and tables of whole tensors with
coremltools' own bytes, and tables of groups with what coremltools stores for the same
values."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from miltorch.coremltools_import import kmeans1d
from workbench.bundle import Options
from workbench.bundle.names import MAX_FP16
from workbench.bundle.presets import FP16, MIXED, Preset, find_preset
from workbench.errors import InputError
from workbench.exporter import shards
from workbench.exporter.shards import LayerStack, Spec
from workbench.models import family_of
from workbench.models.checkpoint import Checkpoint
from workbench.models.family import Plan

# coremltools doubles the largest weight in fp16 on the way to an integer scale
MAX_SCALED = 32752.0
HEAD_WEIGHT = "lm_head.weight"  # the path of the matrix in every family's head
# parts of the paths of parameters
SHARED_PREFIX = "shared."  # of a module that all layers of a shard use
EXPERT_PART = ".experts."  # of an expert
ROUTER_PART = ".mlp.gate."  # of a router

Arrays = dict[str, np.ndarray]
"""The arrays that store a weight, by their role in the program: `val`, fp16 values; `data`
and `scale`, integers and their factors; `indices` and `lut`, indices into tables."""


@dataclass(frozen=True)
class WeightSource:
    """One parameter of a shard's module, and the checkpoint tensor that it comes from.

    Args:
        path: of the parameter in the module.
        tensor: name of the checkpoint's tensor (None: the values are zeros).
        shape: of the parameter.
        rows: the rows of the tensor that the parameter holds (None: all).
        offset: what storage adds to the tensor's values.
        preset: how the values are stored.
    """

    path: str
    tensor: str | None
    shape: tuple[int, ...]
    rows: slice | None = None
    offset: float = 0.0
    preset: Preset = FP16

    @property
    def is_compressible(self) -> bool:
        """Whether the parameter may have a preset other than fp16: it is the weight of a
        1×1 convolution outside routers. Routers are small, and another choice of expert
        is the largest of all errors."""
        is_matrix = len(self.shape) == 4 and self.shape[2:] == (1, 1)
        return is_matrix and min(self.shape[:2]) > 1 and ROUTER_PART not in self.path

    @property
    def is_compressed(self) -> bool:
        """Whether the parameter holds a tensor of the checkpoint in a preset other than
        fp16."""
        return self.tensor is not None and self.preset != FP16

    @property
    def bytes(self) -> int:
        """Bytes in a weight file, without lookup tables and the few scales that are not
        of blocks."""
        return int(math.prod(self.shape) * self.preset.stored_bits / 8)


def empty_module(spec: Spec, plan: Plan, options: Options) -> nn.Module:
    """The module of one shard, with weights of zeros."""
    family = family_of(plan.config)
    if spec.kind == "head":
        return family.head(plan, spec.rows[1] - spec.rows[0])
    if spec.kind == "expert":
        return family.expert(plan, options)
    blocks = [family.layer(plan, i, options) for i in range(*spec.layers)]
    shared = None
    if hasattr(family, "shared"):
        shared = family.shared(plan, *spec.layers)
    return LayerStack(blocks, spec, shared)


def weight_sources(
    spec: Spec,
    checkpoint: Checkpoint,
    plan: Plan,
    options: Options,
    presets: Mapping[str, Preset] | None = None,
) -> list[WeightSource]:
    """The source of every parameter of one shard.

    The path of a parameter gives the name of its tensor. The family's modules define the
    rest:

    - A parameter that requires no gradient has no tensor in the checkpoint; its values
      are zeros.
    - A module with an attribute `rows` holds only these rows of its tensors (see
      `_rows_of`).
    - A module with an attribute `offset` stores its tensors with this number added.

    Args:
        presets: checkpoint tensor → preset, of every matrix, where `options.compress`
            is `mixed`.

    Raises:
        InputError: a tensor that is missing, has another shape than its parameter, or
            does not divide into the blocks of the preset; a matrix of a mixed export
            without a preset.
    """
    with torch.device("meta"):
        module = empty_module(spec, plan, options)
    weights = []
    for path, parameter in module.named_parameters():
        owner = module.get_submodule(path.rpartition(".")[0])
        tensor = None
        if parameter.requires_grad:
            tensor = _tensor_name(path, spec, checkpoint, plan)
        weight = WeightSource(
            path,
            tensor,
            shape=tuple(parameter.shape),
            rows=_rows_of(path, spec, owner),
            offset=getattr(owner, "offset", 0.0),
        )
        if weight.is_compressible:
            preset = options.preset
            if preset == MIXED:
                preset = _preset_of_matrix(weight, presets or {})
            preset = preset.for_rows(_rows_to_divide(weight, spec, plan))
            weight = replace(weight, preset=preset)
        if weight.tensor:
            check_shape(weight, checkpoint)
        weights.append(weight)
    return weights


def _rows_of(path: str, spec: Spec, owner: nn.Module) -> slice | None:
    """The rows of its tensor that a parameter holds; None: all of them.

    A slice of the LM head holds the rows `spec.rows` of the head; the shard of an expert
    holds the rows `spec.rows` of a stack of experts. Any other module that holds a part of
    a tensor has the attribute `rows`.

    Args:
        owner: the module of the parameter.
    """
    is_head_slice = spec.kind == "head" and path == HEAD_WEIGHT
    is_expert = spec.kind == "expert" and EXPERT_PART in path
    if is_head_slice or is_expert:
        return slice(*spec.rows)
    return getattr(owner, "rows", None)


def _rows_to_divide(weight: WeightSource, spec: Spec, plan: Plan) -> int:
    """The number of rows that the groups of a lookup-table preset have to divide.

    All slices of one matrix have groups of one size, which divides the rows of every
    slice. The head and a projection that the layers of a shard share are stored in
    slices."""
    if spec.kind == "head":
        return math.gcd(plan.dims.V, shards.HEAD_ROWS)
    if weight.path.startswith(SHARED_PREFIX):
        return plan.dims.P
    return weight.shape[0]


def all_weights(
    checkpoint: Checkpoint,
    plan: Plan,
    options: Options,
    presets: Mapping[str, Preset] | None = None,
) -> list[WeightSource]:
    """The weights of all shards, see `weight_sources`, in the order of
    `shards.specs`."""
    return [
        weight
        for spec in shards.specs(plan, options)
        for weight in weight_sources(spec, checkpoint, plan, options, presets)
    ]


def find_presets(formats: Mapping[str, str] | None) -> dict[str, Preset]:
    """Checkpoint tensor → preset, of checkpoint tensor → name of a preset.

    Raises:
        ValueError: a name that no preset has; `exporter.check_formats` refuses it.
    """
    return {tensor: find_preset(name) for tensor, name in (formats or {}).items()}


def _preset_of_matrix(weight: WeightSource, presets: Mapping[str, Preset]) -> Preset:
    """The preset of a matrix of a mixed export."""
    if weight.tensor not in presets:
        raise InputError(
            f"format of {weight.tensor!r}",
            "no preset",
            "a preset for each matrix",
            "choose the formats again",
        )
    return presets[weight.tensor]


def _tensor_name(path: str, spec: Spec, checkpoint: Checkpoint, plan: Plan) -> str:
    """Name of the checkpoint tensor behind a parameter."""
    if path == HEAD_WEIGHT:
        return checkpoint.head
    path = ".".join(plan.names.get(part, part) for part in path.split("."))
    if spec.kind == "head":
        return checkpoint.prefix + path
    if path.startswith(SHARED_PREFIX):
        return checkpoint.prefix + path.removeprefix(SHARED_PREFIX)
    index = "0"
    if spec.kind != "expert":
        _, index, path = path.split(".", 2)  # blocks.0.self_attn.q_proj.weight
    return f"{checkpoint.prefix}layers.{spec.layers[0] + int(index)}.{path}"


def check_shape(weight: WeightSource, checkpoint: Checkpoint) -> None:
    """Raises an InputError for a tensor with another number of values than its
    parameter, for a matrix without its inputs on the last axis, and for inputs that a
    preset's blocks do not divide."""
    subject = f"tensor {weight.tensor!r} of {checkpoint.path}"
    shape = checkpoint.shape(weight.tensor, weight.rows)
    is_matrix = weight.shape[2:] == (1, 1) and len(shape) > 1
    is_transposed = is_matrix and shape[-1] != weight.shape[1]
    if is_transposed or math.prod(shape) != math.prod(weight.shape):
        raise InputError(
            subject,
            f"shape {checkpoint.shape(weight.tensor)}",
            # a checkpoint has no axes of size 1
            f"{[n for n in weight.shape if n > 1]}",
            "check that config.json belongs to these weights",
        )
    block = weight.preset.block
    if block and weight.shape[1] % block:
        raise InputError(
            subject,
            f"{weight.shape[1]} inputs",
            f"a multiple of {block} for {weight.preset.name}",
            "choose another --compress",
        )


def iter_values(
    weight: WeightSource, checkpoint: Checkpoint, dtype: torch.dtype
) -> Iterator[torch.Tensor]:
    """Yields the values of a weight in flat pieces, rounded to a dtype, its offset added.

    Raises:
        InputError: a value that fp16 or the compression cannot hold.
    """
    limit = MAX_SCALED if weight.preset.is_integer else MAX_FP16
    for chunk in checkpoint.chunks(weight.tensor, weight.rows):
        # through float32, which is faster than straight from bfloat16
        values = chunk.float()
        if weight.offset:
            values = values + weight.offset
        values = values.to(dtype)
        peak = float(values.abs().amax())
        if not peak <= limit:  # also catches NaN
            raise InputError(
                f"tensor {weight.tensor!r}",
                f"a value of {peak:g} in fp16",
                f"magnitudes up to {limit:g}",
                "export a checkpoint whose weights fp16 can hold",
            )
        yield values


def load_values(weight: WeightSource, checkpoint: Checkpoint) -> torch.Tensor:
    """The values of a weight, flat, fp16; raises the InputErrors of `iter_values`."""
    values = torch.zeros(math.prod(weight.shape), dtype=torch.float16)
    if weight.tensor is None:
        return values
    start = 0
    for piece in iter_values(weight, checkpoint, torch.float16):
        values[start : start + len(piece)] = piece
        start += len(piece)
    return values


def encode_weight(weight: WeightSource, values: torch.Tensor) -> Arrays:
    """Rounds every value of a weight to the nearest one that its preset can store.

    Args:
        values: fp16, flat; they are overwritten.

    Returns:
        `val`; `data`, `scale`; or `indices` [R·C], `lut` [R / group, 2^bits].
    """
    preset = weight.preset
    if preset == FP16:
        return {"val": values.numpy()}
    matrix = values.reshape(weight.shape[0], -1)
    if preset.is_integer:
        return quantize(matrix, preset)
    matrix = matrix.add_(0).numpy()  # 0, never -0
    if preset.group:
        return palettize_groups(matrix, preset)
    return palettize(matrix.reshape(-1), preset.bits)


def quantize(values: torch.Tensor, preset: Preset) -> Arrays:
    """Symmetric linear quantization of `values` [outputs, inputs] fp16, which are
    overwritten: `data` [outputs · inputs] int8, and `scale` fp16, one for the tensor, each
    output or each block of inputs. The formula is at the top of this file."""
    limit = 2 ** (preset.bits - 1) - 1
    values = values.reshape(-1, preset.block or values.shape[1])
    amax = torch.maximum(values.amax(1), -values.amin(1))
    if preset.granularity == "per_tensor":
        amax = amax.amax(0, keepdim=True)
    amax = amax.float().abs()  # 0, never -0
    scale = (amax * 2 / (2 * limit)).half()
    values.div_(scale[:, None]).round_().nan_to_num_().clamp_(-limit, limit)
    return {"data": values.char().flatten().numpy(), "scale": scale.numpy()}


def palettize(values: np.ndarray, bits: int) -> Arrays:
    """A table of 2^bits values for the whole tensor `values` [n] fp16, and an index into it
    for each weight: `lut` [2^bits] fp16, `indices` [n] uint8."""
    codes = values.view(np.uint16)  # the bits of each value
    counts = np.bincount(codes, minlength=1 << 16)
    # the codes that occur, in the order of their values
    distinct = np.flatnonzero(counts).astype(np.uint16)
    distinct = distinct[np.argsort(distinct.view(np.float16))]
    entries = min(len(distinct), 1 << bits)
    clusters = kmeans1d().cluster(
        distinct.view(np.float16), entries, weights=counts[distinct]
    )
    lut = np.zeros(1 << bits, np.float16)
    lut[:entries] = clusters.centroids
    index_of_code = np.zeros(1 << 16, np.uint8)
    index_of_code[distinct] = clusters.clusters
    return {"indices": index_of_code[codes], "lut": lut}


def palettize_groups(values: np.ndarray, preset: Preset) -> Arrays:
    """A table of 2^bits values for each group of rows of `values` [R, C] fp16, and an index
    into it for each weight: `lut` [R / group, 2^bits] fp16, `indices` [R·C] uint8."""
    from workbench.exporter import tables  # numba takes a moment to import

    luts = tables.group_tables(values, preset.group, 1 << preset.bits)
    indices = tables.nearest_entries(np.float32(values), np.float32(luts))
    return {"indices": indices.reshape(-1), "lut": luts}


def pack_bits(array: np.ndarray, bits: int) -> np.ndarray:
    """Values as bytes, uint8. Integers of one byte are packed with their lowest `bits`
    alone, value after value, the lowest bit first; the last byte is filled with zeros.

        >>> pack_bits(np.array([1, -1, 3], np.int8), 4).tolist()  # 0xF1, 0x03
        [241, 3]

    Args:
        array: fp16, or int8 or uint8.
        bits: of an integer, at most 8.
    """
    array = array.reshape(-1)
    if array.itemsize > 1 or bits == 8:
        return array.view(np.uint8)
    values = array.view(np.uint8) & ((1 << bits) - 1)
    # eight values fill `bits` bytes: each group is summed, shifted to disjoint bits, in
    # a word of 64 bits, whose lowest `bits` bytes are stored
    groups_of_eight = np.pad(values, (0, -len(values) % 8)).reshape(-1, 8)
    shifts = bits * np.arange(8, dtype=np.uint64)
    words = groups_of_eight @ (1 << shifts)
    word_bytes = words.view(np.uint8).reshape(-1, 8)[:, :bits]
    return word_bytes.reshape(-1)[: (len(values) * bits + 7) // 8]
