"""Finds the variant of Hugging Face's model that a faulty bundle computes.

The bundle's program runs in exact arithmetic on its stored weights. Hugging Face's
model runs on the same weights, as configured and then with one thing changed at a time:
rope, q/k norms, eps, window, scale, activation, biases, order of heads. The variant
whose updates, K and V equal the bundle's within rounding is the cause; if there is
none, the fault is of another kind. Embeddings are the gate `host`'s."""

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from unittest import mock

import numpy as np
import pandas as pd
import torch
from torch import nn

from workbench.bundle import Bundle
from workbench.check import compare, golden, hf, run
from workbench.check.program import exact_runtime
from workbench.decode import Decoder
from workbench.models.checkpoint import Checkpoint
from workbench.progress import bar

# changes a built model in place, or also gives what has to be entered while it runs
Change = Callable[[nn.Module], AbstractContextManager | None]
# relative RMS above which weights are another layer's; compression stays below it
UNLIKE = 0.5
# An update is measured against so much of the stream at least, whose rounding in fp32
# enters it.
STREAM = 2.0**-5
# the first of them that is there is a matrix that every layer of a family has
OWN = (
    "mlp.down_proj.weight",
    "shared_mlp.input_linear.weight",
    "feed_forward.w2.weight",
    "self_attn.o_proj.weight",
)
CONFIGURED = "as configured"
FITS = 1e-5  # relative RMS that fp32 rounding explains
THETAS = (1e4, 1e5, 1.5e5, 2.5e5, 5e5, 1e6, 5e6, 1e7)
EPSILONS = 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2
FACTORS = (2.0, 4.0, 8.0, 16.0, 32.0)
# names in transformers' modules: of what rotates q and k, and of the norms of q and k;
# the family of the second pair has them after rope
ROTATE = "apply_rotary_pos_emb"
QK_NORMS = (
    ("q_norm", "k_norm"),
    ("query_layernorm", "key_layernorm"),
    ("q_layernorm", "k_layernorm"),
)
ACTIVATIONS = {"gelu": "exact GELU", "gelu_pytorch_tanh": "tanh GELU", "silu": "SiLU"}
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
Settings = Iterator[tuple[str, dict]]  # name, attributes of the configuration


def explain_bundle(
    bundle: Bundle, checkpoint: Checkpoint
) -> tuple[pd.DataFrame, str | None]:
    """Every variant's `name` and `relative_rms`, best first, and the name of the one
    that fits: the best, if rounding explains its error.

    `relative_rms` is the worst of the updates, K and V of the layers. Variants are tried
    on the first layers, those that fit there on all of them; none is where the model
    as configured fits, or layers hold the weights of others.

    Raises:
        InputError: a bundle of another checkpoint.
    """
    trial = Trial(bundle, checkpoint)
    # or what the constants of programs of another exporter may cost
    fits = max(FITS, bundle.manifest.constants_error)
    L = bundle.manifest.dims.L

    configured = trial.errors(L)
    worst = float(configured.max())
    found = {CONFIGURED: worst}
    if order := trial.order():
        pairs = [f"{layer} has {other}'s weights" for layer, other in order.items()]
        found = {f"layer order: {', '.join(pairs)}": worst}
    elif worst > fits:
        wrong = np.flatnonzero(configured > fits).tolist()
        # the first layers that include every kind, and the wrong ones of some
        types = getattr(checkpoint.config, "layer_types", None) or [""] * L
        needed = [1, *map(types.index, types), *(wrong if len(wrong) < L else ())]
        few = min(L, max(needed) + 1)
        tried = variants(trial)
        for name in bar(tried, "explain", unit="variant"):
            found[name] = float(trial.errors(few, **tried[name]).max())
        for name in tried:
            if found[name] <= fits:
                found[name] = float(trial.errors(L, **tried[name]).max())
        if min(map(found.get, tried)) > fits:
            change = partial(_own_tables, bundle.manifest, checkpoint.config)
            error = float(trial.errors(L, change=change).max())
            found["rope frequencies of the bundle's manifest"] = error
    frame = pd.DataFrame(found.items(), columns=["name", "relative_rms"])
    frame = frame.sort_values("relative_rms", kind="stable", ignore_index=True)
    name, error = frame.iloc[0]
    return frame, name if error <= fits else None


