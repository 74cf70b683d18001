"""Gate `weights` is RED on damaged or missing weights and names them. test_faults plants
every fault, and has the GREEN bundles."""

import numpy as np
import pytest
import torch

from workbench import Bundle
from workbench.bundle import PRESETS
from workbench.check import compare
from workbench.check.weights import (
    _is_constant,
    fp16_deviation,
    integer_ratio,
    table_ratios,
    weights_gate,
)


def unplaced(copy):
    copy.shard(1)["weights"].pop("model.layers.1.mlp.up_proj.weight")


def operands_that_do_not_fit(copy):
    weight = copy.weight("layers.1.self_attn.v_proj.weight")
    weight.arrays["scale"].value.type.tensorType.dimensions[0].constant.size = 7


def half_a_file(copy):
    files = copy.shard(0)["files"]
    path = next(e["path"] for e in files if e["path"].endswith("weight.bin"))
    copy.edit_file(path, lambda data: data[: len(data) // 2])


def rounded_embedding(copy):
    copy.edit_embedding(lambda table: table.__imul__(np.float16(1.05)))


@pytest.mark.parametrize(
    ("plant", "place"),
    [
        (unplaced, "no shard stores model.layers.1.mlp.up_proj.weight"),
        (operands_that_do_not_fit, "layers.1.self_attn.v_proj.weight"),
        (half_a_file, "layers_00_00"),
        (rounded_embedding, "host: model.embed_tokens"),
    ],
)
def test_what_is_damaged_or_missing_is_red_by_name(broken, plant, place):
    folder, checkpoint = broken(plant, "int8-channel")
    gate = weights_gate(Bundle.open(folder), checkpoint)
    assert gate.verdict == "RED" and place in gate.reason
    assert "o_proj" not in gate.reason or plant is half_a_file


def test_a_tensor_is_compared_in_blocks_and_named_once(broken, monkeypatch):
    def plant(copy):
        rounded_embedding(copy)
        operands_that_do_not_fit(copy)

    folder, checkpoint = broken(plant, "int8-channel")
    monkeypatch.setattr(compare, "BLOCK", 64)
    gate = weights_gate(Bundle.open(folder), checkpoint)
    assert gate.reason.count("embed_tokens") == 1 and "v_proj" in gate.reason


ROWS, COLUMNS = 6, 64


def stored_integers(preset, seed=0):
    """Parts of random weights [ROWS, COLUMNS] in a preset, with a zero point of 3, the
    weights, and the preset's tolerance of each, in float64."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((ROWS, COLUMNS)).astype(np.float32)
    values[2] = 0.0
    rounded = np.float64(np.float16(values))
    blocks = {"per_tensor": (1, 1), "per_channel": (ROWS, 1)}
    shape = blocks.get(preset.granularity, (ROWS, COLUMNS // (preset.block or 1)))
    groups = np.abs(rounded).reshape(shape[0], -1, shape[1], COLUMNS // shape[1])
    largest = 2 ** (preset.bits - 1) - 1
    step = np.float64(np.float16(groups.max((1, 3)) / largest))
    steps = step.repeat(ROWS // shape[0], 0).repeat(COLUMNS // shape[1], 1)
    with np.errstate(invalid="ignore"):
        integers = np.nan_to_num(np.rint(rounded / steps)).clip(-largest, largest)
    size = np.abs(rounded)
    beyond = np.maximum(size - largest * steps, 0)
    tolerance = steps / 2 + size * 2.0**-11 + beyond
    parts = {
        "data": np.int16(integers + 3),
        "scale": np.float16(step),
        "offset": np.full((1, 1), 3, np.int8),
    }
    return parts, values, tolerance


@pytest.mark.parametrize("name", ["int8-channel", "int8-tensor", "int4-block32"])
def test_the_worst_integer_is_found_wherever_it_is(name):
    preset = PRESETS[name]
    parts, values, tolerance = stored_integers(preset)
    assert integer_ratio(parts, torch.from_numpy(values), preset) <= 1.0001
    scales = np.broadcast_to(
        np.float64(parts["scale"])
        .repeat(ROWS // parts["scale"].shape[0], 0)
        .repeat(COLUMNS // parts["scale"].shape[1], 1),
        values.shape,
    )
    for row, column in ((0, 0), (3, 31), (5, 63)):
        wrong = parts | {"data": parts["data"].copy()}
        wrong["data"][row, column] += 2
        ratio = integer_ratio(wrong, torch.from_numpy(values), preset)
        stored = (np.float64(wrong["data"][row, column]) - 3) * scales[row, column]
        distance = abs(stored - np.float64(np.float16(values[row, column])))
        expected = distance / tolerance[row, column]
        assert ratio == pytest.approx(expected, rel=1e-5) and ratio > 1.5


def test_factors_that_no_preset_makes_are_spread_over_the_weights():
    """A scale of each column is as good as its values are."""
    preset = PRESETS["int8-channel"]
    parts, values, _ = stored_integers(preset)
    parts["data"] = parts["data"][:1].repeat(ROWS, 0)
    values = torch.from_numpy(values[:1].repeat(ROWS, 0))
    rows = parts["scale"][:1]
    assert integer_ratio(parts | {"scale": rows}, values, preset) <= 1.0001
    columns = rows.repeat(COLUMNS, 1)
    assert integer_ratio(parts | {"scale": columns}, values, preset) <= 1.0001
    columns[0, 40] *= 3
    assert integer_ratio(parts | {"scale": columns}, values, preset) > 2
    with pytest.raises(ValueError, match="a factor"):
        integer_ratio(parts | {"scale": columns[:, :7]}, values, preset)
    with pytest.raises(ValueError, match="integers of int32"):
        integer_ratio(parts | {"data": np.int32(parts["data"])}, values, preset)


@pytest.mark.parametrize("place", [0, 7, 99])
def test_the_worst_fp16_weight_is_found_and_nan_is_the_worst(place):
    rng = np.random.default_rng(1)
    values = torch.from_numpy(np.float32(rng.standard_normal(100) ** 7))
    stored = values.half().float()
    assert fp16_deviation("w", stored, values).value <= 1
    stored[place] = values[place] * (1 + 2.0**-8)
    exponent = torch.frexp(values[place]).exponent - 1
    half_unit = 2.0 ** (max(exponent.item(), -14) - 11)
    distance = (stored[place] - values[place]).abs().item()
    gate = fp16_deviation("w", stored, values)
    assert gate.value == pytest.approx(distance / half_unit, rel=1e-5)
    stored[place] = float("nan")
    assert fp16_deviation("w", stored, values).verdict == "RED"
    stored[place] = values[place] = float("inf")
    assert fp16_deviation("w", stored, values).verdict == "RED"


def test_an_entry_that_is_not_the_nearest_is_held_against_the_nearest():
    table = torch.tensor([-3.0, -1, 1, 3])
    used, value = torch.ones(1, 1), torch.full((1, 1), 2.9).half()
    assert 18 < table_ratios(used, value, table)[0] < 20


def test_a_plug_in_may_leave_out_zeros_or_ones():
    tensors = map(torch.tensor, ([0, 0], [1, 1], [0, 1], [2, 2]))
    assert [*map(_is_constant, tensors)] == [True, True, False, False]
