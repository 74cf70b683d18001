"""Wrong paths on the command line: one line with the next step, and torch is not loaded."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from in_process import cli

from workbench import Bundle, InputError
from workbench.models.checkpoint import Checkpoint

TINY = Path(__file__).parents[2] / "data" / "tiny-llama"
HEAVY = ("torch", "coremltools", "transformers")
# the command, and what its message names
COMMANDS = [
    (("export", "wrong", "out"), "wrong"),
    (("export", TINY, "damaged"), "damaged"),
    (("validate", "wrong"), "wrong"),
    (("generate", "wrong", "--prompt-ids", "1"), "wrong"),
    (("golden", "wrong", "--out", "g"), "wrong"),
    (("golden", TINY, "--out", "g", "--text", "wrong"), "wrong"),
    (("explain", "wrong", "--checkpoint", TINY), "wrong"),
    (("plan", "wrong"), "wrong"),
    (("adopt", "wrong", "--checkpoint", "wrong", "--out", "g"), "wrong"),
    (("evaluate", "wrong", "--text", "wrong"), "wrong"),
    (("validate", "damaged", "--checkpoint", TINY), "weight.bin"),
    (("generate", "damaged", "--prompt-ids", "1"), "weight.bin"),
    (("evaluate", "damaged", "--prompt-ids", "1"), "weight.bin"),
    (("explain", "damaged", "--checkpoint", TINY), "weight.bin"),
    (("plan", "damaged"), "weight.bin"),
    (("validate", "whole", "--golden", "nowhere"), "nowhere"),
    (("validate", "whole", "--checkpoint", "nowhere"), "nowhere"),
    (("validate", "whole", "--tasks", "nowhere"), "nowhere"),
]
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


@pytest.fixture(scope="module")
def llama(exports):
    return exports.bundle(exports.checkpoint("llama"))


@pytest.mark.matrix(5, wide=20)
@pytest.mark.parametrize("command, named", COMMANDS)
def test_a_wrong_path_costs_one_line_and_no_heavy_import(
    llama, tmp_path, command, named
):
    for name in ("damaged", "whole"):
        shutil.copytree(llama.root, tmp_path / name)
    weights = next((tmp_path / "damaged").rglob("weight.bin"))
    weights.write_bytes(weights.read_bytes()[:-1])
    code, loaded, lines = child(tmp_path, *command)
    assert (code, loaded, len(lines)) == (2, "loaded []", 1), lines
    assert lines[0].startswith("workbench: ") and named in lines[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged", "whole"]


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
        ("meta-llama/Llama-3.2-1B", "nothing there", hub),
        ("https://huggingface.co/meta-llama/Llama-3.2-1B", "nothing there", hub),
        ("some/Llama", "nothing there", "hf download"),
        ("some", "GGUF", "hf download"),
        ("some/model-Q4.gguf", "GGUF", "hf download"),
        (llama.root, "a bundle", "hf download"),
        (llama.root / "head_00.mlpackage", "one Core ML model", "hf download"),
        (TINY / "model.safetensors", "a file", f"give the folder {TINY}"),
    ]:
        text = refusal(Checkpoint, path)
        assert f"found {found}" in text, text
        assert step in text.partition(" Next: ")[2], text


def test_what_is_no_bundle_is_named_with_the_next_step(llama, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gguf(tmp_path)
    alone = shutil.copytree(
        llama.root / "head_00.mlpackage", tmp_path / "alone.mlpackage"
    )
    (tmp_path / "compiled.mlmodelc").mkdir()
    inside = f"give the folder {llama.root}"
    for path, found, step in [
        (llama.root / "head_00.mlpackage", "one Core ML model", inside),
        (alone, "one Core ML model", "workbench export"),
        ("compiled.mlmodelc", "one Core ML model", "workbench export"),
        (TINY, "a Hugging Face checkpoint", "workbench export"),
        ("model-Q4.gguf", "GGUF weights", "workbench export"),
        (llama.root / "bundle.json", "a file", inside),
        ("nowhere", "nothing there", "workbench export"),
    ]:
        text = refusal(Bundle.open, path)
        assert f"found {found}" in text and step in text.partition(" Next: ")[2], text


def test_a_pointer_of_git_lfs_is_named_with_the_next_step(llama, tmp_path):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    copy = shutil.copytree(TINY, tmp_path / "c")
    (copy / "model.safetensors").write_text(pointer)
    assert "hf download ORG/NAME --local-dir" in refusal(Checkpoint, copy)
    copy = shutil.copytree(llama.root, tmp_path / "b")
    next(copy.rglob("weight.bin")).write_text(pointer)
    assert "Git LFS" in refusal(Bundle.open, copy)


def test_a_preset_that_is_none_is_answered_with_all_of_them(tmp_path):
    found = cli("export", TINY, tmp_path / "b", "--compress", "int8").exception
    assert str(found).startswith(
        "compress: found 'int8'; needs 'fp16', 'int8-tensor', 'int8-channel', 'int4-block32', 'lut4' or 'lut6'. Next: "
    )
