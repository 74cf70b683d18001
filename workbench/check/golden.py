"""Goldens: what Hugging Face's implementation computes for a prompt, stored in files,
and the weights that it computes with."""

import hashlib
import json
from collections.abc import Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from workbench import paths
from workbench.bundle import Bundle
from workbench.bundle.names import EMBEDDING
from workbench.check.hf import Reference, Values, Weights, updates
from workbench.decode.transcript import token_labels
from workbench.errors import InputError
from workbench.files import project_root, save_arrays
from workbench.models.checkpoint import Checkpoint
from workbench.runtime import constants

FORMAT = 2  # of the stored file: raised when `make_golden` changes


@dataclass(frozen=True)
class Golden:
    """`values` of Hugging Face's model for token ids `ids` [n]: see `Reference.run`;
    `golden["k.3"]` is one of them.

    `source` and `file` are those of `Golden.of`. `meta`: checkpoint (SHA-256), weights
    (source, fp16, or a bundle's identity), transformers (version)."""

    ids: np.ndarray
    values: Values
    meta: dict[str, str]
    source: Checkpoint | None = None
    file: Path | None = None

    @classmethod
    def of(cls, checkpoint: str | Path, ids: Sequence[int]) -> "Golden":
        """Hugging Face's values for token ids, computed once and stored in
        `data/golden`. Its `source` lets `validate` run the gates that need the
        checkpoint; `file` is where it is stored."""
        source = Checkpoint(paths.find(checkpoint))
        folder = (project_root(Path.cwd()) or Path.cwd()) / "data" / "golden"
        golden = stored_golden(source, ids, folder)
        file = golden_path(source, golden.ids, folder)
        return replace(golden, source=source, file=file)

    @property
    def tokens(self) -> list[str]:
        """The text of each token for an axis (see `token_labels`)."""
        return token_labels(self.source and self.source.path, self.ids)

    @property
    def layers(self) -> int:
        return sum(name.startswith("x.") for name in self.values)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.values[name]

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def save(self, path: str | Path) -> Path:
        """Writes one safetensors file, whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = {n: x for n, x in self.values.items() if not n.startswith("update.")}
        arrays = kept | {"ids": self.ids}
        save_arrays(path, arrays, {"workbench-golden": json.dumps(self.meta)})
        return path

    @classmethod
    def load(cls, path: str | Path) -> "Golden":
        step = "run: workbench golden CHECKPOINT"
        if not Path(path).is_file():
            raise InputError(f"golden {path}", "no such file", "a golden store", step)
        try:
            with safe_open(path, framework="np") as file:
                meta = json.loads(file.metadata()["workbench-golden"])
                arrays = {name: file.get_tensor(name) for name in file.keys()}
            golden = cls(arrays.pop("ids"), arrays | updates(arrays), meta)
            golden["x.0"], golden["logits"]  # older files lack them
            return golden
        except (SafetensorError, KeyError, TypeError, ValueError) as problem:
            raise InputError(
                f"golden {path}",
                f"no golden ({type(problem).__name__})",
                "a file that workbench golden wrote",
                step,
            ) from None


def check_exported_from(checkpoint: Checkpoint, bundle: Bundle) -> None:
    """Raises an InputError unless `bundle` was exported from this checkpoint."""
    if checkpoint.sha256 != bundle.manifest.checkpoint["sha256"]:
        raise InputError(
            f"checkpoint {checkpoint.name}",
            checkpoint.sha256[:12],
            f"{bundle.manifest.checkpoint['sha256'][:12]}, the one that bundle {bundle.root.name} "
            "was exported from",
            "give that checkpoint, or export this one",
        )


def stored_weights(
    checkpoint: Checkpoint, bundle: Bundle, *, half: bool = False
) -> Weights:
    """The values `bundle` stores, decompressed, as float32; tensors its shards do not
    hold as such are the fp16-rounded ones.

    A weight stored with an offset (Gemma's 1 + γ) is handed back without it. `half`:
    matrices stay in fp16, which holds their values exactly. The reader's `embedding` is
    the table [V, C] that packages look tokens up in, None where the host does.
    """
    check_exported_from(checkpoint, bundle)
    slices: dict[str, list[tuple[torch.Tensor, float]]] = {}
    for shard in sorted(bundle.manifest.shards, key=lambda shard: shard.rows[0]):
        if shard.weights:
            constant_of = constants(bundle, shard)
            for tensor, constant in shard.weights.items():
                part = constant_of(constant), shard.offsets.get(tensor, 0.0)
                slices.setdefault(tensor, []).append(part)

    def read(name: str) -> torch.Tensor:
        shape = checkpoint.shape(name)
        if name not in slices:
            return checkpoint.tensor(name).half().float()
        rows = [part.reshape(-1, *shape[1:]) for part, _ in slices[name]]
        offset = slices[name][0][1]
        if rows[0].numel() == np.prod(shape):
            # every head slice has the whole final norm
            value = rows[0].reshape(shape)
        else:
            value = torch.cat(rows)
        if offset:
            return value.float() - offset
        return value if half else value.float()

    read.embedding = slices[EMBEDDING][0][0] if EMBEDDING in slices else None
    return read


def golden_path(checkpoint: Checkpoint, ids: Sequence[int], folder: Path) -> Path:
    """Where `stored_golden` has its file: named after the checkpoint's hash, the token
    ids and the version of transformers."""
    key = json.dumps(
        [FORMAT, checkpoint.sha256, np.asarray(ids).tolist(), version("transformers")]
    )
    digest = hashlib.sha256(key.encode()).hexdigest()[:10]
    return folder / f"{checkpoint.name}-{digest}.safetensors"


def stored_golden(checkpoint: Checkpoint, ids: Sequence[int], folder: Path) -> Golden:
    """`make_golden` with the checkpoint's own weights, once: the file stays in `folder`
    (see `golden_path`). A file that cannot be read is replaced."""
    path = golden_path(checkpoint, ids, folder)
    with suppress(InputError):
        return Golden.load(path)
    golden = make_golden(checkpoint, ids)
    golden.save(path)
    return golden


def make_golden(
    checkpoint: Checkpoint | str | Path,
    ids: Sequence[int],
    weights: Weights | None = None,
    label: str = "source",
    **how,
) -> Golden:
    """Runs Hugging Face's model over `ids` [n] with `weights` (default: the
    checkpoint's own); `how`: keywords of `Reference.run`.

    Peak memory is one layer and one slice of the head, in float32."""
    import transformers

    if not isinstance(checkpoint, Checkpoint):
        checkpoint = Checkpoint(checkpoint)
    values = Reference(checkpoint, weights).run(ids, **how)
    meta = {
        "checkpoint": checkpoint.sha256,
        "weights": label,
        "transformers": transformers.__version__,
    }
    return Golden(np.array(ids, np.int64), values, meta)


def whole_prompt(checkpoint: Checkpoint):
    """Hugging Face's model in fp32 with all its weights loaded."""
    import transformers

    with without_bar():
        return transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint.path,
            dtype=torch.float32,
            attn_implementation="eager",
            local_files_only=True,
        ).eval()


@contextmanager
def without_bar():
    """Loads models without transformers' own progress bar."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
