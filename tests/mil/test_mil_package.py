"""Reading packages: whole ones give what was exported, broken and hostile ones an InputError that
says what and where."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from memory import ROWS, WIDTH, Memory

import miltorch
from miltorch import program
from miltorch.quiet import messages, quiet
from workbench.errors import InputError

MODEL = "Data/com.apple.CoreML/model.mlmodel"
WEIGHTS = "Data/com.apple.CoreML/weights/weight.bin"


def weight(package) -> np.ndarray:
    """The program's one weight matrix, decompressed."""
    executable = miltorch.Executable(miltorch.read(package))
    name = next(
        name
        for op in executable.program.block.ops
        for name, kind in op.outputs
        if op.constant and kind == miltorch.Type("FLOAT16", (WIDTH, WIDTH))
    )
    return executable.constants[name].float().numpy()


def test_types_inputs_and_states(packages):
    program = miltorch.read(packages["fp16"])
    assert program.inputs == {"x": miltorch.Type("FLOAT16", (1, None, WIDTH))}
    assert program.states == {
        "memory": miltorch.Type("FLOAT16", (1, ROWS, WIDTH), "state")
    }
    assert program.outputs == ["y"] and program.function == "main"
    assert {"linear", "read_state", "write_state"} <= {
        op.kind for op in program.block.walk()
    }


@pytest.mark.shim
@pytest.mark.slow("two interpreters import coremltools")
def test_a_package_is_read_without_coremltools_and_coremltools_imported_without_scikit_learn(
    packages,
):
    code = """import sys, miltorch
from miltorch.quiet import coremltools, messages
miltorch.read(sys.argv[1])
assert "coremltools" not in sys.modules
assert messages("Model_pb2").Model is coremltools().proto.Model_pb2.Model
assert not {"sklearn", "transformers"} & set(sys.modules)
import transformers
from miltorch import shim
shim.install()
"""
    command = [sys.executable, "-c", code, packages["fp16"]]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "Traceback" not in ended.stderr


def test_stored_weights_come_back_to_the_bit(packages):
    stored = Memory().mix.weight.detach().numpy()
    np.testing.assert_array_equal(weight(packages["fp16"]), stored)


@pytest.mark.parametrize("name", ["int8", "int4", "lut6", "sparse"])
def test_decompression_equals_coremltools_own(models, packages, tmp_path, name):
    from coremltools.optimize import coreml as cto

    path = tmp_path / "dense.mlpackage"
    with quiet():
        cto.decompress_weights(models[name]).save(str(path))
    dense = weight(path)
    assert not np.array_equal(dense, weight(packages["fp16"]))
    np.testing.assert_array_equal(weight(packages[name]), dense)


@pytest.mark.parametrize(
    "precision, tolerance", [("exact", 1e-6), ("declared", 4e-3), ("narrow", 1e-2)]
)
def test_a_package_computes_what_its_module_does(packages, precision, tolerance):
    module, close = Memory(), {"rtol": tolerance, "atol": tolerance}
    executable = miltorch.Executable(miltorch.read(packages["fp16"]), precision)
    state, random = executable.make_state(), np.random.default_rng(1)
    for T in (1, 4, 3):
        x = torch.from_numpy(random.normal(size=(1, T, WIDTH))).half().float()
        y = executable.run({"x": x}, state)["y"]
        with torch.no_grad():
            np.testing.assert_allclose(y, module(x), **close)
    np.testing.assert_allclose(state["memory"].value, module.memory, **close)


@pytest.fixture
def package(packages, tmp_path):
    return shutil.copytree(packages["fp16"], tmp_path / "broken.mlpackage")


def refused(package, words):
    with pytest.raises(InputError, match=words):
        miltorch.read(package)


@pytest.mark.parametrize(
    "path",
    [
        "../../outside.mlmodel",
        "/etc/passwd",
        "com.apple.CoreML/../../x",
        "missing",
        "\0",
        "a" * 5000,
        7,
    ],
)
def test_a_manifest_cannot_lead_elsewhere(package, path):
    manifest = json.loads((package / "Manifest.json").read_text())
    manifest["itemInfoEntries"][manifest["rootModelIdentifier"]]["path"] = path
    (package / "Manifest.json").write_text(json.dumps(manifest))
    refused(package, "Next: ")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"rootModelIdentifier": 1}', "[" * 100_000, "\xff"]
)
def test_a_manifest_must_name_a_model(package, text):
    (package / "Manifest.json").write_bytes(text.encode("latin-1"))
    refused(package, "Manifest.json")


