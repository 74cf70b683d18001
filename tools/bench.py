"""Measures the portable runtime, exports, validations, evaluations and the log, each beside its
*peers*, the other programs, in the same run:

    python tools/bench.py decode | prompt | export | validate | evaluate | log | cell
    python tools/bench.py all      # all of them, in a process each, and writes the tables
    python tools/bench.py table    # writes the tables from experiments/benchmarks

The README has the rows of `README_ROWS`, the page experiments/benchmarks/README.md has all rows.

Contestants, the workbench and its peers, take turns, round by round. A measurement prints its
ratios and medians, and writes every sample, with the machine, its load, versions and commit, to
COMMAND.json in --out. The models have real dimensions and random weights; --real takes
SmolLM2-135M-Instruct. Checkpoints and bundles stay in --folder."""

import json
import math
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
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from cyclopts import run

import workbench
from workbench import Bundle, log, sweep
from workbench.ane.memory import peak_rss
from workbench.check import evaluate
from workbench.check.text import default_ids
from workbench.errors import InputError
from workbench.exporter import make_options, shards, template, weights
from workbench.log import machine
from workbench.models.checkpoint import Checkpoint
from workbench.models.random_checkpoint import write_random_checkpoint

sys.path.insert(0, str(Path(__file__).parent))
from bench_record import (
    Comparison,
    Measurement,
    Series,
    write_tables,
)  # beside this script

ROOT = Path(__file__).resolve().parents[1]
REAL = ROOT / "data" / "smollm2-135m-instruct"
PUBLISHED = ROOT / "experiments" / "benchmarks"

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
PROMPT_TOKENS = 448
CALLS = (1, 4, 64)  # tokens of a call of a prompt
RUN_PRESETS = ("int8-channel", "int8-tensor", "int4-block32", "fp16")
TEXT_TOKENS = 1024
STEPS = 8  # timed calls of one token in a sample, which is their number over their time
# preset → llama.cpp's type of weights of about as many bytes
LLAMA_CPP_TYPES = {
    "fp16": "F16",
    "int8-channel": "Q8_0",
    "int8-tensor": "Q8_0",
    "int4-block32": "Q4_0",
}
# preset → Hugging Face's dtype beside it: that of the checkpoint, or of the stored weights
HF_DTYPES = {"int8-channel": "bfloat16", "fp16": "float16"}
IGNORED_LABEL = -100  # transformers computes no loss of such a label
# the measurements behind the tables: command → its options
PUBLISHED_RUNS = {
    "decode": ["--depths", "64", "--presets", "int8-channel", "--presets", "fp16"]
    + ["--presets", "int4-block32"],
    "prompt": ["--calls", "64", "--presets", "int8-channel", "--presets", "fp16"],
    "export": [],
    "validate": ["--real"],
    "evaluate": ["--real"],
    "log": ["--runs", "2000"],
    "cell": [],
}
TOKEN = 7  # the id of every token that is decoded; times do not depend on it
Step = Callable[[], object]
"""What is timed."""
Sampler = Callable[[], float]
"""Measures one sample of a series."""


class Contestant(NamedTuple):
    """A model that a benchmark times."""

    begin: Step
    """Starts a sequence."""
    extend: Callable[[list[int]], object]
    """Continues the sequence by token ids, up to the logits of the last one."""


class Missing(NamedTuple):
    """A contestant that cannot run here."""

    reason: str


