"""What looking costs: a trace against a plain decode step, a validation against one Hugging Face forward.

A bundle and its checkpoint in, rows of `workbench bench` out; nothing is judged. Loading is not timed.
"""

import numpy as np
import torch

from workbench.benchmarks.decode import bench_row, seconds
from workbench.bundle import Bundle
from workbench.check import golden, validate
from workbench.decode import Decoder
from workbench.explain import trace
from workbench.models.checkpoint import Checkpoint


def tracing(bundle: Bundle, *, T: int = 4, depth: int = 16, rounds: int = 5) -> list[dict]:
    """ms of tracing beside ms of a plain decode step, `depth` tokens in the cache: one token in one arithmetic, and, per
    token of a call of T, all that `workbench trace` does (exact, declared, narrow, and where declared leaves exact)."""
    decoders = {p: Decoder(bundle, "portable", p) for p in ("exact", "declared", "narrow")}
    ids = np.random.default_rng(0).integers(0, bundle.manifest.dims.V, depth + T).tolist()
    calls = {"plain": lambda: decoders["declared"].decode_one_token(ids[0]),
             "declared": lambda: trace.trace_ranges({"declared": decoders["declared"]}, ids[:1]),
             "whole": lambda: trace.trace_ranges(decoders, ids[depth:], T)}  # fmt: skip
    samples = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            for decoder in decoders.values():
                decoder.begin()
                decoder.prefill(ids[:depth])
            samples[name].append(seconds(call) * 1e3)
    per_token = [ms / T for ms in samples["whole"]]
    return [bench_row("trace_declared_ms", samples["declared"], "ms", "plain decode step", samples["plain"]),
            bench_row("trace_ms_per_token", per_token, "ms", "plain decode step", samples["plain"])]  # fmt: skip


def validating(bundle: Bundle, checkpoint: Checkpoint, *, positions: int = 64, Ts=(1, 2, 3, 4), rounds: int = 3) -> list[dict]:
    """ms of a validation (all layers, isolated and chained, every T) beside one forward of Hugging Face's model over the
    same tokens."""
    ids = np.random.default_rng(0).integers(0, bundle.manifest.dims.V, positions).tolist()
    reference, decoder = golden.make_golden(checkpoint, ids), Decoder(bundle, "portable")
    model = golden.whole_prompt(checkpoint)

    def forward():
        with torch.inference_mode():
            model(torch.tensor([ids]))

    forward()
    peers = [seconds(forward) * 1e3 for _ in range(rounds)]
    value = seconds(lambda: validate.validate(decoder, reference, Ts)) * 1e3
    peers += [seconds(forward) * 1e3 for _ in range(rounds)]
    return [bench_row("validate_ms", [value], "ms", f"one Hugging Face forward over {positions} tokens", peers)]
