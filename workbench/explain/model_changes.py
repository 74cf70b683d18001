"""The variants of Hugging Face's model that `variants.find_variant` tries: each changes one
thing, in the configuration, in the modules of the built model or in the weights that it
reads. Functions that change modules are given `base`, the model without its head, before
its weights are loaded."""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Literal
from unittest import mock

import torch
from torch import nn

from workbench.bundle import Manifest
from workbench.check import golden, hf
from workbench.models import layerwise
from workbench.models.checkpoint import Checkpoint

# Changes a built model in place; may return a context to enter while the model runs.
Change = Callable[[nn.Module], AbstractContextManager | None]
THETAS = (1e4, 1e5, 1.5e5, 2.5e5, 5e5, 1e6, 5e6, 1e7)
EPSILONS = 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2
FACTORS = (2.0, 4.0, 8.0, 16.0, 32.0)
TABLE_ROUNDING = 1e-5  # relative difference of equal frequencies, rounded to fp32
# The function in transformers' modules that rotates q and k.
ROTATE = "apply_rotary_pos_emb"
ACTIVATIONS = {
    "gelu": "exact GELU",
    "gelu_pytorch_tanh": "tanh GELU",
    "quick_gelu": "sigmoid GELU",
    "silu": "SiLU",
    "relu": "ReLU",
}
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# yields the name of a variant, and the attributes of the configuration to set
ConfigChanges = Iterator[tuple[str, dict]]


@dataclass(frozen=True)
class Variant:
    """One thing that is changed in Hugging Face's model.

    Attributes:
        config: attributes of the configuration to set.
        change: changes the built model.
        weights: the weights to run on (default: those that the bundle stores).
    """

    config: dict = field(default_factory=dict)
    change: Change | None = None
    weights: hf.Weights | None = None


@dataclass(frozen=True)
class NormPair:
    """The names of the norms of q and k in transformers' modules.

    Attributes:
        is_after_rope: whether the family applies them to what rope has turned.
    """

    q: str
    k: str
    is_after_rope: bool = False


QK_NORMS = (
    NormPair("q_norm", "k_norm"),
    NormPair("query_layernorm", "key_layernorm", is_after_rope=True),  # Hunyuan
    NormPair("q_layernorm", "k_layernorm"),
)


def list_variants(
    checkpoint: Checkpoint, manifest: Manifest, stored: golden.StoredWeights
) -> dict[str, Variant]:
    """All variants of a checkpoint's model by name, except those that equal the model as
    configured. Some bases and factors of rope are fitted to the manifest's tables.

    Args:
        stored: the weights that the bundle of `manifest` stores.
    """
    config = checkpoint.config
    tables = [rope.inv_freq for rope in manifest.rope]
    variants = {}
    ropes = _ropes(config.rope_parameters, tables)
    for name, attributes in chain(ropes, _config_changes(config)):
        if any(getattr(config, key) != value for key, value in attributes.items()):
            variants[name] = Variant(config=attributes)
    for name, change in _module_changes(config):
        variants[name] = Variant(change=change)
    head_counts = [layer.heads(manifest.dims)[0] for layer in manifest.layers]
    # one head, or as many as queries have, is the same in either order
    if any(1 < H_kv < manifest.dims.H for H_kv in head_counts):
        tiled = _patched("repeat_kv", _tiled)
        variants["key/value heads tiled over the query heads"] = Variant(change=tiled)
    if any(name.endswith(".bias") for name in checkpoint.header):
        variants["biases left out"] = Variant(weights=WithoutBiases(stored))
    return variants


def variant_with_tables(manifest: Manifest, config) -> Variant:
    """The variant with the rope tables of a bundle's manifest, for a fault that no named
    base or scaling explains."""
    return Variant(change=partial(_set_tables, manifest, config))


def configured_scale(config) -> float:
    """What Hugging Face's model multiplies q kᵀ by, in its first layer with attention."""
    layers = layerwise.empty_model(config).model.layers
    return next(filter(hf.has_attention, layers)).self_attn.scaling


def variant_with_scale(scale: float) -> Variant:
    """The variant whose attention multiplies q kᵀ by `scale`."""
    return Variant(change=partial(_set_scale, scale))


