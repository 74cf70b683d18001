"""Gate `weights`: GREEN on what the export stores, RED on weights changed on disk: every family,
preset and fault, but not each with each, which `make prove` asks."""

import shutil

import numpy as np
import pytest
import torch
from copies import Copy
from safetensors.torch import load_file, save_file

from workbench import Bundle
from workbench.bundle import PRESETS
from workbench.check import weights
from workbench.check.weights import weights_gate
from workbench.models.checkpoint import Checkpoint

SIZE = {"tie_word_embeddings": False, "dtype": "float32"}
CLEAN = {
    "llama": ({}, {}),
    "qwen2": ({}, {"layers_per_shard": 2}),
    "qwen3": ({}, {"kv_write": "slice", "layout": "bc1t"}),
    "gemma3_text": ({}, {"sliding": "ring", "layers_per_shard": 2}),
    "zaya": ({"num_experts": 12}, {"layers_per_shard": 2}),
    "zaya routed": ({}, {"moe": "routed"}),
}


def norm_channel(copy: Copy) -> None:
    weight = copy.weight("layers.0.input_layernorm.weight")
    values = weight.read()
    values[:, 3] *= 1.02
    weight.write(values)


def one_sign(copy: Copy) -> None:
    weight = copy.weight("layers.0.mlp.up_proj.weight")
    values = weight.read()
    values[np.unravel_index(np.abs(values).argmax(), values.shape)] *= -1
    weight.write(values)


def head_rows(copy: Copy) -> None:
    weight = copy.weight("lm_head.weight")
    for array in weight.arrays.values():
        values = array.read()
        if len(values) == 97:  # codes, and scales of rows
            values[[5, 40]] = values[[40, 5]]
            array.write(values)


FAULTS = {
    "v x0.9": lambda c: c.weight("layers.1.self_attn.v_proj.weight").scale(0.9),
    "k x1.2": lambda c: c.weight("layers.0.self_attn.k_proj.weight").scale(1.2),
    "x1.02": lambda c: c.weight("layers.0.mlp.down_proj.weight").scale(1.02),
    "channel x1.2": lambda c: c.weight("layers.1.self_attn.o_proj.weight").scale_row(
        7, 1.2
    ),
    "channel x1.02": lambda c: c.weight("layers.1.self_attn.o_proj.weight").scale_row(
        7, 1.02
    ),
    "codes + 1": lambda c: c.weight("layers.0.mlp.up_proj.weight").shift(
        2 if c.compress == "fp16" else 1
    ),
    "layers swapped": lambda c: c.weight("layers.0.mlp.gate_proj.weight").swap(
        c.weight("layers.1.mlp.gate_proj.weight")
    ),
    "k and v swapped": lambda c: c.weight("layers.0.self_attn.k_proj.weight").swap(
        c.weight("layers.0.self_attn.v_proj.weight")
    ),
    "norm channel x1.02": norm_channel,
    "one sign": one_sign,
    "head rows swapped": head_rows,
}


def clean(exports, family: str, compress: str):
    changed, options = CLEAN[family]
    checkpoint = exports.checkpoint(family.split()[0], **{"dtype": "float32"} | changed)
    return exports.bundle(checkpoint, compress=compress, **options), Checkpoint(
        checkpoint
    )


@pytest.fixture
def llama(exports, tmp_path):
    """(a copy of a bundle in a preset, its checkpoint)"""
    checkpoint = exports.checkpoint("llama", **SIZE)

    def copy(compress: str) -> tuple[Copy, Checkpoint]:
        bundle = exports.bundle(checkpoint, compress=compress)
        return Copy(bundle.root, tmp_path / "copy"), Checkpoint(checkpoint)

    return copy


def gate(copy: Copy, checkpoint: Checkpoint):
    return weights_gate(Bundle.open(copy.seal()), checkpoint)


@pytest.mark.matrix(1, wide=5)
@pytest.mark.parametrize(("family", "compress"), [*zip(CLEAN, PRESETS, strict=True)])
def test_what_the_export_stores_is_green(exports, family, compress):
    found = weights_gate(*clean(exports, family, compress))
    assert found.verdict == "GREEN", found.reason
    assert found.value < found.threshold


@pytest.mark.matrix(8, wide=20)
# a table for the whole tensor cannot store `channel x1.02`: every index stays the nearest
@pytest.mark.parametrize(
    ("fault", "compress"),
    [
        (fault, compress)
        for i, fault in enumerate(FAULTS)
        for j, compress in enumerate(PRESETS)
        if j in (i % 6, (i + 3) % 6)
        and not (fault == "channel x1.02" and "lut" in compress)
    ],
)
def test_a_weight_changed_on_disk_is_red(llama, fault, compress):
    copy, checkpoint = llama(compress)
    FAULTS[fault](copy)
    found = gate(copy, checkpoint)
    print(f"{fault} {compress}: {found.value:.4g} of {found.threshold}")
    assert found.verdict == "RED" and not found.value <= found.threshold


