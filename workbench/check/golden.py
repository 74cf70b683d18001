"""Goldens: what Hugging Face's implementation computes for a prompt, stored in files,
and the weights that it computes with."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError

from workbench import paths
from workbench.bundle import Bundle, Shard
from workbench.bundle.names import EMBEDDING
from workbench.check.greedy import ARRAYS, METADATA, GreedyTexts
from workbench.check.hf import HEAD_ROWS, Weights, trace_reference
from workbench.check.text import default_ids
from workbench.check.trace import STORED, Arrays, Trace, parse_name
from workbench.decode.tokenizer import token_labels
from workbench.errors import InputError
from workbench.files import load_arrays, output_root, save_arrays
from workbench.models.checkpoint import Checkpoint
from workbench.runtime import constants

VERDICT_HASH = "verdict_sha256"  # in `Golden.meta`
FORMAT = 2  # of the stored file: raised when `make_golden` changes


@dataclass(frozen=True)
class Golden:
    """The trace of Hugging Face's model over token ids; `golden["k.3"]` and
    `golden["update.3"]` are arrays of it by their names in files.

    Attributes:
        ids: [n].
        trace: see `Reference.run`.
        meta: checkpoint (SHA-256), weights (source, fp16, or a bundle's identity),
            transformers (version), and `VERDICT_HASH` where it was written for a
            bundle.
        source: the checkpoint, with which `validate` runs the gates that need it.
        file: where the golden is stored.
        texts: Hugging Face's greedy texts; None where the golden stores none.
    """

    ids: np.ndarray
    trace: Trace
    meta: dict[str, str]
    source: Checkpoint | None = None
    file: Path | None = None
    texts: GreedyTexts | None = None

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint | str | Path,
        ids: Sequence[int] | None = None,
        folder: Path | None = None,
    ) -> "Golden":
        """Hugging Face's values for token ids (default: `default_ids`), computed once
        for a checkpoint's hash, the ids and the version of transformers, and stored in
        `folder` (default: `data/golden`). A file that cannot be read is replaced."""
        source = checkpoint
        if not isinstance(checkpoint, Checkpoint):
            source = Checkpoint(paths.find(checkpoint))
        if folder is None:
            folder = output_root() / "data" / "golden"
        ids = np.asarray(default_ids(source) if ids is None else ids).tolist()
        key = json.dumps([FORMAT, source.sha256, ids, version("transformers")])
        digest = hashlib.sha256(key.encode()).hexdigest()[:10]
        file = folder / f"{source.name}-{digest}.safetensors"
        try:
            golden = cls.load(file)
        except InputError:
            golden = make_golden(source, ids)
            golden.save(file)
        return replace(golden, source=source, file=file)

    @property
    def tokens(self) -> list[str]:
        """The text of each token for an axis (see `token_labels`)."""
        tokenizer = None if self.source is None else self.source.tokenizer
        return token_labels(tokenizer, self.ids)

    @property
    def checkpoint_sha256(self) -> str:
        """SHA-256 of the checkpoint whose values these are."""
        return self.meta["checkpoint"]

    @property
    def verdict_sha256(self) -> str | None:
        """SHA-256 of the verdict.json of the bundle that the golden was written for."""
        return self.meta.get(VERDICT_HASH)

    @property
    def layer_count(self) -> int:
        """How many layers the model has."""
        return len(self.trace.layers)

    def __getitem__(self, name: str) -> np.ndarray:
        value = self.trace.value(*parse_name(name))
        if value is None:
            raise KeyError(name)
        return value

    def save(self, path: str | Path) -> Path:
        """Writes one safetensors file, whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays = self.trace.arrays() | {"ids": self.ids}
        metadata = {"workbench-golden": json.dumps(self.meta)}
        if self.texts is not None:
            arrays |= self.texts.arrays()
            metadata[METADATA] = self.texts.metadata()
        save_arrays(path, arrays, metadata)
        return path

    @classmethod
    def load(cls, path: str | Path) -> "Golden":
        """Reads a golden that `save` wrote.

        Raises:
            InputError: no such file, another file, or arrays that are no golden's.
        """
        subject = f"golden {path}"
        step = "run: workbench golden CHECKPOINT"
        if not Path(path).is_file():
            raise InputError(subject, "no such file", "a golden store", step)
        try:
            arrays, metadata = load_arrays(path)
            meta = json.loads(metadata["workbench-golden"])
            ids = arrays.pop("ids")
            if not isinstance(meta["checkpoint"], str):
                raise TypeError
            texts = None
            if METADATA in metadata:
                stored = {name: arrays.pop(name) for name in ARRAYS}
                texts = GreedyTexts.from_arrays(stored, metadata[METADATA])
        except InputError:  # no regular file
            raise
        except (SafetensorError, KeyError, TypeError, ValueError) as problem:
            actual = f"no golden ({type(problem).__name__})"
            needed = "a file that workbench golden wrote"
            raise InputError(subject, actual, needed, step) from None
        if fault := golden_fault(ids, arrays):
            raise InputError(subject, *fault, step)
        if texts is not None:
            V = arrays["logits"].shape[1]
            numbers = [i for text in texts.texts for i in [*text.ids, *text.tokens]]
            if numbers and not 0 <= min(numbers) <= max(numbers) < V:
                actual = f"texts with ids from {min(numbers)} to {max(numbers)}"
                raise InputError(subject, actual, f"ids from 0 to {V - 1}", step)
        trace = Trace.from_arrays(arrays, count_layers(arrays))
        return cls(ids, trace, meta, file=Path(path), texts=texts)


def count_layers(arrays: Arrays) -> int:
    """How many layers have an input among the arrays of a golden."""
    return sum(bool(re.fullmatch(r"x\.\d{1,9}", name)) for name in arrays)


def golden_fault(
    ids: np.ndarray, arrays: Arrays, head: bool = True
) -> tuple[str, str] | None:
    """The first fault of a golden's arrays, and what they should be; None if they have
    the form of a trace of Hugging Face's model: token ids of the vocabulary; for every
    layer its input, its output, and the rows of both caches or of neither; with a
    `head`, the logits; one row per id, and only finite numbers."""
    if ids.dtype.kind not in "iu" or ids.ndim != 1 or not len(ids):
        return f"ids {ids.dtype} {[*ids.shape]}", "token ids, whole numbers [n]"
    L = max(count_layers(arrays), 1)
    names = {f"{name}.{layer}" for name in ("x", "hidden") for layer in range(L)}
    if head:
        names.add("logits")
    for layer in range(L):
        if arrays.keys() & {f"k.{layer}", f"v.{layer}"}:
            names |= {f"k.{layer}", f"v.{layer}"}
    others = {f"{name}.{i}" for name in STORED for i in range(L)} | {"normed"}
    if missing := names - arrays.keys():
        return (
            f"no {min(missing)!r}",
            f"{', '.join(sorted(names)[:4])} … of every layer",
        )
    if more := arrays.keys() - names - others:
        return f"an array {min(more)!r}", "the arrays of its layers alone"
    for name, value in arrays.items():
        form = f"{name!r} {value.dtype} {[*value.shape]}"
        if value.dtype.kind != "f" or value.ndim != 2 or len(value) != len(ids):
            return form, f"numbers [{len(ids)}, width], a row for each id"
        wide = name.startswith(("x.", "hidden."))
        if wide and value.shape != arrays["x.0"].shape:
            return form, f"the shape {[*arrays['x.0'].shape]} of x.0"
        if not np.isfinite(value).all():
            row = int(np.flatnonzero(~np.isfinite(value).all(-1))[0])
            return f"{name!r}: inf or nan in row {row}", "finite numbers"
    V = arrays["logits"].shape[1] if head else 1 << 31
    if ids.min() < 0 or ids.max() >= V:
        return f"ids from {ids.min()} to {ids.max()}", f"ids from 0 to {V - 1}"
    return None


def check_exported_from(source: Checkpoint | Golden, bundle: Bundle) -> None:
    """Raises an InputError unless `bundle` was exported from this checkpoint, or from
    that of this golden; another one may have the same dimensions."""
    ours = bundle.manifest.checkpoint["sha256"]
    if isinstance(source, Checkpoint):
        subject, theirs = f"checkpoint {source.name}", source.sha256
    else:
        subject, theirs = "the golden's checkpoint", source.checkpoint_sha256
    if theirs != ours:
        needed = (
            f"{bundle.manifest.checkpoint['name']}, content hash {ours[:12]}, the "
            f"checkpoint that bundle {bundle.root.name} was exported from"
        )
        step = "give that checkpoint, or a golden of it, or export this one"
        raise InputError(subject, f"content hash {theirs[:12]}", needed, step)


def check_fits(golden: Golden, bundle: Bundle) -> None:
    """Raises an InputError for a golden of another checkpoint or other dimensions than
    the bundle's, with values that are not finite, or with more tokens than
    max_seq_len."""
    check_exported_from(golden, bundle)
    subject = f"golden {golden.file or ''}".strip()
    arrays = golden.trace.arrays()
    step = "run: workbench golden CHECKPOINT"
    head = "logits" in arrays
    if fault := golden_fault(golden.ids, arrays, head):
        raise InputError(subject, *fault, step)
    dims = bundle.manifest.dims
    V = arrays["logits"].shape[1] if head else dims.V
    sizes = golden.layer_count, arrays["x.0"].shape[1], V
    if sizes != (dims.L, dims.C, dims.V):
        needed = f"those of the bundle, {(dims.L, dims.C, dims.V)}"
        raise InputError(subject, f"layers, width, vocabulary {sizes}", needed, step)
    n = len(golden.ids)
    S = bundle.manifest.options.max_seq_len
    if n > S:
        step = "validate with a shorter prompt, or export with a larger --max-seq-len"
        raise InputError("golden", f"{n} tokens", f"at most max_seq_len = {S}", step)


@dataclass(frozen=True)
class StoredWeights:
    """Reads checkpoint tensors as a bundle stores them, decompressed. It is a `TokenTable`
    and a `SlicedHead` of `hf`.

    Attributes:
        slices: the stored values of each tensor, in the order of their rows. The head's
            may be left out; they are then read whenever they are asked for.
        offsets: what was added to a tensor before it was stored (Gemma's 1 + γ), which
            is subtracted again.
        keep_dtype: whether matrices stay in the dtype in which they are stored, which
            holds them exactly; they are float32 otherwise.
    """

    checkpoint: Checkpoint
    bundle: Bundle
    slices: dict[str, list[torch.Tensor]]
    offsets: dict[str, float]
    keep_dtype: bool

    @property
    def embedding(self) -> torch.Tensor | None:
        """The table [V, C] in which packages look tokens up; None where the host
        does."""
        return self.slices[EMBEDDING][0] if EMBEDDING in self.slices else None

    def __call__(self, name: str) -> torch.Tensor:
        """A tensor by its name in the checkpoint. One that no shard stores is read from
        the checkpoint and rounded to fp16."""
        shape = self.checkpoint.shape(name)
        if name not in self.slices:
            if name == self.checkpoint.head:
                value = torch.cat([*self.head_slices()])
                return value if self.keep_dtype else value.float()
            return self.checkpoint.tensor(name).half().float()
        rows = [part.reshape(-1, *shape[1:]) for part in self.slices[name]]
        if rows[0].numel() == np.prod(shape):
            # every slice of a head has the whole final norm
            value = rows[0].reshape(shape)
        else:
            value = torch.cat(rows)
        if offset := self.offsets.get(name):
            return value.float() - offset
        return value if self.keep_dtype else value.float()

    def head_slices(self) -> Iterator[torch.Tensor]:
        """The rows of the head in order, in the dtype in which they are stored."""
        name = self.checkpoint.head
        if name in self.slices:
            shape, offset = self.checkpoint.shape(name), self.offsets.get(name)
            yield from _in_rows(self.slices[name], shape, offset)
        else:
            yield from read_head(self.checkpoint, self.bundle)


def read_head(checkpoint: Checkpoint, bundle: Bundle) -> Iterator[torch.Tensor]:
    """The rows of the head as a bundle stores them, decompressed, [r, C] in their order:
    one slice after another, each read when it is asked for. One that no shard stores is
    the checkpoint's, rounded to fp16."""
    name = checkpoint.head
    shape = checkpoint.shape(name)
    shards = [shard for shard in _by_rows(bundle) if name in shard.weights]
    if shards:
        parts = (constants(bundle, shard)(shard.weights[name]) for shard in shards)
        yield from _in_rows(parts, shape, shards[0].offsets.get(name))
        return
    for start in range(0, shape[0], HEAD_ROWS):
        rows = slice(start, min(start + HEAD_ROWS, shape[0]))
        yield checkpoint.tensor(name, rows).half()


def _in_rows(
    parts: Iterable[torch.Tensor], shape: Sequence[int], offset: float | None
) -> Iterator[torch.Tensor]:
    """Stored parts of a tensor of this shape as its rows [r, ..], without the offset that
    storage adds. Where a part has the whole tensor, the others repeat it."""
    V, *others = shape
    for part in parts:
        rows = part.reshape(-1, *others)
        yield rows.float() - offset if offset else rows
        if len(rows) == V:
            return


def stored_weights(
    checkpoint: Checkpoint,
    bundle: Bundle,
    *,
    keep_dtype: bool = False,
    head: bool = True,
) -> StoredWeights:
    """The weights of a bundle; see `StoredWeights` for `keep_dtype`.

    Args:
        head: whether the head is read now, for a caller that computes logits again and
            again; otherwise it is read slice by slice whenever it is asked for.

    Raises:
        InputError: a bundle that was exported from another checkpoint.
    """
    check_exported_from(checkpoint, bundle)
    slices: dict[str, list[torch.Tensor]] = {}
    offsets: dict[str, float] = {}
    for shard in _by_rows(bundle):
        offsets |= shard.offsets
        if not shard.weights:
            continue
        constant_of = constants(bundle, shard)
        for tensor, constant in shard.weights.items():
            if head or tensor != checkpoint.head:
                slices.setdefault(tensor, []).append(constant_of(constant))
    return StoredWeights(checkpoint, bundle, slices, offsets, keep_dtype)


def _by_rows(bundle: Bundle) -> list[Shard]:
    """The shards of a bundle in the order of the rows that they store."""
    return sorted(bundle.manifest.shards, key=lambda shard: shard.rows[0])


def make_golden(
    checkpoint: Checkpoint | str | Path,
    ids: Sequence[int],
    weights: Weights | None = None,
    label: str = "source",
    **options,
) -> Golden:
    """The golden of Hugging Face's model over `ids` [n] with `weights` (default: the
    checkpoint's own). `label` names the weights; `options`: see `trace_reference`.

    Peak memory is one layer and one slice of the head, in float32."""
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = Checkpoint(checkpoint)
    trace = trace_reference(checkpoint, weights, ids, **options)
    meta = {"checkpoint": checkpoint.sha256, "weights": label}
    meta |= {"transformers": version("transformers")}
    return Golden(np.array(ids, np.int64), trace, meta)
