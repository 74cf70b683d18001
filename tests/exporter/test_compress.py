"""Compressed weights: the bytes are those that coremltools stores."""

from itertools import product, starmap

import numpy as np
import pytest
import tiny
import torch
from circle import wide
from conversions import export_small
from hypothesis import example, given, settings
from hypothesis import strategies as st
from refusal import refused

from miltorch.blob import NUMPY
from miltorch.coremltools_import import coremltools, kmeans1d
from workbench import exporter
from workbench.bundle import PRESETS, Options, find_preset
from workbench.bundle.presets import TABLE_BITS, Preset
from workbench.check.interface import interface_gate
from workbench.check.row_statistics import LEAST_RELATIVE_CHANGE
from workbench.check.weights import weights_gate
from workbench.exporter import tables, weights
from workbench.exporter.weights import WeightSource
from workbench.models.checkpoint import Checkpoint

INTEGERS = [preset.name for preset in PRESETS.values() if preset.is_integer]
TABLES = [preset.name for preset in PRESETS.values() if preset.is_table]
SIZE = {"num_hidden_layers": 1, "vocab_size": 320}


def test_a_width_that_blocks_do_not_divide_is_refused_by_name(exports, tmp_path):
    checkpoint = exports.checkpoint("llama", intermediate_size=80, **SIZE)
    with refused("down_proj.weight.*80 inputs.*multiple of 32"):
        export_small(checkpoint, tmp_path / "b", compress="int4-block32")


def compress_by_coremltools(weight: np.ndarray, preset: str) -> dict[str, np.ndarray]:
    """The arrays that coremltools itself stores for a weight [outputs, inputs, 1, 1]."""
    coremltools()
    from coremltools.optimize.coreml._quantization_passes import (
        linear_quantize_weights,
        palettize_weights,
    )

    stored_as = find_preset(preset)
    if stored_as.is_table:
        arguments = "KMEANS", stored_as.bits, [stored_as.group, 0, 0, 0]
        stored = palettize_weights.blockwise_compress(weight, *arguments)
        return {"indices": stored.indices, "lut": stored.lut}
    # outputs, inputs, height and width that share a scale; 0: all of them
    shares_scale = {
        "per_tensor": [0, 0, 0, 0],
        "per_channel": [1, 0, 0, 0],
        "per_block": [1, stored_as.block, 0, 0],
    }[stored_as.granularity]
    arguments = stored_as.bits, "LINEAR_SYMMETRIC", True, shares_scale
    with np.errstate(all="ignore"):
        stored = linear_quantize_weights.blockwise_compress(weight, *arguments)
    return {"data": stored.data, "scale": stored.scale}


def draw_weight(kind: str, shape: tuple[int, int], seed: int) -> np.ndarray:
    """A random weight [outputs, inputs] float16 of one of `KINDS`."""
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal(shape)
    if kind == "zero rows":
        weight[:: 1 + seed % 3] = 0
    elif kind == "any bits":  # every finite fp16 that an integer scale can hold
        bits = rng.integers(0, 1 << 16, shape, dtype=np.uint16)
        weight = bits.view(np.float16).astype(np.float64)
        weight[~(np.abs(weight) <= 32752)] = 0
    elif kind == "subnormal":
        weight *= 3e-7
    elif kind == "wide":
        weight *= 2.0 ** rng.integers(-20, 10, shape)
    elif kind == "few values":
        weight = np.round(weight)
    return weight.astype(np.float16)


KINDS = ["normal", "zero rows", "any bits", "subnormal", "wide", "few values"]


def assert_stored_as_by_coremltools(weight: np.ndarray, preset: str) -> None:
    part = WeightSource("w", "w", weight.shape, preset=find_preset(preset))
    arrays = weights.encode_weight(part, torch.from_numpy(weight.reshape(-1).copy()))
    for role, expected in compress_by_coremltools(weight, preset).items():
        expected = expected.astype(arrays[role].dtype)
        assert arrays[role].tobytes() == expected.tobytes(), role


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("preset", INTEGERS)
@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    rows=st.integers(2, 120),
    blocks=st.integers(1, 5),
    seed=st.integers(0, 1 << 30),
)
@example(kind="normal", rows=400, blocks=16, seed=1)
@example(kind="any bits", rows=130, blocks=9, seed=2)
@example(kind="few values", rows=200, blocks=4, seed=3)
def test_our_integers_are_coremltools_bit_for_bit(preset, kind, rows, blocks, seed):
    inputs = blocks * (find_preset(preset).block or 32)
    weight = draw_weight(kind, (rows, inputs), seed)[:, :, None, None]
    assert_stored_as_by_coremltools(weight, preset)


def test_integers_of_another_block_are_coremltools_bit_for_bit(monkeypatch):
    """A page of docs promises that such a preset needs no further code, here or in a test."""
    preset = Preset("int4-block64", "integer", 4, "per_block", 64)
    monkeypatch.setitem(PRESETS, preset.name, preset)
    weight = draw_weight("normal", (20, 3 * preset.block), 0)[:, :, None, None]
    assert_stored_as_by_coremltools(weight, preset.name)


@settings(max_examples=25, deadline=None)
@given(bits=st.integers(1, 8), count=st.integers(1, 40))
def test_values_of_few_bits_are_packed_as_coremltools_packs_them(bits, count):
    coremltools()
    from coremltools.optimize._utils import pack_elements_into_bits

    values = np.random.default_rng(count).integers(0, 1 << bits, count, np.uint8)
    expected = pack_elements_into_bits(values, bits)
    assert weights.pack_bits(values, bits).tobytes() == expected.tobytes()