def test_a_copy_that_nothing_changed_is_green(llama):
    assert gate(*llama("lut4")).verdict == "GREEN"


def test_a_tensor_that_the_manifest_does_not_place_is_red_by_name(llama):
    copy, checkpoint = llama("int8-tensor")
    name = "model.layers.1.mlp.up_proj.weight"
    copy.shard(1)["weights"].pop(name)
    found = gate(copy, checkpoint)
    assert found.verdict == "RED"
    assert f"nothing covers tensor {name}" in found.reason


def swapped(a: int, b: int):
    def swap(table):
        table[[a, b]] = table[[b, a]]

    return swap


def damped(table):
    table[:] = table.astype(np.float32) * 1.05


@pytest.mark.parametrize(
    "change", [damped, swapped(3, 4), swapped(0, 96), swapped(50, 93)]
)
def test_another_embedding_is_red(llama, change):
    copy, checkpoint = llama("fp16")
    copy.embedding(change)
    found = gate(copy, checkpoint)
    assert found.verdict == "RED" and "host: model.embed_tokens" in found.reason


def test_an_offset_of_gemma_that_is_not_declared_is_red(exports, tmp_path):
    checkpoint = Checkpoint(exports.checkpoint("gemma3_text"))
    bundle = exports.bundle(checkpoint.path)
    copy = Copy(bundle.root, tmp_path / "copy")
    copy.shard(0)["offsets"].clear()
    assert gate(copy, checkpoint).verdict == "RED"


def test_weights_that_a_conversion_drops_or_merges_are_stored(exports, tmp_path):
    """Norms of ones and equal weights of one shard have constants of their own."""
    source = exports.checkpoint("llama", **SIZE)
    path = shutil.copytree(source, tmp_path / "checkpoint")
    tensors = load_file(path / "model.safetensors")
    layer = "model.layers.0."
    tensors[f"{layer}input_layernorm.weight"][:] = 1
    for one, other in (
        ("self_attn.v_proj", "self_attn.k_proj"),
        ("mlp.up_proj", "mlp.gate_proj"),
    ):
        tensors[f"{layer}{one}.weight"] = tensors[f"{layer}{other}.weight"].clone()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    bundle = exports.bundle(path, compress="fp16")
    placed = {tensor for shard in bundle.manifest.shards for tensor in shard.weights}
    assert tensors.keys() - placed == {"model.embed_tokens.weight"}
    found = weights_gate(bundle, Checkpoint(path))
    assert found.verdict == "GREEN", found.reason
    assert weights_gate(bundle, Checkpoint(source)).verdict == "RED"


def test_operands_that_do_not_fit_are_red_not_an_error(llama):
    copy, checkpoint = llama("int8-channel")
    scale = copy.weight("layers.1.self_attn.v_proj.weight").arrays["scale"].value
    scale.type.tensorType.dimensions[0].constant.size = 7
    found = gate(copy, checkpoint)
    assert found.verdict == "RED" and "layers.1.self_attn.v_proj.weight" in found.reason
    assert "o_proj" not in found.reason


def test_a_damaged_weight_file_is_red_not_an_error(llama):
    copy, checkpoint = llama("fp16")
    path = next(
        e["path"] for e in copy.shard(0)["files"] if e["path"].endswith("weight.bin")
    )
    copy.file(path, lambda data: data[: len(data) // 2])
    found = gate(copy, checkpoint)
    assert found.verdict == "RED" and "layers_00_00" in found.reason


def brute_force(values: np.ndarray, count: int) -> float:
    """Least squared error over every way to cut the sorted values into `count` groups."""
    points = np.sort(values.astype(np.float64))

    def best(start: int, groups: int) -> float:
        rest = points[start:]
        whole = float(((rest - rest.mean()) ** 2).sum()) if len(rest) else 0.0
        if groups == 1 or len(rest) <= 1:
            return whole
        cuts = range(start + 1, len(points))
        return min(
            [
                whole,
                *(
                    ((points[start:c] - points[start:c].mean()) ** 2).sum()
                    + best(c, groups - 1)
                    for c in cuts
                ),
            ]
        )

    return best(0, count)


@pytest.mark.matrix(1, wide=4)
@pytest.mark.parametrize("seed", range(5))
def test_the_optimum_is_that_of_every_cut(seed):
    values = np.random.default_rng(seed).standard_normal(11).astype(np.float16)
    values[3] = values[7]
    least = weights.least_squared_error(torch.from_numpy(values), 4)
    assert least == pytest.approx(brute_force(values, 4), rel=1e-9)


def test_half_of_a_unit_in_the_last_place():
    values = np.array([0, 2.0**-24, 2.0**-14, 0.7, 1, 1.5, 60000], np.float32)
    found = weights.half_ulp(torch.from_numpy(values)).numpy()
    assert np.array_equal(
        found, np.spacing(values.astype(np.float16)).astype(np.float32) / 2
    )
