"""Gate `program`: whether a bundle's program computes Hugging Face's model on the
weights that the bundle stores. Both run in float32 and differ only in the order of
sums, so that one limit holds for every compression and family.

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

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

from workbench.bundle import Bundle, Manifest, Shard
from workbench.bundle.names import is_cache, split_layer
from workbench.check import gates, run
from workbench.check.compare import compare, rms
from workbench.check.gates import Gate
from workbench.check.golden import Golden, stored_weights
from workbench.check.hf import Reference, Values, nudge, recording_cache
from workbench.check.states import LARGE, SUBNORMAL, default_ts
from workbench.decode import Decoder
from workbench.decode.snapshot import fill
from workbench.errors import InputError
from workbench.models.checkpoint import Checkpoint
from workbench.runtime import Model, State

# One limit on the relative RMS of a difference, per layer, position, T and tensor. Both
# sides sum the same terms in another order. Rounding n partial sums by 2^-24 each moves
# a sum of n random terms by about sqrt(n) * 2^-24 of itself, 4e-6 for the n = 5,000 of
# an MLP; what cancels further is what the floor below is for.
LIMIT = 1e-5
# The floor, in steps of 2^-23 of the stream: about 16 roundings follow each other in a
# layer, on both sides, each of 0.29 steps RMS, together sqrt(32) * 0.29 = 1.6, hence 2.
# What a step becomes is measured: what Hugging Face's own model makes of inputs that
# are one step off (`Stretch.moved`), or the step itself where that is larger.
# An update is the difference of two values of the stream, each rounded on both sides:
# one below `STEP / LIMIT` of a huge stream (a massive activation) counts as that large.
STEP = 2.0**-23
STEPS = 2
HEAD, TAIL, STAGGER = 20, 8, 3  # positions; STAGGER between the tails of two sequences
SCALES, SMALLEST = 12, -44  # scaled positions, exponent of the smallest RMS
GARBAGE = LARGE, SUBNORMAL  # magnitudes in rows without a token


@dataclass
class Stretch:
    """Consecutive positions of one sequence from `start` on: Hugging Face's values in
    `golden`, with recurrent states such as `conv.3` behind them, and those `before`
    with the rows `k.3`, `v.3` [start, W] of the caches.

    `moved`: by mode (`isolated`, `chained`), the values where every layer's input was
    changed by its last bit. `last` [n, C]: what the final norm reads."""

    start: int
    golden: Golden
    before: Values
    moved: dict[str, Values]
    last: np.ndarray

    @property
    def end(self) -> int:
        return self.start + len(self.golden.ids)


def room(apart: np.ndarray, size: np.ndarray) -> np.ndarray:
    """What an error is divided by: what it is relative to and, so that rounding of the
    stream is no error, the floor."""
    return size + STEPS / LIMIT * np.maximum(apart, STEP * size)


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


def program_gate(decoder: Decoder, checkpoint: Checkpoint) -> Gate:
    """The gate on a portable decoder in `exact` arithmetic. The constants of another
    exporter's programs have their own limit."""
    errors = program_errors(decoder, checkpoint)
    worst = errors.loc[errors["ratio"].idxmax()]
    place = f"{worst['mode']}, sequence {worst['seq']}, position {worst['position']}"
    if worst["layer"] >= 0:
        place = f"layer {worst['layer']}, {place}"
    reason = (
        "relative RMS against Hugging Face's model with the stored weights, "
        f"worst of {len(errors)}: {worst['tensor']}, {place}, T = {worst['T']}"
    )
    limit = max(LIMIT, decoder.manifest.constants_error)
    return gates.at_most("program", float(worst["ratio"]), limit, reason)


