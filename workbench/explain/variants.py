"""Finds the variant of Hugging Face's model that a faulty bundle computes.

The bundle's program runs in exact arithmetic on its stored weights. Hugging Face's
model runs on the same weights, as configured and then with one thing changed at a time:
rope, norms, window, scale, activation, biases, order of heads and layers. The variant
whose updates, K, V and embeddings equal the bundle's within rounding is the cause; if
there is none, the fault is of another kind."""

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pandas as pd
import torch
from torch import nn

from workbench.bundle import Bundle
from workbench.bundle.names import split_layer
from workbench.check import hf
from workbench.explain.trial import Change, Trial, Variant
from workbench.models.checkpoint import Checkpoint

CONFIGURED = "as configured"
FITS = 1e-5  # relative RMS that fp32 rounding explains
THETAS = (1e4, 1e5, 1.5e5, 2.5e5, 5e5, 1e6, 5e6, 1e7)
FACTORS = (2.0, 4.0, 8.0, 16.0, 32.0)
ACTIVATION_OF = "act_fn", "activation_fn"  # its attributes in transformers' modules
# attributes of the norms of q and k in transformers' modules
QK_NORMS = (
    ("q_norm", "k_norm"),
    ("query_layernorm", "key_layernorm"),
    ("q_layernorm", "k_layernorm"),
)
Pair = Callable[[torch.Tensor, torch.Tensor], tuple]  # of q and k
ACTIVATIONS = {"gelu": "exact GELU", "gelu_pytorch_tanh": "tanh GELU", "silu": "SiLU"}
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _same(*values):
    return values


def explain_bundle(
    bundle: Bundle, checkpoint: Checkpoint, progress: bool = False
) -> pd.DataFrame:
    """Every variant's `name` and `relative_rms`, best first.

    `relative_rms` is the worst of the updates, K and V of the layers and of the
    embeddings. Variants are tried on the first layers, the best one on all of them.

    Raises:
        InputError: a bundle of another checkpoint.
    """
    trial, fits = Trial(bundle, checkpoint), tolerance(bundle)
    ropes = [rope.inv_freq for rope in bundle.manifest.rope]
    errors = try_variants(
        trial.errors, checkpoint, ropes, trial.order, fits, progress=progress
    )
    if min(errors.values()) > fits:
        tables = _own_tables(bundle.manifest, checkpoint)
        worst = trial.errors(tables, bundle.manifest.dims.L).max()
        errors[tables.name] = float(worst)
    return ranking(errors)


def tolerance(bundle: Bundle) -> float:
    """`FITS`, or what the constants of programs of another exporter may cost."""
    return max(FITS, bundle.manifest.constants_error)


def try_variants(
    errors: Callable[[Variant, int], np.ndarray],
    checkpoint: Checkpoint,
    ropes: list[list[float]],
    order: dict[int, int],
    fits: float = FITS,
    progress: bool = False,
) -> dict[str, float]:
    """The largest error of the model as configured and of its `variants`, by name.

    The model as configured runs on all layers; if its error is within `fits`, no
    variant is tried. Variants run on the first layers, the best one on all of them.

    Args:
        errors: (variant, count) → errors; the last `count` are of the first layers.
    """
    from tqdm.auto import tqdm

    L = checkpoint.config.num_hidden_layers
    configured = errors(Variant(CONFIGURED), L)
    worst = {CONFIGURED: float(configured.max())}
    if worst[CONFIGURED] <= fits:
        return worst
    wrong = np.flatnonzero(configured[-L:] > fits)
    few = first_layers(checkpoint.config, wrong.tolist())
    tried = {}
    for variant in variants(checkpoint, ropes, order, wrong):
        tried[variant.name] = variant
    for name in tqdm(tried, desc="explain", unit="variant", disable=not progress):
        of_layers = errors(tried[name], few)
        worst[name] = float(of_layers.max())
    best = min(tried, key=worst.get)
    if few < L and worst[best] <= fits:
        of_layers = errors(tried[best], L)
        worst[best] = float(of_layers.max())
    return worst


