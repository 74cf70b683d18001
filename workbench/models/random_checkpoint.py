"""Checkpoints of random weights, for tests and measurements: Hugging Face folders of any
family and any dimensions."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch


def write_random_checkpoint(
    path: str | Path,
    model_type: str,
    *,
    seed: int = 0,
    dtype: str = "float16",
    shard_bytes: int = 1 << 30,
    noise: Callable[[torch.Size], torch.Tensor] | None = None,
    **config,
) -> Path:
    """Writes a Hugging Face folder of random weights and any dimensions, holding at most
    one of its files in memory.

    Args:
        path: the new folder.
        model_type: transformers' name of the family; `config` are its configuration's
            keywords.
        dtype: `float32`, `float16` or `bfloat16`.
        shard_bytes: size of a safetensors file.
        noise: shape → values of variance 1 around 0 (default: normal values from
            `seed`).

    Linear weights have variance 1/fan_in, norms and scales lie around 1, biases around
    0: signals keep their size, and no parameter is 0 or 1, which would hide that a layer
    does not use it."""
    import transformers
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    path = Path(path)
    path.mkdir(parents=True)
    settings = transformers.AutoConfig.for_model(model_type, **config)
    settings.dtype = getattr(torch, dtype)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(settings)
    model.config.save_pretrained(path)
    tensors = model.state_dict()
    if settings.tie_word_embeddings:
        for name in model._tied_weights_keys or ():
            tensors.pop(name, None)
    noise = noise or partial(torch.randn, generator=torch.Generator().manual_seed(seed))
    pattern = "model{suffix}.safetensors"
    parts = split_torch_state_dict_into_shards(
        tensors, filename_pattern=pattern, max_shard_size=shard_bytes
    )
    if parts.is_sharded:
        text = json.dumps({"metadata": {}, "weight_map": parts.tensor_to_filename})
        (path / "model.safetensors.index.json").write_text(text)
    for file, names in parts.filename_to_tensors.items():
        values = {}
        for name in names:
            drawn = _random_tensor(name, noise(tensors[name].shape), settings)
            values[name] = drawn.to(settings.dtype)
        save_file(values, path / file, metadata={"format": "pt"})
    return path


def around_one(noise: torch.Tensor, config) -> torch.Tensor:
    """Norms and scales."""
    return 1 + 0.1 * noise


def norm_of_unscaled_scores(noise: torch.Tensor, config) -> torch.Tensor:
    """The weights of both norms together hold the factor D^-½."""
    return (1 + 0.1 * noise) * noise.shape[-1] ** -0.25


def router_bias(noise: torch.Tensor, config) -> torch.Tensor:
    """transformers sets the last bias, the skip class's, to -1 whenever it loads a
    model."""
    return torch.cat([0.1 * noise[:-1], -torch.ones(1)])


def layer_scalar(noise: torch.Tensor, config) -> torch.Tensor:
    """Published values run from 0.005 to 0.92, another in each layer."""
    return 0.02 + 0.88 * torch.special.ndtr(noise)


def around_zero(noise: torch.Tensor, config) -> torch.Tensor:
    """Biases."""
    return 0.1 * noise


def second_embedding(noise: torch.Tensor, config) -> torch.Tensor:
    """As large as the projection that is added to it: the model multiplies by √P."""
    return noise / config.hidden_size_per_layer_input**0.5


def embedding(noise: torch.Tensor, config) -> torch.Tensor:
    return noise


def stacked_experts(noise: torch.Tensor, config) -> torch.Tensor:
    """Matrices of one parameter: the last axis is that of the inputs."""
    return noise / max(1, noise.shape[-1]) ** 0.5


def linear(noise: torch.Tensor, config) -> torch.Tensor:
    """Matrices and convolutions: all axes but the first are inputs."""
    return noise / max(1, noise.shape[1:].numel()) ** 0.5


# Pattern in the name of a tensor → its distribution, given noise of variance 1 around 0 and
# the configuration. The first pattern that is found counts.
DISTRIBUTIONS = {
    r"norm|scale$|(^|\.)temp$": around_one,
    r"(^|\.)balancing_biases$": router_bias,
    r"(^|\.)layer_scalar$": layer_scalar,
    r"bias$": around_zero,
    r"embed_tokens_per_layer": second_embedding,
    r"embed_tokens": embedding,
    r"experts": stacked_experts,
    r"": linear,
}
# in families in which no constant multiplies q kᵀ
UNSCALED_SCORES = "gemma4_text", "gemma4_unified_text"
UNSCALED_DISTRIBUTIONS = {
    r"\.self_attn\..*norm": norm_of_unscaled_scores
} | DISTRIBUTIONS


def _random_tensor(name: str, noise: torch.Tensor, config) -> torch.Tensor:
    is_unscaled = config.model_type in UNSCALED_SCORES
    patterns = UNSCALED_DISTRIBUTIONS if is_unscaled else DISTRIBUTIONS
    draw = next(draw for pattern, draw in patterns.items() if re.search(pattern, name))
    return draw(noise, config)
