"""The limits of a KV cache, on trained checkpoints: how far a ring goes back, the last row, and
sequences of a batch that end at different tokens. `programs` and tests/check/test_reuse.py show
that a cache continues bit for bit, alone and in batches."""

import numpy as np
import pytest
import tiny
import trained
from circle import wide
from refusal import refused
from trained import same

CLOSE = 1e-5  # exact arithmetic, other tiles or batches: kernels sum in another order
IDS = np.random.default_rng(7).integers(3, 256, trained.S).tolist()
RING = "tiny-gemma3"
OTHERS = [name for name in trained.NAMES if name != RING]


@pytest.fixture(scope="module", params=[RING, *map(wide, OTHERS)])
def decoder(request, exports):
    return trained.decoder(exports, request.param)


@pytest.mark.parametrize("length, depth", [(79, 79), (80, trained.T_MAX)])
def test_a_ring_that_has_wrapped_goes_back_a_call_and_no_further(
    exports, length, depth
):
    decoder = trained.decoder(exports, RING)
    decoder.prefill(IDS[:length])
    snapshot = decoder.snapshot()
    for trim in (decoder.trim, snapshot.trim) if depth < length else ():
        with refused(f"{depth + 1} to undo; needs at most {depth}"):
            trim(depth + 1)
    assert same(decoder.snapshot(), snapshot)
    assert decoder.trim(depth) == depth
    assert same(decoder.snapshot(), snapshot.trim(depth))
    again = decoder.prefill(IDS[length - depth : length])
    decoder.begin()
    assert tiny.relative(again, decoder.prefill(IDS[:length])) < CLOSE


def test_a_sequence_fits_to_its_last_row_and_no_further(decoder):
    decoder.begin()
    decoder.prefill(IDS[: trained.S - 2])
    snapshot, full = decoder.snapshot(), f"max_seq_len = {trained.S}"
    assert len(decoder.generate(IDS[:1], 2, after=snapshot, stop=())) == 2
    for ids, new in ((IDS[:1], 3), (IDS[:3], 1)):
        with refused(f"below {full}"):
            decoder.generate(ids, new, after=snapshot, stop=())
    decoder.begin(snapshot)
    with refused(full):
        decoder.prefill(IDS[:3])
    assert same(decoder.snapshot(), snapshot)
    decoder.prefill(IDS[:2])
    with refused(f"position {trained.S}"):
        decoder.decode_one_token(1)
    with refused("0. tokens"):
        decoder.generate([[]], 1, after=snapshot)


def test_sequences_end_at_their_own_stop_tokens_and_limits(decoder, exports):
    name = decoder.manifest.checkpoint["name"]
    together = trained.decoder(exports, name, trained.BATCH)
    prompts = [IDS[a : a + 9] for a in (0, 20, 40)]
    alone = [decoder.generate(prompt, 6, stop=()) for prompt in prompts]
    stop, limits = [alone[1][2], alone[2][0]], [6, 6, 4]
    generated = together.generate(prompts, limits, stop=stop)
    for tokens, expected, limit in zip(generated, alone, limits, strict=True):
        ends = [i + 1 for i, token in enumerate(expected) if token in stop]
        assert tokens == expected[: min([*ends, limit])]
