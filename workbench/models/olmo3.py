"""OLMo 3: OLMo 2 with a window in most layers, and a rope table, perhaps of yarn, for
the others."""

from workbench.models import llama, olmo2
from workbench.models.family import ROPE_TYPES, Plan, alternating

head = llama.head
layer = olmo2.layer


def plan(config) -> Plan:
    kinds = *ROPE_TYPES, "yarn"
    return llama.plan_alike(
        config, *alternating(config, "full_attention", "sliding_attention", kinds)
    )
