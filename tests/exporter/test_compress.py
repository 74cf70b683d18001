"""Compressed weights: the bytes are those that coremltools stores."""

import numpy as np
import pytest
import tiny
import torch
from conversions import small
from hypothesis import example, given, settings
from hypothesis import strategies as st
from refusal import refused

from workbench import bundle
from workbench.exporter import weights
from workbench.exporter.weights import WeightSource

# bits per weight
PRESETS = {"int8-tensor": 8, "int8-channel": 8, "int4-block32": 4, "lut4": 4, "lut6": 6}
SIZE = {"num_hidden_layers": 1, "vocab_size": 320}


def test_a_width_that_blocks_do_not_divide_is_refused_by_name(exports, tmp_path):
    checkpoint = exports.checkpoint("llama", intermediate_size=80, **SIZE)
    with refused("down_proj.weight.*80 inputs.*multiple of 32"):
        small(checkpoint, tmp_path / "b", compress="int4-block32")


def theirs(weight: np.ndarray, preset: str) -> dict[str, np.ndarray]:
    """What coremltools itself makes of a weight [outputs, inputs, 1, 1]."""
    from coremltools.optimize.coreml._quantization_passes import (
        linear_quantize_weights,
        palettize_weights,
    )

    if preset.startswith("lut"):
        arguments = "KMEANS", int(preset[3:]), [0] * 4
        stored = palettize_weights.blockwise_compress(weight, *arguments)
        return {"indices": stored.indices, "lut": stored.lut}
    blocks = {"int8-tensor": [0] * 4, "int8-channel": [1, 0, 0, 0]}
    arguments = (
        PRESETS[preset],
        "LINEAR_SYMMETRIC",
        True,
        blocks.get(preset, [1, 32, 0, 0]),
    )
    with np.errstate(all="ignore"):
        stored = linear_quantize_weights.blockwise_compress(weight, *arguments)
    return {"data": stored.data, "scale": stored.scale}


def draw(kind: str, shape: tuple[int, int], seed: int) -> np.ndarray:
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


def check(weight: np.ndarray, preset: str) -> None:
    part = WeightSource("w", "w", weight.shape, preset=bundle.PRESETS[preset])
    arrays = weights.stored(part, torch.from_numpy(weight.reshape(-1).copy()))
    for role, expected in theirs(weight, preset).items():
        expected = expected.astype(arrays[role].dtype)
        assert arrays[role].tobytes() == expected.tobytes(), role


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("preset", [name for name in PRESETS if name.startswith("int")])
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
    check(draw(kind, (rows, 32 * blocks), seed)[:, :, None, None], preset)


@settings(max_examples=25, deadline=None)
@given(bits=st.integers(1, 8), count=st.integers(1, 40))
def test_values_of_few_bits_are_packed_as_coremltools_packs_them(bits, count):
    from coremltools.optimize._utils import pack_elements_into_bits

    values = np.random.default_rng(count).integers(0, 1 << bits, count, np.uint8)
    expected = pack_elements_into_bits(values, bits)
    assert weights.packed(values, bits).tobytes() == expected.tobytes()


@pytest.mark.parametrize("preset", ["lut4", "lut6"])
@pytest.mark.parametrize("kind", KINDS)
def test_our_tables_of_large_tensors_are_coremltools_bit_for_bit(preset, kind):
    """From 10,000 values on coremltools takes its exact solver by itself."""
    check(draw(kind, (130, 96), 2)[:, :, None, None], preset)


def test_only_compressed_matrices_are_held_to_the_range_of_a_scale(tmp_path):
    """A norm or bias of 40,000 fits fp16, and int8 does not touch it."""
    path = tiny.random(tmp_path / "c", "llama", num_hidden_layers=1)
    with tiny.edited_weights(path) as tensors:
        tensors["model.norm.weight"][0] = 40_000
    assert small(path, tmp_path / "b", compress="int8-tensor").manifest.shards
