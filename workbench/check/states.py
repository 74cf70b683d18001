"""Gates on the states of a bundle, which need neither a checkpoint nor a golden and run
on any runtime: `state_life`, `write_address`, `stale_rows` and `undo`.

Behaviour that depends only on the program is tested on `representatives`, one shard per
distinct program (see `distinct`), or on every shard if it is None. Every other shard
still gets three write tests and the stale-row test, because whether a mask hides stale
rows depends on the weights too."""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np

from workbench.bundle import Options
from workbench.bundle.names import (
    BASE,
    HIDDEN,
    IDS,
    K_STATE,
    LOGITS,
    V_STATE,
    is_cache,
    split_layer,
)
from workbench.check import gates
from workbench.check.gates import Gate
from workbench.check.interface import shape_at
from workbench.check.trace import Arrays
from workbench.decode import Decoder, Sequences, Snapshot
from workbench.errors import InputError
from workbench.runtime import Model, State

RESULTS = HIDDEN, BASE, LOGITS  # a shard of layers outputs exactly one of these
SMALL = 32  # a cache of at most so many rows is tested at every position
# The size of the garbage in rows without a token, by which random values of magnitude 1
# to 2 are multiplied. Products with the second are subnormal in fp16; a device may make
# zeros of them, so that it gets the first.
LARGE_GARBAGE = 16.0
SUBNORMAL_GARBAGE = 2.0**-20
# calls that run together, so that each weight is read once for them, and the memory that
# their states may take
MAX_CALLS = 16
STATE_BYTES = 1 << 28


# names of the shards that are tested in full; None: every shard
ShardNames = Collection[str] | None


def state_gates(decoder: Decoder, representatives: ShardNames = None) -> list[Gate]:
    """Runs `STATE_GATES` on a decoder; its own sequences stay as they are."""
    decoder = decoder.plain
    return [gate(decoder, representatives) for gate in STATE_GATES.values()]


def with_shards(decoder: Decoder, names: ShardNames) -> Decoder:
    """A copy of the decoder that has only the named layer shards. On a device all shards
    are kept, because each is compiled separately."""
    if names is None or decoder.is_device:
        return decoder
    layers = decoder.manifest.layers
    shards = [m.shard for m in decoder.layer_shards if m.shard.name in names]
    # shards that copy cache rows read them from the shards of their sources
    sources = {layer.source for s in shards for layer in layers[slice(*s.layers)]}
    restricted = copy.copy(decoder)
    restricted.layer_shards = [
        model
        for model in decoder.layer_shards
        if model.shard.name in names or sources & {*model.shard.layer_range}
    ]
    return restricted


def state_life_gate(decoder: Decoder, representatives: ShardNames = None) -> Gate:
    """New states are zeros, the states of two sequences do not mix, copies of caches equal
    their sources, and a token past max_seq_len is refused."""
    return gates.no_faults(
        "state_life",
        [
            *_lifetime_faults(with_shards(decoder, representatives)),
            *_copy_faults(decoder),
        ],
        "states start as zeros, stay apart, and refuse a token past max_seq_len",
    )


def write_address_gate(decoder: Decoder, representatives: ShardNames = None) -> Gate:
    """A call changes the cache rows of its own tokens and no others; see `probe_writes`."""
    records = probe_writes(decoder, representatives=representatives)
    wrong = [record.describe() for record in records if not record.right]
    return gates.no_faults(
        "write_address",
        wrong[:1],
        f"{len(records)} calls changed the rows of their own tokens and no others",
        f"{len(wrong)} of {len(records)} calls; first: ",
    )


