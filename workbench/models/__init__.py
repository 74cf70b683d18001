"""Model families as ANE-shaped modules, one file per Hugging Face `model_type`. Knows nothing of Core ML.

To add a family: copy `llama.py`, give it `plan`, `layer` and `head`, name it below.
"""

from importlib import import_module

from workbench.errors import InputError

FAMILIES = {"llama": "llama", "qwen2": "qwen2"}  # model_type of the (text) configuration → module


def family_of(config):
    """The module of a configuration's family; refuses the others by name."""
    if config.model_type not in FAMILIES:
        raise InputError("checkpoint", f"model_type {config.model_type!r}", f"one of {', '.join(FAMILIES)}",
                         "see docs: how to add a family")  # fmt: skip
    return import_module(f".{FAMILIES[config.model_type]}", __name__)
