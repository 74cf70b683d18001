"""Hugging Face's model of a configuration, without weights."""

from unittest.mock import patch

import torch
from torch import nn


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
