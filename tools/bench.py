"""Speeds of the portable runtime, of exports and of the log, each beside its peers in
the same run:

    python tools/bench.py decode | prompt | export | validate | log | cell

Contestants take turns, round by round, and every sample is kept (--json). The models
have real dimensions and random weights; checkpoints and bundles stay in --folder."""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

import psutil
import torch
from cyclopts import run

import workbench
from workbench.ane.memory import peak_rss
from workbench.bundle import PRESETS
from workbench.cli.common import table
from workbench.export import options, shards, template, weights
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
DIMS = {"qwen2": QWEN2, "zaya": {}}
DEPTHS = (64, 448)  # tokens in the cache
PROMPT_CALLS = (1, 4, 64)  # tokens of a call of a prompt
STEPS = 8  # timed steps of one sample, whose median counts
# preset → llama.cpp's type of weights of about as many bytes
ALIKE = {"fp16": "F16", "int8-tensor": "Q8_0", "int4-block32": "Q4_0"}
TOKEN = 7
Step = Callable[[], object]
# starts a sequence with a prompt of ids; decodes one token more
Contestant = tuple[Callable[[list[int]], object], Step]


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
    return [
        row(name, samples[name], unit, peer, samples[peer])
        for name in ours
        for peer in peers
    ]


def row(name: str, values: list, unit: str, peer: str, peer_values: list) -> dict:
    """Medians of both sides and how many times better ours is: peer / value for times
    and bytes, value / peer for rates."""
    value, theirs = statistics.median(values), statistics.median(peer_values)
    return {
        "name": name,
        "value": value,
        "unit": unit,
        "samples": values,
        "peer": peer,
        "peer_value": theirs,
        "peer_samples": peer_values,
        "ratio": value / theirs if unit == "tok/s" else theirs / value,
    }


def apart(function: Callable, *arguments):
    """`function(*arguments)` in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def checkpoint(folder: Path, family: str, layers: int) -> Path:
    """A checkpoint in bf16 of the dimensions of Qwen2.5-0.5B or ZAYA1-8B, which are
    transformers' defaults for zaya; written when it is missing."""
    path = folder / f"{family}-{layers}"
    config = {"num_hidden_layers": layers, "dtype": "bfloat16"} | DIMS[family]
    if not path.exists():
        checkpoints.random(path, family, **config)
    return path


def ours(bundle: workbench.Bundle) -> Contestant:
    decoder = workbench.Decoder(bundle, "portable", fast=True)

    def read(ids: list[int], T: int | None = None) -> None:
        decoder.begin()
        decoder.prefill(ids, T)

    return read, partial(decoder.decode_one_token, TOKEN)


def hugging_face(source: Path, dtype: str, S: int) -> Contestant:
    """Hugging Face's model with a static cache of S positions."""
    from transformers import AutoModelForCausalLM, StaticCache

    load = AutoModelForCausalLM.from_pretrained
    model = load(source, dtype=getattr(torch, dtype)).eval()
    cache = StaticCache(model.config, max_cache_len=S)

    @torch.inference_mode()
    def call(ids: list[int], fresh: bool = True) -> None:
        if fresh:
            cache.reset()
        model(torch.tensor([ids]), past_key_values=cache, logits_to_keep=1)

    return call, partial(call, [TOKEN], fresh=False)


def llama_cpp(source: Path, kind: str, S: int) -> Contestant:
    """llama.cpp on a GGUF of a Qwen2 checkpoint, whose matrices are of type `kind`.

    A build for AMX crashes on some virtual machines: build llama.cpp with
    GGML_AMX_TILE=OFF and GGML_AMX_INT8=OFF."""
    path = source.with_name(f"{source.name}.{kind}.gguf")
    if not path.exists():
        write_gguf(source, kind, path.with_suffix(".unfinished"))
        path.with_suffix(".unfinished").rename(path)
    count = torch.get_num_threads()
    threads = {"n_threads": count, "n_threads_batch": count}
    llama = import_module("llama_cpp").Llama
    model = llama(str(path), n_ctx=S, verbose=False, **threads)

    def call(ids: list[int], fresh: bool = True) -> None:
        if fresh:
            model.reset()
        model.eval(ids)
        model._ctx.get_logits()

    return call, partial(call, [TOKEN], fresh=False)


