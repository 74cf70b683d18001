"""Calibration of Gemma 4, by the exporter and by gate `weights`: the inputs of a layer that shares
the K and V rows of an earlier one are, bit for bit, those of Hugging Face's model whose earlier
layers, and whose projection of the embeddings for all layers, have the matrices that the bundle
stores."""

from pathlib import Path
from typing import NamedTuple

import pytest
import tiny
import torch
from circle import wide
from faults.copies import Copy
from torch import nn
from transformers import AutoModelForCausalLM

from workbench import Bundle, export
from workbench.check import calibrated
from workbench.check.golden import stored_weights
from workbench.check.weights import weights_gate
from workbench.exporter import calibrate
from workbench.exporter.inputs import InputSum
from workbench.models.checkpoint import Checkpoint
from workbench.models.layerwise import WrappedLayer

pytestmark = [
    pytest.mark.slow("exports a bundle and runs Hugging Face's model"),
    pytest.mark.usefixtures("shared_conversions"),
]
# A layer of each kind shares the rows of the last one of its kind before, which is not the first
# sliding layer.
SLIDING, FULL = "sliding_attention", "full_attention"
KINDS = [SLIDING, SLIDING, FULL, SLIDING, FULL]
SHARING = 3, 4
LAYERS = {"num_hidden_layers": len(KINDS), "layer_types": KINDS}
FORMS = {
    "E2B": LAYERS,
    "E4B": LAYERS | {"use_double_wide_mlp": False, "num_key_value_heads": 2},
}
PROJECTION = "model.per_layer_model_projection.weight"
TEXT = tiny.random_text(101, count=256)
# of one layer a shard, two of the five have the same program, which is converted once
OPTIONS = {"max_seq_len": 16, "calibration": TEXT, "layers_per_shard": 1}


class Calibrated(NamedTuple):
    """An exported bundle, its checkpoint, and the inputs of the layers in the exporter."""

    bundle: Bundle
    source: Checkpoint
    runs: dict[str, list[list[torch.Tensor]]]
    """What `record_runs` returned, of the layers that share rows."""


def export_calibrated(exports, form: str, preset: str) -> Calibrated:
    """Exports the checkpoint of a form in a preset, once for all tests."""
    checkpoint = exports.checkpoint("gemma4_text", **FORMS[form])

    def make(folder: Path) -> None:
        folder.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            runs = record_runs(patch, calibrate, "CompressingLayer")
            export(checkpoint, folder / "bundle", compress=preset, **OPTIONS)
        names = [f"model.layers.{index}." for index in SHARING]
        torch.save({name: runs[name] for name in names}, folder / "runs.pt")

    folder = tiny.once(exports.root / f"calibrated-{form}-{preset}", make)
    runs = torch.load(folder / "runs.pt")
    return Calibrated(Bundle.open(folder / "bundle"), Checkpoint(checkpoint), runs)


def record_runs(monkeypatch, module, name: str) -> dict[str, list[list[torch.Tensor]]]:
    """Makes layers of the class `name` of a module record the inputs of their linear modules.

    Returns a dictionary that is filled when the layers run: prefix of a layer's tensors → for each
    run of the layer the inputs, in the order in which its linear modules are called.
    """
    runs: dict[str, list[list[torch.Tensor]]] = {}

    class RecordingLayer(getattr(module, name)):
        def __init__(self, layer: nn.Module, prefix: str, *arguments):
            super().__init__(layer, prefix, *arguments)
            layer.register_forward_pre_hook(
                lambda *_: runs.setdefault(prefix, []).append([])
            )
            record_inputs(layer, lambda x: runs[prefix][-1].append(x))

    assert issubclass(RecordingLayer, WrappedLayer)
    monkeypatch.setattr(module, name, RecordingLayer)
    return runs


def record_inputs(layer: nn.Module, add) -> None:
    """Makes the linear modules of a layer call `add` with each of their inputs."""
    for child in layer.modules():
        if isinstance(child, nn.Linear):
            child.register_forward_pre_hook(lambda _, arguments: add(arguments[0]))


