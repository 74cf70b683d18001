"""Benchmarks with their peers in the same run, interleaved; medians of raw samples.

Numbers are those of the machine that ran them. See docs for what each one leaves out.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch

import miltorch
from workbench.ane.memory import peak_rss
from workbench.benchmarks import llama_cpp
from workbench.benchmarks.bandwidth import (
    Sample,
    bandwidth_meter,
    bandwidth_row,
    paired_row,
    rate_row,
    share_row,
)
from workbench.benchmarks.stopwatch import apart, bench_row, in_turn, seconds
from workbench.bundle import Bundle
from workbench.decode import Decoder
from workbench.sweep import timing

DEPTHS = (64, 448)
SIZES = (256, 512, 1024, 2048, 4096)  # max_seq_len as it grows
PROMPT = 448  # tokens of a timed prefill
STEPS = 8  # timed calls of one contestant in one round
TOKENS = (1, 2, 4, 8, 16, 64)  # of one call, as it grows
REFERENCE = "int8-tensor"  # the bundle that the others stand beside
# preset → llama.cpp's type of weights of about as many bytes
ALIKE = {"fp16": "F16", "int8-tensor": "Q8_0", "int8-channel": "Q8_0"}
ALIKE |= {"int4-block32": "Q4_0", "lut4": "Q4_0"}


def bench_decode(
    bundles: dict[str, Bundle], checkpoint: Path, *, rounds: int = 5
) -> list[dict]:
    """One decode step of each bundle, of Hugging Face's model (fp32 and fp16, static
    cache) and, where it is importable, of llama.cpp, on all cores of the machine.

    Every round runs `STEPS` tokens of every contestant at every depth of `DEPTHS`, in
    turn; its median is one sample. Hugging Face's caches hold random keys and values up
    to the depth, since a step's time does not depend on them. Timed: token id to
    logits. Not timed: loading, prefill, picking the token. The read bandwidth is
    measured right before and after the steps of every sample.

    Returns:
        tok/s of each bundle beside either peer, beside llama.cpp with weights of about
        as many bits, and beside the bundle `REFERENCE` at like bandwidth; the share of
        the bandwidth that its steps use; the bandwidth, bytes a second; for each bundle
        the bytes a step reads over the bandwidth (`floor`), the seconds it loads, and
        its peak memory in a process of its own, bytes.
    """
    torch.set_num_threads(torch.multiprocessing.cpu_count())
    first = next(iter(bundles.values()))
    S = first.manifest.options.max_seq_len
    Decoder(first, "portable", fast=True)  # import first, so that load time excludes it
    contestants, loading = {}, {}
    for name, bundle in bundles.items():
        start = time.perf_counter()
        contestants[name] = partial(_our_step, Decoder(bundle, "portable", fast=True))
        loading[name] = time.perf_counter() - start
    peers = {"HF fp16": torch.float16, "HF fp32": torch.float32}
    for name, dtype in peers.items():
        contestants[name] = _peer(checkpoint, dtype, S)
    contestants |= llama_cpp.contestants(checkpoint, S)
    meter = bandwidth_meter()
    samplers = {
        key: partial(_rate_and_bandwidth, contestants[key[0]], key[1], meter)
        for key in product(contestants, DEPTHS)
    }
    samples = in_turn(samplers, rounds)
    # a step of a dense bundle reads every shard
    stored = {
        name: sum(shard.bytes for shard in bundle.manifest.shards)
        for name, bundle in bundles.items()
    }
    rows = _rate_rows(samples, stored, list(peers))
    bandwidths = [bandwidth for pairs in samples.values() for _, bandwidth in pairs]
    rows.append(bandwidth_row(bandwidths))
    for name, bundle in bundles.items():
        peak = [apart(_peak, bundle.root)]
        floors = [bandwidth / stored[name] for bandwidth in bandwidths]
        rows += [
            bench_row(f"{name} floor", floors, "tok/s"),
            bench_row(f"{name} load", [loading[name]], "s"),
            bench_row(f"{name} peak memory", peak, "bytes", "stored", [bundle.bytes]),
        ]
    return rows


def _rate_rows(
    samples: dict[tuple[str, int], list[Sample]],
    stored: dict[str, int],
    peers: list[str],
) -> list[dict]:
    """Rows of each bundle's tok/s beside its peers, and of its share of the bandwidth.

    Args:
        samples: contestant, depth → a sample of each round.
        stored: bundle → bytes that a step reads.
        peers: contestants that every bundle stands beside.
    """
    rows = []
    for name, depth in product(stored, DEPTHS):
        title, ours = f"{name} at {depth}", samples[name, depth]
        for peer in (*peers, f"llama.cpp {ALIKE.get(name)}"):
            if (peer, depth) in samples:
                rows.append(rate_row(title, ours, peer, samples[peer, depth]))
        if name != REFERENCE and REFERENCE in stored:
            reference = samples[REFERENCE, depth]
            rows.append(paired_row(title, ours, REFERENCE, reference))
        rows.append(share_row(title, ours, stored[name]))
    return rows


def _rate_and_bandwidth(
    contestant: Callable[[int], Callable[[], object]],
    depth: int,
    meter: Callable[[], float],
) -> Sample:
    """tok/s as `_rate`, and the mean of the bandwidths right before and after."""
    step = contestant(depth)
    step()
    before = meter()
    rate = _median_rate(step)
    return rate, (before + meter()) / 2


def _rate(
    contestant: Callable[[int], Callable[[], object]], depth: int, tokens: int = 1
) -> float:
    """tok/s: the median of `STEPS` steps of so many tokens each."""
    step = contestant(depth)
    step()
    return _median_rate(step, tokens)


def _median_rate(step: Callable[[], object], tokens: int = 1) -> float:
    return tokens / statistics.median(seconds(step) for _ in range(STEPS))


def bench_families(
    stacks: dict[str, tuple[Bundle, Path]], *, rounds: int = 5
) -> list[dict]:
    """One decode step of bundles of different checkpoints or batches at depth 64, each
    beside Hugging Face's model in fp16 with its own cache, which grows by a token a
    step.

    Args:
        stacks: name → bundle and its checkpoint.

    Returns:
        tok/s over all sequences of a batch.
    """
    torch.set_num_threads(torch.multiprocessing.cpu_count())
    samplers = {}
    for name, (bundle, checkpoint) in stacks.items():
        batch = bundle.manifest.options.batch
        ours = partial(_our_step, Decoder(bundle, "portable", fast=True))
        theirs = _cached_peer(checkpoint, batch)
        for side, contestant in (("ours", ours), ("HF fp16", theirs)):
            samplers[name, side] = partial(_rate, contestant, DEPTHS[0], batch)
    rates = in_turn(samplers, rounds)
    return [
        bench_row(name, rates[name, "ours"], "tok/s", "HF fp16", rates[name, "HF fp16"])
        for name in stacks
    ]


def bench_prefill(
    bundles: dict[str, Bundle], checkpoint: Path, *, rounds: int = 5
) -> list[dict]:
    """A prompt of `PROMPT` tokens in calls of T = 1, 4 and t_max tokens, and Hugging
    Face's model (fp32, fp16 and bf16, one call, its own cache), on all cores of the
    machine. Timed: token ids to the logits of the last one.

    Returns:
        tok/s of each bundle and T beside every peer.
    """
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(torch.multiprocessing.cpu_count())
    ids = [7] * PROMPT
    contestants = {}
    for name, bundle in bundles.items():
        decoder = Decoder(bundle, "portable", fast=True)
        for T in (1, 4, bundle.manifest.options.t_max):
            contestants[f"{name} T={T}"] = partial(_prefill, decoder, ids, T)
    ours = list(contestants)
    for dtype in ("float32", "float16", "bfloat16"):
        model = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=getattr(torch, dtype)
        ).eval()
        call = partial(model, torch.tensor([ids]), logits_to_keep=1)
        contestants[f"HF {dtype}"] = torch.inference_mode()(call)
    for call in contestants.values():
        call()  # compiles kernels and fills caches
    samplers = {
        name: lambda call=call: PROMPT / seconds(call)
        for name, call in contestants.items()
    }
    rates = in_turn(samplers, rounds)
    return [
        bench_row(f"prefill {name}", rates[name], "tok/s", peer, rates[peer])
        for name, peer in product(ours, contestants.keys() - set(ours))
    ]


def _prefill(decoder: Decoder, ids: list[int], T: int) -> None:
    decoder.begin()
    decoder.prefill(ids, T)


def growth(make: Callable[[int], Bundle], *, rounds: int = 5) -> list[dict]:
    """ms per call with a full cache as max_seq_len grows (T = 1), and as T grows up to
    t_max (at the smallest size).

    Args:
        make: gives the bundle of one max_seq_len, t_max 64.
    """
    torch.set_num_threads(torch.multiprocessing.cpu_count())
    decoders = {S: Decoder(make(S), "portable", fast=True) for S in SIZES}
    depths = {(S, 1): S - 2 for S in SIZES} | {(SIZES[0], T): 64 for T in TOKENS[1:]}

    def sample(S: int, T: int) -> float:
        step = _our_step(decoders[S], depths[S, T], T)
        step()
        return seconds(step) * 1e3

    samples = in_turn({key: partial(sample, *key) for key in depths}, rounds)
    peer = f"S={SIZES[0]} T=1", samples[SIZES[0], 1]
    return [
        bench_row(f"S={S} T={T} depth={depth}", samples[S, T], "ms", *peer)
        for (S, T), depth in depths.items()
    ]


def _our_step(decoder: Decoder, depth: int, T: int = 1) -> Callable[[], object]:
    """A call of T tokens from ids to logits at `depth`. The cache is filled once; a
    step's position goes back afterwards."""
    batch = decoder.manifest.options.batch
    ids, prompt = [[7] * T] * batch, [7] * depth
    if int(decoder.offsets[0]) != depth:
        decoder.begin()
        decoder.prefill([prompt] * batch if batch > 1 else prompt)

    def step():
        decoder.logits(decoder.advance(ids, T)[:, :, -1:])
        decoder.offsets = np.full(batch, depth)

    return step


