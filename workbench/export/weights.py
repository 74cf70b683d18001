"""One shard as a torch module, and the source of each of its weights in the checkpoint.
`load_values` reads a weight in small pieces, rounds it once to fp16 and checks it."""

import math
import threading
from dataclasses import dataclass

import torch
from torch import nn

from workbench.bundle import Options
from workbench.bundle.names import MAX_FP16
from workbench.bundle.presets import FP16, Preset
from workbench.errors import InputError
from workbench.export.shards import LayerStack, Spec
from workbench.models import family_of
from workbench.models.checkpoint import CHUNK, Checkpoint
from workbench.models.family import Plan
from workbench.models.moe import Router

# coremltools doubles the largest weight in fp16 on the way to an integer scale
MAX_SCALED = 32752.0


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


class Scratch(threading.local):
    """Memory that a thread reuses to load and compress every tensor; touching new
    memory is slower than reading the disk."""

    def __init__(self):
        self.wide = torch.empty(CHUNK)
        self.buffers: dict[torch.dtype, torch.Tensor] = {}

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """`count` elements, valid until this thread's next call for this dtype."""
        if len(self.buffers.get(dtype, ())) < count:
            self.buffers[dtype] = torch.empty(count, dtype=dtype)
        return self.buffers[dtype][:count]


def blank(spec: Spec, plan: Plan, options: Options) -> nn.Module:
    """The module of one shard with weights of zeros."""
    family = family_of(plan.config)
    if spec.kind == "head":
        return family.head(plan, spec.rows[1] - spec.rows[0])
    if spec.kind == "expert":
        return family.expert(plan, options)
    return LayerStack(
        [family.layer(plan, i, options) for i in range(*spec.layers)], spec
    )


def weight_sources(
    spec: Spec, source: Checkpoint, plan: Plan, options: Options
) -> list[WeightSource]:
    """Every parameter of one shard.

    Compressed are the weights of 1×1 convolutions outside routers: routers are small,
    and a changed choice of expert is the largest error there is."""
    with torch.device("meta"):
        shard = blank(spec, plan, options)
    modules = dict(shard.named_modules())
    weights = []
    routers = tuple(
        f"{path}." for path, module in modules.items() if isinstance(module, Router)
    )
    for path, parameter in shard.named_parameters():
        shape = tuple(parameter.shape)
        tensor = None
        rows = None
        if parameter.requires_grad:
            tensor = _tensor_name(path, spec, source.prefix, plan)
        if spec.rows[1] and (path == "lm_head.weight" or ".experts." in path):
            rows = slice(*spec.rows)
        # what storage adds to the checkpoint's value
        offset = getattr(modules[path.rpartition(".")[0]], "offset", 0.0)
        matrix = len(shape) == 4 and shape[2:] == (1, 1) and min(shape[:2]) > 1
        preset = options.preset if matrix and not path.startswith(routers) else FP16
        weights.append(WeightSource(path, tensor, shape, rows, offset, preset))
    return weights


def _tensor_name(path: str, spec: Spec, prefix: str, plan: Plan) -> str:
    """Name of the checkpoint tensor behind a parameter."""
    if path == "lm_head.weight":
        return f"{prefix}embed_tokens.weight" if plan.tied else path
    path = ".".join(plan.names.get(part, part) for part in path.split("."))
    if spec.kind == "head":
        return prefix + path
    if spec.kind == "expert":
        return f"{prefix}layers.{spec.layers[0]}.{path}"
    _, index, rest = path.split(".", 2)  # blocks.0.self_attn.q_proj.weight
    return f"{prefix}layers.{spec.layers[0] + int(index)}.{rest}"


def check_shapes(weights: list[WeightSource], source: Checkpoint) -> None:
    """Raises an InputError for a tensor that is missing, has another shape than its
    parameter, or does not divide into the blocks of its preset."""
    for weight in weights:
        if weight.tensor is None:
            continue
        subject = f"tensor {weight.tensor!r}"
        stored = source.shape(weight.tensor, weight.rows)
        if math.prod(stored) != math.prod(weight.shape):
            raise InputError(
                subject,
                f"shape {source.shape(weight.tensor)}",
                f"{list(weight.shape)}",
                "check that config.json belongs to these weights",
            )
        if weight.preset.block and weight.shape[1] % weight.preset.block:
            raise InputError(
                subject,
                f"{weight.shape[1]} inputs",
                f"a multiple of {weight.preset.block} for {weight.preset.name}",
                "choose another --compress",
            )


def load_values(
    weight: WeightSource, source: Checkpoint, scratch: Scratch
) -> tuple[torch.Tensor, float]:
    """The values of a weight, flat, fp16, in `scratch`, and their largest magnitude.

    Raises:
        InputError: a value that fp16 or the compression cannot hold.
    """
    values = scratch.take(math.prod(weight.shape), torch.float16)
    if weight.tensor is None:
        return values.zero_(), 0.0
    start = 0
    extremes = []
    for chunk in source.chunks(weight.tensor, weight.rows):
        wide = scratch.wide[: len(chunk)]
        piece = values[start : start + len(chunk)]
        wide.copy_(chunk)
        piece.copy_(wide.add_(weight.offset) if weight.offset else wide)
        extremes += piece.aminmax()
        start += len(chunk)
    peak = float(torch.stack(extremes).abs().max())
    limit = MAX_SCALED if weight.preset.is_integer else MAX_FP16
    if not peak <= limit:  # also catches NaN
        raise InputError(
            f"tensor {weight.tensor!r}",
            f"a value of {peak:g} in fp16",
            f"magnitudes up to {limit:g}",
            "export a checkpoint whose weights fp16 can hold",
        )
    return values, peak
