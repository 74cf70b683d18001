"""Phi 3, Phi 4 mini: Mistral with one projection for q, k and v, one for gate and up,
and rope on a part of each head.

Longrope has a table for sequences up to an original length and another one, for all
positions, of longer ones. There transformers begins its cache anew, so the plan holds
up to that length."""

from dataclasses import replace
from functools import partial

from workbench.models import llama, mistral
from workbench.models.family import Plan, rope

head = llama.head
layer = partial(llama.layer, fused=True)


def plan(config) -> Plan:
    table = rope(config, kinds=("default", "longrope"))
    whole = llama.plan_alike(
        config, [table], mistral.layers(config), partial_rotary=True
    )
    limit = config.rope_parameters.get("original_max_position_embeddings")
    long = config.rope_parameters["rope_type"] == "longrope"
    return replace(whole, max_positions=limit if long else None)
