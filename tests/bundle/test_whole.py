"""Nothing reaches a runtime that the manifest does not list, and every size agrees."""

import json
import os
import shutil
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

from workbench import Bundle, InputError
from workbench.bundle import sha256


@pytest.fixture(scope="module")
def made(exports):
    return exports.bundle(exports.checkpoint("gemma3_text"), sliding="ring")


@pytest.fixture
def copy(made, tmp_path):
    return shutil.copytree(made.root, tmp_path / "b")


def edited(copy, edit):
    manifest = json.loads((copy / "bundle.json").read_text())
    edit(manifest)
    (copy / "bundle.json").write_text(json.dumps(manifest))


def first(copy):
    return copy / json.loads((copy / "bundle.json").read_text())["shards"][0]["path"]


def unlisted_weights(copy):
    def leave_out(manifest):
        shard = manifest["shards"][0]
        shard["files"] = [
            f for f in shard["files"] if not f["path"].endswith("weight.bin")
        ]

    edited(copy, leave_out)


def package_outside(copy):
    edited(copy, lambda manifest: manifest["shards"][0].update(path="alias.mlpackage"))
    outside = shutil.copytree(
        first(copy).parent / "layers_00_00.mlpackage", copy.parent / "outside"
    )
    (copy / "alias.mlpackage").symlink_to(outside)


def link_to(target, path):
    path.symlink_to(target)


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (unlisted_weights, "weight.bin: found a file that bundle.json does not list"),
        (package_outside, "alias.mlpackage"),
        (
            lambda copy: link_to("/etc", first(copy) / "Data" / "more"),
            "more: found a symlink",
        ),
        (
            lambda copy: link_to("model.mlmodel", first(copy) / "Data" / "alias"),
            "alias: found a symlink",
        ),
        (
            lambda copy: (first(copy) / ".hidden").write_text("x"),
            ".hidden: found a file that",
        ),
        (
            lambda copy: (first(copy) / "Data" / "model.mlmodel").write_text("x"),
            "model.mlmodel: found a file that",
        ),
        (lambda copy: os.mkfifo(first(copy) / "pipe"), "pipe: found a file that"),
        (
            lambda copy: link_to("/etc/hostname", first(copy) / ".DS_Store"),
            ".DS_Store: found a symlink",
        ),
    ],
)
def test_what_a_shard_holds_beside_its_listed_files_is_refused(copy, damage, found):
    damage(copy)
    with pytest.raises(InputError, match=found):
        Bundle.open(copy)


def test_what_macos_itself_drops_into_folders_is_left_alone(copy):
    for folder in (copy, first(copy), first(copy) / "Data"):
        (folder / ".DS_Store").write_bytes(b"Bud1")
    Bundle.open(copy)


def embedding(copy, content):
    """Puts `content` (bytes, or arrays by name) in place of the embedding, its hash with it."""
    path = copy / "embedding.safetensors"
    path.write_bytes(content) if isinstance(content, bytes) else save_file(
        content, path
    )
    entry = {"path": path.name, "bytes": path.stat().st_size, "sha256": sha256(path)}
    edited(copy, lambda manifest: manifest["embedding"].update(file=entry))


C, V = 64, 107
HEADER = json.dumps(
    {"weight": {"dtype": "F16", "shape": [V, C], "data_offsets": [0, 4]}}
).encode()


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ({"weight": np.zeros((2, C), np.float16)}, r"weight F16 \[2, 64\]"),
        ({"weight": np.zeros((V, C), np.int16)}, r"weight I16 \[107, 64\]"),
        ({"other": np.zeros((V, C), np.float16)}, "no weight"),
        (
            {"weight": np.zeros((V, C), np.float16), "bias": np.zeros(C, np.float32)},
            "bias without scale",
        ),
        (
            {
                "weight": np.zeros((V, C), np.float16),
                "bias": np.zeros(3, np.float32),
                "scale": np.ones(C, np.float32),
            },
            r"bias F32 \[3\]",
        ),
        (b"\xff" * 4096, "no safetensors file"),
        (b"", "no safetensors file"),
        (struct.pack("<Q", 1 << 60) + b"{}", "no safetensors file"),
        (struct.pack("<Q", len(HEADER)) + HEADER + b"1234", "no safetensors file"),
    ],
)
def test_an_embedding_of_another_shape_or_kind_is_refused_on_opening(
    copy, content, found
):
    embedding(copy, content)
    with pytest.raises(InputError, match=f"embedding.safetensors: found {found}"):
        Bundle.open(copy)


