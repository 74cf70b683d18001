"""`generate`: Hugging Face's tokens, text as it comes, chat templates, sampling; prompts of every
command."""

import shutil

import numpy as np
import pytest
import torch
from in_process import cli, invoke
from refusal import refused
from tiny import DATA

from workbench import Decoder, log
from workbench.check.golden import Golden
from workbench.decode import Sequences
from workbench.decode.timed import timed_generation
from workbench.decode.tokenizer import encode_chat, encode_text
from workbench.exporter import export

TINY = DATA / "tiny-llama"
WORDS = "set river amber ; get river"
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['role'] }} {{ m['content'] }}{% endfor %} ;"


def test_tokens_are_hugging_face_s_and_all_logits_are_written(
    llama_bundle, tmp_path, exports
):
    ids, new = [1, 4, 69, 173, 13, 4, 72], 24
    prompt = "--prompt-ids", ",".join(map(str, ids)), "--max-new", new
    options = "--precision", "exact", "--logits", tmp_path / "l.npy"
    generation = invoke("generate", llama_bundle.root, *prompt, *options)
    with torch.inference_mode():
        model = exports.hf(TINY)
        ids = torch.tensor([ids])
        expected = model.generate(ids, max_new_tokens=new, do_sample=False)
    assert generation["tokens"] == expected[0, ids.shape[1] :].tolist()
    assert {"text", "prefill", "decode", "runtime", "precision"} <= generation.keys()
    logits = np.load(tmp_path / "l.npy")
    assert logits.shape == (len(generation["tokens"]) + 1, 256)
    assert logits.dtype == np.float32
    assert logits[:-1].argmax(1).tolist() == generation["tokens"]


def test_each_token_s_text_comes_when_it_is_decoded(llama_bundle, monkeypatch):
    decoder, events, step = Decoder(llama_bundle), [], Sequences.step

    def record_step(*arguments, **options):
        events.append(None)
        return step(*arguments, **options)

    monkeypatch.setattr(Sequences, "step", record_step)
    result = timed_generation(
        decoder, encode_text(TINY, WORDS), 4, on_text=events.append
    )
    pieces = [event for event in events if event]
    assert "".join(pieces) == result["text"]
    assert len(pieces) == len(result["tokens"]) > 1
    # before the second token is decoded
    assert events[0] == pieces[0] and events[1] is None


def test_the_text_is_printed_once_and_json_stays_one_object(llama_bundle):
    command = "generate", llama_bundle.root, "--prompt", WORDS, "--max-new", "3"
    text, printed = invoke(*command)["text"], cli(*command).stdout
    assert printed.count(text) == 1 and printed.startswith(f"{text}\n3 tokens")


def test_sampling_follows_its_seed(llama_bundle):
    def generate(*options):
        prompt = "--prompt-ids", "1,4,69", "--max-new", 8
        return invoke("generate", llama_bundle.root, *prompt, *options)["tokens"]

    sampled = "--temperature", "3", "--top-k", "40", "--top-p", "0.9"
    tokens = generate(*sampled, "--seed", "1")
    assert generate(*sampled, "--seed", "1") == tokens
    assert generate(*sampled, "--seed", "2") != tokens
    greedy = generate()
    assert generate("--temperature", "1", "--top-k", "1") == greedy


