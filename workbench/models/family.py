"""The plan that every model family returns for a configuration, and helpers that
families share."""

from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from workbench.bundle import Dims, Layer, Options, Rope
from workbench.bundle.names import K_STATE, V_STATE
from workbench.errors import InputError
from workbench.models.layers import AttentionGeometry, RMSNorm

ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class Plan:
    """A family's reading of a configuration: all that the export and the host need
    beyond the layers themselves.

    `embedding_scale` multiplies embeddings; `embedding` names the checkpoint vectors
    [C] `bias` and `scale` applied as (e + bias) · scale. `side_states` maps, for each
    layer, a further state's name to its shape after the batch axis (none: no layer has
    any); those of convolutions hold their last `tail` inputs. `router_width` R and
    `experts` E are those of a mixture of experts. The residual stream is kept as
    2^-residual_exponent of the model's. `names` maps a part of a parameter's path
    (`q_norm`) to the checkpoint's name for it, where that is another one. The plan
    holds for caches of up to `max_positions` tokens (None: any). `close_eps` and
    `norm_offset` are those of its norms."""

    config: Any
    dims: Dims
    rope: list[Rope]
    layers: list[Layer]
    tied: bool
    embedding_scale: float = 1.0
    embedding: dict[str, str] = field(default_factory=dict)
    side_states: list[dict[str, tuple[int, ...]]] = field(default_factory=list)
    tail: int = 2
    router_width: int = 0
    experts: int = 0
    residual_exponent: int = 0
    names: dict[str, str] = field(default_factory=dict)
    max_positions: int | None = None
    close_eps: bool = False
    norm_offset: float = 0.0

    def norm(self, width: int, dim: int = 1) -> RMSNorm:
        """An RMSNorm over `width` entries of axis `dim`, with the configuration's
        epsilon."""
        eps = self.config.rms_norm_eps
        close = self.close_eps
        return RMSNorm(width, eps, dim=dim, offset=self.norm_offset, close_eps=close)

    def rotary(self, index: int) -> int:
        """How many of the D dims of a head decoder layer `index` turns."""
        tables = {table.name: table for table in self.rope}
        return 2 * len(tables[self.layers[index].rope].inv_freq)

    def states(self, index: int, options: Options) -> dict[str, tuple[int, ...]]:
        """The states of decoder layer `index`: name → shape after the batch axis."""
        d = self.dims
        layer = self.layers[index]
        states = {}
        if layer.attends:
            cache = d.H_kv, options.slots(layer.window), d.D
            states = {K_STATE: cache, V_STATE: cache}
        if self.side_states:
            states |= self.side_states[index]
        return states

    def shape(self, index: int, options: Options) -> AttentionGeometry:
        """Sizes of the attention of decoder layer `index`."""
        d = self.dims
        layer = self.layers[index]
        S = options.slots(layer.window)
        return AttentionGeometry(
            options.batch, d.H, d.H_kv, d.D, S, options.layout, layer.suffix
        )


def refuse(config, actual: str, needed: str) -> NoReturn:
    raise InputError(
        f"{config.model_type} checkpoint",
        actual,
        needed,
        "see README: supported families",
    )


def flag(config, name: str) -> bool:
    """A flag that the family's configuration class has: transformers ignores it in
    others."""
    return hasattr(type(config), name) and bool(getattr(config, name))


def rope(
    config, layer_type: str | None = None, name: str = "", kinds=ROPE_TYPES
) -> Rope:
    """The rotary table of a configuration (of one layer type, where it has several), by
    transformers' own functions; rope types beside `kinds` are refused."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = config.rope_parameters
    keywords = {}
    if layer_type:
        parameters = parameters[layer_type]
        keywords = {"layer_type": layer_type}
    kind = parameters["rope_type"]
    if kind not in kinds:
        refuse(config, f"rope type {kind!r}", f"one of {', '.join(kinds)}")
    width = int(head_dim(config) * parameters.get("partial_rotary_factor", 1.0))
    if width % 2:
        refuse(
            config, f"a rotary width of {width}", "an even one, two halves to rotate"
        )
    if kind == "default":
        exponents = torch.arange(0, width, 2, dtype=torch.float) / width
        inv_freq = 1.0 / parameters["rope_theta"] ** exponents
        return Rope(name=name, inv_freq=inv_freq.tolist())
    inv_freq, scale = ROPE_INIT_FUNCTIONS[kind](config, device=None, **keywords)
    return Rope(name=name, inv_freq=inv_freq.tolist(), scale=float(scale))


def alternating(
    config, full: str, sliding: str, kinds=ROPE_TYPES
) -> tuple[list[Rope], list[Layer]]:
    """Rotary tables and layers of a configuration whose `layer_types` are full or
    sliding attention; where both occur, the tables are named `global` and `local`."""
    if unknown := set(config.layer_types) - {full, sliding}:
        refuse(config, f"layer types {sorted(unknown)}", f"{full} or {sliding}")
    if sliding in config.layer_types and not config.sliding_window:
        refuse(
            config,
            f"{sliding} and sliding_window = {config.sliding_window}",
            "a window",
        )
    names = {full: "global", sliding: "local"}
    present = [kind for kind in names if kind in config.layer_types]
    if len(present) == 1:
        names = dict.fromkeys(names, "")
    windows = {full: None, sliding: config.sliding_window}
    layers = []
    for kind in config.layer_types:
        layers.append(Layer(rope=names[kind], window=windows[kind]))
    return [rope(config, kind, names[kind], kinds) for kind in present], layers


def hybrid_layers(config, recurrent: str) -> list[Layer]:
    """Layers of a configuration whose `layer_types` are full attention or another kind
    without attention; refuses others, and models without attention."""
    if others := set(config.layer_types) - {recurrent, "full_attention"}:
        refuse(
            config, f"layer types {sorted(others)}", f"{recurrent} or full_attention"
        )
    if "full_attention" not in config.layer_types:
        refuse(
            config,
            f"layers of {recurrent} alone",
            "a layer of full_attention, at least",
        )
    return [Layer(attends=kind == "full_attention") for kind in config.layer_types]


def head_dim(config) -> int:
    width = getattr(config, "head_dim", None)
    return width or config.hidden_size // config.num_attention_heads


def dims(config) -> Dims:
    return Dims(
        C=config.hidden_size,
        H=config.num_attention_heads,
        H_kv=config.num_key_value_heads,
        D=head_dim(config),
        L=config.num_hidden_layers,
        V=config.vocab_size,
    )
