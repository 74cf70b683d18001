"""Hunyuan (dense): Llama with an RMSNorm on every head of q and k, behind rope."""

from dataclasses import replace
from functools import partial

from torch import nn

from workbench.bundle import Options, Rope
from workbench.models import llama
from workbench.models.family import Plan, refuse

head = llama.head


def plan(config) -> Plan:
    if config.head_dim is None:
        refuse(config, "head_dim = null", "the number of channels of a head")
    ropes = [_stretched(config)] if config.rope_parameters["rope_type"] == "dynamic" else None
    names = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}
    return replace(llama.plan_alike(config, ropes), names=names)


def _stretched(config) -> Rope:
    """Rope of type "dynamic" whose base is stretched by a fixed `alpha`."""
    from transformers.models.hunyuan_v1_dense import modeling_hunyuan_v1_dense as modeling

    if not config.rope_parameters.get("alpha"):
        refuse(config, "rope type 'dynamic' without alpha", "a table that no length changes")
    embedding = modeling.HunYuanDenseV1RotaryEmbedding
    return Rope(inv_freq=embedding.compute_ntk_alpha_rope_parameters(config)[0].tolist())


def layer(plan: Plan, index: int, options: Options) -> nn.Module:
    norm = partial(plan.norm, dim=3)
    return llama.layer(plan, index, options, qk_norm=norm, norm_at="rotated")