def _peer(
    checkpoint: Path, dtype: torch.dtype, S: int
) -> Callable[[int], Callable[[], object]]:
    """depth → a step as `_our_step`, for Hugging Face's model with a static cache of S
    positions."""
    from transformers import AutoModelForCausalLM, StaticCache

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).eval()
    config, token = model.config, torch.tensor([[7]])
    cache = StaticCache(config=config, max_cache_len=S)
    D = config.hidden_size // config.num_attention_heads
    cache.early_initialization(1, config.num_key_value_heads, D, dtype, "cpu")
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()

    def at(depth: int):
        @torch.inference_mode()
        def step():
            for layer in cache.layers:
                layer.cumulative_length.fill_(depth)
            return model(token, past_key_values=cache).logits

        return step

    return at


def _cached_peer(checkpoint: Path, batch: int) -> Callable[[int], Callable[[], object]]:
    """depth → a step of so many sequences, for Hugging Face's model of any family in
    fp16, with the cache that it makes itself."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float16).eval()
    call = torch.inference_mode()(partial(model, use_cache=True, logits_to_keep=1))

    def at(depth: int):
        cache = call(torch.tensor([[7] * depth] * batch)).past_key_values
        return partial(call, torch.tensor([[7]] * batch), past_key_values=cache)

    return at


def _peak(path: Path) -> int | None:
    """Peak resident bytes of this process once it has opened a bundle and decoded."""
    Decoder(path, "portable", fast=True).generate([7] * 8, 8, stop=())
    return peak_rss()


def moe(
    make: Callable[[str], Bundle], *, rounds: int = 5, calls: int = 4
) -> list[dict]:
    """Routed against dense experts: ms per token in the MoE part of all layers, and
    bytes of expert weights read.

    Args:
        make: gives the bundle of one checkpoint for `moe` = dense or routed.
    """
    decoders = {kind: Decoder(make(kind), "portable") for kind in ("dense", "routed")}
    times = {kind: [] for kind in decoders}
    for round_ in range(rounds):
        for kind, decoder in decoders.items():
            profile = timing.profile(decoder, calls=calls, seed=round_)
            times[kind].append(float(profile[profile["part"] == "moe"]["ms"].sum()))
    dense, routed = (moe_bytes(decoder.bundle) for decoder in decoders.values())
    return [
        bench_row("moe_ms_per_token", times["routed"], "ms", "dense", times["dense"]),
        bench_row("moe_bytes_per_token", [routed], "bytes", "dense", [dense]),
    ]


def moe_bytes(bundle: Bundle) -> int:
    """Bytes of expert weights one token reads: every expert when dense, the largest one
    of each layer when routed."""
    largest = {}
    for shard in bundle.shards("expert") or bundle.shards("layers"):
        names = {
            constant
            for tensor, constant in shard.weights.items()
            if ".experts." in tensor
        }
        ops = miltorch.read(bundle.package(shard)).block.walk()
        experts = (op for op in ops if op.outputs and op.outputs[0][0] in names)
        values = [value for op in experts for value in op.inputs.values()]
        stored = sum(value.nbytes for value in values if hasattr(value, "nbytes"))
        largest[shard.layers[0]] = max(largest.get(shard.layers[0], 0), stored)
    return sum(largest.values())
