"""`workbench …`: one command per question. Every command takes `--json`; RED exits 1, bad input exits 2
with one message, a notebook's cell that crashes exits 3."""

import contextlib
import json as jsonlib
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Annotated

import typer

from workbench import paths
from workbench.errors import InputError

# Markdown, because Rich's own markup takes "[max_new + 1, V]" in a help text for a tag and drops it
app = typer.Typer(rich_markup_mode="markdown", no_args_is_help=True, add_completion=False,
                  pretty_exceptions_enable=False,
                  help="Export transformer layers as stateful Core ML shards, prove them, decode "
                       "them, measure them.")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Ids = Annotated[str | None, typer.Option("--prompt-ids", help="Token ids, comma-separated: 2,42,100.")]
RuntimeName = Annotated[str, typer.Option("--runtime", help="auto, portable or coreml.")]
Precision = Annotated[str, typer.Option("--precision", help="Portable arithmetic: declared, exact or narrow.")]
BundlePath = Annotated[Path, typer.Argument(metavar="BUNDLE")]
CheckpointPath = Annotated[Path, typer.Argument(metavar="CHECKPOINT")]
GoldenPath = Annotated[Path | None, typer.Option(help="Golden store.")]
GoldenOf = Annotated[Path | None, typer.Option(help="Make the golden now from this checkpoint.")]
Log = Annotated[bool, typer.Option(help="Write the run into the experiment log.")]
LogFolder = Annotated[Path | None, typer.Option("--log", help="Folder of the experiment log.")]
Publish = Annotated[bool, typer.Option("--publish", help="Make this the shipped write-up.")]
Memory = Annotated[str | None, typer.Option("--memory", help="Memory of the target machine, such as 16G.")]
DEFAULT_IDS = 24
ANOTHER_CHECKPOINT = "golden_is_of_this_checkpoint"  # the gate that is RED then


def print_version(asked: bool) -> None:
    """Prints the installed version and ends the command."""
    if asked:
        from importlib.metadata import version

        typer.echo(f"workbench {version('workbench')}")
        raise typer.Exit()


Version = Annotated[bool, typer.Option("--version", callback=print_version, is_eager=True,
                                       help="Print the version.")]


@app.callback()
def _options(version: Version = False) -> None:
    pass


def main() -> None:
    """Entry point: an InputError becomes one message and exit code 2, a warning one line without the source around it."""
    warnings.formatwarning = lambda message, *rest: f"workbench: {message}\n"
    try:
        app(standalone_mode=True)
    except InputError as problem:
        typer.echo(f"workbench: {problem}", err=True)
        sys.exit(2)
    except SystemExit as end:
        if end.code == 130:  # what typer makes of Ctrl-C
            typer.echo("workbench: interrupted; what was finished is kept", err=True)
        raise


def show(result: dict, as_json: bool, lines: list[str]) -> None:
    """Prints the result as JSON, or its text lines; exits 1 when the verdict is RED."""
    from workbench.check.gates import jsonable

    typer.echo(jsonlib.dumps(jsonable(result), default=str, allow_nan=False) if as_json else "\n".join(lines))
    if result.get("verdict") == "RED":
        raise typer.Exit(1)


def parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise InputError("--prompt-ids", repr(text), "integers separated by commas", "write 2,42,100") from None


def some_ids(V: int, count: int = DEFAULT_IDS) -> list[int]:
    """Seeded random ids, for when no prompt is given."""
    import numpy as np

    return np.random.default_rng(0).integers(0, V, count).tolist()


def ids_for(prompt_ids: str | None, V: int) -> list[int]:
    """The ids of a prompt, all of them in the vocabulary; seeded random ones when no prompt is given."""
    from workbench.check.golden import check_ids

    return check_ids(some_ids(V) if prompt_ids is None else parse_ids(prompt_ids), V).tolist()


def writable(out: Path) -> Path:
    """`out`, refused before anything is computed where no file could be written; makes its folder."""
    with contextlib.suppress(OSError):
        out.parent.mkdir(parents=True, exist_ok=True)
        if not out.is_dir() and os.access(out.parent, os.W_OK):
            return out
    raise InputError("--out", str(out), "a file in a folder that can be written", "name a file, such as build/llama.golden")


def gate_lines(gates: list) -> list[str]:
    """RED first, then the others; one line each with its reason.

    A golden of another checkpoint is the one line: all other gates compare two models then.
    """
    order = {"RED": 0, "GREEN": 1, "not_run": 2}
    strange = [g for g in gates if g.name == ANOTHER_CHECKPOINT and g.verdict == "RED"]
    lines = [f"{g.verdict:8}{g.name:29}{'' if g.value is None else f'{g.value:<12.6g}'}{g.reason}"
             for g in strange or sorted(gates, key=lambda g: order[g.verdict])]
    note = ": the other gates compare two models (--json has them)"
    return [line + note for line in lines] if strange else lines


