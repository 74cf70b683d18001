"""What a model family is (`Family`), the plan that it returns for a configuration
(`Plan`), and functions with which families read configurations."""

from dataclasses import dataclass, field
from typing import NoReturn, Protocol

import torch
from torch import nn

from workbench.bundle import Dims, Layer, Options, Rope
from workbench.bundle.names import CONV_STATE, K_STATE, MATRIX_STATE, V_STATE
from workbench.errors import InputError
from workbench.models.layers import CachedAttention, Heads, RMSNorm

# the entry of `io` (see `layers`) in which a layer finds what its shard computed for it
# alone
LAYER_INPUT = "layer_input"
ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class Plan:
    """A family's reading of a configuration: everything that the export and the host
    need beyond the layers themselves.

    Args:
        config: transformers' configuration.
        rope: the rotary tables.
        layers: attention window and rope table of every decoder layer.
        embedding_scale: multiplies embeddings.
        embedding: arrays that the host needs beside the embedding table: name in the
            bundle → tensor of the checkpoint. `bias` and `scale` are vectors [C], applied
            as (e + bias) · scale; `PER_LAYER` is a second table [V, L·P].
        side_states: for each layer, its states other than K and V: name → shape after
            the batch axis. Empty: no layer has any.
        router_width: R of a mixture of experts (0: the family has none).
        experts: E of a mixture of experts (0: the family has none).
        residual_exponent: shards hold the residual stream as 2^-residual_exponent of
            the model's.
        names: part of a parameter's path (`q_norm`) → the checkpoint's name for it,
            where the two differ.
        max_positions: the longest cache for which the plan holds (None: any).
        norm_offset: what the stored weights of norms add to the checkpoint's.
    """

    config: object
    dims: Dims
    rope: list[Rope]
    layers: list[Layer]
    embedding_scale: float = 1.0
    embedding: dict[str, str] = field(default_factory=dict)
    side_states: list[dict[str, tuple[int, ...]]] = field(default_factory=list)
    router_width: int = 0
    experts: int = 0
    residual_exponent: int = 0
    names: dict[str, str] = field(default_factory=dict)
    max_positions: int | None = None
    norm_offset: float = 0.0

    def norm(self, width: int, **keywords) -> RMSNorm:
        """An RMSNorm over `width` entries with the configuration's epsilon; `keywords`
        are further arguments of `RMSNorm`."""
        eps = self.config.rms_norm_eps
        return RMSNorm(width, eps, **{"offset": self.norm_offset} | keywords)

    def states(self, index: int, options: Options) -> dict[str, tuple[int, ...]]:
        """The states of decoder layer `index`: name → shape after the batch axis."""
        d = self.dims
        layer = self.layers[index]
        states = {}
        if layer.attends:
            H_kv, D = layer.heads(d)
            cache = H_kv, options.cache_rows(layer.window), D
            states = {K_STATE: cache, V_STATE: cache}
        if self.side_states:
            states |= self.side_states[index]
        return states

    def attention(self, index: int, options: Options) -> CachedAttention:
        """The attention of decoder layer `index`, without its weights."""
        layer = self.layers[index]
        (half,) = (len(r.inv_freq) for r in self.rope if r.name == layer.rope)
        H_kv, D = layer.heads(self.dims)
        shape = options.batch, options.layout
        return CachedAttention(
            queries=Heads(*shape, count=self.dims.H, D=D),
            keys=Heads(*shape, count=H_kv, D=D),
            S=options.cache_rows(layer.window),
            rotary=2 * half,
            suffix=layer.suffix,
        )


class Family(Protocol):
    """What the exporter calls to build the shards of a model. A family is a module with
    these functions, or a `llama.LlamaLike`.

    Three more functions are optional, and callers look for them by `hasattr`:

    - `with_weights(plan, source) -> Plan` returns the plan with what depends on the weights
      of the checkpoint `source`, such as the residual exponent.
    - `expert(plan, options) -> nn.Module` is one expert, for a family with experts.
    - `shared(plan, first, last) -> nn.Module | None` is what the layers [first, last) of a
      shard share: a module that computes from `io` the `LAYER_INPUT` of each of them."""

    def plan(self, config) -> Plan:
        """The plan of a configuration; raises an InputError for one that the family's
        layers cannot compute."""

    def layer(self, plan: Plan, index: int, options: Options) -> nn.Module:
        """Decoder layer `index`. Its parameters are named as in the checkpoint, so that
        loading them needs no table beyond the plan's `names`."""

    def head(self, plan: Plan, rows: int) -> nn.Module:
        """Final norm and `rows` rows of the vocabulary."""


def refuse(
    config, actual: str, needed: str, step: str = "see README: supported families"
) -> NoReturn:
    """Raises an InputError for a configuration that the family's layers cannot
    compute."""
    raise InputError(f"{config.model_type} checkpoint", actual, needed, step)


def flag(config, name: str) -> bool:
    """The value of a flag of the family's configuration class; False where the class
    has no such flag, because transformers then ignores it."""
    return hasattr(type(config), name) and bool(getattr(config, name))


