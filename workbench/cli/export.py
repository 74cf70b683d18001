"""`workbench export` writes a checkpoint's bundle, `golden` the values that it is
compared with."""

import contextlib
import os
import time
from pathlib import Path
from typing import Annotated

from typer import Option

import workbench
from workbench import paths
from workbench.cli.common import (
    Ids,
    Json,
    Prompt,
    TextFile,
    Tokens,
    gate_lines,
    ids_for,
    look_at_prompt,
    parse_ids,
    show,
)
from workbench.errors import InputError

PANEL = "Export"

Count = Annotated[
    int, Option(help="Convert so many stamped shards again and compare.", min=0)
]


def export_command(
    checkpoint: Path,
    bundle: Path,
    max_seq_len: int = 512,
    t_max: int | None = None,
    batch: int = 1,
    layers_per_shard: int = 1,
    compress: str = "fp16",
    kv_write: str = "mask",
    layout: str = "bct1",
    states: str = "separate",
    moe: str = "dense",
    t: str | None = None,
    sliding: str = "mask",
    functions: str | None = None,
    undo: bool = False,
    state_pair: bool = False,
    target: str = "coreml",
    program_dtype: str = "fp16",
    plain: bool = False,
    verify_stamps: Count = 0,
    json: Json = False,
) -> None:
    """Exports a Hugging Face folder as a bundle of stateful shards; resumes an
    interrupted export.

    Example: workbench export data/tiny-llama build/llama --compress int8-tensor

    Args:
        max_seq_len: Rows S of the cache.
        t_max: Most tokens in a call, T = 1 … t_max; default: 4, or the largest of
            --functions.
        layers_per_shard: Decoder layers in one .mlpackage.
        compress: fp16, int8-tensor, int8-channel, int4-block32, lut4, lut6.
        kv_write: mask or slice.
        layout: bct1 or bc1t.
        states: separate or packed.
        moe: dense or routed.
        t: range (RangeDim 1 … t_max) or fixed (T = t_max); default: range; --functions:
            fixed.
        sliding: mask or ring.
        functions: Fixed T, such as 1,4, each a function of every .mlpackage over the
            same weights.
        undo: Let the last tokens be taken back from states that are no rows of a cache.
        state_pair: Keep the remainder of each matrix state in a second state of its
            size.
        target: coreml, or coreai for Apple's interpreter (needs the extra
            workbench[coreai]).
        program_dtype: Dtype of a Core AI program, fp16 or fp32.
        plain: Convert every shard; stamp none.
    """
    arguments = locals()
    paths.checkpoint(checkpoint)
    paths.new(bundle)
    result = _export(arguments, not json)
    show(result, json, [_export_line(result)])


def _export_line(result: dict) -> str:
    """An export's result in one line."""
    shards = "{layers} layers in {shards} shards ({stamped} stamped)".format(**result)
    size = f"{result['bytes'] / 2**20:.1f} MiB"
    seconds = f"{result['seconds']:.1f} s"
    return f"{result['bundle']}: {result['family']}, {shards}, {size}, {seconds}"


def _export(arguments: dict, progress: bool) -> dict:
    """Exports with the command's arguments. Returns sizes and seconds;
    `peak_rss_bytes` is this process's largest resident size."""
    from workbench.ane.memory import peak_rss
    from workbench.bundle import Options

    if arguments["functions"] is not None:
        functions = parse_ids(arguments["functions"], "--functions", "1,4")
        arguments["functions"] = functions
    names = [*Options.model_fields, "checkpoint", "bundle", "plain", "verify_stamps"]
    options = {name: arguments[name] for name in names if arguments[name] is not None}
    start = time.perf_counter()
    exported = workbench.export.export(progress=progress, **options)
    seconds = time.perf_counter() - start
    how = [shard.how for shard in exported.manifest.shards]
    return {
        "bundle": str(arguments["bundle"]),
        "family": exported.manifest.family,
        "shards": len(how),
        "layers": exported.manifest.dims.L,
        "bytes": exported.bytes,
        "converted": how.count("converted"),
        "stamped": how.count("stamped"),
        "seconds": round(seconds, 3),
        "peak_rss_bytes": peak_rss(),
    }


def golden_command(
    checkpoint: Path,
    out: Path,
    prompt_ids: Ids = None,
    prompt: Prompt = None,
    text: TextFile = None,
    tokens: Tokens = None,
    bundle: Path | None = None,
    for_bundle: Annotated[
        Path | None,
        Option(
            "--for", help="Also all that validates this bundle without the checkpoint."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Writes Hugging Face's per-layer values once; comparing commands take them with
    --golden.

    With --for, the bundle's verdict.json and the device gate's reference beside the
    golden: a Mac then validates the bundle with one copy of it in memory.

    Example: workbench golden data/tiny-llama --out build/llama.golden

    Args:
        out: File to write.
        bundle: Use the weights this bundle stores instead of the checkpoint's.
    """
    paths.checkpoint(checkpoint)
    opened = workbench.Bundle.open(bundle) if bundle else None
    look_at_prompt(prompt_ids, prompt, text)
    target = workbench.Bundle.open(for_bundle) if for_bundle else None
    from workbench.check.golden import check_exported_from, make_golden, stored_weights
    from workbench.models.checkpoint import Checkpoint

    source = Checkpoint(checkpoint)
    texts = {"prompt": prompt, "text": text, "tokens": tokens, "tokenizer": source.path}
    ids = ids_for(prompt_ids, source.config.vocab_size, **texts)
    if target:
        check_exported_from(source, target)
    weights = (stored_weights(source, opened), opened.identity) if opened else ()
    check_writable(out)
    golden = make_golden(source, ids, *weights)
    golden.save(out)
    size = out.stat().st_size
    layers = len(golden.x)
    result = {"golden": str(out), "tokens": len(ids), "layers": layers, "bytes": size}
    lines = [f"{out}: {len(ids)} tokens, {layers} layers, {size / 2**20:.1f} MiB"]
    if target:
        more, text = _validating_files(target, source, golden, out, not json)
        result |= more
        lines += text
    show(result | golden.meta, json, lines)


def _validating_files(
    target, source, golden, out: Path, progress: bool
) -> tuple[dict, list[str]]:
    """Writes the verdict of a bundle's own gates and the device gate's reference; what
    the command prints of them, as JSON and as lines."""
    from workbench.check import gates, verdict
    from workbench.check.device import reference_path, stored_reference
    from workbench.check.validate import bug_gates

    checks = bug_gates(target, source, progress=progress)
    verdict.save(target, checks)
    stored_reference(target, golden, out)
    reference = str(reference_path(target, out))
    result = {"verdict": gates.verdict(checks), "gates": [g.json() for g in checks]}
    lines = [f"copy with it {target.root} and {reference}", result["verdict"]]
    return result | {"reference": reference}, lines + gate_lines(checks)


def check_writable(out: Path) -> None:
    """Makes the folder of `out`; refuses a path where no file could be written."""
    with contextlib.suppress(OSError):
        out.parent.mkdir(parents=True, exist_ok=True)
        if not out.is_dir() and os.access(out.parent, os.W_OK):
            return
    raise InputError(
        "--out",
        str(out),
        "a file in a folder that can be written",
        "name a file, such as build/llama.golden",
    )
