"""`workbench explain` and `validate --each-unit`: their JSON, their exit codes, their messages."""

import json

import in_process
import numpy as np
import pytest
from typer.testing import CliRunner

from workbench import process
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


def test_explain_splits_every_layer_names_the_variant_and_the_ranges_on_one_page(llama):
    checkpoint, _, bundle = llama
    code, found = call(
        "explain", bundle.root, "--checkpoint", checkpoint, "--prompt-ids", "1,2,3,4"
    )
    assert (code, found["verdict"]) == (0, "GREEN")
    assert [row["layer"] for row in found["parts"]] == [0, 1]
    assert found["parts"][0].keys() >= {
        "storage",
        "reauthoring",
        "quantization",
        "precision",
        "runtime",
        "total",
    }
    assert found["parts"][0]["runtime"] is None
    assert found["fits"] == "as configured" and found["variants"][0].keys() >= {
        "name",
        "relative_rms",
    }
    assert found["ranges"]["ops"] > 20 and found["ranges"]["first_inf"] is None
    arguments = "--checkpoint", checkpoint, "--prompt-ids", "1,2,3,4"
    code, found = call("explain", bundle.root, *arguments, "--only", "weights")
    assert code == 0 and "parts" not in found
    assert {row["tensor"] for row in found["weights"]} >= {
        "mlp.up_proj.weight",
        "self_attn.q_proj.weight",
    }


def test_an_uncompressed_bundle_has_no_quantization(llama):
    checkpoint, plain, _ = llama
    code, found = call(
        *("explain", plain.root, "--checkpoint", checkpoint),
        *("--prompt-ids", "1,2,3", "--only", "parts"),
    )
    assert code == 0
    assert all(row["quantization"] == 0 for row in found["parts"])


def test_each_unit_names_every_arithmetic_and_what_was_not_measured(llama, monkeypatch):
    monkeypatch.setattr(process, "call", in_process.call)
    checkpoint, plain, _ = llama
    code, found = call(
        *("validate", plain.root, "--checkpoint", checkpoint),
        *("--prompt-ids", "1,2,3,4", "--each-unit"),
    )
    assert (code, found["verdict"], found["device_measured"]) == (0, "GREEN", False)
    assert [u["unit"] for u in found["units"]] == [
        "portable declared",
        "portable exact",
        "portable narrow",
    ]
    assert found["units"][1]["min_cosine"] > 0.99999
    assert found["units"][1]["kl_portable"] > found["units"][0]["kl_portable"] == 0


def test_each_unit_without_a_golden_is_refused(llama):
    with pytest.raises(InputError, match="--golden"):
        arguments = ["validate", str(llama[1].root), "--each-unit"]
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_ranges_take_bundles_and_packages(llama):
    bundle = llama[1]
    for source in (bundle.root, bundle.root / bundle.manifest.shards[0].path):
        code, found = call("explain", source, "--only", "ranges")
        found = found["ranges"]
        assert (code, found["first_inf"], found["first_nan"]) == (0, None, None)
        assert found["ops"] > 20
        assert found["min_headroom_bits"] > 0
        assert found["worst"][0].keys() >= {"op", "module", "max_abs"}


def test_an_overflow_is_red_and_named_first(llama, monkeypatch):
    from workbench.explain import trace

    bundle = llama[1]
    shard = bundle.manifest.shards[0]
    shape = [1 if n == "T" else n for n in shard.inputs["rope_cos"]]
    inputs = trace._random_inputs

    def overflowing(*arguments):
        return inputs(*arguments) | {"rope_cos": np.full(shape, 6e4)}

    monkeypatch.setattr(trace, "_random_inputs", overflowing)
    result = CliRunner().invoke(app, ["explain", str(bundle.root / shard.path)])
    assert result.exit_code == 1
    assert result.stdout.startswith("RED")
    assert "first inf at" in result.stdout.splitlines()[1]


def test_a_trace_of_nothing_is_refused(tmp_path):
    with pytest.raises(InputError, match="nothing there"):
        CliRunner().invoke(
            app, ["explain", str(tmp_path / "none")], catch_exceptions=False
        )
