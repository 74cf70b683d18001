"""The weights of a shard: the source of each in the checkpoint, its values in fp16, and
the bytes that coremltools 9.0 stores for them, bit for bit, one cache-sized piece at a
time.

Linear presets: scale = fp16(fp16(2·amax) / (2^bits − 2)) for each tensor, output
channel or block of 32 inputs; q = clip(rne(fp16(w / scale))), 0 / 0 = 0. Lookup tables:
k-means over the distinct values, weighted by how often they occur, by coremltools'
exact solver, for tensors of every size. By default coremltools passes tensors below
10,000 values to scikit-learn, whose tables had 5% to 23% more squared error on normal
draws of 1,024 to 8,192 values (five sizes, three seeds, 4 and 6 bits).
tests/export/test_compress.py compares the bytes with coremltools' own."""

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from workbench.bundle import Options
from workbench.bundle.names import MAX_FP16
from workbench.bundle.presets import FP16, Preset
from workbench.errors import InputError
from workbench.export.shards import LayerStack, Spec
from workbench.models import family_of
from workbench.models.checkpoint import Checkpoint
from workbench.models.family import Plan
from workbench.models.zaya import Router

# coremltools doubles the largest weight in fp16 on the way to an integer scale
MAX_SCALED = 32752.0
PIECE = 1 << 16
MINUS_ZERO = 0x8000
_buffers = threading.local()


@dataclass(frozen=True)
class WeightSource:
    """One parameter of a shard's module: `path` in the module, the checkpoint `tensor`
    it comes from (None: zeros) or some `rows` of it, its shape there, what storage adds
    to it, and how it is compressed."""

    path: str
    tensor: str | None
    shape: tuple[int, ...]
    rows: slice | None = None
    offset: float = 0.0
    preset: Preset = FP16

    @property
    def compressed(self) -> bool:
        return self.preset != FP16

    @property
    def bytes(self) -> int:
        """Bytes in a weight file, but for the few scales that are not of blocks, and
        tables."""
        return int(math.prod(self.shape) * self.preset.stored_bits / 8)


def scratch(count: int, dtype: torch.dtype) -> torch.Tensor:
    """`count` elements of memory, valid until this thread's next call for this dtype,
    which is given the same memory: touching new memory is slower than reading the
    disk."""
    buffers = vars(_buffers)
    if len(buffers.get(str(dtype), ())) < count:
        buffers[str(dtype)] = torch.empty(count, dtype=dtype)
    return buffers[str(dtype)][:count]


def blank(spec: Spec, plan: Plan, options: Options) -> nn.Module:
    """The module of one shard with weights of zeros."""
    family = family_of(plan.config)
    if spec.kind == "head":
        return family.head(plan, spec.rows[1] - spec.rows[0])
    if spec.kind == "expert":
        return family.expert(plan, options)
    blocks = [family.layer(plan, i, options) for i in range(*spec.layers)]
    return LayerStack(blocks, spec)


def weight_sources(
    spec: Spec, source: Checkpoint, plan: Plan, options: Options
) -> list[WeightSource]:
    """Every parameter of one shard.

    Compressed are the weights of 1×1 convolutions outside routers: routers are small,
    and a changed choice of expert is the largest error there is.

    Raises:
        InputError: a tensor that is missing, has another shape than its parameter, or
            does not divide into the blocks of the preset.
    """
    with torch.device("meta"):
        shard = blank(spec, plan, options)
    modules = dict(shard.named_modules())
    routers = tuple(f"{path}." for path, m in modules.items() if isinstance(m, Router))
    weights = []
    for path, parameter in shard.named_parameters():
        shape = tuple(parameter.shape)
        tensor = rows = None
        if parameter.requires_grad:
            tensor = _tensor_name(path, spec, source.prefix, plan)
        if spec.rows[1] and (path == "lm_head.weight" or ".experts." in path):
            rows = slice(*spec.rows)
        # what storage adds to the checkpoint's value
        offset = getattr(modules[path.rpartition(".")[0]], "offset", 0.0)
        matrix = len(shape) == 4 and shape[2:] == (1, 1) and min(shape[:2]) > 1
        preset = options.preset if matrix and not path.startswith(routers) else FP16
        weights.append(WeightSource(path, tensor, shape, rows, offset, preset))
        if tensor:
            _check_shape(weights[-1], source)
    return weights


def _tensor_name(path: str, spec: Spec, prefix: str, plan: Plan) -> str:
    """Name of the checkpoint tensor behind a parameter."""
    if path == "lm_head.weight":
        return f"{prefix}embed_tokens.weight" if plan.tied else path
    path = ".".join(plan.names.get(part, part) for part in path.split("."))
    if spec.kind == "head":
        return prefix + path
    index = "0"
    if spec.kind != "expert":
        _, index, path = path.split(".", 2)  # blocks.0.self_attn.q_proj.weight
    return f"{prefix}layers.{spec.layers[0] + int(index)}.{path}"


