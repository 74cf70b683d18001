"""A `Decoder` of adopted packages, and functions that open bundles or adopted
packages."""

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from workbench import paths
from workbench.adopt import schema
from workbench.adopt.adapter import Adapter
from workbench.adopt.folder import Adopted, AdoptedOptions, options_of
from workbench.bundle import Bundle, Options
from workbench.bundle.bundle import read_manifest
from workbench.decode import Decoder, checks
from workbench.decode.times import Times
from workbench.errors import InputError
from workbench.runtime import named


class AdoptedDecoder(Decoder):
    """Runs one sequence through adopted packages: `begin`, `prefill`,
    `decode_one_token`, `stream`, `advance` and `logits` as in `Decoder`. Snapshots are
    the adapter's own.

    If the packages contain the argmax, `gives_logits` is False and the logits of all
    tokens but the top one are −inf."""

    def __init__(
        self,
        bundle: Adopted,
        runtime: str = "auto",
        precision: str = "declared",
        fast: bool = False,
        compute_units: str = "CPU_AND_NE",
        hints: dict | None = None,
    ):
        self.adapter = Adapter(bundle, runtime, precision, compute_units)
        self.bundle, self.manifest = bundle, bundle.manifest
        self.options = bundle.manifest.options
        self.runtime, self.fault = named(self.adapter.runtime)
        self.precision, self.fast = precision, False
        self.compute_units, self.hints = compute_units, {}
        self.layers, self.heads = [], []
        for shard in bundle.shards("layers"):
            self.layers.append(SimpleNamespace(shard=shard, loading_ms={}))
        kinds = set()
        for part in bundle.foreign.parts:
            kinds.update(entry.kind for entry in part.outputs.values())
        self.gives_logits = "logits" in kinds
        self.begin()

    def begin(self, snapshot=None) -> None:
        """Starts a fresh sequence."""
        if any(s is not None for s in np.ravel(snapshot)):
            raise InputError(
                "snapshot",
                "one to continue",
                "none of adopted packages",
                "begin a fresh sequence, or run: workbench reuse FOLDER",
            )
        self.run, self.times, self.state = object(), Times(), self.adapter.begin()
        self.ids, self.offsets = [[]], np.zeros(1, int)

    def advance(self, chunk: list[Sequence[int]], T: int) -> np.ndarray:
        """Runs every package up to the last with a state over `chunk[0]`; returns
        hidden states [1, C, T], or logits [1, V, T] if no package follows."""
        (ids,), start = chunk, int(self.offsets[0])
        by_kind, function = self.adapter.run_body(self.state, ids, start)
        for ms, cpu_ms in self.adapter.ms:
            self.times.layers.append(ms)
            self.times.cpu_ms.append(cpu_ms)
            self.times.native_ms.append(None)
        self.offsets = self.offsets + len(ids)
        self.ids[0].extend(map(int, ids))
        self.silent = not function.logits
        if self.silent:
            return np.full((1, 1, T), np.nan, np.float32)
        if self.bundle.shards("head"):
            return by_kind["hidden"][0].T[None]
        return self._scores(by_kind).T[None]

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """Logits [1, T, V] from the result of `advance` [1, X, T]; nan if the call's
        function gives none."""
        start = time.perf_counter()
        cpu_start = time.thread_time()
        rows = hidden[0].T
        if self.silent:
            rows = np.broadcast_to(rows, (len(rows), self.manifest.dims.V))
        elif self.bundle.shards("head"):
            ids = np.zeros(len(rows), int)
            rows = self._scores(self.adapter.run_heads({"hidden": [rows]}, ids, 0))
        self.times.head = (time.perf_counter() - start) * 1e3
        self.times.add_step(cpu_start, [None])
        return rows[None]

    def _scores(self, by_kind: dict) -> np.ndarray:
        """Logits [T, V], −inf for tokens of which the packages give none."""
        result = self.adapter.result(by_kind)
        if result.logits is not None:
            return result.logits
        scores = np.full((len(result.top), self.manifest.dims.V), -np.inf, np.float32)
        values = result.value
        if values is None:
            values = 0.0
        scores[np.arange(len(scores)), result.top] = values
        return scores

    def sizes(
        self, count: int, tile: int | None = None, logits: str = "last"
    ) -> list[int]:
        """The sizes of the calls that continue the sequence by `count` tokens."""
        start = int(self.offsets[0])
        return self.adapter.plan(count, tile or self.options.t_max, start, logits)

    def prefill_calls(self, count: int) -> int:
        return len(self.adapter.plan(count, self.options.t_max, 0, "last"))

    def prefill(self, ids, tile: int | Sequence[int] | None = None) -> np.ndarray:
        """Continues the sequence by its prompt in the largest calls; logits [V] of its
        end."""
        (prompt,), done = checks.prompts(ids, 1, self.manifest.dims.V), 0
        for size in self.sizes(len(prompt), tile and int(np.max(tile))):
            hidden = self.advance([prompt[done : done + size]], size)
            done += size
        return self.logits(hidden[:, :, -1:])[0, -1]

    def sequence_logits(self, sequences: list[list[int]], count: int) -> np.ndarray:
        """Logits [1, count, V] of the last tokens of a fresh sequence."""
        (ids,), rows = sequences, []
        self.begin()
        for length, logits in ((len(ids) - count, ""), (count, "every")):
            for size in self.sizes(length, None, logits):
                start = int(self.offsets[0])
                hidden = self.advance([ids[start : start + size]], size)
                if logits:
                    rows.append(self.logits(hidden))
        return np.concatenate(rows, axis=1)


def open_folder(path: str | Path) -> Bundle | Adopted:
    """The bundle or the adopted packages at `path`.

    Raises:
        InputError: neither is there, it is damaged, or it does not fit its packages.
    """
    if paths.adopted(path):
        return Adopted.open(path)
    return Bundle.open(path)


def open_decoder(folder: Bundle | Adopted, *arguments, **options) -> Decoder:
    """The decoder of an opened folder; arguments as of `Decoder`."""
    kind = AdoptedDecoder if isinstance(folder, Adopted) else Decoder
    return kind(folder, *arguments, **options)


def folder_unverified(path: Path) -> Bundle | Adopted:
    """The bundle or adopted packages at `path`; only the description is read."""
    if paths.adopted(path):
        return Adopted(path.resolve(), schema.load(path / schema.FILE))
    return Bundle(path, read_manifest(paths.bundle(path) / paths.BUNDLE))


def folder_options(path: Path) -> Options | AdoptedOptions:
    """The options of a bundle or of adopted packages, whose files are not checked."""
    folder = folder_unverified(path)
    if isinstance(folder, Adopted):
        return options_of(folder.foreign)
    return folder.manifest.options


def folder_identity(path: Path) -> str:
    """The identity of a bundle or of adopted packages, whose files are not checked."""
    return folder_unverified(path).identity
