import gc
import weakref

import numpy as np
import pytest
import tiny
from circle import all_wide, wide
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workbench import Decoder, InputError
from workbench.bundle.names import is_cache

FAMILIES = list(tiny.DIMS)
S = 96
SOME = settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, exports):
    """A family's decoder (exact), its Hugging Face model and a prompt's golden."""
    checkpoint = exports.checkpoint(request.param)
    decoder, model = exports.decoder(checkpoint, max_seq_len=S), exports.hf(checkpoint)
    return decoder, model, tiny.golden(model, tiny.prompt(decoder.manifest.dims.V, 21))


@pytest.mark.parametrize("sizes", [[1, 4, 2, 3], *all_wide([1], [2], [3], [4])])
def test_logits_equal_hugging_face_whatever_the_tiling(family, sizes):
    decoder, _, g = family
    logits = tiny.chained(decoder, g.ids, sizes)
    # DeltaNet solves for what a call's tokens change in one another by three or more products
    limit = 5e-6 if decoder.manifest.family == "qwen3_5_text" else 2e-6
    assert tiny.relative(logits, g.logits) < limit
    assert tiny.cosine(logits, g.logits) > 0.999999


@pytest.mark.parametrize(
    "sizes, width", [([1, 3, 2], 4), wide([1], None), wide([2], None), wide([4], None)]
)
def test_each_layer_alone_updates_and_remembers_as_hugging_face_does(
    family, sizes, width
):
    """With a width, every call has dummy columns of garbage, which must not enter any state."""
    decoder, _, g = family
    for layer in range(decoder.manifest.dims.L):
        assert (
            tiny.cosine(
                tiny.isolated(decoder, layer, g, sizes, width), g.updates[layer]
            )
            > 0.999999
        )


def test_fp16_arithmetic_stays_close(family):
    decoder, _, g = family
    declared = Decoder(decoder.bundle, "portable", "declared", fast=True)
    for layer in range(decoder.manifest.dims.L):
        for sizes in ([1], [4, 3]):
            assert (
                tiny.cosine(
                    tiny.isolated(declared, layer, g, sizes, tolerance=5e-3),
                    g.updates[layer],
                )
                > 0.999
            )
    assert tiny.cosine(tiny.chained(declared, g.ids, [4]), g.logits) > 0.999


@pytest.mark.matrix(3, wide=12)
def test_64_greedy_tokens_equal_hugging_face(family):
    import torch

    decoder, model, g = family
    ids = g.ids[:7]
    expected = model.generate(
        torch.tensor([ids]),
        max_new_tokens=64,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0, 7:]
    assert decoder.generate(ids, 64, stop=[]) == expected.tolist()


@pytest.mark.matrix(3, wide=12)
def test_stream_twice_gives_the_same_and_stops_at_a_stop_token(family):
    decoder, _, g = family
    tokens = decoder.generate(g.ids[:5], 8, stop=[])
    assert decoder.generate(g.ids[:5], 8, stop=[]) == tokens
    first = tokens.index(tokens[3])
    assert decoder.generate(g.ids[:5], 8, stop=[tokens[3]]) == tokens[: first + 1]


@pytest.mark.matrix(6, wide=9)
@SOME
@given(before=st.integers(0, S - 4), count=st.integers(1, 4))
def test_a_call_writes_exactly_its_own_rows(family, before, count):
    decoder, _, _ = family
    seqs = decoder.fresh()
    noise = np.random.default_rng(before).standard_normal
    for state, name in seqs.named_states:
        shape = state.shard.states[name].shape
        state.write(name, noise(shape).astype(np.float32))
    old = [{n: s.read(n) for n in s.shard.states if is_cache(n)} for s in seqs.states]
    seqs.ids = [[0] * before]
    decoder.advance(seqs, [[1] * count], T=4)  # columns past `count` are dummies
    touched = slice(before, before + count)
    for state, held in zip(seqs.states, old, strict=True):
        for name in held:
            new = state.read(name)
            assert (new[:, :, touched] != held[name][:, :, touched]).any(-1).all()
            assert np.array_equal(
                np.delete(new, np.r_[touched], 2),
                np.delete(held[name], np.r_[touched], 2),
            )