def _check_shape(weight: WeightSource, source: Checkpoint) -> None:
    block = weight.preset.block
    found = needed = step = None
    stored = source.shape(weight.tensor, weight.rows)
    if math.prod(stored) != math.prod(weight.shape):
        found = f"shape {source.shape(weight.tensor)}"
        needed = f"{list(weight.shape)}"
        step = "check that config.json belongs to these weights"
    elif block and weight.shape[1] % block:
        found = f"{weight.shape[1]} inputs"
        needed = f"a multiple of {block} for {weight.preset.name}"
        step = "choose another --compress"
    if found:
        raise InputError(f"tensor {weight.tensor!r}", found, needed, step)


def rounded(
    weight: WeightSource, source: Checkpoint, dtype: torch.dtype
) -> Iterator[torch.Tensor]:
    """The values of a weight in flat pieces of a dtype.

    Raises:
        InputError: a value that fp16 or the compression cannot hold.
    """
    limit = MAX_SCALED if weight.preset.is_integer else MAX_FP16
    for chunk in source.chunks(weight.tensor, weight.rows):
        # through float32, which is faster than from bfloat16 at once
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


def load_values(weight: WeightSource, source: Checkpoint) -> torch.Tensor:
    """The values of a weight, flat, fp16, in `scratch` memory; raises as `rounded`
    does."""
    values = scratch(math.prod(weight.shape), torch.float16)
    if weight.tensor is None:
        return values.zero_()
    start = 0
    for piece in rounded(weight, source, torch.float16):
        values[start : start + len(piece)] = piece
        start += len(piece)
    return values


def stored(weight: WeightSource, values: torch.Tensor) -> dict[str, np.ndarray]:
    """Role in the program (`val`; `data`, `scale`; `indices`, `lut`) → values as
    stored, one array element per weight; they may lie in `scratch` memory. `values`:
    fp16, flat."""
    preset = weight.preset
    if not weight.compressed:
        return {"val": values.numpy()}
    if not preset.is_integer:
        return palettize(values.numpy(), preset.bits)
    return quantize(values.reshape(weight.shape[0], -1), preset)


def quantize(values: torch.Tensor, preset: Preset) -> dict[str, np.ndarray]:
    """Symmetric linear quantization of `values` [outputs, inputs]."""
    limit = 2 ** (preset.bits - 1) - 1
    row = preset.block or values.shape[1]
    values = values.reshape(-1, row)
    amax = torch.maximum(values.amax(1), -values.amin(1))
    if preset.granularity == "per_tensor":
        amax = amax.amax(0, keepdim=True)
    amax = amax.float().abs()  # 0, never -0
    scale = (amax * 2 / (2 * limit)).half()
    data = scratch(values.numel(), torch.int8).reshape(values.shape)
    divisors = scale.float()[:, None].expand(len(values), 1)
    parts = (part.split(max(1, PIECE // row)) for part in (values, data, divisors))
    for piece, place, divisor in zip(*parts):
        ratio = (piece.float() / divisor).half().float().round_()
        ratio.nan_to_num_(0.0, torch.inf, -torch.inf)
        place.copy_(ratio.clamp_(-limit, limit))
    return {"data": data.flatten().numpy(), "scale": scale.numpy()}


def palettize(values: np.ndarray, bits: int) -> dict[str, np.ndarray]:
    """A table of 2^bits values for the whole tensor, and an index into it for each
    weight."""
    from coremltools._deps import kmeans1d

    codes = values.view(np.uint16)
    counts = np.bincount(codes, minlength=1 << 16)
    counts[0] += counts[MINUS_ZERO]
    counts[MINUS_ZERO] = 0
    present = np.flatnonzero(counts).astype(np.uint16)
    present = present[np.argsort(present.view(np.float16))]
    count = min(len(present), 1 << bits)
    weights = counts[present]
    clusters = kmeans1d.cluster(present.view(np.float16), count, weights=weights)
    lut = np.zeros(1 << bits, np.float16)
    lut[:count] = clusters.centroids
    table = np.zeros(1 << 16, np.uint8)
    table[present] = clusters.clusters
    table[MINUS_ZERO] = table[0]
    return {"indices": table[codes], "lut": lut}


def packed(array: np.ndarray, bits: int) -> np.ndarray:
    """Values as bytes; those of 4 or 6 bits lie bit after bit, the lowest first."""
    if bits >= 8:
        return array.view(np.uint8)
    values = array.view(np.uint8) & ((1 << bits) - 1)
    group = 8 // np.gcd(8, bits)  # values that fill whole bytes: 2 of 4 bits, 4 of 6
    values = np.pad(values, (0, -len(values) % group)).reshape(-1, group)
    word = np.zeros(len(values), np.uint32)
    for i in range(group):
        word |= values[:, i].astype(np.uint32) << np.uint32(bits * i)
    groups = np.ascontiguousarray(word[:, None].view(np.uint8)[:, : group * bits // 8])
    return groups.reshape(-1)[: (len(array) * bits + 7) // 8]
