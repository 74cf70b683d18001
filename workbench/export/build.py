"""One shard as a torch module, and where each of its weights comes from. Knows checkpoints and families, no Core ML.

Weights reach a shard by one road, `load`: read in small pieces, rounded once to fp16, checked. A plain conversion copies
them into the module; stamping never needs the module's memory.
"""

import math
import time
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from workbench.bundle import Options
from workbench.errors import InputError
from workbench.export.shards import LayerStack, Spec
from workbench.models import family_of
from workbench.models.checkpoint import CHUNK_BYTES, Checkpoint
from workbench.models.family import Plan
from workbench.models.moe import Router

MAX_FP16 = 65504.0
MAX_SCALED = 32752.0  # coremltools doubles the largest weight in fp16 on the way to an integer scale
BLOCK = 32  # inputs that share a scale in int4-block32


@dataclass(frozen=True)
class WeightSource:
    """One parameter of a shard's module: `path` in the module, the checkpoint `tensor` it comes from (None: zeros) or some
    `rows` of it, its shape there, what storage adds to it, and whether compression is for it."""

    path: str
    tensor: str | None
    shape: tuple[int, ...]
    rows: slice | None = None
    offset: float = 0.0
    compressed: bool = False


class Clock:
    """Seconds of work by kind (`template`, `read`, `compress`, `write`), raw: one sample per piece of work, any thread's."""

    def __init__(self):
        self.samples: list[tuple[str, float]] = []

    @contextmanager
    def __call__(self, kind: str):
        start = time.perf_counter()
        yield
        self.samples.append((kind, time.perf_counter() - start))

    def total(self, kind: str) -> float:
        return sum(seconds for k, seconds in self.samples if k == kind)


class Scratch:
    """Memory that one thread loads and compresses every tensor in: first touches are slower than the disk."""

    def __init__(self):
        self.chunk = bytearray(CHUNK_BYTES)
        self.wide = torch.empty(CHUNK_BYTES // 2)
        self.held: dict[torch.dtype, torch.Tensor] = {}

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """`count` elements, valid until the next call for this dtype."""
        if len(self.held.get(dtype, ())) < count:
            self.held[dtype] = torch.empty(count, dtype=dtype)
        return self.held[dtype][:count]


def blank(spec: Spec, plan: Plan, options: Options) -> nn.Module:
    """The module of one shard, its weights zeros."""
    family = family_of(plan.config)
    if spec.kind == "head":
        return family.head(plan, spec.rows[1] - spec.rows[0])
    if spec.kind == "expert":
        return family.expert(plan, options)
    return LayerStack([family.layer(plan, i, options) for i in range(*spec.layers)], spec)


def weight_sources(spec: Spec, source: Checkpoint, plan: Plan, options: Options) -> list[WeightSource]:
    """Every parameter of one shard."""
    with torch.device("meta"):
        module = blank(spec, plan, options)
    added, compressed = offsets(module), matrices(module)
    found = []
    for path, parameter in module.named_parameters():
        name, in_part = _tensor_name(path, spec, source.prefix, plan.tied)
        found.append(WeightSource(path, name if parameter.requires_grad else None, tuple(parameter.shape),
                          slice(*spec.rows) if in_part else None, added.get(path, 0.0), path in compressed))  # fmt: skip
    return found


def _tensor_name(path: str, spec: Spec, prefix: str, tied: bool) -> tuple[str, bool]:
    """Name of the checkpoint tensor behind a parameter, and whether the shard holds only its rows `spec.rows`."""
    if spec.kind == "head":
        if path == "lm_head.weight":
            return (f"{prefix}embed_tokens.weight" if tied else path), True
        return prefix + path, False
    if spec.kind == "expert":
        return f"{prefix}layers.{spec.layers[0]}.{path}", ".experts." in path
    _, index, rest = path.split(".", 2)
    return f"{prefix}layers.{spec.layers[0] + int(index)}.{rest}", False


def build(spec: Spec, source: Checkpoint, plan: Plan, options: Options) -> tuple[nn.Module, list[WeightSource]]:
    """The module of one shard with its weights in place, each rounded to fp16, and where they came from."""
    module, found, scratch = blank(spec, plan, options), weight_sources(spec, source, plan, options), Scratch()
    for part in found:
        values = load_values(part, source, options, scratch)[0]
        module.get_parameter(part.path).data = values.float().reshape(part.shape)
    return module.requires_grad_(False), found


def load_values(part: WeightSource, source: Checkpoint, options: Options, scratch: Scratch) -> tuple[torch.Tensor, float]:
    """The values of a part, flat, fp16, in `scratch`, and their largest magnitude.

    Raises:
        InputError: another shape, or what fp16 or the compression cannot hold.
    """
    values = scratch.take(math.prod(part.shape), torch.float16)
    if part.tensor is None:
        return values.zero_(), 0.0
    _check_shape(part, source, options)
    at, lowest, highest = 0, [], []
    for chunk in source.chunks(part.tensor, part.rows, scratch.chunk):
        wide, piece = scratch.wide[: len(chunk)], values[at : at + len(chunk)]
        wide.copy_(chunk)
        piece.copy_(wide.add_(part.offset) if part.offset else wide)
        low, high = piece.aminmax()
        lowest.append(low)
        highest.append(high)
        at += len(chunk)
    peak = float(torch.maximum(torch.stack(highest).max(), -torch.stack(lowest).min()))
    limit = MAX_SCALED if part.compressed and options.compress.startswith("int") else MAX_FP16
    if not peak <= limit:  # also catches NaN
        raise InputError(f"tensor {part.tensor!r}", f"a value of {peak:g} in fp16", f"magnitudes up to {limit:g}",
                         "export a checkpoint whose weights fp16 can hold")  # fmt: skip
    return values, peak


def _check_shape(part: WeightSource, source: Checkpoint, options: Options) -> None:
    shape = source.shape(part.tensor)
    count = len(range(*part.rows.indices(shape[0]))) * math.prod(shape[1:]) if part.rows else math.prod(shape)
    if count != math.prod(part.shape):
        raise InputError(f"tensor {part.tensor!r}", f"shape {shape}", f"{list(part.shape)}",
                         "check that config.json belongs to these weights")  # fmt: skip
    if options.compress == "int4-block32" and part.compressed and part.shape[1] % BLOCK:
        raise InputError(f"tensor {part.tensor!r}", f"{part.shape[1]} inputs", f"a multiple of {BLOCK} for int4-block32",
                         "choose another --compress")  # fmt: skip


def offsets(module: nn.Module) -> dict[str, float]:
    """Parameter path → what storage adds to the checkpoint's value."""
    return {f"{n}.weight": m.offset for n, m in module.named_modules() if getattr(m, "offset", 0.0)}


def matrices(module: nn.Module) -> set[str]:
    """Paths of the parameters that compression is for: weights of 1×1 convolutions outside routers.

    Routers are small, and a changed choice of expert is the largest error there is.
    """
    routers = tuple(f"{n}." for n, m in module.named_modules() if isinstance(m, Router))
    return {path for path, p in module.named_parameters()
            if p.dim() == 4 and p.shape[2:] == (1, 1) and min(p.shape[:2]) > 1 and not path.startswith(routers)}  # fmt: skip
