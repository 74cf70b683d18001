"""Tiny random checkpoints, their exports, and what Hugging Face's own model makes of them.

Nothing here computes a layer: goldens come from transformers alone, in float32 with eager
attention.
"""

import fcntl
import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from workbench import Bundle, Decoder
from workbench.bundle.names import (
    CONV_STATE,
    K_STATE,
    MATRIX_STATE,
    ROUTER_STATE,
    V_DELAYED_STATE,
    V_STATE,
    X,
)
from workbench.models import checkpoint

DIMS = {
    "llama": dict(
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_hidden_layers=2,
        vocab_size=97,
        tie_word_embeddings=True,
    ),
    "qwen2": dict(
        hidden_size=96,
        intermediate_size=64,
        num_attention_heads=3,
        num_key_value_heads=1,
        num_hidden_layers=2,
        vocab_size=101,
    ),
    "qwen3": dict(
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=96,
        num_hidden_layers=2,
        vocab_size=103,
    ),
    "gemma3_text": dict(
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        num_hidden_layers=3,
        sliding_window=5,
        query_pre_attn_scalar=24,
        vocab_size=107,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "zaya": dict(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_hidden_layers=3,
        num_experts=4,
        moe_intermediate_size=64,
        router_hidden_size=32,
        vocab_size=109,
    ),
    "mistral": dict(
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_hidden_layers=2,
        sliding_window=7,
        vocab_size=113,
    ),
    "ministral3": dict(
        hidden_size=96,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_hidden_layers=2,
        vocab_size=127,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "llama_4_scaling_beta": 0.1,
        },
    ),
    "smollm3": dict(
        hidden_size=96,
        intermediate_size=64,
        num_attention_heads=3,
        num_key_value_heads=1,
        num_hidden_layers=3,
        no_rope_layers=[1, 0, 1],
        vocab_size=131,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    ),
    "olmo2": dict(
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_hidden_layers=2,
        vocab_size=137,
        eos_token_id=None,
    ),
    "olmo3": dict(
        hidden_size=128,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=3,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 8.0,
                "original_max_position_embeddings": 512,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e4},
        },
        vocab_size=139,
        eos_token_id=None,
    ),
    "hunyuan_v1_dense": dict(
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_hidden_layers=2,
        rope_parameters={
            "rope_type": "dynamic",
            "rope_theta": 1e4,
            "factor": 1.0,
            "alpha": 50.0,
        },
        vocab_size=149,
    ),
    "phi3": dict(
        hidden_size=96,
        intermediate_size=64,
        num_attention_heads=3,
        num_key_value_heads=3,
        num_hidden_layers=2,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.75,
            "short_factor": [1 + i / 8 for i in range(12)],
            "long_factor": [2.0 + i for i in range(12)],
        },
        original_max_position_embeddings=512,
        max_position_embeddings=2048,
        vocab_size=151,
        pad_token_id=None,
        eos_token_id=None,
    ),
    "lfm2": dict(
        hidden_size=64,
        intermediate_size=96,
        block_multiple_of=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=3,
        layer_types=["conv", "full_attention", "conv"],
        vocab_size=157,
    ),
    "qwen3_5_text": dict(
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=32,
        vocab_size=163,
    ),
    "granitemoehybrid": dict(
        hidden_size=64,
        shared_intermediate_size=96,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_local_experts=0,
        mamba_n_heads=4,
        mamba_d_state=32,
        embedding_multiplier=3.0,
        attention_multiplier=0.2,
        residual_multiplier=0.7,
        logits_scaling=3.0,
        vocab_size=167,
    ),
}


WIDTH_1 = dict(
    hidden_size=1,
    intermediate_size=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=2,
)
"""Dimensions of a llama whose weights are too small for a weight file."""


def random(path: Path, family: str, **changed) -> Path:
    """A random float16 checkpoint of `family` with its tiny dimensions, some of them changed."""
    return checkpoint.random(path, family, **(DIMS[family] | changed))


