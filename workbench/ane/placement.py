"""The compute units of a bundle's operations: Core ML's compute plan on a Mac,
elsewhere a prediction from the rules, labelled as predicted.

Each shard has one `Placement`. A prediction separates the operations that are
`eligible` for the Neural Engine, because no rule excludes them, from those expected to
run there (`ane`), given the shard's size and neighbours. It lists the rules that were
applied and marks disputed ones."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import miltorch
from miltorch.program import read_spec
from workbench import process
from workbench.ane.rules import RULE_SOURCES, LintGraph, lint
from workbench.bundle import Bundle, Shard
from workbench.errors import InputError
from workbench.runtime import model_class
from workbench.runtime.coreml import Placed, compute_plan


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
    rules: list[dict] = field(default_factory=list)  # with `sources` in words

    json = asdict


def predicted_placement(bundle: Bundle, generation: int = 4) -> list[Placement]:
    """The predicted placement of every shard, or of each of its functions, with compute
    units CPU_AND_NE, on a chip of an M generation."""
    shards = bundle.manifest.shards
    programs = sum(len(shard.functions) or 1 for shard in shards)
    placements = []
    for shard in shards:
        for name, package in bundle.packages(shard).items():
            placements += package_placement(
                package, generation, name, programs=programs
            )
    return placements


def package_placement(
    package: Path,
    generation: int = 4,
    name: str | None = None,
    programs: int | None = None,
) -> list[Placement]:
    """The predicted placement of every function of a package.

    Args:
        name: the placements' name; default: the package's file name.
        programs: number of programs that a process loads with this one; default: the
            number of the package's functions.
    """
    weights = sum(file.stat().st_size for file in package.rglob("*.bin"))
    functions = sorted(read_spec(package).mlProgram.functions)
    name, count, placements = name or package.stem, len(functions), []
    for function in functions:
        program = miltorch.read(package, function)
        graph = LintGraph(program, weights, count, generation, programs or count)
        title = f"{name} {function}" if count > 1 else name
        placements.append(place_operations(title, graph))
    return placements


def place_operations(name: str, graph: LintGraph) -> Placement:
    """The placement predicted from the rules that a graph breaks; disputed rules are
    only listed."""
    findings = lint(graph)
    ops = {op.name for op in graph.ops}

    def broken(effect: str) -> set[str]:
        ruled = [f for f in findings if f.rule.effect == effect and not f.rule.disputed]
        return {name for finding in ruled for name in finding.names}

    eligible = ops - broken("cpu")
    ane = set() if broken("fails") else eligible - broken("stays")
    convolutions = {op.name for op in graph.of("conv")}
    rules = []
    for finding in findings:
        words = finding.rule.source.split()
        sources = {word: RULE_SOURCES[word.partition("#")[0]] for word in words}
        names = {"count": len(finding.names), "names": list(finding.names[:5])}
        rules.append(asdict(finding.rule) | {"sources": sources} | names)
    return Placement(
        name,
        "predicted",
        ops=len(ops),
        eligible=len(eligible),
        ane=len(ane),
        cpu=len(ops - ane),
        gpu=0,
        convolutions=(len(convolutions & ane), len(convolutions)),
        rules=rules,
    )


def planned(
    bundle: Bundle,
    runtime: str,
    compute_units: str,
    *,
    shards: Iterable[Shard] | None = None,
    timeout_s: float | None = None,
) -> list[Placement]:
    """The compute plan of Core ML, or of its stand-in, for every function
    of a bundle's shards, made in a child process, which Core ML may abort (CT#2757).

    A plan is a preference; timing each T shows where a shard runs. Optimization hints
    do not enter a compute plan.

    Args:
        shards: default: all of the bundle.

    Raises:
        InputError: there is no plan; the reason may be the death of the child process.
    """
    names = [shard.name for shard in shards or bundle.manifest.shards]
    about = bundle.root, names, runtime, compute_units
    outcome = process.call(plan, *about, timeout_s=timeout_s)
    if outcome.failure is not None:
        raise InputError.from_message(outcome.failure) or InputError(
            f"compute plan of bundle {bundle.root.name}",
            outcome.failure,
            "a plan from Core ML",
            "see the message; timings alone say where it ran",
        )
    return outcome.value


def plan(
    root: Path, names: list[str], runtime: str, compute_units: str
) -> list[Placement]:
    """In a child: the plans of the named shards of the bundle at `root`."""
    bundle, placements = Bundle.open(root), []
    model = model_class(runtime)
    with model.native_layer():
        for shard in bundle.manifest.shards:
            for function in (shard.functions or [None]) * (shard.name in names):
                title = " ".join(filter(None, (shard.name, function)))
                found = compute_plan(bundle, shard, compute_units, function)
                placements.append(count_units(title, found, model.plan_source))
    return placements


def count_units(name: str, plan: list[Placed], source: str = "measured") -> Placement:
    """The placement of a compute plan, by each operation's preferred unit; operations
    without one count in `ops` alone."""
    units = Counter(placed.preferred for placed in plan)
    convolutions = Counter(p.preferred for p in plan if p.op == "conv")
    cost = sum(placed.cost or 0 for placed in plan)
    on_ane = sum(p.cost or 0 for p in plan if p.preferred == "ane")
    return Placement(
        name,
        source,
        ops=len(plan),
        eligible=sum("ane" in placed.supported for placed in plan),
        ane=units["ane"],
        cpu=units["cpu"],
        gpu=units["gpu"],
        convolutions=(convolutions["ane"], convolutions.total()),
        cost_ane=on_ane / cost if cost else None,
    )


def _totals(placements: list[Placement]) -> tuple[int, Counter]:
    """The number of operations in all placements, and those with a unit by unit."""
    units = Counter()
    for p in placements:
        units.update(ane=p.ane, cpu=p.cpu, gpu=p.gpu or 0)
    return sum(p.ops for p in placements), units


def columns(placements: list[Placement]) -> dict:
    """The columns of a `runs` row: counts by shard, and the Neural Engine's share of
    all operations. A prediction has no share."""
    by_shard = {}
    for p in placements:
        by_shard[p.shard] = {n: getattr(p, n) for n in ("ops", "ane", "cpu", "gpu")}
    source = placements[0].source
    row = {"placement": by_shard, "placement_source": source}
    ops, units = _totals(placements)
    if source != "predicted" and units.total():
        row["ane_ops_share"] = units["ane"] / ops
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


def lines(placements: list[Placement]) -> list[str]:
    """Placements as text: one line for all shards of the same counts, then one line per
    rule: id, effect, confidence, statement, advice, sources, disputes."""
    groups, rules = {}, {}
    for p in placements:
        counts = f"{p.ane} of {p.ops} operations on the ANE ({p.eligible} eligible), "
        counts += f"{p.cpu} CPU, {p.gpu} GPU; convolutions {p.convolutions[0]}"
        groups.setdefault(f"{counts} of {p.convolutions[1]}", []).append(p.shard)
        rules |= {rule["id"]: rule for rule in p.rules}
    text = [f"{placements[0].source} placement"]
    for counts, (name, *more) in groups.items():
        name += f" … {more[-1]} ({len(more) + 1})" if more else ""
        text.append(f"{name:32}{counts}")
    for rule in rules.values():
        head = f"{rule['id']:4}{rule['effect']:6}{rule['confidence']:3}{rule['says']}"
        line = f"{head}. {rule['advice']}. [{'; '.join(rule['sources'].values())}]"
        disputed = f" Disputed: {rule['disputed']}." if rule["disputed"] else ""
        text.append(line + disputed)
    return text
