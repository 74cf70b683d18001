"""Times of calls as raw samples, warm-ups marked. A portable run's times are this
machine's, never the Neural Engine's.

A call is timed from token ids to logits and split into layer shards, head and host
(embedding, masks, rope, transfers). The prefill to a depth is timed as a whole.
Compilation, loading and first prediction of each shard are samples of their own."""

import math
import time
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from workbench.bundle import Options
from workbench.decode import Decoder, Sequences
from workbench.errors import InputError
from workbench.log.machine import thermal_level

if TYPE_CHECKING:  # half a second to import, which every first call would wait
    import pandas as pd

WARMUP_CALLS = 2
RAMP_CALLS = 3
PRESSURE_EVERY_S = 5
_PARTS = ("layer", "head", "host")  # phases of a call
SIZES = ("T", "depth", "n_gen", "repetitions", "min_tokens", "min_seconds")
"""Arguments of `measure_speed`."""
NOT_TIMED = "loading, warm-up calls, picking a token, reading and writing files"


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
        `head`, `host` in ms, `prefill` in ms (the first one a warm-up) and
        `tokens_per_s` per repetition; `compile`, `cold_load`, `load` and
        `first_predict` per shard. A call and its parts have `cpu_ms`, CPU time of this
        thread, and but for the host `native_ms`, Core ML's own time (null on other
        runtimes). ``elapsed_s`` is the time from the start to the end of what a row
        measures. With `min_seconds`, `thermal_pressure` follows a sequence every few
        seconds on a Mac: its index in `log.machine.THERMAL_PRESSURES`.
    """
    calls = check_size(decoder.options, T, depth, n_gen)
    if decoder.is_device:
        seqs = decoder.fresh()
        for _ in range(RAMP_CALLS):
            decoder.advance(seqs, _ids(decoder, np.random.default_rng(0), T))
    rng = np.random.default_rng(0)
    rows = []
    seconds = 0.0
    pressure_s = 0.0
    began = time.perf_counter()
    setting = {"T": T, "depth": depth, "n_gen": n_gen}
    sequences = max(repetitions, math.ceil((min_tokens or 0) / (calls * T)))
    for repetition in count():
        if repetition >= sequences and seconds >= (min_seconds or 0):
            import pandas as pd

            return pd.DataFrame(rows + _loading(decoder))
        sequence = _timed_sequence(decoder, rng, began, repetition, calls, setting)
        if depth:
            sequence[0]["warmup"] = repetition == 0 < repetitions - 1
        if repetition >= repetitions:
            sequence = [row for row in sequence if row["phase"] not in _PARTS]
        rows += sequence
        seconds = sequence[-1]["elapsed_s"]
        if min_seconds and seconds - pressure_s >= PRESSURE_EVERY_S:
            pressure_s = seconds
            rows += _pressure(sequence[-1])


def _pressure(last: dict) -> list[dict]:
    """The thermal pressure now, at the time of the `last` sample; none without an
    answer of the system."""
    level = thermal_level()
    if level is None:
        return []
    return [last | {"phase": "thermal_pressure", "value": level, "unit": "level"}]


def _timed_sequence(
    decoder: Decoder, rng, began: float, repetition: int, calls: int, setting: dict
) -> list[dict]:
    """Samples of a fresh sequence: its prefill to a depth, if any, warm-up calls, calls
    and its rate."""
    T = setting["T"]
    depth = setting["depth"]
    common = {"repetition": repetition, "n_prompt": depth, "unit": "ms"}
    rows = []
    ms = []
    first = repetition * (WARMUP_CALLS + calls)
    seqs = decoder.fresh()
    if depth:
        start = time.perf_counter()
        decoder.prefill(_ids(decoder, rng, depth), seqs=seqs)
        end = time.perf_counter()
        prefill = {
            "phase": "prefill",
            "value": (end - start) * 1e3,
            "elapsed_s": end - began,
            "order": first,
        }
        rows.append(common | prefill)
    for call in range(WARMUP_CALLS + calls):
        phases = _timed_call(decoder, seqs, _ids(decoder, rng, T))
        about = common | setting
        about["order"] = first + call
        about["warmup"] = call < WARMUP_CALLS
        about["elapsed_s"] = time.perf_counter() - began
        rows += [about | row for row in phases]
        ms.append(phases[0]["value"])
    rate = calls * T * decoder.options.batch / sum(ms[WARMUP_CALLS:]) * 1e3
    return [*rows, about | {"phase": "tokens_per_s", "value": rate, "unit": "tok/s"}]


def check_size(
    options: Options, T: int, depth: int, n_gen: int, subject: str = ""
) -> int:
    """How many calls of T tokens a measurement times; refuses what the bundle's cache
    or T cannot hold. `subject` goes before the message's own."""
    S = options.max_seq_len
    t_max = options.t_max
    calls = -(-n_gen // T)
    if not 1 <= T <= t_max:
        raise InputError(
            f"{subject}T", str(T), f"1 to t_max = {t_max}", "export with more --tokens"
        )
    if depth + (calls + WARMUP_CALLS) * T > S:
        raise InputError(
            f"{subject}depth and n_gen",
            f"{depth} + {(calls + WARMUP_CALLS) * T} tokens in calls of T = {T}",
            f"at most max_seq_len = {S}",
            "measure fewer tokens, or export with a larger --max-seq-len",
        )
    return calls


def _loading(decoder: Decoder) -> list[dict]:
    """Samples of compiling, loading and first prediction per shard, where the runtime
    has them."""
    rows = []
    for model in (*decoder.layers, *decoder.heads):
        for phase, value in model.loading_ms.items():
            if value is not None:
                row = {"phase": phase, "shard": model.shard.name, "value": value}
                rows.append(row | {"repetition": 0, "warmup": False, "unit": "ms"})
    return rows


def _ids(decoder: Decoder, rng, count: int) -> list[list[int]]:
    shape = decoder.options.batch, count
    return rng.integers(0, decoder.manifest.dims.V, shape).tolist()


def _timed_call(decoder: Decoder, seqs: Sequences, ids: list[list[int]]) -> list[dict]:
    """The phases of one call, ms: the whole call, each layer shard, the head, and the
    host."""
    start = time.thread_time()
    _, times = decoder.step(seqs, ids)
    cpu = (time.thread_time() - start) * 1e3
    shards = [*(model.shard.name for model in decoder.layers), None]
    ms = [*times.layers, times.head]
    native = None if None in times.native_ms else sum(times.native_ms)
    rows = [{"phase": "call", "value": times.total, "cpu_ms": cpu, "native_ms": native}]
    for shard, *part in zip(shards, ms, times.cpu_ms, times.native_ms, strict=True):
        row = dict(zip(("value", "cpu_ms", "native_ms"), part))
        rows.append(row | {"phase": "layer" if shard else "head", "shard": shard})
    host = times.total - sum(ms)
    rows.append({"phase": "host", "value": host, "cpu_ms": cpu - sum(times.cpu_ms)})
    return rows


def layer_table(samples: "pd.DataFrame", decoder: Decoder) -> "pd.DataFrame":
    """The log's `layers`: median ms per decoder layer (a shard's time over its layers),
    MAD and n, and the medians of its CPU time and of Core ML's own."""
    import pandas as pd

    timed = samples[(samples["phase"] == "layer") & ~samples["warmup"]]
    spans = {m.shard.name: range(*(m.shard.layers or (0, 0))) for m in decoder.layers}
    rows = []
    for (shard, T, depth), times in timed.groupby(["shard", "T", "depth"], sort=False):
        layers = spans[shard]  # none of a router
        each = times[["value", "cpu_ms", "native_ms"]].astype(float) / len(layers)
        median = each.median()
        row = {"shard": shard, "T": T, "depth": depth, "n": len(each)}
        row |= {"layer_ms": median.pop("value"), **median}
        row["mad_ms"] = (each["value"] - row["layer_ms"]).abs().median()
        rows += [{"layer": layer} | row for layer in layers]
    return pd.DataFrame(rows)


def profile(
    decoder: Decoder, *, depth: int = 0, calls: int = 8, seed: int = 0
) -> "pd.DataFrame":
    """Milliseconds per MIL operation of a portable call of one token, by layer and
    source module.

    Each time is the gap between two operations, hook included. The first call is a
    warm-up and is left out. Experts are loaded before. The decoder's own sequences stay
    as they were.

    Returns:
        Columns layer, module (`self_attn.q_proj`), op, ms, part (see `part_of`):
        medians over
        calls, summed over equal operations.
    """
    import pandas as pd

    rng = np.random.default_rng(seed)
    rows = []
    last = 0.0

    def clock(call, shard, op, outputs):
        nonlocal last
        ms = (time.perf_counter() - last) * 1e3
        rows.append((call, *_module(shard, op), op.kind, ms))
        last = time.perf_counter()

    for key in decoder.experts.shards:
        decoder.experts.model(*key)
    seqs = decoder.fresh()
    if depth:
        decoder.prefill(_ids(decoder, rng, depth), seqs=seqs)
    for call in range(calls + 1):
        ids = _ids(decoder, rng, 1)
        last = time.perf_counter()
        decoder.advance(seqs, ids, partial(clock, call))
    frame = pd.DataFrame(rows, columns=["call", "layer", "module", "op", "ms"])
    keys = ["layer", "module", "op"]
    timed = frame[frame["call"] > 0].groupby(["call", *keys], as_index=False)
    each = timed["ms"].sum()  # whichever expert ran
    medians = each.groupby(keys, as_index=False)["ms"].median()
    return medians.assign(part=medians["module"].map(part_of))


def part_of(module: str) -> str:
    """The part of a decoder layer (attention, moe, mlp or rest) of a module path such
    as `self_attn.q_proj`."""
    parts = {"self_attn": "attention", "gate": "moe", "experts": "moe", "mlp": "mlp"}
    return parts.get(module.split(".")[0], "rest")


def _module(shard, op) -> tuple[int, str]:
    """The decoder layer and the module path within it that an operation was traced
    from."""
    path = shard.modules.get(op.outputs[0][0] if op.outputs else "", "").split(".")
    layer = shard.layers[0]
    if len(path) > 1 and path[1].isdigit():
        layer = int(path[1])
        path = path[2:]
    return layer, ".".join(path) or "residual"
