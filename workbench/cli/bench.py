"""`workbench bench`: benchmarks, each beside its peer in the same run."""

from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Option, Typer

import workbench
from workbench.cli.common import Json, register, show

bench = Typer(no_args_is_help=True, help="Benchmarks with their peers in the same run.")
Rounds = Annotated[
    int, Option(help="Rounds in which every contestant runs once.", min=1)
]
Folder = Annotated[
    Path, Option(help="Where checkpoints, bundles and logs are made and kept.")
]
BUILD = Path("build/bench")


def random_checkpoint(folder: Path, name: str, model_type: str, layers: int, **config):
    """The checkpoint `name` of random weights in `folder`, written when it is
    missing."""
    from workbench.models import checkpoint

    path = folder / f"{name}-{layers}-layers"
    if not path.exists():
        checkpoint.random(path, model_type, num_hidden_layers=layers, **config)
    return checkpoint.Checkpoint(path)


def qwen2_checkpoint(folder: Path, layers: int):
    """A checkpoint of Qwen2.5-0.5B's dimensions."""
    from workbench.benchmarks.export import model

    return random_checkpoint(
        folder, "qwen2", "qwen2", layers, rope_theta=1e6, **model("qwen2")[0]
    )


def bundle_of(checkpoint, folder: Path, json: bool, **options):
    """The bundle of a checkpoint and export options, cached in `folder`."""
    return workbench.sweep.bundle_for(
        checkpoint, workbench.export.options(**options), folder, progress=not json
    )


def show_rows(rows: list[dict], json: bool, **more) -> None:
    """Prints benchmark rows, then `more` figures by name."""
    lines = list(map(row_line, rows))
    lines += [f"{name}: {value}" for name, value in more.items()]
    show({"rows": rows} | more, json, lines)


def row_line(row: dict) -> str:
    """A row in one line: its value, with a peer the peer's value and the ratio, its
    note if it has one, and n."""
    text = f"{row['name']:36}{row['value']:12.4g} {row['unit']:6} "
    if row["peer"]:
        ratio = "–" if row["ratio"] is None else f"{row['ratio']:.2f}"
        text += f"{row['peer']} {row['peer_value']:.4g}, ratio {ratio}, "
    note = f"{row['note']}, " if "note" in row else ""
    return f"{text}{note}n = {row['n']}"


# layers, dimensions and export options of the families beside Llama's in
# `workbench bench decode --families`
FAMILIES = {
    "gemma3_text": (
        6,
        {
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
            "vocab_size": 32768,
        },
        {},
    ),
    "zaya": (4, {"vocab_size": 4096}, {"moe": "routed"}),
    "lfm2": (
        6,
        {
            "hidden_size": 1024,
            "intermediate_size": 6656,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "layer_types": ["conv", "conv", "full_attention"] * 2,
            "vocab_size": 32768,
        },
        {},
    ),
}
BATCHES = (1, 2, 4)


def decode_benchmark(
    moe: bool = False,
    growth: bool = False,
    prefill: bool = False,
    families: bool = False,
    layers: int | None = None,
    rounds: Rounds = 5,
    folder: Folder = BUILD,
    markdown: bool = False,
    json: Json = False,
) -> None:
    """Tokens per second of the portable runtime on Qwen2.5-0.5B's dimensions, beside
    its peers.

    Example: workbench bench decode

    Args:
        moe: Routed against dense experts on ZAYA1's real layer dimensions.
        growth: ms per call over max_seq_len and T, on two layers.
        prefill: A prompt of 448 tokens in calls of 1, 4 and 64, against Hugging Face's
            model.
        families: Gemma 3, ZAYA (routed), LFM2, and batches of 1, 2, 4, against Hugging
            Face.
        layers: Layers of the stack: 24; with --moe or --growth 2; for batches of
            --families 4.
        markdown: Print the README's table.
    """
    from workbench.benchmarks import decode, llama_cpp
    from workbench.bundle.presets import PRESETS

    if layers is None and (moe or growth):
        layers = 2
    elif layers is None and families:
        layers = 4
    layers = layers or 24
    if moe:  # the head is not timed, so the vocabulary is small
        checkpoint = random_checkpoint(folder, "zaya", "zaya", layers, vocab_size=4096)
    else:
        checkpoint = qwen2_checkpoint(folder, layers)
    bundle, more = partial(bundle_of, checkpoint, folder, json), {}
    if moe:
        rows = decode.moe(lambda kind: bundle(max_seq_len=128, moe=kind), rounds=rounds)
    elif growth:
        rows = decode.growth(lambda S: bundle(max_seq_len=S, t_max=64), rounds=rounds)
    elif families:
        rows = decode.bench_families(_stacks(checkpoint, folder, json), rounds=rounds)
    else:
        run, presets = decode.bench_decode, PRESETS
        if prefill:
            run, presets = decode.bench_prefill, ("fp16", "int8-tensor")
        elif not llama_cpp.available():
            more["note"] = llama_cpp.ABSENT
        bundles = {}
        for preset in presets:
            bundles[preset] = bundle(max_seq_len=512, t_max=64, compress=preset)
        rows = run(bundles, checkpoint.path, rounds=rounds)
    if markdown:
        show({"rows": rows} | more, json, [_markdown(rows), *more.values()])
    else:
        show_rows(rows, json, **more)


