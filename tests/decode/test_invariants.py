"""The 27 invariants of a KV cache that is kept, on trained Llama, Qwen 2, Gemma 3 (rings that wrap)
and ZAYA.

| invariant | proved by |
|---|---|
| 1, 2 any split, any tiling | test_any_split_and_tiling…; test_decoder: …whatever_the_tiling |
| 3 exactly its rows | test_decoder: a_call_writes_exactly_its_own_rows; eval: the gate write_address |
| 4 any length at any offset | test_any_split_and_tiling…, test_steps_of_256_are_nothing_special |
| 5 trim | test_trimming… |
| 6, 7 past max_seq_len | test_decoder: a_position_past_the_cache…; test_a_sequence_fits_to_its_last_slot |
| 8 sliding windows | test_a_snapshot_continues… (lengths around window and ring) |
| 9 MHA, GQA, MQA | test_decoder: every family there |
| 10 stale rows | test_what_a_slot_held_before…; eval: the gates stale_rows, nan_in_state_is_noticed |
| 11 dummies | test_decoder: each_layer_alone…; test_empty_slots… |
| 12 detached copies | test_copies_are_detached; test_store: what_memory_gives_out… |
| 13 independent states | test_two_sequences_in_turn…; test_decoder: stream_twice… |
| 14 read, write, go on | test_states_read_and_written_back… |
| 15, 16 round trip, another process | test_store |
| 17 no prefill, A leaves B alone | test_a_snapshot_continues…, test_slots_come_and_go…; the matrix counts |
| 18 refusals | test_a_refused_snapshot…; test_store |
| 19 q4 | test_formats |
| 20, 21 keys, prefixes | test_store |
| 22 merge, extract | test_merged_and_taken_apart… |
| 23, 24 batch mates | test_slots_come_and_go…, test_a_row_does_not_know_its_mates |
| 25, 26, 27 stream = generate, cold = warm = hot, never empty | eval/test_reuse: the matrix |
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import tiny
import trained
from circle import all_wide
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from workbench import InputError
from workbench.bundle.names import is_cache
from workbench.decode import Snapshot
from workbench.decode.snapshot import take

SOME = settings(
    max_examples=5,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
CLOSE = 1e-5  # exact arithmetic, other tiles or batches: kernels sum in another order
IDS = np.random.default_rng(7).integers(3, 256, trained.S).tolist()


RINGS_AND_TAILS = "tiny-llama", "tiny-gemma3", "tiny-zaya"
OTHERS = [name for name in trained.NAMES if name not in RINGS_AND_TAILS]


@pytest.fixture(scope="module", params=[*RINGS_AND_TAILS, *all_wide(*OTHERS)])
def decoder(request, exports):
    return trained.decoder(exports, request.param)


@pytest.fixture(scope="module")
def together(decoder, exports):
    return trained.decoder(exports, decoder.manifest.checkpoint["name"], trained.BATCH)


def taken(decoder, ids) -> Snapshot:
    decoder.begin()
    decoder.prefill(ids)
    return decoder.snapshot()


def same(a: Snapshot, b: Snapshot) -> bool:
    return (
        a.ids == b.ids
        and a.states.keys() == b.states.keys()
        and all(np.array_equal(v, b.states[n]) for n, v in a.states.items())
    )


def close(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two states are near each other; those without a token are equal."""
    return np.array_equal(a, b) or tiny.relative(a, b) < CLOSE


@pytest.mark.matrix(2, wide=3)
@SOME
@given(first=st.integers(1, 90), count=st.integers(2, 30), tile=st.integers(1, 16))
@example(first=63, count=2, tile=1)
@example(first=79, count=3, tile=2)
def test_any_split_and_tiling_gives_the_same_logits_and_caches(
    decoder, first, count, tile
):
    ids = IDS[: first + count]
    decoder.begin()
    at_once, whole = decoder.prefill(ids), decoder.snapshot()
    decoder.begin()
    decoder.prefill(ids[:first], tile)
    assert close(decoder.prefill(ids[first:], 17 - tile), at_once)
    split = decoder.snapshot()
    assert split.ids == whole.ids == tuple(ids)
    assert all(close(split.states[n], v) for n, v in whole.states.items())


