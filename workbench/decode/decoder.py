"""Token ids in, logits and tokens out: one state per shard and sequence batch, advanced chunk by chunk."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path

import numpy as np

from workbench import runtime as runtimes
from workbench.bundle import Bundle, Shard
from workbench.bundle.contract import HIDDEN, LOGITS, ROUTER_STATE, ROUTER_STATE_OUT, X
from workbench.errors import InputError

from .experts import Experts
from .host import Host


def greedy(logits: np.ndarray) -> int:
    """The most likely token; the lowest id among equals."""
    return int(np.argmax(logits))


@dataclass
class Times:
    """Milliseconds of one call: every layer shard, every head slice, and the whole call on the host's clock."""

    layers: list[float] = field(default_factory=list)
    head: float = 0.0
    total: float = 0.0


@dataclass
class Record:
    """One generated token: its id, the logits [V] it was picked from, and what the call that made them took."""

    token: int
    logits: np.ndarray
    times: Times


def literal(gate: Callable) -> Callable:
    """Decorates a gate, a function whose first argument is a decoder: it judges the literal graph, see `Decoder.literal`."""

    @wraps(gate)
    def judged(decoder: "Decoder", *arguments, **options):
        with decoder.literal():
            return gate(decoder, *arguments, **options)

    return judged


