"""What a stored cache saves: time to the first token cold, warm and hot; bytes;
bandwidths against a plain copy and a plain file. Every round times all of them in turn.
Not timed: loading the bundle, the first token of a process.

"warm" reads the snapshot from the file system, whose cache may hold it: it is a disk's
time only when the disk is slow."""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from workbench.benchmarks.stopwatch import bench_row, in_turn, seconds
from workbench.decode import Decoder
from workbench.errors import InputError
from workbench.prompt_cache import Store


def bench_reuse(
    decoder: Decoder,
    *,
    contexts: Sequence[int] = (256, 512, 1024, 2048),
    rounds: int = 5,
    progress: bool = False,
) -> list[dict]:
    """Rows of `workbench bench reuse`; a context of n means a prompt of n tokens, n − 1
    of them in the store.

    Rows by context: `ttft_warm_ms_n`, `ttft_hot_ms_n` against cold. At the largest:
    `q4_bytes` against fp16; `restore` and `snapshot` in bytes of the runtime's state
    per second against a copy of arrays of those sizes; `save` and `read` in bytes of
    the file per second against a plain, synced file of that size."""
    from tqdm.auto import tqdm

    S, V = decoder.options.max_seq_len, decoder.manifest.dims.V
    if max(contexts) > S or min(contexts) < 2:
        raise InputError(
            "contexts",
            f"{list(contexts)}",
            f"2 to max_seq_len = {S} tokens",
            "export with a larger --max-seq-len",
        )
    rng, rows = np.random.default_rng(0), []
    bar = tqdm(contexts, desc="bench reuse", unit="context", disable=not progress)
    with tempfile.TemporaryDirectory() as folder:
        for n in bar:
            store = Store(folder, decoder, hot_bytes=1 << 34)
            times = _ttft(decoder, store, rng.integers(0, V, n).tolist(), rounds)
            cold = "ms", "cold", times.pop("cold")
            for kind, ms in times.items():
                rows.append(bench_row(f"ttft_{kind}_ms_{n}", ms, *cold))
        return rows + _bytes_and_bandwidths(decoder, store, rounds)


def samples(rows: list[dict]) -> pd.DataFrame:
    """The raw times to the first token behind benchmark rows: ``temperature``,
    ``context``, ``ms``."""
    times = []
    for row in (r for r in rows if r["name"].startswith("ttft_")):
        _, kind, _, context = row["name"].split("_")
        sides = [("cold", row["peer_samples"])] * (kind == "warm") + [
            (kind, row["samples"])
        ]
        times += [
            (temperature, int(context), ms)
            for temperature, values in sides
            for ms in values
        ]
    return pd.DataFrame(times, columns=["temperature", "context", "ms"])


def _ttft(
    decoder: Decoder, store: Store, ids: list[int], rounds: int
) -> dict[str, list[float]]:
    """ms from a prompt's ids to its first token, by temperature; the prefill that fills
    the store, one warm and one hot start go before."""
    decoder.begin()
    decoder.prefill(ids[:-1])
    store.save("session", decoder.snapshot())
    store.find(ids)

    def first_token(temperature: str) -> float:
        if temperature == "warm":
            store.cool()
        start = time.perf_counter()
        rest, snapshot = ids, None
        if temperature != "cold":
            hit = store.find(ids)
            assert temperature == hit.temperature
            rest, snapshot = hit.rest, hit.snapshot
        next(decoder.stream(rest, 1, after=snapshot))
        return (time.perf_counter() - start) * 1e3

    first_token("warm"), first_token("hot")
    kinds = "cold", "warm", "hot"
    return in_turn({kind: partial(first_token, kind) for kind in kinds}, rounds)


def _bytes_and_bandwidths(decoder: Decoder, store: Store, rounds: int) -> list[dict]:
    snapshot = store.load("session")
    fp16 = store.save("fp16", snapshot)
    q4 = store.save("q4", snapshot, "q4")
    decoder.begin(snapshot)
    arrays = []
    for state in decoder.states:
        for entry in state.shard.states.values():
            arrays.append(np.zeros(entry.shape, np.float32))
    size, payload = sum(a.nbytes for a in arrays), os.urandom(fp16.bytes)
    plain = store.folder / "plain"
    actions = {
        "restore": (size, lambda: decoder.begin(snapshot)),
        "snapshot": (size, decoder.snapshot),
        "copy": (size, lambda: [a.copy() for a in arrays]),
        "save": (fp16.bytes, lambda: store.save("fp16", snapshot)),
        "file written": (fp16.bytes, lambda: _plain_write(plain, payload)),
        "read": (fp16.bytes, lambda: (store.cool(), store.load("fp16"))),
        "file read": (fp16.bytes, plain.read_bytes),
    }

    def rate(size: int, action: Callable) -> float:
        return size / seconds(action)

    rates = {name: partial(rate, *action) for name, action in actions.items()}
    speeds = in_turn(rates, 4 * rounds + 1)
    pairs = {
        "restore": "copy",
        "snapshot": "copy",
        "save": "file written",
        "read": "file read",
    }
    rows = [bench_row("q4_bytes", [q4.bytes], "bytes", "fp16", [fp16.bytes])]
    rows[0]["error"] = q4.error
    for name, peer in pairs.items():
        own, others = speeds[name][1:], speeds[peer][1:]  # without the first round
        rows.append(bench_row(name, own, "bytes/s", peer, others))
    return rows


def _plain_write(path: Path, payload: bytes) -> None:
    with path.open("wb") as file:
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())
