"""Which variant of Hugging Face's model a bundle computes: the cause of a fault of the model kind, by name.

The bundle's own program runs in exact arithmetic on the weights it stores. Hugging Face's model runs on the same weights
as the checkpoint's configuration says, then with one thing changed at a time: rope, norms, window, scale, activation,
biases, order of heads and layers. The variant whose updates, K, V and embeddings are the bundle's within rounding is
the cause; where none is, the fault is another.
"""

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import torch
from torch import nn

from workbench.bundle import Bundle
from workbench.bundle.names import split_layer
from workbench.check import fidelity, golden, metrics
from workbench.decode import Decoder
from workbench.models.checkpoint import Checkpoint

CONFIGURED = "as configured"
FITS = 1e-5  # relative RMS that fp32 rounding explains
UNLIKE = 0.5  # relative RMS of weights beyond which they are another layer's, not compressed ones
STREAM_ULPS = 2.0**-22  # of the residual stream: rounding of `hidden`, which an update inherits
THETAS = (1e4, 1e5, 1.5e5, 2.5e5, 5e5, 1e6, 5e6, 1e7)
FACTORS = (2.0, 4.0, 8.0, 16.0, 32.0)
ACTIVATIONS = {"gelu": "exact GELU", "gelu_pytorch_tanh": "tanh GELU", "silu": "SiLU"}
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True)
class Variant:
    """One way in which a model may differ from its checkpoint's configuration.

    config: attributes of the configuration. model: changes the built model in place. functions: of
    transformers' modelling file, by name. read: (name, its reader) → a weight. embedding: factor of
    what enters the first layer. order: layer → the checkpoint's layer whose weights it has.
    """

    name: str
    config: dict = field(default_factory=dict)
    model: Callable[[nn.Module], None] = lambda model: None
    functions: dict[str, Callable] = field(default_factory=dict)
    read: Callable[[str, golden.WeightReader], torch.Tensor] = lambda name, read: read(name)
    embedding: float = 1.0
    order: dict[int, int] = field(default_factory=dict)


def explain_bundle(bundle: Bundle, checkpoint: Checkpoint, progress: bool = False) -> pd.DataFrame:
    """Every variant's name and `relative_rms`, the worst of its layers' updates, K and V and of the
    embeddings, best first. Variants are tried on the first layers; the best on all of them.

    Raises:
        InputError: a bundle of another checkpoint.
    """
    from tqdm.auto import tqdm

    trial, L = _Trial(bundle, checkpoint), bundle.manifest.dims.L
    own = trial.errors(Variant(CONFIGURED), L)
    errors = {CONFIGURED: float(own.max())}
    if errors[CONFIGURED] > FITS:
        wrong = np.flatnonzero(own[1:] > FITS)
        few = first_layers(checkpoint.config, wrong.tolist())
        ropes = [rope.inv_freq for rope in bundle.manifest.rope]
        listed = variants(checkpoint, ropes, trial.order, wrong)
        tried = {variant.name: variant for variant in listed}
        for name in tqdm(tried, desc="explain", unit="variant", disable=not progress):
            errors[name] = float(trial.errors(tried[name], few).max())
        best = min(tried, key=errors.get)
        if few < L and errors[best] <= FITS:
            errors[best] = float(trial.errors(tried[best], L).max())
        if errors[best] > FITS:
            tables = _own_tables(bundle.manifest, checkpoint)
            errors[tables.name] = float(trial.errors(tables, L).max())
    frame = pd.DataFrame({"name": errors.keys(), "relative_rms": errors.values()})
    return frame.sort_values("relative_rms", kind="stable", ignore_index=True)


def fitting(frame: pd.DataFrame) -> str | None:
    """The best variant, if its error is within rounding."""
    best = frame.iloc[0]
    return str(best["name"]) if best["relative_rms"] <= FITS else None


def conclusion(fits: str | None) -> str:
    """What the best variant means, in one sentence."""
    if fits is None:
        return (
            "No variant explains this bundle: the fault is of another kind, or there are several."
        )
    if fits == CONFIGURED:
        return "Layers and embeddings compute what the checkpoint's configuration says."
    return f"The bundle computes another model: {fits}."


