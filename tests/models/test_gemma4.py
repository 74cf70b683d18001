"""Gemma 4: which layer's K and V a layer reads, and the configurations that no bundle can have."""

import shutil

import pytest
import tiny
from in_process import cli
from refusal import refused
from transformers import AutoConfig

from workbench.models import gemma4

REFUSED_CONFIGURATIONS = [  # changed fields, words of the message
    ({"enable_moe_block": True}, "enable_moe_block = true"),
    ({"enable_moe_block": True, "num_experts": 4}, "enable_moe_block = true"),
    ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = all"),
    ({"vocab_size_per_layer_input": 90}, "vocab_size_per_layer_input = 90"),
    ({"num_kv_shared_layers": 3}, "num_kv_shared_layers = 3"),
]


def make_config(**fields):
    return AutoConfig.for_model("gemma4_text", **(tiny.DIMS["gemma4_text"] | fields))


def test_the_last_layers_copy_the_rows_of_the_last_owner_of_their_type():
    plan = gemma4.plan(make_config())
    assert [layer.source for layer in plan.layers] == [None, None, None, None, 2, 3]
    assert [layer.heads(plan.dims) for layer in plan.layers] == [
        (1, 16),
        (1, 16),
        (1, 16),
        (1, 32),
        (1, 16),
        (1, 32),
    ]


@pytest.mark.parametrize("fields, words", REFUSED_CONFIGURATIONS)
def test_refuses_by_name(fields, words):
    with refused(words):
        gemma4.plan(make_config(**fields))


@pytest.mark.parametrize("fields, words", REFUSED_CONFIGURATIONS)
def test_export_and_plan_end_with_exit_code_2_and_write_nothing(
    exports, tmp_path, fields, words
):
    path = shutil.copytree(exports.checkpoint("gemma4_text"), tmp_path / "checkpoint")
    tiny.edit_json(path / "config.json", *fields.items())
    for command in (("export", path, tmp_path / "b"), ("plan", path)):
        result = cli(*command)
        assert result.exit_code == 2 and words in result.stderr, result.output
    assert not (tmp_path / "b").exists()
