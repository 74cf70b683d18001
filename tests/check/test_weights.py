"""Gate `weights` is RED on damaged or missing weights and names them. test_faults plants
every fault, and has the GREEN bundles."""

import numpy as np
import pytest
import torch

from workbench import Bundle
from workbench.check import compare
from workbench.check.weights import _is_constant, table_ratios, weights_gate


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
    found = weights_gate(Bundle.open(folder), checkpoint)
    assert found.verdict == "RED" and place in found.reason
    assert "o_proj" not in found.reason or plant is half_a_file


def test_a_tensor_is_compared_in_blocks_and_named_once(broken, monkeypatch):
    def plant(copy):
        rounded_embedding(copy)
        operands_that_do_not_fit(copy)

    folder, checkpoint = broken(plant, "int8-channel")
    monkeypatch.setattr(compare, "BLOCK", 64)
    found = weights_gate(Bundle.open(folder), checkpoint)
    assert found.reason.count("embed_tokens") == 1 and "v_proj" in found.reason


def test_an_entry_that_is_not_the_nearest_is_held_against_the_nearest():
    table = torch.tensor([-3.0, -1, 1, 3])
    used, value = torch.ones(1, 1), torch.full((1, 1), 2.9).half()
    assert 18 < table_ratios(used, value, table)[0] < 20


def test_a_plug_in_may_leave_out_zeros_or_ones():
    tensors = map(torch.tensor, ([0, 0], [1, 1], [0, 1], [2, 2]))
    assert [*map(_is_constant, tensors)] == [True, True, False, False]
