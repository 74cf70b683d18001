"""Tiny random checkpoints, their exports, and the logits of Hugging Face's model for them. Most
tests get them from the fixture `exports`, an `Exports`, which makes each once.

Nothing here computes a layer: goldens come from transformers alone, in float32 with eager
attention.
"""

import copy
import fcntl
import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from workbench import Bundle, Decoder
from workbench.bundle import find_preset
from workbench.models.checkpoint import Checkpoint
from workbench.models.random_checkpoint import write_random_checkpoint

ROOT = Path(__file__).parents[1]
DATA, WEIGHTS = ROOT / "data", "model.safetensors"
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
LINEAR = ["linear_attention", "full_attention", "linear_attention"]
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 512}

# Limits of `logits_error`: the largest deviation of a logit from Hugging Face's, relative to the
# largest logit.
#
# `exact` arithmetic differs from transformers' float32 only in the order of sums; a matrix state is
# divided by its norm when it is read, which enlarges the difference where the norm is small.
EXACT_LIMIT = 3e-6
MATRIX_EXACT_LIMIT = 1e-5
# `declared` arithmetic rounds every result to fp16, by up to 4.9e-4 of it; a matrix state that
# decays slowly adds up the rounding of earlier tokens.
DECLARED_LIMIT = 1.5e-2
MATRIX_DECLARED_LIMIT = 3e-2

# for families whose default ids lie beyond these vocabularies
NO_TOKENS = dict(pad_token_id=None, bos_token_id=None, eos_token_id=None)


def dims(
    *,
    vocab: int,
    hidden: int = 64,
    mlp: int | None = 96,
    layers: int = 2,
    heads: int = 4,
    key_heads: int = 2,
    head_dim: int | None = 32,
    **others,
) -> dict:
    """The fields of a configuration, by transformers' names. Without an `mlp` or a
    `head_dim` it has no such field, so that transformers' default counts."""
    fields = dict(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=head_dim,
    )
    return {name: size for name, size in fields.items() if size is not None} | others