class Decoder:
    """Runs a bundle. `begin` → `prefill` → `decode_one_token`, or `stream` for all three.

    Args:
        bundle: an opened bundle or its path.
        runtime: `auto`, `portable` or `coreml`.
        precision: arithmetic of the portable runtime (`declared`, `exact`, `narrow`).
        fast: whether `declared` may take the portable decode path; gates run the literal graph, `fast=False`.
        compute_units: Core ML's compute units.
        hints: Core ML's optimization hints, such as {"reshapeFrequency": "Infrequent"}.
    """

    def __init__(self, bundle: Bundle | str | Path, runtime: str = "auto", precision: str = "declared",
                 fast: bool = True, compute_units: str = "CPU_AND_NE", hints: dict | None = None):  # fmt: skip
        self.bundle = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
        self.runtime, self.precision, self.fast = runtimes.resolve(runtime), precision, fast
        self.compute_units, self.hints = compute_units, hints or {}
        self.manifest, self.options = self.bundle.manifest, self.bundle.manifest.options
        self.host = Host(self.manifest)

        self.layers = [self._load(s) for s in self.manifest.shards if s.kind in ("layers", "router")]
        self.heads = [self._load(s) for s in self.bundle.shards("head")]
        self.experts = Experts(self.bundle, self._load, self.plane)
        self.begin()

    def _load(self, shard: Shard) -> runtimes.Model:
        return runtimes.load(self.bundle, shard, self.runtime, precision=self.precision,
                             fast=self.fast, compute_units=self.compute_units, hints=self.hints)  # fmt: skip

    @contextmanager
    def literal(self) -> Iterator["Decoder"]:
        """Within, the portable runtime executes the literal graph, as with `fast=False`; sequences go on as they are."""
        models = [*self.layers, *self.heads, *self.experts.models.values()] if self.runtime == "portable" else []
        held, before = [(model, model.fast) for model in models], self.fast
        self.fast = False
        for model in models:
            model.fast = None
        try:
            yield self
        finally:
            self.fast = before
            for model, fast in held:
                model.fast = fast

    def begin(self) -> None:
        """Starts fresh sequences: one make_state per shard."""
        self.states = [model.make_state() for model in self.layers]
        self.offsets = np.zeros(self.options.batch, int)
        self.times = Times()

    def prefill(self, ids, tile: int | Sequence[int] | None = None) -> np.ndarray:
        """Continues each sequence by its prompt, `tile` tokens a call (default t_max; a sequence: one size after another).

        Args:
            ids: token ids, or one list of ids per sequence when batch > 1.

        Returns:
            Logits after the last token: [V], or [B, V] when batch > 1.
        """
        rows = self._rows(ids)
        self.host.check(self.offsets, np.array([len(r) for r in rows]))
        hidden, done = None, 0
        for size in _tiles(max(map(len, rows)), tile or self.options.t_max):
            chunk = [r[done : done + size] for r in rows]
            hidden = self._keep_last(hidden, self.advance(chunk, size), chunk)
            done += size
        return self._shape(self.logits(hidden))

    def decode_one_token(self, token) -> np.ndarray:
        """Continues each sequence by one token; returns logits [V] (or [B, V])."""
        start = time.perf_counter()
        self.times = Times()
        tokens = [token] if np.ndim(token) == 0 else list(token)
        logits = self.logits(self.advance([[t] for t in tokens], 1)[:, :, :1])
        self.times.total = (time.perf_counter() - start) * 1e3
        return self._shape(logits)

    def stream(self, ids: Sequence[int], max_new: int, *, stop: Sequence[int] | None = None,
               pick: Callable[[np.ndarray], int] = greedy) -> Iterator[Record]:  # fmt: skip
        """begin + prefill + decode: yields one record per new token, ending after a stop token or `max_new`.

        `stop` defaults to the bundle's end-of-sequence tokens.
        """
        self._fits(len(ids), max_new)
        stop = set(self.manifest.tokens.eos if stop is None else stop)
        self.begin()
        logits, times = self.prefill(ids), self.times
        for i in range(max_new):
            token = pick(logits)
            yield Record(token, logits, times)
            if token in stop or i == max_new - 1:
                return
            logits = self.decode_one_token(token)
            times = self.times

    def generate(self, ids: Sequence[int], max_new: int, **options) -> list[int]:
        """The tokens of `stream`, drained."""
        return [record.token for record in self.stream(ids, max_new, **options)]

    def advance(self, chunk: list[Sequence[int]], T: int) -> np.ndarray:
        """Runs every layer once over `chunk` (ids per sequence, at most T each) and moves the positions on.

        Returns:
            Hidden states [B, C, T].
        """
        T = self.options.t_max if self.options.t == "fixed" else T
        counts = np.array([len(c) for c in chunk])
        ids = np.zeros((len(chunk), T), int)
        for slot, tokens in enumerate(chunk):
            ids[slot, : len(tokens)] = tokens
        io = self.host.inputs(self.offsets, counts, T)
        io[X] = self.plane(self.bundle.embed(ids).transpose(0, 2, 1))
        for index in range(len(self.layers)):
            start = time.perf_counter()
            io = self.run_layers(index, io, counts)
            self.times.layers.append((time.perf_counter() - start) * 1e3)
        self.offsets = self.offsets + counts
        return io[X].reshape(len(chunk), -1, T)

    def run_layers(self, index: int, io: dict[str, np.ndarray], counts: np.ndarray) -> dict[str, np.ndarray]:
        """Runs layer shard `index` on its state, routed experts included.

        Args:
            io: `Host.inputs` of the call and `x`; for a later shard, `router_state` where the family has one.
            counts: [B] valid columns.

        Returns:
            `io` for the next shard: `x` is this one's hidden output, `router_state` the state it hands on.
        """
        model, shard = self.layers[index], self.layers[index].shard
        made = model.predict({name: io[name] for name in shard.inputs}, self.states[index])
        hidden = made[HIDDEN] if HIDDEN in made else self.experts.run(shard.layers[0], made, counts)
        return io | {X: hidden} | ({ROUTER_STATE: made[ROUTER_STATE_OUT]} if ROUTER_STATE_OUT in made else {})

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """Hidden states [B, C, T] → logits [B, T, V], t_max columns a call."""
        start, parts = time.perf_counter(), []
        for first in range(0, hidden.shape[2], self.options.t_max):
            x = self.plane(hidden[:, :, first : first + self.options.t_max])
            used = x.shape[2] * x.shape[3]
            if self.options.t == "fixed" and used < self.options.t_max:
                x = self.plane(np.pad(hidden[:, :, first:], ((0, 0), (0, 0), (0, self.options.t_max - used))))
            slices = [model.predict({X: x})[LOGITS] for model in self.heads]
            parts.append(np.concatenate([s.reshape(*s.shape[:2], -1)[:, :, :used] for s in slices], axis=1))
        self.times.head = (time.perf_counter() - start) * 1e3
        return np.concatenate(parts, axis=2).transpose(0, 2, 1)

    def plane(self, hidden: np.ndarray) -> np.ndarray:
        """[B, C, T] in the bundle's layout: [B, C, T, 1] or [B, C, 1, T]."""
        hidden = np.ascontiguousarray(hidden)
        return hidden[..., None] if self.options.layout == "bct1" else hidden[:, :, None]

    def _rows(self, ids) -> list[list[int]]:
        batch, V = self.options.batch, self.manifest.dims.V
        rows = [list(ids)] if len(ids) and np.ndim(ids[0]) == 0 else [list(r) for r in ids]
        if len(rows) != batch or not all(rows):
            raise InputError("prompt", f"{len(rows)} sequences of {[len(r) for r in rows]} tokens",
                             f"{batch} of at least one token", "give one prompt per sequence of the batch")  # fmt: skip
        if any(not 0 <= t < V for r in rows for t in r):
            raise InputError("prompt", f"token ids up to {max(map(max, rows))}", f"ids from 0 to {V - 1}",
                             "encode the prompt with this bundle's tokenizer")  # fmt: skip
        return rows

    def _fits(self, prompt: int, max_new: int) -> None:
        S = self.options.max_seq_len
        if prompt + max(max_new - 1, 0) > S:
            raise InputError("prompt and new tokens", f"{prompt} + {max_new}", f"at most max_seq_len = {S} positions",
                             "shorten them, or export with a larger --max-seq-len")  # fmt: skip

    def _keep_last(self, before, hidden: np.ndarray, chunk) -> np.ndarray:
        """Hidden state of each sequence's last valid token so far, [B, C, 1]."""
        last = np.zeros((*hidden.shape[:2], 1), np.float32) if before is None else before
        for slot, tokens in enumerate(chunk):
            if tokens:
                last[slot, :, 0] = hidden[slot, :, len(tokens) - 1]
        return last

    def _shape(self, logits: np.ndarray) -> np.ndarray:
        return logits[0, -1] if self.options.batch == 1 else logits[:, -1]


def _tiles(total: int, tile: int | Sequence[int]) -> Iterator[int]:
    """Sizes that cover `total` tokens, the last one partial; a sequence of sizes is cycled."""
    sizes, i = [tile] if np.ndim(tile) == 0 else list(tile), 0
    while total > 0:
        size = min(sizes[i % len(sizes)], total)
        yield size
        total, i = total - size, i + 1
