"""Measures how far each ingredient of ZAYA's layer, left out of Hugging Face's model,
moves the layer's update.

Most ingredients are switched off by their own weights, the rest by temporarily
replacing a function of transformers' module."""

from collections.abc import Callable
from contextlib import nullcontext
from unittest.mock import patch

import pandas as pd
import torch
from torch import nn

from workbench.check import golden, metrics
from workbench.check.golden import Golden
from workbench.models.checkpoint import Checkpoint

Change = Callable[[str, torch.Tensor], torch.Tensor]


def _where(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """A change of the tensors whose name contains `part`."""
    return lambda name, value: change(value) if part in name else value


def _plain_residual(name: str, value: torch.Tensor) -> torch.Tensor:
    if "residual_scale." not in name:
        return value
    if name.endswith("scale"):
        return torch.ones_like(value)
    return torch.zeros_like(value)


def _current_tap(value: torch.Tensor) -> torch.Tensor:
    value = value.clone()
    if value.dim() == 3:
        value[..., 0] = 0  # tap 0 is the older sample
    return value


BY_WEIGHTS: dict[str, Change] = {
    "convolutions": _where("conv_qk_grouped", torch.zeros_like),
    "earlier tokens in the convolutions": _where("conv_qk", _current_tap),
    "delayed value head": _where("v_proj_delayed", torch.zeros_like),
    "temperature per KV head": _where(
        "qk_norm.temp", lambda value: value[:1].expand_as(value).clone()
    ),
    "residual scaling": _plain_residual,
    "router state across layers": _where("router_states_scale", torch.zeros_like),
    "balancing biases": _where("balancing_biases", torch.zeros_like),
}


def _without_means(original):
    """The projection minus its value with zero convolutions, which is the mean of q and
    k."""

    def forward(self, hidden, cache, mask=None):
        query, key, value = original(self, hidden, cache, mask)
        grouped = self.conv_qk_grouped
        parameters = grouped.weight, grouped.bias
        grouped.weight, grouped.bias = (
            nn.Parameter(torch.zeros_like(p), requires_grad=False) for p in parameters
        )
        mean_query, mean_key, _ = original(self, hidden, None, mask)
        grouped.weight, grouped.bias = parameters
        return query - mean_query, key - mean_key, value

    return forward


def by_code() -> dict[str, tuple]:
    """Ingredient → (class of transformers' module, what replaces its `forward`)."""
    from transformers.models.zaya import modeling_zaya as zaya

    return {
        "q/k mean": (zaya.ZayaCCAProjection, _without_means),
        "L2 norm of q and k": (
            zaya.ZayaQKNorm,
            lambda _: lambda self, q, k: (q, k * self.temp[None, None, :, None]),
        ),
        "GELU in the router (SiLU instead)": (
            nn.GELU,
            lambda _: lambda self, x: nn.functional.silu(x),
        ),
    }


def ablate(checkpoint: Checkpoint, reference: Golden) -> pd.DataFrame:
    """Worst cosine, over layers and positions, of each ablated model's layers on the
    golden's inputs.

    Returns:
        Columns ingredient, tensor (update | hidden), cosine, for `plots.update_cosine_bars`, worst
        first.
    """
    patches = {}
    for name, (owner, replacement) in by_code().items():
        patches[name] = None, patch.object(owner, "forward", replacement(owner.forward))
    patches |= {name: (change, nullcontext()) for name, change in BY_WEIGHTS.items()}
    rows = []
    for ingredient, (change, patched) in patches.items():
        weights = change and (
            lambda name, change=change: change(name, checkpoint.tensor(name))
        )
        about = reference.ids, weights, f"without {ingredient}"
        with patched:
            without = golden.make_golden(checkpoint, *about, fed=reference.x)
        for tensor in ("update", "hidden"):
            pair = getattr(reference, tensor), getattr(without, tensor)
            worst = float(metrics.cosine(*pair).min())
            rows.append((ingredient, tensor, worst))
    frame = pd.DataFrame(rows, columns=["ingredient", "tensor", "cosine"])
    order = frame[frame["tensor"] == "update"].sort_values("cosine")["ingredient"]
    return frame.set_index("ingredient").loc[order].reset_index()
