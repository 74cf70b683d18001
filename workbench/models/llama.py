"""Llama (2, 3, 3.1, 3.2; pre-norm, grouped queries, SwiGLU) and, in one table, the
families that are Llama with other settings: each entry states the differences in
attention, rope tables, windows and names."""

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from workbench.bundle import Dims, Layer, Options
from workbench.models.family import (
    ROPE_TYPES,
    Plan,
    alternating,
    dims,
    flag,
    no_rope,
    refuse,
    rope,
)
from workbench.models.layers import Attention, GatedMLP, Head, scaled

YARN = *ROPE_TYPES, "yarn"
GROWTH = "llama_4_scaling_beta"
LENGTH = "original_max_position_embeddings"
# the places of a layer's norms in `norms`; the mixer is attention or what replaces it
BEFORE_MIXER, AFTER_MIXER, BEFORE_MLP, AFTER_MLP = range(4)
PRE = "input_layernorm", "", "post_attention_layernorm", ""


class DecoderLayer(nn.Module):
    """One decoder layer: x → hidden, both [B, C, T, 1] or [B, C, 1, T] and
    2^-residual_exponent of the model's.

    Args:
        norms: names of the norms before and after the mixer, before and after the MLP
            (`BEFORE_MIXER` and so on); "" where there is none.
        act: the activation of the MLP.
        fused_mlp: see `fused` of `GatedMLP`.
        mixer: name and module of another mixer in place of attention.
        gain: multiplies the updates of attention and MLP.
        inner: channels of the MLP (default: the configuration's).
        attention: further keywords of `Attention`.
    """

    def __init__(
        self,
        plan: Plan,
        index: int,
        options: Options,
        *,
        norms=PRE,
        act=nn.functional.silu,
        fused_mlp=False,
        mixer: tuple[str, nn.Module] | None = None,
        gain: float = 1.0,
        inner: int | None = None,
        **attention,
    ):
        super().__init__()
        config = plan.config
        C = plan.dims.C
        e = plan.residual_exponent
        # The norms before read the scaled stream; the norms after scale the updates.
        scalings = ({"exponent": e}, {"gain": 2.0**-e}) * 2
        for name, scaling in zip(norms, scalings):
            if name:
                self.add_module(name, plan.norm(C, **scaling))
        self.norms = norms
        if mixer is None:
            bias = flag(config, "attention_bias")
            keywords = {"scale": plan.dims.D**-0.5, "qkv_bias": bias, "o_bias": bias}
            keywords |= {"norm": plan.norm} | attention
            geometry = plan.attention_geometry(index, options)
            mixer = "self_attn", Attention(C, geometry, **keywords)
        # the checkpoint names the mixer, and parameters have its names
        self.mixer, module = mixer
        self.add_module(self.mixer, module)
        inner = inner or config.intermediate_size
        self.mlp = GatedMLP(C, inner, act, flag(config, "mlp_bias"), fused_mlp)
        self.gain = gain

    def normed(self, place: int, x):
        """x through the norm at a place such as `BEFORE_MLP`, if the family has it."""
        name = self.norms[place]
        return self.get_submodule(name)(x) if name else x

    def forward(self, x, cache: dict, io: dict):
        added = self.get_submodule(self.mixer)(self.normed(BEFORE_MIXER, x), cache, io)
        x = x + scaled(self.normed(AFTER_MIXER, added), self.gain)
        return x + scaled(
            self.normed(AFTER_MLP, self.mlp(self.normed(BEFORE_MLP, x))), self.gain
        )


def plan(
    config,
    *,
    partial_rotary: bool = False,
    act: str = "silu",
    sizes: Dims | None = None,
    **fields,
) -> Plan:
    """The plan of a family like Llama.

    Args:
        partial_rotary: whether a rope table may be narrower than a head.
        act: the only activation that the family's layers compute.
        sizes: of the model (default: those that the configuration states).
        fields: fields of `Plan`; by default one rope table and no window.
    """
    if not getattr(config, "is_causal", True):
        refuse(config, "is_causal = false", "causal attention")
    fields = {"layers": [Layer()] * config.num_hidden_layers} | fields
    if "rope" not in fields:
        fields["rope"] = [rope(config)]
    d = sizes or dims(config)
    is_full = all(2 * len(table.inv_freq) == d.D for table in fields["rope"])
    if not (partial_rotary or is_full):
        refuse(config, "a partial rotary factor", "full rotary dimensions")
    activation = getattr(
        config, "hidden_activation", getattr(config, "hidden_act", act)
    )
    if activation != act:
        refuse(config, f"activation {activation!r}", act)
    return Plan(config, d, **fields)


layer = DecoderLayer


