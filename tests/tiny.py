"""Tiny random checkpoints, their exports, and what Hugging Face's own model makes of them.

Nothing here computes a layer: goldens come from transformers alone, in float32 with eager
attention.
"""

import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

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

ROOT = Path(__file__).parents[1]
DATA, WEIGHTS = ROOT / "data", "model.safetensors"
SMALL = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2)
HEADS = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=32)
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
LINEAR = ["linear_attention", "full_attention", "linear_attention"]
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 512}
DIMS = {
    "llama": SMALL | HEADS | dict(vocab_size=97, tie_word_embeddings=True),
    "qwen2": dict(
        hidden_size=96,
        intermediate_size=64,
        num_attention_heads=3,
        num_key_value_heads=1,
        num_hidden_layers=2,
        vocab_size=101,
    ),
    "qwen3": SMALL
    | dict(num_attention_heads=3, num_key_value_heads=3, head_dim=96, vocab_size=103),
    "gemma3_text": SMALL
    | HEADS
    | dict(
        num_key_value_heads=1,
        num_hidden_layers=3,
        sliding_window=5,
        query_pre_attn_scalar=24,
        vocab_size=107,
        layer_types=SLIDING,
    ),
    "zaya": HEADS
    | dict(
        hidden_size=64,
        num_hidden_layers=3,
        num_experts=4,
        moe_intermediate_size=64,
        router_hidden_size=32,
        vocab_size=109,
    ),
    "mistral": SMALL | HEADS | dict(sliding_window=7, vocab_size=113),
    "ministral3": dict(
        hidden_size=96,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_hidden_layers=2,
        vocab_size=127,
        rope_parameters=YARN | {"factor": 4.0, "llama_4_scaling_beta": 0.1},
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
    "olmo2": SMALL
    | dict(
        num_attention_heads=2, num_key_value_heads=2, vocab_size=137, eos_token_id=None
    ),
    "olmo3": dict(
        hidden_size=128,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=3,
        sliding_window=5,
        layer_types=SLIDING,
        rope_parameters={
            "full_attention": YARN | {"factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e4},
        },
        vocab_size=139,
        eos_token_id=None,
    ),
    "hunyuan_v1_dense": SMALL
    | HEADS
    | dict(
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
    "lfm2": SMALL
    | dict(
        block_multiple_of=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=3,
        layer_types=["conv", "full_attention", "conv"],
        vocab_size=157,
    ),
    "qwen3_5_text": SMALL
    | dict(
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        num_hidden_layers=3,
        layer_types=LINEAR,
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
        layer_types=LINEAR,
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


def random(path: Path, family: str, **changed) -> Path:
    """A random float16 checkpoint of `family` with its tiny dimensions, some of them changed."""
    return checkpoint.random(path, family, **(DIMS[family] | changed))


@contextmanager
def edited_weights(path: Path) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of a checkpoint, which are written back as the block leaves them."""
    weights = load_file(path / WEIGHTS)
    yield weights
    whole = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(whole, path / WEIGHTS, metadata={"format": "pt"})


@dataclass
class Golden:
    """One prompt through Hugging Face's model: inputs, outputs [L, T, C], logits [T, V];
    with experts also router states [L, T, R]. `caches[l]` has keys and values [H_kv, T, D]
    of a layer, `sides[l]` its side states after the prompt, all under the names of their
    Core ML states."""

    ids: list[int]
    inputs: np.ndarray
    outputs: np.ndarray
    caches: list[dict[str, np.ndarray]]
    logits: np.ndarray
    routers: np.ndarray | None
    sides: list[dict[str, np.ndarray]]


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
            given = {K_STATE: keys, V_STATE: values}
            rows[layer] = {name: x[0].numpy().copy() for name, x in given.items()}
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
        found = model(torch.tensor([ids]), past_key_values=cache, use_cache=True)
    for hook in hooks:
        hook.remove()
    layers = range(len(inputs))
    return Golden(
        ids,
        np.stack(inputs),
        np.stack(outputs),
        [rows.get(layer, {}) for layer in layers],
        found.logits[0].numpy(),
        np.stack(routers) if routers else None,
        [side_states(cache, layer) for layer in layers],
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


def filled(shard, T: int = 1, value: float = 0.0) -> dict[str, np.ndarray]:
    """Inputs of a call of T tokens, all of one value."""
    sizes = {
        name: [T if n == "T" else n for n in shape]
        for name, shape in shard.inputs.items()
    }
    return {name: np.full(size, value, np.float32) for name, size in sizes.items()}


def prompt(V: int, length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, V, length).tolist()


def put(tree: dict, path: str, value) -> None:
    """Sets the value at a path such as `shards/0/name` of nested dicts and lists, or
    replaces it by what a function makes of it."""
    *keys, last = (int(key) if key.isdigit() else key for key in path.split("/"))
    for key in keys:
        tree = tree[key]
    tree[last] = value(tree[last]) if callable(value) else value


def tiles(total: int, sizes: list[int]) -> Iterator[tuple[int, int]]:
    """(start, stop) of consecutive chunks of the given sizes, cycled, covering `total` tokens."""
    start = 0
    for size in cycle(sizes):
        stop = min(start + size, total)
        yield start, stop
        if stop == total:
            return
        start = stop


def chained(decoder: Decoder, ids: list[int], sizes: list[int]) -> np.ndarray:
    """Logits [T, V] of a whole prompt decoded in chunks of `sizes`, batch 1."""
    seqs = decoder.fresh()
    hidden = [
        decoder.advance(seqs, [ids[a:b]])[0][:, :, : b - a]
        for a, b in tiles(len(ids), sizes)
    ]
    return decoder.logits(np.concatenate(hidden, axis=2))[0]


def logits_error(decoder: Decoder, g: Golden, *sizes: int) -> float:
    """The `relative` error of the logits of the golden's prompt in chunks of `sizes`."""
    return relative(chained(decoder, g.ids, sizes), g.logits)


def isolated_cosine(
    decoder: Decoder, layer: int, g: Golden, sizes: list[int], width: int | None = None
) -> float:
    """The `cosine` of the updates of one single-layer shard fed with the golden's inputs in chunks
    of `sizes`.

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
        made.append(out[X].reshape(-1, T)[:, : b - a].T)
    check_states(state, layer, g)
    x = g.inputs[layer]
    return cosine(np.concatenate(made) - x, g.outputs[layer] - x)


def columns(decoder: Decoder, rows: np.ndarray, T: int) -> np.ndarray:
    """[n, C] → the bundle's plane of T columns, garbage beyond n."""
    missing = T - len(rows), rows.shape[1]
    garbage = 30 * np.random.default_rng(T).standard_normal(missing)
    return decoder.plane(np.concatenate([rows, garbage]).astype(np.float32).T[None])


def check_states(state, layer: int, g: Golden) -> None:
    """Asserts that the states of a layer are the golden's; rows without a token are zeros."""
    n, expected = len(g.ids), dict(g.sides[layer])
    for name, rows in g.caches[layer].items():
        expected[name] = np.zeros_like(state.read(f"layers.{layer}.{name}")[0])
        places = expected[name].shape[1]
        kept = np.arange(max(0, n - places), n)
        expected[name][:, kept % places] = rows[:, kept]
    for name, values in expected.items():
        held = state.read(f"layers.{layer}.{name}")[0]
        assert relative(held, values) < 1e-5, name


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """The smallest cosine between rows of a and b."""
    a, b = (torch.from_numpy(rows).double() for rows in (a, b))
    return torch.cosine_similarity(a, b, dim=-1).min().item()


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


def edited(bundle: Bundle, folder: Path, change: Callable[[dict], object]) -> Bundle:
    """A copy of a bundle, opened after `change(manifest)` of its bundle.json."""
    path = shutil.copytree(bundle.root, folder) / "bundle.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    return Bundle.open(folder)


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

    def golden(self, checkpoint: Path, length: int, seed: int = 0) -> Golden:
        """That of a random prompt."""
        model = self.hf(checkpoint)
        return golden(model, prompt(model.config.vocab_size, length, seed))
