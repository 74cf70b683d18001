"""Gate `program`: whether a bundle's program computes Hugging Face's model on the
weights that the bundle stores. Both run in float32 and differ only in the order of
sums, so that one limit holds for every compression and family.

Behaviour that depends only on the program is tested on `representatives`, one shard per
distinct program (see `distinct`). Every shard is tested for what its weights can change:
start and end in every function, the small inputs, and the start through all layers in a
row.

Each sequence first runs its start: some positions from 0 on. Then both caches are
extended by the same rows, drawn from the start's, and it runs its end, whose last
position is the last of the cache. So every row of the cache is written or read once,
windows and rings are passed, and the number of computed positions does not grow with the
cache. Rows without a token hold garbage, which must neither be read nor change.

A norm's epsilon shows only where its input is as small as the epsilon's root. So every
layer and the final norm are also fed inputs whose RMS grows from 2^-44 to 1 in steps of
at most 16 times, if the cache has `SCALES` positions. What a layer's inner norms read
lies between, and passes the root of any usual epsilon (1e-12 to 1e-5) on the way. The
smallest inputs come first, so that no larger value of an earlier position hides a
smaller one. Embeddings that layers read beside their input are multiplied by the same
scales: a norm hides a factor of its input wherever the input is large."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

import numpy as np
import pandas as pd
import torch

from workbench.bundle import Bundle, Manifest, Options
from workbench.bundle.names import is_cache, split_layer
from workbench.bundle.rings import ring_positions
from workbench.check import gates
from workbench.check.compare import (
    budget_and_ratio,
    distances,
    errors,
    rms,
    safe_ratio,
    sum_of_squares,
    vector_errors,
    with_tolerance,
)
from workbench.check.gates import Gate
from workbench.check.golden import read_head, stored_weights
from workbench.check.hf import Head, Reference, SequenceRun, nudge, recording_cache
from workbench.check.run import PromptRun, plan_calls, run_passes, with_rounded_inputs
from workbench.check.states import LARGE, SUBNORMAL, ShardNames, default_ts
from workbench.check.trace import Trace, stack
from workbench.decode import Decoder
from workbench.decode.snapshot import fill
from workbench.errors import InputError
from workbench.models.checkpoint import Checkpoint
from workbench.runtime import Model, State

# One limit on the relative RMS of a difference, per layer, position, T and tensor. Both
# sides sum the same terms in another order. Rounding n partial sums by 2^-24 each moves
# a sum of n random terms by about sqrt(n) * 2^-24 of itself, 4e-6 for the n = 5,000 of
# an MLP; the rounding of what cancels further is what `program_tolerance` adds.
LIMIT = 1e-5
# The rounding of the stream, in steps of 2^-23 of it: about 16 roundings follow each
# other in a layer, on both sides, each of 0.29 steps RMS, together sqrt(32) * 0.29 =
# 1.6, hence 2. The effect of one step is measured: the distance of Hugging Face's own
# model on inputs that are one step off (`Stretch.perturbed`), or the step itself where
# that is larger. An update is the difference of two values of the stream, each rounded
# on both sides: one below `STEP / LIMIT` of a huge stream (a massive activation) counts
# as that large.
STEP = 2.0**-23
STEPS = 2
START_POSITIONS = 20
END_POSITIONS = 8
STAGGER = 3  # positions between the ends of two sequences
SCALES = 12  # positions of scaled inputs
SMALLEST = -44  # exponent of their smallest RMS
GARBAGE = LARGE, SUBNORMAL  # magnitudes in rows without a token
SIZE, DISTANCE, PERTURBED = range(3)  # the first axis of `HeadCall.sums`


@dataclass
class Stretch:
    """Consecutive positions of one sequence.

    Attributes:
        start: the first position.
        ids: [n].
        trace: of Hugging Face's model without logits, with the recurrent states after
            the last position.
        before: the states before the first position; `k` and `v` [start, W] hold all
            rows of the caches.
        perturbed: the trace when the last bit of every layer's input is changed, by mode:
            `isolated`, and `chained` if layers in a row are compared.
        final_input: [n, C], what the final norm reads.
        token_scales: see `SequenceRun`.
    """

    start: int
    ids: np.ndarray
    trace: Trace
    before: Trace
    perturbed: dict[str, Trace]
    final_input: np.ndarray
    token_scales: np.ndarray | None = None

    @property
    def end(self) -> int:
        """The position behind the last one."""
        return self.start + len(self.ids)


Stretches = dict[str, tuple[Stretch, ...]]  # see `reference_stretches`


def program_tolerance(perturbed: np.ndarray, size: np.ndarray) -> np.ndarray:
    """A `Tolerance`: the size of the value, which makes the ratio a relative RMS, plus
    what two steps of rounding cause over `LIMIT`, so that these steps alone stay within
    the limit.

    A value of size 1 that one step moves by 1e-6 has 1 + 2 · 1e-6 / 1e-5 = 1.2: a
    distance of 2e-6 has the ratio 1.7e-6."""
    return size + STEPS / LIMIT * np.maximum(perturbed, STEP * size)


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
    worst = table.loc[table["ratio"].idxmax()]
    place = f"{worst['mode']}, sequence {worst['seq']}, position {worst['position']}"
    if pd.notna(worst["layer"]):
        place = f"layer {worst['layer']}, {place}"
    reason = (
        "relative RMS against Hugging Face's model with the stored weights, "
        f"worst of {len(table)}: {worst['tensor']}, {place}, T = {worst['T']}"
    )
    limit = max(LIMIT, decoder.manifest.constants_error)
    return gates.at_most("program", float(worst["ratio"]), limit, reason)


def program_errors(
    decoder: Decoder,
    checkpoint: Checkpoint,
    representatives: ShardNames = None,
    stretches: Stretches | None = None,
) -> pd.DataFrame:
    """Rows of `errors` with mode and sequence `seq`, for every layer, position, T and
    tensor: updates (chained: hidden states), states, router states, logits, and choices
    of experts. A choice may differ where the last bit of the input changes Hugging
    Face's. `plan_stretches` says which calls run.

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
        if plan.name not in references:
            traces = [with_rounded_inputs(decoder, s.trace) for s in plan.stretches]
            references[plan.name] = stack(traces)
    passes = [plan.make_run(decoder, references[plan.name]) for plan in plans]
    tables: list[list[pd.DataFrame]] = [[] for _ in plans]

    def compare_states(number: int, model: Model, state: State) -> None:
        tables[number] += state_errors(plans[number], passes[number], model, state)

    traces = run_passes(decoder, passes, "program", compare_states, head=False)
    for plan, sequences, table in zip(plans, traces, tables):
        table += trace_errors(plan, sequences)
    calls = []
    for plan, sequences in zip(plans, traces):
        calls += plan_head_calls(decoder, plan, sequences)
    tables.append(head_errors(decoder, checkpoint, calls))
    return pd.concat([part for table in tables for part in table], ignore_index=True)


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
    if the bundle allows it.

    Args:
        stretches: see `reference_stretches`.
    """
    Ts = default_ts(options)
    call_sizes = sorted({tuple(Ts[:1]), tuple(Ts[-1:]), tuple(Ts[1:-1])} - {()})
    # the longest calls of every function, which run on every shard
    longest = [(T,) for T in options.fixed_sizes] or [(options.t_max,)]
    other_sizes = [sizes for sizes in call_sizes if sizes not in longest]
    places = [name for name in ("start", "end") if name in stretches]
    plans = []
    if isolated:
        plans.append(StretchPlan("scaled", stretches["scaled"], Ts[-1:], True))
    for name in places:
        plan = partial(StretchPlan, name, stretches[name])
        if isolated:
            plans += [plan(sizes, True) for sizes in longest]
            plans += [
                plan(sizes, True, shards=representatives) for sizes in other_sizes
            ]
        else:
            plans += [plan(sizes, False) for sizes in call_sizes]
        if name == "start" or not isolated:
            plans.append(plan(Ts, False))
    if options.kv_write == "mask":  # which takes dummy columns
        last = places[-1]
        half_of_t_max = [max(1, options.t_max // 2)]
        shards = representatives if isolated else None
        plans.append(
            StretchPlan(
                last, stretches[last], half_of_t_max, isolated, options.t_max, shards
            )
        )
    return plans


@dataclass(frozen=True)
class StretchPlan:
    """A run over one stretch of each sequence, from states that hold the tokens before
    it.

    Attributes:
        name: of the stretches: `start`, `end` or `scaled`.
        sizes: tokens per call; several sizes take turns.
        isolated, shards: see `PromptRun`.
        columns: the least that a call has.
    """

    name: str
    stretches: Sequence[Stretch]
    sizes: Sequence[int]
    isolated: bool
    columns: int = 0
    shards: ShardNames = None

    @property
    def mode(self) -> str:
        """The value of the column `mode`."""
        return "isolated" if self.isolated else "chained"

    def make_run(self, decoder: Decoder, reference: Trace) -> PromptRun:
        """The run. `reference`: the stacked traces of its stretches."""
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
        return PromptRun(
            ids,
            calls,
            reference,
            self.isolated,
            starts=np.array([stretch.start for stretch in self.stretches]),
            make_state=partial(state_before, self.stretches),
            shards=self.shards,
            token_scales=token_scales,
        )


def state_before(stretches: Sequence[Stretch], model: Model) -> State:
    """The state of a shard before the first positions of `stretches`."""
    state = model.make_state()
    for name, entry in model.shard.states.items():
        shape = entry.shape[1:]
        values = [expected_state(shape, name, (s.before, s.start)) for s in stretches]
        state.write(name, np.stack(values))
    return state


def state_errors(
    plan: StretchPlan, prompt_run: PromptRun, model: Model, state: State
) -> list[pd.DataFrame]:
    """Errors of every row of every state after a run. Rows without a token, which must
    not change, have negative positions."""
    tables = []
    for name, entry in model.shard.states.items():
        layer, leaf = split_layer(name)
        shape = entry.shape[1:]
        count = entry.shape[-2]
        values = np.asarray(state.read(name), np.float32)
        for seq, (stretch, value) in enumerate(zip(plan.stretches, values)):
            before = stretch.before, stretch.start
            after = stretch.trace, stretch.end
            perturbed_after = stretch.perturbed[plan.mode], stretch.end
            expected = _rows_of(expected_state(shape, name, before, after))
            perturbed = _rows_of(expected_state(shape, name, before, perturbed_after))
            actual = _rows_of(value)
            columns = {"tensor": leaf.removesuffix("_state")}
            columns["position"] = ring_positions(stretch.end - 1, count)
            calls = [call for call in prompt_run.calls if call.counts[seq]]
            columns["T"] = max(call.counts.max() for call in calls)
            columns |= vector_errors(expected, actual)
            columns["budget"], columns["ratio"] = budget_and_ratio(
                columns["distance"],
                columns["size"],
                distances(expected, perturbed),
                program_tolerance,
            )
            table = pd.DataFrame(columns)
            table.insert(1, "layer", pd.array([layer] * count, "Int64"))
            tables.append(_label_run(table, plan, seq, len(stretch.trace.layers)))
    return tables


def _rows_of(value: np.ndarray) -> np.ndarray:
    """A state [.., rows, D] with its rows first, as [rows, W]."""
    return np.moveaxis(value, -2, 0).reshape(value.shape[-2], -1)


def trace_errors(plan: StretchPlan, traces: Sequence[Trace]) -> list[pd.DataFrame]:
    """Errors of a run's traces without logits; none where programs of another exporter
    show nothing but their states."""
    tensors = ["update" if plan.isolated else "hidden", "router", "expert"]
    tables = []
    for seq, (stretch, trace) in enumerate(zip(plan.stretches, traces)):
        reference = stretch.trace
        sizes = [STEP / LIMIT * rms(layer.unscaled) for layer in reference.layers]
        rows = errors(reference, trace, tensors, update_sizes=sizes)
        if rows.empty:
            continue
        perturbed = stretch.perturbed[plan.mode]
        rows = with_tolerance(rows, reference, perturbed, program_tolerance)
        rows["position"] += stretch.start
        tables.append(_label_run(rows, plan, seq, len(reference.layers)))
    return tables


@dataclass
class HeadCall:
    """A call of the head over positions of one stretch of each sequence, and the errors
    of its logits. Slices of the vocabulary are added one after another, and only their
    sums of squares are kept, because all logits of a large vocabulary take gigabytes.

    Attributes:
        hidden: [B, C, n], what it reads.
        positions: of the stretches.
        T: [B, n], the tokens of the call that computed each of them.
        sums: [3, B, n] float64, sums of squares over the vocabulary; `SIZE`: of Hugging
            Face's logits, `DISTANCE`: of their distances from the program's,
            `PERTURBED`: of those from the perturbed ones.
    """

    plan: StretchPlan
    hidden: np.ndarray
    positions: slice
    T: np.ndarray
    sums: np.ndarray = field(init=False)

    def __post_init__(self):
        self.sums = np.zeros((3, *self.T.shape))

    def references(self, seq: int) -> tuple[Trace, Trace]:
        """Hugging Face's trace of a sequence, and the perturbed one."""
        stretch = self.plan.stretches[seq]
        return stretch.trace, stretch.perturbed[self.plan.mode]

    def add(self, logits: np.ndarray, expected: dict[int, np.ndarray]) -> None:
        """Adds a slice of the vocabulary.

        Args:
            logits: [B, n, r], the program's.
            expected: id of a trace → Hugging Face's logits [positions, r].
        """
        for seq in range(len(logits)):
            reference, perturbed = (
                expected[id(trace)][self.positions] for trace in self.references(seq)
            )
            self.sums[SIZE, seq] += sum_of_squares(reference)
            self.sums[DISTANCE, seq] += sum_of_squares(reference, logits[seq])
            self.sums[PERTURBED, seq] += sum_of_squares(reference, perturbed)

    def errors(self, V: int) -> Iterator[pd.DataFrame]:
        """The rows of every sequence, once all of its V logits have been added."""
        for seq, stretch in enumerate(self.plan.stretches):
            rms_values = np.sqrt(self.sums[:, seq] / V)
            size, distance = rms_values[SIZE], rms_values[DISTANCE]
            perturbed = rms_values[PERTURBED]
            columns = {"tensor": "logits", "layer": pd.NA}
            columns["position"] = np.arange(stretch.start, stretch.end)[self.positions]
            columns |= {"T": self.T[seq], "distance": distance, "size": size}
            columns["error"] = safe_ratio(distance, size)
            columns["budget"], columns["ratio"] = budget_and_ratio(
                distance, size, perturbed, program_tolerance
            )
            rows = pd.DataFrame(columns).astype({"layer": "Int64"})
            L = len(stretch.trace.layers)
            yield _label_run(rows, self.plan, seq, L)


