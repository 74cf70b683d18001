"""A prompt as text, as a file or as token ids: the same ids in every command."""

import json
from pathlib import Path

import pytest
from circle import wide
from typer.testing import CliRunner

from workbench import InputError
from workbench.check.golden import Golden
from workbench.cli.app import app
from workbench.cli.notebooks import typed
from workbench.decode.transcript import encode_text

TINY = Path(__file__).parents[2] / "data" / "tiny-llama"
WORDS = "set river amber ; get river"


def invoke(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture
def text(tmp_path) -> Path:
    (tmp_path / "text").write_text(WORDS)
    return tmp_path / "text"


def golden_ids(tmp_path, *arguments) -> list[int]:
    result = invoke("golden", TINY, "--out", tmp_path / "g", *arguments)
    assert result.exit_code == 0, result.exception
    return Golden.load(tmp_path / "g").ids.tolist()


def test_golden_takes_text_a_file_and_ids(tmp_path, text):
    ids = encode_text(TINY, WORDS)
    assert golden_ids(tmp_path, "--prompt", WORDS) == ids
    assert golden_ids(tmp_path, "--text", text) == ids
    assert golden_ids(tmp_path, "--text", text, "--tokens", 4) == ids[:4]
    assert golden_ids(tmp_path, "--prompt-ids", ",".join(map(str, ids))) == ids


@pytest.mark.parametrize(
    "command", [["explain", "--only", "parts"], wide(["validate"])]
)
def test_validate_and_explain_take_the_same(exports, text, command):
    name, *only = command
    root = exports.bundle(TINY, max_seq_len=32).root
    ids = ",".join(map(str, encode_text(TINY, WORDS)))
    prompts = ("--text", text), ("--prompt-ids", ids), ("--prompt", "get")
    arguments = (name, root, "--checkpoint", TINY, "--json", *only)
    found = [json.loads(invoke(*arguments, *prompt).stdout) for prompt in prompts]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("command", ["golden", "validate", "explain"])
def test_several_prompts_are_refused(command, exports, tmp_path):
    root = exports.bundle(TINY, max_seq_len=32).root
    first = (
        [TINY, "--out", tmp_path / "g"]
        if command == "golden"
        else [root, "--checkpoint", TINY]
    )
    both = invoke(command, *first, "--prompt", "get", "--prompt-ids", "1")
    assert isinstance(both.exception, InputError) and "at most one" in str(
        both.exception
    )
    missing = invoke(command, *first, "--text", tmp_path / "none")
    assert isinstance(missing.exception, InputError) and "no such file" in str(
        missing.exception
    )


def test_a_text_with_a_colon_is_a_text_parameter():
    assert typed("PROMPT", "note: this", "") == "note: this"
    assert typed("PROMPT", "note: this", None) == "note: this"
    assert typed("PREFILL", '{"tokens": "1-16"}', {}) == {"tokens": "1-16"}
