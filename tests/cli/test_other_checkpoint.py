"""Every command that takes a bundle and a checkpoint, or a golden, compares the two before it
computes anything with them."""

import inspect

import pytest
from in_process import cli
from test_cli_words import PAGES
from tiny import DATA

from workbench import Golden
from workbench.check import hf
from workbench.cli import options
from workbench.decode import Decoder

OTHER = DATA / "tiny-qwen2"
# `adopt` makes the bundle, and `generate` takes no checkpoint
BEFORE_A_BUNDLE = {"adopt", "export", "plan"}
COMMANDS = {
    "validate": "validate {bundle} --checkpoint {other}",
    "validate units": "validate units {bundle} --checkpoint {other}",
    "explain": "explain {bundle} --checkpoint {other}",
    "explain parts": "explain parts {bundle} --checkpoint {other}",
    "explain variant": "explain variant {bundle} --checkpoint {other}",
    "evaluate": "evaluate {bundle} --prompt-ids 1,2,3 --checkpoint {other}",
    "golden": "golden {other} --out {folder}/g --for {bundle}",
}


@pytest.fixture
def nothing_computes(monkeypatch):
    """Fails where token ids are made, or Hugging Face's model or a bundle is loaded."""
    for owner, name in [
        (options.Prompt, "token_ids"),
        (hf.Reference, "__init__"),
        (Decoder, "__init__"),
    ]:
        monkeypatch.setattr(owner, name, lambda *_, name=name, **__: pytest.fail(name))


def test_every_command_with_both_has_a_case():
    with_checkpoint = {
        name
        for name, function in PAGES.items()
        if "checkpoint" in inspect.signature(function).parameters
    }
    assert with_checkpoint - BEFORE_A_BUNDLE == COMMANDS.keys()


@pytest.mark.parametrize("name", COMMANDS)
def test_another_checkpoint_is_refused_before_anything_is_computed(
    name, llama_bundle, tmp_path, nothing_computes
):
    places = {"bundle": llama_bundle.root, "other": OTHER, "folder": tmp_path}
    result = cli(*(word.format_map(places) for word in COMMANDS[name].split()))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "checkpoint tiny-qwen2: found" in result.stderr
    assert f"bundle {llama_bundle.root.name} was exported from" in result.stderr
    assert not list(tmp_path.iterdir())


def test_the_hashes_of_another_checkpoint_are_said_to_be_of_its_content(
    llama_bundle, exports
):
    other = exports.checkpoint("llama", num_hidden_layers=1)
    result = cli("validate", llama_bundle.root, "--checkpoint", other)
    ours = llama_bundle.manifest.checkpoint["sha256"]
    assert result.exit_code == 2
    assert f"checkpoint {other.name}: found content hash " in result.stderr
    assert f", content hash {ours[:12]}, the checkpoint that bundle" in result.stderr


@pytest.mark.parametrize("command", ["validate", "validate units"])
def test_a_golden_of_another_checkpoint_is_refused_before_a_shard_is_loaded(
    command, llama_bundle, tmp_path, monkeypatch
):
    file = Golden.of(OTHER, [1, 2, 3], tmp_path).file
    monkeypatch.setattr(Decoder, "__init__", lambda *_, **__: pytest.fail("loaded"))
    result = cli(*command.split(), llama_bundle.root, "--golden", file)
    assert result.exit_code == 2
    assert "the golden's checkpoint: found content hash " in result.stderr