def program_errors(decoder: Decoder, checkpoint: Checkpoint) -> pd.DataFrame:
    """Rows of `compare` with mode and sequence `seq`, for every layer, position, T and
    tensor: updates (chained: hidden states), states, router states, logits, and choices
    of experts, which may differ where the last bit of the input turns Hugging Face's.

    Isolated, every layer is fed Hugging Face's input: all positions in calls of the
    smallest T, in calls of the largest, and in calls of the others in turn; scaled
    inputs in calls of the largest. Chained, each layer is fed the one before, in calls
    of every T in turn, and half of t_max tokens in t_max columns; where layers show no
    hidden state, or inner ones cannot be fed, all are chained. Where T alternates,
    sequences of a batch take different ones if the bundle allows it.
    """
    options = decoder.options
    Ts = default_ts(options)
    *places, scaled = reference_stretches(decoder.bundle, checkpoint)
    alone = sorted({tuple(sizes) for sizes in (Ts[:1], Ts[-1:], Ts[1:-1]) if sizes})
    # the input of an inner layer is replaced where it shows
    fed = decoder.shows_inner_layers or options.layers_per_shard == 1
    isolated = decoder.manifest.shows_hidden and fed
    plan = [(scaled, Ts[-1:], True, 0)] if isolated else []
    for place in places:
        plan += [(place, sizes, isolated, 0) for sizes in alone]
        plan.append((place, Ts, False, 0))
    if options.kv_write == "mask":  # which takes dummy columns
        plan.append((places[-1], [max(1, options.t_max // 2)], False, options.t_max))
    passes = [StretchPass(decoder, *arguments) for arguments in plan]
    run.run_passes(decoder, passes, "program")
    tables = [table for each in passes for table in each.errors()]
    return pd.concat(tables, ignore_index=True)


class StretchPass(run.Pass):
    """A pass over one stretch of each sequence, from states that hold what is before
    it: in calls of `sizes` tokens in turn and so many `columns` at least."""

    def __init__(
        self,
        decoder: Decoder,
        stretches: Sequence[Stretch],
        sizes: Sequence[int],
        isolated: bool,
        columns: int,
    ):
        starts = [stretch.start for stretch in stretches]
        goldens = [stretch.golden for stretch in stretches]
        ragged = decoder.options.kv_write == "mask"
        how = dict(starts=starts, ragged=ragged, columns=columns)
        super().__init__(decoder, goldens, sizes, isolated, **how)
        self.stretches, self.sizes = stretches, sizes
        self.mode = "isolated" if isolated else "chained"
        self.tables = []

    def state_before(self, model: Model) -> State:
        state = model.make_state()
        for name, entry in model.shard.states.items():
            shape = entry.shape[1:]
            values = [held(shape, name, (s.before, s.start)) for s in self.stretches]
            state.write(name, np.stack(values))
        return state

    def after(self, shard: Shard, ios: list[dict[str, np.ndarray]], state: State):
        """Records also the errors of every row of a state, those without a token too,
        whose positions are negative."""
        super().after(shard, ios, state)
        for name, entry in shard.states.items():
            shape, key, count = entry.shape[1:], value_name(name), entry.shape[-2]
            values = np.asarray(state.read(name), np.float32)
            for seq, (stretch, value) in enumerate(zip(self.stretches, values)):
                before = stretch.before, stretch.start
                wanted = [
                    held(shape, name, before, (each, stretch.end))
                    for each in (stretch.golden.values, stretch.moved[self.mode])
                ]
                actual, *pair = [
                    {key: np.moveaxis(each, -2, 0).reshape(count, -1)}
                    for each in (value, *wanted)
                ]
                actual["T"] = np.full(count, self.values["T"][seq].max())
                last = stretch.end - 1
                places = last - (last - np.arange(count)) % count
                self.add(seq, actual, [key.partition(".")[0]], places, *pair)

    def errors(self) -> list[pd.DataFrame]:
        """Errors of all that was computed."""
        update = "update" if self.isolated else "hidden"
        for seq, values in enumerate(self.finish()):
            self.add(seq, values, [update, "router", "expert", "logits"])
        scale = self.decoder.manifest.stream_scale
        for T in self.sizes if self.isolated else ():
            last = np.stack([s.last[-T:].T / scale for s in self.stretches])
            for seq, logits in enumerate(self.decoder.logits(last)):
                values = {"logits": logits, "T": np.full(len(logits), len(logits))}
                self.add(seq, values, ["logits"])
        return self.tables

    def add(
        self,
        seq: int,
        actual: Values,
        tensors: Sequence[str],
        places: np.ndarray | None = None,
        expected: Values | None = None,
        moved: Values | None = None,
    ) -> None:
        """Adds the errors of `tensors` of a sequence, against its stretch unless told
        otherwise, whose rows have the positions `places`; chained ones per layer that
        they come from."""
        stretch = self.stretches[seq]
        golden, moved = stretch.golden, moved or stretch.moved[self.mode]
        sizes = {
            f"update.{i}": STEP / LIMIT * rms(golden[f"hidden.{i}"])
            for i in range(golden.layers)
        }
        how = dict(room=room, sizes=sizes, tensors=tensors, similar=False)
        rows = compare(expected or golden.values, actual, moved, **how)
        if rows.empty:  # programs of another exporter may show states alone
            return
        if places is None:
            places = np.arange(stretch.start, stretch.end)
        rows["position"] = places[rows["position"]]
        if not self.isolated:
            # errors of the layers before, and of the layer itself, add up
            L = self.decoder.manifest.dims.L
            rows["ratio"] /= rows["layer"].where(rows["layer"] >= 0, L) + 1
        self.tables.append(rows.assign(seq=seq, mode=self.mode))


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
    bundle: Bundle, checkpoint: Checkpoint
) -> list[tuple[Stretch, ...]]:
    """The heads of all sequences, their tails if there are any, and their scaled
    inputs, as Hugging Face's model with the weights that `bundle` stores computes
    them. Token ids are random ones, other ones for every sequence, behind the
    checkpoint's BOS where it has one."""
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
        first = run_stretch(reference, ids[:head], cache)
        row = [first]
        if tail:
            before = extend(cache, first.golden.values, start)
            row.append(run_stretch(reference, ids[head:], cache, start, before))
        cache = recording_cache(reference.model.config)
        feed = scaled_inputs(first, count)
        rows.append([*row, run_stretch(reference, ids[:count], cache, feed=feed)])
    return list(zip(*rows, strict=True))


def run_stretch(
    reference: Reference,
    ids: np.ndarray,
    cache,
    start: int = 0,
    before: Values | None = None,
    feed: Values | None = None,
) -> Stretch:
    """The stretch that continues `cache`, which it does too. With `feed` there is no
    chained run."""
    caches = [copy.deepcopy(cache) for _ in range(2)]

    def values_of(cache, feed: Values | None, perturb=None) -> Values:
        values = reference.run(ids, cache, feed=feed, perturb=perturb)
        return values | recurrent_states(cache)

    values = values_of(cache, feed)
    L = len(reference.base.layers)
    last = feed[f"x.{L}"] if feed else values[f"hidden.{L - 1}"]
    inputs = values | {f"x.{L}": last}
    moved = {"isolated": values_of(caches[0], inputs, nudge(start))}
    if not feed:
        moved["chained"] = values_of(caches[1], None, nudge(start + 1))
    return Stretch(start, Golden(ids, values, {}), before or {}, moved, last)


def scaled_inputs(stretch: Stretch, count: int) -> Values:
    """The first `count` inputs of every layer and of the final norm, scaled."""
    golden = stretch.golden
    inputs = {f"x.{i}": golden[f"x.{i}"] for i in range(golden.layers)}
    inputs[f"x.{golden.layers}"] = stretch.last
    scales = np.exp2(np.linspace(SMALLEST, 0, count))[:, None]
    for name in inputs:
        x = inputs[name][:count]
        size = np.sqrt(np.mean(np.square(x), -1, keepdims=True))
        inputs[name] = np.float32(x / np.maximum(size, 1e-30) * scales)
    return inputs


def extend(cache, values: Values, start: int) -> Values:
    """The states behind a head of these values, with rows of the head in random order
    up to `start` tokens; `cache` likewise."""
    before = recurrent_states(cache)
    rng = np.random.default_rng(start)
    for i, layer in enumerate(cache.layers):
        if f"k.{i}" not in values:
            continue
        head = len(values[f"k.{i}"])
        # row 0 is left out: many copies of an attention sink would hide every other row
        drawn = rng.integers(min(1, head - 1), head, start - head)
        added = []
        for name in (f"k.{i}", f"v.{i}"):
            rows = values[name][drawn]
            before[name] = np.concatenate([values[name], rows])
            planes = torch.from_numpy(rows).unflatten(1, (layer.keys.shape[1], -1))
            added.append(planes.transpose(0, 1)[None])
        if start > head:
            layer.update(*added)
    return before


def recurrent_states(cache) -> Values:
    """Convolutions, delayed values and matrices of Hugging Face's cache, as the
    bundle's states are."""
    values = {}
    for i, layer in enumerate(cache.layers):
        if not getattr(layer, "conv_states", None):
            continue
        values[f"conv.{i}"] = cache.get_conv_state(i, state_idx=0)[0].T.numpy().copy()
        if layer.is_recurrent_states_initialized[0]:
            state = cache.get_recurrent_state(i, state_idx=0)[0].numpy().copy()
            if state.ndim == 1:
                values[f"v_delayed.{i}"] = state[None]
            else:
                values[f"matrix.{i}"] = state
    return values


def value_name(state: str) -> str:
    """Where `Values` have a logical state: layers.3.k_state → k.3."""
    layer, leaf = split_layer(state)
    return f"{leaf.removesuffix('_state')}.{layer}"


def held(shape: Sequence[int], name: str, *parts: tuple[Values, int]) -> np.ndarray:
    """One sequence's logical state that parts were written to, each (values, tokens
    until then): a ring holds the last ones, and so does the tail of a convolution, of
    which transformers keeps one more. The other rows of a cache are garbage."""
    value = np.zeros(shape, np.float32)
    key = value_name(name)
    if is_cache(name):
        rng = np.random.default_rng(shape)
        signs = rng.choice([-1, 1], shape)
        value[:] = rng.choice(GARBAGE, (shape[-2], 1)) * signs
    for values, end in parts:
        if key not in values:  # nothing is before the first token
            continue
        rows = values[key]
        if is_cache(name):
            planes = rows.reshape(len(rows), shape[0], -1).transpose(1, 0, 2)
            fill(value, planes, end)
        else:
            value[:] = rows[-len(value) :]
    return value