def look_at(golden: Path | None, checkpoint: Path | None) -> None:
    """Refuses a golden or a checkpoint that is none, before anything heavy is imported."""
    if golden:
        paths.golden(golden)
    if checkpoint:
        paths.checkpoint(checkpoint)


@app.command()
def doctor(json: Json = False) -> None:
    """What this machine can do, and what a Mac would add.

    Example: workbench doctor --json
    """
    from workbench.report.doctor import examine

    found = examine()
    show(
        found,
        json,
        [f"{k:20}{'–' if v is None else v}" for k, v in found.items() if k != "notes"] + [f"- {n}" for n in found["notes"]],
    )


@app.command()
def export(
    checkpoint: CheckpointPath, bundle: BundlePath,
    max_seq_len: Annotated[int, typer.Option(help="Cache slots S.")] = 512,
    t_max: Annotated[int, typer.Option(help="Most tokens a call, T = 1 … t_max.")] = 4, batch: int = 1,
    layers_per_shard: Annotated[int, typer.Option(help="Decoder layers in one .mlpackage.")] = 1,
    compress: Annotated[str, typer.Option(help="fp16, int8-tensor, int8-channel, int4-block32, lut4, lut6.")] = "fp16",
    kv_write: Annotated[str, typer.Option(help="mask or slice.")] = "mask",
    layout: Annotated[str, typer.Option(help="bct1 or bc1t.")] = "bct1",
    states: Annotated[str, typer.Option(help="separate or packed.")] = "separate",
    moe: Annotated[str, typer.Option(help="dense or routed.")] = "dense",
    t: Annotated[str, typer.Option(help="range (RangeDim 1 … t_max) or fixed (T = t_max).")] = "range",
    sliding: Annotated[str, typer.Option(help="mask or ring.")] = "mask",
    plain: Annotated[bool, typer.Option("--plain", help="Convert every shard; stamp none.")] = False,
    verify_stamps: Annotated[int, typer.Option(help="Convert so many stamped shards again and compare.", min=0)] = 0,
    json: Json = False,
) -> None:  # fmt: skip
    """Hugging Face folder → bundle of stateful shards. Resumes where an interrupted export stopped.

    Example: workbench export data/tiny-llama build/llama --max-seq-len 256 --compress int8-tensor
    """
    paths.checkpoint(checkpoint)
    paths.new(bundle)
    from workbench.ane.memory import peak_rss
    from workbench.export import export as run

    start = time.perf_counter()
    made = run(checkpoint, bundle, progress=not json, plain=plain, verify_stamps=verify_stamps,
               max_seq_len=max_seq_len, t_max=t_max, batch=batch, layers_per_shard=layers_per_shard, compress=compress,
               kv_write=kv_write, layout=layout, states=states, moe=moe, t=t, sliding=sliding)  # fmt: skip
    how = [s.how for s in made.manifest.shards]
    result = {
        "bundle": str(bundle), "family": made.manifest.family, "shards": len(how), "layers": made.manifest.dims.L,
        "bytes": made.bytes, "converted": how.count("converted"), "stamped": how.count("stamped"),
        "seconds": round(time.perf_counter() - start, 3), "peak_rss_bytes": peak_rss(),
    }  # fmt: skip
    show(result, json, [f"{bundle}: {result['family']}, {result['layers']} layers in {result['shards']} shards "
                        f"({result['stamped']} stamped), {result['bytes'] / 2**20:.1f} MiB, {result['seconds']:.1f} s"])  # fmt: skip


