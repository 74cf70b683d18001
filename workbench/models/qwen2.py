"""Qwen 2 and 2.5: Llama with biases on q, k and v. (`use_sliding_window` is off in
every released default.)"""

from torch import nn

from workbench.bundle import Options
from workbench.models import llama
from workbench.models.family import Plan, refuse


def plan(config) -> Plan:
    if config.use_sliding_window:
        refuse(config, "use_sliding_window = true", "full attention in every layer")
    return llama.plan(config)


def layer(plan: Plan, index: int, options: Options) -> nn.Module:
    return llama.DecoderLayer(plan, index, options, qkv_bias=True)


head = llama.head
