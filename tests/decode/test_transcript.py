"""What cannot be decoded to its end, or kept, is refused before anything is decoded;
tokens are labelled by their text."""

import numpy as np
import pytest
from refusal import refused

from workbench import Bundle, Decoder
from workbench.decode.transcript import token_labels, transcript

S, IDS = 16, [3, 14, 15, 9, 2, 6]


@pytest.fixture
def decoder(exports):
    shared = exports.bundle("llama", max_seq_len=S)
    return Decoder(Bundle.open(shared.root), "portable", "exact")


@pytest.mark.parametrize(
    "max_new, name, found",
    [
        (S - len(IDS) + 1, "logits.npy", "position 16; needs .* max_seq_len = 16"),
        (2, "missing/logits.npy", "no folder"),
        (2, ".", "a folder"),
        (-1, "logits.npy", "new tokens: found -1"),
        (-1, None, "new tokens: found -1"),
    ],
)
def test_a_transcript_that_cannot_be_kept_is_refused_before_a_token_is_decoded(
    decoder, tmp_path, monkeypatch, max_new, name, found
):
    monkeypatch.setattr(
        decoder, "advance", lambda *_: pytest.fail("a token is decoded")
    )
    with refused(found):
        transcript(decoder, IDS, max_new, tmp_path / name if name else None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("max_new", [0, S - len(IDS)])
def test_logits_are_written_under_exactly_the_name_given(decoder, tmp_path, max_new):
    decoder.manifest.tokens.eos.clear()
    transcript(decoder, IDS, max_new, tmp_path / "logits")
    assert [path.name for path in tmp_path.iterdir()] == ["logits"]
    assert np.load(tmp_path / "logits").shape == (max_new + 1, 97)


def test_labels_of_byte_level_tokens_are_text(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["ĠgardenĠcarrot", "Ġset", "Ċ", "é".encode().decode("latin-1")]
    model = models.BPE({word: i for i, word in enumerate(words)}, [])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    assert token_labels(tmp_path, [0, 1, 2, 3]) == ["·garden·car…", "·set", "↵", "é"]
    assert token_labels(None, [7, 8]) == ["7", "8"]
