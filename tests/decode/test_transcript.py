"""A prompt that cannot be decoded to its end, and a file that cannot be written, are refused
before anything is decoded; tokens are labelled by their text."""

import shutil
import signal
import time
import weakref

import numpy as np
import pytest
import tiny
from refusal import refused
from tiny import DATA, edit_json
from tokenizers import Tokenizer

from workbench.decode import Sequences
from workbench.decode import transcript as transcripts
from workbench.decode.transcript import (
    encode_text,
    load_tokenizer,
    token_labels,
    transcript,
)
from workbench.models.checkpoint import Checkpoint

S, IDS = 16, [3, 14, 15, 9, 2, 6]


@pytest.fixture
def decoder(exports):
    return exports.decoder("smollm3", max_seq_len=S)


@pytest.mark.parametrize(
    "max_new, name, message",
    [
        (S - len(IDS) + 1, "logits.npy", "position 16; needs .* max_seq_len = 16"),
        (2, "/proc/logits.npy", "a folder that can be written"),
        (2, ".", "a folder"),
        (-1, None, "new tokens: found -1"),
    ],
)
def test_a_transcript_that_cannot_be_kept_is_refused_before_a_token_is_decoded(
    decoder, tmp_path, monkeypatch, max_new, name, message
):
    monkeypatch.setattr(
        Sequences, "advance", lambda *_: pytest.fail("a token is decoded")
    )
    with refused(message):
        transcript(decoder, IDS, max_new, tmp_path / name if name else None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("max_new", [0, S - len(IDS)])
def test_logits_are_written_under_exactly_the_name_given(decoder, tmp_path, max_new):
    transcript(decoder, IDS, max_new, tmp_path / "logits")
    assert [path.name for path in tmp_path.iterdir()] == ["logits"]
    assert np.load(tmp_path / "logits").shape == (max_new + 1, 131)


def test_without_a_file_no_logits_are_kept_and_calls_are_those_that_ran(
    exports, monkeypatch
):
    """A slice write takes no dummy columns: one call of 8 tokens and 3 of one."""
    decoder = exports.decoder("smollm3", max_seq_len=S, tokens="1,8", kv_write="slice")
    stream, seen = decoder.stream, []

    def watched(*arguments, **more):
        for record in stream(*arguments, **more):
            assert sum(ref() is not None for ref in seen) <= 1
            seen.append(weakref.ref(record.logits))
            yield record

    monkeypatch.setattr(decoder, "stream", watched)
    assert transcript(decoder, [*IDS, *IDS[1:]], 4)["prefill"]["calls"] == 4
    assert len(seen) == 4


def test_calls_that_compile_are_in_no_figure_and_are_counted(exports, monkeypatch):
    """The first call of each width takes 300 ms longer, as one that compiles."""
    decoder = exports.decoder("smollm3", max_seq_len=S, tokens="1-4")
    advance, compiled = Sequences.advance, set()

    def compiling(seqs, chunk, *rest, **more):
        width = len(chunk[0])
        if width not in compiled:
            compiled.add(width)
            time.sleep(0.3)
        return advance(seqs, chunk, *rest, **more)

    monkeypatch.setattr(Sequences, "advance", compiling)
    result = transcript(decoder, IDS, 4)
    prefill, decode = result["prefill"], result["decode"]
    assert prefill["ms"] < 300 and prefill["first_calls"] == 2  # of 4 and of 2 tokens
    assert prefill["first_calls_ms"] >= 600
    assert prefill["tokens_per_s"] == pytest.approx(len(IDS) / prefill["ms"] * 1e3)
    first, *later = decode["samples_ms"]
    assert first >= 300 > max(later) and decode["first_calls"] == 1
    # tokens over time, not the inverse of a median
    assert decode["tokens_per_s"] == pytest.approx(1e3 * len(later) / sum(later))


@pytest.mark.parametrize(
    "damage", [b"version https://git-lfs.github.com/spec/v1", b"{}"]
)
def test_a_tokenizer_that_is_not_whole_is_refused(tmp_path, damage):
    source = shutil.copytree(tiny.DATA / "tiny-llama", tmp_path / "c")
    (source / "tokenizer.json").write_bytes(damage)
    with refused("a whole tokenizer.json.*git lfs pull"):
        load_tokenizer(source)
    if damage != b"{}":
        with refused("tokenizer.json: found a Git LFS pointer"):
            Checkpoint(source).save_tokenizer(tmp_path)


LOOP = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
TEMPLATES = {
    LOOP: "not rendered in 0.2 s",
    "{{ messages + 1 }}": "can only concatenate",
    "{{ 1 // 0 }}": "zero",
    "{{ ''.__class__.__mro__ }}": "unsafe",
    "{% if %}": "Expected an expression",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_that_does_not_end_or_fails_is_refused(
    tmp_path, monkeypatch, template
):
    folder = shutil.copytree(tiny.DATA / "tiny-llama", tmp_path / "c")
    (folder / "chat_template.jinja").write_text(template)
    monkeypatch.setattr(transcripts, "TEMPLATE_SECONDS", 0.2)
    before = signal.getsignal(signal.SIGALRM)
    with refused(f"chat template of tokenizer .*{TEMPLATES[template]}"):
        transcripts.encode_chat(folder, "hello")
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


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


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_ids_of_a_text_are_those_of_the_tokenizer_alone(tmp_path, family, adds_bos):
    """SmolLM2 has a beginning-of-sequence token that its tokenizer does not add."""
    folder = shutil.copytree(DATA / f"tiny-{family}", tmp_path / "copy")
    if not adds_bos:
        edit_json(folder / "tokenizer.json", ("post_processor", None))
    reader = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = encode_text(folder, "set river amber")
    assert ids == reader.encode("set river amber").ids
    assert len(ids) == 3 + adds_bos


@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_first_token_that_the_text_has_stands_once(tmp_path, adds_bos):
    folder = shutil.copytree(DATA / "tiny-llama", tmp_path / "copy")
    if not adds_bos:
        edit_json(folder / "tokenizer.json", ("post_processor", None))
    plain = encode_text(folder, "set river")
    assert encode_text(folder, "<bos> set river") == [1, *plain[-2:]]
