"""llama.cpp as a peer of `workbench bench decode`, where llama-cpp-python and gguf are
importable.

A GGUF of the same checkpoint is written beside it, once for each type of weights. A
build for AMX crashes on some virtual machines: build llama.cpp without
(GGML_AMX_TILE=OFF, GGML_AMX_INT8=OFF)."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch

TYPES = ("F16", "Q8_0", "Q4_0")
ABSENT = "llama.cpp is not in the run: llama_cpp and gguf are not importable"
# Hugging Face's name of a tensor of Qwen2 → GGUF's, `{}` the layer's number
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.{}.input_layernorm": "blk.{}.attn_norm",
    "model.layers.{}.post_attention_layernorm": "blk.{}.ffn_norm",
    "model.layers.{}.self_attn.o_proj": "blk.{}.attn_output",
    **{f"model.layers.{{}}.self_attn.{x}_proj": f"blk.{{}}.attn_{x}" for x in "qkv"},
    **{
        f"model.layers.{{}}.mlp.{x}_proj": f"blk.{{}}.ffn_{x}"
        for x in ("gate", "up", "down")
    },
}


def available() -> bool:
    return all(map(find_spec, ("llama_cpp", "gguf")))


def contestants(
    checkpoint: Path, S: int
) -> dict[str, Callable[[int], Callable[[], object]]]:
    """llama.cpp by type of weights: depth → a step of one token, on as many threads as
    torch's.

    Args:
        checkpoint: a folder of Qwen2's architecture.
        S: positions of the cache.
    """
    return {
        f"llama.cpp {kind}": _peer(written(checkpoint, kind), S)
        for kind in TYPES
        if available()
    }


def written(checkpoint: Path, kind: str) -> Path:
    """The GGUF of a checkpoint, whose matrices are of type `kind`; written when it is
    missing."""
    path = checkpoint.with_name(f"{checkpoint.name}.{kind}.gguf")
    if not path.exists():
        unfinished = path.with_suffix(".unfinished")
        _write(checkpoint, kind, unfinished)
        unfinished.rename(path)
    return path


def _write(checkpoint: Path, kind: str, path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoConfig

    gguf, config = import_module("gguf"), AutoConfig.from_pretrained(checkpoint)
    writer, stored = gguf.GGUFWriter(path, "qwen2"), gguf.GGMLQuantizationType[kind]
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")  # token ids alone are timed
    for file in sorted(checkpoint.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            values, place = tensor.float().numpy(), _name(name)
            if values.ndim == 1:
                writer.add_tensor(place, values)
            else:
                data = gguf.quants.quantize(values, stored)
                writer.add_tensor(place, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _name(name: str) -> str:
    stem, _, end = name.rpartition(".")
    layer = next((part for part in stem.split(".") if part.isdigit()), "")
    general = stem.replace(f".{layer}.", ".{}.") if layer else stem
    return f"{NAMES[general].format(layer)}.{end}"


def _peer(path: Path, S: int) -> Callable[[int], Callable[[], object]]:
    threads = torch.get_num_threads()
    model = import_module("llama_cpp").Llama(
        str(path), n_ctx=S, n_threads=threads, n_threads_batch=threads, verbose=False
    )

    def at(depth: int):
        model.reset()
        model.eval([7] * depth)

        def step():
            model.n_tokens = depth
            model.eval([7])
            return model._ctx.get_logits()

        return step

    return at