def ranking(errors: dict[str, float]) -> pd.DataFrame:
    """`name` and `relative_rms` of every variant, best first."""
    frame = pd.DataFrame(errors.items(), columns=["name", "relative_rms"])
    return frame.sort_values("relative_rms", kind="stable", ignore_index=True)


def fitting(frame: pd.DataFrame, fits: float = FITS) -> str | None:
    """The best variant, if its error is within `fits` (default: rounding)."""
    best = frame.iloc[0]
    return str(best["name"]) if best["relative_rms"] <= fits else None


def conclusion(fits: str | None) -> str:
    """The conclusion from the best variant in one sentence."""
    if fits is None:
        cause = "the fault is of another kind, or there are several"
        return f"No variant explains this bundle: {cause}."
    if fits == CONFIGURED:
        return "Layers and embeddings compute what the checkpoint's configuration says."
    return f"The bundle computes another model: {fits}."


def first_layers(config, wrong: list[int]) -> int:
    """The number of first layers that include every kind, at least two, and all wrong
    layers unless every layer is wrong."""
    types = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    needed = [types.index(kind) for kind in types]
    if len(wrong) < len(types):
        needed += wrong
    return min(len(types), max(2, max(needed) + 1))


def variants(
    checkpoint: Checkpoint,
    ropes: list[list[float]],
    order: dict[int, int],
    wrong: np.ndarray,
) -> Iterator[Variant]:
    """All variants of a checkpoint's model.

    Args:
        ropes: inverse frequencies of the bundle's tables; a base is fitted to each.
        order: layer → the layer whose weights it has, where that is another.
        wrong: the layers that differ from the model as configured.
    """
    config = checkpoint.config
    layers = hf.empty_model(config).model.layers
    layer = next(filter(hf.has_attention, layers))
    yield from _rope_variants(checkpoint, ropes)
    yield from _norm_variants(config, layer)
    yield from _window_variants(config)
    yield from _attention_variants(config, layer.self_attn)
    yield from _weight_variants(checkpoint)
    if order:
        pairs = [f"{layer} has {other}'s weights" for layer, other in order.items()]
        yield Variant(f"layer order: {', '.join(pairs)}", order=order)
    first = wrong[::2]
    second = wrong[1::2]
    if len(wrong) and np.array_equal(first + 1, second):
        exchanged = dict(zip(first, second)) | dict(zip(second, first))
        pairs = [f"{i} and {i + 1} exchanged" for i in first]
        name = f"layer order: {', '.join(pairs)}"
        yield Variant(name, read=_relayered(exchanged))
    root = config.hidden_size**0.5
    bf16 = float(torch.tensor(root, dtype=torch.bfloat16))
    factors = {"scaled by √C": root}
    if _is_gemma(config):
        factors = {"not scaled by √C": 1 / root, "scaled by √C in bf16": bf16 / root}
    for name, factor in factors.items():
        yield Variant(f"embedding {name}", embedding=factor)


def _is_gemma(config) -> bool:
    """Whether embeddings are scaled by √C and every block has a norm on both sides."""
    return hasattr(config, "query_pre_attn_scalar")


