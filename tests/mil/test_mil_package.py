"""`miltorch.read`: a whole package gives the program that was exported, a damaged or hostile one an
InputError that names the file and what is wrong with it."""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from memory import ROWS, WIDTH, Memory
from refusal import refused

import miltorch
from miltorch import program
from miltorch.coremltools_import import (
    no_progress,
    protobuf_module,
    quiet,
    seldom_validated,
)

MODEL = "Data/com.apple.CoreML/model.mlmodel"
WEIGHTS = "Data/com.apple.CoreML/weights/weight.bin"


def read_weight(package: Path) -> np.ndarray:
    """The one weight matrix [WIDTH, WIDTH] of Memory's program, decompressed, in float32."""
    executable = miltorch.Executable(miltorch.read(package))
    matrix = miltorch.Type("FLOAT16", (WIDTH, WIDTH))
    for op in executable.program.block.ops:
        for name, declared in op.outputs:
            if op.is_constant and declared == matrix:
                return executable.constants[name].float().numpy()
    raise AssertionError(f"{package} has no constant of {matrix}")


# --- whole packages -----------------------------------------------------------------------


def test_a_program_has_the_interface_and_the_operations_of_the_exported_module(
    packages,
):
    program = miltorch.read(packages["fp16"])
    memory = miltorch.Type("FLOAT16", (1, ROWS, WIDTH), "state")
    assert program.inputs == {"x": miltorch.Type("FLOAT16", (1, None, WIDTH))}
    assert program.states == {"memory": memory}
    assert program.outputs == ["y"] and program.function == "main"
    kinds = {op.kind for op in program.block.walk()}
    assert {"linear", "read_state", "write_state"} <= kinds


@pytest.mark.shim
@pytest.mark.slow("two interpreters import coremltools")
def test_a_package_is_read_without_coremltools_and_coremltools_imported_without_scikit_learn(
    packages,
):
    code = """import sys, miltorch
from miltorch.coremltools_import import coremltools, protobuf_module
miltorch.read(sys.argv[1])
assert "coremltools" not in sys.modules
assert protobuf_module("Model_pb2").Model is coremltools().proto.Model_pb2.Model
assert not {"sklearn", "transformers"} & set(sys.modules)
import transformers
from miltorch import shim
shim.install()
"""
    command = [sys.executable, "-c", code, packages["fp16"]]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    # also none that an interpreter prints and goes on
    assert "Traceback" not in ended.stderr


def test_fp16_weights_are_read_to_the_bit(packages):
    exported = Memory().mix.weight.detach().numpy()
    np.testing.assert_array_equal(read_weight(packages["fp16"]), exported)


@pytest.mark.parametrize("name", ["int8", "int4", "lut6", "sparse"])
def test_weights_are_decompressed_as_coremltools_decompresses_them(
    models, packages, tmp_path, name
):
    from coremltools.optimize import coreml as cto

    path = tmp_path / "dense.mlpackage"
    with quiet():
        cto.decompress_weights(models[name]).save(str(path))
    dense = read_weight(path)
    assert not np.array_equal(dense, read_weight(packages["fp16"]))
    np.testing.assert_array_equal(read_weight(packages[name]), dense)


@pytest.mark.parametrize(
    "precision, tolerance", [("exact", 1e-6), ("declared", 4e-3), ("narrow", 1e-2)]
)
def test_a_package_computes_what_its_module_does(packages, precision, tolerance):
    module, limits = Memory(), {"rtol": tolerance, "atol": tolerance}
    executable = miltorch.Executable(miltorch.read(packages["fp16"]), precision)
    state, random = executable.make_state(), np.random.default_rng(1)
    for T in (1, 4, 3):
        x = torch.from_numpy(random.normal(size=(1, T, WIDTH))).half().float()
        y = executable.run({"x": x}, state)["y"]
        with torch.no_grad():
            np.testing.assert_allclose(y, module(x), **limits)
    np.testing.assert_allclose(state["memory"].value, module.memory, **limits)


# --- hostile packages ---------------------------------------------------------------------


@pytest.fixture
def package(packages, tmp_path) -> Path:
    """A package that a test may change."""
    return shutil.copytree(packages["fp16"], tmp_path / "broken.mlpackage")


