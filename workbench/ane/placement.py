"""The compute units of a bundle's operations: Core ML's compute plan on a Mac,
elsewhere a prediction from the rules, labelled as predicted.

Each shard has one `Placement`. A prediction separates the operations that are
`eligible` for the Neural Engine, because no rule excludes them, from those expected to
run there (`ane`), given the shard's size and neighbours. It lists the rules that were
applied and marks disputed ones."""

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
    """The numbers of a shard's compute operations by unit; None: not known.

    `convolutions` counts convolutions alone (on the ANE, all), as experiment 30 did.
    `cost_ane` is the ANE's share of the plan's estimated cost."""

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
    """The predicted placement of every shard, or of each of its functions, with compute
    units CPU_AND_NE, on a chip of an M generation."""
    shards = bundle.manifest.shards
    programs = sum(len(shard.functions) or 1 for shard in shards)
    placements = []
    for shard in shards:
        package = bundle.package(shard)
        placements += package_placement(
            package, generation, shard.name, programs=programs
        )
    return placements


def package_placement(
    package: Path,
    generation: int = 4,
    name: str | None = None,
    function: str | None = None,
    programs: int | None = None,
) -> list[Placement]:
    """The predicted placement of every function of a package, or of `function` alone.

    Args:
        name: the placements' name; default: the package's file name.
        programs: number of programs that a process loads with this one; default: the
            number of the package's functions.
    """
    weights = sum(file.stat().st_size for file in package.rglob("*.bin"))
    functions = sorted(read_spec(package).mlProgram.functions)
    chosen = [function]
    if len(functions) > 1 and not function:
        chosen = functions
    placements = []
    for own in chosen:
        program = miltorch.read(package, own)
        loaded = programs or len(functions)
        graph = LintGraph(program, weights, len(functions), generation, loaded)
        title = " ".join(filter(None, (name or package.stem, own)))
        placements.append(place_operations(title, graph))
    return placements


def predicted_units(program: miltorch.Program) -> dict[str, str]:
    """The predicted unit (ane, cpu) of each operation of a program, by its name, for
    `miltorch.shim.install(compute_plans=…)`."""
    graph = LintGraph(program, 0)
    _, ane = _units(lint(graph), {op.name for op in graph.ops})
    return {op.name: "ane" if op.name in ane else "cpu" for op in program.block.walk()}


def place_operations(name: str, graph: LintGraph) -> Placement:
    """The placement predicted from the rules that a graph breaks; disputed rules are
    only listed."""
    findings = lint(graph)
    ops = {op.name for op in graph.ops}
    eligible, ane = _units(findings, ops)
    convolutions = {op.name for op in graph.of("conv")}
    return Placement(
        name,
        "predicted",
        ops=len(ops),
        eligible=len(eligible),
        ane=len(ane),
        cpu=len(ops - ane),
        gpu=0,
        convolutions=(len(convolutions & ane), len(convolutions)),
        rules=list(map(_rule, findings)),
    )


def _units(findings: list[Finding], ops: set[str]) -> tuple[set[str], set[str]]:
    """The operations that no undisputed finding excludes from the Neural Engine, and
    those that are expected to run there."""
    names = {"cpu": set(), "stays": set(), "fails": set()}
    for finding in findings:
        if finding.rule.effect in names and not finding.rule.disputed:
            names[finding.rule.effect].update(finding.names)
    eligible = ops - names["cpu"]
    return eligible, set() if names["fails"] else eligible - names["stays"]


def _rule(finding: Finding) -> dict:
    """A finding as JSON: its rule with the sources in words, and the first names that
    break it."""
    r = finding.rule
    sources = {}
    for word in r.source.split():
        key = word.partition("#")[0]
        if key in RULE_SOURCES:
            sources[word] = RULE_SOURCES[key]
    return {
        "id": r.id,
        "effect": r.effect,
        "confidence": r.confidence,
        "says": r.says,
        "advice": r.advice,
        "sources": sources,
        "disputed": r.disputed or None,
        "count": len(finding.names),
        "names": list(finding.names[:5]),
    }


def plan_main(job: dict) -> list[dict]:
    """Core ML's compute plans for shards of a bundle; runs in a child process, which
    Core ML may abort.

    A plan is a preference; timing each T shows where a shard runs. Optimization hints
    do not enter a compute plan.

    Args:
        job: {bundle (a path), programs (pairs of a shard's name and a function's, null
            for its only one), runtime, fault, compute_units}.

    Returns:
        A `Placement` for every program, as JSON.

    Raises:
        InputError: Core ML gives no plan.
    """
    bundle, units = Bundle.open(job["bundle"]), job["compute_units"]
    source, context = "measured", nullcontext()
    if job["runtime"] == "stand-in":
        source, context = "simulated", installed(job["fault"])
    shards = {shard.name: shard for shard in bundle.manifest.shards}
    placements = []
    with context:
        for name, function in job["programs"]:
            title = " ".join(filter(None, (name, function)))
            plan = compute_plan(bundle, shards[name], units, function)
            placements.append(count_units(title, plan, source).json())
    return placements