class _Trial:
    """What a bundle computes, with Hugging Face's inputs, and how far a variant is from it."""

    def __init__(self, bundle: Bundle, checkpoint: Checkpoint):
        self.bundle, self.checkpoint = bundle, checkpoint
        self.read = golden.stored_weights(checkpoint, bundle)
        self.ids = _prompt(bundle, checkpoint)
        self.source = golden.make_golden(checkpoint, self.ids, self.read, "stored", head=False)
        decoder = Decoder(bundle, "portable", "exact")
        self.outputs = fidelity.run_golden(decoder, self.source, decoder.options.t_max)
        scale = 2.0**bundle.manifest.residual_exponent
        self.embedded = bundle.embed(self.source.ids[None])[0] * scale
        self.order = self._order()

    def errors(self, variant: Variant, count: int) -> np.ndarray:
        """Relative RMS [1 + count] of the embeddings and of the first `count` layers, each one's
        worst of update, K and V; 1 where a layer has weights of another layer than the variant's."""
        reference, outputs = self._run(variant, count), self.outputs
        errors = [metrics.relative_rms(self.source.x[0] * variant.embedding, self.embedded)]
        for layer in range(count):
            update, rows = reference.update[layer], outputs.cached[layer]
            difference = outputs.hidden[layer] - outputs.x[layer] - update
            rounding = STREAM_ULPS * _rms(reference.x[layer])
            worst = [max(0.0, _rms(difference) - rounding) / (_rms(update) or 1.0)]
            for name in "kv":
                arrays = (getattr(of, name)[layer][:, rows] for of in (reference, outputs))
                worst.append(metrics.relative_rms(*arrays))
            other = self.order.get(layer, layer) != variant.order.get(layer, layer)
            errors.append(max(*worst, float(other)))
        return np.nan_to_num(errors, nan=np.inf)

    def _run(self, variant: Variant, count: int) -> golden.Golden:
        source = self.source
        with changed_model(self.checkpoint.config, variant, count) as model:
            return golden.make_golden(
                self.checkpoint,
                self.ids,
                lambda name: variant.read(name, self.read),
                "variant",
                source.x[:count],
                source.router,
                model=model,
                head=False,
            )

    def _order(self) -> dict[int, int]:
        """Layers whose stored weights are a neighbour's in the checkpoint, and whose they are."""
        name = self.checkpoint.prefix + "layers.{}.self_attn.o_proj.weight"
        L, order = self.bundle.manifest.dims.L, {}
        for layer in range(L):
            stored = self.read(name.format(layer)).numpy()
            errors = {
                other: metrics.relative_rms(
                    self.checkpoint.tensor(name.format(other)).numpy(), stored
                )
                for other in range(max(0, layer - 1), min(L, layer + 2))
            }
            best = min(errors, key=errors.get)
            if best != layer and errors[layer] > UNLIKE > errors[best]:
                order[layer] = best
        return order


@contextmanager
def changed_model(config, variant: Variant, count: int):
    """Within, the model of a variant, without weights: its first `count` layers."""
    config = copy.deepcopy(config)
    for name, value in variant.config.items():
        setattr(config, name, value)
    model = golden.empty_model(config)
    model.model.layers = model.model.layers[:count]
    variant.model(model.model)
    with _replaced(sys.modules[type(model).__module__], variant.functions):
        yield model


@contextmanager
def _replaced(module, functions: dict[str, Callable]):
    """Within, some functions of a module are others."""
    before = {name: getattr(module, name) for name in functions}
    try:
        vars(module).update(functions)
        yield
    finally:
        vars(module).update(before)


