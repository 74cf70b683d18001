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
S = 32  # rows of the caches of all bundles here
SOME = settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, exports):
    """A family's decoder (exact), its Hugging Face model and a prompt's golden."""
    checkpoint = exports.checkpoint(request.param)
    decoder, model = exports.decoder(checkpoint), exports.hf(checkpoint)
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
    for sizes in ([1], [4, 3]):
        assert tiny.cosine(tiny.chained(declared, g.ids, sizes), g.logits) > 0.999


@pytest.mark.matrix(1, wide=4)
def test_64_greedy_tokens_equal_hugging_face(family, exports):
    import torch

    short, model, g = family
    checkpoint = exports.checkpoint(short.manifest.family)
    decoder, ids = exports.decoder(checkpoint, max_seq_len=96), g.ids[:7]
    expected = model.generate(
        torch.tensor([ids]),
        max_new_tokens=64,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0, 7:]
    assert decoder.generate(ids, 64, stop=[]) == expected.tolist()


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
            "token id: found 97; needs a whole number from 0 to 96",
        ),
        (lambda d: d.prefill([]), "0 tokens|\\[\\]"),
        (lambda d: d.prefill([[1], [2]]), "2 sequences"),
        (lambda d: d.prefill([97]), "97"),
        (lambda d: d.decode_one_token(-1), "-1"),
        (lambda d: d.decode_one_token(1.7), "1.7"),
        (lambda d: d.decode_one_token([1, 2]), "2 sequences of"),
        (lambda d: d.generate([1, 2], -1), "new tokens: found -1"),
        (lambda d: d.trim(-1), "tokens to trim: found -1"),
        (lambda d: d.snapshot().trim(-1), "tokens to trim: found -1"),
        (lambda d: d.trim(1, seq=1), "sequence: found 1"),
        (lambda d: d.snapshot(-1), "sequence: found -1"),
        (lambda d: d.add(1, d.snapshot()), "sequence: found 1"),
    ],
)
def test_what_cannot_be_meant_is_refused_and_changes_nothing(exports, call, found):
    decoder = exports.decoder(exports.checkpoint("llama"))
    decoder.begin()
    decoder.prefill([3, 14, 15, 9, 2, 6])
    before = state_of(decoder)
    with pytest.raises(InputError, match=found):
        call(decoder)
    after = state_of(decoder)
    assert before[0] == after[0]
    assert all(np.array_equal(a, b) for a, b in zip(before[1], after[1], strict=True))


def test_two_streams_of_a_decoder_do_not_mix(exports):
    decoder = exports.decoder(exports.checkpoint("llama"))
    prompts = [3, 14, 15], [50, 60, 70]
    streams = [decoder.stream(ids, 4, stop=()) for ids in prompts]
    pairs = list(zip(*streams, strict=True))
    for ids, records in zip(prompts, zip(*pairs), strict=True):
        tokens = [record.token for record in records]
        assert tokens == decoder.generate(ids, 4, stop=())


def test_a_stream_continues_the_running_sequences(exports):
    decoder, one_by_one = (
        exports.decoder(exports.checkpoint("llama"), batch=2) for _ in range(2)
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
    with pytest.raises(InputError, match=f"below max_seq_len = {S}"):
        next(decoder.stream([[5], []], S - 5, after=decoder.seqs))
    assert state_of(decoder)[0] == before[0]


@pytest.mark.parametrize(
    ("family", "options"), [("qwen2", {}), wide("zaya", {"moe": "routed"})]
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


@pytest.mark.shim
def test_core_ml_s_hints_reach_every_shard(llama_bundle):
    hints = {"reshapeFrequency": "Infrequent"}
    decoder = Decoder(llama_bundle, "stand-in", hints=hints)
    shards = [*decoder.layers, *decoder.heads]
    assert [list(model.hints) for model in shards] == [list(hints)] * len(shards)


def test_a_call_of_more_than_t_max_tokens_is_refused_and_changes_nothing(exports):
    decoder = exports.decoder(exports.checkpoint("llama"))
    seqs, most = decoder.fresh(), decoder.options.t_max
    for chunk, T in (([[1] * (most + 1)], 0), ([[1]], most + 1)):
        with pytest.raises(InputError, match=f"{most + 1} tokens.*t_max = {most}"):
            decoder.advance(seqs, chunk, T=T)
    assert seqs.ids == [[]] and not any(s.read(n).any() for s, n in seqs.named_states)