def _rope_variants(
    checkpoint: Checkpoint, ropes: list[list[float]]
) -> Iterator[Variant]:
    """Variants with other bases, one of them fitted to the bundle's table, and other
    scalings; of a model with several tables for all of them and for each."""
    parameters = checkpoint.config.rope_parameters
    tables = {None: parameters}
    if all(isinstance(table, dict) for table in parameters.values()):
        tables = dict(sorted(parameters.items()))
    seen = [tables]
    for name, change in _rope_changes(tables.values(), ropes).items():
        for chosen in [*tables, None]:  # None: all of them
            changed = dict(tables)
            for kind in tables:
                if chosen in (kind, None):
                    changed[kind] = tables[kind] | change
            if changed not in seen:
                seen.append(changed)
                where = f" in {chosen}" if chosen else ""
                settings = changed.get(None, changed)
                yield Variant(name + where, {"rope_parameters": settings})
    rotations = {
        "rope pairs interleaved": _interleaved,
        "rope turned the other way": _rotation(turn=-1.0),
        "rope left out": _rotation(turn=0.0),
    }
    for name, rotation in rotations.items():
        yield Variant(name, functions={"apply_rotary_pos_emb": rotation})
    flags = getattr(checkpoint.config, "no_rope_layers", None)
    if flags and not all(flags):
        yield Variant("rope in every layer", {"no_rope_layers": [1] * len(flags)})
        exchanged = {"no_rope_layers": [1 - flag for flag in flags]}
        yield Variant("layers with and without rope exchanged", exchanged)


def _rope_changes(tables: Iterable[dict], ropes: list[list[float]]) -> dict[str, dict]:
    """The changes of a table of `rope_parameters`, by the name of the variant."""
    thetas = [*THETAS]
    factors = [*FACTORS]
    for theta, factor in map(_fitted, ropes):
        if not np.isclose(theta, thetas, 1e-5).any():
            thetas.append(theta)
        if not np.isclose(factor, [1.0, *factors], 1e-5).any():
            factors.append(factor)
    changes = {f"rope theta {theta:.7g}": {"rope_theta": theta} for theta in thetas}
    changes["rope scaling none"] = {"rope_type": "default"}
    for factor in factors:
        linear = {"rope_type": "linear", "factor": factor}
        changes[f"rope scaling linear {factor:.7g}"] = linear
        changes[f"rope scaling llama3 {factor:.7g}"] = LLAMA3 | {"factor": factor}
    for table in tables:
        if "yarn" in table.values():
            unscaled = table | {"attention_factor": 1.0}
            changes["yarn without its factor of cos and sin"] = unscaled
            for factor in factors:
                changes[f"rope scaling yarn {factor:.7g}"] = table | {"factor": factor}
        if "factor" in table:
            theta = table["rope_theta"] * table["factor"]
            name = f"rope scaling replaced by theta × factor, theta {theta:.7g}"
            changes[name] = {"rope_type": "default", "rope_theta": theta}
    return changes


def _fitted(inv_freq: list[float]) -> tuple[float, float]:
    """Base and linear factor of a table of inverse frequencies, from its two ends."""
    first = inv_freq[0]
    last = inv_freq[-1]
    n = len(inv_freq)
    if n < 2 or min(first, last) <= 0:
        return THETAS[0], 1.0
    return float(f"{(first / last) ** (n / (n - 1)):.7g}"), float(f"{1 / first:.7g}")


def _rotation(turn: float = 1.0, before: Pair = _same, after: Pair = _same) -> Change:
    """The model's own rotation with its angle multiplied by `turn`; `before` maps q and
    k to its arguments, `after` maps its results."""

    def change(rotate):
        def rotation(q, k, cos, sin):
            cos = cos if turn else torch.ones_like(cos)
            q, k = before(q, k)
            return after(*rotate(q, k, cos, sin * turn))

        return rotation

    return change


def _interleaved(rotate: Callable) -> Callable:
    """A rotation of q and k [B, H, T, D] that pairs neighbouring dims instead of
    halves."""

    def rotation(q, k, cos, sin):
        order = torch.arange(q.shape[-1])
        width = cos.shape[-1]
        neighbours = order[:width].reshape(-1, 2)
        order[:width] = neighbours.T.flatten()
        rotated = rotate(q[..., order], k[..., order], cos, sin)
        return tuple(x[..., order.argsort()] for x in rotated)

    return rotation