def rope_table(
    config, layer_type: str | None = None, name: str = "", rope_types=ROPE_TYPES
) -> Rope:
    """The rotary table of a configuration, by transformers' own functions.

    Args:
        layer_type: the layer type, where the configuration has a table for each.
        name: the name of the table.
        rope_types: those that the family supports; others are refused.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = config.rope_parameters
    if layer_type:
        parameters = parameters[layer_type]
    rope_type = parameters["rope_type"]
    if rope_type not in rope_types:
        needed = f"one of {', '.join(rope_types)}"
        refuse(config, f"rope type {rope_type!r}", needed)
    layer_config = config
    if layer_type and getattr(config, "is_heterogeneous", False):
        layer_config = config.per_layer_config[layer_type]
    width = int(head_dim(layer_config) * parameters.get("partial_rotary_factor", 1.0))
    if width % 2:
        needed = "an even width, so that it splits into two halves"
        refuse(config, f"a rotary width of {width}", needed)
    if rope_type in ("default", "dynamic"):
        theta = parameters["rope_theta"]
        # Only HunYuan's: its alpha makes a table that the length of a text does not change.
        if rope_type == "dynamic":
            theta *= parameters["alpha"] ** (width / (width - 2))
        exponents = torch.arange(0, width, 2, dtype=torch.float) / width
        inv_freq, scale = 1.0 / theta**exponents, 1.0
    else:
        make = ROPE_INIT_FUNCTIONS[rope_type]
        inv_freq, scale = make(config, device=None, layer_type=layer_type)
    return Rope(name=name, inv_freq=inv_freq.tolist(), scale=float(scale))


def no_rope_table(config) -> Rope:
    """The table of layers that rotate nothing: cos is 1 and sin 0."""
    return Rope(name="nope", inv_freq=[0.0] * (head_dim(config) // 2))


def plan_alternating_layers(
    config, full: str, sliding: str, rope_types=ROPE_TYPES
) -> tuple[list[Rope], list[Layer]]:
    """The plan's `rope` and `layers` for a configuration whose `layer_types` are `full` or
    `sliding` attention; where both occur, the tables are named `global` and `local`.
    `rope_types` are those that the family supports."""
    window = config.sliding_window
    if unknown := set(config.layer_types) - {full, sliding}:
        refuse(config, f"layer types {sorted(unknown)}", f"{full} or {sliding}")
    if sliding in config.layer_types and not window:
        refuse(config, f"{sliding} and sliding_window = {window}", "a window")
    present = [kind for kind in (full, sliding) if kind in config.layer_types]
    names = {full: "global", sliding: "local"}
    if len(present) == 1:
        names = {present[0]: ""}
    layers = [
        Layer(rope=names[kind], window=window if kind == sliding else None)
        for kind in config.layer_types
    ]
    tables = [rope_table(config, kind, names[kind], rope_types) for kind in present]
    return tables, layers


@dataclass(frozen=True)
class Recurrence:
    """The layers of a configuration that keep other states than K and V.

    Args:
        layer_type: their name in the configuration's `layer_types`.
        taps, channels: of their convolution over time.
        matrix: the shape [H, D_k, D_v] of their matrix state, if they keep one.
    """

    layer_type: str
    taps: int
    channels: int
    matrix: tuple[int, int, int] | None = None

    @property
    def states(self) -> dict[str, tuple[int, ...]]:
        """The states of such a layer: name → shape after the batch axis."""
        states = {CONV_STATE: (self.taps - 1, self.channels)}
        if self.matrix:
            states[MATRIX_STATE] = self.matrix
        return states


def plan_hybrid_layers(
    config, recurrence: Recurrence, table: str = ""
) -> tuple[list[Layer], list[dict[str, tuple[int, ...]]]]:
    """The plan's `layers` and `side_states` for a configuration whose `layer_types` are
    full attention, with the rope table named `table`, or recurrent.

    Raises:
        InputError: another layer type, or no attending layer.
    """
    recurrent = recurrence.layer_type
    attends = [kind == "full_attention" for kind in config.layer_types]
    if others := set(config.layer_types) - {recurrent, "full_attention"}:
        needed = f"{recurrent} or full_attention"
        refuse(config, f"layer types {sorted(others)}", needed)
    if not any(attends):
        needed = "a layer of full_attention, at least"
        refuse(config, f"layers of {recurrent} alone", needed)
    layers = [Layer(attends=attending, rope=table) for attending in attends]
    side_states = [{} if attending else recurrence.states for attending in attends]
    return layers, side_states


def head_dim(config) -> int:
    """The width of an attention head."""
    width = getattr(config, "head_dim", None)
    return width or config.hidden_size // config.num_attention_heads


def dims(config, **sizes: int) -> Dims:
    """The sizes of a model; refuses query heads that key heads do not divide. `sizes`
    are H_kv, D and others that the configuration does not state for the whole model."""
    if not sizes:
        sizes = {"H_kv": config.num_key_value_heads, "D": head_dim(config)}
    H, H_kv = config.num_attention_heads, sizes["H_kv"]
    if H_kv and H % H_kv:
        actual = f"{H} query heads, {H_kv} key heads"
        refuse(config, actual, "a multiple of the key heads as query heads")
    return Dims(
        C=config.hidden_size,
        H=H,
        L=config.num_hidden_layers,
        V=config.vocab_size,
        **sizes,
    )