DIMS = {
    "llama": dims(vocab=97, tie_word_embeddings=True),
    # as in smollm3 and phi3: three heads, and a stream that is wider than the MLP
    "qwen2": dims(vocab=101, hidden=96, mlp=64, heads=3, key_heads=1, head_dim=None),
    "qwen3": dims(vocab=103, heads=3, key_heads=3, head_dim=96),
    "gemma3_text": dims(
        vocab=107,
        layers=3,
        key_heads=1,
        sliding_window=5,
        query_pre_attn_scalar=24,
        layer_types=SLIDING,
    ),
    # E2B-like: the last two layers share K and V, have MLPs of twice the width, and two
    # head sizes
    "gemma4_text": dims(
        vocab=101,
        layers=6,
        key_heads=1,
        head_dim=16,
        global_head_dim=32,
        sliding_window=5,
        final_logit_softcapping=30.0,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=32,
        vocab_size_per_layer_input=101,
        layer_types=["sliding_attention"] * 3 + ["full_attention", *SLIDING[:2]],
    ),
    # 31B-like: V is K in full layers, which have fewer key heads
    "gemma4_unified_text": dims(
        vocab=109,
        layers=3,
        key_heads=4,
        head_dim=16,
        global_head_dim=32,
        sliding_window=5,
        final_logit_softcapping=30.0,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        layer_types=["sliding_attention"] * 2 + ["full_attention"],
    ),
    "zaya": dims(
        vocab=109,
        mlp=None,
        layers=3,
        num_experts=4,
        moe_intermediate_size=64,
        router_hidden_size=32,
    ),
    "mistral": dims(vocab=113, sliding_window=7),
    "ministral3": dims(
        vocab=127,
        hidden=96,
        mlp=64,
        heads=2,
        key_heads=1,
        rope_parameters=YARN | {"factor": 4.0, "llama_4_scaling_beta": 0.1},
    ),
    "smollm3": dims(
        vocab=131,
        hidden=96,
        mlp=64,
        layers=3,
        heads=3,
        key_heads=1,
        head_dim=None,
        no_rope_layers=[1, 0, 1],
        **NO_TOKENS,
    ),
    "olmo2": dims(vocab=137, heads=2, head_dim=None, **NO_TOKENS),
    "olmo3": dims(
        vocab=139,
        hidden=128,
        mlp=64,
        layers=3,
        sliding_window=5,
        layer_types=SLIDING,
        rope_parameters={
            "full_attention": YARN | {"factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e4},
        },
        **NO_TOKENS,
    ),
    "hunyuan_v1_dense": dims(
        vocab=149,
        rope_parameters={
            "rope_type": "dynamic",
            "rope_theta": 1e4,
            "factor": 1.0,
            "alpha": 50.0,
        },
    ),
    "phi3": dims(
        vocab=151,
        hidden=96,
        mlp=64,
        heads=3,
        key_heads=3,
        head_dim=None,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.75,
            "short_factor": [1 + i / 8 for i in range(12)],
            "long_factor": [2.0 + i for i in range(12)],
        },
        original_max_position_embeddings=512,
        max_position_embeddings=2048,
        **NO_TOKENS,
    ),
    "lfm2": dims(
        vocab=157,
        layers=3,
        heads=2,
        key_heads=1,
        head_dim=None,
        block_multiple_of=32,
        layer_types=["conv", "full_attention", "conv"],
    ),
    "qwen3_5_text": dims(
        vocab=163,
        layers=3,
        heads=2,
        key_heads=1,
        head_dim=64,
        layer_types=LINEAR,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=32,
    ),
    "granitemoehybrid": dims(
        vocab=167,
        layers=3,
        heads=2,
        key_heads=1,
        head_dim=None,
        shared_intermediate_size=96,
        layer_types=LINEAR,
        num_local_experts=0,
        mamba_n_heads=4,
        mamba_d_state=32,
        embedding_multiplier=3.0,
        attention_multiplier=0.2,
        residual_multiplier=0.7,
        logits_scaling=3.0,
    ),
}


# The inputs of every matrix of the tiny checkpoints are a multiple of this number.
WIDTH_UNIT = 32
# The fields of a configuration that decide how many inputs a matrix has. Heads become more
# and not wider, because the factors of some rotary tables are for one width.
WIDTHS = (
    "hidden_size",
    "hidden_size_per_layer_input",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_global_key_value_heads",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "mamba_n_heads",
)


def fit_to_blocks(family: str, changes: dict, compress: str) -> dict:
    """Changes of a family's tiny dimensions with which the blocks of a preset divide the inputs of
    every matrix. They are `changes`, with every width several times as large if the blocks need
    it."""
    block = find_preset(compress).block
    factor = block // math.gcd(block, WIDTH_UNIT) if block else 1
    if factor == 1:
        return changes
    sizes = DIMS[family] | changes
    wider = {name: factor * sizes[name] for name in WIDTHS if name in sizes}
    return changes | wider


def random_checkpoint(path: Path, family: str, **changes) -> Path:
    """A random float16 checkpoint of `family` with its tiny dimensions and these changes."""
    return write_random_checkpoint(path, family, **(DIMS[family] | changes))


@contextmanager
def edited_weights(path: Path) -> Iterator[dict[str, torch.Tensor]]:
    """Yields the tensors of a checkpoint by name, and saves them as the block leaves them."""
    weights = load_file(path / WEIGHTS)
    yield weights
    contiguous = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(contiguous, path / WEIGHTS, metadata={"format": "pt"})


class Golden(NamedTuple):
    """A prompt, and the logits [T, V] of Hugging Face's model for it."""

    ids: list[int]
    logits: np.ndarray