def count_units(name: str, plan: list[Placed], source: str = "measured") -> Placement:
    """The placement of a compute plan, by each operation's preferred unit; operations
    without one count in `ops` alone."""
    units, convolutions, costs = Counter(), Counter(), Counter()
    eligible = cost = 0
    for placed in plan:
        units[placed.preferred] += 1
        convolutions[placed.preferred] += placed.op == "conv"
        costs[placed.preferred] += placed.cost or 0
        cost += placed.cost or 0
        eligible += "ane" in placed.supported
    counts = len(plan), eligible, units["ane"], units["cpu"], units["gpu"]
    on_ane = convolutions["ane"], convolutions.total()
    share = costs["ane"] / cost if cost else None
    return Placement(name, source, *counts, on_ane, share)


def _totals(placements: list[Placement]) -> tuple[int, Counter]:
    """The number of operations in all placements, and those with a unit by unit."""
    units = Counter()
    for p in placements:
        units.update(ane=p.ane, cpu=p.cpu, gpu=p.gpu or 0)
    return sum(p.ops for p in placements), units


def columns(placements: list[Placement]) -> dict:
    """The columns of a `runs` row: counts by shard, and the Neural Engine's share of
    all operations and of the plans' estimated costs, averaged over shards. A prediction
    has no shares."""
    by_shard = {}
    for p in placements:
        by_shard[p.shard] = {n: getattr(p, n) for n in ("ops", "ane", "cpu", "gpu")}
    source = placements[0].source
    row = {"placement": by_shard, "placement_source": source}
    ops, units = _totals(placements)
    if source != "predicted" and units.total():
        costs = [p.cost_ane for p in placements]
        row |= {"ane_ops_share": units["ane"] / ops, "ane_cost_share": None}
        if None not in costs:
            row["ane_cost_share"] = sum(costs) / len(costs)
    return row


def off_engine(placements: list[Placement], compute_units: str) -> str | None:
    """The reason why a run with CPU_AND_NE is invalid: its plans put no operation on
    the Neural Engine. None if they put one there, if they name no unit, and for other
    compute units."""
    ops, units = _totals(placements)
    if compute_units != "CPU_AND_NE" or units["ane"] or not units.total():
        return None
    places = {"the CPU": units["cpu"], "the GPU": units["gpu"]}
    places["no unit named"] = ops - units.total()
    ran = ", ".join(f"{count} on {place}" for place, count in places.items() if count)
    return f"not on the Neural Engine: the plan puts 0 of {ops} operations there, {ran}"


def contradictions(placements: list[Placement]) -> list[str]:
    """A note if a prediction contradicts experiment 30, which counted all four
    convolutions of stateful attention shards, int8 and RangeDim, on the Neural Engine
    of an M4 Max."""
    off, rules = 0, set()
    for p in placements:
        if p.source == "predicted" and p.convolutions[0] < p.convolutions[1]:
            off += 1
            for rule in p.rules:
                if not rule["disputed"] and rule["effect"] in ("cpu", "stays", "fails"):
                    rules.add(rule["id"])
    if not off:
        return []
    return [
        f"{off} shards are expected to keep convolutions off the Neural Engine, because of "
        f"{', '.join(sorted(rules))}; experiment 30 counted 4 of 4 on it (M4 Max). "
        "Only a Mac can settle it: a prediction is no measurement."
    ]


def lines(placements: list[Placement]) -> list[str]:
    """Placements as text: one line for all shards of the same counts, then one line per
    rule."""
    groups: dict[tuple, list[Placement]] = {}
    rules = {}
    for p in placements:
        counts = (p.ops, p.eligible, p.ane, p.cpu, p.gpu, p.convolutions)
        groups.setdefault(counts, []).append(p)
        for rule in p.rules:
            rules.setdefault(rule["id"], rule)
    text = [f"{placements[0].source} placement"]
    for p, *more in groups.values():
        name = p.shard
        if more:
            name = f"{p.shard} … {more[-1].shard} ({len(more) + 1})"
        on_ane = f"{p.ane} of {p.ops} operations on the ANE ({p.eligible} eligible)"
        convolutions = f"convolutions {p.convolutions[0]} of {p.convolutions[1]}"
        text.append(f"{name:32}{on_ane}, {p.cpu} CPU, {p.gpu} GPU; {convolutions}")
    return text + list(map(_rule_line, rules.values()))


def _rule_line(rule: dict) -> str:
    """A rule in one line: id, effect, confidence, statement, advice, sources,
    disputes."""
    head = f"{rule['id']:4}{rule['effect']:6}{rule['confidence']:3}{rule['says']}"
    text = f"{head}. {rule['advice']}. [{'; '.join(rule['sources'].values())}]"
    if rule["disputed"]:
        text += f" Disputed: {rule['disputed']}."
    return text


def suitable_units(checkpoint: Checkpoint) -> str:
    """CPU_AND_NE, or CPU_ONLY for a checkpoint whose decoder layers are so small that
    Core ML runs them on the CPU (rule G1), so that their times are not reported as the
    Neural Engine's."""
    elements = 0
    for name, entry in checkpoint.header.items():
        if ".layers." in name:
            elements += math.prod(entry.shape)
    if 2 * elements / checkpoint.config.num_hidden_layers < SMALL_LAYER:
        return "CPU_ONLY"
    return "CPU_AND_NE"
