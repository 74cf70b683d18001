import gc
import weakref
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import tiny
import torch
from circle import wide
from refusal import refused

from workbench import Decoder
from workbench.decode import Snapshot

S = 32  # rows of the caches of all bundles here


@pytest.fixture(scope="module", params=list(tiny.DIMS))
def family(request, exports):
    """A family's checkpoint, its decoder (exact), and a prompt's golden."""
    checkpoint = exports.checkpoint(request.param)
    return checkpoint, exports.decoder(checkpoint), exports.golden(checkpoint, 21)


@pytest.fixture
def llama(exports):
    return exports.decoder("llama")


@pytest.mark.parametrize("width", [0, 4])
@pytest.mark.parametrize("sizes", [[1, 4, 2, 3], *map(wide, ([1], [2], [3], [4]))])
def test_logits_equal_hugging_face_whatever_the_tiling(family, sizes, width):
    """With a width, calls have dummy columns, whose garbage must not enter any state."""
    _, decoder, g = family
    # DeltaNet solves for what a call's tokens change in one another by three or more products
    limit = 5e-6 if decoder.manifest.family == "qwen3_5_text" else 2e-6
    assert tiny.logits_error(decoder, g, *sizes, width=width) < limit


def test_fp16_arithmetic_stays_close(family):
    _, decoder, g = family
    declared = Decoder(decoder.bundle, "portable", "declared", fast=True)
    for sizes in ([1], [4, 3]):
        assert tiny.logits_error(declared, g, *sizes) < 1.5e-2


@pytest.mark.matrix(1, wide=4)
def test_64_greedy_tokens_equal_hugging_face(family, exports):
    checkpoint, _, g = family
    decoder, ids = exports.decoder(checkpoint, max_seq_len=96), g.ids[:7]
    how = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    model = exports.hf(checkpoint)
    expected = model.generate(torch.tensor([ids]), max_new_tokens=64, **how)
    assert decoder.generate(ids, 64, stop=[]) == expected[0, 7:].tolist()


def state_of(decoder) -> tuple[list, list]:
    states = [state.read(name) for state, name in decoder.seqs.named_states]
    return [list(ids) for ids in decoder.seqs.ids], states


def foreign(decoder) -> Snapshot:
    """A snapshot of another bundle."""
    return replace(decoder.snapshot(), identity="f" * 64)


@pytest.mark.matrix(7, wide=8)
@pytest.mark.parametrize(
    "call, found",
    [
        (lambda d: d.decode_one_token(97), "token id: found 97; needs .* 0 to 96"),
        (lambda d: d.prefill([]), "0 tokens|\\[\\]"),
        (lambda d: d.prefill([[1], [2]]), "2 sequences"),
        (lambda d: d.prefill([1], tile=-1), "tile: found -1"),
        (lambda d: d.decode_one_token(1.7), "1.7"),
        (lambda d: d.decode_one_token([1, 2]), "2 sequences of"),
        (lambda d: d.generate([1, 2], -1), "new tokens: found -1"),
        (lambda d: d.trim(-1), "tokens to trim: found -1"),
        (lambda d: d.trim(1, seq=1), "sequence: found 1"),
        (lambda d: d.snapshot(-1), "sequence: found -1"),
        (lambda d: d.add(1, d.snapshot()), "sequence: found 1"),
        (lambda d: d.add(0, foreign(d)), "identity"),
        (lambda d: d.begin(foreign(d)), "identity"),
        (lambda d: d.begin([None] * 2), "a value for each sequence"),
        (lambda d: d.advance(d.seqs, [[1] * 5]), "5 tokens.*t_max = 4"),
        (lambda d: d.advance(d.seqs, [[1]], T=5), "5 tokens.*t_max = 4"),
    ],
)
def test_what_cannot_be_meant_is_refused_and_changes_nothing(llama, call, found):
    llama.prefill([3, 14, 15, 9, 2, 6])
    ids, states = state_of(llama)
    with refused(found):
        call(llama)
    left, after = state_of(llama)
    assert left == ids and all(map(np.array_equal, states, after))


@pytest.mark.parametrize("family, goes_on", [("llama", True), ("lfm2", False)])
def test_after_an_interrupted_call_a_recurrent_state_is_refused(
    exports, monkeypatch, family, goes_on
):
    """Jupyter's stop button between two shards. Rows of a cache are written again."""
    decoder = exports.decoder(family)
    decoder.prefill([3, 14, 15])
    before, run = decoder.snapshot(), decoder.run_calls
    expected = decoder.decode_one_token(9)
    decoder.begin(before)

    def stopped(model, *about):
        if model is decoder.layers[1]:
            raise KeyboardInterrupt
        return run(model, *about)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(decoder, "run_calls", stopped)
        decoder.prefill([9, 2])
    step = partial(decoder.decode_one_token, 9)
    for use in () if goes_on else (step, decoder.snapshot, partial(decoder.trim, 1)):
        with refused("sequence 0: found .*interrupted call.*begin again"):
            use()
        assert decoder.seqs.ids == [[3, 14, 15]]
    if not goes_on:
        decoder.add(0, before)
    with refused("5 tokens"):  # before anything runs
        decoder.advance(decoder.seqs, [[1] * 5])
    assert np.array_equal(step(), expected)


def test_two_streams_of_a_decoder_do_not_mix(llama):
    prompts = [3, 14, 15], [50, 60, 70]
    pairs = zip(*(llama.stream(ids, 4, stop=()) for ids in prompts), strict=True)
    for ids, records in zip(prompts, zip(*pairs), strict=True):
        tokens = [record.token for record in records]
        assert tokens == llama.generate(ids, 4, stop=())


def test_a_stream_continues_snapshots_of_running_sequences(exports):
    decoder, one_by_one = (exports.decoder("llama", batch=2) for _ in range(2))
    for each in (decoder, one_by_one):
        each.prefill([[3, 14, 15], [9, 2]])
    after = [decoder.snapshot(seq) for seq in range(2)]
    records = list(decoder.stream([[5], [6]], [3, 1], after=after, stop=()))
    assert [r.seq for r in records] == [0, 1, 0, 0]
    tokens = [5, 6]
    for record in (record for record in records if not record.seq):
        logits = one_by_one.decode_one_token(tokens)[0]
        assert np.array_equal(record.logits, logits)
        tokens = [int(logits.argmax()), None]
    assert decoder.seqs.ids[0][:4] == [3, 14, 15, 5]
    assert decoder.seqs.ids[1] == [9, 2, 6]
    before, _ = state_of(decoder)
    with refused(f"below max_seq_len = {S}"):
        next(decoder.stream([[5], [6]], S - 2, after=after))
    assert state_of(decoder)[0] == before


@pytest.mark.parametrize(
    ("family", "options"), [("qwen2", {}), wide("zaya", {"moe": "routed"})]
)
def test_a_decoder_that_is_dropped_gives_its_memory_back_at_once(
    exports, family, options
):
    bundle = exports.bundle(family, **options)
    for fast in (True, False):
        # compiling leaves its own cycles behind
        Decoder(bundle, "portable", fast=fast).generate([1, 2, 3], 3, stop=())
        decoder = Decoder(bundle, "portable", fast=fast)
        decoder.generate([1, 2, 3], 3, stop=())
        made = [each for m in decoder.layers for each in m.executables.values()]
        held = list(map(weakref.ref, made))
        gc.disable()
        try:
            del decoder, made
            assert not any(alive() for alive in held)
        finally:
            gc.enable()