def conclusion(fits: str | None) -> str:
    """The conclusion from the variant that fits in one sentence."""
    if fits is None:
        cause = "the fault is of another kind, or there are several"
        return f"No variant explains this bundle: {cause}."
    if fits == CONFIGURED:
        return "Layers compute what the checkpoint's configuration says."
    return f"The bundle computes another model: {fits}."


class Trial:
    """A bundle's outputs on Hugging Face's inputs, and the errors of variants against
    them."""

    def __init__(self, bundle: Bundle, checkpoint: Checkpoint):
        decoder = Decoder(bundle, exact_runtime(bundle), "exact")
        self.manifest = bundle.manifest
        self.checkpoint = checkpoint
        self.read = golden.stored_weights(checkpoint, bundle)
        ids = _prompt(bundle, checkpoint)
        about = ids, self.read, "stored"
        self.source = golden.make_golden(checkpoint, *about, head=False)
        # where layers show no hidden state, caches of a chained run are all there is
        self.isolated = bundle.manifest.shows_hidden
        how = (decoder.options.t_max, "isolated") if self.isolated else (1, "chained")
        (self.outputs,) = run.run_golden(decoder, self.source, how)

    def errors(
        self,
        count: int,
        *,
        config: dict | None = None,
        change: Change = lambda base: None,
        read: hf.Weights | None = None,
    ) -> np.ndarray:
        """Relative RMS [count] of the first layers of a variant, of each the worst of
        update, K and V; inf where a value is not finite.

        Args:
            config: attributes of the configuration to set.
            read: the weights (default: those that the bundle stores).
        """
        feed = self.source.values if self.isolated else None
        configuration = copy.deepcopy(self.checkpoint.config)
        for name, value in (config or {}).items():
            setattr(configuration, name, copy.deepcopy(value))
        model = hf.empty_model(configuration)
        model.model.layers = model.model.layers[:count]
        with change(model.model) or nullcontext():
            weights = read or self.read
            reference = hf.Reference(self.checkpoint, weights, model=model)
            values = reference.run(self.source.ids, feed=feed, head=False)
        sizes = {}
        for layer in range(count):
            sizes[f"update.{layer}"] = STREAM * compare.rms(values[f"x.{layer}"])
        how = {"sizes": sizes, "tensors": ("update", "k", "v"), "similar": False}
        rows = compare.compare(values, self.outputs, **how)
        squares = rows["error"].fillna(np.inf) ** 2
        means = squares.groupby([rows["layer"], rows["tensor"]]).mean()
        layers = means.groupby("layer").max().reindex(range(count), fill_value=0.0)
        return layers.to_numpy() ** 0.5

    def order(self) -> dict[int, int]:
        """Layer → the neighbour in the checkpoint whose weights it stores, where it is
        another."""
        name = f"{self.checkpoint.prefix}layers.{{}}."
        name += next(own for own in OWN if name.format(0) + own in self.checkpoint)
        L = self.manifest.dims.L
        order = {}
        for layer in range(L):
            stored = self.read(name.format(layer)).numpy()
            errors = {}
            for other in range(max(0, layer - 1), min(L, layer + 2)):
                own = self.checkpoint.tensor(name.format(other)).numpy()
                errors[other] = compare.relative_rms(own, stored)
            best = min(errors, key=errors.get)
            if errors[layer] > UNLIKE > errors[best]:
                order[layer] = best
        return order


