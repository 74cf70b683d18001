"""Commands take a model with copied caches and second embeddings."""

import pytest
from in_process import invoke


@pytest.fixture(scope="module")
def checkpoint(exports):
    return exports.checkpoint("gemma4_text")


def test_a_plan_counts_both_tables_and_every_copy(exports, checkpoint):
    options = "--max-seq-len", 32, "--layers-per-shard", 2, "--compress", "int8-channel"
    of_checkpoint = invoke("plan", checkpoint, *options)["bytes"]
    bundle = exports.bundle(checkpoint, compress="int8-channel", layers_per_shard=2)
    of_bundle = invoke("plan", bundle.root)["bytes"]
    dims = bundle.manifest.dims
    tables = 2 * dims.V * (dims.C + dims.L * dims.P)
    assert of_checkpoint["embedding"] == tables
    assert tables < of_bundle["embedding"] < tables + 1024
    # four sliding layers with heads of 16 channels, two full ones with 32
    rows = 32 * (4 * 16 + 2 * 32)
    assert of_checkpoint["kv"] == of_bundle["kv"] == 2 * 2 * rows
