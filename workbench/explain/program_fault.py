"""Says where a program computes something else than Hugging Face's model on the weights
that the bundle stores: gate `program`, and one sentence on what its RED rows have in
common.

A wrong epsilon of a norm shows only where inputs are small, so that the variants of
variants.py, which run on a usual prompt, fit a bundle that has one. Here the epsilons of
the worst layer are fitted to the bundle's own results on the small inputs of the gate."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pandas as pd
from torch import nn

from workbench.bundle import Bundle
from workbench.check import gates, program
from workbench.check.bug_gates import shards_to_test
from workbench.check.gates import Gate
from workbench.check.golden import StoredWeights, stored_weights
from workbench.check.hf import Reference, recording_cache
from workbench.check.run import run_passes
from workbench.check.states import default_ts
from workbench.check.stretches import (
    Stretch,
    Stretches,
    reference_stretches,
    run_stretch,
)
from workbench.check.trace import Trace, stack
from workbench.check.weights import list_names, unrecognised_matrices
from workbench.decode import Decoder
from workbench.explain.sibling_programs import (
    ProgramDifference,
    compare_with_sibling,
    describe_differences,
)
from workbench.explain.weight_faults import describe_weight_faults
from workbench.models.checkpoint import Checkpoint
from workbench.progress import stage

# The names under which transformers' norms keep their epsilon.
EPSILON_NAMES = "variance_epsilon", "eps"
# The epsilons that are tried first, as factors of the configured one.
FACTORS = (0.0, 1e-4, 1e-3, 1e-2, 0.1, 10.0, 100.0, 1e3, 1e4)
REFINED = 2  # candidates whose epsilon is fitted, the nearest ones
STEPS = 32  # of a fit, each of which narrows an interval of two decades by GOLDEN
GOLDEN = (math.sqrt(5) - 1) / 2
MAX_NAMED = 4  # layers that the sentence lists
PROGRAM_IS_RIGHT = (
    "The program is right: on the weights that the bundle stores it computes what the "
    "checkpoint's configuration says (gate program)."
)
WEIGHTS_ARE_WRONG = "The stored weights are not the checkpoint's"
# The manifest does not say whose exporter wrote the files.
CORRECT_WEIGHTS = (
    "Where your own exporter wrote this bundle, compare the exporter's weight conversion "
    "with these tensors: an export without a change of it repeats the fault. Where this "
    "workbench wrote it, its files were changed since: export again."
)


SUSPECTS = {
    (False, False): (
        "K and V are right, so the fault is in the queries, the scores, the mask, o_proj, "
        "the MLP or a norm after the first."
    ),
    (
        True,
        False,
    ): "V is right and K is wrong, so the fault is in k_proj, its norm or rope.",
    (False, True): "K is right and V is wrong, so the fault is in v_proj or its norm.",
    (True, True): (
        "K and V are wrong, so the fault is before them: in the layer's first norm, or in "
        "how q, k and v are divided."
    ),
}
"""Whether K and whether V is wrong → the parts of a layer that can be wrong, in words."""


@dataclass(frozen=True)
class ProgramAnswer:
    """Gate `program` of a bundle, and what its RED rows narrow the fault to.

    Attributes:
        conclusion: one or more sentences; None where neither this gate nor gate
            `weights` is RED.
        cause: the epsilon that fits, the first difference from a right layer's program,
            or the first wrong tensor's fault, in words; None if there is none.
    """

    gate: Gate
    conclusion: str | None = None
    cause: str | None = None


@dataclass(frozen=True)
class FittedEpsilon:
    """An epsilon with which Hugging Face's layer computes what the bundle's does.

    Attributes:
        norms: the names of its norms in the layer.
    """

    norms: tuple[str, ...]
    layer: int
    value: float
    configured: float

    def __str__(self) -> str:
        names = " and ".join(self.norms)
        return f"epsilon {self.value:.4g} in {names} of layer {self.layer}"


def judge_program(
    bundle: Bundle, checkpoint: Checkpoint, results: Iterable[Gate] = ()
) -> ProgramAnswer:
    """Runs gate `program` and, where it is RED, says where and looks for an epsilon.

    Args:
        results: gates that have run; gate `weights` among them says which shards have to
            be tested, and whether the weights can be the cause.
    """
    decoder = program.exact_decoder(bundle)
    if decoder.precision != "exact":
        target = bundle.manifest.options.target
        reason = f"needs fp32 arithmetic, which target {target} lacks"
        return ProgramAnswer(gates.not_run("program", reason, applies=False))
    results = [*results]
    can_feed = program.can_feed_layers(decoder)
    weights = stored_weights(checkpoint, bundle, keep_dtype=True, head=False)
    reference = Reference(checkpoint, weights)
    stretches = reference_stretches(
        bundle.manifest, reference, chained_end=not can_feed
    )
    representatives = shards_to_test(bundle, checkpoint, results)
    table = program.program_errors(decoder, checkpoint, representatives, stretches)
    gate = program.judge_errors(table, bundle.manifest)
    weights_answer = _judge_weights(bundle, checkpoint, weights, results)
    if gate.verdict != gates.RED:
        if weights_answer and gate.verdict == gates.GREEN:
            sentence = f"{PROGRAM_IS_RIGHT} {weights_answer.conclusion}"
            weights_answer = replace(weights_answer, conclusion=sentence)
        return replace(weights_answer or ProgramAnswer(gate), gate=gate)
    limit = program.program_limit(bundle.manifest)
    wrong = _wrong_rows(table, limit)
    conclusion = _describe_place(wrong, table)
    if bundle.manifest.foreign:
        missing = _describe_unrecognised(bundle, checkpoint)
        conclusion = f"{missing}{conclusion}"
    worst = wrong.loc[wrong["ratio"].idxmax()]
    fitted = None
    if can_feed and pd.notna(worst["layer"]):
        layer = int(worst["layer"])
        fitted = LayerOnSmallInputs.of(decoder, reference, stretches, layer).fit(limit)
    if fitted:
        conclusion += (
            f" It computes what Hugging Face's layer does with {fitted}, where the "
            f"configuration says {fitted.configured:.4g}."
        )
    elif _is_small_only(wrong):
        conclusion += (
            " Where only small inputs show a fault, an epsilon or another small constant "
            "of a norm is wrong."
        )
    differences = _find_differences(bundle, wrong)
    if differences:
        conclusion += f" {describe_differences(differences)}"
    if any(g.name == "weights" and g.verdict == gates.GREEN for g in results):
        conclusion += " The stored weights are right (gate weights)."
    elif weights_answer:
        conclusion += f" {weights_answer.conclusion}"
    causes = [str(cause) for cause in (fitted, *differences[:1]) if cause]
    if not causes and (parts := _describe_suspects(wrong, table)):
        code = type(reference.base).__module__
        conclusion += f" {parts} Compare the exporter's code for it with {code}."
    return ProgramAnswer(gate, conclusion, causes[0] if causes else None)


def _find_differences(bundle: Bundle, wrong: pd.DataFrame) -> list[ProgramDifference]:
    """How the program of a wrong layer differs from that of a right one.

    Args:
        wrong: the rows of gate `program` over its limit.
    """
    layers = sorted({*wrong["layer"].dropna().astype(int)})
    if not layers or bundle.manifest.options.plugin:  # whose packages are no programs
        return []
    if (wrong["mode"] == "chained").all():
        layers = layers[:1]  # those behind it read its wrong results
    return compare_with_sibling(bundle, layers)


def _judge_weights(
    bundle: Bundle, checkpoint: Checkpoint, weights: StoredWeights, results: list[Gate]
) -> ProgramAnswer | None:
    """What is wrong with the stored weights, and what to do; None where gate `weights`
    has not run or is not RED.

    Args:
        weights: those that the bundle stores.
    """
    gate = next((gate for gate in results if gate.name == "weights"), None)
    if gate is None or gate.verdict != gates.RED:
        return None
    if not gate.tensors:  # a damaged file, or a tensor that no shard stores
        conclusion = f"{WEIGHTS_ARE_WRONG} (see gate weights). {CORRECT_WEIGHTS}"
        return ProgramAnswer(gate, conclusion)
    stage("explain: the faults of the stored weights")
    clauses, _ = describe_weight_faults(bundle, checkpoint, weights, gate.tensors)
    conclusion = f"{WEIGHTS_ARE_WRONG}: {'; '.join(clauses)}. {CORRECT_WEIGHTS}"
    return ProgramAnswer(gate, conclusion, clauses[0])


def _wrong_rows(table: pd.DataFrame, limit: float) -> pd.DataFrame:
    """The rows over the limit. Isolated ones stand for all, since in a chained pass every
    layer behind a wrong one is wrong too; nan is over the limit."""
    ratio = table["ratio"].fillna(np.inf)
    wrong = table.assign(ratio=ratio)[ratio > limit]
    isolated = wrong[wrong["mode"] == "isolated"]
    return wrong if isolated.empty else isolated


def _is_small_only(wrong: pd.DataFrame) -> bool:
    """Whether no row is over the limit but those of the small inputs."""
    return bool((wrong["kind"] == "scaled").all())


def _describe_unrecognised(bundle: Bundle, checkpoint: Checkpoint) -> str:
    """The sentence, with a space behind it, that names the matrices which `adopt` did not
    find in the packages; empty where it found all of them or, as where an exporter's
    compression is unknown, none."""
    names = unrecognised_matrices(bundle, checkpoint)
    count = len(checkpoint.matrices)
    if not names or len(names) == count:
        return ""
    verb = "was" if len(names) == 1 else "were"
    return (
        f"{len(names)} of {count} matrices {verb} not found in the packages: "
        f"{list_names(names)}; begin there. "
    )


def _describe_place(wrong: pd.DataFrame, table: pd.DataFrame) -> str:
    """The sentence that says which layers, tensors and T are wrong.

    Args:
        wrong: the rows of `table` over the limit.
    """
    layers = sorted({*wrong["layer"].dropna().astype(int)})
    if (wrong["mode"] == "chained").all():
        subject = _first_wrong_of_chain(wrong, table)
    elif not layers:
        subject = "The final norm or the head computes"
    elif len(layers) == 1:
        subject = f"Layer {layers[0]} computes"
    elif len(layers) <= MAX_NAMED:
        subject = f"Layers {', '.join(map(str, layers))} compute"
    else:
        subject = f"{len(layers)} layers, the first of them layer {layers[0]}, compute"
    where = " at small inputs only" if _is_small_only(wrong) else ""
    tensors = ", ".join(dict.fromkeys(wrong["tensor"]))
    sizes = ", ".join(str(T) for T in sorted({*wrong["T"]}))
    return (
        f"{subject} something else than the checkpoint's configuration says{where} "
        f"({tensors}; T = {sizes})."
    )


def _first_wrong_of_chain(wrong: pd.DataFrame, table: pd.DataFrame) -> str:
    """The subject and verb of the sentence of `_describe_place` where every layer reads
    the output of the one before. A layer's states depend on its input, so that a fault
    behind the states of a layer shows first in the next layer, unless the output of the
    layer is compared too."""
    layers = table["layer"].dropna().astype(int)
    with_outputs = {*layers[table["tensor"] == "hidden"]}
    wrong_layers = wrong["layer"].dropna().astype(int)
    if wrong_layers.empty:
        if layers.empty or layers.max() in with_outputs:
            return "The final norm or the head computes"
        last = layers.max()
        return f"Layer {last} behind its K and V, the final norm or the head computes"
    first = wrong_layers.min()
    states_are_wrong = (wrong.loc[wrong_layers.index, "tensor"] != "hidden") & (
        wrong_layers == first
    )
    before = layers[layers < first]
    if before.empty:
        # layers without states and outputs of their own show nothing
        return "Layer 0 computes" if first == 0 else f"A layer up to {first} computes"
    last_right = before.max()
    if states_are_wrong.any() and last_right not in with_outputs:
        between = "or" if last_right == first - 1 else "a layer between them or"
        return (
            f"Layer {last_right} behind its K and V, {between} layer {first} computes"
        )
    return f"Layer {first} computes"


def _describe_suspects(wrong: pd.DataFrame, table: pd.DataFrame) -> str | None:
    """The sentence that says which parts of a layer with attention can be wrong, by which
    of its K, V and update are; None where a wrong layer shows no K and V, or was not fed
    Hugging Face's input.

    Args:
        wrong: the rows of `table` over the limit.
    """
    layers = {*wrong["layer"].dropna()}
    with_keys = {*table.loc[table["tensor"] == "k", "layer"]}
    if not layers or not layers <= with_keys or (wrong["mode"] == "chained").all():
        return None
    tensors = {*wrong["tensor"]}
    return SUSPECTS["k" in tensors, "v" in tensors]


@dataclass(frozen=True, eq=False)
class LayerOnSmallInputs:
    """One layer on the small inputs of gate `program`: Hugging Face's, whose epsilons can
    be changed, and the bundle's results.

    Attributes:
        reference: runs this layer, and those whose values it reads.
        plan: the pass of the bundle, its stretches cut to this layer.
        feeds: what every layer reads, by sequence.
        actual: the bundle's values, cut to this layer, by sequence.
    """

    reference: Reference
    layer: int
    plan: program.StretchPlan
    feeds: tuple[Trace, ...]
    actual: tuple[Trace, ...]

    @classmethod
    def of(
        cls, decoder: Decoder, reference: Reference, stretches: Stretches, layer: int
    ) -> "LayerOnSmallInputs":
        """Runs the shard of the layer, and leaves the other layers of the reference out
        where this one reads nothing of theirs."""
        shards = {
            model.shard.name
            for model in decoder.layer_shards
            if layer in model.shard.layer_range
        }
        largest = default_ts(decoder.options)[-1:]
        plan = program.StretchPlan(
            "scaled", stretches.scaled, tuple(largest), isolated=True, shards=shards
        )
        inputs = stack([stretch.trace for stretch in stretches.scaled])
        passes = [plan.plan_pass(decoder, inputs)]
        (result,) = run_passes(decoder, passes, "small inputs", head=False)
        # layers that pass on a router's values, or keep recurrent states, all have to run
        others_matter = bool(reference.sources) or any(
            part.router is not None or part.states
            for part in stretches.scaled[0].trace.layers
        )
        if not others_matter:
            for index, other in enumerate(reference.base.layers):
                if index != layer:
                    other.forward = _pass_through
        return cls(
            reference,
            layer,
            plan,
            tuple(_feed_of(stretch) for stretch in stretches.scaled),
            tuple(_cut(trace, layer) for trace in result.traces),
        )

    def fit(self, limit: float) -> FittedEpsilon | None:
        """The epsilon of one norm, or of all norms of the layer, with which the layer
        computes what the bundle's does; None if there is none."""
        norms = self._norms()
        groups = [(name,) for name in norms]
        if len(norms) > 1:
            groups.append((*norms,))
        tried = []  # the distance, the norms, their epsilon
        for group in groups:
            configured = _epsilon(norms[group[0]])
            values = [factor * configured for factor in FACTORS]
            distances = [self.distance(group, value) for value in values]
            best = int(np.argmin(distances))
            tried.append((distances[best], group, values[best]))
        for distance, group, value in sorted(tried)[:REFINED]:
            if distance > limit and value > 0:
                value, distance = _minimize(partial(self.distance, group), value, limit)
            if distance <= limit:
                configured = _epsilon(norms[group[0]])
                return FittedEpsilon(group, self.layer, value, configured)
        return None

    def distance(self, group: tuple[str, ...], epsilon: float) -> float:
        """The largest `ratio` of gate `program` in this layer, if these norms of Hugging
        Face's layer have another epsilon."""
        norms = self._norms()
        with _changed_epsilons([norms[name] for name in group], epsilon):
            stretches = tuple(map(self._run, self.plan.stretches, self.feeds))
        plan = replace(self.plan, stretches=stretches)
        rows = pd.concat(program.trace_errors(plan, self.actual))
        return float(rows["ratio"].fillna(np.inf).max())

    def _norms(self) -> dict[str, nn.Module]:
        """The norms of the layer by their names in it."""
        layer = self.reference.base.layers[self.layer].layer
        modules = dict(layer.named_modules())
        return {name: part for name, part in modules.items() if _epsilon(part)}

    def _run(self, stretch: Stretch, feed: Trace) -> Stretch:
        """The stretch of one sequence as the layer now computes it, cut to the layer."""
        variant = run_stretch(
            self.reference,
            stretch.ids,
            recording_cache(self.reference.model.config),
            feed=feed,
            token_scales=stretch.token_scales,
        )
        perturbed = _cut(variant.perturbed["isolated"], self.layer)
        trace = _cut(variant.trace, self.layer)
        return replace(variant, trace=trace, perturbed={"isolated": perturbed})