@pytest.mark.matrix(3, wide=12)
def test_a_position_past_the_cache_is_refused_before_anything_is_written(family):
    decoder, _, g = family
    decoder.begin()
    decoder.prefill(g.ids)
    before = [s.read(n) for s, n in decoder.seqs.named_states]
    with pytest.raises(InputError, match=f"max_seq_len = {S}"):
        decoder.prefill([1] * (S - 20))
    assert decoder.seqs.offsets.tolist() == [21]
    after = [s.read(n) for s, n in decoder.seqs.named_states]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    decoder.prefill([1] * (S - 21))
    with pytest.raises(InputError, match=f"position {S}"):
        decoder.decode_one_token(1)
    with pytest.raises(InputError, match=f"at most max_seq_len = {S}"):
        decoder.generate(g.ids, S - 19)


@pytest.mark.parametrize(
    "ids, found",
    [([], "0 tokens|\\[\\]"), ([[1], [2]], "2 sequences"), ([97], "97"), ([-1], "ids")],
)
def test_unusable_prompts_are_refused(exports, ids, found):
    with pytest.raises(InputError, match=found):
        exports.decoder(exports.checkpoint("llama"), max_seq_len=S).prefill(ids)


def state_of(decoder):
    return (
        [list(ids) for ids in decoder.seqs.ids],
        [s.read(n) for s, n in decoder.seqs.named_states],
    )


@pytest.mark.matrix(8, wide=20)
@pytest.mark.parametrize(
    "call, found",
    [
        (
            lambda d: d.decode_one_token(97),
            "token id: found 97; needs ids from 0 to 96",
        ),
        (lambda d: d.decode_one_token(-1), "-1"),
        (lambda d: d.decode_one_token(1.7), "1.7"),
        (lambda d: d.decode_one_token("5"), "'5'"),
        (lambda d: d.decode_one_token([1, 2]), "2 of them"),
        (lambda d: d.decode_one_token([]), "0 of them"),
        (lambda d: d.prefill([1.5, 2.7]), "1.5"),
        (lambda d: d.generate([1, 2], -1), "new tokens: found -1"),
        (lambda d: d.generate([1, 2], 1.5), "new tokens: found 1.5"),
        (lambda d: d.trim(-1), "tokens to trim: found -1"),
        (lambda d: d.snapshot().trim(-1), "tokens to trim: found -1"),
        (lambda d: d.trim(1, seq=1), "sequence: found 1"),
        (lambda d: d.snapshot(1), "sequence: found 1"),
        (lambda d: d.snapshot(-1), "sequence: found -1"),
        (lambda d: d.remove(-1), "sequence: found -1"),
        (lambda d: d.add(1, d.snapshot()), "sequence: found 1"),
    ],
)
def test_what_cannot_be_meant_is_refused_and_changes_nothing(exports, call, found):
    decoder = exports.decoder(exports.checkpoint("llama"), max_seq_len=S)
    decoder.begin()
    decoder.prefill([3, 14, 15, 9, 2, 6])
    before = state_of(decoder)
    with pytest.raises(InputError, match=found):
        call(decoder)
    after = state_of(decoder)
    assert before[0] == after[0]
    assert all(np.array_equal(a, b) for a, b in zip(before[1], after[1], strict=True))


def test_whole_numbers_of_numpy_are_token_ids_and_no_new_token_is_none(exports):
    decoder = exports.decoder(exports.checkpoint("llama"), max_seq_len=S)
    assert decoder.generate(
        np.array([3, 14, 15]), np.int64(2), stop=()
    ) == decoder.generate([3, 14, 15], 2, stop=())
    assert np.isfinite(decoder.decode_one_token(np.int32(5))).all()
    assert decoder.generate([3, 14, 15], 0) == []


def test_two_streams_of_a_decoder_do_not_mix(exports):
    decoder = exports.decoder(exports.checkpoint("llama"), max_seq_len=S)
    prompts = [3, 14, 15], [50, 60, 70]
    streams = [decoder.stream(ids, 4, stop=()) for ids in prompts]
    pairs = list(zip(*streams, strict=True))
    for ids, records in zip(prompts, zip(*pairs), strict=True):
        tokens = [record.token for record in records]
        assert tokens == decoder.generate(ids, 4, stop=())


