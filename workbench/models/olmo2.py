"""OLMo 2: Llama with norms behind attention and MLP instead of before, and over all
heads of q and of k together.

Nothing bounds what attention and MLP read: `workbench explain` shows how much of fp16 a
checkpoint's stream leaves."""

from torch import nn

from workbench.bundle import Options
from workbench.models import llama
from workbench.models.family import Plan

head = llama.head
plan = llama.plan_alike


def layer(plan: Plan, index: int, options: Options) -> nn.Module:
    return llama.layer(
        plan, index, options, behind=True, qk_norm=plan.norm, norm_at="channels"
    )
