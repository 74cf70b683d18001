"""`explain.error` splits a bundle's error into parts that add up, each of which changes with its
own cause alone; `explain.weights` ranks the costliest tensors first.

The parts are those of `error.PARTS`: `storage` and `precision` (rounding), `quantization`,
`reauthoring` (the program computes something else than Hugging Face's model), `runtime`."""

import numpy as np
import pandas as pd
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
def splits(tiny_llama, int8_bundle) -> dict[str, error.Split]:
    """The split of the int8 bundle's error in each of `error.MODES`."""
    return error.split_error(tiny_llama, int8_bundle, IDS)


@pytest.mark.parametrize("mode", error.MODES)
def test_parts_add_up_to_the_total_and_their_shares_to_one(
    splits, int8_bundle, tiny_llama, mode
):
    split = splits[mode]
    assert split.shares().to_numpy().sum() == pytest.approx(1)
    by_layer = split.layer_shares()
    assert by_layer["share"].sum() == pytest.approx(1)
    # weighted by the layers' shares, the parts are those of all layers together
    for part in split.parts:
        weighted = (by_layer["share"] * by_layer[part]).sum()
        assert weighted == pytest.approx(split.shares().loc[part, part])
    decoder = Decoder(int8_bundle, "portable")
    source = golden.make_golden(tiny_llama, IDS)
    updates = error.bundle_updates(decoder, source, mode)  # [L, n, C]
    assert np.allclose(split.reference + split.total, updates, atol=1e-6)


def test_signed_shares_of_a_layer_add_up_to_one_and_a_part_that_cancels_is_negative():
    total = np.array([[[3.0, 4.0]], [[0.0, 0.0]]])  # two layers, one token
    cancelled = np.array([[[-3.0, 0.0]], [[0.0, 0.0]]])
    parts = {"quantization": total - cancelled, "precision": cancelled}
    shares = error.Split(np.ones_like(total), parts).signed_shares()
    assert shares["layer"].tolist() == [0, 1]
    assert shares["quantization"].tolist() == pytest.approx([34 / 25, 0])
    assert shares["precision"].tolist() == pytest.approx([-9 / 25, 0])


def test_shares_of_tokens_add_up_and_a_token_that_is_left_out_counts_nowhere(splits):
    split = splits["isolated"]
    shares = split.token_shares([str(place) for place in range(len(IDS))])
    assert shares["share"].sum() == pytest.approx(1)
    position = int(shares["share"].idxmax())
    rest = split.without(position)
    squares, rest_squares = ((part.total**2).sum() for part in (split, rest))
    assert rest_squares / squares == pytest.approx(1 - shares["share"].max())
    assert rest.reference.shape[1] == len(IDS) - 1
    assert rest.layer_shares()["share"].sum() == pytest.approx(1)


def test_int8_costs_more_than_rounding_and_a_sound_program_nothing(splits):
    errors = splits["isolated"].layers()
    assert (errors["quantization"] > 3 * errors["precision"]).all()
    assert (errors["reauthoring"] < gates.REAUTHORING).all()
    assert errors["runtime"].isna().all()
    assert gates.verdict(error.error_gates(splits)) == "GREEN"


def test_the_errors_of_all_positions_make_up_the_error_of_their_layer(splits):
    """The mean square error of a layer is the mean of those of its positions; both are
    relative to the reference's RMS."""
    split = splits["chained"]
    rows = split.positions()
    L, n = split.reference.shape[0], len(IDS)
    assert len(rows) == L * n
    reference_ms = (split.reference**2).mean(-1)  # [L, n]
    error_rms = rows["total"] * np.sqrt(reference_ms.ravel())
    layer_ms = (error_rms**2).groupby(rows["layer"]).mean()
    layer_errors = np.sqrt(layer_ms / reference_ms.mean(1))
    assert np.allclose(layer_errors, split.layers()["total"])


