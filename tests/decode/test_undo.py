"""Tokens that are taken back leave nothing in any kind of state; `make prove` runs more of the
programs."""

import programs
import pytest
import tiny
from circle import wide
from refusal import refused

from workbench import Decoder

pytestmark = pytest.mark.slow("runs programs of a dozen steps on three sequences")
TAILS = "lfm2", "zaya"
MATRICES = "qwen3_5_text", "granitemoehybrid"
PAGE = tiny.ROOT / "docs" / "app.md"


def decoder_of_three(exports, family: str, shape: int = 0) -> Decoder:
    """A decoder of three sequences."""
    options = programs.options(family, shape)
    return exports.decoder(family, **options)


# the seed of a program that goes back into a call, where an undo could forget a tail
UNDOES_PART_OF_A_CALL = 11


@pytest.mark.parametrize(
    "family, seed",
    [
        ("gemma3_text", 1),
        ("lfm2", UNDOES_PART_OF_A_CALL),
        wide("lfm2", 0),
        wide("zaya", UNDOES_PART_OF_A_CALL),
    ],
)
def test_a_random_program_ends_as_the_tokens_that_count_alone(exports, family, seed):
    assert not programs.find_differences(decoder_of_three(exports, family), seed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", tiny.DIMS)
def test_200_random_programs_end_as_the_tokens_that_count_alone(exports, family):
    decoders = [decoder_of_three(exports, family, shape) for shape in (0, 1)]
    differences = {
        seed: programs.find_differences(decoders[seed % 2], seed) for seed in range(200)
    }
    assert not {seed: text for seed, text in differences.items() if text}


@pytest.mark.wide
@pytest.mark.parametrize("family", MATRICES)
def test_a_matrix_goes_back_to_the_first_token_of_the_last_call(exports, family):
    decoder = decoder_of_three(exports, family)
    decoder.begin()
    ids = tiny.prompt(decoder.manifest.dims.V, 18)
    decoder.prefill([ids] * 3)  # in calls of 4: the last has two tokens
    with refused("3 to undo; needs at most 2"):
        decoder.trim(3)
    with refused("1 to undo; needs at most 0"):
        decoder.snapshot().trim(1)
    assert [decoder.trim(1), decoder.trim(1)] == [1, 1]
    assert decoder.snapshot().min_length == 16
    assert not any(programs.find_differences(decoder, seed) for seed in range(3))


@pytest.mark.matrix(1, wide=3)
@pytest.mark.parametrize("family", [*TAILS, *MATRICES])
def test_a_call_of_one_token_keeps_nothing(exports, family):
    """A copy for every token would cost time at every token."""
    decoder = exports.decoder(family)
    decoder.prefill([1, 2, 3])
    decoder.decode_one_token(4)
    assert decoder.seqs.last_call is None
    with refused("1 to undo; needs at most 0: .*earlier snap"):
        decoder.trim(1)


def test_an_undo_leaves_a_snapshot_in_another_place_as_it_is(exports):
    decoder = decoder_of_three(exports, "lfm2")
    decoder.prefill([[3, 14, 15], [9, 2, 6], []])
    decoder.add(1, decoder.snapshot())
    decoder.trim(1)
    with refused("1 to undo; needs at most 0"):
        decoder.trim(1, seq=1)
    assert decoder.trim(1) == 1 and decoder.seqs.ids == [[3], [3, 14, 15], []]


@pytest.mark.matrix(1, wide=1)
@pytest.mark.parametrize("name", ["lfm2", "zaya", "qwen3_5", "granite"])
def test_the_page_s_speculative_decoding_gives_the_tokens_of_decoding_alone(
    exports, name
):
    """`programs` shows that the states after `trim` are those of the remaining tokens alone."""
    checkpoint = tiny.DATA / f"tiny-{name}"
    if not checkpoint.is_dir():
        checkpoint = exports.checkpoint("granitemoehybrid")
    decoder, opened = (exports.decoder(checkpoint, max_seq_len=96) for _ in range(2))
    prompt, trims = tiny.prompt(decoder.manifest.dims.V, 9), []
    alone, trim = decoder.generate(prompt, 72, stop=()), opened.trim

    def draft(ids):  # every fifth token is wrong
        rest = list(enumerate(alone))[len(ids) - len(prompt) :]
        return [token if i % 5 else int(token == 0) for i, token in rest[:3]]

    opened.trim = lambda *arguments, **more: (
        trims.append(arguments) or trim(*arguments, **more)
    )
    section = PAGE.read_text().partition("## Speculative decoding")[2]
    code = section.partition("```python\n")[2].partition("```")[0]
    names = {"draft": draft, "prompt": prompt, "opened": opened}
    assert 'Decoder("build/lfm2")' in code
    exec(code.replace('Decoder("build/lfm2")', "opened"), names)
    tokens = names["tokens"]
    assert tokens == alone[: len(tokens)] and len(tokens) >= 64
    assert opened.seqs.ids[0] == prompt + tokens and any(count for count, *_ in trims)
