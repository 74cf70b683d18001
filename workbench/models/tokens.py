"""What a checkpoint says about tokens: its tokenizer, the tokens that end a text, and those
that are never generated."""

import shutil
import tempfile
import weakref
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from workbench.bundle import Tokens, file_entries
from workbench.errors import InputError, one_line
from workbench.files import is_lfs_pointer
from workbench.models.folder import FETCH, GENERATION, LOCAL, read_json

# files that transformers' converter of old tokenizers reads
OLD_TOKENIZER_FILES = "vocab.json", "tokenizer.model", "vocab.txt", "spiece.model"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


class CheckpointTokens:
    """Tokens of the checkpoint in the folder `path`; `folder` is that of the tokenizer.

    `read_config` returns transformers' configuration. It is called only where it is needed,
    because transformers takes seconds to import."""

    def __init__(self, path: Path, read_config: Callable):
        self.path = path
        self.read_config = read_config

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
        return self._token_ids("eos_token_id", self.read_config().eos_token_id)

    @property
    def generation_eos(self) -> list[int] | None:
        """Tokens that end a text by generation_config.json; None without that file."""
        generation = self.path / GENERATION
        if not generation.is_file():
            return None
        eos = read_json(generation).get("eos_token_id")
        return self._token_ids("eos_token_id", eos)

    @cached_property
    def suppressed(self) -> list[int]:
        """Tokens of the vocabulary that generation_config.json forbids: transformers'
        `generate` never picks them, and ignores ids outside the vocabulary."""
        generation = self.path / GENERATION
        if not generation.is_file():
            return []
        name = "suppress_tokens"
        tokens = self._token_ids(name, read_json(generation).get(name))
        if not tokens:
            return []
        V = self.read_config().vocab_size
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
    def folder(self) -> Path:
        """The folder with tokenizer.json, if there is one: the checkpoint's, or a
        temporary folder where transformers' AutoTokenizer has converted the files of an
        older tokenizer."""
        is_old = any((self.path / name).is_file() for name in OLD_TOKENIZER_FILES)
        if (self.path / "tokenizer.json").is_file() or not is_old:
            return self.path
        from transformers import AutoTokenizer

        folder = tempfile.mkdtemp(prefix="tokenizer-")
        # the folder lives as long as this object
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

    def files(self) -> list[Path]:
        """The files of the tokenizer that a bundle holds."""
        paths = [self.folder / name for name in TOKENIZER_FILES]
        return [path for path in paths if path.is_file()]

    def save(self, folder: Path) -> Tokens:
        """Copies the tokenizer, if there is one, into a bundle's folder; returns the
        manifest's entry on tokens.

        Raises:
            InputError: a damaged tokenizer.
        """
        target = folder / "tokenizer"
        for file in self.files():
            _check_whole(file)
            target.mkdir(exist_ok=True)
            shutil.copyfile(file, target / file.name)
        files = file_entries(folder, target)
        return Tokens(
            bos=self.read_config().bos_token_id,
            eos=self.eos,
            suppressed=self.suppressed,
            files=files,
        )


def _check_whole(file: Path) -> None:
    """Raises an InputError for a file of a tokenizer that was not fetched whole."""
    from tokenizers import Tokenizer

    needed = "a whole tokenizer"
    if is_lfs_pointer(file):
        raise InputError(str(file), "a Git LFS pointer", needed, FETCH)
    if file.name != "tokenizer.json":
        return
    try:
        Tokenizer.from_file(str(file))
    except Exception as problem:  # tokenizers raises nothing more precise
        raise InputError(
            str(file), f"no tokenizer ({one_line(problem)})", needed, FETCH
        ) from problem