@pytest.mark.matrix(1, wide=3)
@pytest.mark.parametrize(
    "compress", ["fp16", "int8-tensor", "int4-block32", "lut6-g16"]
)
def test_a_fault_of_the_program_is_re_authoring_however_weights_are_stored(
    exports, tmp_path, monkeypatch, compress
):
    source = Checkpoint(exports.checkpoint("llama"))
    sound = exports.bundle(source.path, compress=compress)
    sound_errors = error.split_error(source, sound, IDS)["isolated"].layers()
    original_init = layers.RMSNorm.__init__

    def init_with_large_eps(norm, width, eps, **options):
        original_init(norm, width, 1e4 * eps, **options)

    monkeypatch.setattr(layers.RMSNorm, "__init__", init_with_large_eps)
    faulty = export(source.path, tmp_path / "b", max_seq_len=32, compress=compress)
    splits = error.split_error(source, faulty, IDS)
    errors = splits["isolated"].layers()
    assert (errors["reauthoring"] > 100 * gates.REAUTHORING).any()
    assert np.array_equal(errors["quantization"], sound_errors["quantization"])
    assert gates.verdict(error.error_gates(splits)) == "RED"


@pytest.mark.shim
@pytest.mark.parametrize(
    "target, runtime", [("coreml", "stand-in"), ("other", "other")]
)
def test_layers_inside_a_shard_of_a_runtime_without_hooks_are_refused(
    exports, other_target, tmp_path, target, runtime
):
    two_layers_per_shard = exports.bundle("llama", layers_per_shard=2)
    change = "options/target", target
    bundle = tiny.edited_copy(two_layers_per_shard, tmp_path / "b", change)
    source = Checkpoint(exports.checkpoint("llama"))
    with refused(f"shards of several layers, of which {runtime} shows the last"):
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
    """And the cost of storing fp16 is the same beside any compression."""
    source = Checkpoint(exports.checkpoint(family, dtype="float32", **sizes))

    def split_of(**options):
        bundle = exports.bundle(source.path, **options)
        return error.split_error(source, bundle, [1, 2, 3])

    fp16, int8 = split_of(**options), split_of(**options, compress="int8-tensor")
    split = fp16["isolated"]
    assert not split.parts["quantization"].any()
    assert split.layers()["storage"].between(1e-5, 1e-3).all()
    assert np.array_equal(split.parts["storage"], int8["isolated"].parts["storage"])
    for splits in (fp16, int8):
        assert gates.verdict(error.error_gates(splits)) == "GREEN"


# --- tensors ranked by their cost ---------------------------------------------------------


def test_a_tensor_with_a_planted_error_is_ranked_first(
    int8_bundle, tiny_llama, llama_golden, monkeypatch
):
    stored = golden.stored_weights(tiny_llama, int8_bundle)

    def stored_with_error(name):
        value = stored(name)
        if "layers.1.mlp.up_proj" in name:
            value = value + 0.1 * value.std() * torch.sign(value)
        return value

    monkeypatch.setattr(weights, "stored_weights", lambda *_: stored_with_error)
    ranked, _ = weights.measure_costs(int8_bundle, tiny_llama, llama_golden)
    first = ranked[ranked["layer"] == 1].iloc[0]
    assert first["tensor"] == "mlp.up_proj.weight"
    assert first["share"] > 0.5


@pytest.mark.parametrize("count", [2, 99])
def test_the_costliest_tensors_in_fp16_lower_the_error(
    int8_bundle, tiny_llama, llama_golden, count
):
    """`fp16` is the error that is left with the `count` costliest tensors in fp16."""
    _, remedies = weights.measure_costs(int8_bundle, tiny_llama, llama_golden, count)
    assert (remedies["error"] > 1e-4).all()
    assert (remedies["fp16"] < remedies["error"]).all()
    if count == 99:  # that is all tensors, so that no error is left
        assert not remedies["fp16"].any()


def test_a_layer_has_rows_only_of_tensors_that_it_has(exports):
    """Layers with attention and layers with a recurrence have different tensors."""
    source = Checkpoint(exports.checkpoint("qwen3_5_text"))
    bundle = exports.bundle(source.path, compress="int8-tensor")
    ranked, _ = weights.measure_costs(bundle, source, golden.make_golden(source, IDS))
    for row in ranked.itertuples():
        assert f"{source.prefix}layers.{row.layer}.{row.tensor}" in source


def test_a_prompt_is_shown_in_its_order_and_a_long_one_by_its_beginning():
    shares = pd.DataFrame({"position": [1, 0], "token": ["·ferry", "The"]})
    words = error.describe_prompt(shares)
    assert words == "One prompt was measured, of 2 tokens: “The ferry”."
    ids = pd.DataFrame({"position": range(40), "token": [str(i) for i in range(40)]})
    words = error.describe_prompt(ids)
    assert words.startswith("One prompt was measured, of 40 tokens: “0 1 2 ")
    assert words.endswith(" 31 …”.")
