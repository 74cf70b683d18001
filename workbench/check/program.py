"""Gate `program`: whether a bundle's program computes Hugging Face's model on the
weights that the bundle stores. Both run in float32 and differ only in the order of
sums, so that one limit holds for every compression and family.

Behaviour that depends only on the program is tested on `representatives`, one shard per
distinct program (see `distinct`). Every shard is tested for what its weights can change:
start and end in every function, the small inputs, and the start through all layers in a
row.

Data: `stretches` has Hugging Face's side, some positions of each sequence. `plan_stretches`
lists the passes of the bundle over them (`StretchPlan`), `run_passes` runs these, and
`program_errors` compares: states (`state_errors`), the values of layers (`trace_errors`),
logits (`head_errors`). `program_gate` judges the worst."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pandas as pd
import torch

from workbench.bundle import Bundle, Manifest, Options
from workbench.bundle.names import split_layer
from workbench.bundle.rings import ring_positions
from workbench.check import gates
from workbench.check.compare import (
    Unit,
    budget_and_ratio,
    distances,
    errors,
    rms,
    safe_ratio,
    sum_of_squares,
    vector_errors,
    with_ratios,
)
from workbench.check.gates import Gate
from workbench.check.golden import read_head, stored_weights
from workbench.check.hf import Head, Reference
from workbench.check.run import (
    PassPlan,
    PlannedCall,
    plan_calls,
    run_passes,
    with_rounded_inputs,
)
from workbench.check.states import ShardNames, default_ts
from workbench.check.stretches import Stretch, Stretches, reference_stretches
from workbench.check.trace import Trace, stack
from workbench.decode import Decoder
from workbench.errors import InputError
from workbench.models.checkpoint import Checkpoint
from workbench.runtime import Model, State

# One limit on the relative RMS of a difference, per layer, position, T and tensor. Both
# sides sum the same terms in another order. Rounding n partial sums by 2^-24 each moves
# a sum of n random terms by about sqrt(n) * 2^-24 of itself, 4e-6 for the n = 5,000 of
# an MLP. What a layer does to such a difference afterwards is what `program_unit` adds.
LIMIT = 1e-5
# A step is 2^-23 of a value. The effect of one step of a layer's input is measured: the
# distance of Hugging Face's own model on inputs that are one step off
# (`Stretch.perturbed`), or the step itself where that is larger. An update is the
# difference of two values of the stream, each rounded on both sides: one below
# `STEP / LIMIT` of a huge stream (a massive activation) counts as that large.
STEP = 2.0**-23
# Steps by which the two sides differ inside a layer, RMS, before it amplifies them.
# About 16 roundings of 0.29 steps follow each other on both sides: sqrt(32) * 0.29.
ROUNDINGS = 1.6
# The projections sum C terms each. Added one after another, as oneDNN does without
# AVX-512, n random terms are off by 0.15 * sqrt(n) steps (the partial sums grow with
# sqrt(k), and each is rounded by 0.21 of its steps); on both sides sqrt(2) times that.
# Scores multiply it: softmax(q k) of long q and k that are nearly orthogonal.
STEPS_OF_SUM = 0.21
# The perturbed model is one draw, and where one head or a few scores decide, its distance
# may be half of the usual one by chance.
ALLOWANCE = 2


def program_unit(C: int) -> Unit:
    """The `Unit` of a model of width C: the size of the value, so that the ratio is a
    relative RMS, raised by what rounding explains. n steps of rounding cause a distance
    of r = n · max(perturbed, `STEP` · size), whose ratio stays within the limit whatever
    the size is:

        r / (size + r / LIMIT)  <  r / (r / LIMIT)  =  LIMIT
    """
    steps = ALLOWANCE * math.hypot(ROUNDINGS, STEPS_OF_SUM * math.sqrt(C))

    def unit(perturbed: np.ndarray, size: np.ndarray) -> np.ndarray:
        one_step = np.maximum(perturbed, STEP * size)
        return size + steps / LIMIT * one_step

    return unit


def exact_runtime(bundle: Bundle) -> str:
    """The runtime that runs a bundle's programs in `exact` arithmetic.

    Raises:
        InputError: fp16 programs of a plug-in's target, which no runtime runs in fp32.
    """
    options = bundle.manifest.options
    if options.plugin and options.program_dtype == "fp16":
        raise InputError(
            f"bundle {bundle.root.name}",
            f"fp16 programs of target {options.target}",
            "programs that some runtime here runs in exact arithmetic",
            "export it for a target of fp32 programs, or for Core ML",
        )
    return options.interpreter


def exact_decoder(
    bundle: Bundle, decoder: Decoder | None = None, *, keeps_head: bool = False
) -> Decoder:
    """The decoder whose program is compared: in `exact` arithmetic if the bundle's
    interpreter has it.

    Args:
        decoder: is returned if it runs in this arithmetic and is no device. In the place
            of another one the bundle's programs are opened, and the inputs of their
            calls come from the host of `decoder`, also where it was changed.
        keeps_head: see `Decoder`; for a caller that computes logits again and again.
    """
    if decoder and not decoder.is_device and decoder.precision == "exact":
        return decoder
    interpreter = bundle.manifest.options.interpreter
    exact = Decoder(bundle, interpreter, "exact", keeps_head=keeps_head)
    if decoder:
        exact.host = decoder.host
    return exact


def program_gate(
    decoder: Decoder,
    checkpoint: Checkpoint,
    representatives: ShardNames = None,
    stretches: Stretches | None = None,
) -> Gate:
    """The gate on a portable decoder in `exact` arithmetic; see `program_errors` for the
    arguments. The constants of another exporter's programs have their own limit."""
    table = program_errors(decoder, checkpoint, representatives, stretches)
    return judge_errors(table, decoder.manifest)