def assert_is_refused(package: Path, message: str) -> None:
    """Opening the package must end in an InputError that matches `message`, a regular
    expression."""
    with refused(message):
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
def test_a_manifest_that_names_no_file_inside_the_package_is_refused(package, path):
    manifest = json.loads((package / "Manifest.json").read_text())
    manifest["itemInfoEntries"][manifest["rootModelIdentifier"]]["path"] = path
    (package / "Manifest.json").write_text(json.dumps(manifest))
    assert_is_refused(package, "Next: ")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"rootModelIdentifier": 1}', "[" * 100_000, "\xff"]
)
def test_a_manifest_that_names_no_model_is_refused(package, text):
    (package / "Manifest.json").write_bytes(text.encode("latin-1"))
    assert_is_refused(package, "Manifest.json")


@pytest.mark.parametrize("part", [MODEL, WEIGHTS, "Data/com.apple.CoreML"])
def test_symlinks_are_refused(package, tmp_path, part):
    outside = shutil.move(package / part, tmp_path / "elsewhere")
    (package / part).symlink_to(outside)
    assert_is_refused(package, "a symlink")


def move_to_hub_cache(package: Path, blobs: str = "blobs") -> Path:
    """Arranges a package as a snapshot in a cache of the Hugging Face Hub, and returns the
    snapshot: every file is a relative link to a numbered file in the folder `blobs` of the
    model."""
    model = package.parent / "models--org--name"
    snapshot = model / "snapshots" / "0" / package.name
    snapshot.parent.mkdir(parents=True)
    shutil.move(package, snapshot)
    (model / blobs).mkdir(exist_ok=True)
    files = (path for path in snapshot.rglob("*") if path.is_file())
    for number, file in enumerate(files):
        blob = file.rename(model / blobs / str(number))
        file.symlink_to(os.path.relpath(blob, file.parent))
    return snapshot


def test_a_package_in_the_hub_s_cache_is_read_through_its_links(package):
    expected = read_weight(package)
    snapshot = move_to_hub_cache(package)
    np.testing.assert_array_equal(read_weight(snapshot), expected)


@pytest.mark.parametrize("file", ["Manifest.json", MODEL, WEIGHTS])
def test_a_snapshot_whose_blob_is_a_link_to_elsewhere_is_refused(
    package, tmp_path, file
):
    snapshot = move_to_hub_cache(package)
    blob = (snapshot / file).resolve()
    blob.symlink_to(blob.rename(tmp_path / "private"))
    assert_is_refused(snapshot, "a symlink")


def test_a_snapshot_whose_folder_of_blobs_is_a_link_to_elsewhere_is_refused(
    package, tmp_path
):
    snapshot = move_to_hub_cache(package)
    blobs = snapshot.parents[2] / "blobs"
    blobs.symlink_to(blobs.rename(tmp_path / "private"))
    assert_is_refused(snapshot, "a symlink")


def test_a_snapshot_with_links_to_another_folder_than_blobs_is_refused(package):
    assert_is_refused(move_to_hub_cache(package, blobs="other"), "a symlink")


@pytest.mark.parametrize("link", ["Data/more", "loop"])
def test_the_files_of_a_package_are_those_that_its_manifest_names(package, link):
    (package / link).symlink_to("..")
    (package / "Data" / "notes").write_text("x")
    expected = sorted(["Manifest.json", MODEL, WEIGHTS])
    assert [str(path) for path in program.files(package)] == expected


# --- damaged packages ---------------------------------------------------------------------


def replace_by_lfs_pointer(path: Path) -> None:
    """What Git leaves in the place of a large file that it has not fetched."""
    oid = "0" * 64
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid {oid}\nsize 1\n")


def replace_by_noise(path: Path) -> None:
    path.write_bytes(b"\xff" * 100)


def truncate(size: int) -> Callable[[Path], None]:
    """An edit that leaves the first `size` bytes of a file."""
    return lambda path: path.write_bytes(path.read_bytes()[:size])


def replace_once(old: bytes, new: bytes) -> Callable[[Path], None]:
    """An edit of the first place where a file has the bytes `old`."""
    return lambda path: path.write_bytes(path.read_bytes().replace(old, new, 1))


def replace_by_model(kind: str) -> Callable[[Path], None]:
    """An edit that writes an empty model of another kind than an ML Program."""

    def write(path: Path) -> None:
        model = protobuf_module("Model_pb2").Model()
        getattr(model, kind).SetInParent()
        path.write_bytes(model.SerializeToString())

    return write


def rename_feature(name: str) -> Callable[[Path], None]:
    """An edit that gives the name z to the input or output `name`, of one letter, in the
    description of a model, which comes before its program."""
    tag_and_length = b"\n\x01"
    return replace_once(tag_and_length + name.encode(), tag_and_length + b"z")


