"""Gate `weights`: RED by name on what is damaged or missing. test_faults has every fault and
what is GREEN."""

import shutil

import numpy as np
import pytest
from tiny import edited_weights

from workbench import Bundle
from workbench.check.weights import weights_gate
from workbench.models.checkpoint import Checkpoint


def unplaced(copy):
    copy.shard(1)["weights"].pop("model.layers.1.mlp.up_proj.weight")


def operands_that_do_not_fit(copy):
    weight = copy.weight("layers.1.self_attn.v_proj.weight")
    weight.arrays["scale"].value.type.tensorType.dimensions[0].constant.size = 7


def half_a_file(copy):
    files = copy.shard(0)["files"]
    path = next(e["path"] for e in files if e["path"].endswith("weight.bin"))
    copy.file(path, lambda data: data[: len(data) // 2])


def rounded_embedding(copy):
    copy.embedding(lambda table: table.__imul__(np.float16(1.05)))


@pytest.mark.parametrize(
    ("plant", "place"),
    [
        (unplaced, "nothing covers tensor model.layers.1.mlp.up_proj.weight"),
        (operands_that_do_not_fit, "layers.1.self_attn.v_proj.weight"),
        (half_a_file, "layers_00_00"),
        (rounded_embedding, "host: model.embed_tokens"),
    ],
)
def test_what_is_damaged_or_missing_is_red_by_name(broken, plant, place):
    folder, checkpoint = broken(plant, "int8-channel")
    found = weights_gate(Bundle.open(folder), checkpoint)
    assert found.verdict == "RED" and place in found.reason
    assert "o_proj" not in found.reason or plant is half_a_file


def test_weights_that_a_conversion_drops_or_merges_are_stored(exports, tmp_path):
    """Norms of ones and equal weights of one shard have constants of their own."""
    source = exports.checkpoint("llama", tie_word_embeddings=False, dtype="float32")
    path = shutil.copytree(source, tmp_path / "checkpoint")
    layer = "model.layers.0."
    with edited_weights(path) as tensors:
        tensors[f"{layer}input_layernorm.weight"][:] = 1
        for one, other in (
            ("self_attn.v_proj", "self_attn.k_proj"),
            ("mlp.up_proj", "mlp.gate_proj"),
        ):
            tensors[f"{layer}{one}.weight"] = tensors[f"{layer}{other}.weight"].clone()
    bundle = exports.bundle(path, compress="fp16")
    placed = {tensor for shard in bundle.manifest.shards for tensor in shard.weights}
    assert tensors.keys() - placed == {"model.embed_tokens.weight"}
    found = weights_gate(bundle, Checkpoint(path))
    assert found.verdict == "GREEN", found.reason
    assert weights_gate(bundle, Checkpoint(source)).verdict == "RED"
