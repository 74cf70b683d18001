"""`workbench bench`: what things cost, beside their peers in the same run."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.app import Json, app, show

bench = typer.Typer(no_args_is_help=True, help="Benchmarks with their peers in the same run.")
app.add_typer(bench, name="bench")
Rounds = Annotated[int, typer.Option(help="Rounds in which every contestant runs once.")]
Folder = Annotated[Path, typer.Option(help="Where checkpoints and bundles are kept.")]
QWEN_05B = dict(hidden_size=896, intermediate_size=4864, num_attention_heads=14, num_key_value_heads=2, vocab_size=151936,
                rope_theta=1e6, rms_norm_eps=1e-6, tie_word_embeddings=True)  # fmt: skip


def source(folder: Path, name: str, model_type: str, layers: int, **config):
    """The checkpoint `name` of random weights in `folder`, made when it is missing."""
    from workbench.models import checkpoint

    path = folder / f"{name}-{layers}-layers"
    if not path.exists():
        checkpoint.random(path, model_type, num_hidden_layers=layers, **config)
    return checkpoint.Checkpoint(path)


def bundle_of(opened, folder: Path, json: bool, **wanted):
    """The bundle of a checkpoint and export options, kept in `folder`; its progress is shown where no JSON is wanted."""
    from workbench import sweep
    from workbench.export import options

    return sweep.bundle_for(opened, options(**wanted), folder, progress=not json)


def show_rows(rows: list[dict], json: bool) -> None:
    show({"rows": rows}, json, [line(row) for row in rows])


def line(row: dict) -> str:
    """One row in words: value, and beside it the peer's and the ratio, where there is one."""
    peer = f"{row['peer']} {row['peer_value']:.4g}, ratio {row['ratio']:.2f}, " if row["peer"] else ""
    return f"{row['name']:36}{row['value']:12.4g} {row['unit']:6} {peer}n = {row['n']}"


@bench.command()
def decode(
    moe: Annotated[bool, typer.Option("--moe", help="Routed against dense experts on ZAYA1's real layer dimensions.")] = False,
    growth: Annotated[bool, typer.Option("--growth", help="ms per call over max_seq_len and T, on two layers.")] = False,
    layers: Annotated[int | None, typer.Option(help="Decoder layers of the stack: 24, with --moe or --growth 2.")] = None,
    rounds: Rounds = 5, folder: Folder = Path("build/bench"), json: Json = False,
) -> None:  # fmt: skip
    """Tokens per second of the portable runtime on Qwen2.5-0.5B's dimensions, against Hugging Face's model.

    Example: workbench bench decode
    """
    from workbench.benchmarks import decode as benches

    if moe:
        opened = source(folder, "zaya", "zaya", layers or 2, **benches.ZAYA_LAYER)
    else:
        opened = source(folder, "qwen2", "qwen2", layers or (2 if growth else 24), **QWEN_05B)
    make = partial(bundle_of, opened, folder, json)
    if moe:
        rows = benches.moe(lambda kind: make(max_seq_len=128, moe=kind), rounds=rounds)
    elif growth:
        rows = benches.growth(lambda S: make(max_seq_len=S, t_max=64), rounds=rounds)
    else:
        bundles = {kind: make(max_seq_len=512, t_max=64, compress=kind) for kind in ("fp16", "int8-tensor")}
        rows = benches.bench_decode(bundles, opened.path, rounds=rounds)
    show_rows(rows, json)


@bench.command()
def validate(layers: Annotated[int, typer.Option(help="Decoder layers of the stack.")] = 24,
             folder: Folder = Path("build/bench"), json: Json = False) -> None:  # fmt: skip
    """What looking costs on Qwen2.5-0.5B's dimensions: a trace beside a decode step, a validation beside a forward.

    Example: workbench bench validate
    """
    from workbench.benchmarks import checks

    opened = source(folder, "qwen2", "qwen2", layers, **QWEN_05B)
    made = bundle_of(opened, folder, json, max_seq_len=128, compress="int8-tensor")
    show_rows([*checks.tracing(made), *checks.validating(made, opened)], json)


@bench.command()
def reuse(
    layers: Annotated[int, typer.Option(help="Decoder layers of the stack; 24 are the whole model.")] = 4,
    context: Annotated[int, typer.Option(help="The longest context, in tokens.")] = 2048,
    rounds: Rounds = 5, folder: Folder = Path("build/bench"), json: Json = False,
) -> None:  # fmt: skip
    """Time to the first token cold, warm and hot, snapshot sizes and bandwidths, on Qwen2.5-0.5B's dimensions.

    Example: workbench bench reuse --layers 24
    """
    from workbench.benchmarks import reuse as benches
    from workbench.decode import Decoder

    opened = source(folder, "qwen2", "qwen2", layers, **QWEN_05B)
    bundle = bundle_of(opened, folder, json, max_seq_len=context, t_max=64)
    contexts = [n for n in (256, 512, 1024, 2048) if n < context] + [context]
    show_rows(benches.bench_reuse(Decoder(bundle, fast=True), contexts=contexts, rounds=rounds, progress=not json), json)
