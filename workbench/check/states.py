"""Gates on the states of a bundle, which need neither a checkpoint nor a golden and run
on any runtime: `state_life`, `write_address`, `stale_rows` and `undo`."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from workbench.bundle import Options
from workbench.bundle.names import (
    BASE,
    HANDED_ON,
    HIDDEN,
    IDS,
    LOGITS,
    V_STATE,
    is_cache,
)
from workbench.check import gates
from workbench.check.gates import Gate
from workbench.check.interface import sizes
from workbench.decode import Decoder, Sequences, Snapshot
from workbench.decode.snapshot import take
from workbench.errors import InputError
from workbench.runtime import Model, State

STATE_GATES = ("state_life", "write_address", "stale_rows", "undo")
RESULTS = HIDDEN, BASE, HANDED_ON, LOGITS  # of which a shard of layers has one
SMALL = 32  # rows up to which every position of a cache is tried
GARBAGE = 16.0  # magnitude of what rows without a token hold
# of float16's normal and subnormal numbers; a device may make zeros of the latter
SMALLEST_NORMAL, SMALLEST = 2.0**-14, 2.0**-24


def state_gates(decoder: Decoder) -> list[Gate]:
    """The `STATE_GATES` of a decoder, in that order; its own sequences stay as they
    are."""
    decoder = decoder.plain
    records = write_probe(decoder)
    wrong = [record for record in records if not record["right"]]
    stale = [
        model.shard.name for model in decoder.layers if _reads_stale(decoder, model)
    ]
    nan = []
    if not decoder.is_device:  # devices are known to drop NaN
        nan = [m.shard.name for m in decoder.layers if _swallows_nan(decoder, m)]
    places = [
        "layer {layer} {state}, T = {T}, pos = {pos}: rows {changed} changed, "
        "expected {expected}".format(**record)
        for record in wrong[:1]
    ]
    return [
        gates.none(
            "state_life",
            list(_lifetime_faults(decoder)),
            "states start as zeros, stay apart, and refuse a token past max_seq_len",
        ),
        gates.none(
            "write_address",
            places,
            f"{len(records)} calls changed the rows of their own tokens and no others",
            f"{len(wrong)} of {len(records)} calls; first: ",
        ),
        gates.none(
            "stale_rows",
            [f"{name} reads rows without a token" for name in stale]
            + [f"{name} hides a NaN of its cache" for name in nan],
            "rows without a token change no bit of the output; an earlier token's NaN reaches it",
        ),
        undo_gate(decoder),
    ]


def _lifetime_faults(decoder: Decoder) -> Iterator[str]:
    for model in decoder.layers:
        name = model.shard.name
        alone, a, b = (model.make_state() for _ in range(3))
        if any(np.any(b.read(state)) for state in model.shard.states):
            yield f"a new state of {name} is not zeros"
        call(decoder, model, alone, 0)
        second = call(decoder, model, alone, 1)
        call(decoder, model, a, 0)
        call(decoder, model, b, 0, seed=1)
        if not np.array_equal(call(decoder, model, a, 1), second):
            yield f"two states of {name} are mixed"
    seqs = decoder.fresh()
    B, S = decoder.options.batch, decoder.options.max_seq_len
    seqs.ids = [[0] * S for _ in range(B)]
    try:
        decoder.advance(seqs, [[0]] * B)
    except InputError:
        if not any(np.any(state.read(name)) for state, name in seqs.named_states):
            return
    yield "a token past max_seq_len is written"


def callable_ts(options: Options) -> list[int]:
    """T values worth testing: 1, 2, 3, 4, t_max − 1, t_max and that of every function;
    of fixed shapes whose slice write takes no dummy columns, those alone."""
    shapes, t_max = options.shapes, options.t_max
    if shapes and options.kv_write == "slice":
        return list(shapes)
    return sorted({1, 2, 3, 4, t_max - 1, t_max, *shapes} & {*range(1, t_max + 1)})


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


def write_probe(
    decoder: Decoder, points: Iterable[tuple[int, int]] | None = None
) -> list[dict]:
    """Which cache rows each call of T tokens at `pos` changed, on caches that hold
    random rows, and subnormal numbers in rows without a token.

    Returns:
        One record per (layer, state, T, pos): `changed` and `expected`, sorted lists of
        rows, and `right`: they are equal in every head and sequence.
    """
    records = []
    points = list(points or probe_points(decoder.options))
    for model in decoder.plain.layers:
        entries, state = model.shard.states, model.make_state()
        for T, pos in points:
            before = _fill(decoder, state, pos)
            call(decoder, model, state, pos, T)
            for name in filter(is_cache, before):
                differs = before[name] != np.asarray(state.read(name), np.float32)
                changed = np.flatnonzero(differs.any((0, 1, 3))).tolist()
                whole = np.flatnonzero(differs.any(3).all((0, 1))).tolist()
                rows = np.arange(pos, pos + T) % (entries[name].ring or pos + T)
                expected = np.unique(rows).tolist()
                _, layer, leaf = name.split(".")
                record = {"layer": int(layer), "state": leaf, "T": T, "pos": pos}
                record |= {"changed": changed, "expected": expected}
                right = changed == expected == whole
                records.append(record | {"right": right})
    return records


def _fill(decoder: Decoder, state: State, tokens: int) -> dict[str, np.ndarray]:
    """Writes random values of normal size, and behind the rows of `tokens` tokens
    subnormal ones unless the runtime is a device; returns them, float32."""
    rng = np.random.default_rng(0)
    values = {}
    for name, entry in state.shard.states.items():
        value = rng.standard_normal(entry.shape).astype(np.float16)
        value[np.abs(value) < SMALLEST_NORMAL] = 1
        if is_cache(name) and not decoder.is_device:
            steps = rng.integers(1, 1 << 10, value[:, :, tokens:].shape)
            value[:, :, tokens:] = steps * SMALLEST
        state.write(name, value)
        values[name] = value.astype(np.float32)
    return values


def _reads_stale(decoder: Decoder, model: Model) -> bool:
    """Whether two tokens behind another content of the rows without a token come out
    otherwise."""
    results = []
    for magnitude in (0.0, GARBAGE):
        state, rng = model.make_state(), np.random.default_rng(1)
        for name, entry in model.shard.states.items():
            if is_cache(name):
                signs = rng.choice([-1.0, 1.0], entry.shape)
                state.write(name, np.float16(magnitude * signs))
        call(decoder, model, state, 0)
        results.append(call(decoder, model, state, 1))
    return not np.array_equal(*results)


def _swallows_nan(decoder: Decoder, model: Model) -> bool:
    """Whether a NaN in the value of the token before leaves the output finite: what
    hides it hides other faults too."""
    state = model.make_state()
    names = [name for name in model.shard.states if name.endswith(V_STATE)]
    names = names[:1] if any(map(is_cache, names)) else []
    for name in names:
        value = np.zeros(model.shard.states[name].shape, np.float16)
        value[..., 0, :] = np.nan
        state.write(name, value)
    return bool(names) and bool(np.isfinite(call(decoder, model, state, 1)).all())


def call(
    decoder: Decoder, model: Model, state: State, pos: int, T: int = 1, seed: int = 0
) -> np.ndarray:
    """What a shard of layers hands on after one call of T tokens at `pos` in every
    sequence, on real masks and tables and random activations, the same for the same
    pos and seed."""
    B = decoder.options.batch
    width = decoder.options.width(T)
    io = decoder.host.inputs(np.full(B, pos), np.full(B, T), width)
    rng = np.random.default_rng((seed, pos))
    inputs = {}
    for name, shape in model.shard.inputs.items():
        if name in io:
            inputs[name] = io[name]
        elif name == IDS:
            inputs[name] = rng.integers(0, decoder.manifest.dims.V, sizes(shape, width))
        else:
            inputs[name] = np.float32(rng.standard_normal(sizes(shape, width)))
    outputs = model.predict(inputs, state)
    return next(outputs[name] for name in RESULTS if name in outputs)


@dataclass
class Call:
    """Tokens [B, T] that ran, how many of each sequence's still count [B], and their
    hidden states [B, C, T]."""

    ids: np.ndarray
    counts: np.ndarray
    hidden: np.ndarray


def undo_gate(decoder: Decoder) -> Gate:
    """Undoes the last tokens of calls of every T, then as many as the decoder allows,
    and runs what is left alone, in calls of the same T: hidden states and the states
    behind the last call, bit for bit."""
    options, experts = decoder.options, decoder.experts
    Ts, most = callable_ts(options), options.t_max
    if len(options.shapes) == 1:
        Ts = [most]
    near_end = max(0, options.max_seq_len - sum(Ts) - 3 * most)
    faults, fixed = [], experts.fixed
    try:
        # an expert's shapes must not depend on tokens that are undone
        experts.fixed = True
        for start, chosen in {0: [most], near_end: Ts}.items():
            rng = np.random.default_rng([0, start])
            every = range(options.batch)
            before = [_random_snapshot(decoder, start, rng) for _ in every]
            seqs = decoder.fresh(before)
            calls = _calls_with_undo(decoder, seqs, chosen, rng)
            after = [take(seqs, seq) for seq in every]
            for what in _rerun(decoder, decoder.fresh(before), calls, after):
                faults.append(f"{what} from position {start} on")
    finally:
        experts.fixed = fixed
    reason = "what follows undone tokens is bit-identical to a run without them"
    return gates.none("undo", faults[:4], reason, f"{len(faults)} differ: ", "; ")


def _random_snapshot(decoder: Decoder, tokens: int, rng) -> Snapshot:
    """A snapshot of so many tokens that holds random values, none of them to be
    undone."""
    seqs = decoder.fresh()
    seqs.append([[0] * tokens] * decoder.options.batch)
    snapshot, states = take(seqs), {}
    for name, value in snapshot.states.items():
        states[name] = rng.standard_normal(value.shape).astype(np.float16)
    return replace(snapshot, states=states, floor=tokens)


def _calls_with_undo(
    decoder: Decoder, seqs: Sequences, Ts: list[int], rng
) -> list[Call]:
    """Runs calls of these T and undoes a different number of last tokens in every
    sequence; runs two more calls and undoes as many tokens as the decoder allows; runs
    a last call. With slice writes, which take no dummy columns, whole calls are
    undone."""
    options = decoder.options
    calls = []
    B = options.batch
    t_max = options.t_max
    whole = options.kv_write == "slice"
    for T in Ts:
        _call(decoder, seqs, T, rng, calls)
        for seq in range(B):
            count = T if whole else ((T + 1) // 2 + seq) % (T + 1)
            _undo(decoder, seqs, calls, seq, count)
    for _ in range(2):
        _call(decoder, seqs, t_max, rng, calls)
    for seq in range(B):
        _undo(decoder, seqs, calls, seq, 2 * t_max)
    _call(decoder, seqs, t_max, rng, calls)
    return calls


def _call(decoder: Decoder, seqs: Sequences, T: int, rng, calls: list[Call]) -> None:
    """Runs T random tokens of every sequence, where the cache has room for them."""
    B = decoder.options.batch
    room = decoder.options.max_seq_len - seqs.offsets.max()
    if T <= room:
        ids = rng.integers(0, decoder.manifest.dims.V, (B, T))
        hidden, _ = decoder.advance(seqs, ids.tolist(), keep=True)
        calls.append(Call(ids, np.full(B, T), hidden))


def _undo(
    decoder: Decoder, seqs: Sequences, calls: list[Call], seq: int, count: int
) -> None:
    """Undoes the last `count` tokens of a sequence, of those that `calls` ran and the
    decoder lets go."""
    depth = len(seqs.ids[seq]) - seqs.floors[seq]
    ends = np.cumsum([call.counts[seq] for call in calls[::-1]])
    count = int(min(count, depth, *ends[-1:]))
    if decoder.options.kv_write == "slice":  # whole calls
        count = int(max(ends[ends <= count], default=0))
    decoder.trim(count, seq, seqs)
    for call in calls[::-1]:
        gone = min(count, int(call.counts[seq]))
        call.counts[seq] -= gone
        count -= gone


def _rerun(
    decoder: Decoder, seqs: Sequences, calls: list[Call], after: list[Snapshot]
) -> Iterator[str]:
    """What differs where the tokens of `calls` that count are run alone; `after`: what
    was left of each sequence."""
    for call in calls:
        if not call.counts.any():
            continue
        T = call.ids.shape[1]
        rows = zip(call.ids.tolist(), call.counts, strict=True)
        chunk = [row[:count] for row, count in rows]
        hidden, _ = decoder.advance(seqs, chunk, T=T)
        for alone, mixed, count in zip(hidden, call.hidden, call.counts, strict=True):
            if not np.array_equal(alone[:, :count], mixed[:, :count], equal_nan=True):
                yield f"hidden states of a call of T = {T}"
    for seq, snapshot in enumerate(after):
        alone = take(seqs, seq)
        if snapshot.ids != alone.ids:
            yield "the tokens"
        for name, value in alone.states.items():
            if not np.array_equal(value, snapshot.states[name], equal_nan=True):
                yield name
