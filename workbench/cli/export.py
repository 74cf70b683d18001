"""`workbench export` writes a checkpoint's bundle, `golden` the values that it is
compared with, `adopt` a bundle of other exporters' packages."""

import contextlib
import os
import time
from pathlib import Path
from typing import Annotated

from typer import Argument

import workbench
from workbench import paths
from workbench.cli.common import Json, Prompt, gate_lines, judged, show
from workbench.errors import InputError

PANEL = "Make"


def export_command(
    checkpoint: Path,
    bundle: Path,
    max_seq_len: int = 512,
    tokens: str = "1-4",
    batch: int = 1,
    layers_per_shard: int = 1,
    compress: str = "fp16",
    kv_write: str = "mask",
    layout: str = "bct1",
    moe: str = "dense",
    sliding: str = "mask",
    target: str = "coreml",
    json: Json = False,
) -> None:
    """Exports a Hugging Face folder as a bundle of stateful shards.

    Example: workbench export data/tiny-llama build/llama --compress int8-tensor

    Args:
        max_seq_len: Rows S of the cache.
        tokens: Tokens of a call: 1-4 any number up to 4, 4 always four, 1,64 one or 64
            (a function for each over the same weights).
        batch: Sequences that are decoded together.
        layers_per_shard: Decoder layers in one .mlpackage.
        compress: fp16, int8-tensor, int8-channel, int4-block32, lut4, lut6.
        kv_write: mask (one-hot columns) or slice (at a dynamic index).
        layout: bct1 (channels, then tokens) or bc1t.
        moe: dense (all experts in one graph) or routed (the host picks).
        sliding: mask (whole caches) or ring (caches of the window).
        target: coreml, or a target that an installed plug-in offers.
    """
    chosen = locals()
    paths.checkpoint(checkpoint)
    paths.new(bundle)
    from workbench.ane.memory import peak_rss

    del chosen["checkpoint"], chosen["bundle"], chosen["json"]
    start = time.perf_counter()
    made = workbench.export.export(checkpoint, bundle, progress=not json, **chosen)
    shards = made.manifest.shards
    converted = len({shard.template for shard in shards})
    result = {
        "bundle": str(bundle),
        "family": made.manifest.family,
        "shards": len(shards),
        "layers": made.manifest.dims.L,
        "bytes": made.bytes,
        "converted": converted,
        "stamped": len(shards) - converted,
        "seconds": round(time.perf_counter() - start, 3),
        "peak_rss_bytes": peak_rss(),
    }
    line = "{bundle}: {family}, {layers} layers in {shards} shards, {size}, {seconds} s"
    size = f"{made.bytes / 2**20:.1f} MiB"
    show(result, json, [line.format(size=size, **result)])


def golden_command(
    checkpoint: Path,
    out: Path,
    prompt: Prompt,
    for_: Path | None = None,
    json: Json = False,
) -> None:
    """Writes Hugging Face's per-layer values once; comparing commands take them with
    --golden.

    Example: workbench golden data/tiny-llama --out build/llama.golden --for build/llama

    Args:
        out: File to write.
        for_: Also writes what `validate` needs for this bundle on a machine without the
            checkpoint: its verdict, and the portable runtime's results.
    """
    paths.checkpoint(checkpoint)
    prompt.given()
    target = workbench.Bundle.open(for_) if for_ else None
    from workbench.check.golden import check_exported_from, make_golden
    from workbench.models.checkpoint import Checkpoint

    source = Checkpoint(checkpoint)
    ids = prompt.ids(source.config.vocab_size, source.path)
    if target:
        check_exported_from(source, target)
    check_writable(out)
    golden = make_golden(source, ids)
    golden.save(out)
    size, layers = out.stat().st_size, golden.layers
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
    from workbench.check import verdict
    from workbench.check.device import reference_path, stored_reference
    from workbench.check.validate import bug_gates

    checks = bug_gates(target, source, progress=progress)
    verdict.save(target, checks)
    stored_reference(target, golden, out)
    reference = reference_path(target, out)
    result = judged(checks) | {"reference": str(reference)}
    lines = [f"copy with it {target.root} and {reference}", result["verdict"]]
    return result, lines + gate_lines(checks)


def check_writable(out: Path) -> None:
    """Makes the folder of `out`; refuses a path where no file could be written."""
    with contextlib.suppress(OSError):
        out.parent.mkdir(parents=True, exist_ok=True)
        if not out.is_dir() and os.access(out.parent, os.W_OK):
            return
    needed = "a file in a folder that can be written"
    step = "name a file, such as build/llama.golden"
    raise InputError("--out", str(out), needed, step)


def adopt_command(
    packages: Annotated[list[Path], Argument(metavar="PACKAGES…")],
    checkpoint: Path,
    out: Path,
    json: Json = False,
) -> None:
    """Makes a bundle of another exporter's packages: its manifest describes them, so
    that every command takes it. Prints what it assumed; edit bundle.json to correct it.

    Example: workbench adopt anemll/ --checkpoint data/tiny-llama --out build/adopted

    Args:
        checkpoint: The checkpoint that was exported.
        out: Folder of the new bundle; the packages are linked into it.
    """
    paths.checkpoint(checkpoint)
    from pandas import DataFrame

    from workbench.adopt import propose
    from workbench.models.checkpoint import Checkpoint

    bundle, assumed = propose(packages, Checkpoint(checkpoint), out)
    table = DataFrame(assumed).to_string(index=False, justify="left")
    result = {"bundle": str(bundle.root), "assumed": assumed}
    show(result, json, [str(bundle.root), "", *table.splitlines()])
