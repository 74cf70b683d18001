"""Gate `weights` is RED on damaged or missing weights and names them. test_faults plants
every fault, and has the GREEN bundles."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from miltorch.coremltools_import import kmeans1d
from workbench import Bundle
from workbench.bundle import PRESETS
from workbench.bundle.presets import find_preset
from workbench.check import compare
from workbench.check.deviation import Deviation
from workbench.check.stored_values import (
    fp16_deviation,
    integer_ratio,
    table_deviation,
    table_ratios,
    worst_deviation,
)
from workbench.check.weights import _is_constant, list_problems, weights_gate


def remove_weight_from_shard(copy):
    copy.shard(1)["weights"].pop("model.layers.1.mlp.up_proj.weight")


def resize_scale(copy):
    weight = copy.weight("layers.1.self_attn.v_proj.weight")
    weight.arrays["scale"].value.type.tensorType.dimensions[0].constant.size = 7


def cut_weight_file_in_half(copy):
    files = copy.shard(0)["files"]
    path = next(e["path"] for e in files if e["path"].endswith("weight.bin"))
    copy.edit_file(path, lambda data: data[: len(data) // 2])


def scale_embedding(copy):
    copy.edit_embedding(lambda table: table * np.float16(1.05))


@pytest.mark.parametrize(
    ("plant", "place"),
    [
        (remove_weight_from_shard, "no shard stores model.layers.1.mlp.up_proj.weight"),
        (resize_scale, "layers.1.self_attn.v_proj.weight"),
        (cut_weight_file_in_half, "layers_00_00"),
        (scale_embedding, "host: model.embed_tokens"),
    ],
)
def test_what_is_damaged_or_missing_is_red_by_name(broken, plant, place):
    folder, checkpoint = broken(plant, "int8-channel")
    gate = weights_gate(Bundle.open(folder), checkpoint)
    assert gate.verdict == "RED" and place in gate.reason
    assert "o_proj" not in gate.reason or plant is cut_weight_file_in_half


@pytest.mark.parametrize("preset", ["int8-channel", "fp16"])
def test_a_wrong_weight_is_named_with_its_place_and_both_values(broken, preset):
    row, column = 5, 3

    def plant(copy):
        codes = copy.weight("layers.1.self_attn.v_proj.weight").codes
        array = codes.read()
        flat = array.reshape(len(array), -1)
        flat[row, column] += 9
        codes.write(array)

    folder, checkpoint = broken(plant, preset)
    reason = weights_gate(Bundle.open(folder), checkpoint).reason
    assert "v_proj.weight: " in reason
    assert f"(worst at row {row}, column {column}: stored " in reason
    tensor = checkpoint.tensor("model.layers.1.self_attn.v_proj.weight")
    expected = float(reason.rpartition("expected ")[2].rstrip(")"))
    assert expected == pytest.approx(float(tensor[row, column]), rel=1e-3)


def test_a_wrong_weight_of_a_norm_is_named_by_its_number_alone():
    values = torch.ones(1, 8)
    stored = {"val": np.float16([1, 1, 1, np.nan, 1, 1, 1, 2])}
    deviation = worst_deviation("norm", stored, values, find_preset("fp16"))
    assert "(worst at element 3: stored nan, expected 1)" in deviation.reason


def test_a_tensor_is_compared_in_blocks_and_named_once(broken, monkeypatch):
    def plant(copy):
        scale_embedding(copy)
        resize_scale(copy)

    folder, checkpoint = broken(plant, "int8-channel")
    monkeypatch.setattr(compare, "BLOCK", 64)
    gate = weights_gate(Bundle.open(folder), checkpoint)
    assert gate.reason.count("embed_tokens") == 1 and "v_proj" in gate.reason


ROWS, COLUMNS = 6, 64


def stored_integers(preset, seed=0):
    """Random weights stored as integers with a zero point of 3.

    Returns the stored parts by MIL's names, the weights [ROWS, COLUMNS] float32, and for each
    weight how far a stored value of the preset may be from it, [ROWS, COLUMNS] float64.
    """
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
    magnitude = np.abs(rounded)
    # the part of a weight that is beyond the largest integer
    clipped = np.maximum(magnitude - largest * steps, 0)
    tolerance = steps / 2 + magnitude * 2.0**-11 + clipped
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
    deviation = fp16_deviation("w", stored, values)
    assert deviation.value == pytest.approx(distance / half_unit, rel=1e-5)
    stored[place] = float("nan")
    assert not fp16_deviation("w", stored, values).is_sound
    stored[place] = values[place] = float("inf")
    assert not fp16_deviation("w", stored, values).is_sound


def test_an_entry_that_is_not_the_nearest_is_held_against_the_nearest():
    table = torch.tensor([-3.0, -1, 1, 3])
    used, value = torch.ones(1, 1), torch.full((1, 1), 2.9).half()
    assert 18 < table_ratios(used, value, table)[0] < 20


# both places that use coremltools' solver of tables, in a process that has not imported it
TABLES_ALONE = {
    "check": """
import torch
from workbench.check.stored_values import least_squared_error
least_squared_error(torch.arange(8).half(), 4)
""",
    "exporter": """
