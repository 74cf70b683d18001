import gc
import weakref
from dataclasses import replace
from functools import partial
from unittest import mock

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
def test_logits_equal_hugging_face_whatever_the_tiling(family, sizes, width, exports):
    """A call of a larger width has dummy columns, whose garbage must not enter any state."""
    checkpoint, decoder, g = family
    # DeltaNet solves for the mutual changes of a call's tokens by three or more products
    limit = 5e-6 if decoder.manifest.family == "qwen3_5_text" else 2e-6
    limit = tiny.exact_limit(exports.hf(checkpoint), g, limit)
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
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    model = exports.hf(checkpoint)
    expected = model.generate(torch.tensor([ids]), max_new_tokens=64, **settings)
    assert decoder.generate(ids, 64, stop=[]) == expected[0, 7:].tolist()


def state_of(decoder) -> tuple[list, list]:
    """The tokens and the states of the current sequences."""
    states = [state.read(name) for state, name in decoder.seqs.named_states]
    return [list(ids) for ids in decoder.seqs.ids], states


def of_another_bundle(decoder) -> Snapshot:
    """A snapshot of the decoder, with the identity of a decoder of another bundle."""
    return replace(decoder.snapshot(), identity="f" * 64)


@pytest.mark.matrix(8, wide=9)
@pytest.mark.parametrize(
    "call, message",
    [
        (lambda d: d.decode_one_token(97), "token id: found 97; needs .* 0 to 96"),
        (lambda d: d.prefill([]), "0 tokens|\\[\\]"),
        (lambda d: d.prefill([[1], [2]]), "2 sequences"),
        (lambda d: d.prefill([1], tile=-1), "tile: found -1"),
        (lambda d: d.decode_one_token(1.7), "1.7"),
        (lambda d: d.decode_one_token([1, 2]), "2 sequences of"),
        (lambda d: d.generate([1, 2], -1), "new tokens: found -1"),
        (lambda d: d.generate([1], S + 1), f"below max_seq_len = {S}"),
        (lambda d: d.trim(-1), "tokens to trim: found -1"),
        (lambda d: d.trim(1, seq=1), "sequence: found 1"),
        (lambda d: d.snapshot(-1), "sequence: found -1"),
        (lambda d: d.add(1, d.snapshot()), "sequence: found 1"),
        (lambda d: d.add(0, of_another_bundle(d)), "identity"),
        (lambda d: d.begin(of_another_bundle(d)), "identity"),
        (lambda d: d.begin([None] * 2), "a value for each sequence"),
        (lambda d: d.seqs.advance([[1] * 5]), "5 tokens.*t_max = 4"),
        (lambda d: d.seqs.advance([[1]], min_columns=5), "5 tokens.*t_max = 4"),
    ],
)
def test_what_cannot_be_meant_is_refused_and_changes_nothing(llama, call, message):
    llama.prefill([3, 14, 15, 9, 2, 6])
    ids, states = state_of(llama)
    with refused(message):
        call(llama)
    ids_after, states_after = state_of(llama)
    assert ids_after == ids and all(map(np.array_equal, states, states_after))


@pytest.mark.parametrize("family, goes_on", [("llama", True), ("lfm2", False)])
def test_after_an_interrupted_call_a_recurrent_state_is_refused(
    exports, monkeypatch, family, goes_on
):
    """As Jupyter's stop button between two shards. A cache needs no refusal: the next call writes
    the same rows again."""
    decoder, stop = exports.decoder(family), mock.Mock(side_effect=KeyboardInterrupt)
    step = partial(decoder.decode_one_token, 9)
    decoder.prefill([3, 14, 15])
    before, expected = decoder.snapshot(), step()
    decoder.begin(before)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(decoder.layer_shards[1], "predict_calls", stop)
        decoder.prefill([9, 2])
    for use in () if goes_on else (step, decoder.snapshot, partial(decoder.trim, 1)):
        with refused("sequence 0: found .*interrupted call.*begin again"):
            use()
        assert decoder.seqs.ids == [[3, 14, 15]]
    if not goes_on:
        decoder.add(0, before)
    with refused("5 tokens"):  # before anything runs
        decoder.seqs.advance([[1] * 5])
    assert np.array_equal(step(), expected)


def test_sequences_run_by_themselves_as_the_current_ones_do(llama):
    prompt = [3, 14, 15, 9, 2]
    logits = llama.prefill(prompt)
    seqs = llama.new_sequences()
    assert np.array_equal(seqs.prefill(prompt), logits[None])
    alone, times = seqs.step([[6]])
    assert np.array_equal(alone[0], llama.decode_one_token(6)) and times.total > 0
    assert seqs.trim(2) == 2
    assert seqs.ids == [prompt[:-1]] and llama.seqs.ids == [[*prompt, 6]]
    seqs.put(0, llama.snapshot())
    assert seqs.snapshot().ids == (*prompt, 6)


def test_two_streams_of_a_decoder_do_not_mix(llama):
    prompts = [3, 14, 15], [50, 60, 70]
    pairs = zip(*(llama.stream(ids, 4, stop=()) for ids in prompts), strict=True)
    for ids, records in zip(prompts, zip(*pairs), strict=True):
        tokens = [record.token for record in records]
        assert tokens == llama.generate(ids, 4, stop=())


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
        executables = [
            executable
            for model in decoder.layer_shards
            for executable in model.executables.values()
        ]
        references = list(map(weakref.ref, executables))
        gc.disable()
        try:
            del decoder, executables
            assert not any(reference() for reference in references)
        finally:
            gc.enable()