@pytest.mark.parametrize("preset", ["lut4", "lut6"])
@pytest.mark.parametrize("kind", KINDS)
def test_our_tables_of_large_tensors_are_coremltools_bit_for_bit(preset, kind):
    """From 10,000 values on coremltools takes its exact solver by itself."""
    weight = draw_weight(kind, (130, 96), 2)[:, :, None, None]
    assert_stored_as_by_coremltools(weight, preset)


@pytest.mark.parametrize("preset", [*TABLES, "lut4-g1", "lut6-g32"])
def test_tables_of_groups_are_stored_as_coremltools_stores_them(preset):
    """The groups of the matrix have no more different values than a table has entries, so that every
    solver finds the same tables, and enough weights for coremltools' exact solver."""
    coremltools()
    preset_of_groups = find_preset(preset)
    shape = 4 * preset_of_groups.group, 10_240 // preset_of_groups.group
    part = WeightSource("w", "w", shape, preset=preset_of_groups)
    random = np.float16(np.random.default_rng(3).standard_normal(shape))
    rounded = weights.encode_weight(part, torch.from_numpy(random.reshape(-1).copy()))
    luts = rounded["lut"]
    indices = rounded["indices"].reshape(len(luts), -1)
    values = np.take_along_axis(luts, indices.astype(int), 1).reshape(*shape, 1, 1)
    expected = compress_by_coremltools(values, preset)
    arrays = weights.encode_weight(part, torch.from_numpy(values.reshape(-1).copy()))
    for role, array in expected.items():
        assert arrays[role].tobytes() == array.astype(arrays[role].dtype).tobytes()
    assert expected["lut"].shape == (*luts.shape[:1], 1, 1, 1, luts.shape[1], 1)


@pytest.mark.parametrize(
    ("preset", "kind", "weighted"),
    [
        *product(["lut4-g8"], KINDS, [False, True]),
        # tables of 64 entries take most of the time
        ("lut6-g16", KINDS[0], True),
        *starmap(wide, product(["lut6-g16"], KINDS[1:], [True])),
        *starmap(wide, product(["lut6-g16"], KINDS, [False])),
    ],
)
def test_tables_of_groups_are_near_the_exact_solver(preset, kind, weighted):
    preset = find_preset(preset)
    count = 1 << preset.bits
    values = draw_weight(kind, (2 * preset.group, 900), 5)
    importance = np.random.default_rng(1).lognormal(0, 1.5, 900) if weighted else None
    luts = tables.group_tables(values, preset.group, count, importance)
    weight = np.tile(np.ones(900) if importance is None else importance, preset.group)
    for table, group in zip(luts, values.reshape(2, -1).astype(np.float64)):
        assert np.isfinite(table).all() and (np.diff(table) >= 0).all()
        clusters = kmeans1d().cluster(group, count, weights=weight)
        best = np.take(clusters.centroids, clusters.clusters)
        chosen = np.float64(table)[np.abs(group[:, None] - table).argmin(1)]
        error, least = (weight @ (group - near) ** 2 for near in (chosen, best))
        # rounding the entries to fp16 adds a squared unit for each value
        rounding = weight @ (np.spacing(np.abs(np.float16(chosen))).astype(float) ** 2)
        assert error <= 1.002 * least + rounding


def test_groups_are_halved_until_they_divide_the_rows(exports, tmp_path):
    checkpoint = exports.checkpoint("llama", intermediate_size=88, **SIZE)
    manifest = export_small(checkpoint, tmp_path / "b", compress="lut6-g16").manifest
    mlp = "model.layers.0.mlp"
    gates = {f"{mlp}.gate_proj.weight": "lut6-g8", f"{mlp}.up_proj.weight": "lut6-g8"}
    assert manifest.formats == gates
    assert manifest.preset_of(f"{mlp}.up_proj.weight").group == 8
    assert manifest.preset_of(f"{mlp}.down_proj.weight").group == 16


@pytest.mark.parametrize("name", ["lut4", "lut6"])
def test_one_table_for_a_whole_tensor_is_read_and_no_longer_exported(
    exports, tmp_path, name
):
    checkpoint = exports.checkpoint("llama", **SIZE)
    with refused(f"{name}.*{name}-g"):
        export_small(checkpoint, tmp_path / "b", compress=name)
    source = Checkpoint(checkpoint)
    bundle = exporter._export(
        source, Options(max_seq_len=16, compress=name), tmp_path / "b"
    )
    gates = weights_gate(bundle, source), interface_gate(bundle, source)
    assert {gate.verdict for gate in gates} == {"GREEN"}
    assert "formats" not in (bundle.root / "bundle.json").read_text()


@pytest.mark.parametrize("name", ["lut4-g3", "lut5-g8", "lut4-g0", "lut4-g256", "lut"])
def test_other_names_of_presets_are_refused(name):
    with pytest.raises(ValueError, match="power of two"):
        find_preset(name)


def test_bits_of_tables_have_what_an_export_and_its_gates_read():
    """A page of docs lists these places for whoever adds bits."""
    for bits in TABLE_BITS:
        assert f"UINT{bits}" in NUMPY  # a palette of Core ML
        assert tables.CELLS[1 << bits] >= 1 << bits
        assert LEAST_RELATIVE_CHANGE[bits] > 0
        assert find_preset(f"lut{bits}-g32").bits == bits
        with pytest.raises(ValueError, match=f"lut{bits}-gN"):
            find_preset("lut9-g8")


def test_only_compressed_matrices_are_held_to_the_range_of_a_scale(tmp_path):
    """A norm or bias of 40,000 fits fp16, and int8 does not touch it."""
    path = tiny.random_checkpoint(tmp_path / "c", "llama", num_hidden_layers=1)
    with tiny.edited_weights(path) as tensors:
        tensors["model.norm.weight"][0] = 40_000
    assert export_small(path, tmp_path / "b", compress="int8-tensor").manifest.shards