import numpy as np
from workbench.exporter.weights import palettize
palettize(np.arange(8, dtype=np.float16), 2)
""",
}


@pytest.mark.parametrize("room", TABLES_ALONE)
def test_the_solver_of_tables_is_imported_without_a_word_of_coremltools(room):
    program = [sys.executable, "-c", TABLES_ALONE[room]]
    child = subprocess.run(program, capture_output=True, text=True, check=True)
    assert child.stdout + child.stderr == ""


GROUPED = find_preset("lut4-g8")


def stored_groups(values):
    """The best tables of groups of 8 rows of `values` [R, K], by the exact solver, and
    the nearest entries."""
    rounded = np.float32(np.float16(values))
    tables, indices = [], []
    for group in rounded.reshape(-1, 8 * values.shape[1]):
        clusters = kmeans1d().cluster(group, 16)
        table = np.float32(np.float16(clusters.centroids))
        tables.append(table)
        indices.append(np.abs(group[:, None] - table).argmin(1))
    return {
        "lut": np.float16(tables).reshape(-1, 1, 1, 1, 16, 1),
        "indices": np.uint8(indices).reshape(*values.shape, 1, 1),
    }


def heavy_tailed(seed):
    rng = np.random.default_rng(seed)
    return np.float32(rng.standard_t(3, (32, 48)) * 0.02)


def measure_deviation(parts, values):
    return table_deviation("w", parts, torch.from_numpy(values), GROUPED)


@pytest.mark.parametrize("seed", range(3))
def test_the_best_tables_of_groups_are_green_and_worse_ones_red(seed):
    values = heavy_tailed(seed)
    parts = stored_groups(values)
    assert measure_deviation(parts, values).is_sound
    tables = parts["lut"].copy()
    tables[[1, 2]] = tables[[2, 1]]
    assert not measure_deviation(parts | {"lut": tables}, values).is_sound
    indices = parts["indices"].copy()
    row = indices[17]
    row[0] += 1 if row[0] < 15 else -1
    assert not measure_deviation(parts | {"indices": indices}, values).is_sound
    # row 9 is stored 1.02 times as large as it is in this checkpoint
    smaller = values.copy()
    smaller[9] /= 1.02
    assert not measure_deviation(parts, smaller).is_sound


def test_nearest_entries_of_a_table_that_is_not_the_best_are_red():
    values = heavy_tailed(0)
    parts = stored_groups(values)
    tables = parts["lut"].copy()
    tables[2] *= np.float16(1.1)
    entries = np.float32(tables[2]).ravel()
    rounded = np.float32(np.float16(values[16:24]))
    indices = parts["indices"].copy()
    nearest = np.abs(rounded[..., None] - entries).argmin(-1)
    indices[16:24] = np.uint8(nearest)[..., None, None]
    deviation = measure_deviation(parts | {"lut": tables, "indices": indices}, values)
    assert not deviation.is_sound and "squared error" in deviation.reason


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda lut: np.roll(lut, 1, axis=4), "ascending"),
        (lambda lut: np.where(lut == lut.max(), np.float16("inf"), lut), "ascending"),
        (lambda lut: lut[:2], "2 tables for 32 rows"),
    ],
)
def test_tables_that_no_exporter_makes_are_refused(change, words):
    values = heavy_tailed(0)
    parts = stored_groups(values)
    with pytest.raises(ValueError, match=words):
        measure_deviation(parts | {"lut": change(parts["lut"])}, values)


def test_a_plug_in_may_leave_out_zeros_or_ones():
    tensors = map(torch.tensor, ([0, 0], [1, 1], [0, 1], [2, 2]))
    assert [*map(_is_constant, tensors)] == [True, True, False, False]


def test_a_reason_details_three_wrong_tensors_and_names_the_next_ones():
    unit = "halves of an fp16 unit"
    wrong = [
        Deviation.at(f"layers_00_00: model.layers.0.t{i}", 100.0 - i, 1.05, unit)
        for i in range(12)
    ]
    reason = list_problems(["no shard stores x"], wrong)
    assert reason == (
        "no shard stores x; layers_00_00: model.layers.0.t0: 100 halves of an fp16 unit; "
        "layers_00_00: model.layers.0.t1: 99 halves of an fp16 unit; and 10 more: "
        "model.layers.0.t2, model.layers.0.t3, model.layers.0.t4, model.layers.0.t5, "
        "model.layers.0.t6, …"
    )
    assert list_problems([], wrong[:3]).count(unit) == 3
    assert "more" not in list_problems([], wrong[:3])


def test_a_red_gate_lists_the_worst_tensor_first(broken):
    def scale_two(copy):
        for name, factor in ("q", 1.1), ("v", 1.5):
            copy.weight(f"layers.1.self_attn.{name}_proj.weight").scale(factor)

    folder, checkpoint = broken(scale_two)
    gate = weights_gate(Bundle.open(folder), checkpoint)
    assert [name.split(".")[-2] for name in gate.tensors] == ["v_proj", "q_proj"]
    assert gate.reason.index("v_proj") < gate.reason.index("q_proj")
    assert "tensors" not in gate.json()