def _pass_through(x, *_, **__):
    """A layer that is left out."""
    return x


def _feed_of(stretch: Stretch) -> Trace:
    """The inputs that the layers of a stretch read."""
    feed = Trace.empty(len(stretch.trace.layers))
    for layer, recorded in zip(feed.layers, stretch.trace.layers):
        layer.x = recorded.x
    feed.final_input = stretch.final_input
    return feed


def _cut(trace: Trace, layer: int) -> Trace:
    """A trace of one layer alone."""
    return Trace([trace.layers[layer]], T=trace.T)


def _epsilon(module: nn.Module) -> float | None:
    """The epsilon of a norm; None for another module."""
    for name in EPSILON_NAMES:
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return None


@contextmanager
def _changed_epsilons(norms: list[nn.Module], epsilon: float) -> Iterator[None]:
    """Gives norms another epsilon while it is open."""
    changed = []
    for norm in norms:
        name = next(
            n for n in EPSILON_NAMES if isinstance(getattr(norm, n, None), float)
        )
        changed.append((norm, name, getattr(norm, name)))
        setattr(norm, name, epsilon)
    try:
        yield
    finally:
        for norm, name, value in changed:
            setattr(norm, name, value)


def _minimize(
    distance: Callable[[float], float], start: float, enough: float
) -> tuple[float, float]:
    """The epsilon within a decade of `start` whose distance is least, and that distance,
    by golden sections of its logarithm; it ends early where the distance is `enough`."""
    low, high = math.log(start) - math.log(10), math.log(start) + math.log(10)
    inner = [high - GOLDEN * (high - low), low + GOLDEN * (high - low)]
    values = [distance(math.exp(point)) for point in inner]
    for _ in range(STEPS):
        if min(values) <= enough:
            break
        if values[0] < values[1]:
            high = inner[1]
            inner = [high - GOLDEN * (high - low), inner[0]]
            values = [distance(math.exp(inner[0])), values[0]]
        else:
            low = inner[0]
            inner = [inner[1], low + GOLDEN * (high - low)]
            values = [values[1], distance(math.exp(inner[1]))]
    best = int(np.argmin(values))
    return math.exp(inner[best]), values[best]
