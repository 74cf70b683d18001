"""Hugging Face folders: configuration and tensors, each tensor read on demand. Nothing
here depends on the architecture."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import torch

from workbench import paths
from workbench.errors import InputError
from workbench.files import is_lfs_pointer

KINDS = "F32", "F16", "BF16"
# large, so that a thread that hashes rarely asks for the interpreter
HASH_BYTES = 1 << 26
CHUNK = 1 << 17  # elements: what stays in a core's cache while it is converted
MAPPED_BYTES = 1 << 26  # of a file at once: mapped memory counts as resident

GENERATION = "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
FETCH = f"{paths.fetch()}, or git lfs pull"


class Entry(NamedTuple):
    """Where a tensor is: its file, dtype as safetensors spells it, shape."""

    file: Path
    dtype: str
    shape: list[int]


class Checkpoint:
    """A checkpoint folder, or the name of a model in the Hub's local cache: `config`
    (transformers' own object) and `tensor(name)`.

    Raises:
        InputError: nothing there, something else (a bundle, GGUF weights, the name of a
            model on the Hub), a half download, a truncated or foreign file, a Git LFS
            pointer.
    """

    def __init__(self, path: str | Path):
        self.path = paths.checkpoint(path)
        self.files = self._weight_files()
        self.header: dict[str, Entry] = {}
        for file in self.files:
            with _opened(file) as tensors:
                for name in tensors.keys():
                    stored = tensors.get_slice(name)
                    entry = Entry(file, stored.get_dtype(), stored.get_shape())
                    self.header[name] = entry

    def _weight_files(self) -> list[Path]:
        index = self.path / "model.safetensors.index.json"
        if not index.is_file():
            return [self.path / "model.safetensors"]
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError):
            raise InputError(
                str(index), "no weight_map", "the index of a sharded checkpoint", FETCH
            ) from None
        if any(Path(n).name != n for n in names):
            raise InputError(
                str(index), "a file name with a folder in it", "plain file names", FETCH
            )
        return [self.path / n for n in names]

    @property
    def name(self) -> str:
        """The model's name: that of the folder, in the Hub's cache that of the
        model."""
        return paths.model_name(self.path)

    @cached_property
    def config(self):
        """transformers' configuration, text part, with its defaults filled in; what
        transformers refuses is refused."""
        import transformers
        from huggingface_hub.errors import StrictDataclassError

        raw = self.raw_config
        if raw.get("model_type") not in transformers.CONFIG_MAPPING:
            raise InputError(
                f"checkpoint {self.path}",
                f"model_type {raw.get('model_type')!r}",
                "a model_type that transformers knows",
                "see README: supported families",
            )
        try:
            whole = transformers.AutoConfig.from_pretrained(
                self.path, local_files_only=True
            )
        except (ValueError, TypeError, KeyError, StrictDataclassError) as problem:
            raise InputError(
                str(self.path / "config.json"),
                f"{problem}".strip(),
                "a configuration that transformers accepts",
                FETCH,
            ) from problem
        return whole.get_text_config(decoder=True)

    @cached_property
    def raw_config(self) -> dict:
        return _read_json(self.path / "config.json")

    @cached_property
    def eos(self) -> list[int]:
        """Tokens that end a text. As in transformers' `generate`,
        generation_config.json alone decides where there is one."""
        own = self.path / GENERATION
        eos = self.config.eos_token_id
        if own.is_file():
            eos = _read_json(own).get("eos_token_id")
        tokens = eos
        if eos is None:
            tokens = []
        elif not isinstance(eos, list):
            tokens = [eos]
        if not all(type(token) is int for token in tokens):
            raise InputError(
                f"checkpoint {self.path}",
                f"eos_token_id {eos!r}",
                "a token id, a list of them, or null",
                FETCH,
            )
        return tokens

    @cached_property
    def sha256(self) -> str:
        """Hash of the configuration and every weight file: the checkpoint's identity
        everywhere."""
        digest = hashlib.sha256((self.path / "config.json").read_bytes())
        own = self.path / GENERATION
        key = "eos_token_id"
        if own.is_file() and _read_json(own).get(key) != self.raw_config.get(key):
            # it ends texts where the configuration does not
            digest.update(own.read_bytes())
        for path in self.files:
            of_file = hashlib.sha256()
            with path.open("rb", buffering=0) as file:
                size = min(HASH_BYTES, path.stat().st_size)
                buffer = memoryview(bytearray(size))
                while count := file.readinto(buffer):
                    of_file.update(buffer[:count])
            digest.update(of_file.digest())
        return digest.hexdigest()

    @property
    def dtype(self) -> str:
        """The most common stored dtype, as safetensors spells it (F32, F16, BF16)."""
        dtypes = [entry.dtype for entry in self.header.values()]
        return max(set(dtypes), key=dtypes.count)

    @cached_property
    def prefix(self) -> str:
        """What precedes `layers.0…` in the names of the text model's tensors."""
        for prefix in ("model.", "model.language_model.", "language_model.model."):
            if f"{prefix}embed_tokens.weight" in self:
                return prefix
        self._entry("model.embed_tokens.weight")  # raises, naming what is missing
        raise AssertionError

    def __contains__(self, name: str) -> bool:
        return name in self.header

    def shape(self, name: str, rows: slice | None = None) -> list[int]:
        """Shape of tensor `name`, or of some rows of it."""
        shape = self._entry(name).shape
        if rows is None:
            return shape
        return [len(range(*rows.indices(shape[0]))), *shape[1:]]

    def _entry(self, name: str) -> Entry:
        if name not in self.header:
            raise InputError(
                f"checkpoint {self.path}",
                f"no tensor {name!r}",
                f"the layout of transformers' {self.raw_config.get('model_type')} models",
                FETCH,
            )
        return self.header[name]

    def chunks(self, name: str, rows: slice | None = None) -> Iterator[torch.Tensor]:
        """The values of tensor `name` (or of some rows) in order: flat pieces in the
        stored dtype, of at most `CHUNK` elements, that lie in the mapped file."""
        file, dtype, shape = self._entry(name)
        if dtype not in KINDS:
            raise InputError(
                f"tensor {name!r}",
                f"dtype {dtype}",
                "F32, F16 or BF16",
                "convert the checkpoint to one of these",
            )
        start, stop, _ = (rows or slice(None)).indices(shape[0])
        step = max(1, MAPPED_BYTES // (4 * math.prod(shape[1:])))
        for first in range(start, stop, step):
            with _opened(file) as tensors:
                block = tensors.get_slice(name)[first : min(first + step, stop)]
                yield from block.flatten().split(CHUNK)

    def tensor(self, name: str, rows: slice | list[int] | None = None) -> torch.Tensor:
        """Tensor `name` (or some rows of it) in float32; only the bytes asked for are
        read."""
        if isinstance(rows, list):
            return torch.cat([self.tensor(name, slice(r, r + 1)) for r in rows])
        shape = self.shape(name, rows)
        values = torch.empty(math.prod(shape))
        start = 0
        for chunk in self.chunks(name, rows):
            values[start : start + len(chunk)] = chunk
            start += len(chunk)
        return values.reshape(shape)

    def tokenizer_files(self) -> list[Path]:
        return [self.path / n for n in TOKENIZER_FILES if (self.path / n).is_file()]


def _read_json(path: Path) -> dict:
    try:
        fields = json.loads(path.read_bytes())
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise InputError(
            str(path), "no JSON object", "the model's configuration", FETCH
        )
    return fields


def _opened(path: Path):
    """A safetensors file, mapped, as safetensors' own reader gives it."""
    from safetensors import SafetensorError, safe_open

    needed = "every weight file of the checkpoint, whole"
    if not path.is_file():
        raise InputError(str(path), "no such file (half a download?)", needed, FETCH)
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as problem:
        reason = f"no whole safetensors file ({problem})"
        if is_lfs_pointer(path):
            reason = "a Git LFS pointer"
        raise InputError(str(path), reason, needed, FETCH) from problem


def random(
    path: str | Path,
    model_type: str,
    *,
    seed: int = 0,
    dtype: str = "float16",
    shard_bytes: int = 1 << 30,
    noise: Callable[[torch.Size], torch.Tensor] | None = None,
    **config,
) -> Path:
    """Writes a Hugging Face folder of random weights and any dimensions, never holding
    more than one shard.

    Args:
        path: the new folder.
        model_type: transformers' name of the family; `config` are its configuration's
            keywords.
        dtype: `float32`, `float16` or `bfloat16`.
        shard_bytes: size at which a new safetensors file is begun.
        noise: values of variance 1 around 0 for a shape (default: normal ones from
            `seed`).

    Linear weights have variance 1/fan_in, norms and scales lie around 1, biases around
    0: signals keep their size, and nothing is at a value (0, 1) that would hide a
    missing ingredient."""
    import transformers
    from safetensors.torch import save_file

    path = Path(path)
    path.mkdir(parents=True)
    settings = transformers.AutoConfig.for_model(model_type, **config)
    settings.dtype = getattr(torch, dtype)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(settings)
    model.config.save_pretrained(path)
    tensors = model.state_dict()
    if settings.tie_word_embeddings:
        for name in model._tied_weights_keys or ():
            tensors.pop(name, None)
    noise = noise or partial(torch.randn, generator=torch.Generator().manual_seed(seed))
    index = {}
    shard = {}
    last = list(tensors)[-1]
    for name, tensor in tensors.items():
        shard[name] = _random_tensor(name, noise(tensor.shape)).to(settings.dtype)
        if (
            sum(values.nbytes for values in shard.values()) >= shard_bytes
            or name == last
        ):
            file = f"model-{len(set(index.values())) + 1:05d}.safetensors"
            save_file(shard, path / file, metadata={"format": "pt"})
            index |= dict.fromkeys(shard, file)
            shard = {}
    if len(set(index.values())) == 1:
        (path / file).rename(path / "model.safetensors")
    else:
        text = json.dumps({"metadata": {}, "weight_map": index})
        (path / "model.safetensors.index.json").write_text(text)
    return path


def _random_tensor(name: str, noise: torch.Tensor) -> torch.Tensor:
    shape = noise.shape
    leaf = name.rsplit(".", 1)[-1]
    if "norm" in name or leaf.endswith("scale") or leaf == "temp":
        return 1 + 0.1 * noise
    # transformers sets the last one, the skip class's, to -1 whenever it loads a model
    if leaf == "balancing_biases":
        return torch.cat([0.1 * noise[:-1], -torch.ones(1)])
    if leaf.endswith("bias"):
        return 0.1 * noise
    if "embed_tokens" in name:
        return noise
    inputs = shape[-1] if "experts" in name else shape[1:].numel()
    return noise / max(1, inputs) ** 0.5
