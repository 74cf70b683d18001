"""Model families as modules in the shape that suits the Neural Engine. Nothing here
depends on Core ML.

A family is a module, or an entry of the table in `llama`, with `plan(config)`,
`layer(plan, index, options)` and `head(plan, rows)`; a family with experts also has
`expert(plan, options)`, and one whose layers share weights within a shard
`shared(plan, first, last)`, a module that gives every layer of the shard its input
`LAYER_INPUT`. A family whose plan depends on the weights has `settle(plan,
source)`, which completes it. Parameters are named as in the checkpoint, so that loading
them needs no table."""

from workbench.models import (
    gemma3,
    gemma4,
    granitemoehybrid,
    lfm2,
    llama,
    qwen3_5,
    zaya,
)
from workbench.models.family import refuse

# model_type of the (text) configuration → family
FAMILIES = llama.LLAMAS | {
    "gemma3_text": gemma3,
    "gemma4_text": gemma4,
    "gemma4_unified_text": gemma4,
    "granitemoehybrid": granitemoehybrid,
    "lfm2": lfm2,
    "qwen3_5_text": qwen3_5,
    "zaya": zaya,
}


def family_of(config):
    """The family of a configuration. Raises an InputError that names an unsupported
    one."""
    if config.model_type not in FAMILIES:
        needed = f"one of {', '.join(sorted(FAMILIES))}"
        refuse(config, f"model_type {config.model_type!r}", needed)
    return FAMILIES[config.model_type]
