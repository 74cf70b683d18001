"""Llama (2, 3, 3.1, 3.2; pre-norm, grouped queries, SwiGLU) and, in the table `LLAMAS`,
the families that are Llama with other settings.

A family differs from Llama in its plan (rope tables, windows, names; a function such as
`mistral`) and in its layers (a `LayerSettings`). Families in files of their own use `plan`,
`DecoderLayer` and `head`, too."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import nn

from workbench.bundle import Dims, Layer, Options, Rope
from workbench.models.family import (
    ROPE_TYPES,
    Plan,
    dims,
    flag,
    no_rope_table,
    plan_alternating_layers,
    refuse,
    rope_table,
)
from workbench.models.layers import Attention, GatedMLP, Head, scaled

ROPE_TYPES_AND_YARN = *ROPE_TYPES, "yarn"
# keys of `rope_parameters`
GROWTH = "llama_4_scaling_beta"
LENGTH = "original_max_position_embeddings"
ACTIVATIONS_STEP = (
    "choose a checkpoint with a supported activation: 'gelu_pytorch_tanh' in "
    "gemma3_text, gemma4_text and gemma4_unified_text, 'silu' in every other family; or "
    "add a family (docs/extend.md)"
)
"""The next step for a checkpoint with another activation."""


class Norms(NamedTuple):
    """Names of a layer's norms; "" where there is none. The mixer is attention or what
    replaces it."""

    before_mixer: str = ""
    after_mixer: str = ""
    before_mlp: str = ""
    after_mlp: str = ""


@dataclass(frozen=True)
class LayerSettings:
    """How a decoder layer differs from Llama's; the defaults are Llama's.

    Args:
        act: the activation of the MLP.
        fused_mlp: whether one projection computes gate and up (see `GatedMLP`).
        inner: channels of the MLP (default: the configuration's).
        gain: multiplies the updates of attention and MLP.
        scale: multiplies q (default: D^-½).
        qkv_bias: whether the projections of q, k and v have biases (default: the
            configuration's `attention_bias`, which the output's projection always has).
        fused_qkv, gated, norm_at: see `Attention`.
    """

    norms: Norms = Norms(
        before_mixer="input_layernorm", before_mlp="post_attention_layernorm"
    )
    act: Callable = nn.functional.silu
    fused_mlp: bool = False
    inner: int | None = None
    gain: float = 1.0
    scale: float | None = None
    qkv_bias: bool | None = None
    fused_qkv: bool = False
    gated: bool = False
    norm_at: str = ""


LLAMA = LayerSettings()


class Mixer(NamedTuple):
    """What a layer has in place of attention, under the name that the checkpoint gives
    it."""

    name: str
    module: nn.Module


class DecoderLayer(nn.Module):
    """One decoder layer: x → hidden, both [B, C, T, 1] or [B, C, 1, T] and
    2^-residual_exponent of the model's. It attends, unless it is given another mixer."""

    def __init__(
        self,
        plan: Plan,
        index: int,
        options: Options,
        settings: LayerSettings = LLAMA,
        mixer: Mixer | None = None,
    ):
        super().__init__()
        config = plan.config
        C = plan.dims.C
        self.norms = settings.norms
        # The norms before read the scaled stream; the norms after scale the updates.
        before = {"exponent": plan.residual_exponent}
        after = {"gain": 2.0**-plan.residual_exponent}
        for name, scaling in zip(self.norms, (before, after, before, after)):
            if name:
                self.add_module(name, plan.norm(C, **scaling))
        mixer = mixer or Mixer("self_attn", attention(plan, index, options, settings))
        # the checkpoint names the mixer, and parameters have its names
        self.mixer_name = mixer.name
        self.add_module(mixer.name, mixer.module)
        inner = settings.inner or config.intermediate_size
        bias = flag(config, "mlp_bias")
        self.mlp = GatedMLP(C, inner, settings.act, bias, settings.fused_mlp)
        self.gain = settings.gain

    def normed(self, name: str, x):
        """x through the norm of this name; x itself where the name is ""."""
        return self.get_submodule(name)(x) if name else x

    def forward(self, x, cache: dict, io: dict):
        norms = self.norms
        mixer = self.get_submodule(self.mixer_name)
        added = mixer(self.normed(norms.before_mixer, x), cache, io)
        x = x + scaled(self.normed(norms.after_mixer, added), self.gain)
        return x + scaled(
            self.normed(norms.after_mlp, self.mlp(self.normed(norms.before_mlp, x))),
            self.gain,
        )


def attention(
    plan: Plan, index: int, options: Options, settings: LayerSettings
) -> Attention:
    """The attention of decoder layer `index`."""
    o_bias = flag(plan.config, "attention_bias")
    scale, qkv_bias = settings.scale, settings.qkv_bias
    return Attention(
        plan.dims.C,
        plan.attention(index, options),
        scale=plan.dims.D**-0.5 if scale is None else scale,
        qkv_bias=o_bias if qkv_bias is None else qkv_bias,
        o_bias=o_bias,
        fused_qkv=settings.fused_qkv,
        gated=settings.gated,
        norm_at=settings.norm_at,
        norm=plan.norm,
    )


def plan(
    config,
    *,
    partial_rotary: bool = False,
    act: str = "silu",
    sizes: Dims | None = None,
    rope: list[Rope] | None = None,
    layers: list[Layer] | None = None,
    **fields,
) -> Plan:
    """The plan of a family like Llama.

    Args:
        partial_rotary: whether a rope table may be narrower than a head.
        act: the only activation that the family's layers compute.
        sizes: of the model (default: those that the configuration states).
        rope: the rope tables (default: one, as the configuration states it).
        layers: window and rope table of every layer (default: no window).
        fields: further fields of `Plan`.
    """
    if not getattr(config, "is_causal", True):
        refuse(config, "is_causal = false", "causal attention")
    if layers is None:
        layers = [Layer()] * config.num_hidden_layers
    if rope is None:
        rope = [rope_table(config)]
    d = sizes or dims(config)
    is_full = all(2 * len(table.inv_freq) == d.D for table in rope)
    if not (partial_rotary or is_full):
        refuse(config, "a partial rotary factor", "full rotary dimensions")
    activation = getattr(
        config, "hidden_activation", getattr(config, "hidden_act", act)
    )
    if activation != act:
        needed = f"{act!r}, the one activation that is supported in this family"
        refuse(config, f"activation {activation!r}", needed, ACTIVATIONS_STEP)
    return Plan(config, d, rope, layers, **fields)


def layer(
    plan: Plan,
    index: int,
    options: Options,
    settings: LayerSettings = LLAMA,
    mixer: Mixer | None = None,
) -> DecoderLayer:
    """Decoder layer `index` of a family like Llama."""
    return DecoderLayer(plan, index, options, settings, mixer)


def head(
    plan: Plan, rows: int, divisor: float = 1.0, softcap: float | None = None
) -> nn.Module:
    """Final norm and `rows` rows of the vocabulary; `divisor` divides the logits,
    `softcap` bounds them (see `Head`)."""
    C = plan.dims.C
    norm = plan.norm(C, exponent=plan.residual_exponent)
    return Head(norm, C, rows, divisor, softcap)


@dataclass(frozen=True)
class LlamaLike:
    """A family that is Llama with other settings.

    Args:
        plan: configuration → plan. Refuses configurations that the family's layers cannot
            compute.
        settings: of its layers.
    """

    plan: Callable[[object], Plan] = plan
    settings: LayerSettings = LLAMA

    def layer(self, plan: Plan, index: int, options: Options) -> DecoderLayer:
        return layer(plan, index, options, self.settings)

    head = staticmethod(head)


def check_full_attention(config) -> None:
    """Refuses `layer_types` other than full attention."""
    kinds = sorted(set(config.layer_types))
    if kinds != ["full_attention"]:
        refuse(config, f"layer types {kinds}", "full_attention alone")


def qwen(config) -> Plan:
    """Full attention in every layer, as `layer_types` says."""
    check_full_attention(config)
    return plan(config)


def mistral(config, rope_types=ROPE_TYPES, **fields) -> Plan:
    """One window for all layers, or none. `rope_types` are those that the family supports,
    `fields` further arguments of `plan`."""
    if getattr(config, "layer_types", None):
        refuse(config, "layer_types", "the same attention in all layers")
    layers = [Layer(window=config.sliding_window)] * config.num_hidden_layers
    table = rope_table(config, rope_types=rope_types)
    return plan(config, rope=[table], layers=layers, **fields)


def ministral3(config) -> Plan:
    """Mistral with yarn, and queries that grow by 1 + β·ln(1 + ⌊position / original
    length⌋), which is 1 wherever the plan holds."""
    growth, length = (config.rope_parameters.get(name) for name in (GROWTH, LENGTH))
    if growth is None or length is None:
        actual = f"{GROWTH} = {growth}, {LENGTH} = {length}"
        refuse(config, actual, "numbers in rope_parameters")
    max_positions = length if growth else None
    return mistral(config, ROPE_TYPES_AND_YARN, max_positions=max_positions)


def smollm3(config) -> Plan:
    """Every fourth layer is without rope, unless the configuration says otherwise: the
    frequencies of its table are all zero, so that cos is 1 and sin 0."""
    without_rope, with_rope = no_rope_table(config), rope_table(config)
    # transformers names the field by the opposite of what its numbers say: 1 is with rope
    has_rope = config.no_rope_layers[: config.num_hidden_layers]
    if len(has_rope) < config.num_hidden_layers:
        refuse(config, f"no_rope_layers of {len(has_rope)}", "one for each layer")
    tables = [with_rope if rotates else without_rope for rotates in has_rope]
    check_full_attention(config)
    return plan(
        config,
        rope=[table for table in (without_rope, with_rope) if table in tables],
        layers=[Layer(rope=table.name) for table in tables],
    )


def olmo3(config) -> Plan:
    tables, layers = plan_alternating_layers(
        config, "full_attention", "sliding_attention", ROPE_TYPES_AND_YARN
    )
    return plan(config, rope=tables, layers=layers)


def phi3(config) -> Plan:
    """Mistral with rope on a part of each head. Longrope switches to a second table for
    all positions once a sequence exceeds the original length, and transformers then
    rebuilds its cache, so the plan holds only up to that length."""
    result = mistral(config, ("default", "longrope"), partial_rotary=True)
    if config.rope_parameters["rope_type"] == "longrope":
        return replace(result, max_positions=config.rope_parameters.get(LENGTH))
    return result


def hunyuan(config) -> Plan:
    if config.head_dim is None:
        refuse(config, "head_dim = null", "the number of channels of a head")
    parameters = config.rope_parameters
    if parameters["rope_type"] == "dynamic" and not parameters.get("alpha"):
        needed = "a table that no length changes"
        refuse(config, "rope type 'dynamic' without alpha", needed)
    names = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}
    table = rope_table(config, rope_types=(*ROPE_TYPES, "dynamic"))
    return plan(config, rope=[table], names=names)


# OLMo's norms come after attention and MLP. Nothing bounds the stream that attention and
# MLP read: `workbench explain` shows how much of fp16's range a checkpoint leaves.
OLMO = LayerSettings(
    norms=Norms(
        after_mixer="post_attention_layernorm", after_mlp="post_feedforward_layernorm"
    ),
    norm_at="channels",
)
# model_type → family
LLAMAS = {
    "hunyuan_v1_dense": LlamaLike(hunyuan, LayerSettings(norm_at="rotated")),
    "llama": LlamaLike(),
    "ministral3": LlamaLike(ministral3),
    "mistral": LlamaLike(mistral),
    "olmo2": LlamaLike(settings=OLMO),
    "olmo3": LlamaLike(olmo3, OLMO),
    "phi3": LlamaLike(phi3, LayerSettings(fused_qkv=True, fused_mlp=True)),
    "qwen2": LlamaLike(qwen, LayerSettings(qkv_bias=True)),
    "qwen3": LlamaLike(qwen, LayerSettings(norm_at="heads")),
    "smollm3": LlamaLike(smollm3),
}
