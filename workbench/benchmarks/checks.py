"""The cost of checks: a trace against a plain decode step, a validation against one Hugging Face forward.

A bundle and its checkpoint in, rows of `workbench bench` out. Loading is not timed.
"""

from functools import partial

import numpy as np
import torch

from workbench.benchmarks.stopwatch import bench_row, in_turn, seconds
from workbench.bundle import Bundle
from workbench.check import golden, validate
from workbench.decode import Decoder
from workbench.explain import trace
from workbench.models.checkpoint import Checkpoint


def tracing(bundle: Bundle, *, T: int = 4, depth: int = 16, rounds: int = 5) -> list[dict]:
    """ms of tracing beside ms of a plain decode step, `depth` tokens in the cache: one token in one arithmetic, and, per
    token of a call of T, all that `workbench trace` does (exact, declared, narrow, and where declared leaves exact)."""
    decoders = {p: Decoder(bundle, "portable", p) for p in ("exact", "declared", "narrow")}
    declared, ids = decoders["declared"], _random_ids(bundle, depth + T)

    def sample(call) -> float:
        for decoder in decoders.values():
            decoder.begin()
            decoder.prefill(ids[:depth])
        return seconds(call) * 1e3

    calls = {
        "plain": lambda: declared.decode_one_token(ids[0]),
        "declared": lambda: trace.trace_ranges({"declared": declared}, ids[:1]),
        "whole": lambda: trace.trace_ranges(decoders, ids[depth:], T),
    }
    samples = in_turn({name: partial(sample, call) for name, call in calls.items()}, rounds)
    peer = "ms", "plain decode step", samples["plain"]
    per_token = [ms / T for ms in samples["whole"]]
    return [
        bench_row("trace_declared_ms", samples["declared"], *peer),
        bench_row("trace_ms_per_token", per_token, *peer),
    ]


def validating(
    bundle: Bundle, checkpoint: Checkpoint, *, positions: int = 64, Ts=(1, 2, 3, 4), rounds: int = 3
) -> list[dict]:
    """ms of a validation (all layers, isolated and chained, every T) beside one forward of Hugging Face's model over the
    same tokens."""
    ids = _random_ids(bundle, positions)
    reference, decoder = golden.make_golden(checkpoint, ids), Decoder(bundle, "portable")
    model = golden.whole_prompt(checkpoint)

    @torch.inference_mode()
    def forward() -> float:
        return seconds(lambda: model(torch.tensor([ids]))) * 1e3

    forward()
    peers = [forward() for _ in range(rounds)]
    value = seconds(lambda: validate.validate(decoder, reference, Ts)) * 1e3
    peers += [forward() for _ in range(rounds)]
    peer = f"one Hugging Face forward over {positions} tokens"
    return [bench_row("validate_ms", [value], "ms", peer, peers)]


def _random_ids(bundle: Bundle, count: int) -> list[int]:
    return np.random.default_rng(0).integers(0, bundle.manifest.dims.V, count).tolist()