@dataclass(frozen=True)
class WithoutBiases:
    """Reads the tensors of a bundle, with zeros in place of biases."""

    stored: golden.StoredWeights

    @property
    def embedding(self) -> torch.Tensor | None:
        """See `StoredWeights`."""
        return self.stored.embedding

    def __call__(self, name: str) -> torch.Tensor:
        value = self.stored(name)
        return torch.zeros_like(value) if name.endswith(".bias") else value


def _ropes(parameters: dict, tables: list[list[float]]) -> ConfigChanges:
    """Other `rope_parameters`. In a model with one set for each kind of layer, each
    change is made once in all sets, and once in each single set."""
    has_kinds = all(isinstance(value, dict) for value in parameters.values())
    sets = parameters if has_kinds else {"": parameters}
    for name, change in _rope_changes(sets.values(), tables):
        choices = [list(sets)]
        if len(sets) > 1:
            choices += [[kind] for kind in sets]
        for kinds in choices:
            changed = sets | {kind: _with_change(sets[kind], change) for kind in kinds}
            where = "" if len(kinds) == len(sets) else f" in {kinds[0]}"
            yield (
                name + where,
                {"rope_parameters": changed if has_kinds else changed[""]},
            )


def _with_change(parameters: dict, change: dict) -> dict:
    """Rope parameters with a change. Another type than `proportional`, which pads its
    table to the whole head, turns all pairs."""
    if parameters.get("rope_type") == "proportional" and "rope_type" in change:
        change = change | {"partial_rotary_factor": 1.0}
    return parameters | change


def _rope_changes(sets: Iterable[dict], tables: list[list[float]]) -> ConfigChanges:
    """Bases, some of them fitted to the ends of a table of inverse frequencies, and
    scalings."""
    thetas = {*THETAS}
    factors = {*FACTORS}
    for table in tables:
        n = len(table)
        if n > 1 and min(table[0], table[-1]) > 0:
            # entry i is theta^(-i/n) / factor
            theta = (table[0] / table[-1]) ** (n / (n - 1))
            thetas.add(float(f"{theta:.6g}"))
            factors.add(float(f"{1 / table[0]:.6g}"))
    for theta in sorted(thetas):
        yield f"rope theta {theta:.7g}", {"rope_theta": theta}
    yield "rope scaling none", {"rope_type": "default"}
    scalings = {"linear": {"rope_type": "linear"}, "llama3": LLAMA3}
    for parameters in sets:
        if "yarn" in parameters.values():
            scalings["yarn"] = parameters
            unscaled = parameters | {"attention_factor": 1.0}
            yield "yarn without its factor of cos and sin", unscaled
        if "factor" in parameters:
            theta = parameters["rope_theta"] * parameters["factor"]
            name = f"rope scaling replaced by theta × factor, theta {theta:.7g}"
            yield name, {"rope_type": "default", "rope_theta": theta}
    for factor in sorted(factors - {1.0}):
        for kind, scaling in scalings.items():
            yield f"rope scaling {kind} {factor:.7g}", scaling | {"factor": factor}


def _config_changes(config) -> ConfigChanges:
    """Other attributes of the configuration: eps, activation, the size of windows, and
    which layers have a window or rope."""
    key = "rms_norm_eps" if hasattr(config, "rms_norm_eps") else "norm_eps"
    eps = getattr(config, key)
    for value in sorted({*EPSILONS} - {eps}):
        yield f"eps {value:g}", {key: value}
    keys = [key for key in ("hidden_act", "hidden_activation") if hasattr(config, key)]
    for kind, name in ACTIVATIONS.items():
        yield f"activation {name}", dict.fromkeys(keys, kind)
    flags = getattr(config, "no_rope_layers", None)
    if flags and not all(flags):
        yield "rope in every layer", {"no_rope_layers": [1] * len(flags)}
        other = [1 - flag for flag in flags]
        yield "layers with and without rope exchanged", {"no_rope_layers": other}
    types = getattr(config, "layer_types", None) or []
    window = getattr(config, "sliding_window", None)
    if not window or (types and not any("sliding" in kind for kind in types)):
        return
    sizes = {
        "a half": window // 2,
        "twice as much": 2 * window,
        "one less": window - 1,
        "one more": window + 1,
    }
    for description, size in sizes.items():
        yield f"window {size}, {description}", {"sliding_window": max(size, 1)}
    yield "no window", {"sliding_window": 1 << 30}
    # where the sizes of heads follow the type, another type does not fit the weights
    if len({*types}) == 2 and not getattr(config, "is_heterogeneous", False):
        first, second = {*types}
        exchanged = [second if kind == first else first for kind in types]
        yield "layers with and without window exchanged", {"layer_types": exchanged}