def head(
    plan: Plan, rows: int, divisor: float = 1.0, softcap: float | None = None
) -> nn.Module:
    """Final norm and `rows` rows of the vocabulary; `divisor` divides the logits,
    `softcap` bounds them (see `Head`)."""
    C = plan.dims.C
    norm = plan.norm(C, exponent=plan.residual_exponent)
    return Head(norm, C, rows, divisor, softcap)


class Family(NamedTuple):
    """A family that is Llama with other settings.

    Args:
        read: configuration → keywords of `llama.plan`. Refuses configurations that the
            family's layers cannot compute.
        layers: keywords of `DecoderLayer` and `Attention`.
    """

    read: Callable[..., dict] = lambda config: {}
    layers: dict = {}

    def plan(self, config) -> Plan:
        return plan(config, **self.read(config))

    def layer(self, plan: Plan, index: int, options: Options) -> DecoderLayer:
        return layer(plan, index, options, **self.layers)

    head = staticmethod(head)


def full(config) -> dict:
    """Full attention in every layer, as `layer_types` says."""
    kinds = sorted(set(config.layer_types))
    if kinds != ["full_attention"]:
        refuse(config, f"layer types {kinds}", "full_attention alone")
    return {}


def mistral(config, kinds=ROPE_TYPES) -> dict:
    """One window for all layers, or none."""
    if getattr(config, "layer_types", None):
        refuse(config, "layer_types", "the same attention in all layers")
    layers = [Layer(window=config.sliding_window)] * config.num_hidden_layers
    return {"rope": [rope(config, kinds=kinds)], "layers": layers}


def ministral3(config) -> dict:
    """Mistral with yarn, and queries that grow by 1 + β·ln(1 + ⌊position / original
    length⌋), which is 1 wherever the plan holds."""
    growth, length = (config.rope_parameters.get(name) for name in (GROWTH, LENGTH))
    if growth is None or length is None:
        actual = f"{GROWTH} = {growth}, {LENGTH} = {length}"
        refuse(config, actual, "numbers in rope_parameters")
    return mistral(config, YARN) | {"max_positions": length if growth else None}


def smollm3(config) -> dict:
    """Every fourth layer is without rope, unless the configuration says otherwise: the
    frequencies of its table are all zero, so that cos is 1 and sin 0."""
    without_rope, with_rope = no_rope(config), rope(config)
    flags = [bool(flag) for flag in config.no_rope_layers[: config.num_hidden_layers]]
    if len(flags) < config.num_hidden_layers:
        refuse(config, f"no_rope_layers of {len(flags)}", "one for each layer")
    tables = [with_rope if flag else without_rope for flag in flags]
    used = [table for table in (without_rope, with_rope) if table in tables]
    return full(config) | {
        "rope": used,
        "layers": [Layer(rope=table.name) for table in tables],
    }


def olmo3(config) -> dict:
    return alternating(config, "full_attention", "sliding_attention", YARN)


def phi3(config) -> dict:
    """Mistral with rope on a part of each head. Longrope switches to a second table for
    all positions once a sequence exceeds the original length, and transformers then
    rebuilds its cache, so the plan holds only up to that length."""
    fields = mistral(config, ("default", "longrope")) | {"partial_rotary": True}
    if config.rope_parameters["rope_type"] == "longrope":
        fields["max_positions"] = config.rope_parameters.get(LENGTH)
    return fields


def hunyuan(config) -> dict:
    if config.head_dim is None:
        refuse(config, "head_dim = null", "the number of channels of a head")
    table = config.rope_parameters
    if table["rope_type"] == "dynamic" and not table.get("alpha"):
        needed = "a table that no length changes"
        refuse(config, "rope type 'dynamic' without alpha", needed)
    names = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}
    kinds = *ROPE_TYPES, "dynamic"
    return {"rope": [rope(config, kinds=kinds)], "names": names}


# OLMo's norms come after attention and MLP. Nothing bounds the stream that attention and
# MLP read: `workbench explain` shows how much of fp16's range a checkpoint leaves.
OLMO = {
    "norms": ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    "norm_at": "channels",
}
LLAMAS = {
    "hunyuan_v1_dense": Family(hunyuan, {"norm_at": "rotated"}),
    "llama": Family(),
    "ministral3": Family(ministral3),
    "mistral": Family(mistral),
    "olmo2": Family(layers=OLMO),
    "olmo3": Family(olmo3, OLMO),
    "phi3": Family(phi3, {"fused": True, "fused_mlp": True}),
    "qwen2": Family(full, {"qkv_bias": True}),
    "qwen3": Family(full, {"norm_at": "heads"}),
    "smollm3": Family(smollm3),
}
