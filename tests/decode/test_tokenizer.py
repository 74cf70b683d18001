"""A damaged tokenizer and a template that does not end are refused; tokens are labelled by their
text, and a text has the tokenizer's ids."""

import shutil
import signal

import pytest
import tiny
from refusal import refused
from tiny import DATA, edit_json
from tokenizers import Tokenizer

from workbench.decode import tokenizer
from workbench.decode.tokenizer import encode_text, load_tokenizer, token_labels
from workbench.models.checkpoint import Checkpoint


@pytest.mark.parametrize(
    "damage", [b"version https://git-lfs.github.com/spec/v1", b"{}"]
)
def test_a_tokenizer_that_is_not_whole_is_refused(tmp_path, damage):
    source = shutil.copytree(tiny.DATA / "tiny-llama", tmp_path / "c")
    (source / "tokenizer.json").write_bytes(damage)
    with refused("a whole tokenizer.json.*git lfs pull"):
        load_tokenizer(source)
    found = "no tokenizer" if damage == b"{}" else "a Git LFS pointer"
    with refused(
        f"c/tokenizer.json: found {found}.*needs a whole tokenizer.*hf download"
    ):
        Checkpoint(source).tokens.save(tmp_path)
    assert not (tmp_path / "tokenizer").exists()


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
    monkeypatch.setattr(tokenizer, "TEMPLATE_SECONDS", 0.2)
    before = signal.getsignal(signal.SIGALRM)
    with refused(f"chat template of tokenizer .*{TEMPLATES[template]}"):
        tokenizer.encode_chat(folder, "hello")
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
