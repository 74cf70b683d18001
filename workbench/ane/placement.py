"""Where a bundle's operations run: Core ML's own plan on a Mac, elsewhere what the rules predict,
labelled as predicted.

Each shard has one `Placement`. A prediction separates `eligible` (what no rule keeps off the Neural
Engine) from `ane` (what is expected there, given the shard's size and neighbours), and lists the
rules behind it, disputed ones marked.
"""

import math
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

import miltorch
from miltorch.program import read_spec
from workbench.ane.rule import RULE_SOURCES, Finding, LintGraph
from workbench.ane.rules import lint
from workbench.bundle import Bundle
from workbench.models.checkpoint import Checkpoint
from workbench.runtime.coreml import Placed, compute_plan
from workbench.runtime.standin import installed

SMALL_LAYER = 600_000  # bytes of fp16 weights, of rule G1


@dataclass(frozen=True)
class Placement:
    """Compute operations of a shard by where they run; None: there is no figure. `convolutions` [on
    the ANE, of all] counts as experiment 30 did, convolutions alone; `cost_ane` is the share of the
    plan's estimated cost that falls on the ANE."""

    shard: str
    source: str  # measured, predicted, or simulated: the plan of a stand-in
    ops: int
    eligible: int | None
    ane: int
    cpu: int
    gpu: int | None
    convolutions: tuple[int, int]
    cost_ane: float | None = None
    rules: list[dict] = field(default_factory=list)

    json = asdict


def predicted_placement(bundle: Bundle, generation: int = 4) -> list[Placement]:
    """What the rules expect of every shard, or each of its functions, with compute units
    CPU_AND_NE, on a chip of an M generation."""
    shards = bundle.manifest.shards
    programs = sum(len(shard.functions) or 1 for shard in shards)
    return [
        placement
        for shard in shards
        for placement in package_placement(
            bundle.package(shard), generation, shard.name, programs=programs
        )
    ]


def package_placement(
    package: Path,
    generation: int = 4,
    name: str | None = None,
    function: str | None = None,
    programs: int | None = None,
) -> list[Placement]:
    """What the rules expect of every function of any package, or of the one that is named; `name`
    is what the placements are called after (default: the package's file). `programs`: how many a
    process loads with this one (default: the package's functions)."""
    weights = sum(file.stat().st_size for file in package.rglob("*.bin"))
    functions = sorted(read_spec(package).mlProgram.functions)
    if function:
        chosen = [function]
    elif len(functions) > 1:
        chosen = functions
    else:
        chosen = [None]
    placements = []
    for own in chosen:
        program = miltorch.read(package, own)
        loaded = programs or len(functions)
        graph = LintGraph(program, weights, len(functions), generation, loaded)
        title = " ".join(filter(None, (name or package.stem, own)))
        placements.append(place_operations(title, graph))
    return placements


def predicted_units(program: miltorch.Program) -> dict[str, str]:
    """Where the rules expect each operation of a program (ane, cpu), by its name: what
    `miltorch.shim.install(compute_plans=…)` asks for."""
    graph = LintGraph(program, 0)
    _, ane = _units(lint(graph), {op.name for op in graph.ops})
    return {op.name: "ane" if op.name in ane else "cpu" for op in program.block.walk()}


def place_operations(name: str, graph: LintGraph) -> Placement:
    """The placement that follows from the rules a graph breaks; disputed rules are listed and
    change nothing."""
    findings, ops = lint(graph), {op.name for op in graph.ops}
    eligible, ane = _units(findings, ops)
    convolutions = {op.name for op in graph.of("conv")}
    on_ane = len(convolutions & ane)
    rules = [_rule(f) for f in findings]
    counts = len(ops), len(eligible), len(ane), len(ops - ane), 0, (on_ane, len(convolutions))
    return Placement(name, "predicted", *counts, rules=rules)


def _units(findings: list[Finding], ops: set[str]) -> tuple[set[str], set[str]]:
    """The operations that no undisputed finding keeps off the Neural Engine, and those that are
    expected there."""
    cpu, stays, fails = (
        {n for f in findings if f.rule.effect == effect and not f.rule.disputed for n in f.names}
        for effect in ("cpu", "stays", "fails")
    )
    eligible = ops - cpu
    return eligible, set() if fails else eligible - stays


def _rule(finding: Finding) -> dict:
    r = finding.rule
    sources = {
        word: RULE_SOURCES[key]
        for word in r.source.split()
        if (key := word.partition("#")[0]) in RULE_SOURCES
    }
    about = {name: getattr(r, name) for name in ("id", "effect", "confidence", "says", "advice")}
    names = {"count": len(finding.names), "names": list(finding.names[:5])}
    return about | {"sources": sources, "disputed": r.disputed or None} | names


def plan_main(job: dict) -> list[dict]:
    """In a process of its own, which Core ML may abort: what it plans for shards of a bundle.

    A plan is a preference: only timing each T shows where a shard runs. Compute plans know no
    optimization hints.

    Args:
        job: {bundle (a path), programs (pairs of a shard's name and a function's, null for its
            only one), runtime, fault, compute_units}.

    Returns:
        A `Placement` for every program, as JSON.

    Raises:
        InputError: Core ML gives no plan.
    """
    bundle = Bundle.open(job["bundle"])
    standin = job["runtime"] == "stand-in"
    source = "simulated" if standin else "measured"
    shards = {shard.name: shard for shard in bundle.manifest.shards}
    with installed(job["fault"]) if standin else nullcontext():
        plans = {}
        for name, function in job["programs"]:
            plans[" ".join(filter(None, (name, function)))] = compute_plan(
                bundle, shards[name], job["compute_units"], function
            )
    return [count_units(name, plan, source).json() for name, plan in plans.items()]