def hf(path: Path):
    """transformers' model of a checkpoint in float32, with the weights of an uncompressed bundle.

    Gemma's norms are stored as fp16(1 + γ). `from_pretrained` resets the skip class's bias in
    ZAYA's routers to -1 (seen in 5.23), so that buffers are read from the checkpoint again.
    """
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()
    source = Checkpoint(path)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            # buffers of the towers of a multimodal model are scalars, and stay as loaded
            if buffer.ndim and name in source:
                buffer.copy_(source.tensor(name))
        for module in model.modules():
            if type(module).__name__ in ("Gemma3RMSNorm", "Qwen3_5RMSNorm"):
                module.weight.copy_((1 + module.weight).half().float() - 1)
    return model


def golden(model, ids: list[int]) -> Golden:
    """Runs `ids` through transformers' model in one call."""
    with torch.inference_mode():
        return Golden(ids, model(torch.tensor([ids])).logits[0].numpy())


def exact_limit(model, golden: Golden, limit: float) -> float:
    """The largest `relative` error of logits that `exact` arithmetic may have against a golden:
    `limit`, and more for Gemma 4.

    There a layer multiplies its output by a small scalar, so that the next update is large beside
    the stream and every layer amplifies rounding. Another sound implementation is about as far from
    transformers in float64 (its norms stay float32) as transformers in float32 is, hence twice that
    distance."""
    if not model.config.model_type.startswith("gemma4"):
        return limit
    with torch.inference_mode():
        logits = copy.deepcopy(model).double()(torch.tensor([golden.ids])).logits[0]
    amplified = 2 * relative(golden.logits, logits.numpy())
    assert amplified < 1e-4, (
        "this checkpoint amplifies rounding too much to be tested on"
    )
    return max(limit, amplified)


def make_inputs(shard, T: int = 1, value: float = 0.0) -> dict[str, np.ndarray]:
    """Inputs for a call of T tokens with `value` in every element."""
    inputs = {}
    for name, shape in shard.inputs.items():
        sizes = [T if size == "T" else size for size in shape]
        inputs[name] = np.full(sizes, value, np.float32)
    return inputs


def prompt(V: int, length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, V, length).tolist()


def without(name: str) -> Callable[[dict], dict]:
    """A change for `edit_json` that removes this key from a dictionary."""
    return lambda tree: {key: tree[key] for key in tree if key != name}


def edit_json(file: Path, *changes: tuple[str, object]) -> None:
    """Changes values in a JSON file. A change is a path such as `shards/0/name`, and the new value
    or a function of the old value."""
    tree = json.loads(file.read_text())
    for path, value in changes:
        *keys, last = (int(key) if key.isdigit() else key for key in path.split("/"))
        parent = tree
        for key in keys:
            parent = parent[key]
        parent[last] = value(parent[last]) if callable(value) else value
    file.write_text(json.dumps(tree))


def decode_in_chunks(
    decoder: Decoder, ids: list[int], sizes: Sequence[int], width: int = 0
) -> np.ndarray:
    """The logits [T, V] of a prompt that is decoded in chunks, batch 1. The numbers of tokens of
    the chunks are `sizes`, again and again; dummy columns fill a chunk up to `width`."""
    seqs, sizes, chunks = decoder.new_sequences(), cycle(sizes), []
    while ids:
        size = next(sizes)
        chunk, ids = ids[:size], ids[size:]
        hidden, _ = seqs.advance([chunk], min_columns=width)
        chunks.append(hidden[:, :, : len(chunk)])
    return decoder.logits(np.concatenate(chunks, axis=2))[0]


def logits_error(
    decoder: Decoder, golden: Golden, *sizes: int, width: int = 0
) -> float:
    """The `relative` error of the logits for the golden's prompt in chunks of `sizes`."""
    logits = decode_in_chunks(decoder, golden.ids, sizes, width)
    return relative(logits, golden.logits)


def relative(actual: np.ndarray, expected: np.ndarray) -> float:
    """The largest deviation over the largest expected magnitude."""
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


