"""Times of calls as raw samples, warm-ups marked. A portable run's times are this
machine's, never the Neural Engine's.

A call is timed from token ids to logits and split into layer shards, head and host
(embedding, masks, rope, transfers). The prefill to a depth is timed as a whole.
Compilation, loading and first prediction of each shard are samples of their own."""

import math
import re
import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from workbench.bundle import Options
from workbench.decode import Decoder, Sequences
from workbench.errors import InputError

if TYPE_CHECKING:  # half a second to import, which every first call would wait
    import pandas as pd

WARMUP_CALLS = 2
RAMP_CALLS = 3
SIZES = ("T", "depth", "n_gen", "repetitions", "min_tokens", "min_seconds")
"""Arguments of `measure_speed`."""
CLOCKS = ["value", "cpu_ms", "native_ms"]
PARTS = {"self_attn": "attention", "gate": "moe", "experts": "moe", "mlp": "mlp"}
"""Modules of a decoder layer, and the part of it that they are."""


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
        repetitions: fresh sequences, each prefilled to `depth` and then timed.
        min_tokens, min_seconds: further sequences follow until as many tokens of one
            sequence of the batch are timed, and as much time has passed since the first
            call; of these sequences only whole calls and rates are samples.

    Returns:
        The log's `samples`: phases `call` (one whole call), `layer` (one per shard),
        `head`, `host` in ms, `prefill` in ms (the first one, which compiles, is a
        warm-up; with one sequence there is no other) and
        `tokens_per_s` per repetition; `compile`, `cold_load`, `load` and
        `first_predict` per shard. A call and its parts have `cpu_ms`, CPU time of this
        thread, and but for the host `native_ms`, Core ML's own time (null on other
        runtimes). ``elapsed_s`` is the time from the start to the end of a call.
    """
    calls = check_size(decoder.options, T, depth, n_gen)
    rng, rows = np.random.default_rng(0), []
    if decoder.is_device:
        seqs = decoder.new_sequences()
        for _ in range(RAMP_CALLS):
            seqs.advance(_ids(decoder, rng, T))
    sequences = max(repetitions, math.ceil((min_tokens or 0) / (calls * T)))
    began, elapsed_s = time.perf_counter(), 0.0
    repetition = order = 0
    while repetition < sequences or elapsed_s < (min_seconds or 0):
        seqs, about = (
            decoder.new_sequences(),
            {"repetition": repetition, "n_prompt": depth},
        )
        if depth:
            start = time.perf_counter()
            seqs.prefill(_ids(decoder, rng, depth))
            prefill = {"phase": "prefill", "value": (time.perf_counter() - start) * 1e3}
            prefill["warmup"] = repetition == 0
            rows.append(about | prefill)
        about |= {"T": T, "depth": depth, "n_gen": n_gen}
        total_ms = 0.0
        for call in range(WARMUP_CALLS + calls):
            phases = _timed_call(decoder, seqs, _ids(decoder, rng, T))
            elapsed_s = time.perf_counter() - began
            if call >= WARMUP_CALLS:
                total_ms += phases[0]["value"]
            about |= {"order": order, "elapsed_s": elapsed_s}
            about["warmup"] = call < WARMUP_CALLS
            kept = phases if repetition < repetitions else phases[:1]
            rows += [about | phase for phase in kept]
            order += 1
        rate = calls * T * decoder.options.batch / total_ms * 1e3
        rows.append(about | {"phase": "tokens_per_s", "value": rate, "unit": "tok/s"})
        repetition += 1
    for model in (*decoder.layers, *decoder.heads):
        about = {"shard": model.shard.name, "repetition": 0, "warmup": False}
        for phase, ms in model.loading_ms.items():
            rows.append(about | {"phase": phase, "value": ms})
    import pandas as pd

    samples = pd.DataFrame(rows).dropna(subset="value")
    return samples.fillna({"unit": "ms"})


def check_size(options: Options, T: int, depth: int, n_gen: int) -> int:
    """How many calls of T tokens a measurement times; refuses what the bundle's cache
    or T cannot hold."""
    S, t_max = options.max_seq_len, options.t_max
    if not 1 <= T <= t_max:
        needed, step = f"1 to t_max = {t_max}", "export with more --tokens"
        raise InputError("T", str(T), needed, step)
    calls = -(-n_gen // T)
    timed = (calls + WARMUP_CALLS) * T
    if depth + timed > S:
        found = f"{depth} + {timed} tokens in calls of T = {T}"
        step = "measure fewer tokens, or export with a larger --max-seq-len"
        needed = f"at most max_seq_len = {S}"
        raise InputError("depth and n_gen", found, needed, step)
    return calls


def _ids(decoder: Decoder, rng, count: int) -> list[list[int]]:
    shape = decoder.options.batch, count
    return rng.integers(0, decoder.manifest.dims.V, shape).tolist()


def _timed_call(decoder: Decoder, seqs: Sequences, ids: list[list[int]]) -> list[dict]:
    """The phases of one call, ms: the whole call, each layer shard, the head, and the
    host."""
    start = time.thread_time()
    _, times = seqs.step(ids)
    cpu = (time.thread_time() - start) * 1e3
    ms, cpu_ms, native_ms = zip(*times.parts)
    native = None if None in native_ms else sum(native_ms)
    parts = [{"phase": "layer", "shard": m.shard.name} for m in decoder.layers]
    parts.append({"phase": "head"})
    return [
        {"phase": "call", "value": times.total, "cpu_ms": cpu, "native_ms": native},
        *(part | dict(zip(CLOCKS, each)) for part, each in zip(parts, times.parts)),
        {"phase": "host", "value": times.total - sum(ms), "cpu_ms": cpu - sum(cpu_ms)},
    ]


def layer_table(samples: "pd.DataFrame", decoder: Decoder) -> "pd.DataFrame":
    """The log's `layers`: median ms per decoder layer (a shard's time over its layers),
    MAD and n, and the medians of its CPU time and of Core ML's own."""
    import pandas as pd

    timed = samples[(samples["phase"] == "layer") & ~samples["warmup"]]
    rows = []
    for model in decoder.layers:
        layers = range(*model.shard.layers)
        own = timed[timed["shard"] == model.shard.name]
        each = own[CLOCKS].astype(float) / len(layers)
        row = own[["shard", "T", "depth"]].iloc[0].to_dict() | {"n": len(own)}
        row |= each.median().rename({"value": "layer_ms"})
        row["mad_ms"] = (each["value"] - row["layer_ms"]).abs().median()
        rows += [{"layer": layer} | row for layer in layers]
    return pd.DataFrame(rows)


