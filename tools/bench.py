"""Speeds of the portable runtime, of exports and of the log, each beside its peers in
the same run:

    python tools/bench.py decode | prompt | export | validate | log | cell

Contestants take turns, round by round, and every sample is kept (--json). The models
have real dimensions and random weights; checkpoints and bundles stay in --folder."""

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
from workbench.bundle.presets import PRESETS
from workbench.check.golden import make_golden
from workbench.models import checkpoint as checkpoints

QWEN2 = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
}  # Qwen2.5-0.5B
DEPTHS = (64, 448)  # tokens in the cache
PROMPT_CALLS = (1, 4, 64)  # tokens of a call of a prompt
STEPS = 8  # timed steps of one sample, whose median counts
# preset → llama.cpp's type of weights of about as many bytes
ALIKE = {"fp16": "F16", "int8-tensor": "Q8_0", "int4-block32": "Q4_0"}
Step = Callable[[], object]
Contestant = Callable[[int], Step]  # depth → a step of one token


def seconds(step: Step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def compare(ours: dict, peers: dict, rounds: int, unit: str) -> list[dict]:
    """A row of each of ours beside every peer, each sampled once in every round."""
    samplers = ours | peers
    samples = {name: [] for name in samplers}
    for name in list(samplers) * rounds:
        samples[name].append(samplers[name]())
    pairs = product(ours, peers)
    return [row(name, samples[name], unit, p, samples[p]) for name, p in pairs]


def row(name: str, values: list, unit: str, peer: str, peer_values: list) -> dict:
    """Medians of both sides and how many times better ours is: peer / value for times
    and bytes, value / peer for rates."""
    value, theirs = statistics.median(values), statistics.median(peer_values)
    return {
        "name": name,
        "value": value,
        "unit": unit,
        "n": len(values),
        "samples": values,
        "peer": peer,
        "peer_value": theirs,
        "peer_samples": peer_values,
        "ratio": value / theirs if unit.endswith("/s") else theirs / value,
    }


def apart(function: Callable, *arguments):
    """`function(*arguments)` in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def checkpoint(args, **config) -> Path:
    """A checkpoint of the dimensions of Qwen2.5-0.5B or ZAYA1-8B, which are
    transformers' defaults for zaya; written when it is missing."""
    path = args.folder / f"{args.family}-{args.layers}"
    dims = (QWEN2 if args.family == "qwen2" else {}) | config
    if not path.exists():
        checkpoints.random(path, args.family, num_hidden_layers=args.layers, **dims)
    return path


def bundle_of(checkpoint: Path, **options) -> workbench.Bundle:
    """The bundle of a checkpoint, exported when it is missing."""
    path = checkpoint.with_name(
        "-".join(map(str, (checkpoint.name, *options.values())))
    )
    if (path / "bundle.json").exists():
        return workbench.Bundle.open(path)
    return workbench.export.export(checkpoint, path, **options)


def opened(bundle: workbench.Bundle) -> workbench.Decoder:
    return workbench.Decoder(bundle, "portable", fast=True)


def ours(decoder: workbench.Decoder) -> Contestant:
    def at(depth: int) -> Step:
        prefill(decoder, [7] * depth)
        return partial(decoder.decode_one_token, 7)

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

    config = AutoConfig.from_pretrained(checkpoint)
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


def llama_cpp(checkpoint: Path, kind: str, S: int) -> Contestant:
    """llama.cpp on a GGUF of a Qwen2 checkpoint, whose matrices are of type `kind`.

    A build for AMX crashes on some virtual machines: build llama.cpp with
    GGML_AMX_TILE=OFF and GGML_AMX_INT8=OFF."""
    path = checkpoint.with_name(f"{checkpoint.name}.{kind}.gguf")
    if not path.exists():
        write_gguf(checkpoint, kind, path.with_suffix(".unfinished"))
        path.with_suffix(".unfinished").rename(path)
    count = torch.get_num_threads()
    threads = {"n_threads": count, "n_threads_batch": count}
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


def rate(contestant: Contestant, depth: int) -> float:
    """tok/s at a depth."""
    step = contestant(depth)
    step()
    return 1 / statistics.median(seconds(step) for _ in range(STEPS))


def decode_rows(bundles: dict, checkpoint: Path, rounds: int) -> list[dict]:
    """One decode step of each bundle, of Hugging Face's model with a static cache and,
    where it can be imported, of llama.cpp, from token id to logits; the peak memory of
    each bundle."""
    S = next(iter(bundles.values())).manifest.options.max_seq_len
    mine = {name: ours(opened(bundle)) for name, bundle in bundles.items()}
    peers = {}
    for dtype in ("float16", "float32"):
        peers[f"HF {dtype}"] = static_cache(checkpoint, dtype, S)
    if all(map(find_spec, ("llama_cpp", "gguf"))):
        for kind in {ALIKE[name] for name in bundles if name in ALIKE}:
            peers[f"llama.cpp {kind}"] = llama_cpp(checkpoint, kind, S)
    rows = []
    for depth in DEPTHS:
        sides = [
            {
                f"{name} at {depth}": partial(rate, at, depth)
                for name, at in side.items()
            }
            for side in (mine, peers)
        ]
        rows += compare(*sides, rounds, "tok/s")
    for name, bundle in bundles.items():
        peak = apart(peak_of, bundle.root)
        rows.append(row(f"{name} peak", [peak], "bytes", "stored", [bundle.bytes]))
    return rows


def peak_of(path: Path) -> int:
    """Peak resident bytes of this process once it has opened a bundle and decoded."""
    decoder = opened(workbench.Bundle.open(path))
    decoder.generate([7] * 8, 8, stop=())
    return peak_rss()


def prompt_rows(bundles: dict, checkpoint: Path, rounds: int) -> list[dict]:
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


def prefill(decoder: workbench.Decoder, ids: list[int], T: int | None = None) -> None:
    decoder.begin()
    decoder.prefill(ids, T)


def bench_decode(args, rows=decode_rows) -> list[dict]:
    torch.set_num_threads(os.cpu_count())
    path, bundles = checkpoint(args), {}
    for preset in PRESETS:
        options = {"max_seq_len": 512, "compress": preset, "tokens": "1-64"}
        bundles[preset] = bundle_of(path, **options)
    return rows(bundles, path, args.rounds)


bench_prompt = partial(bench_decode, rows=prompt_rows)


def bench_export(args) -> list[dict]:
    source = checkpoint(args, dtype="bfloat16")
    return export_rows(source, args.folder / "export", args.compress, args.rounds)


def export_rows(source: Path, folder: Path, compress: str, rounds: int) -> list[dict]:
    """A whole export in a process of its own beside a copy of its files; its peak
    memory."""
    runs, target, copied = [], folder / "bundle", folder / "copy"

    def export() -> float:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        runs.append(apart(export_once, source, target, compress))
        return runs[-1]["seconds"]

    peers = {"copy": partial(seconds, partial(shutil.copytree, target, copied))}
    rows = compare({f"export {compress}": export}, peers, rounds, "s")
    shutil.rmtree(folder)
    peaks, stored = ([run[key] for run in runs] for key in ("peak", "bytes"))
    return [*rows, row("peak memory", peaks, "bytes", "stored", stored)]


def export_once(source: Path, target: Path, compress: str) -> dict:
    start = time.perf_counter()
    how = {"progress": False, "compress": compress}
    bundle = workbench.export.export(source, target, **how)
    took = time.perf_counter() - start
    return {"seconds": took, "bytes": bundle.bytes, "peak": peak_rss()}


def bench_validate(args) -> list[dict]:
    path = checkpoint(args)
    bundle = bundle_of(path, max_seq_len=128, compress=args.compress)
    return validate_rows(bundle, path, 64, args.rounds)


def validate_rows(bundle, path: Path, positions: int, rounds: int) -> list[dict]:
    """A validation against a golden, and one with the checkpoint too, each beside a
    forward pass of Hugging Face's model over as many tokens."""
    source = checkpoints.Checkpoint(path)
    draw = np.random.default_rng(0).integers
    ids = draw(0, bundle.manifest.dims.V, positions).tolist()
    reference, decoder = make_golden(source, ids), workbench.Decoder(bundle)
    forward = partial(hugging_face(path, "float32"), torch.tensor([ids]))
    against = partial(workbench.validate, decoder, reference)
    mine = {
        "validate with golden": partial(seconds, against),
        "and checkpoint": partial(seconds, partial(against, checkpoint=source)),
    }
    return compare(mine, {"HF fp32": partial(seconds, forward)}, rounds, "s")


def bench_log(args) -> list[dict]:
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        return log_rows(Path(folder), 10_000, args.rounds)


def log_rows(root: Path, runs: int, rounds: int) -> list[dict]:
    """Loading all runs of a log, the first time and again, beside pandas reading the
    same files."""
    import pandas as pd

    for i in range(runs):
        written = {"status": "ok", "command": "bench"}
        workbench.log.append("runs", written, root, f"run{i:06}")
    load = partial(seconds, partial(workbench.log.load, "runs", root))
    peer = partial(seconds, partial(pd.read_parquet, root / "runs"))
    first = row(f"load {runs} runs first", [load()], "s", "pandas", [peer()])
    again = {f"load {runs} runs again": load}
    return [first, *compare(again, {"pandas": peer}, rounds, "s")]


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = [name.removeprefix("bench_") for name in globals() if "bench_" in name]
    parser.add_argument("what", choices=kinds)
    parser.add_argument("--family", choices=("qwen2", "zaya"), default="qwen2")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compress", choices=PRESETS, default="int8-tensor")
    parser.add_argument("--folder", type=Path, default=Path("build/bench"))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    rows = globals()[f"bench_{args.what}"](args)
    if args.json:
        print(json.dumps(rows))
        return
    for found in rows:
        mine = f"{found['name']:40}{found['value']:12.4g} {found['unit']:8}"
        peer = f"{found['peer']} {found['peer_value']:.4g} ({found['ratio']:.2f} ×)"
        print(f"{mine}{peer}, n = {found['n']}")


if __name__ == "__main__":
    main()