@app.command()
def golden(
    checkpoint: CheckpointPath, out: Annotated[Path, typer.Option("--out", help="File to write.")], prompt_ids: Ids = None,
    bundle: Annotated[Path | None, typer.Option(help="Use the weights this bundle stores instead of the checkpoint's.")] = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Hugging Face's per-layer values, written once; everything that compares takes them with --golden.

    Example: workbench golden data/tiny-llama --out build/llama.golden
    """
    from workbench.bundle import Bundle

    paths.checkpoint(checkpoint)
    opened = Bundle.open(bundle) if bundle else None
    from workbench.check import golden as goldens
    from workbench.models.checkpoint import Checkpoint

    source = Checkpoint(checkpoint)
    ids = ids_for(prompt_ids, source.config.vocab_size)
    weights = goldens.stored_weights(source, opened) if opened else None
    writable(out)
    made = goldens.make_golden(source, ids, weights, opened.identity if opened else "source")
    made.save(out)
    result = {"golden": str(out), "tokens": len(ids), "layers": len(made.x), "bytes": out.stat().st_size} | made.meta
    show(result, json, [f"{out}: {len(ids)} tokens, {len(made.x)} layers, {result['bytes'] / 2**20:.1f} MiB"])


def load_golden(golden: Path | None, checkpoint: Path | None, prompt_ids: str | None, V: int):
    """The golden a command compares with: a stored one, or one made now from a checkpoint."""
    from workbench.check import golden as goldens

    if golden:
        return goldens.Golden.load(golden)
    if not checkpoint:
        raise InputError("golden", "neither --golden nor --checkpoint", "one of them",
                         "run: workbench golden CHECKPOINT --out G, then give --golden G")  # fmt: skip
    return goldens.make_golden(checkpoint, ids_for(prompt_ids, V))


@app.command()
def check(
    bundle: BundlePath,
    golden: Annotated[Path | None, typer.Option(help="Golden store: also judges what the cache holds.")] = None,
    memory: Memory = None, runtime: RuntimeName = "auto", json: Json = False,
) -> None:  # fmt: skip
    """Chapter 5's checklist, gate by gate: interface, state lifetime, write addresses, stale rows, memory.

    Example: workbench check build/llama --memory 16G
    """
    from workbench.bundle import Bundle

    opened = Bundle.open(bundle)
    look_at(golden, None)
    from workbench.ane.memory import parse_bytes
    from workbench.check import checklist, gates
    from workbench.check.golden import Golden
    from workbench.decode import Decoder

    found = checklist.check_bundle(Decoder(opened, runtime),
                            golden=Golden.load(golden) if golden else None,
                            machine=None if memory is None else parse_bytes(memory), progress=not json)  # fmt: skip
    result = {"verdict": gates.verdict(found), "gates": [g.json() for g in found]}
    show(result, json, [result["verdict"], *gate_lines(found)])


@app.command()
def validate(
    bundle: BundlePath, checkpoint: GoldenOf = None, golden: GoldenPath = None, prompt_ids: Ids = None,
    all_t: Annotated[bool, typer.Option("--all-t", help="Every T from 1 to t_max.")] = False,
    tasks: Annotated[Path | None, typer.Option(help="Known-answer prompts (JSON lines); needs --checkpoint.")] = None,
    runtime: RuntimeName = "auto", precision: Precision = "declared", log: Log = False, json: Json = False,
) -> None:  # fmt: skip
    """Every layer × position × T against the golden.

    Example: workbench validate build/llama --checkpoint data/tiny-llama --tasks data/tasks/heldout.jsonl
    """
    from workbench.bundle import Bundle

    opened = Bundle.open(bundle)
    look_at(golden, checkpoint)
    if tasks:
        paths.file("--tasks", tasks, "prompts with answers (JSON lines)", "correct the path")
    from workbench.check import tasks as answers
    from workbench.check.validate import validate as judge
    from workbench.decode import Decoder
    from workbench.models.checkpoint import Checkpoint
    from workbench.sweep import runs

    if tasks and not checkpoint:
        raise InputError("--tasks", "no --checkpoint", "the checkpoint that also answers them", "give --checkpoint")
    decoder = Decoder(opened, runtime, precision)
    reference = load_golden(golden, checkpoint, prompt_ids, decoder.manifest.dims.V)
    Ts = range(1, decoder.options.t_max + 1) if all_t else None
    found = judge(decoder, reference, Ts, progress=not json)
    if tasks:
        found.gates += answers.answer_gates(decoder, Checkpoint(checkpoint), answers.load_tasks(tasks))
    result = found.json()
    if log:
        row = runs.describe(decoder.bundle, decoder) | {"verdict": found.verdict, "command": "validate",
                                                        "config": {"gates": result["gates"]}}  # fmt: skip
        result["run_id"] = runs.record_run("validate", row, fidelity=found.rows)
    w = result["worst"]
    show(result, json, [result["verdict"], *gate_lines(found.gates),
                        f"worst: layer {w['layer']}, position {w['position']}, T = {w['T']}, {w['tensor']}: cosine {w['cosine']:.7f}"])  # fmt: skip


@app.command()
def sweep(
    grid: Annotated[Path, typer.Argument(metavar="GRID.yaml")], log: LogFolder = None,
    scheduler: Annotated[str | None, typer.Option(help="Measure on a Dask cluster's ANE workers: tcp://host:8786.")] = None,
    json: Json = False,
) -> None:  # fmt: skip
    """The cross product of a grid's options, one logged run per cell and round, each in a fresh process; resumes.

    Bundles are kept in data/bundles of the project that the log belongs to, or beside a log of its own.

    Example: workbench sweep grid.yaml
    """
    from workbench.sweep import load_grid
    from workbench.sweep import sweep as run

    result = run(load_grid(grid), root=log, scheduler=scheduler, progress=not json)
    show(result, json, [", ".join(f"{k} {v}" for k, v in result.items())])
    if result["failed"]:
        raise typer.Exit(1)


@app.command("log")
def log_(
    where: Annotated[str | None, typer.Option(help="A pandas query over runs: \"compress == 'fp16'\".")] = None,
    table: str = "runs", root: LogFolder = None, json: Json = False,
) -> None:  # fmt: skip
    """Rows of the experiment log.

    Example: workbench log --where "compress == 'fp16' and T == 1"
    """
    from workbench import log

    found = log.load(table, root=root, where=where)
    if json:
        typer.echo(found.to_json(orient="records", date_format="iso"))
    else:
        typer.echo(found.dropna(axis="columns", how="all").to_string(index=False, max_colwidth=32))


@app.command()
def compare(run_a: str, run_b: str, root: Annotated[Path | None, typer.Option("--log")] = None, json: Json = False) -> None:
    """Two runs and all that repeat them: what differs in their settings, and ratios of medians with intervals.

    Example: workbench compare 20260131T094512Z-5f3a9c01 20260131T094633Z-1c02ad7e
    """
    from workbench import log

    found = log.compare(run_a, run_b, root)
    measures = jsonlib.loads(found.measures.to_json(orient="records"))
    result = {"settings": found.settings.to_dict("records"), "measures": measures, "hidden": found.indistinguishable}
    shown = found.measures.dropna(axis="columns", how="all")
    show(result, json, [found.settings.to_string(index=False), "", shown.to_string(index=False, float_format="%.4g"),
                        f"{found.indistinguishable} measurements without a difference left out"])  # fmt: skip


@app.command()
def report(
    experiment: Annotated[str, typer.Argument(help="Number of the experiment, such as 05.")],
    run: Annotated[str | None, typer.Option("--run", help="The notebook's run; default: the newest.")] = None,
    publish: Publish = False, log: LogFolder = None, json: Json = False,
) -> None:  # fmt: skip
    """What a write-up starts from, out of the log: Markdown, LaTeX tables, figures as SVG, PDF and PNG.

    It goes to experiments/NN_slug/CHECKPOINT, which git ignores.

    Example: workbench report 05
    """
    from workbench import report as reports

    path = (reports.publish if publish else reports.write_report)(experiment, log, run)
    show({"report": str(path)}, json, [str(path)])


@app.command("run")
def run_(
    numbers: Annotated[list[str], typer.Argument(help="Numbers of experiments, such as 05 34.")],
    set_: Annotated[
        list[str], typer.Option("--set", metavar="NAME=VALUE", help="A parameter of the notebook; repeat for several.")
    ] = [],  # noqa: B006
    publish: Publish = False,
    json: Json = False,
) -> None:
    """Runs experiment notebooks headless: verdict, figures, log rows, report. A cell that crashes exits 3.

    The write-up goes to experiments/NN_slug/CHECKPOINT, which git ignores.

    Example: workbench run 05 --set CHECKPOINT=/models/Llama-3.2-1B --set MAX_SEQ_LEN=512
    """
    from workbench.report.notebook import CellError, run_notebook

    parameters = dict(_parameter(text) for text in set_)
    try:
        results = [run_notebook(number, parameters, progress=not json, publish=publish) for number in numbers]
    except CellError as problem:
        typer.echo(f"workbench: {problem}", err=True)
        raise typer.Exit(3) from None
    verdict, lines = "RED" if any(r["verdict"] == "RED" for r in results) else "GREEN", []
    for r in results:
        lines += [f"{r['verdict']}  experiment {r['experiment']}", *(f"  figure  {p}" for p in r["figures"]),
                  *(f"  log row {i}" for i in r["runs"]), f"  report  {r['report']}", f"  notebook {r['executed']}"]  # fmt: skip
    show({"verdict": verdict, "experiments": results}, json, lines)


def _parameter(text: str) -> tuple[str, object]:
    """`NAME=VALUE`, the value as YAML reads it: 64, int8-tensor, [1, 2]."""
    import yaml

    name, _, value = text.partition("=")
    with contextlib.suppress(yaml.YAMLError, ValueError):
        if name and value:
            return name, yaml.safe_load(value)
    raise InputError("--set", repr(text), "NAME=VALUE", "write for example --set MAX_SEQ_LEN=128")


from workbench.cli import (
    bench,
    bench_export,
    decode,
    explain,
    measure,  # noqa: E402,F401  (their commands join `app`) 
)
