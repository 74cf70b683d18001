"""One prompt decoded by adopted packages, in the words of `workbench decode`."""

import time
from pathlib import Path

import numpy as np

from workbench.adopt.adapter import Adapter
from workbench.decode import checks
from workbench.decode.sampling import Sampling
from workbench.decode.transcript import load_tokenizer
from workbench.errors import InputError


def transcript(
    adapter: Adapter, ids: list[int], max_new: int, logits: Path | None, sampling: Sampling
) -> dict:
    """Decodes one prompt: the largest tiles first, then token by token.

    Args:
        logits: file for [max_new + 1, V] float32, as in `decode.transcript`.

    Raises:
        InputError: no room, no prompt; logits or sampling where the argmax is inside.
    """
    count, source = checks.count(max_new, "new tokens"), adapter.checkpoint
    if not ids or len(ids) + count > adapter.context:
        raise InputError(
            "prompt and new tokens",
            f"{len(ids)} + {count}",
            f"at least one, at most context = {adapter.context} positions",
            "shorten them",
        )
    stop = source.eos if source else []
    start = time.perf_counter()
    state, done = adapter.begin(), 0
    sizes = adapter.plan(len(ids), max(adapter.tiles), logits=True)
    for size in sizes:
        result = adapter.advance(state, ids[done : done + size], done)
        done += size
    prefill_ms = (time.perf_counter() - start) * 1e3
    tokens: list[int] = []
    samples: list[float] = []
    rows = [] if result.logits is None else [result.logits[-1]]
    while len(tokens) < count and not (tokens and tokens[-1] in stop):
        tokens.append(_pick(result, sampling, done))
        if len(tokens) < count or logits:
            start = time.perf_counter()
            result = adapter.advance(state, tokens[-1:], done)
            samples.append((time.perf_counter() - start) * 1e3)
            rows += [] if result.logits is None else [result.logits[-1]]
            done += 1
    if logits:
        if not rows:
            raise _inside("--logits")
        with logits.open("wb") as file:
            np.save(file, np.stack(rows[: len(tokens) + 1]).astype(np.float32))
    text = None
    if source and (source.path / "tokenizer.json").is_file():
        text = load_tokenizer(source.path).decode(tokens)
    return {
        "tokens": tokens,
        "text": text,
        "prefill": {"tokens": len(ids), "calls": len(sizes), "ms": prefill_ms},
        "decode": {
            "tokens": len(tokens),
            "tokens_per_s": 1e3 / float(np.median(samples)) if samples else None,
            "layer_ms": None,
            "head_ms": None,
            "samples_ms": samples,
        },
        "runtime": adapter.runtime,
        "precision": adapter.precision if adapter.portable else None,
    }


def _pick(result, sampling: Sampling, position: int) -> int:
    """The next token from logits, or the top one where the argmax is inside."""
    if result.logits is not None:
        return sampling.pick(result.logits[-1], position)
    if result.top is None or sampling.temperature:
        raise _inside("a temperature")
    return int(result.top[-1])


def _inside(what: str) -> InputError:
    return InputError(
        what, "packages with the argmax inside", "packages that put out logits", "leave it out"
    )
