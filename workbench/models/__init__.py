"""Model families as modules in the shape that suits the Neural Engine. Nothing here
depends on Core ML.

A family is a module, or an entry of the table in `llamas`, with `plan(config)`,
`layer(plan, index, options)` and `head(plan, rows)`; with experts, also `expert(plan,
options)`. `settle(plan, source)`, where there is one, completes a plan from the
weights. Parameters are named as in the checkpoint, so that loading them needs no
table."""

from importlib import import_module

from workbench.errors import InputError

# model_type of the (text) configuration → module
OWN = {
    "gemma3_text": "gemma3",
    "granitemoehybrid": "granitemoehybrid",
    "lfm2": "lfm2",
    "llama": "llama",
    "qwen3_5_text": "qwen3_5",
    "zaya": "zaya",
}


def family_of(config):
    """The family of a configuration. Raises an InputError that names an unsupported
    one."""
    from workbench.models.llamas import LLAMAS

    if config.model_type in LLAMAS:
        return LLAMAS[config.model_type]
    if config.model_type not in OWN:
        raise InputError(
            "checkpoint",
            f"model_type {config.model_type!r}",
            f"one of {', '.join(sorted([*OWN, *LLAMAS]))}",
            "see docs: how to add a family",
        )
    return import_module(f".{OWN[config.model_type]}", __name__)