def _norm_variants(config, layer: nn.Module) -> Iterator[Variant]:
    """Variants with another eps, with the norms of q and k left out or on the other
    side of rope, and with the norms around a block exchanged, left out or moved."""
    attention = layer.self_attn
    key = "rms_norm_eps" if hasattr(config, "rms_norm_eps") else "norm_eps"
    eps = getattr(config, key)
    others = {10 * eps, 100 * eps, eps / 10, 1e-5, 1e-6} - {eps}
    for value in sorted(others):
        yield Variant(f"eps {value:g}", {key: value})
    names = next((names for names in QK_NORMS if hasattr(attention, names[0])), None)
    if names:
        paths = [f"self_attn.{name}" for name in names]
        yield Variant("q/k norm left out", model=_without(*paths))
    of_heads = (
        names and getattr(attention, names[0]).weight.numel() == attention.head_dim
    )
    if of_heads:
        leave_out, norms = _norms_beside_rope(*names)
        side = "after"
        rotation = _rotation(after=norms)
        # the families with these names have their norms after rope
        if names == QK_NORMS[1]:
            side = "before"
            rotation = _rotation(before=norms)
        rotations = {"apply_rotary_pos_emb": rotation}
        yield Variant(f"q/k norm {side} rope", model=leave_out, functions=rotations)
    if _is_gemma(config):
        pairs = (
            ("input_layernorm", "post_attention_layernorm"),
            ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
        )
        for pre, post in pairs:
            yield Variant(f"{post} left out", model=_without(post))
            yield Variant(f"{pre} and {post} exchanged", read=_exchanged(pre, post))
        behind = [post for _, post in pairs]
        yield Variant("norms behind blocks left out", model=_without(*behind))
    if hasattr(layer, "post_feedforward_layernorm") and not hasattr(
        layer, "input_layernorm"
    ):
        yield Variant(
            "norms before blocks instead of behind", model=_norms_before_blocks
        )


def _norms_before_blocks(base) -> None:
    """Moves the norm after attention and after the MLP of every layer before them."""

    def move(norm, block):
        def enter(module, args, kwargs):
            if not args:
                args = (kwargs.pop("hidden_states"),)
            normed = type(norm).forward(norm, args[0])
            return (normed, *args[1:]), kwargs

        block.register_forward_pre_hook(enter, with_kwargs=True)
        norm.forward = lambda x: x

    for layer in base.layers:
        move(layer.post_attention_layernorm, layer.self_attn)
        move(layer.post_feedforward_layernorm, layer.mlp)


def _norms_beside_rope(q_norm: str, k_norm: str) -> tuple[Callable, Callable]:
    """Two functions: one that leaves both norms out of every layer, and one that
    applies the norms of the running layer to q and k."""
    current: list[nn.Module] = []

    def leave_out(base):
        _without(f"self_attn.{q_norm}", f"self_attn.{k_norm}")(base)
        for layer in filter(hf.has_attention, base.layers):
            layer.self_attn.register_forward_pre_hook(
                lambda module, args, kwargs: current.append(module), with_kwargs=True
            )

    def norms(q, k):
        attention = current[-1]
        pairs = (getattr(attention, q_norm), q), (getattr(attention, k_norm), k)
        return tuple(type(norm).forward(norm, x) for norm, x in pairs)

    return leave_out, norms


def _without(*modules: str) -> Callable[[nn.Module], None]:
    """Replaces modules, of every layer that has them, by the identity."""
    parent = modules[0].split(".")[0]

    def change(base):
        for layer in base.layers:
            if not hasattr(layer, parent):
                continue
            for module in modules:
                layer.get_submodule(module).forward = lambda x: x

    return change


def _exchanged(a: str, b: str) -> Callable:
    other = {a: b, b: a}

    def read(name, reader):
        parts = [other.get(part, part) for part in name.split(".")]
        return reader(".".join(parts))

    return read


def _relayered(order: dict[int, int]) -> Callable:
    """Reads each layer's weights from the layer that `order` names."""

    def read(name, reader):
        layer, rest = split_layer(name)
        if layer is None:
            return reader(name)
        prefix = name.removesuffix(f"{layer}.{rest}")
        return reader(f"{prefix}{order.get(layer, layer)}.{rest}")

    return read


