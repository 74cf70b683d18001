"""Hugging Face folders: configuration and tensors, each tensor read on demand. Nothing
here depends on the architecture."""

import hashlib
import json
import math
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from statistics import mode

import torch

from workbench import checkpoint_checks, paths
from workbench.bundle import Tokens, file_entries
from workbench.errors import InputError, one_line
from workbench.files import (
    check_folder,
    check_regular,
    is_lfs_pointer,
    read_bytes,
    sha256,
)

KINDS = "F32", "F16", "BF16"
QUANTIZED = "F8", "F4", "I8", "U8"
CHUNK = 1 << 17  # elements: few enough for a core's cache during a conversion
MAPPED_BYTES = 1 << 26  # of a file at a time: mapped memory counts as resident

# Arguments of every reader of transformers. Without the second, transformers offers on a
# terminal to run Python files of the folder.
LOCAL = {"local_files_only": True, "trust_remote_code": False}
LAYER_COUNTS = "num_hidden_layers", "num_layers", "n_layer", "n_layers"
SIZES = """vocab_size hidden_size intermediate_size moe_intermediate_size head_dim
num_attention_heads num_key_value_heads num_experts num_local_experts n_routed_experts
num_experts_per_tok router_hidden_size""".split()
GENERATION = "generation_config.json"
EMBEDDINGS = "embed_tokens.weight"
HEAD = "lm_head.weight"
# families in which no constant multiplies q kᵀ
UNSCALED_SCORES = "gemma4_text", "gemma4_unified_text"
PREFIXES = "model.", "model.language_model.", "language_model.model."
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
# files that transformers' converter of old tokenizers reads
OLD_TOKENIZER_FILES = "vocab.json", "tokenizer.model", "vocab.txt", "spiece.model"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
FETCH = f"{checkpoint_checks.DOWNLOAD_HINT}, or git lfs pull"


