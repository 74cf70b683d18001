"""One shard as a torch module with its weights in place, rounded to fp16. Knows checkpoints and families, no Core ML."""

from torch import nn

from workbench.bundle import Options
from workbench.errors import InputError
from workbench.models import family_of
from workbench.models.checkpoint import Checkpoint
from workbench.models.family import Plan
from workbench.models.moe import Router

from .shards import LayerStack, Spec

MAX_FP16 = 65504.0
MAX_INT8 = 32752.0  # coremltools doubles the largest weight in fp16 on the way to an int8 scale
BLOCK = 32  # inputs that share a scale in int4-block32


def build(spec: Spec, source: Checkpoint, plan: Plan, options: Options) -> tuple[nn.Module, dict[str, str]]:
    """The module of one shard, and checkpoint tensor → path of the parameter that holds it (or some rows of it)."""
    family, layer = family_of(plan.config), f"{source.prefix}layers."
    if spec.kind == "head":
        module = family.head(plan, spec.rows[1] - spec.rows[0])
        head = f"{source.prefix}embed_tokens.weight" if plan.tied else "lm_head.weight"
        names, in_part = {"norm.weight": f"{source.prefix}norm.weight", "lm_head.weight": head}, {head}
    elif spec.kind == "expert":
        module = family.expert(plan, options)
        names = {path: f"{layer}{spec.layers[0]}.{path}" for path, _ in module.named_parameters()}
        in_part = {name for path, name in names.items() if ".experts." in path}
    else:
        module = LayerStack([family.layer(plan, i, options) for i in range(*spec.layers)], spec)
        names, in_part = {}, set()
        for path, _ in module.named_parameters():
            _, index, rest = path.split(".", 2)
            names[path] = f"{layer}{spec.layers[0] + int(index)}.{rest}"
    fill(module, names, source, options, {name: slice(*spec.rows) for name in in_part})
    return module, {name: path for path, name in names.items()}


def fill(module: nn.Module, names: dict[str, str], source: Checkpoint, options: Options, rows: dict[str, slice]) -> None:
    """Loads parameters tensor by tensor, each rounded to fp16; refuses what fp16 or the compression cannot hold."""
    added, compressed = offsets(module), matrices(module)
    limit = MAX_FP16 if options.compress == "fp16" else MAX_INT8
    for path, parameter in module.named_parameters():
        name = names[path]
        value = source.tensor(name, rows.get(name)) + added.get(path, 0.0)
        if value.numel() != parameter.numel():
            raise InputError(f"tensor {name!r}", f"shape {list(value.shape)}", f"{list(parameter.shape)}",
                             "check that config.json belongs to these weights")  # fmt: skip
        if not bool(value.abs().max() <= limit):
            raise InputError(f"tensor {name!r}", f"a value of {value.abs().max():g}", f"magnitudes up to {limit:g}",
                             "export a checkpoint whose weights fp16 can hold")  # fmt: skip
        if options.compress == "int4-block32" and path in compressed and parameter.shape[1] % BLOCK:
            raise InputError(f"tensor {name!r}", f"{parameter.shape[1]} inputs", f"a multiple of {BLOCK} for int4-block32",
                             "choose another --compress")  # fmt: skip
        parameter.data = value.half().float().reshape(parameter.shape)


def offsets(module: nn.Module) -> dict[str, float]:
    """Parameter path → what storage adds to the checkpoint's value."""
    return {f"{n}.weight": m.offset for n, m in module.named_modules() if getattr(m, "offset", 0.0)}


def matrices(module: nn.Module) -> set[str]:
    """Paths of the parameters that compression is for: weights of 1×1 convolutions outside routers.

    Routers are small, and a changed choice of expert is the largest error there is.
    """
    routers = tuple(f"{n}." for n, m in module.named_modules() if isinstance(m, Router))
    return {
        path
        for path, p in module.named_parameters()
        if p.dim() == 4 and p.shape[2:] == (1, 1) and min(p.shape[:2]) > 1 and not path.startswith(routers)
    }