def _window_variants(config) -> Iterator[Variant]:
    """Variants with other windows of the layers that have one, and with the two kinds
    of attention exchanged."""
    kinds = sorted(set(getattr(config, "layer_types", None) or []))
    window = getattr(config, "sliding_window", None)
    if not window or (kinds and not any("sliding" in kind for kind in kinds)):
        return
    sizes = {
        "a half": window // 2,
        "twice as much": 2 * window,
        "one less": window - 1,
        "one more": window + 1,
    }
    for text, size in sizes.items():
        if size > 0:
            yield Variant(f"window {size}, {text}", {"sliding_window": size})
    yield Variant("no window", {"sliding_window": 1 << 30})
    if len(kinds) == 2:
        other = dict(zip(kinds, reversed(kinds)))
        exchanged = {"layer_types": [other[kind] for kind in config.layer_types]}
        yield Variant("layers with and without window exchanged", exchanged)


def _attention_variants(config, attention: nn.Module) -> Iterator[Variant]:
    """Variants with other score scales, another order of query heads on key heads,
    other activations."""
    D = attention.head_dim
    H = config.num_attention_heads
    scales = {
        "1/√head_dim": D**-0.5,
        "1/√(hidden_size/heads)": (config.hidden_size / H) ** -0.5,
        "1/√query_pre_attn_scalar": getattr(config, "query_pre_attn_scalar", D) ** -0.5,
        "1/√hidden_size": config.hidden_size**-0.5,
        "1/head_dim": 1.0 / D,
        "1": 1.0,
    }
    seen = {attention.scaling}
    for name, scale in scales.items():
        if scale not in seen:
            seen.add(scale)
            change = _attribute(("scaling",), scale)
            yield Variant(f"attention scale {name}", model=change)
    if config.num_key_value_heads not in (1, H):
        tiled = {"repeat_kv": lambda own: lambda x, count: x.repeat(1, count, 1, 1)}
        yield Variant("key/value heads tiled over the query heads", functions=tiled)
    own = getattr(config, "hidden_act", None) or getattr(
        config, "hidden_activation", "silu"
    )
    from transformers.activations import ACT2FN

    for key, name in ACTIVATIONS.items():
        if key != own:
            change = _attribute(ACTIVATION_OF, ACT2FN[key])
            yield Variant(f"activation {name}", model=change)


def _attribute(names: tuple[str, ...], value) -> Callable[[nn.Module], None]:
    """Sets each of the attributes `names` of every module of a layer that has it."""

    def change(base):
        for module in base.layers.modules():
            for name in names:
                if hasattr(module, name):
                    setattr(module, name, value)

    return change


def _weight_variants(checkpoint: Checkpoint) -> Iterator[Variant]:
    """Variants without biases: without all of them, and without each kind alone."""
    kinds = []
    for name in sorted(checkpoint.header):
        layer, rest = split_layer(name)
        if layer == 0 and name.endswith(".bias"):
            kinds.append(rest)

    def zero(ending):
        def read_kind(name, read):
            return read(name) * float(not name.endswith(ending))

        return read_kind

    if kinds:
        yield Variant("biases left out", read=zero(".bias"))
    for kind in kinds:
        yield Variant(f"{kind} left out", read=zero(kind))


def _own_tables(manifest, checkpoint: Checkpoint) -> Variant:
    """Hugging Face's model with the rope tables of the bundle."""

    kinds = getattr(checkpoint.config, "layer_types", None)
    kinds = kinds or [""] * len(manifest.layers)

    def change(base):
        tables = {rope.name: torch.tensor(rope.inv_freq) for rope in manifest.rope}
        for layer, kind in zip(manifest.layers, kinds, strict=True):
            if layer.rope == "nope":
                continue
            name = f"{kind}_inv_freq"
            if not hasattr(base.rotary_emb, name):
                name = "inv_freq"
            setattr(base.rotary_emb, name, tables[layer.rope])

    return Variant("rope frequencies of the bundle's manifest", model=change)
