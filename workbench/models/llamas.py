"""Families that are Llama with other settings, as one table: what differs from Llama in
the layers' attention, rope tables, windows and names."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from workbench.bundle import Layer, Options, Rope
from workbench.models import llama
from workbench.models.family import ROPE_TYPES, Plan, alternating, refuse, rope

YARN = *ROPE_TYPES, "yarn"
GROWTH = "llama_4_scaling_beta"
LENGTH = "original_max_position_embeddings"


@dataclass(frozen=True)
class Family:
    """A family that is Llama with other settings.

    Args:
        read: configuration → keywords of `plan_alike`. Refuses what the family's layers
            cannot do.
        qk_norm: what RMSNorms of q and k norm, as `norm_at` of `Attention`; "": there
            are none.
        layers: further keywords of `DecoderLayer`.
    """

    read: Callable[..., dict] = lambda config: {}
    qk_norm: str = ""
    layers: dict = field(default_factory=dict)

    def plan(self, config) -> Plan:
        return llama.plan_alike(config, **self.read(config))

    def layer(self, plan: Plan, index: int, options: Options) -> llama.DecoderLayer:
        norms = {}
        if self.qk_norm:
            norm = plan.norm
            if self.qk_norm != "channels":
                norm = partial(norm, dim=3)
            norms = {"qk_norm": norm, "norm_at": self.qk_norm}
        return llama.layer(plan, index, options, **self.layers, **norms)

    head = staticmethod(llama.head)


def qwen(config) -> dict:
    """`use_sliding_window` is off in every released default."""
    if config.use_sliding_window:
        refuse(config, "use_sliding_window = true", "full attention in every layer")
    return {"close_eps": False}


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
        found = f"{GROWTH} = {growth}, {LENGTH} = {length}"
        refuse(config, found, "numbers in rope_parameters")
    return mistral(config, YARN) | {"max_positions": length if growth else None}


def smollm3(config) -> dict:
    """Every fourth layer is without rope, unless the configuration says otherwise: the
    frequencies of its table are all zero, so that cos is 1 and sin 0."""
    kinds = sorted(set(config.layer_types))
    if kinds != ["full_attention"]:
        refuse(config, f"layer types {kinds}", "full_attention alone")
    turned = rope(config)
    still = Rope(name="nope", inv_freq=[0.0] * len(turned.inv_freq))
    tables = [still, turned]
    flags = [bool(flag) for flag in config.no_rope_layers[: config.num_hidden_layers]]
    layers = [Layer(rope=tables[flag].name) for flag in flags]
    return {"rope": [tables[flag] for flag in sorted(set(flags))], "layers": layers}


def olmo3(config) -> dict:
    kinds = "full_attention", "sliding_attention"
    ropes, layers = alternating(config, *kinds, YARN)
    return {"rope": ropes, "layers": layers}


def phi3(config) -> dict:
    """Mistral with rope on a part of each head. Longrope has another table, for all
    positions, of sequences beyond an original length. There transformers begins its
    cache anew, so the plan holds up to that length."""
    own = mistral(config, ("default", "longrope")) | {"partial_rotary": True}
    if config.rope_parameters["rope_type"] == "longrope":
        own["max_positions"] = config.rope_parameters.get(LENGTH)
    return own


def hunyuan(config) -> dict:
    from transformers.models.hunyuan_v1_dense import (
        modeling_hunyuan_v1_dense as modeling,
    )

    if config.head_dim is None:
        refuse(config, "head_dim = null", "the number of channels of a head")
    own = {"names": {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}}
    if config.rope_parameters["rope_type"] == "dynamic":
        if not config.rope_parameters.get("alpha"):
            needed = "a table that no length changes"
            refuse(config, "rope type 'dynamic' without alpha", needed)
        embedding = modeling.HunYuanDenseV1RotaryEmbedding
        frequencies, _ = embedding.compute_ntk_alpha_rope_parameters(config)
        own["rope"] = [Rope(inv_freq=frequencies.tolist())]
    return own


# OLMo's norms stand behind attention and MLP. Nothing bounds what these read: `workbench
# explain` shows how much of fp16 a checkpoint's stream leaves.
LLAMAS = {
    "hunyuan_v1_dense": Family(hunyuan, "rotated"),
    "ministral3": Family(ministral3),
    "mistral": Family(mistral),
    "olmo2": Family(qk_norm="channels", layers={"behind": True}),
    "olmo3": Family(olmo3, "channels", {"behind": True}),
    "phi3": Family(phi3, layers={"fused": True}),
    "qwen2": Family(qwen, layers={"qkv_bias": True}),
    "qwen3": Family(qwen, "heads"),
    "smollm3": Family(smollm3),
}