def _prompt(bundle: Bundle, checkpoint: Checkpoint) -> list[int]:
    """Seeded random ids, more than twice the largest window unless the cache is
    shorter."""
    windows = [layer.window or 0 for layer in bundle.manifest.layers]
    windows.append(getattr(checkpoint.config, "sliding_window", None) or 0)
    count = min(max(24, 2 * max(windows) + 8), bundle.manifest.options.max_seq_len)
    ids = np.random.default_rng(0).integers(0, bundle.manifest.dims.V, count)
    return ids.tolist()


def variants(trial: Trial) -> dict[str, dict]:
    """All variants of a checkpoint's model, as keywords of `Trial.errors`; bases and
    factors are fitted to the bundle's rope tables too."""
    config, read = trial.checkpoint.config, trial.read
    tables = [rope.inv_freq for rope in trial.manifest.rope]
    found = {}
    for name, own in chain(_ropes(config.rope_parameters, tables), _settings(config)):
        found[name] = {"config": own}
    for name, change in _changes(config):
        found[name] = {"change": change}

    def unbiased(name: str) -> torch.Tensor:
        return read(name) * (not name.endswith(".bias"))

    unbiased.embedding = read.embedding
    return found | {"biases left out": {"read": unbiased}}


def _ropes(parameters: dict, tables: list[list[float]]) -> Settings:
    """Other `rope_parameters`: of a model with several sets of them for all and for
    each."""
    several = all(isinstance(own, dict) for own in parameters.values())
    every = parameters if several else {"": parameters}
    for name, change in _rope_changes(every.values(), tables):
        for chosen in [every, *([kind] for kind in every if len(every) > 1)]:
            changed = every | {kind: every[kind] | change for kind in chosen}
            where = "" if chosen is every else f" in {chosen[0]}"
            yield name + where, {"rope_parameters": changed.get("", changed)}


def _rope_changes(parameters, tables: list[list[float]]) -> Settings:
    """Bases, some of them fitted to the ends of a table of inverse frequencies, and
    scalings."""
    thetas = {*THETAS}
    factors = {*FACTORS}
    for table in tables:
        n = len(table)
        if n > 1 and min(table[0], table[-1]) > 0:
            theta = (table[0] / table[-1]) ** (n / (n - 1))
            thetas.add(float(f"{theta:.6g}"))
            factors.add(float(f"{1 / table[0]:.6g}"))
    for theta in sorted(thetas):
        yield f"rope theta {theta:.7g}", {"rope_theta": theta}
    yield "rope scaling none", {"rope_type": "default"}
    kinds = {"linear": {"rope_type": "linear"}, "llama3": LLAMA3}
    for own in parameters:
        if "yarn" in own.values():
            kinds["yarn"] = own
            unscaled = own | {"attention_factor": 1.0}
            yield "yarn without its factor of cos and sin", unscaled
        if "factor" in own:
            theta = own["rope_theta"] * own["factor"]
            name = f"rope scaling replaced by theta × factor, theta {theta:.7g}"
            yield name, {"rope_type": "default", "rope_theta": theta}
    for factor in sorted(factors - {1.0}):
        for kind, own in kinds.items():
            yield f"rope scaling {kind} {factor:.7g}", own | {"factor": factor}


def _settings(config) -> Settings:
    """Other attributes of the configuration: eps, activation, the windows of the layers
    that have one, and which layers have a window or rope."""
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
    for words, size in sizes.items():
        yield f"window {size}, {words}", {"sliding_window": max(size, 1)}
    yield "no window", {"sliding_window": 1 << 30}
    if len({*types}) == 2:
        a, b = {*types}
        exchanged = [b if kind == a else a for kind in types]
        yield "layers with and without window exchanged", {"layer_types": exchanged}


