"""The positions at which gate `program` compares, and Hugging Face's values there.

A head of calls from position 0; then the caches of both sides are extended by the same
rows, resampled from the head's K and V, so that the position jumps near max_seq_len;
then a tail of calls. Every row of the cache is written or read once, windows and rings
are passed, and the number of computed positions does not grow with the cache.

A norm's epsilon shows only where its input is as small as the epsilon's root. So every
layer and the final norm are also fed inputs whose RMS runs from 2^-44 to 1, each 16
times the last at most where there is room for `SCALES` positions: what a layer's inner
norms read lies between, and passes the root of any usual epsilon (1e-12 to 1e-5) on the
way. The smallest come first, so that no larger value of an earlier position hides a
smaller one."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from workbench.bundle import Bundle, Manifest, Options
from workbench.bundle.names import (
    CONV_STATE,
    K_STATE,
    MATRIX_STATE,
    V_DELAYED_STATE,
    V_STATE,
    is_cache,
    split_layer,
)
from workbench.check.golden import Golden, stored_weights
from workbench.check.hf import Reference, Values, logit_divisor, nudge, recording_cache
from workbench.decode.snapshot import fill
from workbench.models.checkpoint import Checkpoint
from workbench.runtime import Model, State

HEAD, TAIL, STAGGER = 20, 8, 3  # positions; STAGGER between the tails of two sequences
SCALES, SMALLEST = 12, -44  # positions with scaled inputs, exponent of the smallest RMS


@dataclass(frozen=True)
class Reach:
    """Sequence b computes positions 0 … head − 1 and, on a cache filled up to there,
    starts[b] … starts[b] + tail − 1."""

    head: int
    tail: int
    starts: tuple[int, ...]


@dataclass
class Stretch:
    """Consecutive positions of one sequence from `start` on: Hugging Face's values in
    `golden`, with the states behind them such as `k_state.3` [tokens, W], and the
    states `before`.

    `last` [n, C]: what the final norm reads. `logit_rms` [n]: RMS of logits that a
    normed hidden state as long as each position's gives in a random direction. Where
    some rows of the head are huge (a massive activation's token) and cancel, the logits
    are smaller, but their rounding is not. `nudged`: by mode (`isolated`, `chained`),
    the values where every layer's input was changed by its last bit."""

    golden: Golden
    start: int
    before: Values
    last: np.ndarray
    nudged: dict[str, Values]
    logit_rms: np.ndarray | None = None


def plan_reach(manifest: Manifest) -> Reach:
    """The default positions of a bundle; tails of a batch begin at positions of their
    own unless a slice writes the cache."""
    options = manifest.options
    S = options.max_seq_len
    t_max = options.t_max
    B = options.batch
    unit = _unit(options)
    tail = min(max(TAIL, t_max), S // 2) // unit * unit
    room = S - tail
    stagger = 0
    if options.kv_write != "slice":
        stagger = min(STAGGER, (room - unit) // B)
    starts = tuple(room - seq * stagger for seq in range(B))
    head = min(max(HEAD, t_max + 1), starts[-1] if tail else S) // unit * unit
    return Reach(max(head, unit), tail, starts)


def _unit(options: Options) -> int:
    """What a number of positions is a multiple of: a slice write takes no dummy
    columns."""
    return options.t_max if options.shapes else 1


def reach_prompts(manifest: Manifest, plan: Reach) -> np.ndarray:
    """Token ids [B, head + tail], other ones for every sequence, behind the
    checkpoint's BOS where it has one."""
    shape = (len(plan.starts), plan.head + plan.tail)
    ids = np.random.default_rng(0).integers(0, manifest.dims.V, shape)
    if manifest.tokens.bos is not None:
        ids[:, 0] = manifest.tokens.bos
    return ids


def reach_stretches(
    bundle: Bundle, checkpoint: Checkpoint, plan: Reach
) -> list[tuple[Stretch, ...]]:
    """The heads of all sequences, their tails if there are any, and their scaled
    inputs, as Hugging Face's model with the weights that `bundle` stores computes
    them."""
    weights = stored_weights(checkpoint, bundle, half=True)
    reference = Reference(checkpoint, weights)
    prompts = reach_prompts(bundle.manifest, plan)
    rows = []
    unit = _unit(bundle.manifest.options)
    for seq, (ids, start) in enumerate(zip(prompts, plan.starts, strict=True)):
        cache = recording_cache(reference.model.config)
        first = _stretch(reference, ids[: plan.head], cache)
        row = [first]
        if plan.tail:
            rng = np.random.default_rng([0, seq])
            H_kv = bundle.manifest.dims.H_kv
            before = _filled(cache, first.golden.values, start, H_kv, rng)
            row.append(_stretch(reference, ids[plan.head :], cache, start, before))
        count = max(min(SCALES, plan.head) // unit * unit, unit)
        scaled = _scaled(first.golden, count)
        cache = recording_cache(reference.model.config)
        rows.append([*row, _stretch(reference, ids[:count], cache, feed=scaled)])
    _add_logits(reference, [stretch for row in rows for stretch in row])
    return list(zip(*rows, strict=True))


@torch.inference_mode()
def _add_logits(reference: Reference, stretches: Sequence[Stretch]) -> None:
    """Computes logits and `logit_rms` of stretches, and of the nudged ones whose layers
    are chained: once for all of them, since the head's rows become float32."""
    every = [stretch.golden.values for stretch in stretches]
    every += [s.nudged["chained"] for s in stretches if "chained" in s.nudged]
    hidden = np.concatenate([values["normed"] for values in every])
    logits = reference.logits(torch.from_numpy(hidden)).numpy()
    squares, count = 0.0, 0
    for rows in reference.head_rows():
        squares += float(torch.dot(rows.flatten(), rows.flatten()))
        count += rows.numel()
    # RMS of what a unit of the head's input adds to a logit
    head_rms = math.sqrt(squares / count) / logit_divisor(reference.model.config)
    ends = np.cumsum([len(values["normed"]) for values in every])
    for values, own in zip(every, np.split(logits, ends[:-1]), strict=True):
        values["logits"] = own
    for stretch in stretches:
        lengths = np.linalg.norm(stretch.golden["normed"], axis=-1)
        stretch.logit_rms = head_rms * lengths


def _stretch(
    reference: Reference,
    ids: np.ndarray,
    cache,
    start: int = 0,
    before: Values | None = None,
    feed: Values | None = None,
) -> Stretch:
    """The stretch that continues `cache`, which it does too, and the same with nudged
    inputs, each without logits. With `feed` there is no chained run."""
    before, L = before or {}, len(reference.base.layers)

    def run(cache, feed, perturb=None) -> Values:
        values = reference.run(ids, cache, feed=feed, perturb=perturb, head=False)
        for i in range(L):
            values |= _sides(cache, i)
            for own, leaf in (("k", K_STATE), ("v", V_STATE)):
                if (rows := values.get(f"{own}.{i}")) is not None:
                    name = f"{leaf}.{i}"
                    values[name] = np.concatenate([before.get(name, rows[:0]), rows])
        return values

    caches = [copy.deepcopy(cache) for _ in range(2)]
    values = run(cache, feed)
    last = values[f"hidden.{L - 1}"] if feed is None else feed[f"x.{L}"]
    nudged = {"isolated": run(caches[0], {f"x.{L}": last} | values, nudge(start))}
    if feed is None:
        nudged["chained"] = run(caches[1], None, nudge(start + 1))
    return Stretch(Golden(ids, values, {}), start, before, last, nudged)


def _scaled(golden: Golden, count: int) -> Values:
    """The inputs of the first `count` positions of every layer and of the final norm,
    scaled."""
    L = golden.layers
    inputs = {f"x.{i}": golden[f"x.{i}"] for i in range(L)}
    inputs[f"x.{L}"] = golden[f"hidden.{L - 1}"]
    scales = np.exp2(np.linspace(SMALLEST, 0, count))[:, None]
    feed = {}
    for name, x in inputs.items():
        rms = np.sqrt(np.mean(np.square(x[:count]), -1, keepdims=True))
        feed[name] = np.float32(x[:count] / np.maximum(rms, 1e-30) * scales)
    return feed


def _filled(
    cache, values: Values, start: int, H_kv: int, rng: np.random.Generator
) -> Values:
    """The states behind a head, extended to `start` tokens by rows of the head in
    random order; `cache` likewise."""
    before = {name: state for name, state in values.items() if "_state." in name}
    for layer, own in enumerate(cache.layers):
        names = [f"{leaf}.{layer}" for leaf in (K_STATE, V_STATE)]
        if names[0] not in before:
            continue
        head = len(before[names[0]])
        # row 0 is left out: many copies of an attention sink would hide every other row
        chosen = rng.integers(min(1, head - 1), head, start - head)
        fill = [before[name][chosen] for name in names]
        if start > head:
            rows = map(torch.from_numpy, fill)
            own.update(
                *(x.unflatten(1, (H_kv, -1)).transpose(0, 1)[None] for x in rows)
            )
        for name, rows in zip(names, fill):
            before[name] = np.concatenate([before[name], rows])
    return before


def _sides(cache, layer: int) -> Values:
    """Side states of a layer of Hugging Face's cache, as the bundle's
    states are."""
    if not getattr(cache.layers[layer], "conv_states", None):
        return {}
    conv = cache.get_conv_state(layer, state_idx=0)[0].T.numpy().copy()
    sides = {f"{CONV_STATE}.{layer}": conv}
    if cache.layers[layer].is_recurrent_states_initialized[0]:
        recurrent = cache.get_recurrent_state(layer, state_idx=0)[0].numpy().copy()
        if recurrent.ndim == 1:
            sides[f"{V_DELAYED_STATE}.{layer}"] = recurrent[None]
        else:
            sides[f"{MATRIX_STATE}.{layer}"] = recurrent
    return sides


def state_before(model: Model, stretches: Sequence[Stretch]) -> State:
    """A state of a shard that holds what each sequence has before its stretch."""
    state = model.make_state()
    if any(stretch.start for stretch in stretches):
        for name, entry in model.shard.states.items():
            shape = entry.shape[1:]
            values = [expected_value(shape, name, s.before, s.start) for s in stretches]
            state.write(name, np.stack(values))
    return state


def expected_value(
    shape: Sequence[int], name: str, states: Values, count: int
) -> np.ndarray:
    """The value of one sequence's logical state that holds `states` of `count` tokens;
    a ring holds the last ones, and so does the tail of a convolution, of which
    transformers keeps one more."""
    layer, leaf = split_layer(name)
    value = np.zeros(shape, np.float32)
    stored = states[f"{leaf}.{layer}"]
    if is_cache(name):
        heads = stored.reshape(len(stored), shape[0], -1).transpose(1, 0, 2)
        fill(value, heads, count)
    else:
        value[:] = stored[-len(value) :]
    return value
