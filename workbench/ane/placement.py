"""The compute units of a bundle's operations: Core ML's compute plan on a Mac,
elsewhere a prediction from the rules, labelled as predicted.

Each shard has one `Placement`. A prediction separates the operations that are
`eligible` for the Neural Engine, because no rule excludes them, from those expected to
run there (`ane`), given the shard's size and neighbours. It lists the rules that were
applied and marks disputed ones."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import pandas as pd

import miltorch
from miltorch.program import read_spec
from workbench.ane.rules import LintGraph, lint
from workbench.bundle import Bundle, Shard
from workbench.runtime import model_class
from workbench.runtime.coreml import PlacedOperation, compiled_path, compute_plan

LISTED_NAMES = 5
"""The most operations that a placement names for each rule."""


@dataclass(frozen=True)
class Placement:
    """The numbers of a shard's compute operations by unit.

    Args:
        source: measured, predicted, or simulated: the plan of a stand-in.
        ops: all operations.
        eligible: those that could run on the Neural Engine.
        ane, cpu, gpu: those that are expected to run there.
        convolutions: two counts, those on the Neural Engine and all; experiment 30
            counted these.
        rules: those that were applied, as `lint` gives them, with the `count` of the
            names of which the first few are listed.
    """

    shard: str
    source: str
    ops: int
    eligible: int
    ane: int
    cpu: int
    gpu: int
    convolutions: tuple[int, int]
    rules: list[dict]

    json = asdict


def predicted_placement(bundle: Bundle, generation: int = 4) -> list[Placement]:
    """The predicted placement of every shard of a bundle, or of each of its functions,
    with compute units CPU_AND_NE, on a chip of an M generation."""
    placements = []
    programs = list(iter_programs(bundle, bundle.manifest.shards))
    functions_of = Counter(program.package for program in programs)
    for program in programs:
        package = program.package
        sizes = [file.stat().st_size for file in package.rglob("*.bin")]
        graph = LintGraph(
            miltorch.read(package, program.function),
            weight_bytes=sum(sizes),
            functions=functions_of[package],
            generation=generation,
            programs=len(programs),
            largest_file=max(sizes, default=0),
        )
        placements.append(place_operations(program.title, graph))
    return placements


class ProgramAddress(NamedTuple):
    """Where a program is that a process loads to run a shard: a package and one of its
    functions. `title` names it in tables."""

    title: str
    shard: Shard
    package: Path
    function: str


def iter_programs(bundle: Bundle, shards: Iterable[Shard]) -> Iterator[ProgramAddress]:
    """Yields every program that a process loads to run the shards."""
    for shard in shards:
        for name, package in bundle.packages(shard).items():
            functions = sorted(read_spec(package).mlProgram.functions)
            for function in functions:
                title = f"{name} {function}" if len(functions) > 1 else name
                yield ProgramAddress(title, shard, package, function)


def place_operations(shard: str, graph: LintGraph) -> Placement:
    """The placement predicted from the rules that a graph breaks; disputed rules are
    only listed."""
    # names of operations that rules of the effects `cpu` and `stays` (see `rules`) exclude
    unsupported, staying = set(), set()
    program_fails = False  # all of it is then off the Neural Engine
    listed = []
    for rule in lint(graph):
        names = rule["names"]
        listed.append(rule | {"count": len(names), "names": names[:LISTED_NAMES]})
        if rule["disputed"]:
            continue
        match rule["effect"]:
            case "cpu":
                unsupported.update(names)
            case "stays":
                staying.update(names)
            case "fails":
                program_fails = True
    plan = []
    for op in graph.ops:
        is_supported = op.name not in unsupported
        runs_on_ane = is_supported and not program_fails and op.name not in staying
        preferred = "ane" if runs_on_ane else "cpu"
        supported = ("ane", "cpu") if is_supported else ("cpu",)
        plan.append(PlacedOperation(op.kind, op.name, preferred, supported))
    return count_units(shard, plan, "predicted", listed)


def read_compute_plan(
    root: Path, shards: list[Shard], runtime: str, compute_units: str
) -> list[Placement]:
    """The compute plan of Core ML, or of its stand-in, for every function of shards of
    the bundle at `root`. It is called in a child process, which Core ML may abort
    (CT#2757).

    A plan is a preference; timing each T shows where a shard runs. Optimization hints
    do not enter a compute plan.

    Raises:
        InputError: there is no plan.
    """
    bundle, model, placements = Bundle.open(root), model_class(runtime), []
    with model.native_layer():
        for title, shard, package, function in iter_programs(bundle, shards):
            compiled = compiled_path(bundle, shard, package)
            units = compute_plan(package, compiled, compute_units, function)
            placements.append(count_units(title, units, model.plan_source))
    return placements


def count_units(
    shard: str,
    plan: list[PlacedOperation],
    source: str = "measured",
    rules: Iterable = (),
) -> Placement:
    """The placement of a compute plan, by each operation's preferred unit; operations
    without one count in `ops` alone."""
    units = Counter(placed.preferred for placed in plan)
    convolutions = Counter(p.preferred for p in plan if p.op == "conv")
    return Placement(
        shard,
        source,
        ops=len(plan),
        eligible=sum("ane" in placed.supported for placed in plan),
        ane=units["ane"],
        cpu=units["cpu"],
        gpu=units["gpu"],
        convolutions=(convolutions["ane"], convolutions.total()),
        rules=list(rules),
    )


def run_columns(plans: list[Placement], compute_units: str) -> dict:
    """The columns of a `runs` row for Core ML's plans: counts by shard, and the Neural
    Engine's share of all operations.

    A run with CPU_AND_NE is `invalid` where its plans name units and put no operation
    on the Neural Engine."""
    counts = pd.DataFrame(plans).set_index("shard")[["ops", "ane", "cpu", "gpu"]]
    row = {"placement": counts.to_dict("index"), "placement_source": plans[0].source}
    ops, ane, cpu, gpu = counts.sum().tolist()
    if ane + cpu + gpu:
        row["ane_ops_share"] = ane / ops
        if compute_units == "CPU_AND_NE" and not ane:
            reason = (
                f"not on the Neural Engine: the plan puts 0 of {ops} operations there, "
                f"{cpu} on the CPU, {gpu} on the GPU"
            )
            row |= {"status": "invalid", "reason": reason}
    return row


def describe(placements: list[Placement]) -> list[str]:
    """Placements as text: a table of one line for all shards of the same counts, then
    one line per rule: id, effect, confidence, statement, advice, sources, disputes."""
    counts = ["ops", "eligible", "ane", "cpu", "gpu", "convolutions"]
    shards = pd.DataFrame(placements).groupby(counts, sort=False)["shard"]
    table = shards.agg(["size", "first", "last"]).reset_index()
    text = [
        f"{placements[0].source} placement",
        *table.to_string(index=False).splitlines(),
    ]
    rules = {rule["id"]: rule for placed in placements for rule in placed.rules}
    for rule in rules.values():
        line = "{id:4}{effect:6}{confidence:3}{says}. {advice}.".format(**rule)
        line += f" [{'; '.join(rule['sources'].values())}]"
        if rule["disputed"]:
            line += f" Disputed: {rule['disputed']}."
        text.append(line)
    return text
