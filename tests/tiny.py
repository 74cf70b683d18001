"""Tiny random checkpoints, their exports, and what Hugging Face's own model makes of them.

Nothing here computes a layer: goldens come from transformers alone, in float32 with eager attention.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from workbench import Bundle, Decoder
from workbench.bundle.contract import HIDDEN, K_STATE, V_STATE, X
from workbench.models import checkpoint

DIMS = {
    "llama": dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
                  num_hidden_layers=2, vocab_size=97, tie_word_embeddings=True),
    "qwen2": dict(hidden_size=96, intermediate_size=64, num_attention_heads=3, num_key_value_heads=1,
                  num_hidden_layers=2, vocab_size=101),
    "qwen3": dict(hidden_size=64, intermediate_size=96, num_attention_heads=3, num_key_value_heads=3, head_dim=96,
                  num_hidden_layers=2, vocab_size=103),
    "gemma3_text": dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=1, head_dim=32,
                        num_hidden_layers=3, sliding_window=5, query_pre_attn_scalar=24, vocab_size=107,
                        layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    "zaya": dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_hidden_layers=3,
                 num_experts=4, moe_intermediate_size=64, router_hidden_size=32, vocab_size=109),
}  # fmt: skip


def random(path: Path, family: str, **changed) -> Path:
    """A random float16 checkpoint of `family` with its tiny dimensions, some of them changed."""
    return checkpoint.random(path, family, **(DIMS[family] | changed))


@dataclass
class Golden:
    """One prompt through Hugging Face's model: inputs, outputs [L, T, C], keys, values [L][H_kv, T, D], logits [T, V]."""

    ids: list[int]
    inputs: np.ndarray
    outputs: np.ndarray
    keys: list[np.ndarray]
    values: list[np.ndarray]
    logits: np.ndarray

    @property
    def updates(self) -> np.ndarray:
        return self.outputs - self.inputs


def hf(path: Path):
    """transformers' model of a checkpoint in float32, with the weights that an uncompressed bundle holds.

    Gemma's norms are stored as fp16(1 + γ). `from_pretrained` resets the skip class's bias in ZAYA's routers to -1 (seen
    in 5.23), so buffers are put back.
    """
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()
    source = checkpoint.Checkpoint(path)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in source:
                buffer.copy_(source.tensor(name))
        for module in model.modules():
            if type(module).__name__ == "Gemma3RMSNorm":
                module.weight.copy_((1 + module.weight).half().float() - 1)
    return model


def golden(model, ids: list[int]) -> Golden:
    """Runs `ids` through transformers' model in one call, recording what enters and leaves every decoder layer."""
    inputs, outputs = [], []

    def record(module, arguments, result):
        inputs.append(arguments[0][0].numpy().copy())
        outputs.append((result[0] if isinstance(result, tuple) else result)[0].numpy().copy())

    hooks = [layer.register_forward_hook(record) for layer in model.model.layers]
    with torch.inference_mode():
        result = model(torch.tensor([ids]), use_cache=True)
    for hook in hooks:
        hook.remove()
    cache = result.past_key_values.layers
    return Golden(ids, np.stack(inputs), np.stack(outputs), [c.keys[0].numpy() for c in cache],
                  [c.values[0].numpy() for c in cache], result.logits[0].numpy())  # fmt: skip


def prompt(V: int, length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, V, length).tolist()


def tiles(total: int, sizes: list[int]):
    """(start, stop) of consecutive chunks of the given sizes, cycled, covering `total` tokens."""
    start, i = 0, 0
    while start < total:
        stop = min(start + sizes[i % len(sizes)], total)
        yield start, stop
        start, i = stop, i + 1


def chained(decoder: Decoder, ids: list[int], sizes: list[int]) -> np.ndarray:
    """Logits [T, V] of a whole prompt decoded in chunks of `sizes`, batch 1."""
    decoder.begin()
    hidden = [decoder.advance([ids[a:b]], b - a)[:, :, : b - a] for a, b in tiles(len(ids), sizes)]
    return decoder.logits(np.concatenate(hidden, axis=2))[0]


def isolated(decoder: Decoder, layer: int, g: Golden, sizes: list[int]) -> np.ndarray:
    """Updates [T, C] of one single-layer shard fed with the golden's inputs in chunks of `sizes`."""
    model = decoder.layers[layer]
    state, made = model.make_state(), []
    for a, b in tiles(len(g.ids), sizes):
        io = decoder.host.inputs(np.array([a]), np.array([b - a]), b - a)
        io[X] = decoder.plane(g.inputs[layer, a:b].T[None])
        hidden = model.predict({n: io[n] for n in model.shard.inputs}, state)[HIDDEN]
        made.append(hidden.reshape(g.inputs.shape[2], -1).T - g.inputs[layer, a:b])
    for name, rows in ((K_STATE, g.keys), (V_STATE, g.values)):
        held = state.read(f"layers.{layer}.{name}")[0]
        np.testing.assert_allclose(held[:, : len(g.ids)], rows[layer], rtol=1e-4, atol=1e-4 * np.abs(rows[layer]).max())
        assert not held[:, len(g.ids) :].any()
    return np.concatenate(made)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """The smallest cosine between rows of a and b."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(((a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)).min())


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest deviation over the largest expected magnitude."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


class Exports:
    """Exports on demand, each made once for all tests: one checkpoint per (family, dimensions), one bundle per options."""

    def __init__(self, root: Path):
        self.root, self.checkpoints, self.bundles, self.models = root, {}, {}, {}

    def checkpoint(self, family: str, **changed) -> Path:
        key = repr((family, sorted(changed.items())))
        if key not in self.checkpoints:
            self.checkpoints[key] = random(self.root / f"checkpoint{len(self.checkpoints)}", family, **changed)
        return self.checkpoints[key]

    def bundle(self, checkpoint: Path, **options) -> Bundle:
        from workbench.export import export

        options = {"max_seq_len": 32} | options
        key = repr((checkpoint, sorted(options.items())))
        if key not in self.bundles:
            target = self.root / f"bundle{len(self.bundles)}"
            self.bundles[key] = export(checkpoint, target, progress=False, **options)
        return self.bundles[key]

    def decoder(self, checkpoint: Path, precision: str = "exact", **options) -> Decoder:
        return Decoder(self.bundle(checkpoint, **options), runtime="portable", precision=precision)

    def hf(self, checkpoint: Path):
        if checkpoint not in self.models:
            self.models[checkpoint] = hf(checkpoint)
        return self.models[checkpoint]
