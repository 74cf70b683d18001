"""Another runtime is compared with the portable one, within the distance that narrow sums make; no
checkpoint is needed."""

import pytest
from faults import FAULTS, around
from tiny import as_device, prompt

from workbench import Decoder
from workbench.check import golden
from workbench.check.device import (
    Reference,
    device_gate,
    make_reference,
    stored_reference,
)
from workbench.errors import InputError
from workbench.models.checkpoint import Checkpoint


def device(bundle, precision="declared", fault=None):
    """A stand-in for a device: it shows what Core ML shows."""
    decoder = Decoder(bundle, "portable", precision)
    if fault:
        FAULTS[fault].plant(decoder)
    return as_device(decoder)


@pytest.fixture(scope="module")
def reference(llama_bundle, llama_golden):
    return make_reference(llama_bundle, llama_golden)


@pytest.mark.parametrize(
    ("precision", "most"), [("declared", 0), ("exact", 1.5), ("narrow", 1)]
)
def test_every_arithmetic_up_to_narrow_sums_is_green(
    llama_bundle, llama_golden, reference, precision, most
):
    gate = device_gate(device(llama_bundle, precision), llama_golden, reference)
    assert gate.verdict == "GREEN" and gate.value <= most


@pytest.mark.parametrize(
    "fault",
    [
        "tokens_of_a_chunk_written_in_reverse",
        "rope_turns_the_other_way",
        "window_of_eight_tokens",
    ],
)
def test_a_device_that_computes_something_else_is_red(
    llama_bundle, llama_golden, reference, fault
):
    gate = device_gate(device(llama_bundle, fault=fault), llama_golden, reference)
    assert gate.verdict == "RED" and gate.value > 3


@pytest.mark.parametrize("scale", [1.01, 0.99])
def test_one_layer_s_values_a_hundredth_off_are_red(
    llama_bundle, llama_golden, reference, scale
):

    def scaled(predict, inputs, state):
        outputs = predict(inputs, state)
        return {name: value * scale for name, value in outputs.items()}

    decoder = device(llama_bundle)
    around(decoder.layers[1], scaled)
    gate = device_gate(decoder, llama_golden, reference)
    assert gate.verdict == "RED" and "hidden.1" in gate.reason


def test_inner_layers_that_a_device_does_not_show_go_on_alike(
    exports, tiny_llama, llama_golden
):
    bundle = exports.bundle(tiny_llama.path, max_seq_len=32, layers_per_shard=2)
    reference = make_reference(bundle, llama_golden)
    assert "hidden.0" not in reference.declared and "k.0" in reference.declared
    assert device_gate(device(bundle), llama_golden, reference).value == 0


def test_a_near_tied_choice_of_an_expert_is_left_out(exports):
    path = exports.checkpoint("zaya")
    source = golden.make_golden(Checkpoint(path), prompt(109, 12))
    bundle = exports.bundle(path)
    reference = make_reference(bundle, source)
    assert device_gate(device(bundle, "narrow"), source, reference).verdict == "GREEN"


def test_a_reference_is_kept_beside_the_golden_and_made_once(
    llama_bundle, llama_golden, tmp_path, monkeypatch
):
    path = llama_golden.save(tmp_path / "g.safetensors")
    first = stored_reference(llama_bundle, llama_golden, path)
    monkeypatch.setattr("workbench.check.device.make_reference", None)
    again = stored_reference(llama_bundle, llama_golden, path)
    assert again.key == first.key and again.declared.keys() == first.declared.keys()
    assert device_gate(device(llama_bundle), llama_golden, again).value == 0


def test_a_broken_reference_is_made_again_and_a_foreign_one_refused(
    llama_bundle, llama_golden, reference, tmp_path
):
    path = llama_golden.save(tmp_path / "g.safetensors")
    stored_reference(llama_bundle, llama_golden, path)
    (file,) = tmp_path.glob("*.reference.safetensors")
    file.write_bytes(b"nonsense")
    assert stored_reference(llama_bundle, llama_golden, path).key == reference.key
    foreign = Reference(reference.declared, reference.narrow, "0" * 64)
    with pytest.raises(InputError, match="another"):
        device_gate(device(llama_bundle), llama_golden, foreign)