def _module_changes(config) -> Iterator[tuple[str, Change]]:
    """Changes of the modules: rotation, norms, scale of scores."""
    yield "rope pairs interleaved", _patched(ROTATE, _interleaved)
    yield "rope turned the other way", _patched(ROTATE, _reversed)
    yield "rope left out", _patched(ROTATE, _unrotated)
    layer = next(filter(hf.has_attention, layerwise.empty_model(config).model.layers))
    attention = layer.self_attn
    for names in QK_NORMS:
        if not hasattr(attention, names.q):
            continue
        yield "q/k norm left out", partial(_leave_out_norms, names)
        if not _rotates_together(attention):
            continue  # a rotation of one tensor does not know whether it is q or k
        if getattr(attention, names.q).weight.numel() == attention.head_dim:
            side = "before" if names.is_after_rope else "after"
            yield f"q/k norm {side} rope", partial(_move_norms, names, side)
    D = attention.head_dim
    C = config.hidden_size
    query_scalar = getattr(config, "query_pre_attn_scalar", D)
    # Scales that are equal in this model are one key, and the last name stays.
    name_of_scale = {
        C**-0.5: "1/√hidden_size",
        1.0 / D: "1/head_dim",
        1.0: "1",
        query_scalar**-0.5: "1/√query_pre_attn_scalar",
        (C / config.num_attention_heads) ** -0.5: "1/√(hidden_size/heads)",
        D**-0.5: "1/√head_dim",
    }
    for scale, name in name_of_scale.items():
        if scale != attention.scaling:  # the configured scale is no variant
            yield f"attention scale {name}", partial(_set_scale, scale)


def _rotates_together(attention: nn.Module) -> bool:
    """Whether transformers' rotation takes q and k in one call."""
    rotate = getattr(sys.modules[type(attention).__module__], ROTATE)
    return "k" in inspect.signature(rotate).parameters


def _patched(name: str, wrap: Callable[[Callable], Callable]) -> Change:
    """The change that puts wrap(function) in the place of a function of transformers'
    modelling file while the model runs."""

    def change(base):
        module = sys.modules[type(base).__module__]
        return mock.patch.object(module, name, wrap(getattr(module, name)))

    return change


def _tiled(repeat: Callable) -> Callable:
    """Repeats the key/value heads one after another: 0 1 0 1, not 0 0 1 1."""

    def repeated(x: torch.Tensor, n: int) -> torch.Tensor:
        return x.repeat(1, n, 1, 1)

    return repeated


def _reversed(rotate: Callable) -> Callable:
    """A rotation by the negative angle."""

    def rotation(*arrays, **keywords):
        *heads, cos, sin = arrays
        return rotate(*heads, cos, -sin, **keywords)

    return rotation


def _unrotated(rotate: Callable) -> Callable:
    """Leaves q and k as they are."""

    def rotation(*arrays, **keywords):
        *heads, _, _ = arrays
        return heads if len(heads) > 1 else heads[0]

    return rotation


def _interleaved(rotate: Callable) -> Callable:
    """A rotation of q and k [B, H, T, D] that pairs neighbouring dims instead of
    halves."""

    def rotation(*arrays, **keywords):
        *heads, cos, sin = arrays
        order = torch.arange(heads[0].shape[-1])
        width = cos.shape[-1]  # dims that rope turns
        # 0 2 4 … 1 3 5 …: transformers' rotation pairs the halves
        order[:width] = order[:width].reshape(-1, 2).T.flatten()
        rotated = rotate(*(x[..., order] for x in heads), cos, sin, **keywords)
        if len(heads) == 1:
            return rotated[..., order.argsort()]
        return tuple(x[..., order.argsort()] for x in rotated)

    return rotation


def _set_scale(scale: float, base: nn.Module) -> None:
    """Sets what q kᵀ is multiplied by."""
    for layer in filter(hf.has_attention, base.layers):
        layer.self_attn.scaling = scale


def _leave_out_norms(names: NormPair, base: nn.Module) -> None:
    """Makes the norms of q and k return what they are given."""
    for layer in filter(hf.has_attention, base.layers):
        _replace_norms(layer.self_attn, names)


