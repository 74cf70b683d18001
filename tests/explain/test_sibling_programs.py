"""`explain` names the operation or the constant in which the program of a wrong layer differs
from that of a right one."""

import sys
from pathlib import Path

import pytest
from in_process import invoke

sys.path.append(str(Path(__file__).parents[1] / "check"))  # for its planted faults

from faults import programs
from faults.copies import Copy

from workbench.bundle import Bundle
from workbench.explain.sibling_programs import (
    compare_with_sibling,
    describe_differences,
)

LAYER = 1


@pytest.fixture(scope="module")
def sound(exports):
    """A checkpoint of three layers and its bundle."""
    path = exports.checkpoint("llama", num_hidden_layers=3)
    return path, exports.bundle(path, max_seq_len=64, compress="fp16")


def plant(bundle: Bundle, folder: Path, change) -> Path:
    copy = Copy(bundle.root, folder / "planted")
    change(copy, LAYER)
    return copy.seal()


def replace_sum(copy, layer):
    """Makes the last sum of a layer, that with the residual stream, a difference."""
    copy.operations(copy.shard(layer), "add")[-1].type = "sub"


@pytest.mark.parametrize("preset", ["fp16", "int8-channel", "lut4-g8"])
def test_programs_of_sound_layers_do_not_differ(sound, exports, preset):
    path, _ = sound
    bundle = exports.bundle(path, max_seq_len=64, compress=preset)
    assert compare_with_sibling(bundle, [LAYER]) == []
    assert compare_with_sibling(bundle, [0, 1, 2]) == []  # no right sibling


@pytest.mark.parametrize(
    "change, words",
    [
        (replace_sum, "(sub) where layer 0's program has add, in module layers.1"),
        (
            programs.scale_scores(1.05),
            "is 0.479248 where layer 0 has 0.456543, in module layers.1.self_attn",
        ),
        (programs.set_softmax_axis(1), "(softmax) has 1 as axis where layer 0's has"),
        (
            programs.replace_silu("sigmoid"),
            "(sigmoid) where layer 0's program has silu",
        ),
        (
            programs.insert_after("conv", "down_proj", 0, "add", 1e-3),
            "(add) is not in layer 0's program",
        ),
    ],
)
def test_the_first_difference_is_named(sound, tmp_path, change, words):
    _, bundle = sound
    planted = Bundle.open(plant(bundle, tmp_path, change))
    differences = compare_with_sibling(planted, [LAYER])
    assert words in str(differences[0]), differences
    assert differences[0].shard == "layers_01_01"
    sentence = describe_differences(differences)
    assert sentence.startswith(
        "The program of layers_01_01 differs from that of layers_00_00, which has the "
        "same structure: "
    )


def test_layers_of_another_kind_are_not_compared(exports):
    """Gemma's layers read either the local or the global mask."""
    bundle = exports.bundle(exports.checkpoint("gemma3_text"))
    for layer, entry in enumerate(bundle.manifest.layers):
        others = {
            index
            for index, other in enumerate(bundle.manifest.layers)
            if other.rope == entry.rope
        }
        assert compare_with_sibling(bundle, others) == []
        assert compare_with_sibling(bundle, [layer]) == []


def test_a_function_is_named_where_a_package_has_several(exports, tmp_path):
    bundle = exports.bundle(exports.checkpoint("llama"), tokens="1,4", compress="fp16")
    planted = Bundle.open(
        plant(bundle, tmp_path, programs.plant_in_function(4, replace_sum))
    )
    (difference,) = compare_with_sibling(planted, [LAYER])
    assert difference.function == "t4" and str(difference).endswith("in function t4")


@pytest.mark.parametrize("name", ["operation", "constant"])
def test_explain_ends_at_the_operation(sound, tmp_path, name):
    checkpoint, bundle = sound
    change = (
        replace_sum if name == "operation" else programs.scale_scores(0.42 / 0.4565)
    )
    planted = plant(bundle, tmp_path, change)
    options = "--checkpoint", checkpoint, "--prompt-ids", "1,2,3,4"
    explained = invoke("explain", planted, *options)
    verdicts = {gate["name"]: gate["verdict"] for gate in explained["gates"]}
    assert (verdicts["weights"], verdicts["program"]) == ("GREEN", "RED")
    assert explained["fits"].startswith(name), explained["fits"]
    assert explained["fits"] in explained["conclusion"]
    assert "Layer 1 computes something else" in explained["conclusion"]