def build(spec, source, plan, options):
    """The module of a shard with its own weights, each rounded to fp16, and the list of
    their sources."""
    from workbench.export.weights import blank, load_values, weight_sources

    module = blank(spec, plan, options)
    weights = weight_sources(spec, source, plan, options)
    for weight in weights:
        values = load_values(weight, source)
        module.get_parameter(weight.path).data = values.float().reshape(weight.shape)
    return module.requires_grad_(False).eval(), weights


@dataclass
class Golden:
    """One prompt through Hugging Face's model: inputs, outputs [L, T, C], keys, values [L][H_kv, T,
    D], logits [T, V]; with experts also router states [L, T, R]; `sides[l]` the side states after
    the prompt, as their Core ML states are."""

    ids: list[int]
    inputs: np.ndarray
    outputs: np.ndarray
    keys: list[np.ndarray]
    values: list[np.ndarray]
    logits: np.ndarray
    routers: np.ndarray | None
    sides: list[dict[str, np.ndarray]]

    @property
    def updates(self) -> np.ndarray:
        return self.outputs - self.inputs


def hf(path: Path):
    """transformers' model of a checkpoint in float32, with the weights that an uncompressed bundle
    holds.

    Gemma's norms are stored as fp16(1 + γ). `from_pretrained` resets the skip class's bias in
    ZAYA's routers to -1 (seen in 5.23), so buffers are put back.
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
            if type(module).__name__ in ("Gemma3RMSNorm", "Qwen3_5RMSNorm"):
                module.weight.copy_((1 + module.weight).half().float() - 1)
    return model


def recording_cache(config):
    """transformers' cache, keeping every K and V row it is given: sliding layers forget theirs."""
    from transformers import DynamicCache

    class Recording(DynamicCache):
        def update(self, keys, values, layer, *args, **kwargs):
            rows[layer] = (keys[0].numpy().copy(), values[0].numpy().copy())
            return super().update(keys, values, layer, *args, **kwargs)

    rows = {}
    return Recording(config=config), rows


def golden(model, ids: list[int]) -> Golden:
    """Runs `ids` through transformers' model in one call, recording what enters and leaves every
    decoder layer."""
    inputs, outputs, routers = [], [], []

    def record(module, arguments, result):
        hidden, *state = result if isinstance(result, tuple) else (result,)
        inputs.append(arguments[0][0].numpy().copy())
        outputs.append(hidden[0].numpy().copy())
        routers.extend(s[0].numpy().copy() for s in state)

    hooks = [layer.register_forward_hook(record) for layer in model.model.layers]
    cache, rows = recording_cache(model.config)
    with torch.inference_mode():
        logits = (
            model(torch.tensor([ids]), past_key_values=cache, use_cache=True)
            .logits[0]
            .numpy()
        )
    for hook in hooks:
        hook.remove()
    sides = [side_states(cache, i) for i in range(len(inputs))]
    return Golden(
        ids,
        np.stack(inputs),
        np.stack(outputs),
        [rows[i][0] if i in rows else None for i in range(len(inputs))],
        [rows[i][1] if i in rows else None for i in range(len(inputs))],
        logits,
        np.stack(routers) if routers else None,
        sides,
    )


def side_states(cache, layer: int) -> dict[str, np.ndarray]:
    """Of one layer of transformers' cache: of the inputs of its convolution those that the next
    token needs."""
    kept = cache.layers[layer]
    if not getattr(kept, "conv_states", None):
        return {}
    conv = cache.get_conv_state(layer, state_idx=0)[0].T.numpy()
    if not kept.is_recurrent_states_initialized[0]:
        return {CONV_STATE: conv[1:]}
    recurrent = cache.get_recurrent_state(layer, state_idx=0).numpy()
    if recurrent.ndim == 2:
        return {CONV_STATE: conv, V_DELAYED_STATE: recurrent}
    return {CONV_STATE: conv[1:], MATRIX_STATE: recurrent[0]}


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
    seqs = decoder.fresh()
    hidden = [
        decoder.advance(seqs, [ids[a:b]])[0][:, :, : b - a]
        for a, b in tiles(len(ids), sizes)
    ]
    return decoder.logits(np.concatenate(hidden, axis=2))[0]


