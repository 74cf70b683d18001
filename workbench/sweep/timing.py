"""Times of calls as raw samples; warm-ups are marked. The times of the portable runtime
are this machine's, never the Neural Engine's.

A call is timed from token ids to logits, and split into layer shards, head and host
(embedding, masks, rope, transfers). The prefill to a depth is timed as a whole. The
compilation, the loading and the first prediction of each shard are samples, too."""

import math
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from workbench.bundle import Options
from workbench.decode import Decoder, Sequences
from workbench.errors import InputError

if TYPE_CHECKING:  # half a second to import, which every first call would wait
    import pandas as pd

WARMUP_CALLS = 2
RAMP_CALLS = 3
CLOCKS = ["value", "cpu_ms", "native_ms"]
"""Columns of `samples`: the fields of `PartTimes`, in their order."""
LAYER_PARTS = {"self_attn": "attention", "gate": "moe", "experts": "moe", "mlp": "mlp"}
"""A module of a decoder layer → the part of the layer."""


def measure_speed(
    decoder: Decoder,
    *,
    depth: int = 0,
    n_gen: int = 16,
    T: int = 1,
    repetitions: int = 3,
    min_tokens: int | None = None,
    min_seconds: float | None = None,
) -> "pd.DataFrame":
    """Times calls of T tokens, `n_gen` tokens in all, with `depth` tokens already in
    the cache.

    On Core ML, untimed calls precede, since the Neural Engine ramps up over about three
    calls.

    Args:
        repetitions: the number of fresh sequences that are prefilled to `depth` and
            then timed.
        min_tokens: further sequences are timed until this number of tokens is reached,
            counted in one sequence of the batch.
        min_seconds: further sequences are timed until this time has passed since the
            first call. The samples of further sequences are whole calls and rates,
            without the parts of a call.

    Returns:
        Rows of the log's `samples`, with one of these phases:
        call (ms): one whole call.
        layer (ms): one shard in a call.
        head, host (ms): in a call.
        prefill (ms): of a sequence. The first one, which compiles, is a warm-up, so
            that a single sequence times no prefill.
        tokens_per_s: of a sequence.
        compile, cold_load, load, first_predict (ms): of a shard.

        Calls and their parts have `cpu_ms`, the CPU time of this thread; all but the
        host have `native_ms`, Core ML's own time (null on other runtimes). `elapsed_s`
        is the time from the first call to the end of this one.

    Raises:
        InputError: see `check_size`.
    """
    calls = check_size(decoder.options, T, depth, n_gen)
    rng, rows = np.random.default_rng(0), []
    if decoder.is_device:
        seqs = decoder.new_sequences()
        for _ in range(RAMP_CALLS):
            seqs.advance(_ids(decoder, rng, T))
    # a sequence ends at max_seq_len: more tokens need more sequences
    sequences = max(repetitions, math.ceil((min_tokens or 0) / (calls * T)))
    size = {"T": T, "depth": depth, "n_gen": n_gen}
    clock = _SequenceClock(decoder, rng, calls, size, time.perf_counter())
    elapsed_s, repetition = 0.0, 0
    while repetition < sequences or elapsed_s < (min_seconds or 0):
        timed = clock.time_sequence(repetition, has_parts=repetition < repetitions)
        rows += timed.rows
        elapsed_s = timed.elapsed_s
        repetition += 1
    for model in (*decoder.layer_shards, *decoder.heads):
        columns = {"shard": model.shard.name, "repetition": 0, "warmup": False}
        for phase, ms in model.loading_ms.items():
            rows.append(columns | {"phase": phase, "value": ms})
    import pandas as pd

    # a runtime that does not compile has no such time
    samples = pd.DataFrame(rows).dropna(subset="value")
    return samples.fillna({"unit": "ms"})


class _TimedSequence(NamedTuple):
    """The measurement of one sequence."""

    rows: list[dict]
    """Rows of the log's `samples`: the prefill, the calls, and last the rate."""
    elapsed_s: float
    """Seconds from the start of the measurement to the end of this sequence."""


