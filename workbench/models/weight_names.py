"""Names under which a checkpoint stores the tensors of its text model. Only the part before
`layers.0…` differs: wrappers of several models add to it, and old releases spell it
otherwise."""

from collections.abc import Callable, Collection
from pathlib import Path

import torch

from workbench.models.folder import LOCAL

EMBEDDINGS = "embed_tokens.weight"
HEAD = "lm_head.weight"
PREFIXES = "model.", "model.language_model.", "language_model.model."


def find_prefix(folder: Path, names: Collection[str]) -> str | None:
    """The part of the names of the text model's tensors before `layers.0…`; None for names
    under which transformers' loader would find no embeddings."""
    for prefix in PREFIXES:
        if f"{prefix}{EMBEDDINGS}" in names:
            return prefix
    stored = _stored_embeddings(folder, names)
    if stored is not None:
        return stored.removesuffix(EMBEDDINGS)
    # an unfinished folder may lack the embeddings alone: reading them then raises an error
    # that names the tensor
    for prefix in PREFIXES:
        if any(name.startswith(f"{prefix}layers.0.") for name in names):
            return prefix
    return None


def name_like_embeddings(names: Collection[str]) -> str:
    """The name that shows best how a checkpoint spells its tensors."""
    similar = next((n for n in names if n.endswith(EMBEDDINGS)), None)
    layer = next((n for n in names if "layers.0." in n), None)
    return similar or layer or next(iter(names), "no tensor")


def _stored_embeddings(folder: Path, names: Collection[str]) -> str | None:
    """The name of the tensor that transformers' loader reads as the text model's
    embeddings, by the loader's own renamings and base-model prefixes."""
    model = _model_without_values(folder)
    if model is None:
        return None
    decoder = model.get_decoder()
    path = next(name for name, module in model.named_modules() if module is decoder)
    rename = _loader_renaming(model)
    for name in names:
        if name.endswith(EMBEDDINGS) and rename(name) == f"{path}.{EMBEDDINGS}":
            return name
    return None


def _model_without_values(folder: Path) -> torch.nn.Module | None:
    """transformers' model of a checkpoint folder, without values; None for a configuration
    that is neither of a model of text nor of one of images and text."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, **LOCAL)
    loaders = (
        transformers.AutoModelForCausalLM,
        transformers.AutoModelForImageTextToText,
    )
    for loader in loaders:
        if type(config) in loader._model_mapping:
            with torch.device("meta"):
                return loader.from_config(config, trust_remote_code=False)
    return None


def _loader_renaming(model: torch.nn.Module) -> Callable[[str], str]:
    """The function by which transformers' loader finds the parameter of `model` that a
    stored tensor is: name in the file → name in the model."""
    from transformers import conversion_mapping, core_model_loading

    renamings, converters = [], []
    for transform in conversion_mapping.get_model_conversion_mapping(model):
        if isinstance(transform, core_model_loading.WeightRenaming):
            renamings.append(transform)
        else:
            converters.append(transform)
    parameters = model.state_dict()

    def rename(name: str) -> str:
        renamed, _ = core_model_loading.rename_source_key(
            name, renamings, converters, model.base_model_prefix, parameters
        )
        return renamed

    return rename