@pytest.mark.matrix(12, wide=28)
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 79, 80, 100])
def test_a_snapshot_continues_as_if_it_had_never_stopped_and_prefills_nothing(
    decoder, length
):
    more = IDS[length : length + 3]
    snapshot = taken(decoder, IDS[:length])
    uninterrupted = [decoder.decode_one_token(t) for t in more]
    ended = decoder.snapshot()
    for name, value in snapshot.states.items():  # the logical prefix, nothing else
        assert not is_cache(name) or value.shape[1] <= length
    decoder.begin()
    decoder.prefill(IDS[::-1][:5])
    decoder.begin(snapshot)
    for token, logits in zip(more, uninterrupted, strict=True):
        assert np.array_equal(decoder.decode_one_token(token), logits)
    assert same(decoder.snapshot(), ended)


@SOME
@given(length=st.integers(2, 60), count=st.integers(1, 70))
def test_trimming_and_decoding_again_gives_the_same_or_refuses(decoder, length, count):
    snapshot, count_taken = taken(decoder, IDS[:length]), min(count, length)
    if any(not is_cache(n) for n in snapshot.states):
        with pytest.raises(InputError, match="at most 0: "):
            snapshot.trim(count)
        depth = length - decoder.seqs.floors[0]
        if count_taken > depth:
            with pytest.raises(InputError, match=f"at most {depth}: "):
                decoder.trim(count)
            assert same(decoder.snapshot(), snapshot)
            return
        decoder.trim(count)
        left = decoder.snapshot()
        decoder.begin()
        if count_taken < length:
            decoder.prefill(IDS[: length - count_taken])
        again = decoder.snapshot()
        assert left.ids == again.ids
        assert all(close(left.states[n], v) for n, v in again.states.items())
        return
    assert decoder.trim(count) == count_taken
    assert same(
        decoder.snapshot(), snapshot.trim(count)
    ) and decoder.seqs.offsets.tolist() == [length - count_taken]
    again = decoder.prefill(IDS[length - count_taken : length])
    decoder.begin()
    assert close(again, decoder.prefill(IDS[:length]))


@pytest.mark.parametrize("length, depth", [(79, 79), (80, trained.T_MAX)])
def test_a_ring_that_has_wrapped_goes_back_a_call_and_no_further(
    exports, length, depth
):
    decoder = trained.decoder(exports, "tiny-gemma3")
    snapshot = taken(decoder, IDS[:length])
    for trim in (decoder.trim, snapshot.trim) if depth < length else ():
        with pytest.raises(
            InputError, match=f"{depth + 1} to undo; needs at most {depth}"
        ):
            trim(depth + 1)
    assert decoder.seqs.offsets.tolist() == [length] and same(
        decoder.snapshot(), snapshot
    )
    assert decoder.trim(depth) == depth and same(
        decoder.snapshot(), snapshot.trim(depth)
    )
    again = decoder.prefill(IDS[length - depth : length])
    decoder.begin()
    assert close(again, decoder.prefill(IDS[:length]))


@pytest.mark.matrix(2, wide=3)
def test_a_sequence_fits_to_its_last_slot_and_no_further(decoder):
    snapshot = taken(decoder, IDS[: trained.S - 2])
    assert len(decoder.generate(IDS[:1], 2, after=snapshot, stop=())) == 2
    for ids, new in ((IDS[:1], 3), (IDS[:3], 1)):
        with pytest.raises(InputError, match=f"at most max_seq_len = {trained.S}"):
            decoder.generate(ids, new, after=snapshot, stop=())
    decoder.begin(snapshot)
    before = decoder.snapshot()
    with pytest.raises(InputError, match=f"max_seq_len = {trained.S}"):
        decoder.prefill(IDS[:3])
    assert same(decoder.snapshot(), before)
    with pytest.raises(InputError, match="0. tokens"):
        decoder.generate([[]], 1, after=snapshot)


@pytest.mark.matrix(2, wide=3)
def test_copies_are_detached(decoder):
    snapshot = taken(decoder, IDS[:9])
    kept = {n: v.copy() for n, v in snapshot.states.items()}
    decoder.decode_one_token(5)
    decoder.begin(snapshot)
    decoder.decode_one_token(6)
    assert all(np.array_equal(v, kept[n]) for n, v in snapshot.states.items())
    expected = decoder.generate([5], 2, after=snapshot, stop=())
    decoder.begin(snapshot)
    for value in snapshot.states.values():
        value[:] = 0
    assert int(decoder.decode_one_token(5).argmax()) == expected[0]