def plan_head_calls(
    decoder: Decoder, plan: StretchPlan, traces: Sequence[Trace]
) -> list[HeadCall]:
    """The calls of the head of a run: over its outputs, or if it is isolated on the last
    tokens of each stretch, in calls of every size."""
    scale = decoder.manifest.stream_scale
    if not plan.isolated:
        if not decoder.manifest.gives_logits:
            return []
        output = np.stack([trace.output.T for trace in traces]) / scale
        T = np.stack([trace.T for trace in traces])
        return [HeadCall(plan, output, slice(None), T)]
    calls = []
    for size in plan.sizes:
        last = np.stack([s.final_input[-size:].T / scale for s in plan.stretches])
        T = np.full((len(last), last.shape[2]), last.shape[2])
        calls.append(HeadCall(plan, last, slice(-size, None), T))
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
        for seq in range(len(call.T)):
            normed |= {id(trace): trace.normed for trace in call.references(seq)}
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


def _label_run(rows: pd.DataFrame, plan: StretchPlan, seq: int, L: int) -> pd.DataFrame:
    """The rows with sequence and mode, and chained ratios by `_ratio_per_layer`."""
    if not plan.isolated:
        rows = rows.assign(ratio=_ratio_per_layer(rows, L))
    return rows.assign(seq=seq, mode=plan.mode)