class Checkpoint:
    """A checkpoint folder, or the name of a model in the Hub's local cache: `config`
    (transformers' own object) and `tensor(name)`.

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
        # name → file, dtype as safetensors spells it, shape
        self.header: dict[str, tuple[Path, str, list[int]]] = {}
        for file in self.files:
            with _open(file) as tensors:
                for name in tensors.keys():
                    stored = tensors.get_slice(name)
                    entry = file, stored.get_dtype(), stored.get_shape()
                    self.header[name] = entry
        packed = next((n for n in self.header if n.endswith(PACKED)), None)
        if packed:
            raise checkpoint_checks.quantized_error(
                self.path, f"quantized weights, tensor {packed!r}"
            )

    def _weight_files(self) -> list[Path]:
        single = self.path / "model.safetensors"  # transformers prefers it to an index
        index = self.path / "model.safetensors.index.json"
        if single.exists() or not index.is_file():
            return [single]
        places = _read_json(index).get("weight_map")
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
        """Refuses sizes and counts of layers that exceed the numbers in the weight
        files: transformers would first build lists, modules and tables of them."""
        numbers = sum(math.prod(shape) for _, _, shape in self.header.values())
        config = self.path / "config.json"
        parts = [_read_json(config)]
        for fields in parts:
            parts += [part for part in fields.values() if isinstance(part, dict)]
            for name, value in fields.items():
                limit = numbers
                if name in LAYER_COUNTS:
                    limit = len(self.header)
                elif name not in SIZES:
                    continue
                if isinstance(value, int) and value > limit:
                    needed = f"at most {limit:,}, as the weight files hold"
                    step = "download the checkpoint whole, or correct config.json"
                    raise InputError(str(config), f"{name} {value:,}", needed, step)

    @cached_property
    def eos(self) -> list[int]:
        """Tokens that end a text. As in transformers' `generate`,
        generation_config.json alone decides where there is one."""
        if self.generation_eos is None:
            return self.configured_eos
        return self.generation_eos

    @property
    def configured_eos(self) -> list[int]:
        """Tokens that end a text by config.json."""
        return self._token_ids("eos_token_id", self.config.eos_token_id)

    @property
    def generation_eos(self) -> list[int] | None:
        """Tokens that end a text by generation_config.json; None without that file."""
        generation = self.path / GENERATION
        if not generation.is_file():
            return None
        eos = _read_json(generation).get("eos_token_id")
        return self._token_ids("eos_token_id", eos)

    @cached_property
    def suppressed(self) -> list[int]:
        """Tokens of the vocabulary that generation_config.json forbids: transformers'
        `generate` never picks them, and ignores ids outside the vocabulary."""
        generation = self.path / GENERATION
        if not generation.is_file():
            return []
        name = "suppress_tokens"
        tokens = self._token_ids(name, _read_json(generation).get(name))
        if (
            not tokens
        ):  # the configuration is transformers', which takes seconds to import
            return []
        V = self.config.vocab_size
        return [token for token in tokens if 0 <= token < V]

    def _token_ids(self, name: str, value) -> list[int]:
        """The value of a configuration's field as a list of token ids."""
        tokens = value
        if value is None:
            tokens = []
        elif not isinstance(value, list):
            tokens = [value]
        if not all(type(token) is int for token in tokens):
            raise InputError(
                f"checkpoint {self.path}",
                f"{name} {value!r}",
                "a token id, a list of them, or null",
                FETCH,
            )
        return tokens

    @cached_property
    def sha256(self) -> str:
        """Hash of the configuration and every weight file: the checkpoint's identity
        everywhere."""
        config, generation = self.path / "config.json", self.path / GENERATION
        digest = hashlib.sha256(read_bytes(config))
        if generation.is_file():
            files = generation, config
            ends, default_ends = (_read_json(f).get("eos_token_id") for f in files)
            if ends != default_ends or self.suppressed:
                digest.update(read_bytes(generation))
        for path in self.files:
            digest.update(bytes.fromhex(sha256(path)))
        return digest.hexdigest()

    @cached_property
    def prefix(self) -> str:
        """The part of the names of the text model's tensors before `layers.0…`.

        Raises:
            InputError: names under which transformers' loader would find no embeddings.
        """
        for prefix in PREFIXES:
            if f"{prefix}{EMBEDDINGS}" in self:
                return prefix
        if self._stored_embeddings is None:
            # Only the embeddings are missing: the error of their reader names them.
            for prefix in PREFIXES:
                if any(name.startswith(f"{prefix}layers.0.") for name in self.header):
                    return prefix
            similar = next((n for n in self.header if n.endswith(EMBEDDINGS)), None)
            layer = next((n for n in self.header if "layers.0." in n), None)
            actual = similar or layer or next(iter(self.header), "no tensor")
            raise InputError(
                f"checkpoint {self.path}",
                f"tensors named like {actual!r}",
                f"names that transformers' loader of {self.config.model_type} models "
                f"knows, such as {PREFIXES[0]}{EMBEDDINGS}",
                f"save the model again with transformers' save_pretrained; or {FETCH}",
            )
        return self._stored_embeddings.removesuffix(EMBEDDINGS)

    @cached_property
    def _stored_embeddings(self) -> str | None:
        """The name of the tensor that transformers' loader reads as the text model's
        embeddings, by the loader's own renamings and base-model prefixes."""
        import transformers
        from transformers import conversion_mapping, core_model_loading

        config = transformers.AutoConfig.from_pretrained(self.path, **LOCAL)
        loaders = (
            transformers.AutoModelForCausalLM,
            transformers.AutoModelForImageTextToText,
        )
        loader = next(
            (loader for loader in loaders if type(config) in loader._model_mapping),
            None,
        )
        if loader is None:
            return None
        with torch.device("meta"):
            model = loader.from_config(config, trust_remote_code=False)
        decoder = model.get_decoder()
        path = next(name for name, module in model.named_modules() if module is decoder)
        transforms = conversion_mapping.get_model_conversion_mapping(model)
        renamings, converters = [], []
        for transform in transforms:
            if isinstance(transform, core_model_loading.WeightRenaming):
                renamings.append(transform)
            else:
                converters.append(transform)
        parameters = model.state_dict()
        for name in self.header:
            renamed, _ = core_model_loading.rename_source_key(
                name, renamings, converters, model.base_model_prefix, parameters
            )
            if renamed == f"{path}.{EMBEDDINGS}" and name.endswith(EMBEDDINGS):
                return name
        return None

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

    def _entry(self, name: str) -> tuple[Path, str, list[int]]:
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
        dtype = self.header[name][1]
        if dtype.startswith(QUANTIZED):
            raise checkpoint_checks.quantized_error(
                self.path, f"dtype {dtype} of tensor {name!r}"
            )
        if dtype not in KINDS:
            raise InputError(
                f"tensor {name!r}",
                f"dtype {dtype}",
                "F32, F16 or BF16",
                "convert the checkpoint to one of these",
            )
        return self.header[name]

    def shape(self, name: str, rows: slice | None = None) -> list[int]:
        """Shape of tensor `name`, or of some of its rows."""
        _, _, shape = self._entry(name)
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
            with _open(file) as tensors:
                block = tensors.get_slice(name)[first : min(first + step, indices.stop)]
                yield from block.flatten().split(CHUNK)

    def tensor(self, name: str, rows: slice | list[int] | None = None) -> torch.Tensor:
        """Tensor `name` (or some of its rows) in float32; only their bytes are read."""
        file, _, _ = self._entry(name)
        with _open(file) as tensors:
            rows = slice(None) if rows is None else rows
            return tensors.get_slice(name)[rows].float()

    @property
    def facts(self) -> dict[str, str]:
        """The checkpoint's entry in a bundle's manifest: `name`, `sha256`, and its most
        common `dtype` as safetensors spells it (F32, F16, BF16)."""
        dtype = mode(dtype for _, dtype, _ in self.header.values())
        return {"name": self.name, "sha256": self.sha256, "dtype": dtype}

    @cached_property
    def tokenizer(self) -> Path:
        """The folder with tokenizer.json, if there is one: the checkpoint's, or a
        temporary folder where transformers' AutoTokenizer has converted the files of an
        older tokenizer."""
        is_old = any((self.path / name).is_file() for name in OLD_TOKENIZER_FILES)
        if (self.path / "tokenizer.json").is_file() or not is_old:
            return self.path
        from transformers import AutoTokenizer

        folder = tempfile.mkdtemp(prefix="tokenizer-")
        # the folder lives as long as the checkpoint
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        try:
            converted = AutoTokenizer.from_pretrained(self.path, **LOCAL)
            converted.save_pretrained(folder)
        except Exception as problem:  # converters of families raise anything
            raise InputError(
                f"tokenizer {self.path}",
                f"no tokenizer.json, and {one_line(problem)}",
                "a tokenizer that transformers' AutoTokenizer reads",
                "add its tokenizer.json, or remove the damaged files",
            ) from problem
        return Path(folder)

    def tokenizer_files(self) -> list[Path]:
        """The files of the tokenizer that a bundle holds."""
        folder = self.tokenizer
        return [folder / n for n in TOKENIZER_FILES if (folder / n).is_file()]

    def save_tokenizer(self, folder: Path) -> Tokens:
        """Copies the tokenizer, if there is one, into a bundle's folder; returns the
        manifest's entry on tokens."""
        target = folder / "tokenizer"
        for file in self.tokenizer_files():
            if is_lfs_pointer(file):
                needed = "a whole tokenizer"
                raise InputError(str(file), "a Git LFS pointer", needed, FETCH)
            target.mkdir(exist_ok=True)
            shutil.copyfile(file, target / file.name)
        files = file_entries(folder, target)
        return Tokens(
            bos=self.config.bos_token_id,
            eos=self.eos,
            suppressed=self.suppressed,
            files=files,
        )


