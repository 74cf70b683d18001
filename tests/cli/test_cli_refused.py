"""Bad input: one message that names it and the next step, exit code 2, and nothing left behind.
Paths that lead elsewhere are in test_cli_paths.py."""

import json
import shutil
from pathlib import Path

import pytest
from in_process import cli

DATA = Path(__file__).parents[2] / "data"
TINY = DATA / "tiny-llama"
GOLDEN = "golden", TINY, "--out"


def refused(*arguments) -> str:
    result = cli(*arguments)
    assert result.exit_code == 2 and result.stdout == ""
    return str(result.exception)


@pytest.fixture(scope="module")
def llama(exports):
    return exports.bundle(TINY, max_seq_len=64).root


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("export", TINY, "out", "--max-seq-len", "0"), "max_seq_len"),
        (("export", TINY, "out", "--compress", "int3"), "int3"),
        (("export", TINY, "out", "--tokens", "1;2"), "1-4, 4 or 1,64"),
        (("sweep", "nowhere.yaml"), "grid"),
        (("report", "99"), "99"),
        (("plan", TINY, "--memory", "lots"), "lots"),
        (("plan", TINY, "--memory", "0"), "above zero"),
        (("plan", TINY, "--tokens", "4-1"), "tokens"),
        (("plan", TINY, "--chip", "M9"), "M9"),
        ((*GOLDEN, "."), "--out"),
        ((*GOLDEN, "/proc/x/g"), "--out"),
        ((*GOLDEN, "new/g", "--prompt-ids", ""), "prompt ids"),
        ((*GOLDEN, "new/g", "--prompt-ids", "1,256"), "from 0 to 255"),
        (("run", "34", "--set", "DAY=2026-13-45"), "DAY"),
    ],
)
def test_bad_input_is_refused_by_name(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert words in refused(*arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", ["abc", "1.5", "true"])
def test_a_parameter_of_another_type_is_refused_before_anything_runs(
    value, monkeypatch
):
    monkeypatch.setattr("workbench.experiment.run_notebook", pytest.fail)
    problem = refused("run", "5", "--set", f"MAX_SEQ_LEN={value}")
    assert "MAX_SEQ_LEN" in problem and "a value like 256" in problem


TASKS = "--tasks", DATA / "tasks" / "heldout.jsonl"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("validate", "--golden", DATA / "README.md", *TASKS), "--checkpoint"),
        (("validate", "--checkpoint", TINY, "--prompt-ids", ""), "prompt ids"),
        (("validate", "--checkpoint", TINY, "--max-kl", "-1"), "--max-kl"),
        (("validate", "--alone"), "leave --alone out"),
        (("validate", "--each-unit"), "--golden"),
        (("validate", "--prompt-ids", "1"), "--golden"),
        (("explain",), "--checkpoint"),
        (("explain", "--only", "part"), 'Choose from: "parts"'),
        (("explain", "--only", "ranges", "--prompt-ids", "1,2,400"), "from 0 to 255"),
        (("generate",), "one of them"),
        (("generate", "--prompt-ids", "1," * 64 + "1"), "max_seq_len"),
        (("generate", "--prompt-ids", "256"), "a whole number from 0 to 255"),
        (("generate", "--prompt-ids", "1", "--max-new", -3), "new tokens"),
        (("generate", "--chat", "--prompt-ids", "1,2"), "--prompt"),
        (("sweep", "--T", "1;2"), "run.T.0: '1;2'"),
    ],
)
def test_bad_input_about_a_bundle_is_refused(llama, command, words):
    name, *rest = command
    assert words in refused(name, llama, *rest)


@pytest.mark.parametrize("command", ["golden", "validate", "explain"])
def test_several_prompts_and_a_missing_text_are_refused(command, llama, tmp_path):
    first = [llama, "--checkpoint", TINY]
    if command == "golden":
        first = [TINY, "--out", tmp_path / "g"]
    prompts = "--prompt", "get", "--prompt-ids", "1"
    assert "one of --prompt" in refused(command, *first, *prompts)
    assert "no such file" in refused(command, *first, "--text", tmp_path / "none")


def test_text_needs_a_tokenizer(exports):
    bundle = exports.bundle(exports.checkpoint("llama"))
    assert "tokenizer" in refused("generate", bundle.root, "--prompt", "hello")


def test_a_model_type_without_a_family_is_refused(tmp_path):
    folder = shutil.copytree(TINY, tmp_path / "gpt2")
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "gpt2"}
    (folder / "config.json").write_text(json.dumps(config))
    assert "gpt2" in refused("export", folder, tmp_path / "out")


def test_goldens_of_another_checkpoint_are_refused(exports, llama, tmp_path):
    other = exports.checkpoint("llama", num_hidden_layers=1)
    golden = tmp_path / "g"
    assert "exported from" in refused("golden", other, "--out", golden, "--for", llama)
    assert not golden.exists()
