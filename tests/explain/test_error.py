"""The parts of an error add up, each part follows its own cause alone, and the costliest
weights are ranked first."""

import numpy as np
import pytest
import tiny
import torch
from refusal import refused

from workbench import Decoder
from workbench.check import gates, golden
from workbench.explain import error, weights
from workbench.exporter import export
from workbench.models import layers
from workbench.models.checkpoint import Checkpoint

IDS = tiny.prompt(97, 16)


@pytest.fixture(scope="module")
def int8_bundle(exports, tiny_llama):
    return exports.bundle(tiny_llama.path, max_seq_len=32, compress="int8-tensor")


@pytest.fixture(scope="module")
def splits(tiny_llama, int8_bundle):
    return error.split_error(tiny_llama, int8_bundle, IDS)


@pytest.mark.parametrize("mode", error.MODES)
def test_parts_add_up_to_the_total_and_their_shares_to_one(
    splits, int8_bundle, tiny_llama, mode
):
    split = splits[mode]
    assert split.shares().to_numpy().sum() == pytest.approx(1)
    decoder = Decoder(int8_bundle, "portable")
    whole = error.bundle_updates(decoder, golden.make_golden(tiny_llama, IDS), mode)
    assert np.allclose(split.reference + split.total, whole, atol=1e-6)


def test_int8_costs_more_than_rounding_and_the_program_is_hugging_face_s(splits):
    layers = splits["isolated"].layers()
    assert (layers["quantization"] > 3 * layers["precision"]).all()
    assert (layers["reauthoring"] < gates.REAUTHORING).all()
    assert layers["runtime"].isna().all()
    assert gates.verdict(error.error_gates(splits)) == "GREEN"


def test_every_position_of_a_layer_makes_up_the_layer(splits):
    split = splits["chained"]
    rows = split.positions()
    assert len(rows) == split.reference.shape[0] * len(IDS)
    scale = np.sqrt((split.reference**2).mean(-1)).ravel()
    layers = np.sqrt(
        ((rows["total"] * scale) ** 2).groupby(rows["layer"]).mean()
        / (scale**2).reshape(-1, len(IDS)).mean(1)
    )
    assert np.allclose(layers, split.layers()["total"])


@pytest.mark.matrix(2, wide=2)
@pytest.mark.parametrize(
    "compress", ["fp16", "int8-tensor", "int4-block32", "lut6-g16"]
)
def test_a_fault_of_the_program_is_re_authoring_however_weights_are_stored(
    exports, tmp_path, monkeypatch, compress
):
    # the program's eps is 10,000 times the checkpoint's
    source = Checkpoint(exports.checkpoint("llama"))
    clean = exports.bundle(source.path, compress=compress)
    parts = error.split_error(source, clean, IDS)["isolated"].layers()
    init = layers.RMSNorm.__init__
    monkeypatch.setattr(
        layers.RMSNorm,
        "__init__",
        lambda norm, width, eps, **k: init(norm, width, 1e4 * eps, **k),
    )
    faulty = export(source.path, tmp_path / "b", max_seq_len=32, compress=compress)
    splits = error.split_error(source, faulty, IDS)
    layers_of_fault = splits["isolated"].layers()
    assert (layers_of_fault["reauthoring"] > 100 * gates.REAUTHORING).any()
    assert np.array_equal(layers_of_fault["quantization"], parts["quantization"])
    assert gates.verdict(error.error_gates(splits)) == "RED"


@pytest.mark.shim
@pytest.mark.parametrize(
    "target, runtime", [("coreml", "stand-in"), ("other", "other")]
)
def test_layers_that_a_runtime_does_not_show_are_refused(
    exports, other_target, tmp_path, target, runtime
):
    whole = exports.bundle("llama", layers_per_shard=2)
    bundle = tiny.edited(whole, tmp_path / "b", ("options/target", target))
    source = Checkpoint(exports.checkpoint("llama"))
    with refused(f"inside a shard that {runtime}"):
        error.split_error(source, bundle, IDS, runtime=runtime)


@pytest.mark.slow("exports a bundle and splits its error")
@pytest.mark.matrix(1, wide=1)
@pytest.mark.parametrize(
    ("family", "sizes", "options"),
    [
        ("gemma3_text", {}, {}),
        ("zaya", {"num_hidden_layers": 2, "num_experts": 2}, {"moe": "routed"}),
    ],
)
def test_the_parts_of_an_uncompressed_bundle_are_rounding_alone(
    exports, family, sizes, options
):
    """And what fp16 costs is the same beside any compression."""
    source = Checkpoint(exports.checkpoint(family, dtype="float32", **sizes))
    plain, int8 = (
        error.split_error(source, exports.bundle(source.path, **preset), [1, 2, 3])
        for preset in (options, options | {"compress": "int8-tensor"})
    )
    split = plain["isolated"]
    assert not split.parts["quantization"].any()
    assert split.layers()["storage"].between(1e-5, 1e-3).all()
    assert np.array_equal(split.parts["storage"], int8["isolated"].parts["storage"])
    for splits in (plain, int8):
        assert gates.verdict(error.error_gates(splits)) == "GREEN"


def test_the_costliest_tensor_is_found(
    int8_bundle, tiny_llama, llama_golden, monkeypatch
):
    stored = golden.stored_weights(tiny_llama, int8_bundle)

    def worse(name):
        value = stored(name)
        if "layers.1.mlp.up_proj" in name:
            value = value + 0.1 * value.std() * torch.sign(value)
        return value

    monkeypatch.setattr(weights, "stored_weights", lambda *_: worse)
    ranked, _ = weights.measure_costs(int8_bundle, tiny_llama, llama_golden)
    worst = ranked[ranked["layer"] == 1].iloc[0]
    assert worst["tensor"] == "mlp.up_proj.weight"
    assert worst["share"] > 0.5


@pytest.mark.parametrize("worst", [2, 99])
def test_the_worst_few_at_fp16_buy_what_it_says(
    int8_bundle, tiny_llama, llama_golden, worst
):
    _, remedies = weights.measure_costs(int8_bundle, tiny_llama, llama_golden, worst)
    assert (remedies["error"] > 1e-4).all()
    assert (remedies["fp16"] < remedies["error"]).all()
    # with all tensors in fp16 no error is left
    assert worst == 2 or not remedies["fp16"].any()


def test_a_layer_has_no_row_of_a_tensor_that_others_have(exports):
    source = Checkpoint(exports.checkpoint("qwen3_5_text"))
    bundle = exports.bundle(source.path, compress="int8-tensor")
    ranked, _ = weights.measure_costs(bundle, source, golden.make_golden(source, IDS))
    for row in ranked.itertuples():
        assert f"{source.prefix}layers.{row.layer}.{row.tensor}" in source
