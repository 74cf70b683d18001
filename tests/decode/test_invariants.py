"""A KV cache that is kept, on trained Llama, Qwen 2, Gemma 3 (rings that wrap) and ZAYA: any
split of a prompt, snapshots, batches and refusals. `programs` combines them at random."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import tiny
import trained
from circle import all_wide

from workbench import InputError
from workbench.bundle.names import is_cache
from workbench.decode import Snapshot

CLOSE = 1e-5  # exact arithmetic, other tiles or batches: kernels sum in another order
IDS = np.random.default_rng(7).integers(3, 256, trained.S).tolist()
RINGS_AND_TAILS = "tiny-gemma3", "tiny-zaya"
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
    equal = a.ids == b.ids and a.states.keys() == b.states.keys()
    return equal and all(np.array_equal(v, b.states[n]) for n, v in a.states.items())


def close(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two states are near each other; those without a token are equal."""
    return np.array_equal(a, b) or tiny.relative(a, b) < CLOSE


@pytest.mark.matrix(6, wide=8)
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 79, 80, 100])
def test_a_snapshot_continues_as_if_it_had_never_stopped(decoder, length):
    """Detached: neither decoding on nor another sequence changes what it holds."""
    more = IDS[length : length + 3]
    snapshot = taken(decoder, IDS[:length])
    held = replace(snapshot, states={n: v.copy() for n, v in snapshot.states.items()})
    uninterrupted = [decoder.decode_one_token(t) for t in more]
    ended = decoder.snapshot()
    for name, value in snapshot.states.items():  # the logical prefix, nothing else
        assert not is_cache(name) or value.shape[1] <= length
    decoder.begin()
    decoder.prefill(IDS[::-1][:5])
    decoder.begin(snapshot)
    for token, logits in zip(more, uninterrupted, strict=True):
        assert np.array_equal(decoder.decode_one_token(token), logits)
    assert same(decoder.snapshot(), ended) and same(snapshot, held)


@pytest.mark.parametrize("length, depth", [(79, 79), (80, trained.T_MAX)])
def test_a_ring_that_has_wrapped_goes_back_a_call_and_no_further(
    exports, length, depth
):
    decoder = trained.decoder(exports, "tiny-gemma3")
    snapshot = taken(decoder, IDS[:length])
    refused = f"{depth + 1} to undo; needs at most {depth}"
    for trim in (decoder.trim, snapshot.trim) if depth < length else ():
        with pytest.raises(InputError, match=refused):
            trim(depth + 1)
    assert decoder.seqs.offsets.tolist() == [length]
    assert same(decoder.snapshot(), snapshot)
    assert decoder.trim(depth) == depth
    assert same(decoder.snapshot(), snapshot.trim(depth))
    again = decoder.prefill(IDS[length - depth : length])
    decoder.begin()
    assert close(again, decoder.prefill(IDS[:length]))


@pytest.mark.matrix(2, wide=3)
def test_a_sequence_fits_to_its_last_slot_and_no_further(decoder):
    snapshot = taken(decoder, IDS[: trained.S - 2])
    assert len(decoder.generate(IDS[:1], 2, after=snapshot, stop=())) == 2
    for ids, new in ((IDS[:1], 3), (IDS[:3], 1)):
        with pytest.raises(InputError, match=f"below max_seq_len = {trained.S}"):
            decoder.generate(ids, new, after=snapshot, stop=())
    decoder.begin(snapshot)
    before = decoder.snapshot()
    with pytest.raises(InputError, match=f"max_seq_len = {trained.S}"):
        decoder.prefill(IDS[:3])
    assert same(decoder.snapshot(), before)
    decoder.prefill(IDS[:2])
    with pytest.raises(InputError, match=f"position {trained.S}"):
        decoder.decode_one_token(1)
    with pytest.raises(InputError, match="0. tokens"):
        decoder.generate([[]], 1, after=snapshot)


@pytest.mark.matrix(1, wide=4)
def test_a_refused_snapshot_leaves_the_running_sequence_as_it_is(decoder, together):
    snapshot = taken(decoder, IDS[:12])
    foreign = replace(snapshot, identity="f" * 64)
    rows = [IDS[:5], IDS[5:9], IDS[9:11]]
    together.begin()
    together.prefill(rows)
    before = [together.snapshot(slot) for slot in range(len(rows))]
    for refused in (
        partial(together.add, 0, foreign),
        partial(together.begin, [foreign, None, None]),
        partial(together.begin, [None] * 4),
    ):
        with pytest.raises(InputError, match="identity|for each seq"):
            refused()
    assert all(same(together.snapshot(slot), held) for slot, held in enumerate(before))


def test_slots_come_and_go_and_the_others_do_not_notice(decoder, together):
    """Each goes on as it would alone; `programs` adds and removes between calls."""
    prompts = [IDS[:30], IDS[40:49], IDS[60:83]]
    held = [taken(decoder, p) for p in prompts]
    alone = [decoder.generate([7], 5, after=s, stop=()) for s in held]
    found = together.generate([[7]] * 3, [5, 1, 3], after=held, stop=())
    assert found == [alone[0], alone[1][:1], alone[2][:3]]
    order = [2, 0, 1]
    mixed = [held[i] for i in order]
    found = together.generate([[7]] * 3, 5, after=mixed, stop=())
    assert found == [alone[i] for i in order]
    found = together.generate([[7]] * 3, 5, after=held[0], stop=())
    assert found == [alone[0]] * 3
    together.begin([held[0], None, held[2]])
    together.add(1, held[1])
    assert all(same(together.snapshot(seq), held[seq]) for seq in range(3))
    together.remove(1)
    assert together.seqs.offsets.tolist() == [30, 0, 23]
    assert not any(s.read(name)[1].any() for s, name in together.seqs.named_states)


def test_sequences_end_at_their_own_stop_tokens_and_limits(decoder, together):
    prompts = [IDS[a : a + 9] for a in (0, 20, 40)]
    alone = [decoder.generate(prompt, 6, stop=()) for prompt in prompts]
    stop, limits = [alone[1][2], alone[2][0]], [6, 6, 4]
    found = together.generate(prompts, limits, stop=stop)
    for tokens, own, limit in zip(found, alone, limits, strict=True):
        ends = [i + 1 for i, token in enumerate(own) if token in stop]
        assert tokens == own[: min([*ends, limit])]
