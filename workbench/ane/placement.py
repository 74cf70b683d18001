"""Where a bundle's operations run: Core ML's own plan on a Mac, elsewhere what the rules predict, labelled as predicted.

Each shard has one `Placement`. A prediction separates `eligible` (what no rule keeps off the Neural Engine) from `ane`
(what is expected there, given the shard's size and neighbours), and lists the rules behind it, disputed ones marked.
"""

from collections import Counter
from dataclasses import asdict, dataclass, field

import miltorch
from miltorch.program import read_spec
from workbench.ane.rule import RULE_SOURCES, Finding, LintGraph
from workbench.ane.rules import lint
from workbench.bundle import Bundle
from workbench.runtime.coreml import CoreMLModel, Placed
from workbench.runtime.functions import each_function


@dataclass(frozen=True)
class Placement:
    """Compute operations of a shard by where they run; None: there is no figure. `convolutions` [on the ANE, of all] counts as
    experiment 30 did, convolutions alone; `cost_ane` is the share of the plan's estimated cost that falls on the ANE."""

    shard: str
    source: str  # measured or predicted
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
    placements = []
    for shard in bundle.manifest.shards:
        package = bundle.package(shard)
        weights = sum(f.bytes for f in shard.files if f.path.endswith(".bin"))
        functions = len(read_spec(package).mlProgram.functions)
        for function in shard.functions or [None]:
            program = miltorch.read(package, function)
            graph = LintGraph(program, weights, functions, generation)
            name = f"{shard.name} {function}" if function else shard.name
            placements.append(place_operations(name, graph))
    return placements


def place_operations(name: str, graph: LintGraph) -> Placement:
    """The placement that follows from the rules a graph breaks; disputed rules are listed and change nothing."""
    findings, ops = lint(graph), {op.name for op in graph.ops}
    cpu, stays, fails = (
        {n for f in findings if f.rule.effect == effect and not f.rule.disputed for n in f.names}
        for effect in ("cpu", "stays", "fails")
    )
    eligible = ops - cpu
    ane = set() if fails else eligible - stays
    convolutions = {op.name for op in graph.of("conv")}
    on_ane, rules = len(convolutions & ane), [_rule(f) for f in findings]
    counts = len(ops), len(eligible), len(ane), len(ops - ane), 0, (on_ane, len(convolutions))
    return Placement(name, "predicted", *counts, rules=rules)


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


def measured_placement(models: list[CoreMLModel]) -> list[Placement]:
    """What Core ML plans for shards, or functions of shards, that it has loaded. A plan is a
    preference: only timing each T shows where it runs."""
    return [
        count_units(" ".join(filter(None, (model.shard.name, model.function))), model.plan())
        for model in each_function(models)
    ]


def count_units(name: str, plan: list[Placed]) -> Placement:
    """A plan's operations counted by where they prefer to run; those without an answer count as no unit's."""
    units = Counter(p.preferred for p in plan)
    convolutions = Counter(p.preferred for p in plan if p.op == "conv")
    cost = sum(p.cost or 0 for p in plan)
    cost_ane = sum(p.cost or 0 for p in plan if p.preferred == "ane")
    eligible = sum("ane" in p.supported for p in plan)
    counts = len(plan), eligible, *(units[unit] for unit in ("ane", "cpu", "gpu"))
    on_ane = convolutions["ane"], convolutions.total()
    return Placement(name, "measured", *counts, on_ane, cost_ane / cost if cost else None)


def columns(placements: list[Placement]) -> dict:
    """The columns of a `runs` row."""
    by_shard = {
        p.shard: {n: getattr(p, n) for n in ("ops", "ane", "cpu", "gpu")} for p in placements
    }
    return {"placement": by_shard, "placement_source": placements[0].source}


def contradictions(placements: list[Placement]) -> list[str]:
    """Where a prediction contradicts experiment 30, which counted all four convolutions of stateful attention shards,
    int8 and RangeDim, on the Neural Engine of an M4 Max."""
    off = [
        p for p in placements if p.source == "predicted" and p.convolutions[0] < p.convolutions[1]
    ]
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
    """Placements as text: shards that fare alike on one line, then each rule once with its advice."""
    groups: dict[tuple, list[Placement]] = {}
    for p in placements:
        alike = (p.ops, p.eligible, p.ane, p.cpu, p.gpu, p.convolutions)
        groups.setdefault(alike, []).append(p)
    text = [f"{placements[0].source} placement"]
    for p, *more in groups.values():
        name = f"{p.shard} … {more[-1].shard} ({len(more) + 1})" if more else p.shard
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
