"""Ministral 3: Mistral with yarn rope, and queries that grow with the logarithm of
their position.

They grow by 1 + β·ln(1 + ⌊position / original length⌋), which is 1 wherever the plan
holds."""

from dataclasses import replace

from workbench.models import llama, mistral
from workbench.models.family import ROPE_TYPES, Plan, refuse, rope

GROWTH = "llama_4_scaling_beta"
LENGTH = "original_max_position_embeddings"
head = llama.head
layer = llama.layer


def plan(config) -> Plan:
    growth, length = (config.rope_parameters.get(name) for name in (GROWTH, LENGTH))
    if growth is None or length is None:
        refuse(
            config,
            f"{GROWTH} = {growth}, {LENGTH} = {length}",
            "numbers in rope_parameters",
        )
    table = rope(config, kinds=(*ROPE_TYPES, "yarn"))
    whole = llama.plan_alike(config, [table], mistral.layers(config))
    return replace(whole, max_positions=length if growth else None)
