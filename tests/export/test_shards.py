"""How a model is cut into shards and where each logical state lives, before anything is
converted."""

import numpy as np
import pytest
import tiny
import transformers

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


def test_the_memory_of_layers_without_a_cache_is_predicted(exports):
    path, options = exports.checkpoint("lfm2"), {"max_seq_len": 32, "batch": 3}
    predicted = memory.budget(Checkpoint(path), Options(**options))
    measured = memory.budget(exports.bundle(path, **options))
    assert predicted.kv == measured.kv == 3 * 2 * 32 * 32 * 2
    assert predicted.side_states == measured.side_states == 3 * 2 * 2 * 64 * 2


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