@dataclass(frozen=True)
class _SequenceClock:
    """Times sequences of one measurement.

    Attributes:
        calls: the number of timed calls in a sequence, after `WARMUP_CALLS` warm-ups.
        size: the columns T, depth and n_gen of `samples`.
        start: `time.perf_counter` before the first sequence.
    """

    decoder: Decoder
    rng: np.random.Generator
    calls: int
    size: dict[str, int]
    start: float

    def time_sequence(self, repetition: int, has_parts: bool) -> _TimedSequence:
        """Times a fresh sequence.

        Args:
            has_parts: whether the parts of a call are rows, too.
        """
        T, depth = self.size["T"], self.size["depth"]
        rows, seqs = [], self.decoder.new_sequences()
        sequence_columns = {"repetition": repetition, "n_prompt": depth}
        if depth:
            prefill_start = time.perf_counter()
            seqs.prefill(_ids(self.decoder, self.rng, depth))
            ms = (time.perf_counter() - prefill_start) * 1e3
            prefill = {"phase": "prefill", "value": ms, "warmup": repetition == 0}
            rows.append(sequence_columns | prefill)
        total_ms = 0.0
        first_order = repetition * (WARMUP_CALLS + self.calls)
        for call in range(WARMUP_CALLS + self.calls):
            ids = _ids(self.decoder, self.rng, T)
            times = _time_call(self.decoder, seqs, ids)
            is_warmup = call < WARMUP_CALLS
            if not is_warmup:
                total_ms += times.whole["value"]
            call_columns = {
                **sequence_columns,
                **self.size,
                "order": first_order + call,
                "elapsed_s": time.perf_counter() - self.start,
                "warmup": is_warmup,
            }
            rows.append(call_columns | times.whole)
            if has_parts:
                rows += [call_columns | part for part in times.parts]
        rate = self.calls * T * self.decoder.options.batch / total_ms * 1e3
        rate_row = {"phase": "tokens_per_s", "value": rate, "unit": "tok/s"}
        # the rate has the order and the time of the last call
        rows.append(call_columns | rate_row)
        return _TimedSequence(rows, call_columns["elapsed_s"])


def check_size(options: Options, T: int, depth: int, n_gen: int) -> int:
    """The number of calls of T tokens that a measurement times.

    Raises:
        InputError: the bundle has no programs of this T, or its cache cannot hold the
            tokens.
    """
    S, t_max = options.max_seq_len, options.t_max
    if not 1 <= T <= t_max:
        needed = f"a number from 1 to {t_max}, the most tokens of a call of the bundle"
        step = f"lower T, or export with --tokens 1-{T}" if T > 0 else "raise T"
        raise InputError("T", str(T), needed, step)
    calls = math.ceil(n_gen / T)
    tokens = (calls + WARMUP_CALLS) * T
    if depth + tokens > S:
        actual = f"{depth} + {tokens} tokens in calls of T = {T}"
        step = "measure fewer tokens, or export with a larger --max-seq-len"
        needed = f"at most max_seq_len = {S}"
        raise InputError("depth and n_gen", actual, needed, step)
    return calls


def _ids(decoder: Decoder, rng, count: int) -> list[list[int]]:
    """`count` random token ids for each sequence of the batch."""
    shape = decoder.options.batch, count
    return rng.integers(0, decoder.manifest.dims.V, shape).tolist()


class _CallTimes(NamedTuple):
    """The times of one call: columns of `samples`, in ms."""

    whole: dict
    """The phase `call`."""
    parts: list[dict]
    """The phase `layer` of each shard of layers, then `head` and `host`, which is the rest
    of the call."""