def test_two_sequences_in_turn_on_one_model_do_not_mix(decoder):
    prompts, sequences, found = [IDS[:11], IDS[20:37]], [], []
    expected = [decoder.generate(p, 4, stop=()) for p in prompts]
    for prompt in prompts:
        seqs = decoder.fresh()
        assert not any(state.read(name).any() for state, name in seqs.named_states)
        found.append([int(decoder.prefill(prompt, seqs=seqs).argmax())])
        sequences.append(seqs)
    for _ in range(3):
        for tokens, seqs in zip(found, sequences, strict=True):
            logits, _ = decoder.step(seqs, [tokens[-1:]])
            tokens.append(int(logits[0].argmax()))
    assert found == expected


@pytest.mark.matrix(2, wide=3)
def test_states_read_and_written_back_change_nothing(decoder):
    taken(decoder, IDS[:21])
    held = [state.read(name) for state, name in decoder.seqs.named_states]
    expected = decoder.decode_one_token(4)
    decoder.begin()
    for (state, name), value in zip(decoder.seqs.named_states, held, strict=True):
        state.write(name, value)
    decoder.seqs.append([IDS[:21]])
    assert np.array_equal(decoder.decode_one_token(4), expected)


@pytest.mark.matrix(1, wide=4)
def test_a_refused_snapshot_leaves_the_running_sequence_as_it_is(decoder, together):
    snapshot = taken(decoder, IDS[:12])
    name = next(iter(snapshot.states))
    foreign = replace(snapshot, identity="f" * 64)
    misshapen = [
        replace(snapshot, states=snapshot.states | {name: snapshot.states[name][:1]}),
        replace(
            snapshot, states={n: v for n, v in snapshot.states.items() if n != name}
        ),
    ]
    for each in (decoder, together):
        rows = [IDS[:5]] if each is decoder else [IDS[:5], IDS[5:9], IDS[9:11]]
        each.begin()
        each.prefill(rows)
        before = [each.snapshot(slot) for slot in range(len(rows))]
        for refused in (
            partial(each.add, 0, foreign),
            partial(each.begin, [foreign] + [None] * (len(rows) - 1)),
            partial(each.begin, [None] * (len(rows) + 1)),
            *(partial(each.add, 0, m) for m in misshapen),
        ):
            with pytest.raises(
                InputError, match="identity|for each sequence|another shape"
            ):
                refused()
        assert all(same(each.snapshot(slot), held) for slot, held in enumerate(before))


def test_slots_come_and_go_and_the_others_do_not_notice(decoder, together):
    """A slot is added to, emptied, ended early: every other row stays bit-equal, and each goes on
    as it would alone."""
    prompts = [IDS[:30], IDS[40:49], IDS[60:83]]
    held = [taken(decoder, p) for p in prompts]
    alone = [decoder.generate([7], 5, after=s, stop=()) for s in held]
    assert together.generate([[7]] * 3, 5, after=held, stop=()) == alone
    assert together.generate([[7]] * 3, [5, 1, 3], after=held, stop=()) == [
        alone[0],
        alone[1][:1],
        alone[2][:3],
    ]
    order = [2, 0, 1]
    assert together.generate([[7]] * 3, 5, after=[held[i] for i in order], stop=()) == [
        alone[i] for i in order
    ]
    together.begin([held[0], None, held[2]])
    before = [together.snapshot(s) for s in (0, 2)]
    together.add(1, held[1])
    assert all(
        same(together.snapshot(s), b) for s, b in zip((0, 2), before, strict=True)
    )
    assert same(together.snapshot(1), held[1])
    tokens = [7, 7, 7]
    for step in range(3):
        logits = together.decode_one_token(tokens)
        tokens = [
            None if t is None else int(row.argmax())
            for t, row in zip(tokens, logits, strict=True)
        ]
        assert [t for t in tokens if t is not None] == [
            a[step] for a, t in zip(alone, tokens, strict=True) if t is not None
        ]
        if step == 0:
            together.remove(1)
            tokens[1] = None
    assert together.seqs.offsets.tolist() == [33, 0, 26]
    assert not any(s.read(name)[1].any() for s, name in together.seqs.named_states)


