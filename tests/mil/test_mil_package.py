"""Reading packages: whole ones give what was exported, broken and hostile ones an InputError that
says what and where."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from memory import ROWS, WIDTH, Memory

import miltorch
from miltorch.quiet import quiet
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


def run(package, calls, precision="declared"):
    executable = miltorch.Executable(miltorch.read(package), precision)
    state = executable.make_state()
    return [
        executable.run({"x": torch.from_numpy(x)}, state)["y"].numpy() for x in calls
    ], state


@pytest.fixture
def calls():
    random = np.random.default_rng(1)
    return [
        random.normal(size=(1, t, WIDTH)).astype(np.float16).astype(np.float32)
        for t in (1, 4, 3)
    ]


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
"""
    subprocess.run([sys.executable, "-c", code, packages["fp16"]], check=True)


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
def test_a_package_computes_what_its_module_does(packages, calls, precision, tolerance):
    module, close = Memory(), {"rtol": tolerance, "atol": tolerance}
    outputs, state = run(packages["fp16"], calls, precision)
    with torch.no_grad():
        for x, found in zip(calls, outputs):
            np.testing.assert_allclose(found, module(torch.from_numpy(x)), **close)
    np.testing.assert_allclose(state["memory"].value, module.memory, **close)


def test_states_are_independent(packages, calls):
    executable = miltorch.Executable(miltorch.read(packages["fp16"]))
    one, other = executable.make_state(), executable.make_state()
    executable.run({"x": torch.from_numpy(calls[0])}, one)
    assert one["memory"].value.any() and not other["memory"].value.any()


@pytest.fixture
def package(packages, tmp_path):
    return shutil.copytree(packages["fp16"], tmp_path / "broken.mlpackage")


def refused(package, *words):
    with pytest.raises(InputError) as problem:
        miltorch.read(package)
    assert all(word in str(problem.value) for word in words), problem.value


def manifest_naming(package, path):
    manifest = json.loads((package / "Manifest.json").read_text())
    manifest["itemInfoEntries"][manifest["rootModelIdentifier"]]["path"] = path
    (package / "Manifest.json").write_text(json.dumps(manifest))


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
    manifest_naming(package, path)
    refused(package, "Next: ")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"rootModelIdentifier": 1}', "[" * 100_000, "\xff"]
)
def test_a_manifest_must_name_a_model(package, text):
    (package / "Manifest.json").write_bytes(text.encode("latin-1"))
    refused(package, "Manifest.json")


@pytest.mark.parametrize("part", [MODEL, WEIGHTS, "Data/com.apple.CoreML"])
def test_symlinks_are_refused(package, tmp_path, part):
    outside = tmp_path / "elsewhere"
    shutil.move(package / part, outside)
    (package / part).symlink_to(outside)
    refused(package, "a symlink")


@pytest.mark.parametrize("part", [MODEL, WEIGHTS])
def test_git_lfs_pointers_are_named(package, part):
    (package / part).write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:"
        + "0" * 64
        + "\nsize 99\n"
    )
    refused(package, "Git LFS pointer", "git lfs pull")


@pytest.mark.parametrize("left", [0, 63, 64, 200])
def test_truncated_weights_are_refused(package, left):
    (package / WEIGHTS).write_bytes((package / WEIGHTS).read_bytes()[:left])
    refused(package, "weight.bin")


def test_missing_files_are_refused(package):
    (package / WEIGHTS).unlink()
    refused(package, "weight.bin", "no such file")
    shutil.rmtree(package)
    refused(package, "nothing there")


def test_other_kinds_of_models_are_named(package, tmp_path, ct):
    spec = ct.proto.Model_pb2.Model()
    for kind in ("neuralNetwork", "pipeline"):
        getattr(spec, kind).SetInParent()
        (package / MODEL).write_bytes(spec.SerializeToString())
        refused(package, kind)
    (package / MODEL).write_bytes(b"")
    refused(package, "a model of type none")
    (package / MODEL).write_bytes(b"\xff" * 100)
    refused(package, "bytes that are no model")
    (tmp_path / "model.mlmodelc").mkdir()
    refused(tmp_path / "model.mlmodelc", "a compiled model")
    (tmp_path / "model.mlmodel").write_bytes(b"")
    refused(tmp_path / "model.mlmodel", "a single .mlmodel file")


def test_a_weight_path_cannot_lead_elsewhere(package, ct):
    spec = ct.proto.Model_pb2.Model.FromString((package / MODEL).read_bytes())
    for op in (
        spec.mlProgram.functions["main"].block_specializations["CoreML8"].operations
    ):
        for value in op.attributes.values():
            if value.WhichOneof("value") == "blobFileValue":
                value.blobFileValue.fileName = "@model_path/../../../../etc/passwd"
    (package / MODEL).write_bytes(spec.SerializeToString())
    refused(package, "etc/passwd", "a path inside the package")


def test_an_unknown_function_is_refused(packages):
    with pytest.raises(InputError, match="no function 'other'"):
        miltorch.read(packages["fp16"], "other")
