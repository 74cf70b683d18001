"""Speeds of the portable runtime and of the export, each beside its peers in the same
run:

    python tools/bench.py decode [--moe | --growth | --prefill | --families]
    python tools/bench.py export | validate | log | cell | reuse

Contestants take turns, round by round, and every sample is kept (--json). The models
have real dimensions and random weights; checkpoints and bundles stay in --folder. The
read bandwidth of a virtual machine changes within seconds, so the decoding speeds of
two presets are compared where the bandwidths around them are alike."""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

import workbench
from workbench.ane.memory import peak_rss
from workbench.bundle import Options
from workbench.bundle.presets import PRESETS
from workbench.models import checkpoint as checkpoints

QWEN2 = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
}  # Qwen2.5-0.5B; transformers' defaults of zaya are ZAYA1-8B's
GEMMA3 = {
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
    "vocab_size": 32768,
}
LFM2 = {
    "hidden_size": 1024,
    "intermediate_size": 6656,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "layer_types": ["conv", "conv", "full_attention"] * 2,
    "vocab_size": 32768,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 2,
    "moe_intermediate_size": 64,
    "router_hidden_size": 32,
    "num_hidden_layers": 2,
    "vocab_size": 64,
}
DEPTHS = (64, 448)  # tokens in the cache
SIZES = (256, 512, 1024, 2048, 4096)  # max_seq_len as it grows
CALLS = (2, 4, 8, 16, 64)  # tokens of a call as it grows
PROMPT_CALLS = (1, 4, 64)  # tokens of a call of a prompt
STEPS = 8  # timed steps of one sample, whose median counts
REFERENCE = "int8-tensor"  # the preset that the others stand beside
MAX_QUOTIENT = 1.15  # of two bandwidths that are alike
# preset → llama.cpp's type of weights of about as many bytes
ALIKE = {"fp16": "F16", "int8-tensor": "Q8_0", "int8-channel": "Q8_0"}
ALIKE |= {"int4-block32": "Q4_0", "lut4": "Q4_0"}
Step = Callable[[], object]
Contestant = Callable[[int], Step]  # depth → a step of one token for each sequence


