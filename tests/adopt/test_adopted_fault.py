"""A fault in packages of another exporter: the matrix that was not found is named before a layer."""

import shutil
import sys
from pathlib import Path

import pytest
from in_process import cli, invoke
from tiny import DATA

sys.path.append(str(Path(__file__).parents[1] / "check"))  # for its planted faults
from faults.copies import Copy

pytestmark = [
    pytest.mark.wide,
    pytest.mark.slow("adopts the packages of a bundle and explains them"),
]
CHECKPOINT = DATA / "tiny-llama"
MATRIX = "model.layers.1.self_attn.q_proj.weight"


def adopt(bundle, folder):
    """The packages of a bundle of this workbench, adopted as another exporter's."""
    packages = folder / "packages"
    packages.mkdir(parents=True)
    for package in bundle.glob("*.mlpackage"):
        shutil.copytree(package, packages / package.name)
    out = folder / "adopted"
    cli("adopt", packages, "--checkpoint", CHECKPOINT, "--out", out)
    return out


def test_the_example_of_the_page_names_the_matrix_that_was_not_found(exports, tmp_path):
    sound = exports.bundle(CHECKPOINT, max_seq_len=128).root
    options = "--checkpoint", CHECKPOINT
    result = invoke("validate", adopt(sound, tmp_path / "sound"), *options)
    reasons = {gate["name"]: gate["reason"] for gate in result["gates"]}
    assert result["verdict"] == "GREEN"
    assert "29 of 29 matrices were recognised" in reasons["weights"]
    copy = Copy(sound, tmp_path / "copy")
    weight = copy.weight(MATRIX.removeprefix("model."))
    weight.write(weight.read()[::-1])
    wrong = adopt(copy.seal(), tmp_path / "wrong")
    reasons = {
        gate["name"]: gate["reason"]
        for gate in invoke("validate", wrong, *options)["gates"]
    }
    assert f"in place of {MATRIX}" in reasons["weights"]
    conclusion = invoke("explain", wrong, *options)["conclusion"]
    assert conclusion.startswith(
        f"1 of 29 matrices was not found in the packages: {MATRIX}; begin there. "
        "Layer 1 behind its K and V, or layer 2 computes something else"
    )
