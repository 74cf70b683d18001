"""Benchmarks with their peers in the same run, interleaved; medians of raw samples, nothing judged here.

Numbers are those of the machine that ran them. See docs for what each one leaves out.
"""

import statistics
from collections.abc import Callable
from pathlib import Path

from workbench.bundle import Bundle
from workbench.decode import Decoder

from . import speed

# One layer of ZAYA1-8B as transformers' configuration states it; the vocabulary is small, since no head is timed.
ZAYA_LAYER = dict(hidden_size=2048, num_attention_heads=8, num_key_value_heads=2, head_dim=128, num_experts=16,
                  moe_intermediate_size=2048, router_hidden_size=256, vocab_size=4096)  # fmt: skip


def row(name: str, values: list[float], unit: str, peer: str, peer_values: list[float]) -> dict:
    """One row of `workbench bench`: medians of both sides, and peer / value for times (value / peer for rates)."""
    value, other = statistics.median(values), statistics.median(peer_values)
    ratio = value / other if unit.endswith("/s") else other / value
    return {"name": name, "value": value, "unit": unit, "peer": peer, "peer_value": other, "ratio": ratio,
            "n": len(values), "samples": values, "peer_samples": peer_values}  # fmt: skip


def moe(make: Callable[[str], Bundle], *, rounds: int = 5, calls: int = 4) -> list[dict]:
    """Routed against dense experts: ms per token in the MoE part of all layers, and bytes of expert weights read.

    Args:
        make: gives the bundle of one checkpoint for `moe` = dense or routed.
    """
    decoders = {kind: Decoder(make(kind), "portable") for kind in ("dense", "routed")}
    times: dict[str, list[float]] = {kind: [] for kind in decoders}
    for round_ in range(rounds):
        for kind, decoder in decoders.items():
            profiled = speed.profile(decoder, calls=calls, seed=round_)
            times[kind].append(float(profiled[profiled["part"] == "moe"]["ms"].sum()))
    read = {kind: moe_bytes(decoder.bundle) for kind, decoder in decoders.items()}
    return [
        row("moe_ms_per_token", times["routed"], "ms", "dense", times["dense"]),
        row("moe_bytes_per_token", [read["routed"]], "bytes", "dense", [read["dense"]]),
    ]


def moe_bytes(bundle: Bundle) -> int:
    """Bytes of expert weights one token reads: every expert when dense, the largest one of each layer when routed."""
    experts = bundle.shards("expert")
    if experts:
        layers = {s.layers[0] for s in experts}
        return sum(max(_weights(bundle, s) for s in experts if s.layers[0] == layer) for layer in layers)
    return sum(_weights(bundle, s) for s in bundle.shards("layers"))


def _weights(bundle: Bundle, shard) -> int:
    """Stored bytes of the expert tensors in a shard."""
    from workbench import mil

    names = {constant for tensor, constant in shard.weights.items() if ".experts." in tensor}
    total = 0
    for op in mil.read(Path(bundle.package(shard))).block.walk():
        if op.outputs and op.outputs[0][0] in names:
            total += sum(v.nbytes for v in op.inputs.values() if hasattr(v, "nbytes"))
    return total