def _read_json(path: Path) -> dict:
    try:
        fields = json.loads(read_bytes(path))
    except InputError:
        raise
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise InputError(str(path), "no JSON object", "the file of a checkpoint", FETCH)
    return fields


def _open(path: Path):
    """Context manager that gives safetensors' own reader of a file.

    Raises:
        InputError: no such file, no whole safetensors file, a Git LFS pointer.
    """
    from safetensors import SafetensorError, safe_open

    try:
        check_regular(path)
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as problem:
        reason = f"no whole safetensors file ({problem})"
        if not path.is_file():
            reason = "no such file (half a download?)"
        elif is_lfs_pointer(path):
            reason = "a Git LFS pointer"
        needed = "every weight file of the checkpoint, whole"
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
    """Writes a Hugging Face folder of random weights and any dimensions, holding at most
    one of its files in memory.

    Args:
        path: the new folder.
        model_type: transformers' name of the family; `config` are its configuration's
            keywords.
        dtype: `float32`, `float16` or `bfloat16`.
        shard_bytes: size of a safetensors file.
        noise: shape → values of variance 1 around 0 (default: normal values from
            `seed`).

    Linear weights have variance 1/fan_in, norms and scales lie around 1, biases around
    0: signals keep their size, and no parameter is 0 or 1, which would hide that a layer
    does not use it."""
    import transformers
    from huggingface_hub import split_torch_state_dict_into_shards
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
    pattern = "model{suffix}.safetensors"
    parts = split_torch_state_dict_into_shards(
        tensors, filename_pattern=pattern, max_shard_size=shard_bytes
    )
    if parts.is_sharded:
        text = json.dumps({"metadata": {}, "weight_map": parts.tensor_to_filename})
        (path / "model.safetensors.index.json").write_text(text)
    for file, names in parts.filename_to_tensors.items():
        values = {}
        for name in names:
            drawn = _random_tensor(name, noise(tensors[name].shape), settings)
            values[name] = drawn.to(settings.dtype)
        save_file(values, path / file, metadata={"format": "pt"})
    return path


def _random_tensor(name: str, noise: torch.Tensor, config) -> torch.Tensor:
    leaf = name.rpartition(".")[2]
    if (
        config.model_type in UNSCALED_SCORES
        and ".self_attn." in name
        and "norm" in name
    ):
        # the weights of both norms together hold the factor D^-½
        return (1 + 0.1 * noise) * noise.shape[-1] ** -0.25
    if "norm" in name or leaf.endswith("scale") or leaf == "temp":
        return 1 + 0.1 * noise
    # transformers sets the last bias, the skip class's, to -1 whenever it loads a model
    if leaf == "balancing_biases":
        return torch.cat([0.1 * noise[:-1], -torch.ones(1)])
    if leaf == "layer_scalar":
        # published values run from 0.005 to 0.92, another in each layer
        return 0.02 + 0.88 * torch.special.ndtr(noise)
    if leaf.endswith("bias"):
        return 0.1 * noise
    if "embed_tokens_per_layer" in name:
        # as large as the projection that is added to it: the model multiplies by √P
        return noise / config.hidden_size_per_layer_input**0.5
    if "embed_tokens" in name:
        return noise
    inputs = noise.shape[-1] if "experts" in name else noise.shape[1:].numel()
    return noise / max(1, inputs) ** 0.5
