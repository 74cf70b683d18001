"""Gates on the states of a bundle, which need neither a checkpoint nor a golden and run
on any runtime: `state_life`, `write_address`, `stale_rows` and `undo`.

What depends on a program alone is tested on the shards `whole`, one of each distinct
program (see `distinct`); None: on all shards. Every other shard still writes at three
points of its caches, and reads rows without a token: whether a mask hides them depends
on the weights too."""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from unittest.mock import patch

import numpy as np

from workbench.bundle import Options
from workbench.bundle.names import (
    BASE,
    HIDDEN,
    IDS,
    LOGITS,
    V_STATE,
    is_cache,
    split_layer,
)
from workbench.check import gates
from workbench.check.gates import Gate
from workbench.check.interface import sizes
from workbench.check.trace import Arrays
from workbench.decode import Decoder, Sequences, Snapshot
from workbench.errors import InputError
from workbench.runtime import Model, State

RESULTS = HIDDEN, BASE, LOGITS  # a shard of layers outputs exactly one of these
SMALL = 32  # rows up to which every position of a cache is tried
# magnitudes in rows without a token: large, and subnormal in fp16, of which a device
# may make zeros
LARGE = 16.0
SUBNORMAL = 2.0**-20
# calls that run together, for which each weight is read once; their states are in memory
TOGETHER = 16
STATE_BYTES = 1 << 28


# names of shards; None: all of them
Shards = Collection[str] | None


def state_gates(decoder: Decoder, whole: Shards = None) -> list[Gate]:
    """Runs `STATE_GATES` on a decoder; its own sequences stay as they are."""
    decoder = decoder.plain
    return [gate(decoder, whole) for gate in STATE_GATES.values()]


def with_shards(decoder: Decoder, names: Shards) -> Decoder:
    """A decoder that runs some shards of layers alone, one after another. A device
    compiles each shard for itself, and runs all of them."""
    if names is None or decoder.is_device:
        return decoder
    part = copy.copy(decoder)
    part.layers = [model for model in decoder.layers if model.shard.name in names]
    return part


def state_life_gate(decoder: Decoder, whole: Shards = None) -> Gate:
    return gates.none(
        "state_life",
        list(_lifetime_faults(with_shards(decoder, whole))),
        "states start as zeros, stay apart, and refuse a token past max_seq_len",
    )


def write_address_gate(decoder: Decoder, whole: Shards = None) -> Gate:
    records = write_probe(decoder, whole=whole)
    wrong = [
        "layer {layer} {state}, T = {T}, pos = {pos}: rows {changed} changed, "
        "expected {expected}".format(**record)
        for record in records
        if not record["right"]
    ]
    return gates.none(
        "write_address",
        wrong[:1],
        f"{len(records)} calls changed the rows of their own tokens and no others",
        f"{len(wrong)} of {len(records)} calls; first: ",
    )


def stale_rows_gate(decoder: Decoder, whole: Shards = None) -> Gate:
    """Runs every shard."""
    return gates.none(
        "stale_rows",
        list(_reading_faults(decoder)),
        "rows without a token change no bit of the output; an earlier token's NaN reaches it",
    )


def _lifetime_faults(decoder: Decoder) -> Iterator[str]:
    B = decoder.options.batch
    S = decoder.options.max_seq_len
    T = callable_ts(decoder.options)[0]

    def run(seqs: Sequences, token: int) -> np.ndarray:
        return seqs.advance([[token] * T] * B)[0]

    def is_written(seqs: Sequences) -> bool:
        return any(np.any(state.read(name)) for state, name in seqs.named_states)

    alone, mixed, other = (decoder.new_sequences() for _ in range(3))
    if is_written(other):
        yield "a new state is not zeros"
    if 2 * T <= S:  # otherwise no second call fits
        run(alone, 0)
        expected = run(alone, 0)
        run(mixed, 0)
        run(other, 1)
        if not np.array_equal(run(mixed, 0), expected):
            yield "two states of one shard are mixed"
    seqs = decoder.new_sequences()
    seqs.ids = [[0] * S for _ in range(B)]
    try:
        run(seqs, 0)
    except InputError:
        if not is_written(seqs):
            return
    yield "a token past max_seq_len is written"


def _reading_faults(decoder: Decoder) -> Iterator[str]:
    """Shards whose output changes with the garbage in rows without a token, and shards
    whose output is finite although a value of the token before is NaN: an operation
    that hides a NaN hides other faults too. Devices may drop NaN and are not tested for
    it."""
    T = callable_ts(decoder.options)[0]
    pos = min(1, decoder.options.max_seq_len - T)
    for model in decoder.layers:
        outputs = []
        for garbage in (LARGE, 0.0):
            state = model.make_state()
            random = _random_states(model, garbage)
            _fill(state, random, pos)
            outputs.append(_call(decoder, model, state, pos, T))
        if not np.array_equal(*outputs):
            yield f"{model.shard.name} reads rows without a token"
        values = [name for name in random if name.endswith(V_STATE)]
        if decoder.is_device or not values or not pos:
            continue
        state = model.make_state()
        value = _fill(state, random, pos)[values[0]]
        value[..., 0, :] = np.nan
        state.write(values[0], value)
        if np.isfinite(_call(decoder, model, state, pos, T)).all():
            yield f"{model.shard.name} hides a NaN of its cache"