def isolated(
    decoder: Decoder, layer: int, g: Golden, sizes: list[int], width: int | None = None
) -> np.ndarray:
    """Updates [T, C] of one single-layer shard fed with the golden's inputs in chunks of `sizes`.

    `width` pads every call with columns of garbage. Asserts that the states hold the golden's rows
    and nothing else.
    """
    model = decoder.layers[layer]
    state = model.make_state()
    made = []
    for a, b in tiles(len(g.ids), sizes):
        count, T = np.array([b - a]), width or b - a
        io = decoder.host.inputs(np.array([a]), count, T)
        io[X] = columns(decoder, g.inputs[layer, a:b], T)
        if g.routers is not None and layer:
            io[ROUTER_STATE] = columns(decoder, g.routers[layer - 1, a:b], T)
        (out,) = decoder.run_calls(model, [io], [count], [state], [None])
        hidden = out[X].reshape(-1, T)[:, : b - a].T
        made.append(hidden - g.inputs[layer, a:b])
    for name, error in state_errors(state, layer, g).items():
        assert error < 1e-5, name
    return np.concatenate(made)


def columns(decoder: Decoder, rows: np.ndarray, T: int) -> np.ndarray:
    """[n, C] → the bundle's plane of T columns, garbage beyond n."""
    garbage = 30 * np.random.default_rng(T).standard_normal(
        (T - len(rows), rows.shape[1])
    )
    return decoder.plane(np.concatenate([rows, garbage]).astype(np.float32).T[None])


def state_errors(state, layer: int, g: Golden) -> dict[str, float]:
    """By name of a state of `layer`, its deviation from the golden's as `relative` has it; rows
    without a token must be zeros."""
    n, errors = len(g.ids), {}
    for name, rows in ((K_STATE, g.keys[layer]), (V_STATE, g.values[layer])):
        if rows is None:
            continue
        held = state.read(f"layers.{layer}.{name}")[0]
        expected = np.zeros_like(held)
        kept = np.arange(max(0, n - held.shape[1]), n)
        expected[:, kept % held.shape[1]] = rows[:, kept]
        errors[name] = relative(held, expected)
    for name, expected in g.sides[layer].items():
        errors[name] = relative(state.read(f"layers.{layer}.{name}")[0], expected)
    return errors


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """The smallest cosine between rows of a and b."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(
        (
            (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
        ).min()
    )


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest deviation over the largest expected magnitude."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def once(folder: Path, make: Callable[[Path], object]) -> Path:
    """The folder that `make` fills, once for all processes."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            part = folder.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            make(part)
            part.rename(folder)
    return folder


def named(kind: str, *fields) -> str:
    """A file name that is the same for equal fields, in every process."""
    return f"{kind}-{hashlib.sha256(repr(fields).encode()).hexdigest()[:16]}"


def as_device(decoder: Decoder) -> Decoder:
    """The decoder, from now on seen as a device's is: no inner layer shows."""
    decoder.runtime, decoder.is_device = "coreml", True
    decoder.shows_inner_layers = False
    return decoder


class Exports:
    """Checkpoints and bundles on demand, each made once for all tests and all processes whose
    `root` is the same: one checkpoint per (family, dimensions), one bundle per options."""

    def __init__(self, root: Path):
        self.root, self.bundles, self.models = root, {}, {}

    def checkpoint(self, family: str, **changed) -> Path:
        folder = self.root / named("checkpoint", family, sorted(changed.items()))
        return once(folder, lambda path: random(path, family, **changed))

    def bundle(self, checkpoint: Path, **options) -> Bundle:
        from workbench.export import export

        options = {"max_seq_len": 32} | options
        folder = self.root / named("bundle", str(checkpoint), sorted(options.items()))
        if folder not in self.bundles:
            made = once(folder, lambda path: export(checkpoint, path, **options))
            self.bundles[folder] = Bundle.open(made)
        return self.bundles[folder]

    def decoder(self, checkpoint: Path, precision: str = "exact", **options) -> Decoder:
        return Decoder(
            self.bundle(checkpoint, **options), runtime="portable", precision=precision
        )

    def hf(self, checkpoint: Path):
        if checkpoint not in self.models:
            self.models[checkpoint] = hf(checkpoint)
        return self.models[checkpoint]
