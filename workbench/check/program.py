"""Gate `program`: whether a bundle's program computes Hugging Face's model on the
weights that the bundle stores. Both run in float32 and differ only in the order of
sums, so that one limit holds for every compression and family.

What depends on the program alone is tested on the shards `whole`, one of each distinct
program (see `distinct`). On every shard is tested what weights can show: the head and
the tail in every function, the small inputs, and the head of all layers in a row.

Each sequence computes a head of positions from 0 on. Then the caches of both sides are
extended by the same rows, drawn from the head's, and it computes a tail that ends at
max_seq_len. Every row of the cache is written or read once, windows and rings are
passed, and the number of computed positions does not grow with the cache. Rows without
a token hold garbage, which must neither be read nor change.

A norm's epsilon shows only where its input is as small as the epsilon's root. So every
layer and the final norm are also fed inputs whose RMS runs from 2^-44 to 1, each 16
times the last at most where there is room for `SCALES` positions: what a layer's inner
norms read lies between, and passes the root of any usual epsilon (1e-12 to 1e-5) on the
way. The smallest come first, so that no larger value of an earlier position hides a
smaller one."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
import torch

from workbench.bundle import Bundle, Manifest
from workbench.bundle.names import is_cache, split_layer
from workbench.check import gates
from workbench.check.compare import (
    budget_and_ratio,
    distances,
    errors,
    rms,
    vector_errors,
    with_tolerance,
)
from workbench.check.gates import Gate
from workbench.check.golden import stored_weights
from workbench.check.hf import Reference, Row, nudge, recording_cache
from workbench.check.run import Pass, plan_calls, program_inputs, run_passes
from workbench.check.states import LARGE, SUBNORMAL, Shards, default_ts
from workbench.check.trace import Trace, stack
from workbench.decode import Decoder
from workbench.decode.snapshot import fill
from workbench.errors import InputError
from workbench.models.checkpoint import Checkpoint
from workbench.runtime import Model, State

# One limit on the relative RMS of a difference, per layer, position, T and tensor. Both
# sides sum the same terms in another order. Rounding n partial sums by 2^-24 each moves
# a sum of n random terms by about sqrt(n) * 2^-24 of itself, 4e-6 for the n = 5,000 of
# an MLP; the rounding of what cancels further is what `tolerance` adds.
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
HEAD, TAIL, STAGGER = 20, 8, 3  # positions; STAGGER between the tails of two sequences
SCALES, SMALLEST = 12, -44  # scaled positions, exponent of the smallest RMS
GARBAGE = LARGE, SUBNORMAL  # magnitudes in rows without a token


@dataclass
class Stretch:
    """Consecutive positions of one sequence.

    Attributes:
        start: the first position.
        ids: [n].
        trace: of Hugging Face's model, with the recurrent states behind the last
            position.
        before: the states in front of the first position; `k` and `v` [start, W] are
            all rows of the caches.
        perturbed: by mode (`isolated`, `chained`), the trace where the last bit of
            every layer's input was changed; chained where layers in a row are compared.
        final_input: [n, C], what the final norm reads.
    """

    start: int
    ids: np.ndarray
    trace: Trace
    before: Trace
    perturbed: dict[str, Trace]
    final_input: np.ndarray

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


def tolerance(distance: np.ndarray, size: np.ndarray) -> np.ndarray:
    """What an error is divided by: its size and, so that rounding of the stream is no
    error, `STEPS` times the effect of a step, over the limit."""
    return size + STEPS / LIMIT * np.maximum(distance, STEP * size)


def exact_runtime(bundle: Bundle) -> str:
    """The runtime that runs a bundle's programs in `exact` arithmetic.

    Raises:
        InputError: fp16 programs of a plug-in's target, which none runs in fp32.
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


