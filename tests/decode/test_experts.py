import pytest
import tiny


@pytest.mark.slow("exports every expert of two layers")
def test_routed_experts_give_what_dense_ones_do(exports):
    path = exports.checkpoint("zaya", num_hidden_layers=2, num_experts=2)
    how = {"batch": 2, "tokens": "1-3"}
    dense, routed = (
        exports.decoder(path, "exact", moe=kind, **how) for kind in ("dense", "routed")
    )
    ids = [tiny.prompt(90, 5), tiny.prompt(90, 4)]  # a call has a dummy column
    for decoder in (dense, routed):
        decoder.begin()
    assert tiny.relative(routed.prefill(ids), dense.prefill(ids)) < 1e-5
    nexts = [[7], [8]]
    assert tiny.relative(routed.prefill(nexts), dense.prefill(nexts)) < 1e-5