def first_state(manifest):
    return next(iter(manifest["shards"][0]["states"].values()))


@pytest.mark.parametrize(
    ("edit", "found"),
    [
        (
            lambda m: m.update(rope=[]),
            "rope tables none for layers that use global, local",
        ),
        (lambda m: m["rope"].append(m["rope"][0]), "rope tables"),
        (lambda m: m["rope"][0].update(inv_freq=[]), "at least 1 item"),
        (
            lambda m: m["rope"][0].update(inv_freq=m["rope"][0]["inv_freq"][:-1]),
            "layers_0.*rope_cos_",
        ),
        (lambda m: m["options"].update(max_seq_len=10**12), "options.max_seq_len"),
        (lambda m: m["options"].update(max_seq_len=10**30), "options.max_seq_len"),
        (lambda m: m["options"].update(max_seq_len=64), "layers_0"),
        (lambda m: m["options"].update(batch=10**12), "options.batch"),
        (lambda m: m["options"].update(batch=2), "layers_00_00.*x"),
        (lambda m: m["dims"].update(C=10**30), "dims.C"),
        (lambda m: m["dims"].update(C=32), "layers_00_00.*x"),
        (lambda m: m["dims"].update(D=16), "layers_00_00.*k_state"),
        (lambda m: m["options"].update(layout="bc1t"), "layers_00_00.*x"),
        (lambda m: first_state(m).update(shape=[1, 1, 10**12, 32]), "shards.0.states"),
        (lambda m: first_state(m).update(shape=[1, 1, 9, 32]), "layers_00_00.*state"),
        (lambda m: first_state(m).update(ring=5), "layers_00_00.*ring"),
        (lambda m: m["shards"][0].update(path="a" * 5000), "shards.0.path"),
        (lambda m: m["shards"][0].update(path="a/" * 2500), "shards.0.path"),
        (lambda m: m["shards"][0].update(path="a\0b"), "shards.0.path"),
        (
            lambda m: m["embedding"]["file"].update(path="a" * 5000),
            "embedding.file.path",
        ),
        (lambda m: m["embedding"].update(scale=float("inf")), "embedding.scale"),
        (
            lambda m: m["shards"][0]["files"][0].update(path="bundle.json"),
            "layers_00_00",
        ),
    ],
)
def test_a_manifest_that_does_not_agree_with_itself_is_refused(copy, edit, found):
    edited(copy, edit)
    with pytest.raises(InputError, match=found) as refusal:
        Bundle.open(copy)
    assert len(str(refusal.value)) < 600 and "\n" not in str(refusal.value)


@pytest.mark.parametrize("path", ["a" * 5000, "a/" * 2500, "a\0b"])
def test_a_path_that_no_system_takes_is_refused(path):
    with pytest.raises(InputError) as refusal:
        Bundle.open(path)
    assert len(str(refusal.value)) < 600


@pytest.mark.parametrize(
    ("edit", "same"),
    [
        (lambda m: m["rope"][0].update(scale=1.5), False),
        (lambda m: m["rope"][0]["inv_freq"].__setitem__(1, 0.5), False),
        (lambda m: m["embedding"].update(scale=2.0), False),
        (lambda m: m.update(residual_exponent=1), False),
        (lambda m: m.update(family="llama"), False),
        (lambda m: m["tokens"].update(eos=[7]), False),
        (lambda m: m["checkpoint"].update(sha256="0" * 64), False),
        (lambda m: m["checkpoint"].update(name="elsewhere"), True),
        (lambda m: m["packages"].update(torch="9.9"), True),
    ],
)
def test_the_identity_covers_what_decides_how_a_bundle_is_run(made, copy, edit, same):
    edited(copy, edit)
    assert (Bundle.open(copy).identity == made.identity) == same