def program_gate(
    decoder: Decoder, checkpoint: Checkpoint, whole: Shards = None
) -> Gate:
    """The gate on a portable decoder in `exact` arithmetic. The constants of another
    exporter's programs have their own limit."""
    table = program_errors(decoder, checkpoint, whole)
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
    decoder: Decoder, checkpoint: Checkpoint, whole: Shards = None
) -> pd.DataFrame:
    """Rows of `errors` with mode and sequence `seq`, for every layer, position, T and
    tensor: updates (chained: hidden states), states, router states, logits, and choices
    of experts, which may differ where the last bit of the input changes Hugging Face's.

    Isolated, every layer is fed Hugging Face's input: head and tail in calls of the
    longest T of every function; scaled inputs in calls of the largest T. Shards of
    `whole` also run head and tail in calls of the smallest T and of the others in turn,
    and half of t_max tokens in t_max columns. Chained, each layer reads the output of
    the one before: the head, in calls of every T in turn. Where layers show no hidden
    state, or inner ones cannot be fed, all of this is chained. Where T alternates,
    sequences of a batch take different ones if the bundle allows it.

    Args:
        whole: see `states`; None: all shards.
    """
    options = decoder.options
    Ts = default_ts(options)
    # the input of an inner layer is replaced where it shows
    fed = decoder.shows_inner_layers or options.layers_per_shard == 1
    isolated = decoder.manifest.shows_hidden and fed
    *places, scaled = reference_stretches(decoder.bundle, checkpoint, not isolated)
    several = sorted({tuple(sizes) for sizes in (Ts[:1], Ts[-1:], Ts[1:-1]) if sizes})
    # the longest calls of every function, which run on every shard
    longest = [(T,) for T in options.shapes] or [(options.t_max,)]
    plan = []
    if isolated:
        plan.append(StretchPlan(scaled, Ts[-1:], True))
    for stretches in places:
        if isolated:
            plan += [StretchPlan(stretches, sizes, True) for sizes in longest]
            others = [sizes for sizes in several if sizes not in longest]
            plan += [StretchPlan(stretches, s, True, shards=whole) for s in others]
        else:
            plan += [StretchPlan(stretches, sizes, False) for sizes in several]
        if stretches is places[0] or not isolated:
            plan.append(StretchPlan(stretches, Ts, False))
    if options.kv_write == "mask":  # which takes dummy columns
        half = [max(1, options.t_max // 2)]
        shards = whole if isolated else None
        plan.append(StretchPlan(places[-1], half, isolated, options.t_max, shards))
    stretches_by_id = {id(item.stretches): item.stretches for item in plan}
    references = {
        key: stack([program_inputs(decoder, stretch.trace) for stretch in stretches])
        for key, stretches in stretches_by_id.items()
    }
    passes = [item.plan(decoder, references[id(item.stretches)]) for item in plan]
    tables: list[list[pd.DataFrame]] = [[] for _ in plan]

    def compare_states(number: int, model: Model, state: State) -> None:
        tables[number] += state_errors(plan[number], passes[number], model, state)

    traces = run_passes(decoder, passes, "program", compare_states)
    for item, sequences, table in zip(plan, traces, tables):
        table += trace_errors(decoder, item, sequences)
    return pd.concat([part for table in tables for part in table], ignore_index=True)


@dataclass(frozen=True)
class StretchPlan:
    """A pass over one stretch of each sequence, from states that hold the tokens before
    it.

    Attributes:
        sizes: tokens a call, one after another.
        isolated: see `Pass`.
        columns: of a call at least.
        shards: see `Pass`.
    """

    stretches: Sequence[Stretch]
    sizes: Sequence[int]
    isolated: bool
    columns: int = 0
    shards: Shards = None

    @property
    def mode(self) -> str:
        return "isolated" if self.isolated else "chained"

    def plan(self, decoder: Decoder, reference: Trace) -> Pass:
        """The pass, with the stacked trace of its stretches."""
        ids = np.stack([stretch.ids for stretch in self.stretches])
        calls = plan_calls(
            decoder.options,
            ids.shape,
            self.sizes,
            ragged=decoder.options.kv_write == "mask",
            columns=self.columns,
        )
        return Pass(
            ids,
            calls,
            reference,
            self.isolated,
            starts=np.array([stretch.start for stretch in self.stretches]),
            make_state=partial(state_before, self.stretches),
            shards=self.shards,
        )


def state_before(stretches: Sequence[Stretch], model: Model) -> State:
    """The state of a shard in front of the first positions of stretches."""
    state = model.make_state()
    for name, entry in model.shard.states.items():
        shape = entry.shape[1:]
        values = [expected_state(shape, name, (s.before, s.start)) for s in stretches]
        state.write(name, np.stack(values))
    return state


def state_errors(
    plan: StretchPlan, one: Pass, model: Model, state: State
) -> list[pd.DataFrame]:
    """Errors of every row of every state behind a pass. Rows without a token, which
    must be as they were, have negative positions."""
    tables = []
    for name, entry in model.shard.states.items():
        layer, leaf = split_layer(name)
        shape, count = entry.shape[1:], entry.shape[-2]
        values = np.asarray(state.read(name), np.float32)
        for seq, (stretch, value) in enumerate(zip(plan.stretches, values)):
            before = stretch.before, stretch.start
            perturbed_trace = stretch.perturbed[plan.mode]
            expected, perturbed, actual = (
                np.moveaxis(array, -2, 0).reshape(count, -1)
                for array in (
                    expected_state(shape, name, before, (stretch.trace, stretch.end)),
                    expected_state(shape, name, before, (perturbed_trace, stretch.end)),
                    value,
                )
            )
            last = stretch.end - 1
            columns = {"tensor": leaf.removesuffix("_state")}
            columns["position"] = last - (last - np.arange(count)) % count
            calls = [call for call in one.calls if call.counts[seq]]
            columns["T"] = max(call.counts.max() for call in calls)
            columns |= vector_errors(expected, actual)
            columns["budget"], columns["ratio"] = budget_and_ratio(
                columns["distance"],
                columns["size"],
                distances(expected, perturbed),
                tolerance,
            )
            table = pd.DataFrame(columns)
            table.insert(1, "layer", pd.array([layer] * count, "Int64"))
            tables.append(_finish(table, plan, seq, len(stretch.trace.layers)))
    return tables


def trace_errors(
    decoder: Decoder, plan: StretchPlan, traces: Sequence[Trace]
) -> list[pd.DataFrame]:
    """Errors of the traces of a pass, and isolated of the head, which is fed the last
    tokens of each stretch in calls of every size."""
    update = "update" if plan.isolated else "hidden"
    tensors = [update, "router", "expert", "logits"]
    tables = []
    for seq, trace in enumerate(traces):
        tables += _sequence_errors(plan, seq, trace, tensors)
    scale = decoder.manifest.stream_scale
    for T in plan.sizes if plan.isolated else ():
        last = np.stack([s.final_input[-T:].T / scale for s in plan.stretches])
        for seq, logits in enumerate(decoder.logits(last)):
            sizes = np.full(len(logits), len(logits))
            trace = Trace([], logits=logits, T=sizes)
            tables += _sequence_errors(plan, seq, trace, ["logits"])
    return tables


def _sequence_errors(
    plan: StretchPlan, seq: int, trace: Trace, tensors: Sequence[str]
) -> list[pd.DataFrame]:
    """Errors of one sequence's trace against its stretch; none where programs of
    another exporter show states alone."""
    stretch = plan.stretches[seq]
    reference = stretch.trace
    least = [STEP / LIMIT * rms(layer.hidden) for layer in reference.layers]
    rows = errors(reference, trace, tensors, update_sizes=least)
    if rows.empty:
        return []
    rows = with_tolerance(rows, reference, stretch.perturbed[plan.mode], tolerance)
    rows["position"] += stretch.start
    return [_finish(rows, plan, seq, len(reference.layers))]


def _finish(rows: pd.DataFrame, plan: StretchPlan, seq: int, L: int) -> pd.DataFrame:
    """Rows with their sequence and mode; a chained ratio is one per layer that errors
    come from."""
    if not plan.isolated:
        # errors of the layers before, and of the layer itself, add up
        rows["ratio"] /= rows["layer"].fillna(L).astype(int) + 1
    return rows.assign(seq=seq, mode=plan.mode)


def plan_positions(manifest: Manifest) -> tuple[int, int, int, list[int]]:
    """How many positions head, tail and scaled inputs have, and where each sequence's
    tail begins: at a position of its own, unless a slice writes the cache, which takes
    no dummy columns either."""
    options = manifest.options
    sliced = options.kv_write == "slice"
    unit = options.t_max if sliced and options.shapes else 1
    S = options.max_seq_len
    t_max = options.t_max
    # a call of t_max tokens fits the head where it does not fit the tail
    tail = min(max(TAIL, t_max), S // 2, S - t_max) // unit * unit
    stagger = 0 if sliced else min(STAGGER, (S - tail - t_max) // options.batch)
    starts = [S - tail - seq * stagger for seq in range(options.batch)]
    head = min(max(HEAD, t_max + 1), starts[-1]) // unit * unit
    scaled = min(SCALES, head) // unit * unit
    return max(head, unit), tail, max(scaled, unit), starts


def reference_stretches(
    bundle: Bundle, checkpoint: Checkpoint, chained_tail: bool
) -> list[tuple[Stretch, ...]]:
    """The heads of all sequences, their tails if there are any, and their scaled
    inputs, as Hugging Face's model with the weights that `bundle` stores computes
    them. Token ids are random ones, other ones for every sequence, behind the
    checkpoint's BOS where it has one.

    Args:
        chained_tail: whether tails of layers in a row are compared, as heads are.
    """
    manifest = bundle.manifest
    head, tail, count, starts = plan_positions(manifest)
    shape = len(starts), head + tail
    prompts = np.random.default_rng(0).integers(0, manifest.dims.V, shape)
    if manifest.tokens.bos is not None:
        prompts[:, 0] = manifest.tokens.bos
    weights = stored_weights(checkpoint, bundle, half=True)
    reference = Reference(checkpoint, weights)
    rows = []
    for ids, start in zip(prompts, starts, strict=True):
        cache = recording_cache(reference.model.config)
        first = run_stretch(reference, ids[:head], cache, chained=True)
        row = [first]
        if tail:
            before = extend(cache, first.trace, start)
            row.append(
                run_stretch(
                    reference, ids[head:], cache, start, before, chained=chained_tail
                )
            )
        cache = recording_cache(reference.model.config)
        feed = scaled_inputs(first, count)
        row.append(run_stretch(reference, ids[:count], cache, feed=feed))
        rows.append(row)
    return list(zip(*rows, strict=True))


def run_stretch(
    reference: Reference,
    ids: np.ndarray,
    cache,
    start: int = 0,
    before: Trace | None = None,
    *,
    feed: Trace | None = None,
    chained: bool = False,
) -> Stretch:
    """Runs `ids` after the `start` tokens of `cache`, updating it in place.

    Args:
        feed: inputs of layers; None: each reads the output of the one before.
        chained: whether layers in a row are compared, for which the last bit of their
            inputs is changed too.
    """
    rows = [Row(feed), Row(feed, follows=True, perturb=nudge(start))]
    if chained:
        rows.append(Row(perturb=nudge(start + 1)))
    if start:  # every row continues the same tokens
        cache.reorder_cache(torch.zeros(len(rows), dtype=torch.long))
    traces = reference.run_rows(ids, rows, cache)
    for number, trace in enumerate(traces):
        states = recurrent_states(cache, number)
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
    )


def scaled_inputs(stretch: Stretch, count: int) -> Trace:
    """The first `count` inputs of every layer and of the final norm, scaled."""
    scales = np.exp2(np.linspace(SMALLEST, 0, count))[:, None]

    def scale(x: np.ndarray) -> np.ndarray:
        x = x[:count]
        size = np.sqrt(np.mean(np.square(x), -1, keepdims=True))
        return np.float32(x / np.maximum(size, 1e-30) * scales)

    feed = Trace.empty(len(stretch.trace.layers))
    feed.final_input = scale(stretch.final_input)
    for layer, given in zip(feed.layers, stretch.trace.layers):
        layer.x = scale(given.x)
    return feed


def extend(cache, trace: Trace, start: int) -> Trace:
    """The states behind a head of this trace, with rows of the head in random order up
    to `start` tokens; `cache` likewise."""
    before = Trace.empty(len(trace.layers))
    for layer, states in zip(before.layers, recurrent_states(cache), strict=True):
        layer.states = states
    rng = np.random.default_rng(start)
    for i, layer in enumerate(cache.layers):
        if trace.layers[i].k is None:
            continue
        head = len(trace.layers[i].k)
        # row 0 is left out: many copies of an attention sink would hide every other row
        drawn = rng.integers(min(1, head - 1), head, start - head)
        added = []
        for field in ("k", "v"):
            written = getattr(trace.layers[i], field)
            rows = written[drawn]
            setattr(before.layers[i], field, np.concatenate([written, rows]))
            planes = torch.from_numpy(rows).unflatten(1, (layer.keys.shape[1], -1))
            added.append(planes.transpose(0, 1)[None])
        if start > head:
            layer.update(*added)
    return before


def recurrent_states(cache, row: int = 0) -> list[dict[str, np.ndarray]]:
    """By layer, the convolutions, delayed values and matrices of one sequence of
    Hugging Face's cache, as the bundle's states are (see `LayerTrace.states`)."""
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
    """What a trace has of a logical state, such as `layers.3.k_state`: rows of a cache
    [n, W], or a recurrent state behind the last position."""
    layer, leaf = split_layer(name)
    kind = leaf.removesuffix("_state")
    if is_cache(name):
        return trace.value(kind, layer)
    return trace.layers[layer].states.get(kind)


def expected_state(
    shape: Sequence[int], name: str, *parts: tuple[Trace, int]
) -> np.ndarray:
    """One sequence's logical state after several traces wrote to it.

    A ring holds the last rows, and so does the tail of a convolution, of which
    transformers keeps one more. The other rows of a cache are garbage.

    Args:
        shape: of the state without the batch.
        parts: each a trace and the number of tokens at its end.
    """
    value = np.zeros(shape, np.float32)
    if is_cache(name):
        rng = np.random.default_rng(shape)
        signs = rng.choice([-1, 1], shape)
        value[:] = rng.choice(GARBAGE, (shape[-2], 1)) * signs
    for trace, end in parts:
        rows = state_rows(trace, name)
        if rows is None:  # nothing is before the first token
            continue
        if is_cache(name):
            planes = rows.reshape(len(rows), shape[0], -1).transpose(1, 0, 2)
            fill(value, planes, end)
        else:
            value[:] = rows[-len(value) :]
    return value