def program_limit(manifest: Manifest) -> float:
    """The largest `ratio` of a sound bundle."""
    return max(LIMIT, manifest.constants_error)


def judge_errors(table: pd.DataFrame, manifest: Manifest) -> Gate:
    """The gate on the rows of `program_errors` of a bundle."""
    worst = table.loc[table["ratio"].idxmax()]
    place = f"{worst['mode']}, sequence {worst['seq']}, position {worst['position']}"
    if pd.notna(worst["layer"]):
        place = f"layer {worst['layer']}, {place}"
    reason = (
        "relative RMS against Hugging Face's model with the stored weights, "
        f"worst of {len(table)}: {worst['tensor']}, {place}, T = {worst['T']}"
    )
    limit = program_limit(manifest)
    return gates.at_most("program", float(worst["ratio"]), limit, reason)


def program_errors(
    decoder: Decoder,
    checkpoint: Checkpoint,
    representatives: ShardNames = None,
    stretches: Stretches | None = None,
) -> pd.DataFrame:
    """Rows of `errors` with mode, kind of stretch and sequence `seq`, for every layer,
    position, T and tensor: updates (chained: hidden states), states, router states,
    logits, and choices of experts. A choice may differ where the last bit of the input
    changes Hugging Face's. `plan_stretches` says which calls run.

    Args:
        representatives: see `states`; None: all shards.
        stretches: of `reference_stretches` for the bundle's weights, with a chained end
            unless the decoder `can_feed_layers`; None: they are computed.
    """
    isolated = can_feed_layers(decoder)
    if stretches is None:
        weights = stored_weights(
            checkpoint, decoder.bundle, keep_dtype=True, head=False
        )
        stretches = reference_stretches(
            decoder.manifest, Reference(checkpoint, weights), chained_end=not isolated
        )
    plans = plan_stretches(decoder.options, stretches, isolated, representatives)
    references = {}
    for plan in plans:
        if plan.kind not in references:
            traces = [with_rounded_inputs(decoder, s.trace) for s in plan.stretches]
            references[plan.kind] = stack(traces)
    pass_plans = [plan.plan_pass(decoder, references[plan.kind]) for plan in plans]
    results = run_passes(decoder, pass_plans, "program", head=False)
    tables: list[pd.DataFrame] = []
    head_calls: list[HeadCall] = []
    for plan, result in zip(plans, results, strict=True):
        for tables_of_shard in result.state_readings:
            tables.extend(tables_of_shard)
        tables.extend(trace_errors(plan, result.traces))
        head_calls.extend(plan_head_calls(decoder, plan, result.traces))
    tables.extend(head_errors(decoder, checkpoint, head_calls))
    return pd.concat(tables, ignore_index=True)


