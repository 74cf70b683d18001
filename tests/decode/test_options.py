"""Every export option computes what Hugging Face computes, alone and with every other option it
allows."""

from itertools import combinations, product

import numpy as np
import pytest
import tiny

from workbench import InputError
from workbench.bundle.names import is_cache
from workbench.export import export, options

CHOICES = {
    "kv_write": ["mask", "slice"],
    "layout": ["bct1", "bc1t"],
    "moe": ["dense", "routed"],
    "sliding": ["mask", "ring"],
    "tokens": ["1-4", "1", "4"],
    "batch": [1, 2],
    "layers_per_shard": [1, 2],
}
SLIDING_ZAYA = {
    "num_hidden_layers": 2,
    "num_experts": 2,
    "layer_types": ["hybrid_sliding", "hybrid"],
    "sliding_window": 3,
}
# tokens of a prompt that every T divides, tokens decoded one by one behind it
LENGTH, MORE = (8, 3)


def allowed(chosen: dict) -> bool:
    try:
        options(max_seq_len=16, **chosen)
    except InputError:
        return False
    return True


def pairwise() -> list[dict]:
    """Rows of choices that contain every pair of values that some allowed row contains, found
    greedily."""
    rows = [
        r
        for values in product(*CHOICES.values())
        if allowed(r := dict(zip(CHOICES, values, strict=True)))
    ]
    pairs = {
        id(row): set(combinations(sorted(row.items(), key=str), 2)) for row in rows
    }
    missing, taken = set().union(*pairs.values()), []
    while missing:
        taken.append(max(rows, key=lambda row: len(pairs[id(row)] & missing)))
        missing -= pairs[id(taken[-1])]
    return taken


def check_against_hugging_face(exports, checkpoint, chosen: dict) -> None:
    """Prompts of a batch, then single tokens where T = 1 can be called, in float32."""
    decoder = exports.decoder(checkpoint, **({"max_seq_len": 16} | chosen))
    V, B = decoder.manifest.dims.V, decoder.options.batch
    goldens = [
        tiny.golden(exports.hf(checkpoint), tiny.prompt(V, LENGTH + MORE, seed))
        for seed in range(B)
    ]
    logits = [decoder.prefill([g.ids[:LENGTH] for g in goldens])]
    if 4 not in decoder.options.shapes or decoder.options.kv_write == "mask":
        logits += [
            decoder.decode_one_token([g.ids[LENGTH + i] for g in goldens])
            for i in range(MORE)
        ]
    for slot, g in enumerate(goldens):
        found = np.stack([row.reshape(B, V)[slot] for row in logits])
        expected = g.logits[LENGTH - 1 :][: len(found)]
        assert tiny.relative(found, expected) < 3e-6
        assert (found.argmax(-1) == expected.argmax(-1)).all()


@pytest.mark.matrix(1, wide=12)
@pytest.mark.parametrize(
    "chosen", pairwise(), ids=lambda row: "-".join(str(v) for v in row.values())
)
def test_pairs_of_options_agree_with_hugging_face(exports, chosen):
    check_against_hugging_face(
        exports, exports.checkpoint("zaya", **SLIDING_ZAYA), chosen
    )


@pytest.mark.matrix(2, wide=8)
@pytest.mark.parametrize(
    "family, chosen",
    [
        ("llama", {"kv_write": "slice", "layout": "bc1t", "layers_per_shard": 2}),
        ("gemma3_text", {"sliding": "ring", "layers_per_shard": 3, "batch": 2}),
        ("gemma3_text", {"sliding": "ring", "tokens": "1-6", "layers_per_shard": 2}),
        ("qwen2", {"tokens": "4", "layout": "bc1t", "batch": 2}),
        ("olmo3", {"sliding": "ring", "layers_per_shard": 3, "batch": 3}),
        ("phi3", {"kv_write": "slice"}),
        (
            "lfm2",
            {"kv_write": "slice", "layers_per_shard": 2, "layout": "bc1t", "batch": 2},
        ),
        ("lfm2", {"layers_per_shard": 3, "batch": 3}),
        (
            "qwen3_5_text",
            {"kv_write": "slice", "layers_per_shard": 2, "layout": "bc1t"},
        ),
        ("qwen3_5_text", {"layers_per_shard": 3, "batch": 3, "tokens": "1-8"}),
        ("qwen3_5_text", {"tokens": "4", "layout": "bc1t", "batch": 2}),
        ("qwen3_5_text", {"tokens": "1,4"}),
        (
            "granitemoehybrid",
            {"kv_write": "slice", "layers_per_shard": 2, "layout": "bc1t"},
        ),
        ("granitemoehybrid", {"layers_per_shard": 3, "batch": 3, "tokens": "1-8"}),
        ("granitemoehybrid", {"tokens": "1", "layout": "bc1t", "batch": 2}),
    ],
)
def test_options_of_the_other_families_agree_with_hugging_face(exports, family, chosen):
    check_against_hugging_face(exports, exports.checkpoint(family), chosen)


@pytest.mark.wide
def test_a_prefill_bundle_takes_64_tokens_a_call(exports):
    checkpoint = exports.checkpoint("gemma3_text")
    decoder = exports.decoder(
        checkpoint, tokens="1-64", max_seq_len=160, sliding="ring"
    )
    g = tiny.golden(exports.hf(checkpoint), tiny.prompt(107, 150))
    for sizes in ([64], [1, 63, 17]):
        assert tiny.relative(tiny.chained(decoder, g.ids, sizes), g.logits) < 3e-6


def test_a_slice_write_refuses_unequal_positions_and_dummies(exports):
    checkpoint = exports.checkpoint("llama", num_hidden_layers=1, vocab_size=31)
    decoder = exports.decoder(checkpoint, kv_write="slice", batch=2)
    with pytest.raises(InputError, match="kv_write=slice.*equal positions"):
        decoder.prefill([[1, 2, 3], [1, 2]])
    assert not any(s.read(n).any() for s, n in decoder.seqs.named_states if is_cache(n))


@pytest.mark.parametrize(
    "family, chosen, found",
    [
        ("llama", {"moe": "routed"}, "moe = routed.*family with experts"),
        ("llama", {"sliding": "ring"}, "sliding = ring.*sliding attention"),
        ("zaya", {"moe": "routed", "layers_per_shard": 2}, "layers_per_shard = 1"),
        ("gemma3_text", {"sliding": "ring", "kv_write": "slice"}, "cannot wrap"),
    ],
)
def test_options_that_mean_nothing_together_are_refused(
    exports, tmp_path, family, chosen, found
):
    with pytest.raises(InputError, match=found):
        export(exports.checkpoint(family), tmp_path / "b", max_seq_len=16, **chosen)
