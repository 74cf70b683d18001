"""The text on which a model is judged by default is one that its tokenizer knows."""

import pytest
from tiny import DATA, checkpoint_that_knows

from workbench.check import tasks, text
from workbench.check.golden import Golden
from workbench.check.tasks import load_tasks, prompt_ids
from workbench.cli.options import Prompt
from workbench.decode.tokenizer import load_tokenizer
from workbench.models.checkpoint import Checkpoint


@pytest.fixture
def english(checkpoint_copy):
    """A checkpoint whose tokenizer knows the first words of the paragraphs."""
    return checkpoint_that_knows(text.paragraphs().split()[:100], checkpoint_copy)


def test_the_paragraphs_are_long_enough_for_a_long_prompt():
    assert len(text.paragraphs().split()) >= 600
    assert text.paragraphs().isascii()


def test_a_model_of_english_reads_the_paragraphs(english):
    ids = text.default_ids(english, 12)
    words = load_tokenizer(english.path).decode(ids).split()
    assert words == text.paragraphs().split()[:12]
    assert prompt_ids(english.path, 12) == ids
    assert Prompt(tokens=12).token_ids(english) == ids


def test_a_small_trained_model_reads_tasks_that_it_was_not_trained_on(tiny_llama):
    ids = text.default_ids(tiny_llama, 40)
    reader = load_tokenizer(tiny_llama.path)
    prompt = load_tasks(DATA / "tasks" / "heldout.jsonl")[0]["prompt"]
    assert reader.unk_token_id not in ids
    assert ids == reader.encode(prompt)[:40]


@pytest.mark.parametrize("project", [True, False])
def test_a_tokenizer_that_knows_neither_text_gets_random_ids(
    english, monkeypatch, project
):
    """Outside a checkout there are no tasks to read."""
    monkeypatch.setattr(text, "paragraphs", lambda: "Ein Satz in einer anderen Sprache")
    if not project:
        monkeypatch.setattr(text, "TASKS", "elsewhere.jsonl")
    ids = text.default_ids(english, 12)
    assert len(set(ids)) > 3 and max(ids) < english.config.vocab_size


def test_an_empty_text_is_none_though_a_tokenizer_adds_a_first_token(
    tiny_llama, monkeypatch
):
    """Outside a checkout there are no tasks to read."""
    monkeypatch.setattr(text, "TASKS", "elsewhere.jsonl")
    assert len(text.default_ids(tiny_llama, 12)) == 12


def test_without_a_tokenizer_ids_are_random_behind_the_model_s_first_token(exports):
    source = Checkpoint(exports.checkpoint("llama"))
    ids = text.default_ids(source, 12)
    assert ids[0] == source.config.bos_token_id and len(ids) == 12
    assert ids == text.default_ids(exports.bundle(source.path), 12)


def test_commands_judge_a_bundle_on_as_much_text_as_its_cache_takes(
    tiny_llama, exports
):
    bundle = exports.bundle(tiny_llama.path, max_seq_len=16)
    assert Prompt().token_ids(bundle) == text.default_ids(tiny_llama, 16)
    assert Prompt(tokens=5).token_ids(bundle) == text.default_ids(tiny_llama, 5)
    assert Prompt().token_ids(tiny_llama) == text.default_ids(tiny_llama)


def test_a_golden_is_of_the_default_text(tiny_llama, tmp_path):
    golden = Golden.of(tiny_llama, folder=tmp_path)
    assert golden.ids.tolist() == tasks.prompt_ids(tiny_llama.path, text.COUNT)