def _prompt(bundle: Bundle, checkpoint: Checkpoint) -> list[int]:
    """Seeded random ids, enough of them to pass the largest window twice where the cache allows."""
    window = max((layer.window or 0 for layer in bundle.manifest.layers), default=0)
    window = max(window, getattr(checkpoint.config, "sliding_window", None) or 0)
    count = min(bundle.manifest.options.max_seq_len, max(24, 2 * window + 8))
    return np.random.default_rng(0).integers(0, bundle.manifest.dims.V, count).tolist()


def first_layers(config, wrong: list[int]) -> int:
    """As many layers as show every kind, at least two; where only some layers are wrong, those too."""
    types = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    some = wrong if len(wrong) < len(types) else []
    return min(
        len(types), max(2, *(types.index(kind) + 1 for kind in types), *(i + 1 for i in some))
    )


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt((np.float64(values) ** 2).mean()))


def variants(
    checkpoint: Checkpoint, ropes: list[list[float]], order: dict[int, int], wrong: np.ndarray
) -> Iterator[Variant]:
    """All variants of a checkpoint's model, `wrong` being the layers that are not as configured.

    Args:
        ropes: inverse frequencies of tables that the bundle has; a base is fitted to each.
        order: layers that have another one's weights, and whose.
    """
    config = checkpoint.config
    attention = golden.empty_model(config).model.layers[0].self_attn
    yield from _rope_variants(checkpoint, ropes)
    yield from _norm_variants(config, attention)
    yield from _window_variants(config)
    yield from _attention_variants(config, attention)
    yield from _weight_variants(checkpoint)
    if order:
        pairs = ", ".join(f"{layer} has {other}'s weights" for layer, other in order.items())
        yield Variant(f"layer order: {pairs}", order=order)
    first, second = wrong[::2], wrong[1::2]
    if len(wrong) and np.array_equal(first + 1, second):
        exchanged = dict(zip([*first, *second], [*second, *first], strict=True))
        pairs = ", ".join(f"{i} and {i + 1} exchanged" for i in first)
        yield Variant(f"layer order: {pairs}", read=_relayered(exchanged))
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


def _rope_variants(checkpoint: Checkpoint, ropes: list[list[float]]) -> Iterator[Variant]:
    """Other bases, one of them fitted to the bundle's own table, and other scalings, for all tables
    or, where a model has several, for one."""
    parameters = checkpoint.config.rope_parameters
    nested = all(isinstance(table, dict) for table in parameters.values())
    kinds = sorted(parameters) if nested else [None]
    thetas, factors = [*THETAS], [*FACTORS]
    for theta, factor in map(_fitted, ropes):
        thetas += [] if np.isclose(theta, thetas, 1e-5).any() else [theta]
        factors += [] if np.isclose(factor, [1.0, *factors], 1e-5).any() else [factor]
    changes = {f"rope theta {theta:.7g}": {"rope_theta": theta} for theta in thetas}
    changes["rope scaling none"] = {"rope_type": "default"}
    for factor in factors:
        changes[f"rope scaling linear {factor:.7g}"] = {"rope_type": "linear", "factor": factor}
        changes[f"rope scaling llama3 {factor:.7g}"] = LLAMA3 | {"factor": factor}
    for table in parameters.values() if nested else [parameters]:
        if "factor" in table:
            theta = table["rope_theta"] * table["factor"]
            name = f"rope scaling replaced by theta × factor, theta {theta:.7g}"
            changes[name] = {"rope_type": "default", "rope_theta": theta}
    seen = [parameters]
    for name, change in changes.items():
        for chosen in [*kinds, None] if len(kinds) > 1 else kinds:
            tables = copy.deepcopy(parameters)
            for kind in kinds:
                if chosen in (kind, None):
                    (tables[kind] if nested else tables).update(change)
            if tables not in seen:
                seen.append(tables)
                where = f" in {chosen}" if nested and chosen else ""
                yield Variant(name + where, {"rope_parameters": tables})
    yield Variant(
        "rope pairs interleaved", functions={"apply_rotary_pos_emb": _rotation(interleaved=True)}
    )
    yield Variant(
        "rope turned the other way", functions={"apply_rotary_pos_emb": _rotation(turn=-1.0)}
    )
    yield Variant("rope left out", functions={"apply_rotary_pos_emb": _rotation(turn=0.0)})


