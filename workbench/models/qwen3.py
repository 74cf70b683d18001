"""Qwen 3: Llama with an RMSNorm on every head of q and k, before rope."""

from functools import partial

from torch import nn

from workbench.bundle import Options
from workbench.models import llama, qwen2
from workbench.models.family import Plan

plan = qwen2.plan
head = llama.head


def layer(plan: Plan, index: int, options: Options) -> nn.Module:
    return llama.layer(plan, index, options, qk_norm=partial(plan.norm, dim=3))