@pytest.mark.parametrize("part", [MODEL, WEIGHTS, "Data/com.apple.CoreML"])
def test_symlinks_are_refused(package, tmp_path, part):
    outside = shutil.move(package / part, tmp_path / "elsewhere")
    (package / part).symlink_to(outside)
    refused(package, "a symlink")


def hub_cached(package, blobs="blobs"):
    """The package as a snapshot of the Hub's cache: every file a link into `blobs`."""
    model = package.parent / "models--org--name"
    snapshot = model / "snapshots" / "0" / package.name
    snapshot.parent.mkdir(parents=True)
    shutil.move(package, snapshot)
    (model / blobs).mkdir(exist_ok=True)
    for number, file in enumerate(p for p in snapshot.rglob("*") if p.is_file()):
        blob = file.rename(model / blobs / str(number))
        file.symlink_to(os.path.relpath(blob, file.parent))
    return snapshot


def test_a_package_in_the_hub_s_cache_is_read_through_its_links(package):
    plain = weight(package)
    np.testing.assert_array_equal(weight(hub_cached(package)), plain)


@pytest.mark.parametrize("part", ["Manifest.json", MODEL, WEIGHTS])
@pytest.mark.parametrize("way", ["blob leaves", "blobs leave", "other folder"])
def test_links_of_a_snapshot_that_leave_its_blobs_are_refused(
    package, tmp_path, part, way
):
    snapshot = hub_cached(package, "other" if way == "other folder" else "blobs")
    model, link = snapshot.parents[2], snapshot / part
    if way == "blob leaves":
        blob = link.resolve()
        blob.symlink_to(blob.rename(tmp_path / "private"))
    elif way == "blobs leave":
        private = (model / "blobs").rename(tmp_path / "private")
        (model / "blobs").symlink_to(private)
    refused(snapshot, "a symlink")


@pytest.mark.parametrize("link", ["Data/more", "loop"])
def test_a_package_consists_of_what_its_manifest_names(package, link):
    parts = sorted(["Manifest.json", MODEL, WEIGHTS])
    (package / link).symlink_to("..")
    (package / "Data" / "notes").write_text("x")
    assert [*map(str, program.files(package))] == parts


def pointer(path):
    oid = "0" * 64
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid {oid}\nsize 1\n")


def cut(left):
    return lambda path: path.write_bytes(path.read_bytes()[:left])


def swapped(old, new):
    return lambda path: path.write_bytes(path.read_bytes().replace(old, new, 1))


def other(kind):
    def write(path):
        spec = messages("Model_pb2").Model()
        getattr(spec, kind).SetInParent()
        path.write_bytes(spec.SerializeToString())

    return write


DAMAGES = [  # a part, what becomes of it, what is named
    *((part, pointer, "Git LFS pointer.*git lfs pull") for part in (MODEL, WEIGHTS)),
    *((WEIGHTS, cut(left), "weight.bin") for left in (0, 63, 64, 200)),
    (WEIGHTS, Path.unlink, "weight.bin.*no such file"),
    (".", shutil.rmtree, "nothing there"),
    *((MODEL, other(kind), kind) for kind in ("neuralNetwork", "pipeline")),
    (MODEL, swapped(b"weights/weight.bin", b"../../..//etc/host"), "a path inside the"),
    (MODEL, swapped(b"CoreML8", b"CoreML9"), "a damaged program .KeyError: 'CoreML"),
    # the description comes first, and names its input and its output in one letter
    *((MODEL, swapped(b"\n\x01%c" % n, b"\n\x01z"), "'z'.*, not in") for n in b"xy"),
    (MODEL, cut(0), "a model of type none"),
    (MODEL, lambda path: path.write_bytes(b"\xff" * 100), "bytes that are no model"),
]


@pytest.mark.parametrize("part, damage, words", DAMAGES)
def test_a_damaged_package_is_refused_by_name(package, part, damage, words):
    damage(package / part)
    refused(package, words)


def test_files_that_are_no_package_are_named(tmp_path):
    (tmp_path / "model.mlmodelc").mkdir()
    refused(tmp_path / "model.mlmodelc", "a compiled model")
    (tmp_path / "model.mlmodel").write_bytes(b"")
    refused(tmp_path / "model.mlmodel", "a single .mlmodel file")