def _stacks(qwen2, folder: Path, json: bool) -> dict:
    """Bundles of `--families` by name, each with its checkpoint's folder."""
    sized = {"max_seq_len": 512, "t_max": 64}
    stacks = {}
    for batch in BATCHES:
        bundle = bundle_of(qwen2, folder, json, batch=batch, **sized)
        stacks[f"batch {batch}"] = bundle, qwen2.path
    for family, (layers, config, options) in FAMILIES.items():
        checkpoint = random_checkpoint(folder, family, family, layers, **config)
        bundle = bundle_of(checkpoint, folder, json, **sized, **options)
        stacks[family] = bundle, checkpoint.path
    return stacks


def _markdown(rows: list[dict]) -> str:
    """Rows as a table, those of one name side by side with all their peers and
    notes."""
    named: dict[str, list[dict]] = {}
    for row in rows:
        named.setdefault(row["name"], []).append(row)
    lines = ["| what | median | beside | n |", "|---|---|---|---|"]
    for name, alike in named.items():
        beside = []
        for row in alike:
            note = [row["note"]] if "note" in row else []
            if row["peer"]:
                ratio = "no ratio" if row["ratio"] is None else f"{row['ratio']:.2f}×"
                ratio = ", ".join([ratio, *note])
                note = [f"{row['peer']} {row['peer_value']:.4g} ({ratio})"]
            beside += note
        one = alike[0]
        median = f"{one['value']:.4g} {one['unit']}"
        lines.append(f"| {name} | {median} | {', '.join(beside)} | {one['n']} |")
    return "\n".join(lines)


def validate_benchmark(
    layers: int = 24, folder: Folder = BUILD, json: Json = False
) -> None:
    """Times of a trace beside a decode step and of a validation beside a forward pass.

    Example: workbench bench validate

    Args:
        layers: Decoder layers of the stack.
    """
    from workbench.benchmarks import checks

    checkpoint = qwen2_checkpoint(folder, layers)
    bundle = bundle_of(
        checkpoint, folder, json, max_seq_len=128, compress="int8-tensor"
    )
    show_rows([*checks.tracing(bundle), *checks.validating(bundle, checkpoint)], json)


def reuse_benchmark(
    layers: int = 4,
    context: int = 2048,
    rounds: Rounds = 5,
    folder: Folder = BUILD,
    json: Json = False,
) -> None:
    """Time to the first token cold, warm and hot; sizes and bandwidths of snapshots.

    Example: workbench bench reuse --layers 24

    Args:
        layers: Decoder layers of the stack; 24 are the whole model.
        context: The longest context, in tokens.
    """
    from workbench.benchmarks.reuse import bench_reuse

    checkpoint = qwen2_checkpoint(folder, layers)
    bundle = bundle_of(checkpoint, folder, json, max_seq_len=context, t_max=64)
    contexts = [n for n in (256, 512, 1024, 2048) if n < context] + [context]
    decoder = workbench.Decoder(bundle, fast=True)
    rows = bench_reuse(decoder, contexts=contexts, rounds=rounds, progress=not json)
    show_rows(rows, json)


def log_benchmark(
    runs: int = 10_000, rounds: Rounds = 5, folder: Folder = BUILD, json: Json = False
) -> None:
    """Loading every run of a large log, against pandas reading the same files.

    Example: workbench bench log

    Args:
        runs: Runs in the log.
    """
    from workbench.benchmarks.log import rows

    show_rows(rows(folder / f"log-{runs}", runs, rounds), json)


def export_benchmark(
    family: str = "qwen2",
    layers: int | None = None,
    compress: str = "int8-tensor",
    moe: str = "dense",
    target: str = "coreml",
    plain: bool = True,
    rounds: Rounds = 1,
    folder: Folder = BUILD,
    json: Json = False,
) -> None:
    """Stamped against plain export, against the disk, and one layer against one layer.

    Example: workbench bench export --compress fp16

    Args:
        family: qwen2 (Qwen2.5-0.5B) or zaya (ZAYA1-8B): real dimensions, random
            weights.
        layers: Decoder layers (default: the model's own).
        compress: As for export.
        moe: dense or routed.
        target: coreml or coreai, the programs that are made.
        plain: Also export plainly and compare times and bytes.
    """
    from workbench.benchmarks.export import compare_exports, model
    from workbench.benchmarks.export_runs import export_layers, export_once

    dims, count = model(family)
    what = f"{family}-bf16", family, layers or count
    checkpoint = random_checkpoint(folder, *what, dtype="bfloat16", **dims)
    options = {"compress": compress}
    if family == "zaya":
        options["moe"] = moe
    if target != "coreml":
        options["target"] = target
    result = compare_exports(
        export_once,
        export_layers if plain else None,
        checkpoint.path,
        folder / "export",
        rounds,
        options,
    )
    show_rows(**result, json=json)


register(bench, globals(), "_benchmark")
