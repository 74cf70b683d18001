"""Bundles of every export option compute Hugging Face's logits, in every family, alone and with
every other option that the option allows."""

from itertools import combinations, product

import numpy as np
import pytest
import tiny
from programs import RINGS
from refusal import refused

from workbench import InputError
from workbench.bundle.names import is_cache
from workbench.exporter import export, make_options

CHOICES = {
    "kv_write": ["mask", "slice"],
    "layout": ["bct1", "bc1t"],
    "moe": ["dense", "routed"],
    "sliding": ["mask", "ring"],
    "tokens": ["1-4", "1", "4", "1,4"],
    "batch": [1, 3],
    "layers_per_shard": [1, 2],
}
SLIDING_ZAYA = {
    "num_hidden_layers": 2,
    "num_experts": 2,
    "layer_types": ["hybrid_sliding", "hybrid"],
    "sliding_window": 3,
}
# tokens of a prompt that every T divides, and tokens that are decoded one by one after it
LENGTH, MORE = 8, 3


def allowed(chosen: dict) -> bool:
    try:
        make_options(max_seq_len=16, **chosen)
    except InputError:
        return False
    return True


def pairwise(family: str) -> list[dict]:
    """Rows of choices that together contain every pair of values of the allowed rows, by greedy
    search."""
    choices = dict(CHOICES)
    if family != "zaya":
        choices["moe"] = ["dense"]
        choices["sliding"] = CHOICES["sliding"][: 1 + (family in RINGS)]
    rows = (dict(zip(choices, values)) for values in product(*choices.values()))
    rows = {
        frozenset(combinations(row.items(), 2)): row for row in rows if allowed(row)
    }
    missing, rows_taken = frozenset().union(*rows), []
    while missing:
        pairs = max(rows, key=lambda pairs: len(pairs & missing))
        rows_taken.append(rows[pairs])
        missing -= pairs
    return rows_taken


@pytest.mark.slow("exports a bundle of its own and runs both models")
@pytest.mark.matrix(2, wide=5)
@pytest.mark.parametrize(
    "family, chosen",
    [(family, row) for family in tiny.DIMS for row in pairwise(family)],
    ids=tiny.case_id,
)
def test_pairs_of_options_agree_with_hugging_face(exports, family, chosen):
    """Prompts of a batch, then single tokens where T = 1 can be called, in float32."""
    dims = SLIDING_ZAYA if family == "zaya" else {}
    checkpoint = exports.checkpoint(family, **dims)
    decoder = exports.decoder(checkpoint, max_seq_len=16, **chosen)
    options, B = decoder.options, decoder.options.batch
    goldens = [exports.golden(checkpoint, LENGTH + MORE, seed) for seed in range(B)]
    logits = [decoder.prefill([g.ids[:LENGTH] for g in goldens])]
    if options.tiling.width(1) == 1 or options.kv_write == "mask":
        for i in range(LENGTH, LENGTH + MORE):
            logits.append(decoder.decode_one_token([g.ids[i] for g in goldens]))
    for seq, g in enumerate(goldens):
        logits_of_seq = np.stack([row.reshape(B, -1)[seq] for row in logits])
        expected = g.logits[LENGTH - 1 :][: len(logits_of_seq)]
        limit = tiny.exact_limit(exports.hf(checkpoint), g, 3e-6)
        assert tiny.relative(logits_of_seq, expected) < limit
        assert (logits_of_seq.argmax(-1) == expected.argmax(-1)).all()


@pytest.mark.wide
def test_a_prefill_bundle_takes_64_tokens_a_call(exports):
    checkpoint = exports.checkpoint("gemma3_text")
    options = {"tokens": "1-64", "max_seq_len": 160, "sliding": "ring"}
    decoder, g = exports.decoder(checkpoint, **options), exports.golden(checkpoint, 150)
    for sizes in ([64], [1, 63, 17]):
        assert tiny.logits_error(decoder, g, *sizes) < 3e-6


def test_a_slice_write_refuses_unequal_positions_and_dummies(exports):
    checkpoint = exports.checkpoint("llama", num_hidden_layers=1, vocab_size=31)
    decoder = exports.decoder(checkpoint, kv_write="slice", batch=2)
    with refused("kv_write=slice.*equal positions"):
        decoder.prefill([[1, 2, 3], [1, 2]])
    assert not any(s.read(n).any() for s, n in decoder.seqs.named_states if is_cache(n))
    decoder.prefill([[1, 2]] * 2)
    decoder.trim(1, seq=1)
    with refused("kv_write=slice.*positions .2, 1."):
        decoder.decode_one_token([3, 3])


@pytest.mark.parametrize(
    "family, chosen, message",
    [
        ("llama", {"colour": "red"}, "colour"),
        ("llama", {"kv_write": "scatter"}, "kv_write"),
        ("llama", {"moe": "routed"}, "moe = routed.*family with experts"),
        ("llama", {"sliding": "ring"}, "sliding = ring.*sliding attention"),
        ("zaya", {"moe": "routed", "layers_per_shard": 2}, "layers_per_shard = 1"),
        ("gemma3_text", {"sliding": "ring", "kv_write": "slice"}, "cannot wrap"),
    ],
)
def test_options_that_mean_nothing_together_are_refused(
    exports, tmp_path, family, chosen, message
):
    with refused(message):
        export(exports.checkpoint(family), tmp_path / "b", max_seq_len=16, **chosen)
