"""Hugging Face's model of a configuration, run layer by layer: it holds no weights, and
each part is given its own when it runs."""

from collections.abc import Callable
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from torch.func import functional_call


class WrappedLayer(nn.Module):
    """A decoder layer of Hugging Face's model whose forward pass a subclass replaces.
    Its other attributes are those of the layer, since transformers reads some."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)


def run_base(
    base: nn.Module,
    ids: np.ndarray,
    embed: Callable[[str, np.ndarray], torch.Tensor],
    read: Callable[[str], torch.Tensor],
    **arguments,
) -> torch.Tensor:
    """The hidden states [B, n, C] that the head reads, for sequences `ids` [B, n].

    A table of embeddings may be larger than the memory. Only the rows of tokens that occur
    in `ids` are read, and the model runs with their indices in place of the ids.

    Args:
        base: Hugging Face's model without its head, whose layers have their own weights.
        embed: name of an embedding table, and distinct token ids [R] → their rows [R, W]
            of the table.
        read: name of a parameter outside the layers → its values.
        arguments: of the model's forward pass.
    """
    distinct_ids, indices = np.unique(ids, return_inverse=True)
    # parameters outside the layers, by name
    outer = {}
    for name, module in base.named_modules():
        if isinstance(module, nn.Embedding):
            table = f"{name}.weight"
            outer[table] = embed(table, distinct_ids).float()
            # the id of padding may lie beyond the rows that are read
            module.padding_idx = None
    for name, _ in base.named_parameters():
        if not name.startswith("layers.") and name not in outer:
            outer[name] = read(name).float()
    arguments["input_ids"] = torch.from_numpy(indices.reshape(ids.shape))
    return functional_call(base, outer, (), arguments)[0]


def empty_model(config, attention: str = "eager") -> nn.Module:
    """Hugging Face's model of a configuration in fp32 with an implementation of
    attention (`eager` or `sdpa`); its parameters have no storage until they are assigned,
    its buffers (rotary tables, scales) are real."""
    import transformers
    from transformers.initialization import no_init_weights

    if config.model_type == "qwen3_vl_text":
        config = _without_pictures(config)
    register = nn.Module.register_parameter

    def on_meta(module, name, parameter):
        register(module, name, parameter)
        if parameter is not None:
            empty = nn.Parameter(parameter.to("meta"), requires_grad=False)
            module._parameters[name] = empty

    # most of the time would go into random values that nothing stores
    with no_init_weights(), patch.object(nn.Module, "register_parameter", on_meta):
        model = transformers.AutoModelForCausalLM.from_config(
            config,
            dtype=torch.float32,
            attn_implementation=attention,
            trust_remote_code=False,
        )
    return model.eval()


def _without_pictures(config):
    """The configuration of Qwen 3 that Qwen 3-VL's text model is for text alone: its
    rope gives a token of text the same position three times."""
    import transformers

    rope = config.rope_parameters.items()
    rope = {name: value for name, value in rope if not name.startswith("mrope")}
    fields = config.to_dict() | {"model_type": "qwen3", "rope_parameters": rope}
    return transformers.Qwen3Config(**fields)
