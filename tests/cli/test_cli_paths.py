"""Wrong paths on the command line: one line with the next step, and torch is not loaded."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from refusal import refused
from tiny import DATA

from workbench import Bundle
from workbench.models.checkpoint import Checkpoint

TINY = DATA / "tiny-llama"
HEAVY = ("torch", "coremltools", "transformers")
# What the message has to name → commands in a folder that has `damaged`, a bundle with a weight file
# that is cut off, `whole`, a bundle, and nothing else: `wrong` and `nowhere` do not exist.
COMMANDS = {
    "wrong": [
        "export wrong out",
        "validate wrong",
        "generate wrong --prompt-ids 1",
        "golden wrong --out g",
        f"golden '{TINY}' --out g --text wrong",
        f"explain wrong --checkpoint '{TINY}'",
        f"explain parts wrong --checkpoint '{TINY}'",
        f"explain variant wrong --checkpoint '{TINY}'",
        "explain ranges wrong",
        "explain op wrong",
        "validate units wrong --golden g",
        "plan wrong",
        "adopt wrong --checkpoint wrong --out g",
        "evaluate wrong --text wrong",
    ],
    "damaged": [f"export '{TINY}' damaged"],
    "weight.bin": [
        f"validate damaged --checkpoint '{TINY}'",
        "generate damaged --prompt-ids 1",
        "evaluate damaged --prompt-ids 1",
        f"explain damaged --checkpoint '{TINY}'",
        "plan damaged",
    ],
    "nowhere": [
        "validate whole --golden nowhere",
        "validate whole --checkpoint nowhere",
        "explain parts whole --checkpoint nowhere",
        "validate units whole --golden nowhere",
        "validate whole --tasks nowhere",
    ],
}
CHILD = """
import atexit, sys
atexit.register(lambda: print("loaded", [name for name in {heavy!r} if name in sys.modules]))
sys.argv = ["workbench", *{arguments!r}]
from workbench.cli import main
main()
"""


@pytest.fixture(scope="module")
def llama(exports):
    return exports.bundle("llama")


@pytest.mark.matrix(5, wide=20)
@pytest.mark.parametrize(
    "command, named",
    [(command, named) for named, commands in COMMANDS.items() for command in commands],
)
def test_a_wrong_path_costs_one_line_and_no_heavy_import(
    llama, tmp_path, command, named
):
    for name in ("damaged", "whole"):
        shutil.copytree(llama.root, tmp_path / name)
    weights = next((tmp_path / "damaged").rglob("weight.bin"))
    weights.write_bytes(weights.read_bytes()[:-1])
    code = CHILD.format(heavy=HEAVY, arguments=shlex.split(command))
    child = [sys.executable, "-c", code]
    ended = subprocess.run(child, cwd=tmp_path, capture_output=True, text=True)
    (line,) = ended.stderr.splitlines()
    assert (ended.returncode, ended.stdout) == (2, "loaded []\n"), line
    assert line.startswith("workbench: ") and named in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged", "whole"]


def assert_refused(open_path, path: str | Path, actual: str, step: str) -> None:
    """The message says that `actual` is at the path, and its next step contains `step`."""
    with refused(f"found {actual}.* Next: .*{step}"):
        open_path(path)


def test_what_is_no_checkpoint_or_no_bundle_is_named_with_the_next_step(
    llama, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "model-Q4.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    hub = "run: hf download meta-llama/Llama-3.2-1B."
    for wrong in [
        ("meta-llama/Llama-3.2-1B", "nothing there", hub),
        ("https://huggingface.co/meta-llama/Llama-3.2-1B", "nothing there", hub),
        ("some/Llama", "nothing there", "hf download"),
        ("some", "GGUF", "hf download"),
        ("some/model-Q4.gguf", "GGUF", "hf download"),
        (llama.root, "a bundle", "give the checkpoint that it was exported from"),
        (llama.root / "head_00.mlpackage", "one Core ML model", "hf download"),
        (TINY / "model.safetensors", "a file", f"give the folder {TINY}"),
    ]:
        assert_refused(Checkpoint, *wrong)
    head = llama.root / "head_00.mlpackage"
    shutil.copytree(head, "alone.mlpackage")
    (tmp_path / "compiled.mlmodelc").mkdir()
    inside = f"give the folder {llama.root}"
    for wrong in [
        (head, "one Core ML model", inside),
        ("alone.mlpackage", "one Core ML model", "workbench export"),
        ("compiled.mlmodelc", "one Core ML model", "workbench export"),
        (TINY, "a Hugging Face checkpoint", "workbench export"),
        ("some/model-Q4.gguf", "GGUF weights", "workbench export"),
        (llama.root / "bundle.json", "a file", inside),
        ("nowhere", "nothing there", "workbench export"),
    ]:
        assert_refused(Bundle.open, *wrong)


def test_a_pointer_of_git_lfs_is_named_with_the_next_step(llama, tmp_path):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    copy = shutil.copytree(TINY, tmp_path / "c")
    (copy / "model.safetensors").write_text(pointer)
    with refused("found a Git LFS pointer.* Next: .*hf download ORG/NAME --local-dir"):
        Checkpoint(copy)
    copy = shutil.copytree(llama.root, tmp_path / "b")
    next(copy.rglob("weight.bin")).write_text(pointer)
    with refused("found a Git LFS pointer.* Next: "):
        Bundle.open(copy)


@pytest.mark.parametrize(
    "wrong, similar",
    [
        ("models/smollm", "models/smollm2-135m-instruct"),
        ("models/tiny-lama", "models/tiny-llama"),
        ("models/smolm2-135m-instruct", "models/smollm2-135m-instruct"),
    ],
)
def test_a_misspelt_path_is_answered_with_similar_folders_first(
    tmp_path, monkeypatch, wrong, similar
):
    monkeypatch.chdir(tmp_path)
    for name in ("smollm2-135m-instruct", "tiny-llama"):
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True)
        for file in ("config.json", "bundle.json"):
            (folder / file).write_text("{}")
    (tmp_path / "models" / "smollm-notes").mkdir()  # no checkpoint and no bundle
    meant = rf"did you mean {similar}\? If not, "
    assert_refused(Checkpoint, wrong, "nothing there", f"{meant}.*hf download")
    assert_refused(Bundle.open, wrong, "nothing there", f"{meant}.*workbench export")
    for other in ("models/unlike-them", "nowhere/smollm"):
        with refused("nothing there.* Next: (download|run)"):
            Checkpoint(other)
