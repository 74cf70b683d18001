"""A prompt runs in one bundle and its tokens are decoded in another, which continues from copied
states: the same tokens, the same states."""

import numpy as np
import pytest
import tiny
from circle import wide

from workbench import Decoder, InputError
from workbench.decode.snapshot import copy

PROMPT, MORE = 13, 6


@pytest.fixture(scope="module")
def pair(exports):
    """A prefill bundle of wide calls and a decode bundle of T = 1, unlike in all that may differ
    but their weights."""
    path = exports.checkpoint("llama")
    prefill = exports.bundle(path, tokens="1,8", max_seq_len=24, layers_per_shard=2)
    decode = exports.bundle(path, tokens="1", max_seq_len=32, layout="bc1t")
    return prefill, decode


def moved(source: Decoder, target: Decoder, ids) -> np.ndarray:
    """Runs prompts in `source` and continues them in `target`; the logits after them."""
    source.begin()
    logits = source.prefill(ids)
    copy(source.seqs, target.seqs)
    return logits


@pytest.mark.parametrize("runtime", ["portable", wide("coreml")])
def test_tokens_behind_a_prompt_that_another_bundle_ran_are_the_same(
    shimmed, pair, runtime
):
    ids = tiny.prompt(90, PROMPT)
    source, target = (Decoder(bundle, runtime, "exact") for bundle in pair)
    alone = list(target.stream(ids, MORE, stop=[]))
    logits = [moved(source, target, ids)]
    for record in alone[:-1]:
        logits.append(target.decode_one_token(record.token))
    for ours, theirs in zip(logits, alone, strict=True):
        assert ours.argmax() == theirs.token
        assert tiny.relative(ours, theirs.logits) < (
            1e-5 if runtime == "portable" else 1e-2
        )
    assert source.seqs.offsets.tolist() == [PROMPT]
    assert target.seqs.ids == [[*ids, *(record.token for record in alone[:-1])]]


def test_nothing_changes_where_bundles_do_not_belong_together(exports, pair):
    short, target = (Decoder(bundle, "portable", "exact") for bundle in pair)
    ids = tiny.prompt(90, 25)
    target.prefill(ids)
    for source, found in [
        (exports.decoder(exports.checkpoint("qwen2")), "one checkpoint"),
        (exports.decoder(exports.checkpoint("llama"), batch=2), "batch 1"),
    ]:
        with pytest.raises(InputError, match=found):
            copy(source.seqs, target.seqs)
    with pytest.raises(InputError, match="at most max_seq_len = 24"):
        copy(target.seqs, short.seqs)
    assert target.seqs.ids == [ids] and short.seqs.ids == [[]]


@pytest.mark.wide
@pytest.mark.parametrize(
    "family, changed, first, then",
    [
        ("gemma3_text", {}, {"sliding": "ring", "tokens": "1-8"}, {"tokens": "1"}),
        (
            "zaya",
            {"num_hidden_layers": 2, "num_experts": 2},
            {"tokens": "2,6"},
            {"tokens": "1"},
        ),
        ("qwen3_5_text", {}, {"tokens": "1-8"}, {"tokens": "1", "layers_per_shard": 3}),
    ],
)
def test_states_are_those_of_running_the_prompt_in_the_decoding_bundle(
    exports, family, changed, first, then
):
    checkpoint = exports.checkpoint(family, **changed)
    source = exports.decoder(checkpoint, max_seq_len=32, **first)
    target = exports.decoder(checkpoint, max_seq_len=40, **then)
    prompt = tiny.prompt(90, 12)
    target.prefill(prompt)
    alone = target.snapshot()
    expected = target.decode_one_token(5)
    moved(source, target, prompt)
    found = target.snapshot()
    assert (found.ids, found.states.keys()) == (alone.ids, alone.states.keys())
    for name, value in alone.states.items():
        rows = min(value.shape[-2], found.states[name].shape[-2])
        pair = (
            each[..., each.shape[-2] - rows :, :]
            for each in (found.states[name], value)
        )
        assert tiny.relative(*pair) < 1e-5, name
    assert tiny.relative(target.decode_one_token(5), expected) < 1e-5
