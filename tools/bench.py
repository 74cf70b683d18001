"""Measures the portable runtime, exports, validations and the log, each beside its peers in the
same run:

    python tools/bench.py decode | prompt | export | validate | log | cell

Contestants take turns, round by round. It prints medians, or every sample with --json. The models
have real dimensions and random weights; checkpoints and bundles stay in --folder."""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch
from cyclopts import run

import workbench
from workbench.ane.memory import peak_rss
from workbench.bundle import PRESETS
from workbench.cli.common import format_table
from workbench.exporter import make_options, shards, template, weights
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
STEPS = 8  # timed steps of one sample, which is their tokens over their time
# preset → llama.cpp's type of weights of about as many bytes
ALIKE = {"fp16": "F16", "int8-tensor": "Q8_0", "int4-block32": "Q4_0"}
TOKEN = 7
Step = Callable[[], object]
# starts a sequence; continues it by token ids, up to the logits of the last one
Contestant = tuple[Step, Callable[[list[int]], object]]


def seconds(step: Step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def compare(samplers: dict[str, Callable], rounds: int, unit: str) -> list[dict]:
    """Calls every sampler once in each round. Returns a row for each."""
    samples = {name: [] for name in samplers}
    for name in list(samplers) * rounds:
        samples[name].append(samplers[name]())
    return [row(name, values, unit) for name, values in samples.items()]


def row(name: str, samples: list[float], unit: str) -> dict:
    median = statistics.median(samples)
    return {"name": name, "median": median, "unit": unit, "samples": samples}


def run_in_process(function: Callable, *arguments):
    """Runs `function(*arguments)` in a fresh process."""
    # a pool with this limit spawns its processes, and does not fork them
    with ProcessPoolExecutor(1, max_tasks_per_child=1) as pool:
        return pool.submit(function, *arguments).result()


def checkpoint(folder: Path, family: str, layers: int) -> Path:
    """A random checkpoint in bf16 with the dimensions of Qwen2.5-0.5B or ZAYA1-8B, written when it
    is missing. Transformers' defaults for zaya are those of ZAYA1-8B."""
    path = folder / f"{family}-{layers}"
    config = {"num_hidden_layers": layers, "dtype": "bfloat16"} | DIMS[family]
    if not path.exists():
        checkpoints.random(path, family, **config)
    return path


def hugging_face(source: Path, dtype: str, S: int) -> Contestant:
    """Hugging Face's model with a static cache of S positions."""
    from transformers import AutoModelForCausalLM, StaticCache

    load = AutoModelForCausalLM.from_pretrained
    model = load(source, dtype=getattr(torch, dtype), trust_remote_code=False).eval()
    cache = StaticCache(model.config, max_cache_len=S)

    @torch.inference_mode()
    def call(ids: list[int]) -> None:
        model(torch.tensor([ids]), past_key_values=cache, logits_to_keep=1)

    return torch.inference_mode()(cache.reset), call


def llama_cpp(source: Path, kind: str, S: int) -> Contestant:
    """llama.cpp on a GGUF of a Qwen2 checkpoint. `kind` is the type of its matrices.

    A build for AMX crashes on some virtual machines: build llama.cpp with
    GGML_AMX_TILE=OFF and GGML_AMX_INT8=OFF."""
    path = source.with_name(f"{source.name}.{kind}.gguf")
    if not path.exists():
        write_gguf(source, kind, path)
    count = torch.get_num_threads()
    model = import_module("llama_cpp").Llama(
        str(path), n_ctx=S, n_threads=count, n_threads_batch=count, verbose=False
    )

    def call(ids: list[int]) -> None:
        model.eval(ids)
        model._ctx.get_logits()

    return model.reset, call


def write_gguf(source: Path, kind: str, path: Path) -> None:
    """Writes a Qwen2 checkpoint without its tokenizer."""
    from safetensors.torch import load_file
    from transformers import AutoConfig

    gguf = import_module("gguf")
    config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    types = gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    for file in source.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            values = tensor.float().numpy()
            place = names.get_name(name, try_suffixes=(".weight", ".bias"))
            stored = types[kind] if values.ndim > 1 else types.F32
            data = gguf.quants.quantize(values, stored)
            writer.add_tensor(place, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def contestants(
    bundles: dict, source: Path, calls: tuple = (None,)
) -> dict[str, Contestant]:
    """The contestants by name: every bundle, once for each number of tokens a call in `calls`;
    Hugging Face's model in three dtypes; and llama.cpp, where it can be imported. The last two
    read a prompt in one call."""
    peers = {}
    for name, bundle in bundles.items():
        decoder = workbench.Decoder(bundle, "portable", fast=True)
        for T in calls:
            title = f"{name}, T = {T}" if T else name
            peers[title] = decoder.begin, partial(decoder.prefill, tile=T)
    S = bundle.manifest.options.max_seq_len
    for dtype in ("float32", "float16", "bfloat16"):
        peers[f"HF {dtype}"] = hugging_face(source, dtype, S)
    if find_spec("llama_cpp") and find_spec("gguf"):
        for kind in {ALIKE[name] for name in bundles if name in ALIKE}:
            peers[f"llama.cpp {kind}"] = llama_cpp(source, kind, S)
    return peers


def decode_rate(depth: int, contestant: Contestant) -> float:
    """tok/s of calls of one token, after `depth` tokens."""
    begin, extend = contestant
    begin()
    extend([TOKEN] * depth)
    step = partial(extend, [TOKEN])
    step()
    return STEPS / sum(seconds(step) for _ in range(STEPS))


def prompt_rate(contestant: Contestant) -> float:
    """tok/s of a prompt."""
    begin, extend = contestant
    begin()
    ids = [TOKEN] * DEPTHS[-1]
    return len(ids) / seconds(partial(extend, ids))


def decode_rows(bundles: dict, source: Path, rounds: int) -> list[dict]:
    peers, rows = contestants(bundles, source), []
    for depth in DEPTHS:
        samplers = {
            f"{name} at {depth}": partial(decode_rate, depth, contestant)
            for name, contestant in peers.items()
        }
        rows += compare(samplers, rounds, "tok/s")
    return rows


def prompt_rows(bundles: dict, source: Path, rounds: int) -> list[dict]:
    peers = contestants(bundles, source, PROMPT_CALLS)
    samplers = {
        name: partial(prompt_rate, contestant) for name, contestant in peers.items()
    }
    for sample in samplers.values():
        sample()  # compiles kernels and fills caches
    return compare(samplers, rounds, "tok/s")


def export_rows(source: Path, folder: Path, compress: str, rounds: int) -> list[dict]:
    """Whole exports, each in a process of its own, beside coremltools' conversion of the same
    shards, and their peak of resident memory."""
    plain = [run_in_process(plain_seconds, source, compress) for _ in range(rounds)]
    exports = [
        run_in_process(export_twice, source, folder, compress) for _ in range(rounds)
    ]
    first, second, resident = map(list, zip(*exports))
    return [
        row(f"export {compress}, the first of a process", first, "s"),
        row(f"export {compress}, the second", second, "s"),
        row("coremltools, one shard of each kind × their number", plain, "s"),
        row("peak of resident memory", resident, "bytes"),
    ]


def plain_seconds(source: Path, compress: str) -> float:
    """Seconds that coremltools takes to convert, compress and save all shards. One shard of each
    kind is converted twice, and the second time is multiplied by the number of its kind."""
    export_options = make_options(compress=compress)
    whole = checkpoints.Checkpoint(source)
    plan = workbench.exporter.read_plan(whole, export_options)
    specs = list(shards.specs(plan, export_options))
    kinds, total = Counter(spec.kind for spec in specs), 0

    def convert(spec: shards.Spec) -> None:
        sources = weights.weight_sources(spec, whole, plan, export_options)
        module = weights.blank(spec, plan, export_options).requires_grad_(False).eval()
        for weight in sources:
            values = weights.load_values(weight, whole).float()
            module.get_parameter(weight.path).data = values.reshape(weight.shape)
        with tempfile.TemporaryDirectory() as folder:
            model = template.to_program(module, spec, export_options, sources)
            model.save(f"{folder}/shard.mlpackage")

    for spec in {spec.kind: spec for spec in specs}.values():
        convert(spec)
        total += kinds[spec.kind] * seconds(partial(convert, spec))
    return total


def export_twice(source: Path, target: Path, compress: str) -> tuple[float, float, int]:
    """Seconds of the first and the second export, and the peak of resident bytes."""
    export = partial(workbench.exporter.export, source, target, compress=compress)
    first = seconds(export)
    shutil.rmtree(target)
    second = seconds(export)
    shutil.rmtree(target)
    return first, second, peak_rss()


def validate_rows(bundle, path: Path, positions: int, rounds: int) -> list[dict]:
    """A validation with the checkpoint, which runs and stores the bug gates, and a validation
    against a golden, which reads them, beside a forward pass of Hugging Face's model over as many
    tokens."""
    source = checkpoints.Checkpoint(path)
    ids = list(range(positions))
    golden = workbench.golden.make_golden(source, ids)
    decoder = workbench.Decoder(bundle)
    with_checkpoint = replace(golden, source=source)
    begin, extend = hugging_face(path, "float32", positions)

    def forward() -> None:
        begin()
        extend(ids)

    # again: the gates run in every round, although their results are stored
    run_gates = partial(workbench.validate, decoder, with_checkpoint, again=True)
    read_gates = partial(workbench.validate, decoder, golden)
    samplers = {
        "validate with checkpoint": partial(seconds, run_gates),
        "validate with golden": partial(seconds, read_gates),
        "HF fp32": partial(seconds, forward),
    }
    return compare(samplers, rounds, "s")


def log_rows(root: Path, rounds: int, runs: int = 10_000) -> list[dict]:
    """The time to load all runs of a log, beside pandas reading the same files. The first sample is
    that of the first load in this process."""
    import pandas as pd

    for i in range(runs):
        written = {"status": "ok", "command": "bench"}
        workbench.log.append("runs", written, root, f"run{i:06}")
    load = partial(workbench.log.load, "runs", root)
    peer = partial(pd.read_parquet, root / "runs")
    samplers = {"load": partial(seconds, load), "pandas": partial(seconds, peer)}
    return compare(samplers, rounds, "s")


def cell_rows(root: Path, rounds: int) -> list[dict]:
    """Seconds from the start of a cell's process to its first call, for a bundle that exists,
    beside an interpreter that imports torch."""
    path = Path(__file__).parents[1] / "data" / "tiny-llama"
    cell = {"rounds": rounds, "n_gen": 1, "repetitions": 1}
    grid = {"checkpoint": str(path), "export": {"max_seq_len": [64]}, "run": cell}
    workbench.sweep.sweep(
        workbench.sweep.make_grid(grid), root=root, bundles=root.parent, progress=False
    )
    configs = workbench.log.load("runs", root)["config"].map(json.loads)
    starts = [config["startup_s"] for config in configs]
    peer = partial(subprocess.run, [sys.executable, "-c", "import torch"])
    peers = compare({"import torch": partial(seconds, peer)}, rounds, "s")
    return [row("overhead of a cell", starts, "s"), *peers]


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
    if what in ("log", "cell"):
        with tempfile.TemporaryDirectory(dir=folder) as root:
            rows = {"log": log_rows, "cell": cell_rows}[what](Path(root), rounds)
    else:
        path = checkpoint(folder, family, layers)
        source = checkpoints.Checkpoint(path)
        export = partial(workbench.exporter.bundle_for, source, folder=folder)
        if what == "export":
            rows = export_rows(path, folder / "export", compress, rounds)
        elif what == "validate":
            bundle = export(make_options(max_seq_len=128, compress=compress))
            rows = validate_rows(bundle, path, 64, rounds)
        else:
            torch.set_num_threads(os.cpu_count())
            bundles = {
                name: export(
                    make_options(compress=name, max_seq_len=512, tokens="1-64")
                )
                for name in PRESETS
            }
            if what == "decode":
                rows = decode_rows(bundles, path, rounds)
            else:
                rows = prompt_rows(bundles, path, rounds)
    medians = [{n: row[n] for n in row if n != "samples"} for row in rows]
    print(json.dumps(rows) if json_ else "\n".join(format_table(medians)))


if __name__ == "__main__":
    run(main)
