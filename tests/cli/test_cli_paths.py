"""Wrong paths on the command line: one line with the next step, and torch is not loaded."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from workbench import Bundle, InputError
from workbench.cli.app import app
from workbench.models.checkpoint import Checkpoint

TINY = Path(__file__).parents[2] / "data" / "tiny-llama"
HEAVY = ("torch", "coremltools", "transformers")
COMMANDS = {
    "export": ("export", "wrong", "out"),
    "export to": ("export", TINY, "taken"),
    "validate": ("validate", "wrong"),
    "generate": ("generate", "wrong", "--prompt-ids", "1"),
    "golden": ("golden", "wrong", "--out", "g"),
    "explain": ("explain", "wrong", "--checkpoint", TINY),
    "plan": ("plan", "wrong"),
    "adopt": ("adopt", "wrong", "--checkpoint", "wrong", "--out", "g"),
    "evaluate": ("evaluate", "wrong", "--text", "wrong"),
    "golden text": ("golden", TINY, "--out", "g", "--text", "wrong"),
}
CHILD = """
import atexit, sys
atexit.register(lambda: print("loaded", [name for name in {heavy!r} if name in sys.modules]))
sys.argv = ["workbench", *{arguments!r}]
from workbench.cli import main
main()
"""


def child(folder, *arguments):
    """Runs a command in its own process; (exit code, heavy modules it loaded, lines on stderr)."""
    code = CHILD.format(heavy=HEAVY, arguments=[str(a) for a in arguments])
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True
    )
    return ended.returncode, ended.stdout.splitlines()[-1], ended.stderr.splitlines()


@pytest.mark.matrix(3, wide=20)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_path_costs_one_line_and_no_heavy_import(tmp_path, command):
    (tmp_path / "taken").mkdir()
    code, loaded, lines = child(tmp_path, *COMMANDS[command])
    assert (code, loaded, len(lines)) == (2, "loaded []", 1), lines
    assert lines[0].startswith("workbench: ") and " Next: " in lines[0]
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.fixture(scope="module")
def llama(exports):
    return exports.bundle(exports.checkpoint("llama"))


@pytest.mark.matrix(2, wide=5)
@pytest.mark.parametrize(
    "command", ["validate", "generate", "evaluate", "explain", "plan"]
)
def test_a_damaged_bundle_costs_one_line_and_no_heavy_import(llama, tmp_path, command):
    copy = shutil.copytree(llama.root, tmp_path / "b")
    weights = next(copy.rglob("weight.bin"))
    weights.write_bytes(weights.read_bytes()[:-1])
    rest = {
        "generate": ["--prompt-ids", "1"],
        "evaluate": ["--prompt-ids", "1"],
        "explain": ["--checkpoint", TINY],
        "validate": ["--checkpoint", TINY],
    }
    code, loaded, lines = child(tmp_path, command, copy, *rest.get(command, []))
    assert (code, loaded, len(lines)) == (2, "loaded []", 1) and "weight.bin" in lines[
        0
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b"]


@pytest.mark.matrix(1, wide=5)
@pytest.mark.parametrize("option", ["--golden", "--checkpoint", "--tasks"])
def test_a_wrong_second_path_is_refused_as_soon(llama, tmp_path, option):
    code, loaded, lines = child(tmp_path, "validate", llama.root, option, "nowhere")
    assert (code, loaded, len(lines)) == (2, "loaded []", 1) and "nowhere" in lines[0]


def refusal(open_, path) -> str:
    with pytest.raises(InputError) as found:
        open_(path)
    return str(found.value)


def gguf(folder):
    (folder / "model-Q4.gguf").write_bytes(b"GGUF")


def test_what_is_no_checkpoint_is_named_with_the_next_step(
    llama, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some").mkdir()
    gguf(tmp_path / "some")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    hub = "run: hf download meta-llama/Llama-3.2-1B."
    for path, found, step in [
        ("meta-llama/Llama-3.2-1B", "Hub", hub),
        ("https://huggingface.co/meta-llama/Llama-3.2-1B", "Hub", hub),
        ("some/Llama", "no folder", "correct the path"),
        ("some", "GGUF", "hf download"),
        ("some/model-Q4.gguf", "GGUF", "hf download"),
        (llama.root, "a bundle", "the checkpoint that it was exported from"),
        (llama.root / "head_00.mlpackage", "a Core ML model", "checkpoint"),
        (TINY / "model.safetensors", "a file", f"give the folder {TINY}"),
    ]:
        text = refusal(Checkpoint, path)
        assert f"found {found}" in text or (
            found == "Hub" and "Hugging Face Hub" in text
        ), text
        assert step in text.partition(" Next: ")[2] and "huggingface-cli" not in text, (
            text
        )


def test_what_is_no_bundle_is_named_with_the_next_step(llama, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gguf(tmp_path)
    alone = shutil.copytree(
        llama.root / "head_00.mlpackage", tmp_path / "alone.mlpackage"
    )
    (tmp_path / "compiled.mlmodelc").mkdir()
    for path, found, step in [
        (
            llama.root / "head_00.mlpackage",
            "one .mlpackage",
            f"give the folder {llama.root}",
        ),
        (alone, "one .mlpackage", "explain and plan take a package"),
        ("compiled.mlmodelc", "one .mlmodelc", "workbench export"),
        (TINY, "a Hugging Face checkpoint", f"run: workbench export {TINY} BUNDLE"),
        ("model-Q4.gguf", "GGUF weights", "workbench export"),
        (
            llama.root / "bundle.json",
            "its manifest alone",
            f"give the folder {llama.root}",
        ),
        ("nowhere", "nothing there", "workbench export"),
    ]:
        text = refusal(Bundle.open, path)
        assert f"found {found}" in text and step in text.partition(" Next: ")[2], text


def test_a_pointer_of_git_lfs_is_answered_with_a_command_that_exists(tmp_path):
    copy = shutil.copytree(TINY, tmp_path / "c")
    (copy / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    )
    text = refusal(Checkpoint, copy)
    assert "hf download ORG/NAME --local-dir" in text and "huggingface-cli" not in text


def test_a_preset_that_is_none_is_answered_with_all_of_them(tmp_path):
    found = (
        CliRunner()
        .invoke(app, ["export", str(TINY), str(tmp_path / "b"), "--compress", "int8"])
        .exception
    )
    assert str(found).startswith(
        "compress: found 'int8'; needs one of fp16, int8-tensor, int8-channel, int4-block32, lut4, lut6. Next: "
    )


def test_the_version_is_printed():
    from importlib.metadata import version

    found = CliRunner().invoke(app, ["--version"])
    assert (found.exit_code, found.stdout) == (0, f"workbench {version('workbench')}\n")


def commands(command, *names):
    yield names, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, *names, name)


def test_help_shows_every_bracket_of_its_texts():
    shown = 0
    for names, command in commands(typer.main.get_command(app)):
        texts = [
            command.help or "",
            *(getattr(p, "help", None) or "" for p in command.params),
        ]
        brackets = [b for text in texts for b in re.findall(r"\[[^\]]*\]", text)]
        page = (
            CliRunner()
            .invoke(
                app, [*names, "--help"], env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"}
            )
            .stdout
        )
        assert all(b in page for b in brackets), (names, brackets)
        shown += len(brackets)
    assert shown


def test_help_is_in_groups():
    page = (
        CliRunner()
        .invoke(app, ["--help"], env={"COLUMNS": "120", "TERMINAL_WIDTH": "120"})
        .stdout
    )
    headings = [
        line.split("─ ")[1].split(" ─")[0]
        for line in page.splitlines()
        if "╭─ " in line
    ]
    assert (
        len(headings) > 4
        and len(set(headings)) == len(headings)
        and "Commands" not in headings
    )


def test_a_golden_of_another_checkpoint_is_refused(llama, exports, tmp_path):
    golden = tmp_path / "g"
    other = exports.checkpoint("llama", num_hidden_layers=2, rms_norm_eps=1e-2)
    assert (
        CliRunner()
        .invoke(
            app, ["golden", str(other), "--out", str(golden), "--prompt-ids", "1,2,3"]
        )
        .exit_code
        == 0
    )
    found = CliRunner().invoke(
        app, ["validate", str(llama.root), "--golden", str(golden)]
    )
    assert isinstance(found.exception, InputError) and not found.stdout
    assert "one of checkpoint" in str(found.exception)
