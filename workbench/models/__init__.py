"""Model families as modules in the shape that suits the Neural Engine, one file per
Hugging Face `model_type`. Nothing here depends on Core ML.

A family is a module with `plan(config)`, `layer(plan, index, options)` and `head(plan,
rows)`; with experts, also `expert(plan, options)`. `settle(plan, source)`, where there
is one, completes a plan from the weights. Parameters are named as in the checkpoint, so
that loading them needs no table. To add a family: copy `llama.py`, name it below."""

from importlib import import_module

from workbench.errors import InputError

FAMILIES = {
    "gemma3_text": "gemma3",
    "granitemoehybrid": "granitemoehybrid",
    "hunyuan_v1_dense": "hunyuan_v1_dense",
    "lfm2": "lfm2",
    "llama": "llama",
    "ministral3": "ministral3",
    "mistral": "mistral",
    "olmo2": "olmo2",
    "olmo3": "olmo3",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_5_text": "qwen3_5",
    "smollm3": "smollm3",
    "zaya": "zaya",
}
# model_type of the (text) configuration → module


def family_of(config):
    """The module of a configuration's family. Raises an InputError that names an
    unsupported one."""
    if config.model_type not in FAMILIES:
        raise InputError(
            "checkpoint",
            f"model_type {config.model_type!r}",
            f"one of {', '.join(FAMILIES)}",
            "see docs: how to add a family",
        )
    return import_module(f".{FAMILIES[config.model_type]}", __name__)