def seconds(step: Step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def in_turn(samplers: dict, rounds: int) -> dict[object, list]:
    """The samples of every contestant by its key, one of each in every round."""
    samples = {key: [] for key in samplers}
    for key in list(samplers) * rounds:
        samples[key].append(samplers[key]())
    return samples


def compare(ours: dict, peers: dict, rounds: int, unit: str) -> list[dict]:
    """A row of each of ours beside every peer; all are sampled in turn."""
    samples = in_turn(ours | peers, rounds)
    return [
        row(name, samples[name], unit, peer, samples[peer])
        for name, peer in product(ours, peers)
    ]


def row(name: str, values: list, unit: str, peer=None, peer_values=(), **more) -> dict:
    """Medians of both sides and how many times better ours is: peer / value for times
    and bytes, value / peer for rates."""
    found = {"name": name, "value": statistics.median(values), "unit": unit}
    found |= {"n": len(values), "samples": list(values)}
    if peer:
        theirs, ours = statistics.median(peer_values), found["value"]
        ratio = ours / theirs if unit.endswith("/s") else theirs / ours
        found |= {"peer": peer, "peer_value": theirs, "ratio": ratio}
        found["peer_samples"] = list(peer_values)
    return found | more


def apart(function: Callable, *arguments):
    """`function(*arguments)` in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def random_checkpoint(folder: Path, family: str, layers: int, **config) -> Path:
    """A checkpoint of random weights in `folder`, written when it is missing."""
    path = folder / f"{family}-{layers}"
    if not path.exists():
        checkpoints.random(path, family, num_hidden_layers=layers, **config)
    return path


def bundle_of(checkpoint: Path, calls: int = 64, **options) -> workbench.Bundle:
    """The bundle of a checkpoint for calls of up to so many tokens, exported when it is
    missing."""
    name = "-".join([checkpoint.name, *map(str, options.values()), str(calls)])
    path = checkpoint.with_name(f"{name}.bundle")
    if (path / "bundle.json").exists():
        return workbench.Bundle.open(path)
    if "t_max" in Options.model_fields:
        options["t_max"] = calls
    else:
        options["tokens"] = f"1-{calls}"
    return workbench.export.export(checkpoint, path, **options)


def opened(bundle: workbench.Bundle) -> workbench.Decoder:
    return workbench.Decoder(bundle, "portable", fast=True)


def ours(decoder: workbench.Decoder) -> Contestant:
    batch = decoder.manifest.options.batch

    def at(depth: int) -> Step:
        decoder.begin()
        decoder.prefill([[7] * depth] * batch if batch > 1 else [7] * depth)
        return partial(decoder.decode_one_token, [7] * batch)

    return at


def hugging_face(checkpoint: Path, dtype: str, **options) -> Callable:
    from transformers import AutoModelForCausalLM

    read = AutoModelForCausalLM.from_pretrained
    model = read(checkpoint, dtype=getattr(torch, dtype)).eval()
    return torch.inference_mode()(partial(model, logits_to_keep=1, **options))


def static_cache(checkpoint: Path, dtype: str, S: int) -> Contestant:
    """Hugging Face's model with a static cache of S positions, which holds random keys
    and values, since a step's time does not depend on them."""
    from transformers import AutoConfig, StaticCache

    config, call = AutoConfig.from_pretrained(checkpoint), None
    cache, token = StaticCache(config=config, max_cache_len=S), torch.tensor([[7]])
    D, H = config.hidden_size // config.num_attention_heads, config.num_key_value_heads
    cache.early_initialization(1, H, D, getattr(torch, dtype), "cpu")
    call = hugging_face(checkpoint, dtype, past_key_values=cache)

    def at(depth: int) -> Step:
        for layer in cache.layers:
            layer.keys.normal_()
            layer.values.normal_()
            layer.cumulative_length.fill_(depth)
        return partial(call, token)

    return at


def own_cache(checkpoint: Path, batch: int) -> Contestant:
    """Hugging Face's model of any family in fp16 with the cache that it makes."""
    call = hugging_face(checkpoint, "float16", use_cache=True)

    def at(depth: int) -> Step:
        cache = call(torch.tensor([[7] * depth] * batch)).past_key_values
        return partial(call, torch.tensor([[7]] * batch), past_key_values=cache)

    return at


def llama_cpp(checkpoint: Path, kind: str, S: int) -> Contestant:
    """llama.cpp on a GGUF of a Qwen2 checkpoint, whose matrices are of type `kind`.

    A build for AMX crashes on some virtual machines: build llama.cpp with
    GGML_AMX_TILE=OFF and GGML_AMX_INT8=OFF."""
    path = checkpoint.with_name(f"{checkpoint.name}.{kind}.gguf")
    if not path.exists():
        write_gguf(checkpoint, kind, path.with_suffix(".unfinished"))
        path.with_suffix(".unfinished").rename(path)
    threads = {"n_threads": torch.get_num_threads()}
    threads["n_threads_batch"] = torch.get_num_threads()
    llama = import_module("llama_cpp").Llama
    model = llama(str(path), n_ctx=S, verbose=False, **threads)

    def at(depth: int) -> Step:
        model.reset()
        model.eval([7] * depth)

        def step():
            model.eval([7])
            return model._ctx.get_logits()

        return step

    return at


def write_gguf(checkpoint: Path, kind: str, path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoConfig

    gguf, config = import_module("gguf"), AutoConfig.from_pretrained(checkpoint)
    writer, stored = gguf.GGUFWriter(path, "qwen2"), gguf.GGMLQuantizationType[kind]
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")  # token ids alone are timed
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    for file in sorted(checkpoint.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            values = tensor.float().numpy()
            place = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if values.ndim == 1:
                writer.add_tensor(place, values)
            else:
                data = gguf.quants.quantize(values, stored)
                writer.add_tensor(place, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rate(contestant: Contestant, depth: int, tokens: int = 1, meter=None):
    """tok/s at a depth; with a `meter` also the mean of the read bandwidths right
    before and after."""
    step = contestant(depth)
    step()
    before = meter and meter()
    found = tokens / statistics.median(seconds(step) for _ in range(STEPS))
    return (found, (before + meter()) / 2) if meter else found


def bandwidth_meter() -> Callable[[], float]:
    """A function that measures the bytes per second at which torch reads memory."""
    data = torch.ones(1 << 27, dtype=torch.int64)
    return lambda: data.nbytes / min(seconds(data.sum) for _ in range(3))


def paired(name: str, samples: list, peer: str, peer_samples: list) -> dict:
    """A row whose ratio is the median over the rounds in which both sides had alike
    bandwidths, None without such a round."""
    found = row(
        name, [r for r, _ in samples], "tok/s", peer, [r for r, _ in peer_samples]
    )
    ratios = []
    for (rate_, width), (peer_rate, peer_width) in zip(samples, peer_samples):
        if max(width, peer_width) < MAX_QUOTIENT * min(width, peer_width):
            ratios.append(rate_ / peer_rate)
    found |= {"ratios": ratios, "ratio": statistics.median(ratios) if ratios else None}
    return found | {"note": f"{len(ratios)} of {found['n']} rounds at like bandwidth"}


def decode_rows(bundles: dict, checkpoint: Path, rounds: int) -> list[dict]:
    """One decode step of each bundle, of Hugging Face's model with a static cache and,
    where it can be imported, of llama.cpp, from token id to logits."""
    S = next(iter(bundles.values())).manifest.options.max_seq_len
    peers = {"HF fp16": "float16", "HF fp32": "float32"}
    opened(next(iter(bundles.values())))  # imports what the first decoder would
    contestants, loading = {}, {}
    for name, bundle in bundles.items():
        start = time.perf_counter()
        contestants[name] = ours(opened(bundle))
        loading[name] = time.perf_counter() - start
    for name, dtype in peers.items():
        contestants[name] = static_cache(checkpoint, dtype, S)
    if all(map(find_spec, ("llama_cpp", "gguf"))):
        for kind in dict.fromkeys(ALIKE[name] for name in bundles if name in ALIKE):
            contestants[f"llama.cpp {kind}"] = llama_cpp(checkpoint, kind, S)
    meter, rows = bandwidth_meter(), []
    samplers = {
        key: partial(rate, contestants[key[0]], key[1], meter=meter)
        for key in product(contestants, DEPTHS)
    }
    samples = in_turn(samplers, rounds)
    for (name, bundle), depth in product(bundles.items(), DEPTHS):
        title, mine = f"{name} at {depth}", samples[name, depth]
        rates, stored = (
            [r for r, _ in mine],
            sum(s.bytes for s in bundle.manifest.shards),
        )
        for peer in (*peers, f"llama.cpp {ALIKE.get(name)}"):
            if (peer, depth) in samples:
                theirs = [r for r, _ in samples[peer, depth]]
                rows.append(row(title, rates, "tok/s", peer, theirs))
        if name != REFERENCE in bundles:
            rows.append(paired(title, mine, REFERENCE, samples[REFERENCE, depth]))
        shares = [100 * stored * r / width for r, width in mine]
        rows.append(row(f"{title}, share of the bandwidth", shares, "%"))
    widths = [width for pairs in samples.values() for _, width in pairs]
    rows.append(row("read bandwidth", widths, "bytes/s"))
    for name, bundle in bundles.items():
        peak = [apart(peak_of, bundle.root)]
        rows.append(row(f"{name} load", [loading[name]], "s"))
        rows.append(row(f"{name} peak", peak, "bytes", "stored", [bundle.bytes]))
    return rows


def peak_of(path: Path) -> int:
    """Peak resident bytes of this process once it has opened a bundle and decoded."""
    decoder = opened(workbench.Bundle.open(path))
    decoder.generate([7] * 8, 8, stop=())
    return peak_rss()


def beside_own_cache(stacks: dict, rounds: int) -> list[dict]:
    """One decode step of bundles of different checkpoints or batches: tok/s over all
    sequences, beside Hugging Face's model with its own cache.

    Args:
        stacks: name → bundle, checkpoint.
    """
    rows = []
    for name, (bundle, checkpoint) in stacks.items():
        batch = bundle.manifest.options.batch
        mine = partial(rate, ours(opened(bundle)), DEPTHS[0], batch)
        peer = partial(rate, own_cache(checkpoint, batch), DEPTHS[0], batch)
        rows += compare({name: mine}, {"HF fp16": peer}, rounds, "tok/s")
    return rows


def prefill_rows(bundles: dict, checkpoint: Path, rounds: int) -> list[dict]:
    """A prompt in calls of 1, 4 and 64 tokens, and Hugging Face's model in one call,
    from token ids to the logits of the last one."""
    ids, mine, peers = [7] * DEPTHS[-1], {}, {}
    for name, bundle in bundles.items():
        decoder = opened(bundle)
        for T in PROMPT_CALLS:
            mine[f"prompt, {name}, T = {T}"] = partial(prefill, decoder, ids, T)
    for dtype in ("float32", "float16", "bfloat16"):
        model = hugging_face(checkpoint, dtype)
        peers[f"HF {dtype}"] = partial(model, torch.tensor([ids]))

    def sampler(call: Step) -> Callable[[], float]:
        call()  # compiles kernels and fills caches
        return lambda: len(ids) / seconds(call)

    sides = ({n: sampler(c) for n, c in side.items()} for side in (mine, peers))
    return compare(*sides, rounds, "tok/s")


def prefill(decoder: workbench.Decoder, ids: list[int], T=None) -> None:
    decoder.begin()
    decoder.prefill(ids, T)


def growth_rows(bundles: dict[int, workbench.Bundle], rounds: int) -> list[dict]:
    """ms of a call with a full cache as max_seq_len grows (T = 1), and as T grows in
    the smallest bundle."""
    decoders = {S: opened(bundle) for S, bundle in bundles.items()}
    first = min(decoders)
    calls = [(S, 1, S - 2) for S in decoders] + [(first, T, 64) for T in CALLS]

    def sample(S: int, T: int, depth: int) -> float:
        prefill(decoders[S], [7] * depth)
        return seconds(partial(decoders[S].prefill, [7] * T, T)) * 1e3

    title = "max_seq_len {}, T = {}, {} tokens in the cache"
    mine = {title.format(*call): partial(sample, *call) for call in calls}
    peers = {f"max_seq_len {first}, T = 1": partial(sample, *calls[0])}
    return compare(mine, peers, rounds, "ms")


def moe_rows(dense: workbench.Bundle, routed: workbench.Bundle, rounds: int) -> list:
    """A decode step with routed against all experts, and the bytes of layers read."""
    step, rest = (partial(rate, ours(opened(b)), DEPTHS[0]) for b in (routed, dense))
    rows = compare({"routed experts": step}, {"dense": rest}, rounds, "tok/s")
    every, largest = sum(shard.bytes for shard in dense.shards("layers")), {}
    for shard in routed.shards("expert"):
        layer = shard.layers[0]
        largest[layer] = max(largest.get(layer, 0), shard.bytes)
    read = sum(shard.bytes for shard in routed.shards("layers")) + sum(largest.values())
    return [*rows, row("layers read by a token", [read], "bytes", "dense", [every])]


def bench_decode(args) -> list[dict]:
    torch.set_num_threads(os.cpu_count())
    layers = args.layers or (2 if args.moe or args.growth else 24)
    if args.moe:  # the head is not compared, so the vocabulary is small
        path = random_checkpoint(args.folder, "zaya", layers, vocab_size=4096)
        pair = [bundle_of(path, 4, max_seq_len=128, moe=m) for m in ("dense", "routed")]
        return moe_rows(*pair, args.rounds)
    if args.families:
        return beside_own_cache(families(args.folder, args.layers or 4), args.rounds)
    path = random_checkpoint(args.folder, "qwen2", layers, **QWEN2)
    if args.growth:
        bundles = {S: bundle_of(path, max_seq_len=S) for S in SIZES}
        return growth_rows(bundles, args.rounds)
    presets = ("fp16", REFERENCE) if args.prefill else PRESETS
    bundles = {p: bundle_of(path, max_seq_len=512, compress=p) for p in presets}
    rows = prefill_rows if args.prefill else decode_rows
    return rows(bundles, path, args.rounds)


def families(folder: Path, layers: int) -> dict:
    """Bundles of batches and of families beside Llama's, each with its checkpoint."""
    path, stacks = random_checkpoint(folder, "qwen2", layers, **QWEN2), {}
    for batch in (1, 2, 4):
        bundle = bundle_of(path, max_seq_len=512, batch=batch)
        stacks[f"batch {batch}"] = bundle, path
    dense = {"max_seq_len": 512}
    for family, count, config, options in (
        ("gemma3_text", 6, GEMMA3, dense),
        ("zaya", 4, {"vocab_size": 4096}, dense | {"moe": "routed"}),
        ("lfm2", 6, LFM2, dense),
    ):
        path = random_checkpoint(folder, family, count, **config)
        stacks[family] = bundle_of(path, **options), path
    return stacks


def bench_export(args) -> list[dict]:
    layers = args.layers or {"qwen2": 24, "zaya": 40}[args.family]
    config = QWEN2 if args.family == "qwen2" else {}
    source = random_checkpoint(
        args.folder, args.family, layers, dtype="bfloat16", **config
    )
    return export_rows(source, args.folder / "export", args.compress, args.rounds)


def export_rows(source: Path, folder: Path, compress: str, rounds: int) -> list[dict]:
    """A whole export beside reading and writing as many bytes and, for Qwen 2, beside
    coremltools converting every layer; each in a process of its own."""
    config, runs = json.loads((source / "config.json").read_text()), []

    def export() -> float:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        runs.append(apart(export_once, source, folder / "bundle", compress))
        return runs[-1]["seconds"]

    def plain() -> float:
        layer = apart(coremltools_layer, source, folder, compress)
        return layer * config["num_hidden_layers"]

    peers = {"disk": lambda: disk_seconds(source, folder / "disk", runs[-1]["bytes"])}
    if config["model_type"] == "qwen2":
        peers["coremltools for each layer"] = plain
    rows = compare({f"export {compress}": export}, peers, rounds, "s")
    shutil.rmtree(folder)
    peaks, stored = ([run[key] for run in runs] for key in ("peak", "bytes"))
    return [*rows, row("peak memory", peaks, "bytes", "stored", stored)]


def export_once(source: Path, target: Path, compress: str) -> dict:
    """One export, after a tiny one has imported and warmed up everything."""
    family = checkpoints.Checkpoint(source).config.model_type
    with tempfile.TemporaryDirectory() as folder:
        tiny = checkpoints.random(Path(folder, "tiny"), family, **TINY)
        export = partial(workbench.export.export, progress=False, compress=compress)
        export(tiny, Path(folder, "bundle"))
        start = time.perf_counter()
        bundle = export(source, target)
    took = time.perf_counter() - start
    return {"seconds": took, "bytes": bundle.bytes, "peak": peak_rss()}


def disk_seconds(source: Path, target: Path, count: int) -> float:
    """Seconds to read the checkpoint, which is not in memory, and to write `count`
    bytes."""
    buffer, start = bytearray(1 << 20), time.perf_counter()
    for path in source.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while file.readinto(buffer):
                pass
    with target.open("wb", buffering=0) as file:
        for at in range(0, count, len(buffer)):
            file.write(buffer[: count - at])
    return time.perf_counter() - start


def coremltools_layer(source: Path, folder: Path, compress: str) -> float:
    """Seconds in which coremltools converts, compresses and saves Hugging Face's own
    layer of a Qwen 2 for one token; the second of two, so that nothing is imported."""
    from transformers import AutoConfig
    from transformers.models.qwen2 import modeling_qwen2 as qwen2

    from miltorch.quiet import coremltools, quiet

    ct, config = coremltools(), AutoConfig.from_pretrained(source)
    config._attn_implementation = "eager"

    class Alone(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = qwen2.Qwen2DecoderLayer(config, 0)

        def forward(self, x, cos, sin):
            return self.layer(x, position_embeddings=(cos, sin))

    alone = Alone().eval()
    D = config.hidden_size // config.num_attention_heads
    inputs = [torch.rand(1, 1, n) for n in (config.hidden_size, D, D)]

    def convert():
        with torch.inference_mode(), quiet():
            traced = torch.export.export(alone, tuple(inputs)).run_decompositions({})
            model = ct.convert(traced, minimum_deployment_target=ct.target.iOS18)
            opt = ct.optimize.coreml
            if compress != "fp16":
                how = opt.OpLinearQuantizerConfig(granularity="per_tensor")
                model = opt.linear_quantize_weights(model, opt.OptimizationConfig(how))
            model.save(str(folder / "layer.mlpackage"))

    convert()
    return seconds(convert)


def bench_validate(args) -> list[dict]:
    path = random_checkpoint(args.folder, "qwen2", args.layers or 24, **QWEN2)
    bundle = bundle_of(path, 4, max_seq_len=128, compress=REFERENCE)
    return validate_rows(bundle, path, 64, args.rounds)


def validate_rows(bundle, path: Path, positions: int, rounds: int) -> list[dict]:
    """A validation against a golden, and one with the checkpoint too, each beside a
    forward pass of Hugging Face's model over as many tokens."""
    from workbench.check import golden

    source = checkpoints.Checkpoint(path)
    draw = np.random.default_rng(0).integers
    ids = draw(0, bundle.manifest.dims.V, positions).tolist()
    reference, decoder = golden.make_golden(source, ids), workbench.Decoder(bundle)
    forward = partial(hugging_face(path, "float32"), torch.tensor([ids]))
    against = partial(workbench.validate, decoder, reference)
    mine = {
        "validate with golden": partial(seconds, against),
        "and checkpoint": partial(seconds, partial(against, checkpoint=source)),
    }
    return compare(mine, {"HF fp32": partial(seconds, forward)}, rounds, "s")


def bench_log(args) -> list[dict]:
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        return log_rows(Path(folder), args.runs, args.rounds)


def bench_cell(args) -> list[dict]:
    """Seconds from the start of a cell's process to its first call, of a bundle that is
    there, beside those of an interpreter that imports torch."""
    path = Path(__file__).parents[1] / "data" / "tiny-llama"
    run = {"rounds": args.rounds, "n_gen": 1, "repetitions": 1}
    grid = {"checkpoint": str(path), "export": {"max_seq_len": [64]}, "run": run}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        where = {"root": Path(folder) / "log", "bundles": args.folder}
        workbench.sweep.sweep(workbench.sweep.make_grid(grid), **where, progress=False)
        configs = workbench.log.load("runs", where["root"])["config"].map(json.loads)
    command = [sys.executable, "-c", "import torch"]
    torch_s = [seconds(partial(subprocess.run, command)) for _ in range(args.rounds)]
    starts = [config["startup_s"] for config in configs]
    return [row("overhead of a cell", starts, "s", "import torch", torch_s)]


def log_rows(root: Path, runs: int, rounds: int) -> list[dict]:
    """Loading all runs of a log, beside pandas reading the same files."""
    import pandas as pd

    for i in range(runs):
        written = {"status": "ok", "command": "bench"}
        workbench.log.append("runs", written, root, f"run{i:06}")
    load = partial(seconds, partial(workbench.log.load, "runs", root))
    peer = partial(seconds, partial(pd.read_parquet, root / "runs"))
    first = row(f"load {runs} runs first", [load()], "s", "pandas", [peer()])
    again = {f"load {runs} runs again": load}
    return [first, *compare(again, {"pandas": peer}, rounds, "s")]


def bench_reuse(args) -> list[dict]:
    path = random_checkpoint(args.folder, "qwen2", args.layers or 4, **QWEN2)
    bundle = bundle_of(path, max_seq_len=args.context)
    contexts = [n for n in (256, 512, 1024) if n < args.context] + [args.context]
    return reuse_rows(opened(bundle), contexts, args.rounds)


def reuse_rows(decoder, contexts: list[int], rounds: int) -> list[dict]:
    """ms to the first token of a prompt: cold, restored from a file ("warm", which may
    be in the system's memory) and from memory ("hot"); bytes of a snapshot in 4
    bits."""
    from workbench.decode import store

    rows, V = [], decoder.manifest.dims.V
    with tempfile.TemporaryDirectory() as folder:
        for n in contexts:
            ids = np.random.default_rng(n).integers(0, V, n).tolist()
            decoder.begin()
            decoder.prefill(ids[:-1])
            snapshot = decoder.snapshot()
            store.save(folder, "session", snapshot)
            first = partial(first_token, decoder, folder, snapshot, ids)
            mine = {
                f"{kind} after {n}": partial(first, kind) for kind in ("warm", "hot")
            }
            for sampler in mine.values():
                sampler()
            rows += compare(mine, {"cold": partial(first, "cold")}, rounds, "ms")
        files = [store.save(folder, kind, snapshot, kind) for kind in ("q4", "fp16")]
        sizes = [path.stat().st_size for path in files]
        return [*rows, row("snapshot, q4", sizes[:1], "bytes", "fp16", sizes[1:])]


def first_token(decoder, folder, snapshot, ids: list[int], kind: str) -> float:
    from workbench.decode import store

    start = time.perf_counter()
    rest, before = ids[-1:], snapshot
    if kind == "cold":
        rest, before = ids, None
    elif kind == "warm":
        before, rest = store.find(folder, ids, decoder.identity)
    next(decoder.stream(rest, 1, after=before))
    return (time.perf_counter() - start) * 1e3


def line(found: dict) -> str:
    """A row in one line: its value, the peer's and the ratio, its note, and n."""
    parts = [f"{found['name']:44}{found['value']:12.4g} {found['unit']:8}"]
    if "peer" in found:
        ratio = "no ratio" if found["ratio"] is None else f"{found['ratio']:.2f} ×"
        parts.append(f"{found['peer']} {found['peer_value']:.4g} ({ratio})")
    parts += [found["note"]] if "note" in found else []
    return ", ".join([*parts, f"n = {found['n']}"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = ("decode", "export", "validate", "log", "cell", "reuse")
    parser.add_argument("what", choices=kinds)
    for kind in ("moe", "growth", "prefill", "families", "json"):
        parser.add_argument(f"--{kind}", action="store_true")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--family", choices=("qwen2", "zaya"), default="qwen2")
    parser.add_argument("--compress", choices=("fp16", REFERENCE), default=REFERENCE)
    parser.add_argument("--runs", type=int, default=10_000, help="of the log")
    parser.add_argument("--context", type=int, default=2048, help="of reuse")
    parser.add_argument("--folder", type=Path, default=Path("build/bench"))
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    rows = globals()[f"bench_{args.what}"](args)
    print(json.dumps(rows) if args.json else "\n".join(map(line, rows)))


if __name__ == "__main__":
    main()