def stale_rows_gate(decoder: Decoder, representatives: ShardNames = None) -> Gate:
    """Rows without a token change no output. Every shard is tested: whether a mask hides
    stale rows depends on the weights."""
    return gates.no_faults(
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

    reference, interleaved, second = (decoder.new_sequences() for _ in range(3))
    if is_written(second):
        yield "a new state is not zeros"
    if 2 * T <= S:  # otherwise no second call fits
        run(reference, 0)
        expected = run(reference, 0)
        run(interleaved, 0)
        run(second, 1)
        if not np.array_equal(run(interleaved, 0), expected):
            yield "two states of one shard are mixed"
    seqs = decoder.new_sequences()
    seqs.ids = [[0] * S for _ in range(B)]
    try:
        run(seqs, 0)
    except InputError:
        if not is_written(seqs):
            return
    yield "a token past max_seq_len is written"


def _copy_faults(decoder: Decoder) -> Iterator[str]:
    """Layers whose cache is not, bit for bit, that of the layer whose rows they copy:
    after calls, after an undo and a further call, and in a sequence that a snapshot
    restores."""
    layers = decoder.manifest.layers
    copies = {i: x.source for i, x in enumerate(layers) if x.source is not None}
    if decoder.manifest.foreign:
        copies = {}  # packages of other exporters read the source's cache
    options = decoder.options
    lengths = [T for T in callable_ts(options) if 2 * T <= options.max_seq_len]
    if not copies or not lengths:
        return
    T = max(lengths)

    def differing(seqs: Sequences, when: str) -> Iterator[str]:
        caches = {name: state.read(name) for state, name in seqs.named_states}
        for layer, source in copies.items():
            for leaf in (K_STATE, V_STATE):
                rows = np.float32(caches[f"layers.{layer}.{leaf}"])
                expected = np.float32(caches[f"layers.{source}.{leaf}"])
                if not np.array_equal(rows, expected):
                    furthest = float(np.abs(rows - expected).max())
                    yield (
                        f"{when}, {leaf} of layer {layer} is not that of layer "
                        f"{source}, by up to {furthest:.2g}"
                    )

    rng = np.random.default_rng(0)
    shape = 3, options.batch, T
    first, second, third = rng.integers(0, decoder.manifest.dims.V, shape).tolist()
    seqs = decoder.new_sequences()
    seqs.advance(first)
    seqs.advance(second)
    yield from differing(seqs, "after two calls")
    for seq in range(options.batch):
        seqs.trim(T, seq)
    seqs.advance(third)
    yield from differing(seqs, "after an undo")
    snapshots = [seqs.snapshot(seq) for seq in range(options.batch)]
    yield from differing(decoder.new_sequences(snapshots), "after a restore")


def _reading_faults(decoder: Decoder) -> Iterator[str]:
    """Shards whose output changes with the garbage in rows without a token, and shards
    whose output is finite although the cached value of the previous token is NaN: an
    operation that hides a NaN hides other faults too. Devices may drop NaN, so they are
    not tested for it."""
    T = callable_ts(decoder.options)[0]
    pos = min(1, decoder.options.max_seq_len - T)
    for model in decoder.layer_shards:
        zero_garbage = _random_states(model, garbage_factor=0.0)
        outputs = []
        for contents in (_random_states(model, LARGE_GARBAGE), zero_garbage):
            state = model.make_state()
            _fill(state, contents, pos)
            outputs.append(_call(decoder, model, state, pos, T))
        if not np.array_equal(*outputs):
            yield f"{model.shard.name} reads rows without a token"
        value_caches = [name for name in model.shard.states if name.endswith(V_STATE)]
        if decoder.is_device or not value_caches or not pos:
            continue
        state = model.make_state()
        first_cache = value_caches[0]
        values = _fill(state, zero_garbage, pos)[first_cache]
        values[..., 0, :] = np.nan
        state.write(first_cache, values)
        if np.isfinite(_call(decoder, model, state, pos, T)).all():
            yield f"{model.shard.name} hides a NaN of its cache"


def callable_ts(options: Options) -> list[int]:
    """T values worth testing: 1, 2, 3, 4, t_max − 1, t_max and the T of every function.
    Fixed shapes with a slice write take no dummy columns, so only their own T run."""
    t_max = options.t_max
    if options.fixed_sizes and options.kv_write == "slice":
        return list(options.fixed_sizes)
    sizes = {1, 2, 3, 4, t_max - 1, t_max, *options.fixed_sizes}
    return sorted(sizes & {*range(1, t_max + 1)})


def default_ts(options: Options) -> list[int]:
    """T values worth comparing with a golden: `callable_ts`, or the one T of shards
    that have a single fixed shape."""
    return [options.t_max] if len(options.fixed_sizes) == 1 else callable_ts(options)


def probe_points(options: Options) -> list[tuple[int, int]]:
    """(T, pos) pairs: every position of a small cache; of a larger one the ends, the
    middle and the powers of two, each ± 1."""
    S = options.max_seq_len
    positions = {*range(S)}
    if S > SMALL:
        marks = np.array([0, S // 2, *(2 ** np.arange(3, S.bit_length()))])
        positions = {*np.add.outer(marks, (-1, 0, 1)).ravel().tolist()}
    points = []
    for T in callable_ts(options):
        last = S - T
        fitting = (positions | {last - 1, last}) & {*range(last + 1)}
        points += [(T, pos) for pos in sorted(fitting)]
    return points


def reduced_points(options: Options) -> list[tuple[int, int]]:
    """The (T, pos) pairs for shards whose program is already probed on another shard:
    the longest call at both ends of the cache, the shortest in the middle."""
    S = options.max_seq_len
    Ts = callable_ts(options)
    middle = min(S // 2, S - Ts[0])
    return sorted({(Ts[-1], 0), (Ts[0], middle), (Ts[-1], S - Ts[-1])})


@dataclass(frozen=True)
class WriteRecord:
    """The rows of one cache that a call of T tokens at position `pos` has changed.

    Attributes:
        state: `k_state` or `v_state`.
        changed: numbers of the rows that differ in some head of some sequence, ascending.
        expected: those of the tokens of the call, ascending.
        right: whether the expected rows, and no others, differ in every head and
            sequence.
    """

    T: int
    pos: int
    layer: int
    state: str
    changed: list[int]
    expected: list[int]
    right: bool

    def describe(self) -> str:
        """A clause for the reason of the gate."""
        return (
            f"layer {self.layer} {self.state}, T = {self.T}, pos = {self.pos}: rows "
            f"{self.changed} changed, expected {self.expected}"
        )


def probe_writes(
    decoder: Decoder,
    points: Iterable[tuple[int, int]] | None = None,
    representatives: ShardNames = None,
) -> list[WriteRecord]:
    """Finds the cache rows that a call of T tokens at `pos` changes. The caches hold
    random rows before `pos` and garbage from there on.

    Args:
        points: (T, pos) pairs (default: `probe_points`, and `reduced_points` for
            shards that are not in `representatives`).

    Returns:
        One record per (layer, state, T, pos).
    """
    records: list[WriteRecord] = []
    garbage_factor = LARGE_GARBAGE if decoder.is_device else SUBNORMAL_GARBAGE
    all_points = list(points or probe_points(decoder.options))
    reduced = reduced_points(decoder.options)
    for model in decoder.plain.layer_shards:
        points = all_points
        is_reduced = representatives is not None and not decoder.is_device
        if is_reduced and model.shard.name not in representatives:
            points = reduced
        contents = _random_states(model, garbage_factor)
        size = sum(content.values.nbytes for content in contents.values())
        count = max(1, min(MAX_CALLS, STATE_BYTES // max(size, 1)))
        for first in range(0, len(points), count):
            batch_points = points[first : first + count]
            states = [model.make_state() for _ in batch_points]
            filled = [
                _fill(state, contents, pos)
                for state, (_, pos) in zip(states, batch_points)
            ]
            calls = [_inputs(decoder, model, pos, T) for T, pos in batch_points]
            model.predict_calls(calls, states, [None] * len(batch_points))
            for (T, pos), before, state in zip(batch_points, filled, states):
                records += _changed_rows(before, state, T, pos)
    return records


def _changed_rows(
    before: Arrays, state: State, T: int, pos: int
) -> Iterator[WriteRecord]:
    """The record of each cache of a shard after one call.

    Args:
        before: the contents before the call, by state.
        state: after the call.
    """
    for name in filter(is_cache, before):
        differs = before[name] != state.read(name)  # [B, H_kv, rows, D]
        changed = np.flatnonzero(differs.any((0, 1, 3))).tolist()
        # in every sequence and head
        changed_everywhere = np.flatnonzero(differs.any(3).all((0, 1))).tolist()
        ring = state.shard.states[name].ring or pos + T
        expected = np.unique(np.arange(pos, pos + T) % ring).tolist()
        layer, leaf = split_layer(name)
        right = changed == expected == changed_everywhere
        yield WriteRecord(T, pos, layer, leaf, changed, expected, right)


@dataclass(frozen=True, eq=False)
class RandomState:
    """What one state is filled with; arrays of its shape, float16, read-only.

    Attributes:
        values: random, of magnitude 1 to 2; for rows with a token.
        garbage: the same values times the garbage factor; for rows without a token.
    """

    values: np.ndarray
    garbage: np.ndarray


def _random_states(model: Model, garbage_factor: float) -> dict[str, RandomState]:
    """What each state of a shard is filled with, by name."""
    states = model.shard.states
    shapes = tuple(tuple(entry.shape) for entry in states.values())
    return dict(zip(states, _random_values(shapes, garbage_factor), strict=True))


# two entries: `_reading_faults` asks each shard for two kinds of garbage in turn
@lru_cache(maxsize=2)
def _random_values(
    shapes: tuple[tuple[int, ...], ...], garbage_factor: float
) -> list[RandomState]:
    """The values of `_random_states` for states of these shapes."""
    rng = np.random.default_rng(0)
    states = []
    for shape in shapes:
        value = (1 + rng.random(shape)) * rng.choice([-1, 1], shape)
        state = RandomState(
            values=value.astype(np.float16),
            garbage=(garbage_factor * value).astype(np.float16),
        )
        state.values.flags.writeable = False
        state.garbage.flags.writeable = False
        states.append(state)
    return states


def _fill(state: State, contents: dict[str, RandomState], tokens: int) -> Arrays:
    """Fills every state with its random values, and cache rows past the first `tokens`
    with garbage. Returns what it wrote."""
    filled = {}
    for name, content in contents.items():
        filled[name] = content.values.copy()
        if is_cache(name):
            filled[name][:, :, tokens:] = content.garbage[:, :, tokens:]
        state.write(name, filled[name])
    return filled


def _inputs(decoder: Decoder, model: Model, pos: int, T: int) -> Arrays:
    """The inputs of one call of T tokens at `pos` in every sequence: the host's masks
    and tables, and random activations whose seed is `pos`."""
    B = decoder.options.batch
    width = decoder.options.tiling.width(T)
    io = decoder.host.inputs(np.full(B, pos), np.full(B, T), width)
    rng = np.random.default_rng(pos)
    inputs = {}
    for name, shape in model.shard.inputs.items():
        if name in io:
            inputs[name] = io[name]
        elif name == IDS:
            V = decoder.manifest.dims.V
            inputs[name] = rng.integers(0, V, shape_at(shape, width))
        else:
            inputs[name] = np.float32(rng.standard_normal(shape_at(shape, width)))
    return inputs


def _call(decoder: Decoder, model: Model, state: State, pos: int, T: int) -> np.ndarray:
    """The output of a layer shard in a call of T tokens at `pos`."""
    outputs = model.predict(_inputs(decoder, model, pos, T), state)
    return next(outputs[name] for name in RESULTS if name in outputs)


def undo_gate(decoder: Decoder, representatives: ShardNames = None) -> Gate:
    """Undoes tokens after calls of every T, and as many as the decoder allows after two
    calls, near both ends of the cache. The next hidden states and all states must then
    equal, bit for bit, those of a run over the remaining tokens only, in calls of the
    same T."""
    decoder = with_shards(decoder, representatives)
    options = decoder.options
    t_max = options.t_max
    near_end = max(0, options.max_seq_len - 3 * t_max)
    plans = [
        (0, [t_max, t_max]),
        *((near_end, [T]) for T in default_ts(options)),
        (near_end, [t_max, t_max]),
    ]
    faults = []
    # the shapes of experts' calls must not depend on tokens that are undone
    with decoder.experts.taking_all_columns():
        for start, Ts in plans:
            for difference in _undo_faults(decoder, start, Ts):
                faults.append(f"{difference} from position {start} on, T = {Ts}")
    reason = "what follows undone tokens is bit-identical to a run without them"
    return gates.no_faults("undo", faults[:4], reason, f"{len(faults)} differ: ", "; ")


def tokens_to_undo(seq: int, ends: Sequence[int], most: int, kv_write: str) -> int:
    """The number of tokens that a sequence undoes after its calls.

    - After several calls: all tokens.
    - After one call of n tokens: about half of them, one more for each further sequence
      of the batch, and 0 after n. Sequences that undo alike would hide an exchange of
      two of them.
    - Slice writes take no dummy columns, so that the remaining tokens must fill whole
      calls.

    Example, ends (0, 4): sequences 0, 1, 2, 3 undo 2, 3, 4, 0 tokens.

    Args:
        ends: 0, and the number of tokens up to the end of each call.
        most: what the decoder allows.
        kv_write: `mask` or `slice`, the bundle's option.
    """
    total = ends[-1]
    is_one_call = len(ends) == 2
    count = total
    if is_one_call and kv_write == "mask":
        count = ((total + 1) // 2 + seq) % (total + 1)
    count = min(count, most)
    if kv_write == "slice":
        of_whole_calls = [total - end for end in ends]
        count = max(tokens for tokens in of_whole_calls if tokens <= count)
    return count


def _undo_faults(decoder: Decoder, start: int, Ts: Sequence[int]) -> Iterator[str]:
    """Yields what differs after calls of these sizes from `start` on, when each sequence
    undoes `tokens_to_undo` of them."""
    options = decoder.options
    rng = np.random.default_rng([start, *Ts])
    B, S, t_max = options.batch, options.max_seq_len, options.t_max
    ends = [end for end in accumulate([0, *Ts]) if start + end <= S]
    total = ends[-1]
    before = [_random_snapshot(decoder, start, rng) for _ in range(B)]
    tokens = rng.integers(0, decoder.manifest.dims.V, (B, total + t_max)).tolist()
    undone, reference = (decoder.new_sequences(before) for _ in range(2))
    for a, b in pairwise(ends):
        undone.advance([row[a:b] for row in tokens], keep=True)
    remaining_counts = []
    for seq in range(B):
        most = len(undone.ids[seq]) - undone.min_lengths[seq]
        count = tokens_to_undo(seq, ends, most, options.kv_write)
        undone.trim(count, seq)
        remaining_counts.append(total - count)
    for a, b in pairwise(ends):
        chunk = [row[a : min(b, n)] for row, n in zip(tokens, remaining_counts)]
        if any(chunk):
            reference.advance(chunk, min_columns=b - a)
    if start + total + t_max <= S:
        chunk = [row[-t_max:] for row in tokens]
        hidden = [seqs.advance(chunk)[0] for seqs in (undone, reference)]
        if not np.array_equal(*hidden, equal_nan=True):
            yield "hidden states"
    for seq in range(B):
        actual, expected = undone.snapshot(seq), reference.snapshot(seq)
        if actual.ids != expected.ids:
            yield "the tokens"
            continue
        for name, value in expected.states.items():
            if not np.array_equal(value, actual.states[name], equal_nan=True):
                yield name


def _random_snapshot(decoder: Decoder, tokens: int, rng) -> Snapshot:
    """A snapshot of `tokens` tokens with random states. Its tokens cannot be undone."""
    seqs = decoder.new_sequences()
    seqs.append([[0] * tokens] * decoder.options.batch)
    snapshot = seqs.snapshot()
    states = {}
    for name, value in snapshot.states.items():
        states[name] = rng.standard_normal(value.shape).astype(np.float16)
    return replace(snapshot, states=states, min_length=tokens)


# The gates on states, in the order in which they run.
STATE_GATES: dict[str, Callable[[Decoder, ShardNames], Gate]] = {
    "state_life": state_life_gate,
    "write_address": write_address_gate,
    "stale_rows": stale_rows_gate,
    "undo": undo_gate,
}
