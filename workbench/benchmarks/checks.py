"""The cost of checks: a trace against a plain decode step, a validation against one
Hugging Face forward.

A bundle and its checkpoint in, rows of `workbench bench` out. Loading is not timed.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from workbench.benchmarks.stopwatch import bench_row, in_turn, seconds
from workbench.bundle import Bundle
from workbench.check import causality, golden, program, reach, validate
from workbench.decode import Decoder
from workbench.explain import trace
from workbench.models.checkpoint import Checkpoint


def tracing(
    bundle: Bundle, *, T: int = 4, depth: int = 16, rounds: int = 5
) -> list[dict]:
    """ms of tracing beside ms of a plain decode step, `depth` tokens in the cache: one
    token in one arithmetic, and, per token of a call of T, all that `workbench trace`
    does (exact, declared, narrow, and where declared leaves exact)."""
    decoders = {p: Decoder(bundle, "portable", p) for p in trace.ORDER}
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
    samplers = {name: partial(sample, call) for name, call in calls.items()}
    samples = in_turn(samplers, rounds)
    peer = "ms", "plain decode step", samples["plain"]
    per_token = [ms / T for ms in samples["whole"]]
    return [
        bench_row("trace_declared_ms", samples["declared"], *peer),
        bench_row("trace_ms_per_token", per_token, *peer),
    ]


def validating(
    bundle: Bundle,
    checkpoint: Checkpoint,
    *,
    positions: int = 64,
    Ts=(1, 2, 3, 4),
    rounds: int = 3,
) -> list[dict]:
    """ms of a validation against a golden (all layers, isolated and chained, every T),
    and of the gates that run a bundle's program in `exact` arithmetic (`program` with
    its reach, `causality`), each beside one forward of Hugging Face's model over as
    many tokens."""
    ids = _random_ids(bundle, positions)
    decoder, exact = Decoder(bundle, "portable"), Decoder(bundle, "portable", "exact")
    reference = golden.make_golden(checkpoint, ids)
    model = golden.whole_prompt(checkpoint)
    count = reach.plan_reach(bundle.manifest).count

    @torch.inference_mode()
    def forward(tokens: list[int]) -> float:
        return seconds(lambda: model(torch.tensor([tokens]))) * 1e3

    def bug_gates() -> None:
        program.program_gates(exact, checkpoint, Ts=Ts)
        causality.causality_gate(exact)

    def row(name: str, gates: Callable, tokens: list[int]) -> dict:
        gates()  # compiles the kernels
        samplers = {
            "gates": lambda: seconds(gates) * 1e3,
            "forward": partial(forward, tokens),
        }
        samples = in_turn(samplers, rounds)
        peer = f"one Hugging Face forward over {len(tokens)} tokens"
        return bench_row(name, samples["gates"], "ms", peer, samples["forward"])

    return [
        row("validate_ms", partial(validate.validate, decoder, reference, Ts), ids),
        row("program_causality_ms", bug_gates, ids[:count]),
    ]


def _random_ids(bundle: Bundle, count: int) -> list[int]:
    return np.random.default_rng(0).integers(0, bundle.manifest.dims.V, count).tolist()