def _ratio_per_layer(rows: pd.DataFrame, L: int) -> pd.Series:
    """Chained ratios over the number of layers that have run: their errors add up, and
    the limit is that of one layer. Logits come behind all `L` layers and a head."""
    layers_run = rows["layer"].fillna(L).astype(int) + 1
    return rows["ratio"] / layers_run


@dataclass(frozen=True)
class StretchSizes:
    """How many positions each kind of stretch has.

    Attributes:
        start: of the start of a sequence.
        end: of its end; 0: the cache has no room for one.
        scaled: of the scaled inputs.
        end_starts: [B], where the end of each sequence begins.
    """

    start: int
    end: int
    scaled: int
    end_starts: list[int]


def plan_positions(manifest: Manifest) -> StretchSizes:
    """The sizes of all stretches. The ends begin at different positions, unless a slice
    writes the cache: it writes every sequence at one position and takes no dummy
    columns."""
    options = manifest.options
    sliced = options.kv_write == "slice"
    # calls of fixed shapes without dummy columns take whole multiples
    unit = options.t_max if sliced and options.fixed_sizes else 1
    S = options.max_seq_len
    t_max = options.t_max
    # a cache too small for a call of t_max tokens in the end has room for it in the start
    end = min(max(END_POSITIONS, t_max), S // 2, S - t_max) // unit * unit
    stagger = 0 if sliced else min(STAGGER, (S - end - t_max) // options.batch)
    end_starts = [S - end - seq * stagger for seq in range(options.batch)]
    start = min(max(START_POSITIONS, t_max + 1), end_starts[-1]) // unit * unit
    scaled = min(SCALES, start) // unit * unit
    return StretchSizes(
        start=max(start, unit), end=end, scaled=max(scaled, unit), end_starts=end_starts
    )


def reference_stretches(
    manifest: Manifest, reference: Reference, chained_end: bool
) -> Stretches:
    """The stretches `start`, `end` (if the cache has room for one) and `scaled` of all
    sequences, computed by Hugging Face's model with the weights of a bundle.
    Token ids are random, different for each sequence, and begin with the checkpoint's
    BOS if it has one.

    Args:
        chained_end: whether the end is compared through layers in a row, as the start
            always is.
    """
    sizes = plan_positions(manifest)
    shape = len(sizes.end_starts), sizes.start + sizes.end
    prompts = np.random.default_rng(0).integers(0, manifest.dims.V, shape)
    if manifest.tokens.bos is not None:
        prompts[:, 0] = manifest.tokens.bos
    starts, ends, scaled = [], [], []
    for ids, end_start in zip(prompts, sizes.end_starts, strict=True):
        cache = recording_cache(reference.model.config)
        start = run_stretch(reference, ids[: sizes.start], cache, chained=True)
        starts.append(start)
        if sizes.end:
            before = extend(cache, start.trace, end_start, reference.sources)
            end_ids = ids[sizes.start :]
            ends.append(
                run_stretch(
                    reference, end_ids, cache, end_start, before, chained=chained_end
                )
            )
        cache = recording_cache(reference.model.config)
        scales = np.exp2(np.linspace(SMALLEST, 0, sizes.scaled)).astype(np.float32)
        feed = scaled_inputs(start, scales)
        scaled.append(
            run_stretch(
                reference, ids[: sizes.scaled], cache, feed=feed, token_scales=scales
            )
        )
    stretches = {"start": tuple(starts), "scaled": tuple(scaled)}
    if ends:
        stretches["end"] = tuple(ends)
    return stretches


def run_stretch(
    reference: Reference,
    ids: np.ndarray,
    cache,
    start: int = 0,
    before: Trace | None = None,
    *,
    feed: Trace | None = None,
    token_scales: np.ndarray | None = None,
    chained: bool = False,
) -> Stretch:
    """Runs `ids` after the `start` tokens of `cache`, updating it in place.

    Args:
        feed: inputs of layers; None: each reads the output of the one before.
        token_scales: see `SequenceRun`.
        chained: whether layers in a row are compared. A third run with nudged inputs
            then gives their tolerance.
    """
    # logits are computed slice by slice, by `head_errors`
    make_run = partial(SequenceRun, head=False, token_scales=token_scales)
    runs = [
        make_run(feed),
        make_run(feed, reads_first_sequence=True, perturb=nudge(start)),
    ]
    if chained:
        runs.append(make_run(perturb=nudge(start + 1)))
    if start:  # every sequence continues the same tokens
        cache.reorder_cache(torch.zeros(len(runs), dtype=torch.long))
    traces = reference.run_batch(ids, runs, cache)
    for seq, trace in enumerate(traces):
        states = recurrent_states(cache, seq)
        for layer, layer_states in zip(trace.layers, states, strict=True):
            layer.states = layer_states
    cache.reorder_cache(torch.zeros(1, dtype=torch.long))
    trace, *perturbed = traces
    final_input = feed.final_input if feed else trace.layers[-1].hidden
    return Stretch(
        start,
        ids,
        trace,
        before or Trace.empty(len(trace.layers)),
        dict(zip(("isolated", "chained"), perturbed)),
        final_input,
        token_scales,
    )


def scaled_inputs(stretch: Stretch, scales: np.ndarray) -> Trace:
    """The first inputs of every layer and of the final norm, with an RMS of `scales`
    [n]."""

    def scale(x: np.ndarray) -> np.ndarray:
        x = x[: len(scales)]
        size = np.sqrt(np.mean(np.square(x), -1, keepdims=True))
        return np.float32(x / np.maximum(size, 1e-30) * scales[:, None])

    feed = Trace.empty(len(stretch.trace.layers))
    feed.final_input = scale(stretch.final_input)
    for layer, unscaled in zip(feed.layers, stretch.trace.layers):
        layer.x = scale(unscaled.x)
    return feed


def extend(cache, trace: Trace, start: int, sources: dict[int, int]) -> Trace:
    """Extends `cache`, which holds the tokens of `trace`, to `start` tokens with rows
    drawn from its own in random order. Returns all states as a trace. `sources`: see
    `Reference`."""
    before = Trace.empty(len(trace.layers))
    for layer, states in zip(before.layers, recurrent_states(cache), strict=True):
        layer.states = states
    rng = np.random.default_rng(start)
    for i, layer in enumerate(cache.layers):
        if trace.layers[i].k is None or i in sources:
            continue
        count = len(trace.layers[i].k)
        # row 0 is left out: many copies of an attention sink would hide every other row
        drawn = rng.integers(min(1, count - 1), count, start - count)
        planes = []
        for name in ("k", "v"):
            written = getattr(trace.layers[i], name)
            rows = written[drawn]
            setattr(before.layers[i], name, np.concatenate([written, rows]))
            plane = torch.from_numpy(rows).unflatten(1, (layer.keys.shape[1], -1))
            planes.append(plane.transpose(0, 1)[None])
        if start > count:
            layer.update(*planes)
    for i, source in sources.items():
        before.layers[i].k = before.layers[source].k
        before.layers[i].v = before.layers[source].v
    return before


def recurrent_states(cache, row: int = 0) -> list[dict[str, np.ndarray]]:
    """By layer, the convolutions, delayed values and matrices of one sequence of
    Hugging Face's cache, in the layout of the bundle's states (see `LayerTrace.states`)."""
    layers = []
    for i, layer in enumerate(cache.layers):
        states = {}
        layers.append(states)
        if not getattr(layer, "conv_states", None):
            continue
        states["conv"] = cache.get_conv_state(i, state_idx=0)[row].T.numpy().copy()
        if layer.is_recurrent_states_initialized[0]:
            state = cache.get_recurrent_state(i, state_idx=0)[row].numpy().copy()
            if state.ndim == 1:
                states["v_delayed"] = state[None]
            else:
                states["matrix"] = state
    return layers


def state_rows(trace: Trace, name: str) -> np.ndarray | None:
    """The values in a trace of a logical state such as `layers.3.k_state`: rows of a
    cache [n, W], or a recurrent state after the last position; None if it has none."""
    layer, leaf = split_layer(name)
    kind = leaf.removesuffix("_state")
    if is_cache(name):
        return trace.value(kind, layer)
    return trace.layers[layer].states.get(kind)


def expected_state(
    shape: Sequence[int], name: str, *parts: tuple[Trace, int]
) -> np.ndarray:
    """One sequence's logical state after several traces wrote to it.

    A ring holds the last rows. So does a convolution's state, for which transformers
    keeps one row more. The other rows of a cache are garbage.

    Args:
        shape: of the state without the batch.
        parts: pairs of a trace and the number of tokens at its end.
    """
    value = np.zeros(shape, np.float32)
    if is_cache(name):
        value[:] = _garbage_rows(tuple(shape))
    for trace, end in parts:
        rows = state_rows(trace, name)
        if rows is None:  # no state precedes the first token
            continue
        if is_cache(name):
            planes = rows.reshape(len(rows), shape[0], -1).transpose(1, 0, 2)
            fill(value, planes, end)
        else:
            value[:] = rows[-len(value) :]
    return value


@lru_cache(maxsize=2)
def _garbage_rows(shape: tuple[int, ...]) -> np.ndarray:
    """Seeded garbage of a cache of this shape, float32, to be read alone."""
    rng = np.random.default_rng(shape)
    signs = rng.choice([-1, 1], shape)
    rows = np.float32(rng.choice(GARBAGE, (shape[-2], 1)) * signs)
    rows.flags.writeable = False
    return rows
