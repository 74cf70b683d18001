"""A prompt runs in one bundle and its tokens are decoded in another, which continues from copied
states: the same tokens, the same states."""

import pytest
import tiny
from circle import wide
from refusal import refused

from workbench import Decoder
from workbench.decode.snapshot import copy

PROMPT = 12  # a ring of these bundles still holds all its rows
TWO = {"num_hidden_layers": 2, "num_experts": 2}
PAIRS = [  # family, its dimensions, options of the bundle that runs the prompt, of the other
    ("llama", {}, {"tokens": "1,8", "layers_per_shard": 2}, {"layout": "bc1t"}),
    wide("gemma3_text", {}, {"sliding": "ring", "tokens": "1-8"}, {}),
    wide("zaya", TWO, {"tokens": "2,6"}, {}),
    wide("qwen3_5_text", {}, {"tokens": "1-8"}, {"layers_per_shard": 3}),
]


@pytest.mark.slow("exports two bundles and compiles their calls")
@pytest.mark.parametrize("runtime", ["portable", wide("coreml")])
@pytest.mark.parametrize("family, changed, first, then", PAIRS)
def test_a_prompt_continues_in_another_bundle_as_if_it_had_run_there(
    shimmed, exports, family, changed, first, then, runtime
):
    checkpoint, ids = exports.checkpoint(family, **changed), tiny.prompt(90, PROMPT)
    limit = 1e-5 if runtime == "portable" else 1e-2
    source, target = (
        Decoder(exports.bundle(checkpoint, **how), runtime, "exact")
        for how in (first, {"tokens": "1", "max_seq_len": 40} | then)
    )
    before = target.prefill(ids)
    alone = target.snapshot()
    records = list(target.stream(ids, 6, stop=[]))
    target.begin()
    assert tiny.relative(source.prefill(ids), before) < limit
    copy(source.seqs, target.seqs)
    found = target.snapshot()
    assert (found.ids, found.states.keys()) == (alone.ids, alone.states.keys())
    for name, value in alone.states.items():
        rows = min(value.shape[-2], found.states[name].shape[-2])
        pair = (x[..., -rows:, :].astype(float) for x in (found.states[name], value))
        assert tiny.relative(*pair) < limit, name
    for record, expected in zip(records, records[1:]):
        logits = target.decode_one_token(record.token)
        assert tiny.relative(logits, expected.logits) < limit
        assert logits.argmax() == expected.token
    assert source.seqs.offsets.tolist() == [PROMPT]


def test_nothing_changes_where_bundles_do_not_belong_together(exports):
    path, ids = exports.checkpoint("llama"), tiny.prompt(90, 25)
    target, short = (exports.decoder(path, max_seq_len=S) for S in (32, 24))
    target.prefill(ids)
    for source, found in [
        (exports.decoder("qwen2"), "one checkpoint"),
        (exports.decoder(path, batch=2), "batch 1"),
    ]:
        with refused(found):
            copy(source.seqs, target.seqs)
    with refused("at most max_seq_len = 24"):
        copy(target.seqs, short.seqs)
    assert target.seqs.ids == [ids] and short.seqs.ids == [[]]
