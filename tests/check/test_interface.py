"""Gate `interface`: RED with words that name what was changed on disk. test_faults has every fault
and what is GREEN."""

import pytest

from workbench import Bundle
from workbench.bundle import PRESETS
from workbench.check.interface import interface_gate

X = "layers_01_01: input x: FLOAT16 [1, 128, 1..4, 1] in the manifest, FLOAT16 "
# Planted fault → the first words of the reason: where, what it is, what it should be.
REASONS = {
    "shapes_enumerated": X + "[1, 128, 1, 1] of enumeratedShapes in the description",
    "a_second_function_that_nobody_declared": "layers_02_02: functions: ['main'] in "
    "the manifest, ['main', 'spare'] in the program",
    "taps_left_out": "layers_01_01: tap of layer 1: hidden in the manifest, missing in ",
    "experts_declared_routed": "experts: {(0, 1): [(0, 1)], (1, 2): [(0, 1)]",
    "another_family_declared": "family: qwen2 in the manifest, llama in the checkpoint",
}


@pytest.mark.parametrize("fault", REASONS)
def test_the_reason_names_what_differs(broken, fault):
    folder, checkpoint = broken(fault)
    gate = interface_gate(Bundle.open(folder), checkpoint)
    assert gate.verdict == "RED" and gate.value >= 1
    assert gate.reason.startswith(REASONS[fault])


@pytest.mark.parametrize("tap", ["no_such_value", "rope_cos", None])
def test_a_tap_of_an_inner_layer_is_a_value_like_the_output(broken, tap):
    def plant(copy):
        copy.shard(0)["taps"]["0"] = tap or copy.shard(0)["taps"]["0"]

    folder, _ = broken(plant, base="pairs")
    gate = interface_gate(Bundle.open(folder))
    assert gate.verdict == ("RED" if tap else "GREEN")
    assert ("layer 0" if tap else "not compared") in gate.reason


@pytest.mark.slow("exports a bundle of a preset")
@pytest.mark.matrix(6, wide=30)
@pytest.mark.parametrize("claim", PRESETS)
@pytest.mark.parametrize("compress", PRESETS)
def test_a_false_claim_of_compression_is_red(broken, compress, claim):
    def plant(copy):
        copy.manifest["options"]["compress"] = claim

    gate = interface_gate(Bundle.open(broken(plant, compress)[0]))
    assert gate.verdict == ("GREEN" if claim == compress else "RED")
    assert claim == compress or "storage of" in gate.reason


def test_a_package_that_cannot_be_read_is_red(broken):
    def plant(copy):
        files = copy.shard(1)["files"]
        path = next(e["path"] for e in files if e["path"].endswith(".mlmodel"))
        copy.edit_file(path, lambda data: data[: len(data) // 3])

    gate = interface_gate(Bundle.open(broken(plant)[0]))
    assert gate.verdict == "RED" and "layers_01_01" in gate.reason