def _changes(config) -> Iterator[tuple[str, Change]]:
    """Changes of the modules: rotation, norms, scale of scores, order of query heads on
    key heads."""
    yield "rope pairs interleaved", _patched(ROTATE, _interleaved)
    yield "rope turned the other way", _patched(ROTATE, _turned(-1.0))
    yield "rope left out", _patched(ROTATE, _turned(0.0))
    tiled = _patched("repeat_kv", lambda _: lambda x, n: x.repeat(1, n, 1, 1))
    yield "key/value heads tiled over the query heads", tiled
    layer = next(filter(hf.has_attention, hf.empty_model(config).model.layers))
    attention = layer.self_attn
    for names in QK_NORMS:
        if not hasattr(attention, names[0]):
            continue
        yield "q/k norm left out", partial(_norms_moved, names, "")
        if getattr(attention, names[0]).weight.numel() == attention.head_dim:
            side = "before" if names == QK_NORMS[1] else "after"
            yield f"q/k norm {side} rope", partial(_norms_moved, names, side)
    D = attention.head_dim
    C = config.hidden_size
    scales = {  # of equal ones the last name is kept
        C**-0.5: "1/√hidden_size",
        1.0 / D: "1/head_dim",
        1.0: "1",
        getattr(config, "query_pre_attn_scalar", D) ** -0.5: "1/√query_pre_attn_scalar",
        (C / config.num_attention_heads) ** -0.5: "1/√(hidden_size/heads)",
        D**-0.5: "1/√head_dim",
    }
    for scale, name in scales.items():
        if scale != attention.scaling:  # which no other one may name
            yield f"attention scale {name}", partial(_scaled, scale)


def _patched(name: str, wrap: Callable[[Callable], Callable]) -> Change:
    """Puts wrap(function) in place of a function of transformers' modelling file."""

    def change(base):
        module = sys.modules[type(base).__module__]
        return mock.patch.object(module, name, wrap(getattr(module, name)))

    return change


def _turned(turn: float) -> Callable[[Callable], Callable]:
    """A rotation by the angle times `turn`, which is −1 or 0."""
    return lambda rotate: lambda q, k, cos, sin: rotate(q, k, cos**-turn, sin * turn)


def _interleaved(rotate: Callable) -> Callable:
    """A rotation of q and k [B, H, T, D] that pairs neighbouring dims instead of
    halves."""

    def rotation(q, k, cos, sin):
        order = torch.arange(q.shape[-1])
        width = cos.shape[-1]
        order[:width] = order[:width].reshape(-1, 2).T.flatten()
        rotated = rotate(q[..., order], k[..., order], cos, sin)
        return tuple(x[..., order.argsort()] for x in rotated)

    return rotation


def _scaled(scale: float, base: nn.Module) -> None:
    for layer in filter(hf.has_attention, base.layers):
        layer.self_attn.scaling = scale


def _norms_moved(names: tuple[str, str], side: str, base: nn.Module):
    """Applies the norms of q and k on this side of rope, or not at all."""
    running = {}  # the norms of the layer that runs
    for layer in filter(hf.has_attention, base.layers):
        norms = {}
        for name in names:
            module = getattr(layer.self_attn, name)
            norms[name] = module.forward
            module.forward = lambda x: x
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, norms=norms: running.update(norms)
        )

    def normed(*heads):
        return [running[name](x) for name, x in zip(names, heads)]

    def wrap(rotate):
        def rotated(q, k, *tables):
            if side == "before":
                q, k = normed(q, k)
            q, k = rotate(q, k, *tables)
            return normed(q, k) if side == "after" else (q, k)

        return rotated

    return _patched(ROTATE, wrap)(base)


def _own_tables(manifest, config, base: nn.Module) -> None:
    """Gives Hugging Face's model the rope tables of the bundle."""
    kinds = getattr(config, "layer_types", None) or [""] * len(manifest.layers)
    tables = {rope.name: torch.tensor(rope.inv_freq) for rope in manifest.rope}
    for layer, kind in zip(manifest.layers, kinds, strict=True):
        if layer.rope != "nope":
            own = f"{kind}_inv_freq"
            name = own if hasattr(base.rotary_emb, own) else "inv_freq"
            setattr(base.rotary_emb, name, tables[layer.rope])