def once(folder: Path, make: Callable[[Path], object]) -> Path:
    """Returns a folder that `make` has filled; only the first process that asks for it calls
    `make`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            part = folder.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            make(part)
            part.rename(folder)
    return folder


def edited_copy(bundle: Bundle, folder: Path, *changes: tuple[str, object]) -> Bundle:
    """Copies a bundle into a folder, changes its bundle.json as `edit_json` does, and opens it."""
    shutil.copytree(bundle.root, folder)
    edit_json(folder / "bundle.json", *changes)
    return Bundle.open(folder)


def folder_name(kind: str, *fields) -> str:
    """A name that is the same in every process for equal fields."""
    return f"{kind}-{hashlib.sha256(repr(fields).encode()).hexdigest()[:16]}"


def case_id(value) -> str:
    """The id of a parameter, for `ids=` of `parametrize`: a string is its own id, and the id of a
    dictionary has its values."""
    return value if isinstance(value, str) else "-".join(map(str, value.values()))


def as_device(decoder: Decoder) -> Decoder:
    """Makes a decoder look like one on a device, whose inner layers do not show."""
    decoder.runtime, decoder.is_device = "coreml", True
    decoder.shows_inner_layers = False
    return decoder


def export(path: Path, folder: Path, /, **options) -> Bundle:
    """Exports a checkpoint. Unlike the public `export` it takes every preset without a calibration
    text, and then rounds weights to the nearest. For tests of how formats are stored and run, such
    values are good enough."""
    from workbench import exporter

    if "calibration" in options:
        return exporter.export(path, folder, **options)
    source = Checkpoint(path)
    return exporter._export(source, exporter.make_options(**options), folder)


def checkpoint_that_knows(words: list[str], folder: Path) -> Checkpoint:
    """Gives the checkpoint in a folder a tokenizer that knows these words and no others."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["<unk>", *dict.fromkeys(words)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    fast.save_pretrained(folder)
    return Checkpoint(folder)


def random_text(V: int, seed: int = 0, count: int = 1024):
    """A text of random ids to calibrate with, in windows of 128."""
    from workbench.exporter.calibrate import draw_windows

    ids = np.random.default_rng(seed).integers(0, V, count)
    return draw_windows(ids.tolist(), "random ids", seed=seed, window=128)


class Exports:
    """Makes checkpoints, bundles and goldens on demand. All processes with the same `root` make one
    checkpoint for each family and change of its dimensions, and one bundle for each checkpoint and
    set of options. A test copies what it changes."""

    def __init__(self, root: Path):
        self.root = root
        self.bundles: dict[Path, Bundle] = {}
        self.models = {}

    def checkpoint(self, family: str, **changes) -> Path:
        """The tiny checkpoint of a family, with changes of its dimensions."""
        folder = self.root / folder_name("checkpoint", family, sorted(changes.items()))
        return once(folder, lambda path: random_checkpoint(path, family, **changes))

    def bundle(self, checkpoint: Path | str, **options) -> Bundle:
        """The bundle of a checkpoint; a family's name stands for its tiny checkpoint, which is wider
        if the preset's blocks need it."""
        options = {"max_seq_len": 32, "compress": "fp16"} | options
        if isinstance(checkpoint, str):
            sizes = fit_to_blocks(checkpoint, {}, options["compress"])
            checkpoint = self.checkpoint(checkpoint, **sizes)
        folder = self.root / folder_name(
            "bundle", str(checkpoint), sorted(options.items())
        )
        if folder not in self.bundles:
            once(folder, lambda path: export(checkpoint, path, **options))
            self.bundles[folder] = Bundle.open(folder)
        return self.bundles[folder]

    def decoder(
        self, checkpoint: Path | str, precision: str = "exact", **options
    ) -> Decoder:
        return Decoder(
            self.bundle(checkpoint, **options), runtime="portable", precision=precision
        )

    def hf(self, checkpoint: Path):
        if checkpoint not in self.models:
            self.models[checkpoint] = hf(checkpoint)
        return self.models[checkpoint]

    def golden(self, checkpoint: Path, length: int, seed: int = 0) -> Golden:
        """The golden of a random prompt."""
        model = self.hf(checkpoint)
        return golden(model, prompt(model.config.vocab_size, length, seed))
