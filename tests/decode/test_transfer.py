"""A prompt runs in one bundle and its tokens are decoded in another, which continues from copied
states: the same tokens, the same states."""

import json

import numpy as np
import pytest
import tiny
from typer.testing import CliRunner

from workbench import Decoder, InputError
from workbench.cli.app import app
from workbench.decode.snapshot import copy

PROMPT, MORE = 13, 6


@pytest.fixture(scope="module")
def pair(exports, tiny_llama):
    """A prefill bundle of wide calls and a decode bundle of T = 1, unlike in all that may differ
    but their weights."""
    prefill = exports.bundle(
        tiny_llama.path, tokens="4,16", max_seq_len=48, layers_per_shard=2
    )
    decode = exports.bundle(tiny_llama.path, tokens="1", max_seq_len=64, layout="bc1t")
    return prefill, decode


def moved(source: Decoder, target: Decoder, ids) -> np.ndarray:
    """Runs prompts in `source` and continues them in `target`; the logits after them."""
    source.begin()
    logits = source.prefill(ids)
    copy(source.seqs, target.seqs)
    return logits


@pytest.mark.parametrize("runtime", ["portable", "coreml"])
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


def test_a_batch_moves_with_sequences_of_their_own_lengths(exports, tiny_llama):
    chosen = {"batch": 2, "max_seq_len": 32}
    source = exports.decoder(tiny_llama.path, tokens="1-8", **chosen)
    target = exports.decoder(tiny_llama.path, tokens="1", **chosen)
    prompts = [tiny.prompt(90, 9), tiny.prompt(90, 4, seed=1)]
    alone = list(target.stream(prompts, 2, stop=[]))
    first = moved(source, target, prompts).argmax(-1).tolist()
    second = target.decode_one_token(first).argmax(-1).tolist()
    assert [*zip(first, second, strict=True)] == [
        tuple(r.token for r in alone if r.seq == seq) for seq in range(2)
    ]
    assert target.seqs.offsets.tolist() == [10, 5]


def test_nothing_changes_where_bundles_do_not_belong_together(
    exports, pair, tiny_llama
):
    _, target = (Decoder(bundle, "portable", "exact") for bundle in pair)
    other = exports.decoder(exports.checkpoint("llama"))
    target.prefill([1, 2, 3])
    for source, found in [
        (other, "one checkpoint"),
        (exports.decoder(tiny_llama.path, batch=2), "batch 1"),
    ]:
        with pytest.raises(InputError, match=found):
            copy(source.seqs, target.seqs)
    with pytest.raises(InputError, match="at most max_seq_len = 2"):
        small = exports.decoder(tiny_llama.path, max_seq_len=2, tokens="1")
        copy(target.seqs, small.seqs)
    assert target.seqs.ids == [[1, 2, 3]] and small.seqs.ids == [[]]


def test_a_snapshot_behind_a_move_is_one_of_the_decoding_bundle(pair):
    """Reuse: what is kept and restored goes on with the same bits."""
    source, target = (Decoder(bundle, "portable", "exact") for bundle in pair)
    moved(source, target, tiny.prompt(90, PROMPT))
    snapshot = target.snapshot()
    assert snapshot.identity == target.identity
    more = tiny.prompt(90, MORE, seed=1)
    expected = [target.decode_one_token(token) for token in more]
    target.begin(snapshot)
    assert np.array_equal(expected, [target.decode_one_token(token) for token in more])


@pytest.mark.matrix(1, wide=9)
@pytest.mark.parametrize(
    "family, changed, first, then",
    [
        ("gemma3_text", {}, {"sliding": "ring", "tokens": "1-8"}, {"tokens": "1"}),
        ("gemma3_text", {}, {"tokens": "1,8"}, {"sliding": "ring", "tokens": "1,2"}),
        (
            "zaya",
            {"num_hidden_layers": 2, "num_experts": 2},
            {"tokens": "2,6"},
            {"tokens": "1"},
        ),
        ("qwen3_5_text", {}, {"tokens": "1-8"}, {"tokens": "1", "layers_per_shard": 3}),
        (
            "llama",
            {},
            {"kv_write": "slice", "tokens": "4"},
            {"kv_write": "slice", "tokens": "1"},
        ),
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


def run(*arguments: str, code: int = 0) -> dict:
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def test_export_takes_functions(tiny_llama, tmp_path):
    found = run(
        *("export", str(tiny_llama.path), str(tmp_path / "b"), "--max-seq-len", "16"),
        *("--tokens", "1,2"),
    )
    assert found["stamped"] == 3
    assert run("validate", str(tmp_path / "b"))["verdict"] == "GREEN"
    result = CliRunner().invoke(
        app, ["export", str(tiny_llama.path), str(tmp_path / "c"), "--tokens", "1;2"]
    )
    assert isinstance(result.exception, InputError) and "1-4, 4 or 1,64" in str(
        result.exception
    )