def seconds(step: Step) -> float:
    """The seconds of one call by the clock."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def take_turns(samplers: dict[str, Sampler], rounds: int, unit: str) -> list[Series]:
    """Calls every sampler once in each round. Returns a series for each."""
    samples = {name: [] for name in samplers}
    for _ in range(rounds):
        for name, sample in samplers.items():
            samples[name].append(sample())
    return [Series(name, unit, values) for name, values in samples.items()]


def run_in_process(function: Callable, *arguments):
    """Runs `function(*arguments)` in a fresh process."""
    # a pool with this limit spawns its processes, and does not fork them
    with ProcessPoolExecutor(1, max_tasks_per_child=1) as pool:
        return pool.submit(function, *arguments).result()


def random_checkpoint(folder: Path, family: str, layers: int) -> Path:
    """A random checkpoint in bf16 with the dimensions of Qwen2.5-0.5B or ZAYA1-8B, written when it
    is missing. Transformers' defaults for zaya are those of ZAYA1-8B."""
    path = folder / f"{family}-{layers}"
    config = {"num_hidden_layers": layers, "dtype": "bfloat16"} | DIMS[family]
    if not path.exists():
        write_random_checkpoint(path, family, **config)
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

    return Contestant(torch.inference_mode()(cache.reset), call)


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

    return Contestant(model.reset, call)


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
            gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
            stored = types[kind] if values.ndim > 1 else types.F32
            data = gguf.quants.quantize(values, stored)
            writer.add_tensor(gguf_name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def contestants(
    bundles: dict[str, Bundle], source: Path, calls: tuple[int | None, ...] = (None,)
) -> dict[str, Contestant | Missing]:
    """The contestants by name: every bundle, once for each number of tokens a call in `calls`;
    Hugging Face's model in three dtypes; and llama.cpp, where it can be imported. The last two, the
    peers, read a prompt in one call.

    Args:
        bundles: preset → bundle, all of one checkpoint.
        source: the checkpoint's folder.
        calls: None: as many tokens as a call can have.
    """
    contestants_by_name: dict[str, Contestant | Missing] = {}
    for preset, bundle in bundles.items():
        decoder = workbench.Decoder(bundle, "portable", fast=True)
        for T in calls:
            name = in_calls_of(T, preset) if T else preset
            extend = partial(decoder.prefill, tile=T)
            contestants_by_name[name] = Contestant(decoder.begin, extend)
    S = bundle.manifest.options.max_seq_len
    for dtype in ("float32", "float16", "bfloat16"):
        contestants_by_name[f"HF {dtype}"] = hugging_face(source, dtype, S)
    has_llama_cpp = find_spec("llama_cpp") and find_spec("gguf")
    kinds = {LLAMA_CPP_TYPES[name] for name in bundles if name in LLAMA_CPP_TYPES}
    for kind in sorted(kinds):
        peer = Missing("llama_cpp cannot be imported")
        if has_llama_cpp:
            peer = llama_cpp(source, kind, S)
        contestants_by_name[f"llama.cpp {kind}"] = peer
    return contestants_by_name


def peers_of(preset: str) -> list[str]:
    """The names of the contestants that a preset is compared with: llama.cpp's type of as many
    bytes, and Hugging Face's model."""
    peers = []
    if preset in LLAMA_CPP_TYPES:
        peers.append(f"llama.cpp {LLAMA_CPP_TYPES[preset]}")
    if preset in HF_DTYPES:
        peers.append(f"HF {HF_DTYPES[preset]}")
    return peers


def at_depth(depth: int, contestant: str) -> str:
    """The name of the series of a contestant with `depth` tokens in its cache."""
    return f"{contestant} at {depth}"


def in_calls_of(T: int, preset: str) -> str:
    """The name of the series of a preset in calls of T tokens."""
    return f"{preset}, T = {T}"


def decode_rate(depth: int, contestant: Contestant) -> float:
    """tok/s of calls of one token, after `depth` tokens."""
    contestant.begin()
    contestant.extend([TOKEN] * depth)
    step = partial(contestant.extend, [TOKEN])
    step()
    return STEPS / sum(seconds(step) for _ in range(STEPS))


def prompt_rate(contestant: Contestant) -> float:
    """tok/s of a prompt."""
    contestant.begin()
    ids = [TOKEN] * PROMPT_TOKENS
    return len(ids) / seconds(partial(contestant.extend, ids))


def measure_rates(
    contestants: dict[str, Contestant | Missing],
    rate: Callable[[Contestant], float],
    rounds: int,
) -> list[Series]:
    """tok/s of every contestant, a series of its name."""
    samplers, missing = {}, []
    for name, contestant in contestants.items():
        if isinstance(contestant, Missing):
            missing.append(Series(name, "tok/s", None, contestant.reason))
        else:
            samplers[name] = partial(rate, contestant)
    for sample in samplers.values():
        sample()  # compiles kernels and fills caches
    return take_turns(samplers, rounds, "tok/s") + missing


def measure_decode(
    bundles: dict[str, Bundle], source: Path, rounds: int, depths: tuple = DEPTHS
) -> Measurement:
    """tok/s of calls of one token, beside llama.cpp and Hugging Face."""
    contestants_by_name = contestants(bundles, source)
    series, comparisons = [], []
    for depth in depths:
        at_this_depth = {
            at_depth(depth, name): contestant
            for name, contestant in contestants_by_name.items()
        }
        series += measure_rates(at_this_depth, partial(decode_rate, depth), rounds)
        comparisons += [
            Comparison(
                what=f"decode, {preset}, {depth} tokens in the cache",
                series=at_depth(depth, preset),
                peer=at_depth(depth, peer),
            )
            for preset in bundles
            for peer in peers_of(preset)
        ]
    return Measurement(series, comparisons)


def measure_prompt(
    bundles: dict[str, Bundle], source: Path, rounds: int, calls: tuple = CALLS
) -> Measurement:
    """tok/s of a prompt. The peers read it in one call; the presets in the longest calls are
    compared with them."""
    series = measure_rates(contestants(bundles, source, calls), prompt_rate, rounds)
    T = max(calls)
    comparisons = [
        Comparison(
            what=f"prompt of {PROMPT_TOKENS} tokens, {preset}, T = {T}",
            series=in_calls_of(T, preset),
            peer=peer,
        )
        for preset in bundles
        for peer in peers_of(preset)
    ]
    return Measurement(series, comparisons)


def measure_beside(
    peer: str,
    peer_sampler: Sampler,
    samplers: dict[str, Sampler],
    rounds: int,
    unit: str,
    conditions: str,
) -> Measurement:
    """Measures what the samplers of the workbench name, each beside the one peer.

    Args:
        conditions: of all of them, such as "SmolLM2 135M, 48 tokens".
    """
    series = take_turns(samplers | {peer: peer_sampler}, rounds, unit)
    comparisons = [Comparison(f"{name}, {conditions}", name, peer) for name in samplers]
    return Measurement(series, comparisons)


def measure_export(
    source: Path, folder: Path, compress: str, rounds: int
) -> Measurement:
    """Whole exports, each in a process of its own, beside coremltools' conversion of the same
    shards, and their peak of resident memory."""
    plain: list[float] = []
    exports: list[ExportRun] = []
    for _ in range(rounds):
        plain.append(run_in_process(plain_seconds, source, compress))
        exports.append(run_in_process(export_once, source, folder, compress))
    peer = "coremltools, one shard of each kind × their number"
    peaks = [export.peak_rss_bytes for export in exports]
    series = [
        Series("export", "s", [export.seconds for export in exports]),
        Series(peer, "s", plain),
        Series("peak of resident memory", "bytes", peaks),
    ]
    return Measurement(series, [Comparison(f"export, {compress}", "export", peer)])


def plain_seconds(source: Path, compress: str) -> float:
    """Seconds that coremltools takes to convert, compress and save all shards. One shard of each
    kind is converted twice, and the second time is multiplied by the number of its kind."""
    export_options = make_options(compress=compress)
    whole = Checkpoint(source)
    plan = workbench.exporter.read_plan(whole, export_options)
    specs = list(shards.specs(plan, export_options))

    def convert(spec: shards.Spec) -> None:
        sources = weights.weight_sources(spec, whole, plan, export_options)
        module = (
            weights.empty_module(spec, plan, export_options)
            .requires_grad_(False)
            .eval()
        )
        for weight in sources:
            values = weights.load_values(weight, whole).float()
            module.get_parameter(weight.path).data = values.reshape(weight.shape)
        with tempfile.TemporaryDirectory() as folder:
            model = template.convert_module(module, spec, export_options, sources)
            model.save(f"{folder}/shard.mlpackage")

    count_of_kind = Counter(spec.kind for spec in specs)
    spec_of_kind = {spec.kind: spec for spec in specs}
    total = 0.0
    for kind, spec in spec_of_kind.items():
        convert(spec)
        total += count_of_kind[kind] * seconds(partial(convert, spec))
    return total


@dataclass(frozen=True)
class ExportRun:
    """The seconds of a process's first export, and its peak of resident bytes."""

    seconds: float
    peak_rss_bytes: int | None


def export_once(source: Path, target: Path, compress: str) -> ExportRun:
    """Exports a checkpoint, and removes the bundle."""
    export = partial(workbench.exporter.export, source, target, compress=compress)
    try:
        return ExportRun(seconds(export), peak_rss())
    finally:
        shutil.rmtree(target)


def make_forward_sampler(path: Path, ids: list[int]) -> Sampler:
    """A sampler of a *pass*: the seconds of Hugging Face's eager forward in fp32 over the tokens,
    the median of five."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
    ).eval()

    @torch.inference_mode()
    def forward() -> None:
        model(torch.tensor([ids]))

    forward()  # allocates
    return lambda: statistics.median(seconds(forward) for _ in range(5))


def measure_validate(
    bundle: Bundle, path: Path, ids: list[int], rounds: int, label: str
) -> Measurement:
    """A first validation with the checkpoint, which makes the golden and runs and stores the bug
    gates, and a validation against a golden, which reads them, beside a pass of Hugging Face's
    model over as many tokens."""
    source = Checkpoint(path)
    golden = workbench.golden.make_golden(source, ids)
    decoder = workbench.Decoder(bundle)

    def validate_first() -> None:
        fresh = workbench.golden.make_golden(source, ids)
        # again: the gates run in every round, although their results are stored
        workbench.validate(decoder, replace(fresh, source=source), run_on_decoder=True)

    read_gates = partial(workbench.validate, decoder, golden)
    return measure_beside(
        "HF fp32, one pass",
        make_forward_sampler(path, ids),
        {
            "first validation with checkpoint": partial(seconds, validate_first),
            "validation against a golden": partial(seconds, read_gates),
        },
        rounds,
        "s",
        f"{label}, {len(ids)} tokens",
    )


def documented_loop(model, ids: list[int], window: int, stride: int) -> float:
    """The mean negative log likelihood by transformers' documented loop: windows of `window`
    tokens, one every `stride`, every token scored once, in fp32.

    Source: https://huggingface.co/docs/transformers/perplexity"""
    total, scored = 0.0, 0  # nats, and tokens with a loss
    previous_end = 0
    for begin in range(0, len(ids), stride):
        end = min(begin + window, len(ids))
        inputs = torch.tensor([ids[begin:end]])
        labels = inputs.clone()
        labels[:, : -(end - previous_end)] = IGNORED_LABEL
        # a token's label is its successor, so that the first label of a window has no loss
        count = int((labels[:, 1:] != IGNORED_LABEL).sum())
        total += float(model(inputs, labels=labels).loss) * count
        scored += count
        previous_end = end
        if end == len(ids):
            break
    return total / scored


def measure_evaluate(
    bundle: Bundle, path: Path, ids: list[int], rounds: int, label: str
) -> Measurement:
    """tok/s of `evaluate`, with and without the checkpoint, beside Hugging Face's own loop over the
    same windows."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, trust_remote_code=False
    ).eval()
    decoder = workbench.Decoder(bundle)
    window = bundle.manifest.options.max_seq_len
    loop = torch.inference_mode()(documented_loop)

    def rate(reference: Checkpoint | None, ids: list[int] = ids) -> float:
        with tempfile.TemporaryDirectory() as folder:
            score = partial(
                evaluate.evaluate,
                decoder,
                ids,
                reference,
                window=window,
                stride=window // 2,
                folder=Path(folder),
            )
            return len(ids) / seconds(score)

    def loop_rate() -> float:
        return len(ids) / seconds(partial(loop, model, ids, window, window // 2))

    rate(Checkpoint(path), ids[:16])  # compiles kernels
    loop_rate()
    return measure_beside(
        "HF fp32, documented loop",
        loop_rate,
        {
            "evaluate": partial(rate, None),
            "evaluate with checkpoint": partial(rate, Checkpoint(path)),
        },
        rounds,
        "tok/s",
        f"{label}, {len(ids)} tokens, T ≤ {decoder.options.t_max}",
    )


def measure_log(root: Path, rounds: int, runs: int = 10_000) -> Measurement:
    """The time to load all runs of a log, beside pandas reading the same files: once from a copy of
    the folder that no process has read, and later loads of one process."""
    import pandas as pd

    for i in range(runs):
        written = {"status": "ok", "command": "bench"}
        log.append("runs", written, root, f"run{i:06}")

    def load_copy() -> float:
        with tempfile.TemporaryDirectory(dir=root) as folder:
            copy = Path(folder) / "copy"
            shutil.copytree(root / "runs", copy / "runs")
            return seconds(partial(log.load, "runs", copy))

    load = partial(log.load, "runs", root)
    load()
    return measure_beside(
        "pandas",
        partial(seconds, partial(pd.read_parquet, root / "runs")),
        {"first load of a copy": load_copy, "later load": partial(seconds, load)},
        rounds,
        "s",
        f"{runs} runs",
    )


def measure_cell(root: Path, rounds: int) -> Measurement:
    """Seconds from the start of a cell's process to its first call, for a bundle that exists,
    beside an interpreter that imports torch."""
    path = ROOT / "data" / "tiny-llama"
    cell = {"rounds": rounds, "n_gen": 1, "repetitions": 1}
    grid = {"checkpoint": str(path), "export": {"max_seq_len": [64]}, "run": cell}
    sweep.sweep(sweep.make_grid(grid), root=root, bundles=root.parent, progress=False)
    configs = log.load("runs", root)["config"].map(json.loads)
    starts = [config["startup_s"] for config in configs]
    peer = "import torch"
    import_torch = partial(subprocess.run, [sys.executable, "-c", peer], check=True)
    series = take_turns({peer: partial(seconds, import_torch)}, rounds, "s")
    series.insert(0, Series("start of a cell", "s", starts))
    return Measurement(series, [Comparison("start of a cell", "start of a cell", peer)])


def text_ids(source: Checkpoint, count: int) -> list[int]:
    """The first tokens of the prose that comes with the package, repeated as often as needed;
    random ids for a checkpoint without a tokenizer."""
    ids = default_ids(source, count)
    return (ids * math.ceil(count / len(ids)))[:count]


@dataclass(frozen=True)
class BenchOptions:
    """The options of a measurement, see `main`."""

    real: bool
    family: str
    layers: int
    rounds: int
    compress: str
    presets: tuple[str, ...]
    depths: tuple[int, ...]
    calls: tuple[int, ...]
    runs: int

    @property
    def label(self) -> str:
        """The model in words."""
        if self.real:
            return "SmolLM2 135M"
        return f"{self.family}, {self.layers} random layers"

    def checkpoint_in(self, folder: Path) -> Path:
        """The path of the model's checkpoint, which is written into `folder` if it is a random
        one.

        Raises:
            InputError: the real model is missing.
        """
        if not self.real:
            return random_checkpoint(folder, self.family, self.layers)
        if not (REAL / "config.json").exists():
            step = f"run: {sys.executable} data/real.py smollm2"
            raise InputError(REAL, "no such folder", "the real model", step)
        return REAL


def prepare(options: BenchOptions, folder: Path) -> Path:
    """The path of the checkpoint; torch uses every core from now on."""
    path = options.checkpoint_in(folder)
    torch.set_num_threads(os.cpu_count())
    return path


def run_decode(options: BenchOptions, folder: Path) -> Measurement:
    path = prepare(options, folder)
    bundles = export_presets(options, path, folder)
    return measure_decode(bundles, path, options.rounds, options.depths)


def run_prompt(options: BenchOptions, folder: Path) -> Measurement:
    path = prepare(options, folder)
    bundles = export_presets(options, path, folder)
    return measure_prompt(bundles, path, options.rounds, options.calls)


def export_presets(
    options: BenchOptions, path: Path, folder: Path
) -> dict[str, Bundle]:
    """Preset → a bundle of the checkpoint at `path`."""
    source = Checkpoint(path)
    bundles = {}
    for preset in options.presets:
        bundle_options = make_options(compress=preset, max_seq_len=512, tokens="1-64")
        bundle = workbench.exporter.bundle_for(source, bundle_options, folder=folder)
        bundles[preset] = bundle
    return bundles


def run_export(options: BenchOptions, folder: Path) -> Measurement:
    path = prepare(options, folder)
    return measure_export(path, folder / "export", options.compress, options.rounds)


def run_validate(options: BenchOptions, folder: Path) -> Measurement:
    path = prepare(options, folder)
    source = Checkpoint(path)
    bundle_options = make_options(max_seq_len=128, compress=options.compress)
    bundle = workbench.exporter.bundle_for(source, bundle_options, folder=folder)
    ids = default_ids(source)
    return measure_validate(bundle, path, ids, options.rounds, options.label)


def run_evaluate(options: BenchOptions, folder: Path) -> Measurement:
    path = prepare(options, folder)
    source = Checkpoint(path)
    bundle_options = make_options(max_seq_len=512, compress=options.compress)
    bundle = workbench.exporter.bundle_for(source, bundle_options, folder=folder)
    ids = text_ids(source, TEXT_TOKENS)
    return measure_evaluate(bundle, path, ids, options.rounds, options.label)


def run_log(options: BenchOptions, folder: Path) -> Measurement:
    with tempfile.TemporaryDirectory(dir=folder) as root:
        return measure_log(Path(root), options.rounds, options.runs)


def run_cell(options: BenchOptions, folder: Path) -> Measurement:
    with tempfile.TemporaryDirectory(dir=folder) as root:
        return measure_cell(Path(root), options.rounds)


# command → its measurement; checkpoints, bundles and what it writes go to the folder
MEASUREMENTS: dict[str, Callable[[BenchOptions, Path], Measurement]] = {
    "decode": run_decode,
    "prompt": run_prompt,
    "export": run_export,
    "validate": run_validate,
    "evaluate": run_evaluate,
    "log": run_log,
    "cell": run_cell,
}


def run_all(out: Path, folder: Path) -> None:
    """Runs every measurement of the tables, each in a process of its own, and writes the tables. A
    measurement that fails leaves its earlier file as it is."""
    failed, start = [], time.monotonic()
    for name, options in PUBLISHED_RUNS.items():
        print(f"{name}:", flush=True)
        if "--real" in options and not (REAL / "config.json").exists():
            options = [option for option in options if option != "--real"]
            print(f"{REAL} is missing (make real): a random model is measured")
        command = [sys.executable, __file__, name, *options, "--rounds", "3"]
        command += ["--out", str(out), "--folder", str(folder)]
        if subprocess.run(command).returncode:
            failed.append(name)
    print(f"{time.monotonic() - start:.0f} s in all")
    if failed:
        sys.exit(f"these failed, and the tables were not written: {', '.join(failed)}")
    write_tables(ROOT, out)


def main(
    command: Literal[
        "decode",
        "prompt",
        "export",
        "validate",
        "evaluate",
        "log",
        "cell",
        "all",
        "table",
    ],
    *,
    real: bool = False,
    family: Literal["qwen2", "zaya"] = "qwen2",
    layers: int = 24,
    rounds: int = 5,
    compress: str = "int8-channel",
    presets: tuple[str, ...] = RUN_PRESETS,
    depths: tuple[int, ...] = DEPTHS,
    calls: tuple[int, ...] = CALLS,
    runs: int = 10_000,
    folder: Path = Path("build/bench"),
    out: Path | None = None,
    json_: bool = False,
) -> None:
    """Measures, prints ratios and medians, and writes every sample to a file.

    Args:
        real: validate and evaluate SmolLM2-135M-Instruct in place of a random model.
        out: the folder of COMMAND.json; default: `folder`, and for `all` and `table`
            experiments/benchmarks.
        json_: print the file in place of ratios and medians.
    """
    if command == "table":
        return write_tables(ROOT, out or PUBLISHED)
    folder.mkdir(parents=True, exist_ok=True)
    if command == "all":
        return run_all(out or PUBLISHED, folder)
    options = BenchOptions(
        real=real,
        family=family,
        layers=layers,
        rounds=rounds,
        compress=compress,
        presets=presets,
        depths=depths,
        calls=calls,
        runs=runs,
    )
    machine_fields = machine.environment()
    with machine.measure_disturbance() as disturbance:
        measurement = MEASUREMENTS[command](options, folder)
    # after the block, whose end fills `disturbance` in
    conditions = machine_fields | disturbance
    path = measurement.save(out or folder, command, asdict(options), conditions)
    print(path.read_text() if json_ else "\n".join(measurement.lines()))


if __name__ == "__main__":
    run(main)
