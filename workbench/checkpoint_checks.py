"""Checks of a checkpoint by its config.json and the names of its files: the format of
its weights, its family, whether it is quantized, and the sizes of files.

Imports nothing heavy, so that a checkpoint is refused before torch is loaded."""

import json
from pathlib import Path

from workbench.errors import InputError
from workbench.files import MAX_TEXT_BYTES, read_bytes

CONFIG = "config.json"
ADAPTER = "adapter_config.json"
# largest sizes in bytes of the files that transformers reads whole, of a checkpoint and
# its tokenizer
MAX_FILE_BYTES = {
    **dict.fromkeys(
        (
            CONFIG,
            "generation_config.json",
            "model.safetensors.index.json",
            "tokenizer_config.json",
            "special_tokens_map.json",
            "added_tokens.json",
            "chat_template.jinja",
        ),
        MAX_TEXT_BYTES,
    ),
    "tokenizer.json": 1 << 29,
    "vocab.json": 1 << 29,
}
DOWNLOAD_HINT = "download the checkpoint whole: hf download ORG/NAME --local-dir FOLDER"
# transformers' model_type of every family in `workbench.models`, which imports torch; a test
# compares the two
FAMILIES = (
    "gemma3_text",
    "gemma4_text",
    "gemma4_unified_text",
    "granitemoehybrid",
    "hunyuan_v1_dense",
    "lfm2",
    "llama",
    "ministral3",
    "mistral",
    "olmo2",
    "olmo3",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_5_text",
    "smollm3",
    "zaya",
)


def check_weights_format(folder: Path) -> None:
    """Refuses a folder whose weights have a format that is not read: an adapter, GGUF, or
    files of torch.save."""
    # a folder may have several formats of the same weights; safetensors are read
    if any(folder.glob("model*.safetensors*")):
        return
    subject, needed = f"checkpoint {folder}", "a Hugging Face folder of *.safetensors"
    if (folder / ADAPTER).is_file():
        base = _read_object(folder / ADAPTER).get("base_model_name_or_path")
        actual = f"an adapter of {base or 'a model that it does not name'}"
        step = "merge it into that model (peft: merge_and_unload) and save the result"
    elif gguf := sorted(folder.glob("*.gguf")):
        actual = f"GGUF weights, {gguf[0].name}"
        step = (
            "get the model that they were made from (hf download ORG/NAME --local-dir "
            "FOLDER), or read them with transformers' gguf_file and save the model, as "
            "data/real.py does"
        )
    elif pickles := sorted(folder.glob("pytorch_model*.bin")):
        actual = f"no safetensors, only {pickles[0].name}"
        step = (
            "save it as safetensors: AutoModelForCausalLM.from_pretrained(FOLDER)"
            ".save_pretrained(NEW_FOLDER)"
        )
    else:
        return
    raise InputError(subject, actual, needed, step)


def check_family(checkpoint: Path) -> None:
    """Refuses a checkpoint whose config.json names a family that cannot be exported. The
    weights need not be there yet."""
    config = _read_object(checkpoint / CONFIG)
    kind = _text_config(checkpoint).get("model_type")
    # transformers gives a text part without a type the default of the outer configuration
    if kind in FAMILIES or (kind is None and config.get("text_config")):
        return
    if not config:
        actual, needed = "no JSON object with fields", "the file of the checkpoint"
        raise InputError(str(checkpoint / CONFIG), actual, needed, DOWNLOAD_HINT)
    actual = "no model_type in config.json" if kind is None else f"model_type {kind!r}"
    if "auto_map" in config:
        actual += " with auto_map, Python code in the checkpoint, which is never run"
    needed, step = f"one of {', '.join(FAMILIES)}", "see README: supported families"
    raise InputError(f"checkpoint {checkpoint}", actual, needed, step)


def check_exported_family(checkpoint: Path, name: str, bundle) -> None:
    """Refuses a checkpoint whose config.json names another family than a `Bundle` has. One
    of the same family may still be another checkpoint, which its weights show.

    Args:
        name: the checkpoint's, for the message.
    """
    kind = _text_config(checkpoint).get("model_type")
    manifest = bundle.manifest
    if kind not in FAMILIES or kind == manifest.family:
        return
    raise InputError(
        f"checkpoint {name}",
        f"a {kind} checkpoint",
        f"{manifest.checkpoint['name']}, the {manifest.family} checkpoint that bundle "
        f"{bundle.root.name} was exported from",
        "give that checkpoint, or a golden of it, or export this one",
    )


def check_positions(checkpoint: Path, max_seq_len: int) -> None:
    """Refuses a `max_seq_len` beyond the positions for which config.json says that a
    model was trained."""
    config = _text_config(checkpoint)
    trained = config.get("max_position_embeddings")
    if type(trained) is int and max_seq_len > trained > 0:
        raise positions_error(config.get("model_type"), max_seq_len, trained)


def positions_error(
    model_type: str | None, max_seq_len: int, trained: int
) -> InputError:
    """The refusal of a `max_seq_len` above `trained` positions."""
    step = (
        f"export with --max-seq-len {trained} or less; a model that was trained on "
        "longer texts states it there"
    )
    return InputError(
        f"max_seq_len = {max_seq_len}",
        f"a {model_type or 'Hugging Face'} checkpoint with {trained} positions",
        f"at most {trained}, the max_position_embeddings of its config.json",
        step,
    )


def check_quantization(checkpoint: Path) -> None:
    """Refuses a checkpoint whose config.json says that its weights are quantized."""
    config = _read_object(checkpoint / CONFIG)
    part = config.get("text_config")
    settings = config.get("quantization_config")
    if settings is None and isinstance(part, dict):
        settings = part.get("quantization_config")
    if settings:
        method = settings.get("quant_method") if isinstance(settings, dict) else None
        actual = f"weights quantized by {method or 'some method'}"
        raise quantized_error(checkpoint, actual)


def quantized_error(checkpoint: Path, actual: str) -> InputError:
    """The refusal of a checkpoint with quantized weights; `actual` describes them."""
    return InputError(
        f"checkpoint {checkpoint}",
        actual,
        "plain weights in F32, F16 or BF16; the export quantizes them itself",
        "use the model that was quantized (its card names the base model), or "
        "dequantize this one with the library that made it: a cast alone would lose "
        "the scales",
    )


def _text_config(checkpoint: Path) -> dict:
    """The object of config.json that describes the text model: a part of it where the
    model reads pictures too."""
    config = _read_object(checkpoint / CONFIG)
    part = config.get("text_config")
    return part if isinstance(part, dict) else config


def _read_object(path: Path) -> dict:
    """The object in a JSON file, or {} where the file holds no object: the checkpoint's
    reader refuses such a file with a better message."""
    try:
        fields = json.loads(read_bytes(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}
