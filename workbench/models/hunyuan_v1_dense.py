"""Hunyuan (dense): Llama with an RMSNorm on every head of q and k, behind rope."""

from dataclasses import replace
from functools import partial

from workbench.bundle import Rope
from workbench.models import llama
from workbench.models.family import Plan, refuse

head = llama.head


def plan(config) -> Plan:
    from transformers.models.hunyuan_v1_dense import (
        modeling_hunyuan_v1_dense as modeling,
    )

    if config.head_dim is None:
        refuse(config, "head_dim = null", "the number of channels of a head")
    ropes = None
    table = config.rope_parameters
    if table["rope_type"] == "dynamic":
        if not table.get("alpha"):
            refuse(
                config,
                "rope type 'dynamic' without alpha",
                "a table that no length changes",
            )
        by_alpha = (
            modeling.HunYuanDenseV1RotaryEmbedding.compute_ntk_alpha_rope_parameters
        )
        ropes = [Rope(inv_freq=by_alpha(config)[0].tolist())]
    names = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}
    return replace(llama.plan_alike(config, ropes), names=names)


def layer(plan: Plan, *which) -> llama.DecoderLayer:
    return llama.layer(
        plan, *which, qk_norm=partial(plan.norm, dim=3), norm_at="rotated"
    )