def _time_call(decoder: Decoder, seqs: Sequences, ids: list[list[int]]) -> _CallTimes:
    """Times one call of the tokens `ids` [batch, T]."""
    start = time.thread_time()
    _, times = seqs.step(ids)
    call_cpu_ms = (time.thread_time() - start) * 1e3
    ms, cpu_ms, native_ms = zip(*times.parts)
    whole = {"phase": "call", "value": times.total, "cpu_ms": call_cpu_ms}
    whole["native_ms"] = None if None in native_ms else sum(native_ms)
    names = [{"phase": "layer", "shard": m.shard.name} for m in decoder.layer_shards]
    names.append({"phase": "head"})
    parts = [
        name | dict(zip(CLOCKS, clocks)) for name, clocks in zip(names, times.parts)
    ]
    host = {"phase": "host", "value": times.total - sum(ms)}
    host["cpu_ms"] = call_cpu_ms - sum(cpu_ms)
    return _CallTimes(whole, [*parts, host])


def layer_table(samples: "pd.DataFrame", decoder: Decoder) -> "pd.DataFrame":
    """The log's `layers`: the median ms of each decoder layer (the time of its shard
    over the shard's number of layers), the MAD, the number of calls, and the medians of
    the CPU time and of Core ML's own time."""
    import pandas as pd

    timed = samples[(samples["phase"] == "layer") & ~samples["warmup"]]
    rows = []
    for model in decoder.layer_shards:
        layers = model.shard.layer_range
        of_shard = timed[timed["shard"] == model.shard.name]
        ms = of_shard[CLOCKS].astype(float) / len(layers)
        row = of_shard[["shard", "T", "depth"]].iloc[0].to_dict()
        row |= {"n": len(of_shard)}
        row |= ms.median().rename({"value": "layer_ms"})
        # layers of one shard share its figures: Core ML times shards
        row["mad_ms"] = (ms["value"] - row["layer_ms"]).abs().median()
        rows += [{"layer": layer} | row for layer in layers]
    return pd.DataFrame(rows)


class _OperationClock:
    """A hook of `Sequences.advance` that times each operation from the one before, or from
    `start`.

    Attributes:
        rows: call, module, op and ms of each operation.
    """

    def __init__(self):
        self.rows: list[dict] = []
        self.call = 0
        self.last_time = 0.0

    def start(self, call: int) -> None:
        """Begins the call of this number."""
        self.call = call
        self.last_time = time.perf_counter()

    def __call__(self, shard, op, outputs) -> None:
        ms = (time.perf_counter() - self.last_time) * 1e3
        path = shard.modules.get(op.outputs[0][0] if op.outputs else "", "")
        # the path without its layer: layers.3.mlp.down_proj → mlp.down_proj
        module = re.sub(r"^\w+\.\d+\.?", "", path) or "residual"
        row = {"call": self.call, "module": module, "op": op.kind, "ms": ms}
        self.rows.append(row)
        self.last_time = time.perf_counter()


def profile(decoder: Decoder, *, depth: int = 0, calls: int = 8) -> "pd.DataFrame":
    """Milliseconds per MIL operation of a portable call of one token, by source module.

    The time of an operation is the gap between two calls of the hook, which it
    includes. The first call is a warm-up and is left out. All experts are loaded first.
    The sequences of the decoder do not change.

    Returns:
        Columns module (such as `self_attn.q_proj`), op, ms, part (attention, moe, mlp
        or rest). `ms` is the median over calls of the sum over layers and equal
        operations.
    """
    import pandas as pd

    for key in decoder.experts.shards:
        decoder.experts.model(*key)
    rng, seqs = np.random.default_rng(0), decoder.new_sequences()
    if depth:
        seqs.prefill(_ids(decoder, rng, depth))
    clock = _OperationClock()
    for call in range(calls + 1):
        ids = _ids(decoder, rng, 1)
        clock.start(call)
        seqs.advance(ids, clock)
    rows = pd.DataFrame(clock.rows).query("call > 0")
    sums = rows.groupby(["call", "module", "op"])["ms"].sum()
    medians = sums.groupby(["module", "op"]).median().reset_index()
    parts = medians["module"].str.split(".").str[0].map(LAYER_PARTS)
    return medians.assign(part=parts.fillna("rest"))
