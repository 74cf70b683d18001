"""Hugging Face folders: configuration and tensors, each tensor read on demand. Nothing
here depends on the architecture."""

import hashlib
import math
from collections import deque
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from statistics import mode
from typing import NamedTuple

import torch

from workbench import checkpoint_checks, paths
from workbench.errors import InputError, one_line
from workbench.files import check_folder, read_bytes
from workbench.files import sha256 as file_sha256
from workbench.models.folder import FETCH, GENERATION, LOCAL, open_tensors, read_json
from workbench.models.tokens import CheckpointTokens
from workbench.models.weight_names import (
    EMBEDDINGS,
    HEAD,
    PREFIXES,
    find_prefix,
    name_like_embeddings,
)

# dtypes as safetensors spells them: those that are read, and beginnings of quantized ones
DTYPES = "F32", "F16", "BF16"
QUANTIZED = "F8", "F4", "I8", "U8"
CHUNK = 1 << 17  # elements: few enough for a core's cache during a conversion
MAPPED_BYTES = 1 << 26  # of a file at a time: mapped memory counts as resident
# fields of configurations that state a number of layers, and fields that state a size of
# tensors
LAYER_COUNTS = "num_hidden_layers", "num_layers", "n_layer", "n_layers"
SIZES = """vocab_size hidden_size intermediate_size moe_intermediate_size head_dim
num_attention_heads num_key_value_heads num_experts num_local_experts n_routed_experts
num_experts_per_tok router_hidden_size""".split()
# endings of the names of tensors that hold packed values or their scales
PACKED = (
    ".qweight",
    ".qzeros",
    ".scales",
    ".weight_packed",
    ".weight_scale",
    ".weight_scale_inv",
    ".weight_scale_2",
    ".absmax",
)


class Entry(NamedTuple):
    """Where a tensor lies, its dtype as safetensors spells it, and its shape."""

    file: Path
    dtype: str
    shape: list[int]


