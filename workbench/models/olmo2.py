"""OLMo 2: Llama with norms behind attention and MLP instead of before, and over all heads of q and of k together.

Nothing bounds what attention and MLP read: `workbench trace` shows how much of fp16 a checkpoint's stream leaves.
"""

from functools import partial

from torch import nn

from workbench.bundle import Options
from workbench.models import llama
from workbench.models.family import Plan
from workbench.models.layers import RMSNorm

head, plan = llama.head, llama.plan


def layer(plan: Plan, index: int, options: Options) -> nn.Module:
    norm = partial(RMSNorm, eps=plan.config.rms_norm_eps)
    return llama.layer(plan, index, options, behind=True, qk_norm=norm, norm_at="channels")