@dataclass(frozen=True)
class Damage:
    """A damage of a package.

    Attributes:
        name: of the case.
        file: inside the package; "." is the package itself.
        edit: changes the file in place.
        message: of the refusal, a regular expression.
    """

    name: str
    file: str
    edit: Callable[[Path], None]
    message: str


OTHER_PATH = replace_once(b"weights/weight.bin", b"../../..//etc/host")
LFS_POINTER = "Git LFS pointer.*git lfs pull"
DAMAGES = [
    Damage("model is a pointer", MODEL, replace_by_lfs_pointer, LFS_POINTER),
    Damage("weights are a pointer", WEIGHTS, replace_by_lfs_pointer, LFS_POINTER),
    Damage("weights empty", WEIGHTS, truncate(0), "weight.bin"),
    Damage("weights cut in the header", WEIGHTS, truncate(63), "weight.bin"),
    Damage("weights cut after the header", WEIGHTS, truncate(64), "weight.bin"),
    Damage("weights cut in the data", WEIGHTS, truncate(200), "weight.bin"),
    Damage("weights deleted", WEIGHTS, Path.unlink, "weight.bin.*no such file"),
    Damage("package deleted", ".", shutil.rmtree, "nothing there"),
    Damage("neural network", MODEL, replace_by_model("neuralNetwork"), "neuralNetwork"),
    Damage("pipeline", MODEL, replace_by_model("pipeline"), "pipeline"),
    Damage("weights outside", MODEL, OTHER_PATH, "a path inside the"),
    Damage(
        "unknown opset",
        MODEL,
        replace_once(b"CoreML8", b"CoreML9"),
        "a damaged program .KeyError: 'CoreML",
    ),
    Damage("input renamed", MODEL, rename_feature("x"), "'z'.*, not in"),
    Damage("output renamed", MODEL, rename_feature("y"), "'z'.*, not in"),
    Damage("model empty", MODEL, truncate(0), "a model of type none"),
    Damage("model of noise", MODEL, replace_by_noise, "bytes that are no model"),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.name)
def test_a_damaged_package_is_refused_by_name(package, damage):
    damage.edit(package / damage.file)
    assert_is_refused(package, damage.message)


@pytest.mark.parametrize(
    "name, message",
    [
        ("model.mlmodelc", "a compiled model"),
        ("model.mlmodel", "a single .mlmodel file"),
    ],
)
def test_other_forms_of_a_model_are_refused_by_name(tmp_path, name, message):
    if name == "model.mlmodelc":
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_bytes(b"")
    assert_is_refused(tmp_path / name, message)


# a conversion that fails leaves a temporary folder of coremltools to the garbage collector
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_program_that_a_pass_breaks_is_refused_though_it_is_seldom_validated(
    ct, monkeypatch
):
    """Planted: a pass that forgets which operation reads a value."""
    from coremltools.converters.mil.mil import Builder
    from coremltools.converters.mil.mil.block import InvalidBlockStateError
    from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY

    class Forgets:
        def set_options(self, options):
            pass

        def __call__(self, mil):
            mil.functions["main"].operations[-1].x._child_ops.clear()

    def convert(pipeline):
        specs = [Builder.TensorSpec(shape=(2, 3))]
        target = ct.target.iOS18
        mil = Builder.program(input_specs=specs, opset_version=target)(
            lambda x: Builder.relu(x=x)
        )
        options = {"skip_model_load": True, "minimum_deployment_target": target}
        with quiet(), no_progress(), seldom_validated():
            ct.convert(mil, pass_pipeline=pipeline, **options)

    monkeypatch.setitem(PASS_REGISTRY.passes, "tests::forgets", Forgets)
    pipeline = ct.PassPipeline.DEFAULT
    convert(pipeline)
    pipeline.append_pass("tests::forgets")
    with pytest.raises(InvalidBlockStateError, match="should be consumed"):
        convert(pipeline)


def test_an_inner_quiet_block_leaves_the_outer_one_quiet(caplog):
    """Context managers of a conversion import coremltools, quietly, inside a quiet block."""
    logger = logging.getLogger("coremltools")
    with quiet(re.compile("harmless")):
        with quiet():
            logger.warning("whatever it is")
        logger.warning("harmless")
        logger.warning("of use")
        logger.error("harmless, but an error")
    logger.warning("harmless, and outside")
    assert [record.getMessage() for record in caplog.records] == [
        "of use",
        "harmless, but an error",
        "harmless, and outside",
    ]