def test_a_row_does_not_know_its_mates(decoder, together):
    held = [taken(decoder, IDS[a:b]) for a, b in ((0, 20), (20, 61), (70, 75))]
    found = []
    for mates in ((0, 1), (2, 0), (None, None)):
        together.begin([held[1], *(None if m is None else held[m] for m in mates)])
        found.append([together.decode_one_token([t, 9 + t, 3])[0] for t in (1, 2)])
    assert all(
        close(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True)
    )


def test_what_a_slot_held_before_does_not_reach_the_next_sequence(together):
    together.begin()
    fresh = together.prefill([IDS[:6], IDS[:9], IDS[:4]])
    rng = np.random.default_rng(0)
    for state, name in together.seqs.named_states:
        if is_cache(name):
            signs = np.sign(rng.standard_normal(state.read(name).shape))
            state.write(name, 16 * signs.astype(np.float32))
    for slot in range(3):
        together.remove(slot)
    assert np.array_equal(together.prefill([IDS[:6], IDS[:9], IDS[:4]]), fresh)


def test_empty_slots_stay_empty(decoder, together):
    with pytest.raises(
        InputError, match="no token.*at least one token, whose logits give the next one"
    ):
        together.generate([[5], [], []], 1, after=[None, taken(decoder, IDS[:3]), None])
    tokens = together.generate([IDS[:8], [], IDS[8:10]], 3, stop=())
    assert tokens[1] == [] and tokens[0] == decoder.generate(IDS[:8], 3, stop=())
    assert together.seqs.offsets.tolist() == [10, 0, 4]
    assert together.snapshot(1).offset == 0 and not any(
        v.any() for v in together.snapshot(1).states.values()
    )


def test_merged_and_taken_apart_every_sequence_is_bit_equal(exports):
    checkpoint = exports.checkpoint("zaya", num_hidden_layers=1, num_experts=2)
    together = exports.decoder(checkpoint, batch=4, max_seq_len=1100)
    rng = np.random.default_rng(0)
    for lengths in ((0, 1, 255, 256), (257, 1023, 1024, 0), (1, 1, 1024, 257)):
        held = []
        for n in lengths:
            seqs = together.fresh()
            seqs.append([rng.integers(0, 109, n).tolist(), [], [], []])
            states = {
                name: rng.standard_normal(value.shape).astype(np.float32)
                for name, value in take(seqs).states.items()
            }
            held.append(replace(take(seqs), states=states))
        together.begin(held)
        assert all(same(together.snapshot(slot), s) for slot, s in enumerate(held))
        together.begin([None] * 4)
        for slot in (2, 0, 3, 1):
            together.add(slot, held[slot])
        assert all(same(together.snapshot(slot), s) for slot, s in enumerate(held))


def test_steps_of_256_are_nothing_special(exports):
    """Snapshots of 255, 256 and 257 tokens go on, alone and merged, as an uninterrupted sequence
    does."""
    checkpoint = exports.checkpoint("llama", num_hidden_layers=1, vocab_size=53)
    alone, together = (
        exports.decoder(checkpoint, max_seq_len=320, tokens="1-64", **b)
        for b in ({}, {"batch": 4})
    )
    ids = tiny.prompt(53, 300)
    expected = tiny.chained(alone, ids[:262], [64])
    held = [taken(alone, ids[:n]) for n in (255, 256, 257, 17)]
    together.begin(held)
    rows = [ids[n : n + 3] for n in (255, 256, 257, 17)]
    found = together.prefill(rows)
    for slot, n in enumerate((255, 256, 257, 17)):
        assert close(found[slot], expected[n + 2])


def test_sequences_end_at_their_own_stop_tokens_and_limits(decoder, together):
    alone = [decoder.generate(IDS[a : a + 9], 6, stop=()) for a in (0, 20, 40)]
    stop, limits = [alone[1][2], alone[2][0]], [6, 6, 4]
    found = together.generate([IDS[a : a + 9] for a in (0, 20, 40)], limits, stop=stop)
    for tokens, own, limit in zip(found, alone, limits, strict=True):
        ends = [i + 1 for i, token in enumerate(own) if token in stop]
        assert tokens == own[: min([*ends, limit])]