def _replace_norms(attention: nn.Module, names: NormPair) -> dict[str, Callable]:
    """Makes the norms of one layer return what they are given; returns what they computed
    before, by their names."""
    replaced = {}
    for name in (names.q, names.k):
        norm = getattr(attention, name, None)
        if norm is None:  # a layer that copies its keys has no norm of keys
            continue
        replaced[name] = norm.forward
        norm.forward = _unchanged
    return replaced


def _unchanged(x: torch.Tensor) -> torch.Tensor:
    """What a norm that is left out returns."""
    return x


def _move_norms(
    names: NormPair, side: Literal["before", "after"], base: nn.Module
) -> AbstractContextManager:
    """Applies the norms of q and k before or after rope, on the side where the family does
    not; the context replaces the rotation, which then applies them."""
    current = CurrentNorms(names)
    for layer in filter(hf.has_attention, base.layers):
        norms = _replace_norms(layer.self_attn, names)
        layer.self_attn.register_forward_pre_hook(partial(current.enter_layer, norms))

    def wrap(rotate: Callable) -> Callable:
        def rotated(q, k, *tables):
            if side == "before":
                return rotate(*current.normalize(q, k), *tables)
            return current.normalize(*rotate(q, k, *tables))

        return rotated

    return _patched(ROTATE, wrap)(base)


class CurrentNorms:
    """The norms of q and k of the layer that runs: the rotation, a function of
    transformers' module, is not told which layer calls it."""

    def __init__(self, names: NormPair):
        self.names = names
        self.norms: dict[str, Callable] = {}

    def enter_layer(self, norms: dict, attention: nn.Module, args: tuple) -> None:
        """The hook that an attention layer calls before it runs.

        Args:
            norms: those of this layer.
        """
        self.norms.update(norms)

    def normalize(self, q: torch.Tensor, k: torch.Tensor) -> list[torch.Tensor]:
        """q and k after their norms."""
        return [self.norms[self.names.q](q), self.norms[self.names.k](k)]


def _set_tables(manifest, config, base: nn.Module) -> None:
    """Gives Hugging Face's model the rope tables of the bundle."""
    tables = {rope.name: torch.tensor(rope.inv_freq) for rope in manifest.rope}
    for rope, name in _table_names(manifest, config, base).items():
        setattr(base.rotary_emb, name, tables[rope])


def _table_names(manifest, config, base: nn.Module) -> dict[str, str]:
    """Name of a rope table in the manifest → that of the table in Hugging Face's model."""
    kinds = getattr(config, "layer_types", None) or [""] * len(manifest.layers)
    names = {}
    for layer, kind in zip(manifest.layers, kinds, strict=True):
        if layer.rope != "nope":
            # a model with two kinds of rope has a table for each
            name = f"{kind}_inv_freq"
            names[layer.rope] = name if hasattr(base.rotary_emb, name) else "inv_freq"
    return names


def describe_tables(manifest: Manifest, config) -> str:
    """How the rope tables of a bundle differ from those of Hugging Face's model, in
    words."""
    base = layerwise.empty_model(config).model
    tables = {rope.name: torch.tensor(rope.inv_freq) for rope in manifest.rope}
    clauses = []
    for rope, name in _table_names(manifest, config, base).items():
        actual, expected = tables[rope], getattr(base.rotary_emb, name).float()
        where = f" of table {rope}" if rope else ""
        if actual.shape != expected.shape:
            clauses.append(
                f"{len(actual)} frequencies{where}, in place of {len(expected)}"
            )
            continue
        # a frequency may be zero
        factors = torch.where(actual == expected, 1.0, actual / expected)
        is_wrong = (factors - 1).abs() > TABLE_ROUNDING
        if not is_wrong.any():
            continue
        factor = float(factors.median())
        if bool(((factors - factor).abs() <= TABLE_ROUNDING * abs(factor)).all()):
            clauses.append(f"frequencies{where} are {factor:.5g} times Hugging Face's")
            continue
        first = int(is_wrong.nonzero()[0])
        clauses.append(
            f"{int(is_wrong.sum())} of {len(expected)} frequencies{where} are not "
            f"Hugging Face's: number {first} is {float(actual[first]):.6g} in place of "
            f"{float(expected[first]):.6g}"
        )
    return "; ".join(clauses)