def profile(decoder: Decoder, *, depth: int = 0, calls: int = 8) -> "pd.DataFrame":
    """Milliseconds per MIL operation of a portable call of one token, by source module.

    Each time is the gap between two operations, hook included. The first call is a
    warm-up and is left out. Experts are loaded before. The decoder's own sequences stay
    as they were.

    Returns:
        Columns module (`self_attn.q_proj`), op, ms, part (attention, moe, mlp or rest):
        medians over calls of the sums over layers and equal operations.
    """
    import pandas as pd

    rows = []

    def clock(call, shard, op, outputs):
        nonlocal last
        ms = (time.perf_counter() - last) * 1e3
        path = shard.modules.get(op.outputs[0][0] if op.outputs else "", "")
        module = re.sub(r"^\w+\.\d+\.?", "", path) or "residual"
        rows.append({"call": call, "module": module, "op": op.kind, "ms": ms})
        last = time.perf_counter()

    for key in decoder.experts.shards:
        decoder.experts.model(*key)
    rng, seqs = np.random.default_rng(0), decoder.new_sequences()
    if depth:
        seqs.prefill(_ids(decoder, rng, depth))
    for call in range(calls + 1):
        ids, last = _ids(decoder, rng, 1), time.perf_counter()
        seqs.advance(ids, partial(clock, call))
    timed = pd.DataFrame(rows).query("call > 0").groupby(["call", "module", "op"])["ms"]
    # whichever expert ran
    medians = timed.sum().groupby(["module", "op"]).median().reset_index()
    parts = medians["module"].str.split(".").str[0].map(PARTS)
    return medians.assign(part=parts.fillna("rest"))