def write_gguf(source: Path, kind: str, path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoConfig

    gguf, config = import_module("gguf"), AutoConfig.from_pretrained(source)
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
    for file in source.glob("*.safetensors"):
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


def contestants(bundles: dict, source: Path) -> tuple[dict, dict]:
    """Each bundle; Hugging Face's model with a static cache and, where it can be
    imported, llama.cpp."""
    S = next(iter(bundles.values())).manifest.options.max_seq_len
    mine = {name: ours(bundle) for name, bundle in bundles.items()}
    dtypes = "float32", "float16", "bfloat16"
    peers = {f"HF {dtype}": hugging_face(source, dtype, S) for dtype in dtypes}
    if find_spec("llama_cpp") and find_spec("gguf"):
        for kind in {ALIKE[name] for name in bundles if name in ALIKE}:
            peers[f"llama.cpp {kind}"] = llama_cpp(source, kind, S)
    return mine, peers


def decode_rate(depth: int, contestant: Contestant) -> float:
    """tok/s of calls of one token behind `depth` tokens, from token id to logits."""
    read, step = contestant
    read([TOKEN] * depth)
    step()
    return 1 / statistics.median(seconds(step) for _ in range(STEPS))


def prompt_rate(read: Callable, *T: int) -> float:
    """tok/s of a prompt, from token ids to the logits of the last one."""
    ids = [TOKEN] * DEPTHS[-1]
    return len(ids) / seconds(partial(read, ids, *T))


def decode_rows(mine: dict, peers: dict, rounds: int) -> list[dict]:
    def at(depth: int, side: dict) -> dict:
        rate = partial(partial, decode_rate, depth)
        return {f"{name} at {depth}": rate(each) for name, each in side.items()}

    rows = []
    for depth in DEPTHS:
        rows += compare(at(depth, mine), at(depth, peers), rounds, "tok/s")
    return rows


def prompt_rows(mine: dict, peers: dict, rounds: int) -> list[dict]:
    """Prompts in calls of 1, 4 and 64 tokens; those of the peers in one call."""
    ours = {
        f"prompt, {name}, T = {T}": partial(prompt_rate, read, T)
        for name, (read, _) in mine.items()
        for T in PROMPT_CALLS
    }
    theirs = {name: partial(prompt_rate, read) for name, (read, _) in peers.items()}
    for call in [*ours.values(), *theirs.values()]:
        call()  # compiles kernels and fills caches
    return compare(ours, theirs, rounds, "tok/s")


def export_rows(
    fewer: Path, source: Path, folder: Path, compress: str, rounds: int
) -> list[dict]:
    """A whole export, and a further layer of it, beside coremltools' own conversion of
    the same shards; the peak of anonymous and of resident memory. Each export is in a
    process of its own; `fewer` is the checkpoint with half of the layers."""
    further, found = [], []
    layer, every = apart(plain_seconds, source, compress)
    for _ in range(rounds):
        pair = []
        for path in (fewer, source):
            shutil.rmtree(folder, ignore_errors=True)
            pair.append(apart(export_once, path, folder, compress))
        (less, *_, fewer_layers), (more, *_, layers) = pair
        further.append((more - less) / (layers - fewer_layers))
        found.append(pair[1])
    shutil.rmtree(folder)
    whole, stored, anonymous, resident, _ = map(list, zip(*found))
    plain = "coremltools, one shard of each kind × their number"
    return [
        row(f"export {compress}", whole, "s", plain, [every]),
        row("a further layer", further, "s", "coremltools", [layer]),
        row("peak of anonymous memory", anonymous, "bytes", "stored", stored),
        row("peak of resident memory", resident, "bytes", "stored", stored),
    ]


def plain_seconds(source: Path, compress: str) -> tuple[float, float]:
    """Seconds that coremltools takes to convert, compress and save: a shard of one
    layer, and all shards, of which one of each kind is converted."""
    how = options(compress=compress)
    whole = checkpoints.Checkpoint(source)
    plan = workbench.export.read_plan(whole, how)
    specs, one = list(shards.specs(plan, how)), {}
    for spec in {spec.kind: spec for spec in specs}.values():
        sources = weights.weight_sources(spec, whole, plan, how)
        conversion = partial(template.Template, spec, plan, how, sources)
        one[spec.kind] = seconds(conversion)
    kinds = Counter(spec.kind for spec in specs)
    return one["layers"], sum(one[kind] * count for kind, count in kinds.items())


def export_once(source: Path, target: Path, compress: str) -> tuple:
    """Seconds, stored bytes, peak of anonymous and of resident bytes, layers."""
    peak, over, memory = [0], threading.Event(), psutil.Process().memory_info

    def watch() -> None:
        while not over.wait(0.01):
            now = memory()
            peak.append(now.rss - now.shared)

    watcher = threading.Thread(target=watch)
    watcher.start()
    how = {"compress": compress}
    took = seconds(partial(workbench.export.export, source, target, **how))
    over.set()
    watcher.join()
    bundle = workbench.Bundle.open(target)
    return took, bundle.bytes, max(peak), peak_rss(), bundle.manifest.dims.L


def validate_rows(bundle, path: Path, positions: int, rounds: int) -> list[dict]:
    """A validation against a golden, and one with the checkpoint too, each beside a
    forward pass of Hugging Face's model over as many tokens."""
    source = checkpoints.Checkpoint(path)
    ids = list(range(positions))
    golden, decoder = (
        workbench.golden.make_golden(source, ids),
        workbench.Decoder(bundle),
    )
    against = partial(workbench.validate, decoder, golden)
    known = replace(golden, source=source)
    every = partial(workbench.validate, decoder, known, again=True)
    mine = {
        "validate with golden": partial(seconds, against),
        "and checkpoint": partial(seconds, every),
    }
    call, _ = hugging_face(path, "float32", positions)
    forward = partial(call, ids)
    return compare(mine, {"HF fp32": partial(seconds, forward)}, rounds, "s")


def log_rows(root: Path, rounds: int, runs: int = 10_000) -> list[dict]:
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


def cell_rows(root: Path, rounds: int) -> list[dict]:
    """Seconds from the start of a cell's process to its first call, of a bundle that is
    there, beside those of an interpreter that imports torch."""
    path = Path(__file__).parents[1] / "data" / "tiny-llama"
    cell = {"rounds": rounds, "n_gen": 1, "repetitions": 1}
    grid = {"checkpoint": str(path), "export": {"max_seq_len": [64]}, "run": cell}
    how = {"root": root, "bundles": root.parent, "progress": False}
    workbench.sweep.sweep(workbench.sweep.make_grid(grid), **how)
    configs = workbench.log.load("runs", root)["config"].map(json.loads)
    starts = [config["startup_s"] for config in configs]
    peer = partial(subprocess.run, [sys.executable, "-c", "import torch"])
    torch_s = [seconds(peer) for _ in range(rounds)]
    return [row("overhead of a cell", starts, "s", "import torch", torch_s)]


def main(
    what: Literal["decode", "prompt", "export", "validate", "log", "cell"],
    *,
    family: Literal["qwen2", "zaya"] = "qwen2",
    layers: int = 24,
    rounds: int = 5,
    compress: str = "int8-tensor",
    folder: Path = Path("build/bench"),
    json_: bool = False,
) -> None:
    """Prints the rows of a measurement."""
    folder.mkdir(parents=True, exist_ok=True)
    made = partial(checkpoint, folder, family)

    def bundle(**chosen) -> workbench.Bundle:
        source = checkpoints.Checkpoint(made(layers))
        return workbench.export.bundle_for(source, options(**chosen), folder)

    if what == "export":
        sources = made(layers // 2), made(layers)
        rows = export_rows(*sources, folder / "export", compress, rounds)
    elif what == "validate":
        found = bundle(max_seq_len=128, compress=compress)
        rows = validate_rows(found, made(layers), 64, rounds)
    elif what in ("log", "cell"):
        with tempfile.TemporaryDirectory(dir=folder) as root:
            rows = {"log": log_rows, "cell": cell_rows}[what](Path(root), rounds)
    else:
        torch.set_num_threads(os.cpu_count())
        how = {"max_seq_len": 512, "tokens": "1-64"}
        bundles = {preset: bundle(compress=preset, **how) for preset in PRESETS}
        timed = decode_rows if what == "decode" else prompt_rows
        rows = timed(*contestants(bundles, made(layers)), rounds)
    if json_:
        print(json.dumps(rows))
        return
    medians = [{n: row[n] for n in row if "samples" not in n} for row in rows]
    print("\n".join(table(medians)))


if __name__ == "__main__":
    run(main)
