"""Families that are Llama with other settings, as one table: what differs from Llama in
the layers' attention, rope tables, windows and names."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from torch import nn

from workbench.bundle import Layer, Options, Rope
from workbench.models import llama
from workbench.models.family import ROPE_TYPES, Plan, alternating, refuse, rope

Tables = tuple[list[Rope], list[Layer]]
YARN = *ROPE_TYPES, "yarn"
GROWTH = "llama_4_scaling_beta"
LENGTH = "original_max_position_embeddings"


@dataclass(frozen=True)
class Family:
    """A family that is Llama with other settings.

    Args:
        tables: configuration → the rope tables and the layers; default: one table and
            no windows. Refuses what the family's layers cannot do.
        qk_norm: what RMSNorms of q and k norm, as `norm_at` of `Attention`; None: there
            are none.
        layers: further keywords of `DecoderLayer`.
        names: as in `Plan`.
        max_positions: configuration → as in `Plan`.
        partial_rotary: rope may turn a part of each head.
        close_eps: as in `Plan`.
    """

    tables: Callable[[Any], Tables] | None = None
    qk_norm: Literal["heads", "rotated", "channels"] | None = None
    layers: dict = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    max_positions: Callable[[Any], int | None] = lambda config: None
    partial_rotary: bool = False
    close_eps: bool = True

    def plan(self, config) -> Plan:
        tables = self.tables(config) if self.tables else ()
        plan = llama.plan_alike(config, *tables, partial_rotary=self.partial_rotary)
        limit = self.max_positions(config)
        return replace(
            plan, names=self.names, max_positions=limit, close_eps=self.close_eps
        )

    def layer(self, plan: Plan, index: int, options: Options) -> nn.Module:
        norms = {}
        if self.qk_norm:
            norm = (
                plan.norm if self.qk_norm == "channels" else partial(plan.norm, dim=3)
            )
            norms = {"qk_norm": norm, "norm_at": self.qk_norm}
        return llama.layer(plan, index, options, **self.layers, **norms)

    head = staticmethod(llama.head)


def no_windows(config) -> Tables:
    """Qwen's layers, whose windows are off in every released default."""
    if config.use_sliding_window:
        refuse(config, "use_sliding_window = true", "full attention in every layer")
    return [rope(config)], [Layer()] * config.num_hidden_layers


def one_window(config, kinds=ROPE_TYPES) -> Tables:
    """Mistral's layers: one window for all, or none."""
    if getattr(config, "layer_types", None):
        refuse(config, "layer_types", "the same attention in all layers")
    window = Layer(window=config.sliding_window)
    return [rope(config, kinds=kinds)], [window] * config.num_hidden_layers


def some_turned(config) -> Tables:
    """SmolLM 3's layers: every fourth one without rope, unless the configuration says
    otherwise. Its table's frequencies are all zero: cos is 1, sin is 0."""
    if set(config.layer_types) != {"full_attention"}:
        kinds = sorted(set(config.layer_types))
        refuse(config, f"layer types {kinds}", "full_attention alone")
    turned = [bool(flag) for flag in config.no_rope_layers[: config.num_hidden_layers]]
    table = rope(config)
    still = Rope(name="nope", inv_freq=[0.0] * len(table.inv_freq))
    ropes = {False: still, True: table}
    layers = [Layer(rope=ropes[flag].name) for flag in turned]
    return [ropes[flag] for flag in sorted(set(turned))], layers


def by_alpha(config) -> Tables:
    """Hunyuan's layers, whose dynamic rope has a base that `alpha` decides."""
    from transformers.models.hunyuan_v1_dense import (
        modeling_hunyuan_v1_dense as modeling,
    )

    if config.head_dim is None:
        refuse(config, "head_dim = null", "the number of channels of a head")
    layers = [Layer()] * config.num_hidden_layers
    if config.rope_parameters["rope_type"] != "dynamic":
        return [rope(config)], layers
    if not config.rope_parameters.get("alpha"):
        needed = "a table that no length changes"
        refuse(config, "rope type 'dynamic' without alpha", needed)
    table = modeling.HunYuanDenseV1RotaryEmbedding.compute_ntk_alpha_rope_parameters
    return [Rope(inv_freq=table(config)[0].tolist())], layers


def growth_limit(config) -> int | None:
    """Ministral 3's queries grow by 1 + β·ln(1 + ⌊position / original length⌋), which
    is 1 up to that length."""
    growth, length = (config.rope_parameters.get(name) for name in (GROWTH, LENGTH))
    if growth is None or length is None:
        found = f"{GROWTH} = {growth}, {LENGTH} = {length}"
        refuse(config, found, "numbers in rope_parameters")
    return length if growth else None


def longrope_limit(config) -> int | None:
    """Phi 3's longrope has another table, for all positions, of sequences beyond an
    original length. There transformers begins its cache anew."""
    if config.rope_parameters["rope_type"] != "longrope":
        return None
    return config.rope_parameters.get(LENGTH)


# OLMo's norms stand behind attention and MLP. Nothing bounds what these read: `workbench
# explain` shows how much of fp16 a checkpoint's stream leaves.
BEHIND = {"qk_norm": "channels", "layers": {"behind": True}}
LLAMAS = {
    "qwen2": Family(no_windows, layers={"qkv_bias": True}, close_eps=False),
    "qwen3": Family(no_windows, "heads", close_eps=False),
    "mistral": Family(one_window),
    "ministral3": Family(partial(one_window, kinds=YARN), max_positions=growth_limit),
    "smollm3": Family(some_turned),
    "olmo2": Family(**BEHIND),
    "olmo3": Family(
        partial(
            alternating, full="full_attention", sliding="sliding_attention", kinds=YARN
        ),
        **BEHIND,
    ),
    "phi3": Family(
        partial(one_window, kinds=("default", "longrope")),
        layers={"fused": True},
        max_positions=longrope_limit,
        partial_rotary=True,
    ),
    "hunyuan_v1_dense": Family(
        by_alpha,
        "rotated",
        names={"q_norm": "query_layernorm", "k_norm": "key_layernorm"},
    ),
}
