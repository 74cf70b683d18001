"""How a model is cut into shards and where each logical state lives, before anything is
converted."""

import numpy as np
import pytest
import tiny
import transformers
from hypothesis import given
from hypothesis import strategies as st

from workbench.ane import memory
from workbench.bundle import Options
from workbench.export import shards
from workbench.models import family_of
from workbench.models.checkpoint import Checkpoint


def plan(family: str, **changed):
    config = transformers.AutoConfig.for_model(family, **(tiny.DIMS[family] | changed))
    return family_of(config).plan(config)


def test_a_ring_holds_the_window_and_what_a_call_may_add():
    specs = list(
        shards.specs(
            plan("gemma3_text"), Options(max_seq_len=16, sliding="ring", tokens="1-4")
        )
    )
    keys = [spec.states[f"layers.{i}.k_state"] for i, spec in enumerate(specs[:3])]
    assert [k.ring for k in keys] == [5 + 4 - 1, None, 8]
    assert [k.shape for k in keys] == [[1, 1, n, 32] for n in (8, 16, 8)]
    assert specs[0].inputs["kv_write_mask_local"] == [1, 1, 8, "T"]


def test_layers_of_two_kinds_in_one_shard_tell_their_inputs_apart():
    (spec, _) = shards.specs(
        plan("gemma3_text"), Options(max_seq_len=16, sliding="ring", layers_per_shard=3)
    )
    assert spec.inputs["attn_mask_local"] == [1, 1, "T", 8] and spec.inputs[
        "attn_mask_global"
    ] == [1, 1, "T", 16]
    assert spec.inputs["kv_write_mask_local"] == [1, 1, 8, "T"] and spec.inputs[
        "kv_write_mask"
    ] == [1, 1, 16, "T"]


def test_a_ring_is_never_longer_than_the_longest_sequence():
    (spec, *_) = shards.specs(
        plan("gemma3_text", sliding_window=15), Options(max_seq_len=16, sliding="ring")
    )
    assert spec.states["layers.0.k_state"].shape[2] == 16


def test_layers_of_convolutions_have_a_tail_and_no_cache():
    one_by_one = list(
        shards.specs(plan("lfm2", conv_L_cache=5), Options(max_seq_len=16))
    )
    convolution, attention = one_by_one[:2]
    assert convolution.inputs == {
        "x": [1, 64, "T", 1],
        "tail_select": [1, 4, "T"],
        "tail_keep": [1, 4, 4],
    }
    assert convolution.buffers == {"conv_state": [1, 4, 64]}
    assert list(attention.buffers) == ["k_state", "v_state"]
    assert not {"tail_select", "tail_keep"} & attention.inputs.keys()
    (whole, _) = shards.specs(plan("lfm2"), Options(max_seq_len=16, layers_per_shard=3))
    assert "tail_keep" not in whole.inputs  # follows from tail_select up to two


def test_the_memory_of_layers_without_a_cache_is_predicted(exports):
    path, options = exports.checkpoint("lfm2"), {"max_seq_len": 32, "batch": 3}
    predicted = memory.budget(Checkpoint(path), Options(**options))
    measured = memory.budget(exports.bundle(path, **options))
    assert predicted.kv == measured.kv == 3 * 2 * 32 * 32 * 2
    assert predicted.side_states == measured.side_states == 3 * 2 * 2 * 64 * 2


def test_layers_with_a_matrix_keep_it_beside_their_tail():
    chosen = Options(max_seq_len=16, batch=2)
    recurrent, attention = list(shards.specs(plan("qwen3_5_text"), chosen))[:2]
    assert recurrent.inputs["order"] == [2, 1, "T", 1]
    assert recurrent.buffers == {
        "conv_state": [2, 3, 192],
        "matrix_state": [2, 4, 16, 32],
    }
    assert "order" not in attention.inputs


@pytest.mark.parametrize("family", ["qwen3_5_text", "granitemoehybrid"])
def test_the_memory_of_matrix_states_is_predicted(family):
    chosen = Options(max_seq_len=16, batch=2)
    spec = next(shards.specs(plan(family), chosen))
    bytes_of_a_layer = sum(2 * np.prod(shape) for shape in spec.buffers.values())
    side = sum(
        4 * np.prod(shape)
        for i in range(3)
        for name, shape in plan(family).states(i, chosen).items()
        if name not in ("k_state", "v_state")
    )
    assert side == 2 * bytes_of_a_layer


@given(
    family=st.sampled_from(["llama", "gemma3_text", "zaya"]),
    count=st.integers(1, 3),
    batch=st.integers(1, 3),
    sliding=st.sampled_from(["mask", "ring"]),
)
def test_every_state_has_a_tensor_of_its_shape(family, count, batch, sliding):
    chosen = Options(
        max_seq_len=16, layers_per_shard=count, batch=batch, sliding=sliding
    )
    for spec in shards.specs(plan(family), chosen):
        tensors = {state.tensor: state.shape for state in spec.states.values()}
        assert tensors == spec.buffers and len(tensors) == len(spec.states)


def test_every_expert_has_a_shard_and_layers_end_at_their_router():
    specs = list(shards.specs(plan("zaya"), Options(max_seq_len=16, moe="routed")))
    kinds = ["router", *["expert"] * 4] * 3 + ["head"]
    assert [s.kind for s in specs] == kinds
    assert [(s.layers[0], s.rows[0]) for s in specs if s.kind == "expert"] == [
        (i, e) for i in range(3) for e in range(4)
    ]
    assert list(specs[0].outputs) == [
        "base",
        "expert_in",
        "router_probs",
        "router_scores",
        "router_state_out",
    ]
    assert specs[0].outputs["router_scores"] == [1, 5, "T", 1]
    assert specs[1].inputs["expert_weight"] == [1, 1, "T", 1]
