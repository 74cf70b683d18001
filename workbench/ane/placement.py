"""The compute units of a bundle's operations: Core ML's compute plan on a Mac,
elsewhere a prediction from the rules, labelled as predicted.

Each shard has one `Placement`. A prediction separates the operations that are
`eligible` for the Neural Engine, because no rule excludes them, from those expected to
run there (`ane`), given the shard's size and neighbours. It lists the rules that the
shard breaks. Those that another source disputes do not count in `ane`, only in
`ane_if_disputed_hold`."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import pandas as pd

import miltorch
from miltorch.program import read_spec
from workbench.ane.rules import EFFECTS, RULE_SOURCES, Finding, LintGraph, Rule, lint
from workbench.bundle import Bundle, Shard
from workbench.runtime import model_class
from workbench.runtime.coreml import PlacedOperation, compiled_path, compute_plan


@dataclass(frozen=True)
class Placement:
    """The numbers of a shard's compute operations by unit.

    Args:
        source: measured, predicted, or simulated: the plan of a stand-in.
        ops: all operations.
        eligible: those that could run on the Neural Engine.
        ane, cpu, gpu: those that are expected to run there; of a prediction: by the
            rules that nobody disputes.
        ane_if_disputed_hold: those that are expected on the Neural Engine if the
            disputed rules hold too; None for a plan of Core ML.
        convolutions: two counts, those on the Neural Engine and all; experiment 30
            counted these.
        findings: the rules that the shard breaks; none for a plan of Core ML.
    """

    shard: str
    source: str
    ops: int
    eligible: int
    ane: int
    cpu: int
    gpu: int
    convolutions: tuple[int, int]
    findings: list[Finding]
    ane_if_disputed_hold: int | None = None

    def json(self) -> dict:
        """The placement by the keys of `workbench plan --json`."""
        fields = asdict(self)
        del fields["findings"]
        return fields | {"rules": [finding.json() for finding in self.findings]}


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
    """The placement predicted from the rules that a program breaks: by the rules that
    nobody disputes, and the operations that remain on the Neural Engine if the disputed
    ones hold too."""
    findings = lint(graph)
    undisputed = [finding for finding in findings if not finding.rule.disputed]
    operations = _apply_rules(graph, undisputed)
    with_disputed = _apply_rules(graph, findings)
    placement = count_units(shard, operations, "predicted", findings)
    remaining = sum(op.preferred == "ane" for op in with_disputed)
    return replace(placement, ane_if_disputed_hold=remaining)


def _apply_rules(graph: LintGraph, findings: list[Finding]) -> list[PlacedOperation]:
    """The operations of a program, each on the unit where it is expected if the rules of
    the findings hold."""
    # names of operations that rules of the effects `cpu` and `stays` (see `rules`) exclude
    unsupported, staying = set(), set()
    is_off_ane = False  # the whole program
    for finding in findings:
        match finding.rule.effect:
            case "cpu":
                unsupported.update(finding.names)
            case "stays" if finding.rule.of in PROGRAM_VALUES:
                is_off_ane = True
            case "stays":
                staying.update(finding.names)
            case "fails":
                is_off_ane = True
    operations = []
    for op in graph.ops:
        is_supported = op.name not in unsupported
        runs_on_ane = is_supported and not is_off_ane and op.name not in staying
        preferred = "ane" if runs_on_ane else "cpu"
        supported = ("ane", "cpu") if is_supported else ("cpu",)
        operations.append(PlacedOperation(op.kind, op.name, preferred, supported))
    return operations


def read_compute_plan(
    root: Path, shards: list[Shard], runtime: str, compute_units: str
) -> list[Placement]:
    """The placements in the compute plan of Core ML, or of its stand-in, for every
    function of shards of the bundle at `root`. Call it in a child process: Core ML may
    abort the process (CT#2757).

    A plan is a preference; timing each T shows where a shard runs. Optimization hints
    do not enter a compute plan.

    Raises:
        InputError: there is no plan.
    """
    bundle, runtime_model, placements = Bundle.open(root), model_class(runtime), []
    with runtime_model.native_layer():
        for title, shard, package, function in iter_programs(bundle, shards):
            compiled = compiled_path(bundle, shard, package)
            operations = compute_plan(package, compiled, compute_units, function)
            source = runtime_model.plan_source
            placements.append(count_units(title, operations, source))
    return placements


def count_units(
    shard: str,
    operations: list[PlacedOperation],
    source: str = "measured",
    findings: Iterable[Finding] = (),
) -> Placement:
    """The placement of a shard whose operations have preferred and supported units. An
    operation without a preferred unit counts in `ops` alone."""
    units = Counter(op.preferred for op in operations)
    convolutions = Counter(op.preferred for op in operations if op.op == "conv")
    return Placement(
        shard,
        source,
        ops=len(operations),
        eligible=sum("ane" in op.supported for op in operations),
        ane=units["ane"],
        cpu=units["cpu"],
        gpu=units["gpu"],
        convolutions=(convolutions["ane"], convolutions.total()),
        findings=list(findings),
    )


def placement_columns(placements: list[Placement], compute_units: str) -> dict:
    """The columns of a `runs` row for the placements in Core ML's plans: counts by shard,
    and the Neural Engine's share of all operations.

    A run with CPU_AND_NE is `invalid` where its plans name units and put no operation
    on the Neural Engine."""
    shards = pd.DataFrame(placements).set_index("shard")
    counts = shards[["ops", "ane", "cpu", "gpu"]]
    row = {
        "placement": counts.to_dict("index"),
        "placement_source": placements[0].source,
    }
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


PROGRAM_VALUES = ("inputs", "states", "interface")
"""Subjects of rules that are values of the whole program: a rule on them that keeps off
the Neural Engine keeps every operation off."""
LEGEND = (
    "operations of a shard (ops): eligible for the Neural Engine; expected on it (ane), "
    "the CPU and the GPU; conv: convolutions (on the Neural Engine/all); size: shards "
    "with these counts"
)
"""The columns of the table of placements, in one line."""
DISPUTED_LEGEND = (
    "The columns ane, cpu, gpu and conv count no rule that another source disputes. "
    "disputed: operations on the Neural Engine if the disputed rules hold too"
)
"""A line after `LEGEND` where a shard breaks a disputed rule."""
TITLES = {"ane_if_disputed_hold": "disputed", "convolutions": "conv"}
"""A column of the table → its title, where its name would make the table wider than a
terminal of 80 columns."""
CONFIDENCE = {"H": "high", "M": "medium", "L": "low"}
"""The confidence of a rule in the table → in words."""


def describe(placements: list[Placement]) -> list[str]:
    """Placements as text: a table with one line for all shards of the same counts, and
    a legend of its columns. Then, where rules are broken, a legend of their effects, one
    line per rule: id, effect, confidence, statement, advice, sources, disputes; and a
    line that spells out the sources of the disputes. Disputed rules follow the others,
    under a line that says so."""
    rules = {
        finding.rule.id: finding.rule
        for placement in placements
        for finding in placement.findings
    }
    disputed = [rule for rule in rules.values() if rule.disputed]
    counts = ["ops", "eligible", "ane", "cpu", "gpu", "convolutions"]
    if disputed:
        counts.insert(3, "ane_if_disputed_hold")
    shards = pd.DataFrame(placements).groupby(counts, sort=False)["shard"]
    table = shards.agg(["size", "first", "last"]).reset_index()
    table["convolutions"] = table["convolutions"].map("{0[0]}/{0[1]}".format)
    table = table.rename(columns=TITLES)
    lines = [
        f"{placements[0].source} placement",
        *table.to_string(index=False).splitlines(),
        LEGEND,
    ]
    if disputed:
        lines.append(DISPUTED_LEGEND)
    if rules:
        present = {rule.effect for rule in rules.values()}
        words = [f"{name}: {EFFECTS[name]}" for name in EFFECTS if name in present]
        lines.append(
            f"rules, by id in data/sources/ane_rules.csv, and effects: {'; '.join(words)}"
        )
    lines += [_describe_rule(rule) for rule in rules.values() if not rule.disputed]
    if disputed:
        lines.append("disputed rules, counted in the column disputed alone")
        lines += map(_describe_rule, disputed)
    disputes = " ".join(rule.disputed for rule in disputed)
    cited = dict.fromkeys(re.findall(r"\b[A-Z]{2,3}\b", disputes))
    if sources := [
        f"{key}: {RULE_SOURCES[key]}" for key in cited if key in RULE_SOURCES
    ]:
        lines.append(f"Sources of the disputes: {'; '.join(sources)}.")
    return lines


def _describe_rule(rule: Rule) -> str:
    """A rule in one line, for `describe`."""
    confidence = CONFIDENCE.get(rule.confidence, rule.confidence)
    line = f"{rule.id:4}{rule.effect} ({confidence} confidence): {rule.says}."
    line += f" {rule.advice}. [{'; '.join(dict.fromkeys(rule.sources.values()))}]"
    if rule.disputed:
        line += f" Disputed: {rule.disputed}."
    return line