def count_units(name: str, plan: list[Placed], source: str = "measured") -> Placement:
    """A plan's operations counted by where they prefer to run; those without an answer count as no
    unit's."""
    units = Counter(p.preferred for p in plan)
    convolutions = Counter(p.preferred for p in plan if p.op == "conv")
    cost = sum(p.cost or 0 for p in plan)
    cost_ane = sum(p.cost or 0 for p in plan if p.preferred == "ane")
    eligible = sum("ane" in p.supported for p in plan)
    counts = len(plan), eligible, *(units[unit] for unit in ("ane", "cpu", "gpu"))
    on_ane = convolutions["ane"], convolutions.total()
    return Placement(name, source, *counts, on_ane, cost_ane / cost if cost else None)


def columns(placements: list[Placement]) -> dict:
    """The columns of a `runs` row: counts by shard, and the Neural Engine's share of all operations
    and of the plans' estimated costs, where each shard weighs the same. No share is made of a
    prediction."""
    by_shard = {}
    for p in placements:
        by_shard[p.shard] = {n: getattr(p, n) for n in ("ops", "ane", "cpu", "gpu")}
    source, row = placements[0].source, {"placement": by_shard}
    if source != "predicted" and _named(placements):
        ops = sum(p.ops for p in placements)
        costs = [p.cost_ane for p in placements]
        row["ane_ops_share"] = sum(p.ane for p in placements) / ops
        if None in costs:
            row["ane_cost_share"] = None
        else:
            row["ane_cost_share"] = sum(costs) / len(costs)
    return row | {"placement_source": source}


def _named(placements: list[Placement]) -> bool:
    """Whether plans name a unit for any operation."""
    return any(p.ane + p.cpu + (p.gpu or 0) for p in placements)


def off_engine(placements: list[Placement], compute_units: str) -> str | None:
    """Why a run was not of the Neural Engine that its compute units CPU_AND_NE ask for: its plans
    put no operation there; says where they are instead. None where they do, where they name no unit
    at all, and for other compute units."""
    if compute_units != "CPU_AND_NE" or any(p.ane for p in placements) or not _named(placements):
        return None
    ops = sum(p.ops for p in placements)
    cpu = sum(p.cpu for p in placements)
    gpu = sum(p.gpu or 0 for p in placements)
    units = {"the CPU": cpu, "the GPU": gpu, "no unit named": ops - cpu - gpu}
    ran = ", ".join(f"{count} on {unit}" for unit, count in units.items() if count)
    return f"not on the Neural Engine: the plan puts 0 of {ops} operations there, {ran}"


def contradictions(placements: list[Placement]) -> list[str]:
    """Where a prediction contradicts experiment 30, which counted all four convolutions of stateful
    attention shards, int8 and RangeDim, on the Neural Engine of an M4 Max."""
    off = []
    for p in placements:
        if p.source == "predicted" and p.convolutions[0] < p.convolutions[1]:
            off.append(p)
    if not off:
        return []
    broken = [r for p in off for r in p.rules if not r["disputed"]]
    rules = {r["id"] for r in broken if r["effect"] in ("cpu", "stays", "fails")}
    return [
        f"{len(off)} shards are expected to keep convolutions off the Neural Engine, because of "
        f"{', '.join(sorted(rules))}; experiment 30 counted 4 of 4 on it (M4 Max). "
        "Only a Mac can settle it: a prediction is no measurement."
    ]


def lines(placements: list[Placement]) -> list[str]:
    """Placements as text: shards that fare alike on one line, then each rule once with its
    advice."""
    groups: dict[tuple, list[Placement]] = {}
    for p in placements:
        alike = (p.ops, p.eligible, p.ane, p.cpu, p.gpu, p.convolutions)
        groups.setdefault(alike, []).append(p)
    text = [f"{placements[0].source} placement"]
    for p, *more in groups.values():
        if more:
            name = f"{p.shard} … {more[-1].shard} ({len(more) + 1})"
        else:
            name = p.shard
        text.append(
            f"{name:32}{p.ane} of {p.ops} operations on the ANE ({p.eligible} eligible), {p.cpu} CPU, {p.gpu} GPU; "
            f"convolutions {p.convolutions[0]} of {p.convolutions[1]}"
        )
    for r in {r["id"]: r for p in placements for r in p.rules}.values():
        text.append(
            f"{r['id']:4}{r['effect']:6}{r['confidence']:3}{r['says']}. {r['advice']}. [{'; '.join(r['sources'].values())}]"
            + (f" Disputed: {r['disputed']}." if r["disputed"] else "")
        )
    return text


def suitable_units(checkpoint: Checkpoint) -> str:
    """CPU_ONLY for a checkpoint whose decoder layers are so small that Core ML leaves them on the
    CPU (rule G1), which would pass for a result of the Neural Engine; CPU_AND_NE for others."""
    elements = sum(
        math.prod(e.shape) for name, e in checkpoint.header.items() if ".layers." in name
    )
    layer = 2 * elements / checkpoint.config.num_hidden_layers
    return "CPU_ONLY" if layer < SMALL_LAYER else "CPU_AND_NE"
