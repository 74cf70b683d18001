"""Where a bundle's operations run: Core ML's own plan on a Mac; elsewhere what the rules predict, and never called more.

Out comes one `Placement` per shard. A prediction tells `eligible` (what no rule keeps off the Neural Engine) from `ane`
(what is expected there, given the shard's size and neighbours), and shows the rules behind it, disputed ones marked.
"""

from collections import Counter
from dataclasses import asdict, dataclass, field

import miltorch
from miltorch.program import read_spec
from workbench.ane.lint import lint
from workbench.ane.rule import RULE_SOURCES, Finding, LintGraph
from workbench.bundle import Bundle, Shard
from workbench.runtime.coreml import CoreMLModel, Placed


@dataclass(frozen=True)
class Placement:
    """Compute operations of a shard by where they run; None is not known. `convolutions` [on the ANE, of all] counts as
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

    def json(self) -> dict:
        return asdict(self)


def predicted_placement(bundle: Bundle, generation: int = 4) -> list[Placement]:
    """What the rules expect of every shard with compute units CPU_AND_NE, on a chip of an M generation."""
    return [predict_placement(bundle, shard, generation) for shard in bundle.manifest.shards]


def predict_placement(bundle: Bundle, shard: Shard, generation: int = 4) -> Placement:
    package = bundle.package(shard)
    weights = sum(f.bytes for f in shard.files if f.path.endswith(".bin"))
    functions = len(read_spec(package).mlProgram.functions)
    return place_operations(shard.name, LintGraph(miltorch.read(package), weights, functions, generation))


def place_operations(name: str, graph: LintGraph) -> Placement:
    """The placement that the rules a graph breaks lead to; a disputed rule moves nothing."""
    found = lint(graph)
    standing = [f for f in found if not f.rule.disputed]
    barred = {n for f in standing if f.rule.effect == "cpu" for n in f.names}
    away = barred | {n for f in standing if f.rule.effect == "stays" for n in f.names}
    if any(f.rule.effect == "fails" for f in standing):
        away |= {op.name for op in graph.ops}
    kinds = {op.name: op.kind for op in graph.ops}
    on_ane = [n for n in kinds if n not in away]
    convolutions = sum(kinds[n] == "conv" for n in on_ane), sum(kind == "conv" for kind in kinds.values())
    return Placement(name, "predicted", len(kinds), len(kinds.keys() - barred), len(on_ane), len(kinds) - len(on_ane), 0,
                     convolutions, rules=[_rule(f) for f in found])  # fmt: skip


def _rule(finding: Finding) -> dict:
    r = finding.rule
    sources = {word: RULE_SOURCES[key] for word in r.source.split() if (key := word.partition("#")[0]) in RULE_SOURCES}
    about = {name: getattr(r, name) for name in ("id", "effect", "confidence", "says", "advice")}
    return about | {"sources": sources, "disputed": r.disputed or None, "count": len(finding.names),
                    "names": list(finding.names[:5])}  # fmt: skip


def measured_placement(models: list[CoreMLModel]) -> list[Placement]:
    """What Core ML plans for shards that it has loaded. A plan is what it prefers; timing each T says what it does."""
    return [count_units(model.shard.name, model.plan()) for model in models]


def count_units(name: str, plan: list[Placed]) -> Placement:
    """A plan's operations counted by where they prefer to run; those without an answer count as no unit's."""
    where = Counter(p.preferred for p in plan)
    convolutions = [p for p in plan if p.op == "conv"]
    costs = [p.cost for p in plan if p.cost is not None]
    return Placement(
        name, "measured", len(plan), sum("ane" in p.supported for p in plan), where["ane"], where["cpu"], where["gpu"],
        (sum(p.preferred == "ane" for p in convolutions), len(convolutions)),
        sum(p.cost for p in plan if p.cost is not None and p.preferred == "ane") / sum(costs) if sum(costs) else None,
    )  # fmt: skip


def columns(placements: list[Placement]) -> dict:
    """The columns of a `runs` row."""
    by_shard = {p.shard: {"ops": p.ops, "ane": p.ane, "cpu": p.cpu, "gpu": p.gpu} for p in placements}
    return {"placement": by_shard, "placement_source": placements[0].source}


def known(placements: list[Placement]) -> list[str]:
    """What a prediction contradicts, in words: experiment 30 counted all four convolutions of stateful attention shards,
    int8 and RangeDim, on the Neural Engine of an M4 Max."""
    lost = [p for p in placements if p.source == "predicted" and p.convolutions[0] < p.convolutions[1]]
    if not lost:
        return []
    moving = (r for p in lost for r in p.rules if r["effect"] in ("cpu", "stays", "fails") and not r["disputed"])
    return [f"{len(lost)} shards are expected to keep convolutions off the Neural Engine, because of "
            f"{', '.join(sorted({r['id'] for r in moving}))}; experiment 30 counted 4 of 4 on it (M4 Max). "
            "Only a Mac can settle it: a prediction is no measurement."]  # fmt: skip


def lines(placements: list[Placement]) -> list[str]:
    """Placements as text: shards that fare alike on one line, then each rule once with its advice."""
    groups: dict[tuple, list[str]] = {}
    for p in placements:
        groups.setdefault((p.ops, p.eligible, p.ane, p.cpu, p.gpu, p.convolutions), []).append(p.shard)
    text = [f"{placements[0].source} placement"]
    for (ops, eligible, ane, cpu, gpu, convolutions), shards in groups.items():
        name = shards[0] if len(shards) == 1 else f"{shards[0]} … {shards[-1]} ({len(shards)})"
        text.append(f"{name:32}{ane} of {ops} operations on the ANE ({eligible} eligible), {cpu} CPU, {gpu} GPU; "
                    f"convolutions {convolutions[0]} of {convolutions[1]}")  # fmt: skip
    rules = {r["id"]: r for p in placements for r in p.rules}
    for r in rules.values():
        text.append(f"{r['id']:4}{r['effect']:6}{r['confidence']:3}{r['says']}. {r['advice']}. [{'; '.join(r['sources'].values())}]"
                    + (f" Disputed: {r['disputed']}." if r["disputed"] else ""))  # fmt: skip
    return text