def callable_ts(options: Options) -> list[int]:
    """T values worth testing: 1, 2, 3, 4, t_max − 1, t_max and that of every function;
    of fixed shapes whose slice write takes no dummy columns, those alone."""
    shapes = options.shapes
    t_max = options.t_max
    if shapes and options.kv_write == "slice":
        return list(shapes)
    return sorted({1, 2, 3, 4, t_max - 1, t_max, *shapes} & {*range(1, t_max + 1)})


def default_ts(options: Options) -> list[int]:
    """T values worth comparing with a golden: `callable_ts`, or the one T of shards
    that have a single fixed shape."""
    return [options.t_max] if len(options.shapes) == 1 else callable_ts(options)


def probe_points(options: Options) -> list[tuple[int, int]]:
    """(T, pos) pairs: all of a small cache, else the ends, the middle and powers of two
    ± 1."""
    S = options.max_seq_len
    places = {*range(S)}
    if S > SMALL:
        marks = np.array([0, S // 2, *(2 ** np.arange(3, S.bit_length()))])
        places = {*np.add.outer(marks, (-1, 0, 1)).ravel().tolist()}
    points = []
    for T in callable_ts(options):
        last = S - T
        near = (places | {last - 1, last}) & {*range(last + 1)}
        points += [(T, pos) for pos in sorted(near)]
    return points


def few_points(options: Options) -> list[tuple[int, int]]:
    """The (T, pos) pairs at which a shard writes whose program is probed on another
    one: the longest call at both ends of the cache, the shortest in the middle."""
    S = options.max_seq_len
    Ts = callable_ts(options)
    middle = min(S // 2, S - Ts[0])
    return sorted({(Ts[-1], 0), (Ts[0], middle), (Ts[-1], S - Ts[-1])})


def write_probe(
    decoder: Decoder,
    points: Iterable[tuple[int, int]] | None = None,
    whole: Shards = None,
) -> list[dict]:
    """Which cache rows each call of T tokens at `pos` changed, on caches that hold
    random rows, and garbage in rows without a token.

    Args:
        points: (T, pos) pairs (default: `probe_points`, and `few_points` of shards that
            are not in `whole`).

    Returns:
        One record per (layer, state, T, pos): `changed` and `expected`, sorted lists of
        rows, and `right`: they are equal in every head and sequence.
    """
    records = []
    garbage = LARGE if decoder.is_device else SUBNORMAL
    all_points = list(points or probe_points(decoder.options))
    few = few_points(decoder.options)
    for model in decoder.plain.layers:
        points = all_points
        if whole is not None and not decoder.is_device:
            points = all_points if model.shard.name in whole else few
        random = _random_states(model, garbage)
        size = sum(value.nbytes for value, _ in random.values())
        count = max(1, min(TOGETHER, STATE_BYTES // max(size, 1)))
        for first in range(0, len(points), count):
            some = points[first : first + count]
            states = [model.make_state() for _ in some]
            filled = [
                _fill(state, random, pos) for state, (_, pos) in zip(states, some)
            ]
            calls = [_inputs(decoder, model, pos, T) for T, pos in some]
            model.predict_calls(calls, states, [None] * len(some))
            for (T, pos), before, state in zip(some, filled, states):
                for row in _changed_rows(before, state, T, pos):
                    records.append({"T": T, "pos": pos} | row)
    return records


def _changed_rows(before: Arrays, state: State, T: int, pos: int) -> Iterator[dict]:
    for name in filter(is_cache, before):
        differs = before[name] != state.read(name)
        changed = np.flatnonzero(differs.any((0, 1, 3))).tolist()
        whole = np.flatnonzero(differs.any(3).all((0, 1))).tolist()
        ring = state.shard.states[name].ring or pos + T
        expected = np.unique(np.arange(pos, pos + T) % ring).tolist()
        layer, leaf = split_layer(name)
        record = {"layer": layer, "state": leaf, "changed": changed}
        record |= {"expected": expected, "right": changed == expected == whole}
        yield record


def _random_states(model: Model, garbage: float) -> dict[str, tuple]:
    """Of every state a float16 value with elements of magnitude 1 to 2, and one whose
    elements are these times `garbage`."""
    rng = np.random.default_rng(0)
    values = {}
    for name, entry in model.shard.states.items():
        value = (1 + rng.random(entry.shape)) * rng.choice([-1, 1], entry.shape)
        values[name] = value.astype(np.float16), (garbage * value).astype(np.float16)
    return values


def _fill(state: State, random: dict[str, tuple], tokens: int) -> Arrays:
    """Writes `_random_states`, and in cache rows behind those of `tokens` tokens the
    garbage; returns what is written."""
    filled = {}
    for name, (value, garbage) in random.items():
        filled[name] = value.copy()
        if is_cache(name):
            filled[name][:, :, tokens:] = garbage[:, :, tokens:]
        state.write(name, filled[name])
    return filled


def _inputs(decoder: Decoder, model: Model, pos: int, T: int) -> Arrays:
    """The inputs of one call of T tokens at `pos` in every sequence: real masks and
    tables and random activations, the same for the same pos."""
    B = decoder.options.batch
    width = decoder.options.tiling.width(T)
    io = decoder.host.inputs(np.full(B, pos), np.full(B, T), width)
    rng = np.random.default_rng(pos)
    inputs = {}
    for name, shape in model.shard.inputs.items():
        if name in io:
            inputs[name] = io[name]
        elif name == IDS:
            inputs[name] = rng.integers(0, decoder.manifest.dims.V, sizes(shape, width))
        else:
            inputs[name] = np.float32(rng.standard_normal(sizes(shape, width)))
    return inputs


def _call(decoder: Decoder, model: Model, state: State, pos: int, T: int) -> np.ndarray:
    """The output of a shard of layers in a call of T tokens at `pos`."""
    outputs = model.predict(_inputs(decoder, model, pos, T), state)
    return next(outputs[name] for name in RESULTS if name in outputs)


def undo_gate(decoder: Decoder, whole: Shards = None) -> Gate:
    """Undoes tokens of a call of every T and all that the decoder allows of two calls,
    near both ends of the cache: the next call's hidden states and all states behind it
    are bit for bit those of a run of what is left alone, in calls of the same T."""
    decoder = with_shards(decoder, whole)
    options = decoder.options
    most = options.t_max
    near_end = max(0, options.max_seq_len - 3 * most)
    plans = [
        (0, [most, most]),
        *((near_end, [T]) for T in default_ts(options)),
        (near_end, [most, most]),
    ]
    faults = []
    # the shapes of experts' calls must not depend on tokens that are undone
    with patch.object(decoder.experts, "fixed", True):
        for start, Ts in plans:
            for difference in _undo_faults(decoder, start, Ts):
                faults.append(f"{difference} from position {start} on, T = {Ts}")
    reason = "what follows undone tokens is bit-identical to a run without them"
    return gates.none("undo", faults[:4], reason, f"{len(faults)} differ: ", "; ")


def _undo_faults(decoder: Decoder, start: int, Ts: Sequence[int]) -> Iterator[str]:
    """Names what differs after calls of these T at `start`, of which every sequence
    undoes a different number of tokens. Slice writes, which take no dummy columns, undo
    whole calls."""
    options = decoder.options
    rng = np.random.default_rng([start, *Ts])
    B, S, most = options.batch, options.max_seq_len, options.t_max
    ends = [end for end in accumulate([0, *Ts]) if start + end <= S]
    total = ends[-1]
    before = [_random_snapshot(decoder, start, rng) for _ in range(B)]
    tokens = rng.integers(0, decoder.manifest.dims.V, (B, total + most)).tolist()
    mixed, alone = (decoder.new_sequences(before) for _ in range(2))
    for a, b in pairwise(ends):
        mixed.advance([row[a:b] for row in tokens], keep=True)
    left = []
    for seq in range(B):
        count = total
        if len(ends) == 2 and options.kv_write == "mask":
            count = ((total + 1) // 2 + seq) % (total + 1)
        count = min(count, len(mixed.ids[seq]) - mixed.floors[seq])
        if options.kv_write == "slice":
            count = max(total - end for end in ends if total - end <= count)
        mixed.trim(count, seq)
        left.append(total - count)
    for a, b in pairwise(ends):
        chunk = [row[a : min(b, n)] for row, n in zip(tokens, left)]
        if any(chunk):
            alone.advance(chunk, T=b - a)
    if start + total + most <= S:
        chunk = [row[-most:] for row in tokens]
        hidden = [seqs.advance(chunk)[0] for seqs in (mixed, alone)]
        if not np.array_equal(*hidden, equal_nan=True):
            yield "hidden states"
    for seq in range(B):
        undone, expected = mixed.snapshot(seq), alone.snapshot(seq)
        if undone.ids != expected.ids:
            yield "the tokens"
            continue
        for name, value in expected.states.items():
            if not np.array_equal(value, undone.states[name], equal_nan=True):
                yield name


def _random_snapshot(decoder: Decoder, tokens: int, rng) -> Snapshot:
    """A snapshot of this many tokens with random values; its tokens cannot be
    undone."""
    seqs = decoder.new_sequences()
    seqs.append([[0] * tokens] * decoder.options.batch)
    snapshot = seqs.snapshot()
    states = {}
    for name, value in snapshot.states.items():
        states[name] = rng.standard_normal(value.shape).astype(np.float16)
    return replace(snapshot, states=states, floor=tokens)


# The gates on states, in the order in which they run.
STATE_GATES: dict[str, Callable[[Decoder, Shards], Gate]] = {
    "state_life": state_life_gate,
    "write_address": write_address_gate,
    "stale_rows": stale_rows_gate,
    "undo": undo_gate,
}