@torch.inference_mode()
def inputs_of_layer(bundle: Bundle, source: Checkpoint, index: int, stored: int):
    """The inputs of the linear modules of layer `index` in Hugging Face's model. The layers before
    layer `stored`, and the projection of the embeddings, have the matrices that a bundle stores; the
    others have the checkpoint's."""
    model = AutoModelForCausalLM.from_pretrained(
        source.path, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    read = stored_weights(source, bundle)
    names = [PROJECTION]
    for name in source.matrices:
        if name.startswith("model.layers.") and int(name.split(".")[2]) < stored:
            names.append(name)
    for name in names:
        module = model.get_submodule(name.removesuffix(".weight"))
        values = read(name).float().reshape(module.weight.shape)
        assert not torch.equal(values, module.weight)
        module.weight.copy_(values)
    inputs: list[torch.Tensor] = []
    record_inputs(model.model.layers[index], inputs.append)
    model.model(input_ids=torch.from_numpy(TEXT.ids).long(), use_cache=False)
    return inputs


def assert_equal(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    # q, o, three of the MLP, two of the second embedding
    assert len(actual) == len(expected) == 7
    for one, other in zip(actual, expected):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("form", "preset"),
    [
        ("E2B", "lut4-g8"),
        wide("E2B", "int8-channel"),
        wide("E4B", "lut4-g8"),
        wide("E4B", "int8-channel"),
    ],
)
def test_sharing_layers_are_calibrated_on_compressed_rows(exports, form, preset):
    """Compares the first run of each layer, in which the exporter sums the inputs of its matrices."""
    bundle, source, runs = export_calibrated(exports, form, preset)
    assert bundle.manifest.calibration.nearest == []
    for index in SHARING:
        summed, _ = runs[f"model.layers.{index}."]
        assert_equal(summed, inputs_of_layer(bundle, source, index, stored=index))


@pytest.mark.parametrize("form", ["E2B", wide("E4B")])
def test_sharing_layers_are_judged_on_compressed_rows(exports, monkeypatch, form):
    """Every layer is judged a second time, by the inputs of its uncompressed matrices, where the
    first figures are above their limits."""
    bundle, source, _ = export_calibrated(exports, form, "lut4-g8")
    runs = record_runs(monkeypatch, calibrated, "JudgedLayer")
    monkeypatch.setattr(calibrated, "worst_ratio", lambda deviations: 2.0)
    weights_gate(bundle, source)
    for index in SHARING:
        as_stored, uncompressed = runs[f"model.layers.{index}."]
        expected = inputs_of_layer(bundle, source, index, stored=index + 1)
        assert_equal(as_stored, expected)
        expected = inputs_of_layer(bundle, source, index, stored=index)
        assert_equal(uncompressed, expected)


def test_a_projection_is_judged_by_its_rows_and_by_its_inputs(
    exports, tmp_path, monkeypatch
):
    """Planted: a row of one shard's slice is scaled; the inputs that it was fitted to are others."""
    bundle, source, _ = export_calibrated(exports, "E2B", "lut4-g8")
    assert weights_gate(bundle, source).verdict == "GREEN"
    copy = Copy(bundle.root, tmp_path / "copy")
    copy.weight(PROJECTION).scale_row(3, 1.3)
    gate = weights_gate(Bundle.open(copy.seal()), source)
    assert gate.verdict == "RED" and "per_layer_model_projection" in gate.reason

    sum_of = InputSum.of
    # the layers' sums are made otherwise
    monkeypatch.setattr(InputSum, "of", lambda x: sum_of(x.roll(1, -1)))
    bundle = export(source.path, tmp_path / "c", compress="lut4-g8", **OPTIONS)
    gate = weights_gate(bundle, source)
    assert gate.verdict == "RED" and "per_layer_model_projection" in gate.reason