@pytest.fixture(scope="module")
def chatting(tmp_path_factory):
    """A bundle of a checkpoint whose tokenizer has a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    checkpoint = shutil.copytree(TINY, folder / "checkpoint")
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    return export(checkpoint, folder / "bundle", max_seq_len=32)


def test_chat_runs_the_message_through_the_template(chatting, monkeypatch):
    prompts = []

    def generate_one_token(decoder, ids, *rest, **options):
        prompts.append(ids)
        return timed_generation(decoder, ids, 1)

    monkeypatch.setattr("workbench.decode.timed.timed_generation", generate_one_token)
    invoke("generate", chatting.root, "--chat", "--prompt", "set river", "--max-new", 1)
    assert prompts == [encode_text(TINY, "user set river ;")]


@pytest.mark.parametrize("template", [None, "{{ messages[0]['content'] | nothing }}"])
def test_a_chat_template_that_is_missing_or_wrong_is_refused(
    llama_bundle, tmp_path, template
):
    folder = llama_bundle.root / "tokenizer"
    if template:
        folder = shutil.copytree(TINY, tmp_path / "broken")
        (folder / "chat_template.jinja").write_text(template)
    with refused("chat template") as refusal:
        encode_chat(folder, "hello")
    assert str(folder) in str(refusal.value)


def test_a_tokenizer_without_a_chat_template_is_refused_in_one_line(llama_bundle):
    result = cli("generate", llama_bundle.root, "--chat", "--prompt", "hello")
    assert (result.exit_code, result.stdout) == (2, "")
    (*_, message) = result.stderr.splitlines()
    assert message == (
        f"workbench: --chat: found no chat template in {llama_bundle.tokenizer}; needs a "
        "checkpoint that was trained for chat, with its template. Next: leave --chat out, "
        "or export a checkpoint that has one."
    )


def test_golden_takes_text_a_file_and_ids(tmp_path):
    def ids(*prompt):
        invoke("golden", TINY, "--out", tmp_path / "g", *prompt)
        return Golden.load(tmp_path / "g").ids.tolist()

    (tmp_path / "text").write_text(WORDS)
    expected = encode_text(TINY, WORDS)
    assert ids("--prompt", WORDS) == ids("--text", tmp_path / "text") == expected
    assert ids("--text", tmp_path / "text", "--tokens", 4) == expected[:4]
    assert ids("--prompt-ids", ",".join(map(str, expected))) == expected


def test_evaluate_warns_of_a_text_whose_tokens_are_mostly_unknown(
    llama_bundle, tmp_path, monkeypatch
):
    monkeypatch.setattr(log, "project", lambda: tmp_path)
    text, evaluate = tmp_path / "text.txt", ("evaluate", llama_bundle.root, "--text")
    text.write_text("Tiny words that nobody taught it, " * 3)
    with pytest.warns(UserWarning, match="% of the tokens are unknown"):
        invoke(*evaluate, text)
    text.write_text(WORDS)
    assert invoke(*evaluate, text)["tokens"] == len(WORDS.split())


@pytest.mark.parametrize(("count", "is_timed"), [(1, False), (2, False), (3, True)])
def test_a_rate_or_the_reason_why_there_is_none_follows_the_text(
    llama_bundle, count, is_timed
):
    words = "generate", llama_bundle.root, "--prompt-ids", "4,5", "--max-new", count
    rate = invoke(*words)["decode"]["tokens_per_s"]
    summary = cli(*words).stdout.splitlines()[-1]
    assert (rate is not None) == is_timed
    assert ("no tok/s with fewer than 3 new tokens" in summary) != is_timed


@pytest.mark.parametrize("option", ["--prompt", "--prompt-ids"])
def test_an_empty_prompt_is_refused(llama_bundle, option):
    with refused("prompt( ids)?: found no text"):
        invoke("generate", llama_bundle.root, option, "")


def test_a_prompt_that_is_too_long_is_counted_before_anything_is_loaded(
    llama_bundle, monkeypatch
):
    monkeypatch.setattr("workbench.Decoder", None)
    ids = ",".join(["4"] * 40)
    with refused("prompt of 40 tokens: found 8 too many; needs at most 32 tokens, the"):
        invoke("generate", llama_bundle.root, "--prompt-ids", ids, "--max-new", 1)


@pytest.mark.parametrize("command", [["validate"], ["validate", "units"]])
def test_a_prompt_of_a_validation_is_counted_before_hugging_face_s_model_runs(
    llama_bundle, monkeypatch, command
):
    monkeypatch.setattr("workbench.golden.make_golden", pytest.fail)
    prompt = "--prompt-ids", ",".join(["4"] * 40)
    with refused("prompt of 40 tokens.*at most 32 tokens, the bundle's max_seq_len"):
        invoke(*command, llama_bundle.root, "--checkpoint", TINY, *prompt)


def test_a_model_that_ends_at_once_is_asked_with_chat(
    chatting, llama_bundle, monkeypatch
):
    def end_at_once(decoder, ids, *rest, **options):
        result = timed_generation(decoder, ids, 1)
        return result | {"tokens": [decoder.manifest.tokens.eos[0]], "text": "</s>"}

    monkeypatch.setattr("workbench.decode.timed.timed_generation", end_at_once)
    prompt = "--prompt", "set river", "--max-new", 4
    text = cli("generate", chatting.root, *prompt, raises=True).stdout
    assert (
        "1 token, no tok/s" in text
        and "with --chat, --prompt is a user's message" in text
    )
    for other in ([chatting.root, "--chat"], [llama_bundle.root]):
        assert "with --chat" not in cli("generate", *other, *prompt, raises=True).stdout


def test_text_of_an_answer_needs_no_advice(chatting):
    prompt = "--prompt", WORDS, "--max-new", 2
    text = cli("generate", chatting.root, *prompt, raises=True).stdout
    assert "2 tokens" in text and "with --chat" not in text


@pytest.mark.parametrize("command", [[], ["parts"], ["ranges"], ["op"]])
def test_a_prompt_of_an_explanation_is_counted_before_anything_runs(
    llama_bundle, monkeypatch, command
):
    monkeypatch.setattr("workbench.Decoder", None)
    monkeypatch.setattr("workbench.golden.make_golden", pytest.fail)
    monkeypatch.setattr("workbench.explain.operation.find", pytest.fail)
    arguments = [llama_bundle.root, "--prompt-ids", ",".join(["4"] * 40)]
    if command not in (["ranges"], ["op"]):
        arguments += ["--checkpoint", TINY]
    with refused("prompt of 40 tokens: found 8 too many"):
        invoke("explain", *command, *arguments)
