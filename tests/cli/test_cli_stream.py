"""`generate` prints text as it comes, and takes a message through the checkpoint's chat template."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from workbench import InputError
from workbench.cli.app import app
from workbench.decode import Decoder
from workbench.decode.transcript import encode_chat, encode_text, transcript
from workbench.export import export

TINY = Path(__file__).parents[2] / "data" / "tiny-llama"
WORDS = "set river amber ; get river"
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['role'] }} {{ m['content'] }}{% endfor %} ;"


@pytest.fixture(scope="module")
def bundle(exports):
    return exports.bundle(TINY, max_seq_len=32)


@pytest.fixture(scope="module")
def chatting(tmp_path_factory):
    """A bundle of a checkpoint whose tokenizer has a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    checkpoint = shutil.copytree(TINY, folder / "checkpoint")
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    return export(checkpoint, folder / "bundle", max_seq_len=32, progress=False)


def invoke(bundle, *arguments):
    return CliRunner().invoke(app, ["generate", str(bundle.root), *arguments])


def test_each_token_s_text_comes_when_it_is_decoded(bundle, monkeypatch):
    decoder, events = Decoder(bundle), []
    step = Decoder.step
    monkeypatch.setattr(
        Decoder, "step", lambda *a, **how: events.append(None) or step(*a, **how)
    )
    result = transcript(decoder, encode_text(TINY, WORDS), 4, on_text=events.append)
    pieces = [event for event in events if event]
    assert (
        "".join(pieces) == result["text"] and len(pieces) == len(result["tokens"]) > 1
    )
    # before the second token is decoded
    assert events[0] == pieces[0] and events[1] is None


def test_the_text_is_printed_once_and_json_stays_one_object(bundle):
    text = json.loads(
        invoke(bundle, "--prompt", WORDS, "--max-new", "3", "--json").stdout
    )["text"]
    shown = invoke(bundle, "--prompt", WORDS, "--max-new", "3").stdout
    assert shown.count(text) == 1 and shown.startswith(f"{text}\n3 tokens")


def test_chat_runs_the_message_through_the_template(chatting, monkeypatch):
    prompts = []
    monkeypatch.setattr(
        "workbench.decode.transcript.transcript",
        lambda decoder, ids, *rest, **options: (
            prompts.append(ids) or transcript(decoder, ids, 1)
        ),
    )
    assert invoke(chatting, "--chat", "--prompt", "set river", "--json").exit_code == 0
    assert prompts == [encode_text(TINY, "user set river ;")]


@pytest.mark.parametrize("template", [None, "{{ messages[0]['content'] | nothing }}"])
def test_chat_without_a_template_that_works_is_refused_by_name(
    chatting, bundle, tmp_path, template
):
    folder = bundle.root / "tokenizer"
    if template:
        folder = shutil.copytree(TINY, tmp_path / "broken")
        (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(InputError, match="chat template") as refused:
        encode_chat(folder, "hello")
    assert str(folder) in str(refused.value)


def test_chat_needs_a_text(chatting):
    refused = invoke(chatting, "--chat", "--prompt-ids", "1,2").exception
    assert isinstance(refused, InputError) and "--prompt" in str(refused)
