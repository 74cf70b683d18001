"""Tokens that are undone leave nothing behind, in whatever kind of state; `make prove` runs more of
the programs."""

from pathlib import Path

import numpy as np
import programs
import pytest
import tiny
from circle import wide

from workbench import Decoder, InputError
from workbench.bundle.names import is_cache
from workbench.check.states import undo_gate
from workbench.decode.snapshot import take

FAMILIES = "gemma3_text", "lfm2", "zaya"  # rings, tails, both tails of CCA
RECURRENT = "lfm2", "zaya", "qwen3_5_text", "granitemoehybrid"
SAMPLE = 3  # programs
ROOT = Path(__file__).parents[2]
GUIDE, DATA = ROOT / "docs" / "guide.md", ROOT / "data"


@pytest.fixture(scope="module", params=[*FAMILIES[:2], wide(FAMILIES[2])])
def decoder(request, exports):
    """A decoder of three sequences."""
    return exports.decoder(
        exports.checkpoint(request.param), **programs.options(request.param, 0)
    )


def ids(decoder, count: int, seed: int = 0) -> list[list[int]]:
    """Tokens of each sequence."""
    return np.reshape(
        tiny.prompt(decoder.manifest.dims.V, 3 * count, seed), (3, count)
    ).tolist()


@pytest.mark.matrix(2, wide=4)
@pytest.mark.parametrize("seed", range(SAMPLE))
def test_a_random_program_ends_as_the_tokens_that_count_alone(decoder, seed):
    assert not programs.fault_of(decoder, seed)


def test_a_program_notices_an_undo_that_forgets_the_tail(exports):
    decoder = exports.decoder(exports.checkpoint("lfm2"), **programs.options("lfm2", 0))
    trim = decoder.trim

    def forgetful(count, seq=0):
        tails = [each for each in decoder.seqs.named_states if not is_cache(each[1])]
        held = [state.read(name) for state, name in tails]
        count = trim(count, seq)
        for (state, name), value in zip(tails, held, strict=True):
            state.write(name, value)
        return count

    decoder.trim = forgetful
    assert any(programs.fault_of(decoder, seed) for seed in range(5 * SAMPLE))


@pytest.mark.wide
@pytest.mark.parametrize("family", ["qwen3_5_text", "granitemoehybrid"])
def test_a_matrix_goes_back_to_the_first_token_of_the_last_call(exports, family):
    decoder = exports.decoder(exports.checkpoint(family), **programs.options(family, 0))
    decoder.begin()
    decoder.prefill(ids(decoder, 18))  # in calls of 4: the last has two tokens
    with pytest.raises(InputError, match="3 to undo; needs at most 2"):
        decoder.trim(3)
    with pytest.raises(InputError, match="1 to undo; needs at most 0"):
        decoder.snapshot().trim(1)
    assert decoder.trim(1) == 1 and decoder.seqs.floors[0] == 16
    assert decoder.trim(1) == 1 and decoder.snapshot().floor == 16
    assert not any(programs.fault_of(decoder, seed) for seed in range(SAMPLE))
    assert undo_gate(decoder).verdict == "GREEN"


@pytest.mark.matrix(1, wide=3)
@pytest.mark.parametrize("family", RECURRENT)
def test_a_call_of_one_token_keeps_nothing(exports, family):
    """What decoding token by token would pay for at every token."""
    decoder = exports.decoder(exports.checkpoint(family), max_seq_len=32)
    decoder.prefill([1, 2, 3])
    before = decoder.snapshot()
    decoder.decode_one_token(4)
    assert not decoder.seqs.kept
    with pytest.raises(InputError, match="1 to undo; needs at most 0: .*earlier snap"):
        decoder.trim(1)
    decoder.begin(before)
    assert decoder.seqs.ids == [[1, 2, 3]]


@pytest.mark.matrix(1, wide=1)
@pytest.mark.parametrize("name", ["lfm2", "zaya", "qwen3_5", "granite"])
def test_the_guide_s_speculative_decoding_gives_the_tokens_of_decoding_alone(
    exports, name
):
    """And, in `exact`, every bit that the tokens which stay give alone, in calls of the
    same T."""
    checkpoint = DATA / f"tiny-{name}"
    if not checkpoint.is_dir():
        checkpoint = exports.checkpoint("granitemoehybrid")
    bundle = exports.bundle(checkpoint, max_seq_len=96)
    decoder = Decoder(bundle, "portable", "exact")
    prompt = tiny.prompt(decoder.manifest.dims.V, 9)
    alone = decoder.generate(prompt, 72, stop=())

    def draft(ids):  # right but for every fifth token
        rest = list(enumerate(alone))[len(ids) - len(prompt) :]
        return [token if i % 5 else int(token == 0) for i, token in rest[:3]]

    calls, trims = [], []

    class Watched(Decoder):
        def advance(self, seqs, chunk, *arguments, **options):
            hidden, times = super().advance(seqs, chunk, *arguments, **options)
            if "T" not in options:
                calls.append([chunk[0], len(chunk[0]), hidden])
            return hidden, times

        def trim(self, count, seq=0):
            calls[-1][0] = calls[-1][0][: len(calls[-1][0]) - count]
            trims.append(count)
            return super().trim(count, seq)

    section = GUIDE.read_text().partition("Speculative decoding")[2]
    code = section.partition("```python\n")[2].partition("```")[0]
    opened = Watched(bundle, "portable", "exact")
    names = {"draft": draft, "prompt": prompt, "opened": opened}
    assert 'Decoder("build/lfm2")' in code
    exec(code.replace('Decoder("build/lfm2")', "opened"), names)
    tokens = names["tokens"]
    assert tokens == alone[: len(tokens)] and len(tokens) >= 64
    assert opened.seqs.ids[0] == prompt + tokens and max(trims) > 0
    seqs = decoder.fresh()
    for tokens, T, hidden in calls:
        again, _ = decoder.advance(seqs, [tokens], T=T)
        assert np.array_equal(again[:, :, : len(tokens)], hidden[:, :, : len(tokens)])
    assert not programs.differing(take(seqs), opened.snapshot())