def can_feed_layers(decoder: Decoder) -> bool:
    """Whether every layer can be given an input of its own and shows its output."""
    # the input of an inner layer is replaced where it shows
    inner = decoder.shows_inner_layers or decoder.options.layers_per_shard == 1
    return decoder.manifest.shows_hidden and inner


def plan_stretches(
    options: Options, stretches: Stretches, isolated: bool, representatives: ShardNames
) -> list["StretchPlan"]:
    """The passes of gate `program`.

    Isolated, every layer is fed Hugging Face's input: start and end in calls of the
    longest T of every function, scaled inputs in calls of the largest T. Shards of
    `representatives` also run start and end in calls of the smallest T and of the others
    in turn, and half of t_max tokens in t_max columns. Chained, each layer reads the
    output of the one before: the start, in calls of every T in turn. If not `isolated`,
    all of this is chained. Where T alternates, sequences of a batch take different ones
    if the bundle allows it."""
    Ts = tuple(default_ts(options))
    # `sizes` are all T in turn, as chained passes take them; isolated passes replace them
    start = StretchPlan("start", stretches.start, sizes=Ts)
    end = StretchPlan("end", stretches.end, sizes=Ts)
    start_and_end = [start, end] if stretches.end else [start]
    plans = []
    if isolated:
        largest = Ts[-1:]
        plans.append(StretchPlan("scaled", stretches.scaled, largest, isolated=True))
    for plan in start_and_end:
        if isolated:
            plans += _isolated_plans(plan, options, representatives)
        else:
            plans += [replace(plan, sizes=sizes) for sizes in groups_of_sizes(Ts)]
        if plan is start or not isolated:
            plans.append(plan)
    if options.kv_write == "mask":  # which takes dummy columns
        half_filled = replace(
            start_and_end[-1],
            sizes=(max(1, options.t_max // 2),),
            isolated=isolated,
            columns=options.t_max,
            shards=representatives if isolated else None,
        )
        plans.append(half_filled)
    return plans


def groups_of_sizes(Ts: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The T of the calls of each pass, where several take turns: the smallest, those
    between, the largest. (1, 2, 3, 8) → [(1,), (2, 3), (8,)]; (4,) → [(4,)]."""
    groups = [Ts[:1], Ts[1:-1], Ts[-1:]]
    return [*dict.fromkeys(group for group in groups if group)]


def _isolated_plans(
    chained: "StretchPlan", options: Options, representatives: ShardNames
) -> Iterator["StretchPlan"]:
    """The isolated passes over the stretches of a `chained` one: every shard in calls of
    the longest T of every function, `representatives` in the other groups of sizes."""
    longest = [(T,) for T in options.fixed_sizes] or [(options.t_max,)]
    for sizes in longest:
        yield replace(chained, sizes=sizes, isolated=True)
    for sizes in groups_of_sizes(chained.sizes):
        if sizes not in longest:
            yield replace(chained, sizes=sizes, isolated=True, shards=representatives)


@dataclass(frozen=True)
class StretchPlan:
    """A pass over one stretch of each sequence, from states that hold the tokens before
    it.

    Attributes:
        kind: of the stretches: `start`, `end` or `scaled`.
        sizes: tokens per call; several sizes take turns.
        isolated, shards: see `PassPlan`.
        columns: the least that a call has.
    """

    kind: str
    stretches: tuple[Stretch, ...]
    sizes: tuple[int, ...]
    isolated: bool = False
    columns: int = 0
    shards: ShardNames = None

    @property
    def mode(self) -> str:
        """The value of the column `mode`."""
        return "isolated" if self.isolated else "chained"

    @property
    def unit(self) -> Unit:
        """What distances are divided by."""
        return program_unit(self.stretches[0].final_input.shape[-1])

    def plan_pass(self, decoder: Decoder, reference: Trace) -> PassPlan:
        """The pass as `run_passes` runs it, which reads `state_errors` of each shard.

        Args:
            reference: the stacked traces of the stretches.
        """
        ids = np.stack([stretch.ids for stretch in self.stretches])
        token_scales = None
        if self.stretches[0].token_scales is not None:
            token_scales = np.stack([s.token_scales for s in self.stretches])
        calls = plan_calls(
            decoder.options,
            ids.shape,
            self.sizes,
            ragged=decoder.options.kv_write == "mask",
            columns=self.columns,
        )
        return PassPlan(
            ids,
            calls,
            reference,
            self.isolated,
            starts=np.array([stretch.start for stretch in self.stretches]),
            make_state=partial(state_before, self.stretches),
            shards=self.shards,
            token_scales=token_scales,
            read_state=partial(state_errors, self, calls),
        )


def state_before(stretches: Sequence[Stretch], model: Model) -> State:
    """The state of a shard before the first positions of `stretches`."""
    state = model.make_state()
    for name, entry in model.shard.states.items():
        shape = entry.shape[1:]
        values = [stretch.expected_state(shape, name) for stretch in stretches]
        state.write(name, np.stack(values))
    return state


def state_errors(
    plan: StretchPlan, calls: Sequence[PlannedCall], model: Model, state: State
) -> list[pd.DataFrame]:
    """Errors of every row of every state of a shard after the `calls` of a pass, a table
    for each state and sequence. Rows without a token, which must not change, have
    negative positions."""
    tables = []
    for name, entry in model.shard.states.items():
        layer, leaf = split_layer(name)
        shape = entry.shape[1:]
        count = entry.shape[-2]
        values = np.asarray(state.read(name), np.float32)
        for seq, (stretch, value) in enumerate(zip(plan.stretches, values)):
            perturbed_trace = stretch.perturbed[plan.mode]
            expected = _rows_of(stretch.expected_state(shape, name, stretch.trace))
            perturbed = _rows_of(stretch.expected_state(shape, name, perturbed_trace))
            figures = vector_errors(expected, _rows_of(value))
            figures["budget"], figures["ratio"] = budget_and_ratio(
                figures["distance"],
                figures["size"],
                distances(expected, perturbed),
                plan.unit,
            )
            calls_with_tokens = [call for call in calls if call.counts[seq]]
            columns = {
                "tensor": leaf.removesuffix("_state"),
                "layer": pd.array([layer] * count, "Int64"),
                "position": ring_positions(stretch.end - 1, count),
                "T": max(call.counts.max() for call in calls_with_tokens),
            }
            rows = pd.DataFrame(columns | figures)
            tables.append(_finish_rows(rows, plan, seq))
    return tables


def _rows_of(value: np.ndarray) -> np.ndarray:
    """A state [.., rows, D] with its rows first, as [rows, W]."""
    return np.moveaxis(value, -2, 0).reshape(value.shape[-2], -1)


def trace_errors(plan: StretchPlan, traces: Sequence[Trace]) -> list[pd.DataFrame]:
    """Errors of a pass's traces without logits, a table for each sequence; none where
    programs of another exporter show nothing but their states."""
    tensors = ["update" if plan.isolated else "hidden", "router", "expert"]
    tables = []
    for seq, (stretch, trace) in enumerate(zip(plan.stretches, traces)):
        reference = stretch.trace
        sizes = [STEP / LIMIT * rms(layer.unscaled) for layer in reference.layers]
        rows = errors(reference, trace, tensors, update_sizes=sizes)
        if rows.empty:
            continue
        perturbed = stretch.perturbed[plan.mode]
        rows = with_ratios(rows, reference, perturbed, plan.unit)
        rows["position"] += stretch.start
        tables.append(_finish_rows(rows, plan, seq))
    return tables


@dataclass(frozen=True)
class TraceKey:
    """Names one of Hugging Face's traces.

    Attributes:
        kind, seq: of the stretch, and its sequence.
        mode: of the perturbed trace; None: the unperturbed one.
    """

    kind: str
    seq: int
    mode: str | None


@dataclass(frozen=True)
class LogitSums:
    """Sums of squares over the vocabulary, each [B, n] float64.

    Attributes:
        size: of Hugging Face's logits.
        distance: of their distances from the program's.
        perturbed: of their distances from the perturbed ones.
    """

    size: np.ndarray
    distance: np.ndarray
    perturbed: np.ndarray


@dataclass
class HeadCall:
    """A call of the head over positions of one stretch of each sequence, and the errors
    of its logits. Slices of the vocabulary are added one after another, and only their
    sums of squares are kept, because all logits of a large vocabulary take gigabytes.

    Attributes:
        hidden: [B, C, n], what it reads.
        positions: of the stretches.
        T: [B, n], the tokens of the call that computed each of them.
        sums: of the slices that were added.
    """

    plan: StretchPlan
    hidden: np.ndarray
    positions: slice
    T: np.ndarray
    sums: LogitSums = field(init=False)

    def __post_init__(self):
        self.sums = LogitSums(*(np.zeros(self.T.shape) for _ in range(3)))

    def traces(self) -> dict[TraceKey, Trace]:
        """Hugging Face's traces that the call is compared with: of every sequence the
        unperturbed one and the perturbed one of the plan's mode."""
        named = {}
        for seq, stretch in enumerate(self.plan.stretches):
            named[self._key(seq)] = stretch.trace
            named[self._key(seq, self.plan.mode)] = stretch.perturbed[self.plan.mode]
        return named

    def _key(self, seq: int, mode: str | None = None) -> TraceKey:
        return TraceKey(self.plan.kind, seq, mode)

    def add(self, logits: np.ndarray, expected: dict[TraceKey, np.ndarray]) -> None:
        """Adds a slice of the vocabulary.

        Args:
            logits: [B, n, r], the program's.
            expected: Hugging Face's logits [positions of the stretch, r] of each trace.
        """
        for seq, actual in enumerate(logits):
            reference = expected[self._key(seq)][self.positions]
            perturbed = expected[self._key(seq, self.plan.mode)][self.positions]
            self.sums.size[seq] += sum_of_squares(reference)
            self.sums.distance[seq] += sum_of_squares(reference, actual)
            self.sums.perturbed[seq] += sum_of_squares(reference, perturbed)

    def errors(self, V: int) -> Iterator[pd.DataFrame]:
        """The rows of every sequence, once all of its V logits have been added."""
        for seq, stretch in enumerate(self.plan.stretches):
            size = np.sqrt(self.sums.size[seq] / V)
            distance = np.sqrt(self.sums.distance[seq] / V)
            perturbed = np.sqrt(self.sums.perturbed[seq] / V)
            budget, ratio = budget_and_ratio(distance, size, perturbed, self.plan.unit)
            columns = {
                "tensor": "logits",
                "layer": pd.NA,
                "position": np.arange(stretch.start, stretch.end)[self.positions],
                "T": self.T[seq],
                "distance": distance,
                "size": size,
                "error": safe_ratio(distance, size),
                "budget": budget,
                "ratio": ratio,
            }
            rows = pd.DataFrame(columns).astype({"layer": "Int64"})
            yield _finish_rows(rows, self.plan, seq)


def plan_head_calls(
    decoder: Decoder, plan: StretchPlan, traces: Sequence[Trace]
) -> list[HeadCall]:
    """The calls of the head of a pass: over the outputs of a chained pass; for an isolated
    one over the last tokens of each stretch, in calls of every size."""
    scale = decoder.manifest.stream_scale
    if not plan.isolated:
        if not decoder.manifest.gives_logits:
            return []
        outputs = np.stack([trace.output for trace in traces])  # [B, n, C]
        T = np.stack([trace.T for trace in traces])
        hidden = outputs.swapaxes(1, 2) / scale
        return [HeadCall(plan, hidden, slice(None), T)]
    calls = []
    for size in plan.sizes:
        last = np.stack([s.final_input[-size:] for s in plan.stretches])  # [B, n, C]
        B, n, _ = last.shape
        hidden = last.swapaxes(1, 2) / scale
        T = np.full((B, n), n)
        calls.append(HeadCall(plan, hidden, slice(-size, None), T))
    return calls


def head_errors(
    decoder: Decoder, checkpoint: Checkpoint, calls: Sequence[HeadCall]
) -> list[pd.DataFrame]:
    """Errors of the logits of all calls against Hugging Face's. Both sides compute one
    slice of the vocabulary after another.

    Raises:
        InputError: packages that give another number of logits than the vocabulary has.
    """
    if not calls:
        return []
    normed = {}  # what Hugging Face's head reads, for each trace once
    for call in calls:
        normed |= {key: trace.normed for key, trace in call.traces().items()}
    ends = np.cumsum([len(rows) for rows in normed.values()])[:-1]
    head = Head(checkpoint.config, partial(read_head, checkpoint, decoder.bundle))
    inputs = torch.from_numpy(np.concatenate([*normed.values()]))
    reader = SliceReader(head.slices(inputs))
    V, needed = 0, decoder.manifest.dims.V
    for slices in decoder.logit_slices([call.hidden for call in calls]):
        count = slices[0].shape[2]
        V += count
        if V > needed:
            break
        parts = np.split(reader.read(count), ends)
        expected = dict(zip(normed, parts, strict=True))
        for call, logits in zip(calls, slices, strict=True):
            call.add(logits, expected)
    if V != needed:
        step = "export the model again"
        raise InputError("head", f"{V} logits", f"{needed}, one for each token", step)
    return [rows for call in calls for rows in call.errors(V)]


class SliceReader:
    """Logits [N, V] that arise in slices of some sizes, read in slices of others."""

    def __init__(self, slices: Iterator[torch.Tensor]):
        self.slices = slices
        self.rest: np.ndarray | None = None  # behind what was read

    def read(self, count: int) -> np.ndarray:
        """The next `count` columns, or those that there are."""
        parts = [] if self.rest is None else [self.rest]
        while sum(part.shape[1] for part in parts) < count:
            part = next(self.slices, None)
            if part is None:
                break
            parts.append(part.numpy())
        columns = np.concatenate(parts, axis=1)
        self.rest = columns[:, count:]
        return columns[:, :count]


def _finish_rows(rows: pd.DataFrame, plan: StretchPlan, seq: int) -> pd.DataFrame:
    """The rows of one sequence of a pass with the columns `seq`, `mode` and `kind` (of
    its stretches). Chained ratios are divided by the number of layers that have run:
    their errors add up, and the limit is that of one layer. Logits come behind all
    layers and a head."""
    if not plan.isolated:
        L = len(plan.stretches[seq].trace.layers)
        layers_run = rows["layer"].fillna(L).astype(int) + 1
        rows = rows.assign(ratio=rows["ratio"] / layers_run)
    return rows.assign(seq=seq, mode=plan.mode, kind=plan.kind)
