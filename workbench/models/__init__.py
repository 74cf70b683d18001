"""Model families as modules in the shape that suits the Neural Engine. Nothing here
depends on Core ML.

From a checkpoint's folder to a shard's module:

1. `checkpoint.py` reads the configuration and, one at a time, the tensors of a Hugging
   Face folder. It uses `folder.py` (JSON and safetensors files), `weight_names.py` (how
   the folder spells the names of tensors) and `tokens.py` (tokenizer, ends of texts).
2. `family_of` finds the family of the configuration. A family is described in `family.py`
   (`Family`). Its `plan` turns the configuration into a `Plan`; its `layer` and `head`
   build modules from the plan and the options of the export.
3. `llama.py` has Llama and the families that are Llama with other settings. `gemma3.py`,
   `gemma4.py`, `granitemoehybrid.py`, `lfm2.py`, `qwen3_5.py` and `zaya.py` are families
   with layers of their own.
4. All of them use the parts in `layers.py` (attention, norms, MLP, head; its docstring
   says how a layer is called) and `recurrence.py` (states other than K and V).

The exporter loads the weights and converts the modules. Two files serve others:
`layerwise.py` runs Hugging Face's own model layer by layer, and `random_checkpoint.py`
writes folders of random weights."""

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