def _fitted(inv_freq: list[float]) -> tuple[float, float]:
    """Base and linear factor of a table of inverse frequencies, from its two ends."""
    first, last, n = inv_freq[0], inv_freq[-1], len(inv_freq)
    if n < 2 or min(first, last) <= 0:
        return THETAS[0], 1.0
    return float(f"{(first / last) ** (n / (n - 1)):.7g}"), float(f"{1 / first:.7g}")


def _rotation(interleaved: bool = False, turn: float = 1.0, before=None, after=None) -> Callable:
    """A rotation of q and k [B, H, T, D] that pairs neighbouring dims instead of halves, or turns
    another way (0: not at all); `before(q, k)` is applied first, `after(q, k)` to the result."""

    def rotate(x, cos, sin):
        width = cos.shape[-1]
        x, rest = x[..., :width], x[..., width:]
        if interleaved:
            cos, sin = (t[..., : width // 2].repeat_interleave(2, -1) for t in (cos, sin))
            turned = torch.stack([-x[..., 1::2], x[..., 0::2]], -1).flatten(-2)
        else:
            turned = torch.cat([-x[..., width // 2 :], x[..., : width // 2]], -1)
        if turn == 0:
            return torch.cat([x, rest], -1)
        return torch.cat([x * cos + turned * sin * turn, rest], -1)

    def apply(q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        q, k = before(q, k) if before else (q, k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return after(q, k) if after else (q, k)

    return apply


def _norm_variants(config, attention: nn.Module) -> Iterator[Variant]:
    """Other eps; norms of q and k left out or after rope; the norms around a block exchanged or
    left out behind it."""
    eps = config.rms_norm_eps
    for value in sorted({10 * eps, 100 * eps, eps / 10, 1e-5, 1e-6} - {eps}):
        yield Variant(f"eps {value:g}", {"rms_norm_eps": value})
    if hasattr(attention, "query_layernorm"):  # Hunyuan applies rope first
        names = ("query_layernorm", "key_layernorm")
        leave_out, norms = _norms_beside_rope(*names)
        yield Variant("q/k norm left out", model=_without(*(f"self_attn.{n}" for n in names)))
        yield Variant(
            "q/k norm before rope",
            model=leave_out,
            functions={"apply_rotary_pos_emb": _rotation(before=norms)},
        )
    if hasattr(attention, "q_norm"):
        yield Variant("q/k norm left out", model=_without("self_attn.q_norm", "self_attn.k_norm"))
        leave_out, norms = _norms_beside_rope("q_norm", "k_norm")
        yield Variant(
            "q/k norm after rope",
            model=leave_out,
            functions={"apply_rotary_pos_emb": _rotation(after=norms)},
        )
    if _is_gemma(config):
        pairs = (
            ("input_layernorm", "post_attention_layernorm"),
            ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
        )
        for pre, post in pairs:
            yield Variant(f"{post} left out", model=_without(post))
            yield Variant(f"{pre} and {post} exchanged", read=_exchanged(pre, post))
        yield Variant("norms behind blocks left out", model=_without(*(post for _, post in pairs)))


def _norms_beside_rope(q_norm: str, k_norm: str) -> tuple[Callable, Callable]:
    """What leaves both norms out of every layer, and what applies those of the layer that runs to
    q and k."""
    current: list[nn.Module] = []

    def leave_out(base):
        _without(f"self_attn.{q_norm}", f"self_attn.{k_norm}")(base)
        for layer in base.layers:
            layer.self_attn.register_forward_pre_hook(
                lambda module, args, kwargs: current.append(module), with_kwargs=True
            )

    def norms(q, k):
        pairs = (getattr(current[-1], q_norm), q), (getattr(current[-1], k_norm), k)
        return tuple(type(norm).forward(norm, x) for norm, x in pairs)

    return leave_out, norms


def _without(*modules: str) -> Callable[[nn.Module], None]:
    """Makes modules of every layer hand on what they are given."""

    def change(base):
        for layer in base.layers:
            for module in modules:
                layer.get_submodule(module).forward = lambda *x: x if len(x) > 1 else x[0]

    return change


def _exchanged(a: str, b: str) -> Callable:
    other = {a: b, b: a}

    def read(name, reader):
        return reader(".".join(other.get(part, part) for part in name.split(".")))

    return read


def _relayered(order: dict[int, int]) -> Callable:
    """Reads each layer's weights from the layer that `order` names."""

    def read(name, reader):
        layer, rest = split_layer(name)
        if layer is None:
            return reader(name)
        return reader(f"{name.removesuffix(f'{layer}.{rest}')}{order.get(layer, layer)}.{rest}")

    return read


def _window_variants(config) -> Iterator[Variant]:
    """Other windows of the layers that have one, and the other kind of attention in each layer."""
    kinds = sorted(set(getattr(config, "layer_types", None) or []))
    window = getattr(config, "sliding_window", None)
    if not window or not any("sliding" in kind for kind in kinds):
        return
    for name, value in (
        (f"window {window // 2}, a half", window // 2),
        (f"window {2 * window}, twice as much", 2 * window),
        (f"window {window - 1}, one less", window - 1),
        (f"window {window + 1}, one more", window + 1),
        ("no window", 1 << 30),
    ):
        if value > 0:
            yield Variant(name, {"sliding_window": value})
    if len(kinds) == 2:
        exchanged = [kinds[kinds[0] == kind] for kind in config.layer_types]
        yield Variant("layers with and without window exchanged", {"layer_types": exchanged})


def _attention_variants(config, attention: nn.Module) -> Iterator[Variant]:
    """Other score scales, the other order of query heads on key heads, other activations."""
    D, H = attention.head_dim, config.num_attention_heads
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
            yield Variant(f"attention scale {name}", model=_attribute("scaling", scale))
    if config.num_key_value_heads not in (1, H):
        tiled = {"repeat_kv": lambda x, count: x.repeat(1, count, 1, 1)}
        yield Variant("key/value heads tiled over the query heads", functions=tiled)
    own = getattr(config, "hidden_act", None) or config.hidden_activation
    from transformers.activations import ACT2FN

    for key, name in ACTIVATIONS.items():
        if key != own:
            yield Variant(f"activation {name}", model=_attribute("act_fn", ACT2FN[key]))


def _attribute(name: str, value) -> Callable[[nn.Module], None]:
    """Sets an attribute of every module of a layer that has it."""

    def change(base):
        for layer in base.layers:
            for module in layer.modules():
                if hasattr(module, name):
                    setattr(module, name, value)

    return change


def _weight_variants(checkpoint: Checkpoint) -> Iterator[Variant]:
    """Biases of the layers left out: all of them, and each kind alone."""
    prefix = f"{checkpoint.prefix}layers.0."
    kinds = sorted(
        name.removeprefix(prefix)
        for name in checkpoint.header
        if name.startswith(prefix) and name.endswith(".bias")
    )

    def zero(ending):
        return lambda name, read: read(name) * (0.0 if name.endswith(ending) else 1.0)

    if kinds:
        yield Variant("biases left out", read=zero(".bias"))
    for kind in kinds:
        yield Variant(f"{kind} left out", read=zero(kind))


def _own_tables(manifest, checkpoint: Checkpoint) -> Variant:
    """Hugging Face's model with the rope tables of the bundle, whatever these are."""

    def change(base):
        ropes = {rope.name: rope for rope in manifest.rope}
        kinds = getattr(checkpoint.config, "layer_types", None) or [""] * len(manifest.layers)
        for layer, kind in zip(manifest.layers, kinds, strict=True):
            name = f"{kind}_inv_freq"
            name = name if hasattr(base.rotary_emb, name) else "inv_freq"
            setattr(base.rotary_emb, name, torch.tensor(ropes[layer.rope].inv_freq))

    return Variant("rope frequencies of the bundle's manifest", model=change)
