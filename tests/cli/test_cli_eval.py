"""`workbench error`, `trace` and `matrix`: their JSON, their exit codes, their messages."""

import json

import in_process
import numpy as np
import pytest
from typer.testing import CliRunner

from workbench.check import units
from workbench.cli.app import app
from workbench.errors import InputError


@pytest.fixture(scope="module")
def llama(exports):
    checkpoint = exports.checkpoint("llama")
    return (
        checkpoint,
        exports.bundle(checkpoint),
        exports.bundle(checkpoint, compress="int8-tensor"),
    )


def call(*arguments) -> tuple[int, dict]:
    result = CliRunner().invoke(
        app, [*map(str, arguments), "--json"], catch_exceptions=False
    )
    return result.exit_code, json.loads(result.stdout.splitlines()[-1])


def test_error_splits_every_layer_and_names_what_to_store_better(llama):
    checkpoint, _, bundle = llama
    code, found = call(
        "error",
        bundle.root,
        "--checkpoint",
        checkpoint,
        "--prompt-ids",
        "1,2,3,4",
        "--weights",
    )
    assert (code, found["verdict"]) == (0, "GREEN")
    assert [row["layer"] for row in found["layers"]] == [0, 1]
    assert found["layers"][0].keys() >= {
        "storage",
        "reauthoring",
        "quantization",
        "precision",
        "runtime",
        "total",
    }
    assert found["layers"][0]["runtime"] is None
    assert found["residual"] < 1e-6
    assert {row["tensor"] for row in found["weights"]} >= {
        "mlp.up_proj.weight",
        "self_attn.q_proj.weight",
    }


def test_an_uncompressed_bundle_has_no_quantization(llama):
    checkpoint, plain, _ = llama
    code, found = call(
        "error", plain.root, "--checkpoint", checkpoint, "--prompt-ids", "1,2,3"
    )
    assert code == 0
    assert all(row["quantization"] == 0 for row in found["layers"])


def test_matrix_names_every_arithmetic_and_what_was_not_measured(llama, monkeypatch):
    monkeypatch.setattr(units, "validate_units", in_process.validate_units)
    checkpoint, plain, _ = llama
    code, found = call(
        "matrix", plain.root, "--checkpoint", checkpoint, "--prompt-ids", "1,2,3,4"
    )
    assert (code, found["verdict"], found["device_measured"]) == (0, "GREEN", False)
    assert [u["unit"] for u in found["units"]] == [
        "portable declared",
        "portable exact",
        "portable narrow",
    ]
    assert found["units"][1]["min_cosine"] > 0.99999
    assert found["units"][1]["kl_portable"] > found["units"][0]["kl_portable"] == 0


def test_matrix_without_a_golden_is_refused(llama):
    with pytest.raises(InputError, match="--golden"):
        CliRunner().invoke(app, ["matrix", str(llama[1].root)], catch_exceptions=False)


def test_trace_takes_bundles_and_packages(llama):
    bundle = llama[1]
    for source in (bundle.root, bundle.root / bundle.manifest.shards[0].path):
        code, found = call("trace", source)
        assert (code, found["first_inf"], found["first_nan"]) == (0, None, None)
        assert found["ops"] > 20
        assert found["min_headroom_bits"] > 0
        assert found["worst"][0].keys() >= {"op", "module", "max_abs"}


def test_trace_of_an_overflow_is_red_and_says_where_first(llama, tmp_path):
    bundle = llama[1]
    shard = bundle.manifest.shards[0]
    package = bundle.root / shard.path
    shape = [1 if n == "T" else n for n in shard.inputs["rope_cos"]]
    np.savez(tmp_path / "x.npz", rope_cos=np.full(shape, 6e4, np.float32))
    result = CliRunner().invoke(
        app, ["trace", str(package), "--inputs", str(tmp_path / "x.npz")]
    )
    assert result.exit_code == 1
    assert result.stdout.startswith("RED")
    assert "first inf at" in result.stdout.splitlines()[1]


def one_array(file):
    with file.open("wb") as opened:
        np.save(opened, np.ones(3))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (lambda file: None, "FileNotFoundError"),
        (lambda file: file.write_text("text"), "numpy.savez"),
        (one_array, "arrays by name"),
        (lambda file: np.savez(file, x=np.array(["text"])), "no numbers in x"),
        (lambda file: np.savez(file, x=np.array([{}], object)), "numpy.savez"),
        (
            lambda file: np.savez(file, nonsense=np.ones(3)),
            "nonsense; needs some of x, ",
        ),
    ],
)
def test_inputs_that_a_package_does_not_take_are_refused(
    llama, tmp_path, content, words
):
    content(tmp_path / "in.npz")
    package = llama[1].root / llama[1].manifest.shards[0].path
    with pytest.raises(InputError, match=words):
        CliRunner().invoke(
            app,
            ["trace", str(package), "--inputs", str(tmp_path / "in.npz")],
            catch_exceptions=False,
        )


def test_a_trace_of_nothing_is_refused(tmp_path):
    with pytest.raises(InputError, match="nothing there"):
        CliRunner().invoke(
            app, ["trace", str(tmp_path / "none")], catch_exceptions=False
        )