@pytest.mark.matrix(1, wide=1)
@pytest.mark.parametrize(
    "family_name, changed", [("llama", {}), ("zaya", {"num_experts": 2})]
)
def test_a_batch_at_different_positions_decodes_as_each_sequence_alone(
    exports, family_name, changed
):
    checkpoint = exports.checkpoint(
        family_name, num_hidden_layers=1, vocab_size=53, **changed
    )
    options = {"max_seq_len": 320, "tokens": "1-64"}
    together, alone = (
        exports.decoder(checkpoint, batch=4, **options),
        exports.decoder(checkpoint, **options),
    )
    prompts = [tiny.prompt(53, n, seed=n) for n in (0, 1, 255, 256)]
    together.begin()
    together.prefill(prompts)
    assert together.seqs.offsets.tolist() == [0, 1, 255, 256]
    tokens, produced = [5, 6, 7, 8], []
    for _ in range(3):
        produced.append(together.decode_one_token(tokens))
        tokens = produced[-1].argmax(-1).tolist()
    for slot, ids in enumerate(prompts):
        alone.begin()
        if ids:
            alone.prefill(ids)
        token = [5, 6, 7, 8][slot]
        for logits in produced:
            expected = alone.decode_one_token(token)
            assert tiny.relative(logits[slot], expected) < 1e-5
            token = int(expected.argmax())
            assert int(logits[slot].argmax()) == token
        states = together.seqs.states, alone.seqs.states
        for state, single in zip(*states, strict=True):
            for name in state.shard.states:
                np.testing.assert_allclose(
                    state.read(name)[slot], single.read(name)[0], atol=1e-5
                )


def test_the_literal_graph_runs_unless_fast_is_asked_for(exports):
    decoder = Decoder(exports.bundle(exports.checkpoint("llama")), "portable")
    assert not decoder.fast and not any(
        model.fast for model in decoder.layers + decoder.heads
    )


def test_a_stream_continues_the_running_sequences(exports):
    decoder, one_by_one = (
        exports.decoder(exports.checkpoint("llama"), batch=2, max_seq_len=S)
        for _ in range(2)
    )
    prompts = [[3, 14, 15], [9, 2]]
    for each in (decoder, one_by_one):
        each.begin()
        each.prefill(prompts)
    records = list(decoder.stream([[5], [6]], [3, 1], after=decoder.seqs, stop=()))
    assert [r.seq for r in records] == [0, 1, 0, 0]
    tokens, logits = [5, 6], []
    for _ in range(3):
        rows = one_by_one.decode_one_token(tokens)
        logits.append(rows[0])
        tokens = [int(rows[0].argmax()), None]
    assert all(
        np.array_equal(r.logits, row)
        for r, row in zip([r for r in records if not r.seq], logits, strict=True)
    )
    assert decoder.seqs.ids[0][:4] == [3, 14, 15, 5]
    assert decoder.seqs.ids[1] == [9, 2, 6]
    before = state_of(decoder)
    with pytest.raises(InputError, match=f"at most max_seq_len = {S}"):
        next(decoder.stream([[5], []], S - 5, after=decoder.seqs))
    assert state_of(decoder)[0] == before[0]


@pytest.mark.parametrize(
    ("family", "options"), [("qwen2", {}), ("zaya", {"moe": "routed"})]
)
def test_a_decoder_that_is_dropped_gives_its_memory_back_at_once(
    exports, family, options
):
    bundle = exports.bundle(exports.checkpoint(family), **options)
    for fast in (True, False):
        # compiling leaves its own cycles behind
        Decoder(bundle, "portable", fast=fast).generate([1, 2, 3], 3, stop=())
        decoder = Decoder(bundle, "portable", fast=fast)
        decoder.generate([1, 2, 3], 3, stop=())
        held = [
            weakref.ref(made) for m in decoder.layers for made in m.executables.values()
        ]
        gc.disable()
        try:
            del decoder
            assert not any(alive() for alive in held)
        finally:
            gc.enable()