class Checkpoint:
    """A checkpoint folder, or the name of a model in the Hub's local cache: `config`
    (transformers' own object), `tensor(name)`, and `tokens`.

    `header` describes every tensor by its name.

    Raises:
        InputError: nothing at the path, something else (a bundle, an adapter, GGUF
            weights, the name of a model on the Hub), quantized weights, an unfinished
            download, a truncated or foreign file, a Git LFS pointer.
    """

    def __init__(self, path: str | Path):
        self.path = paths.locate_checkpoint(path)
        check_folder(self.path, checkpoint_checks.MAX_FILE_BYTES)
        checkpoint_checks.check_quantization(self.path)
        self.files = self._weight_files()
        self.header: dict[str, Entry] = {}
        for file in self.files:
            with open_tensors(file) as tensors:
                for name in tensors.keys():
                    stored = tensors.get_slice(name)
                    entry = Entry(file, stored.get_dtype(), stored.get_shape())
                    self.header[name] = entry
        packed = next((n for n in self.header if n.endswith(PACKED)), None)
        if packed:
            raise checkpoint_checks.quantized_error(
                self.path, f"quantized weights, tensor {packed!r}"
            )

    def _weight_files(self) -> list[Path]:
        """The safetensors files of the folder: one, or those that its index names."""
        single = self.path / "model.safetensors"  # transformers prefers it to an index
        index = self.path / "model.safetensors.index.json"
        if single.exists() or not index.is_file():
            return [single]
        places = read_json(index).get("weight_map")
        names = sorted(set(places.values())) if isinstance(places, dict) else []
        if not names or any(Path(name).name != name for name in names):
            raise InputError(
                str(index),
                "no weight_map, or one with a folder in it",
                "the index of a sharded checkpoint, of plain file names",
                FETCH,
            )
        return [self.path / name for name in names]

    @property
    def name(self) -> str:
        """The model's name: the folder's, or in the Hub's cache the model's."""
        return paths.model_name(self.path)

    @cached_property
    def config(self):
        """transformers' configuration, text part, with its defaults filled in.

        Raises:
            InputError: a configuration that transformers refuses, or whose parts the
                weight files cannot hold.
        """
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoConfig

        self._check_counts()
        try:
            whole = AutoConfig.from_pretrained(self.path, **LOCAL)
        except (
            OSError,
            ValueError,
            TypeError,
            LookupError,
            ZeroDivisionError,
            RecursionError,
            StrictDataclassError,
        ) as problem:
            reason = one_line(problem)
            if "trust_remote_code" in reason:
                reason = "auto_map, Python code in the checkpoint, which is never run"
            raise InputError(
                str(self.path / "config.json"),
                reason,
                "a configuration that transformers accepts",
                f"see README: supported families; or {FETCH}",
            ) from problem
        return whole.get_text_config(decoder=True)

    def _check_counts(self) -> None:
        """Refuses sizes and counts of layers that exceed what the weight files hold:
        transformers would first build lists, modules and tables of them."""
        most_numbers = sum(math.prod(entry.shape) for entry in self.header.values())
        limits = dict.fromkeys(SIZES, most_numbers)
        limits |= dict.fromkeys(LAYER_COUNTS, len(self.header))
        path = self.path / "config.json"
        for fields in _with_nested(read_json(path)):
            for name, value in fields.items():
                limit = limits.get(name)
                if limit is not None and isinstance(value, int) and value > limit:
                    needed = f"at most {limit:,}, as the weight files hold"
                    step = "download the checkpoint whole, or correct config.json"
                    raise InputError(str(path), f"{name} {value:,}", needed, step)

    @cached_property
    def tokens(self) -> CheckpointTokens:
        """The tokenizer, and the tokens that end a text or are never generated."""
        return CheckpointTokens(self.path, lambda: self.config)

    @property
    def tokenizer(self) -> Path:
        """The folder with tokenizer.json, if there is one; a `Bundle` has this property,
        too."""
        return self.tokens.folder

    @cached_property
    def sha256(self) -> str:
        """Hash of the configuration and every weight file: the identity of the checkpoint in
        bundles, goldens and logs."""
        digest = hashlib.sha256(read_bytes(self.path / "config.json"))
        if self._generation_config_counts():
            digest.update(read_bytes(self.path / GENERATION))
        for path in self.files:
            digest.update(bytes.fromhex(file_sha256(path)))
        return digest.hexdigest()

    def _generation_config_counts(self) -> bool:
        """Whether generation_config.json changes what the model generates: it names other
        tokens that end a text than config.json, or tokens that are never generated. Its other
        fields, such as a temperature, are read by nothing here and stay out of the hash."""
        generation = self.path / GENERATION
        if not generation.is_file():
            return False
        eos = read_json(generation).get("eos_token_id")
        default_eos = read_json(self.path / "config.json").get("eos_token_id")
        return eos != default_eos or bool(self.tokens.suppressed)

    @cached_property
    def prefix(self) -> str:
        """The part of the names of the text model's tensors before `layers.0…`.

        Raises:
            InputError: names under which transformers' loader would find no embeddings.
        """
        prefix = find_prefix(self.path, self.header)
        if prefix is None:
            raise InputError(
                f"checkpoint {self.path}",
                f"tensors named like {name_like_embeddings(self.header)!r}",
                f"names that transformers' loader of {self.config.model_type} models "
                f"knows, such as {PREFIXES[0]}{EMBEDDINGS}",
                f"save the model again with transformers' save_pretrained; or {FETCH}",
            )
        return prefix

    @property
    def head(self) -> str:
        """Name of the matrix that computes logits: as in transformers, the embedding
        table where the configuration ties the two and no other is stored. Wrappers store
        the head beside their text model."""
        name_in_wrapper = self.prefix.removesuffix("model.") + HEAD
        for name in (HEAD, name_in_wrapper):
            if name in self:
                return name
        return f"{self.prefix}{EMBEDDINGS}" if self.config.tie_word_embeddings else HEAD

    @property
    def matrices(self) -> list[str]:
        """Names of the matrices of the text model."""
        return [
            name
            for name in sorted(self.header)
            if (name.startswith(self.prefix) or name == self.head)
            and len(self.shape(name)) == 2
        ]

    def __contains__(self, name: str) -> bool:
        return name in self.header

    def _entry(self, name: str) -> Entry:
        """The file, dtype and shape of a tensor. Raises an InputError for a tensor that
        is missing or holds no floating-point numbers."""
        if name not in self.header:
            kind = self.config.model_type
            ending = name.removeprefix(self.prefix)
            similar = [n for n in self.header if n.endswith(f".{ending}")]
            actual = f"no tensor {name!r}"
            if similar:
                actual += f", but {similar[0]!r}"
            raise InputError(
                f"checkpoint {self.path}",
                actual,
                f"the layout of transformers' {kind} models",
                FETCH,
            )
        dtype = self.header[name].dtype
        if dtype.startswith(QUANTIZED):
            raise checkpoint_checks.quantized_error(
                self.path, f"dtype {dtype} of tensor {name!r}"
            )
        if dtype not in DTYPES:
            raise InputError(
                f"tensor {name!r}",
                f"dtype {dtype}",
                "F32, F16 or BF16",
                "convert the checkpoint to one of these",
            )
        return self.header[name]

    def shape(self, name: str, rows: slice | None = None) -> list[int]:
        """Shape of tensor `name`, or of some of its rows."""
        shape = self._entry(name).shape
        if not shape:  # a number, such as the towers of multimodal models have
            return []
        count, *others = shape
        return [len(range(count)[rows or slice(None)]), *others]

    def chunks(self, name: str, rows: slice | None = None) -> Iterator[torch.Tensor]:
        """The values of tensor `name` (or of some rows) in order: flat pieces in the
        stored dtype, of at most `CHUNK` elements, that lie in the mapped file."""
        file, _, (count, *others) = self._entry(name)
        indices = range(count)[rows or slice(None)]
        step = max(1, MAPPED_BYTES // (4 * math.prod(others)))
        for first in indices[::step]:
            with open_tensors(file) as tensors:
                block = tensors.get_slice(name)[first : min(first + step, indices.stop)]
                yield from block.flatten().split(CHUNK)

    def tensor(self, name: str, rows: slice | list[int] | None = None) -> torch.Tensor:
        """Tensor `name` (or some of its rows) in float32; only their bytes are read."""
        with open_tensors(self._entry(name).file) as tensors:
            rows = slice(None) if rows is None else rows
            return tensors.get_slice(name)[rows].float()

    @property
    def manifest_entry(self) -> dict[str, str]:
        """The checkpoint's entry in a bundle's manifest: `name`, `sha256`, and its most
        common `dtype` as safetensors spells it (F32, F16, BF16)."""
        dtype = mode(entry.dtype for entry in self.header.values())
        return {"name": self.name, "sha256": self.sha256, "dtype": dtype}


def _with_nested(fields: dict) -> Iterator[dict]:
    """The fields of a configuration and of its parts, outer ones first."""
    parts = deque([fields])
    while parts:
        part = parts.popleft()
        yield part
        parts.extend(value for value in part.values() if isinstance(value, dict))
