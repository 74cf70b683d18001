"""What every model family states about itself, and the two helpers they share."""

from dataclasses import dataclass, field
from typing import NoReturn

import torch

from workbench.bundle import Dims, Layer, Rope
from workbench.errors import InputError


@dataclass(frozen=True)
class Plan:
    """A family's reading of a configuration: all that the export and the host need beyond the layers themselves.

    `embedding_scale` multiplies embeddings; `embedding_bias`, `embedding_factor` name checkpoint vectors [C] applied as
    (e + bias) · factor. `side_states` maps a further state's name to its shape after the batch axis.
    """

    dims: Dims
    rope: list[Rope]
    layers: list[Layer]
    tied: bool
    embedding_scale: float = 1.0
    embedding_bias: str | None = None
    embedding_factor: str | None = None
    side_states: dict[str, tuple[int, ...]] = field(default_factory=dict)
    router_width: int = 0


def refuse(config, found: str, needed: str) -> NoReturn:
    raise InputError(f"{config.model_type} checkpoint", found, needed, "see README: supported families")


def rope_table(config, layer_type: str | None = None) -> tuple[list[float], float]:
    """Inverse frequencies [rope_half] (radians per token) and the factor on cos and sin, by transformers' own functions."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = config.rope_parameters[layer_type] if layer_type else config.rope_parameters
    if parameters["rope_type"] == "default":
        D = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        width = int(D * parameters.get("partial_rotary_factor", 1.0))
        inv_freq = 1.0 / parameters["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float) / width)
        return inv_freq.tolist(), 1.0
    keywords = {"layer_type": layer_type} if layer_type else {}
    inv_freq, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, device=None, **keywords)
    return inv_freq.tolist(), float(scale)
