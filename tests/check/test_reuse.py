"""A stored cache continues as its sequence does on every trained checkpoint, and every bug seen in
the wild, planted, turns the gate RED."""

import pytest
import trained
from faults.reuse import FAULTS_BY_SLUG
from refusal import refused

from workbench.check.reuse import ReuseCell, check_reuse, count_cells, reuse_gate
from workbench.decode import store


def pair(exports, name: str, precision: str = "exact") -> list:
    return [trained.decoder(exports, name, b, precision) for b in (1, trained.BATCH)]


@pytest.mark.slow("hands caches on at every length of a trained checkpoint")
@pytest.mark.matrix(1, wide=2)
@pytest.mark.parametrize("name", trained.NAMES)
def test_every_cell_of_a_trained_checkpoint_is_green(name, exports):
    lengths = {"tiny-gemma3": (90,), "tiny-zaya": (33,), "tiny-qwen2": (31,)}
    result = check_reuse(*pair(exports, name), lengths=lengths.get(name, (31, 64)))
    gate = reuse_gate(result)
    assert gate.verdict == "GREEN", gate.reason
    assert {(c.batch, c.cache, c.format) for c in result} == {
        (batch, *cache)
        for batch in (1, trained.BATCH)
        for cache in [("cold", "fp16")]
        + [(c, f) for c in ("warm", "hot") for f in ("fp16", "q4")]
    }
    assert all(0 <= c.logits_error < 1e-5 for c in result if c.cache == "cold")


def test_it_holds_in_fp16_arithmetic_up_to_the_last_row(exports):
    decoders = pair(exports, "tiny-llama", "declared")
    result = check_reuse(*decoders, lengths=(32, trained.S - 4))
    assert reuse_gate(result).verdict == "GREEN"


def test_a_cache_that_q4_leaves_in_fp16_is_so_in_the_reference_too(
    exports, monkeypatch
):
    decoder = trained.decoder(exports, "tiny-llama")
    monkeypatch.setattr(
        store, "is_close_enough_for_q4", lambda rows, _: rows.flat[0] > 0
    )
    gate = reuse_gate(check_reuse(decoder, lengths=(20, 33)))
    assert gate.verdict == "GREEN", gate.reason


def test_cells_that_repeat_a_reference_are_not_counted_as_compared():
    """One sequence and a batch of two, at three contexts, as in notebook 33."""
    caches = [
        ("cold", "fp16"),
        *((c, f) for c in ("warm", "hot") for f in store.FORMATS),
    ]
    cells = [
        ReuseCell(batch, *cache, context, "GREEN", 0.0)
        for batch in (1, 2)
        for cache in caches
        for context in (31, 32, 33)
    ]
    assert len(cells) == 30
    assert count_cells(cells).startswith(
        "24 cells compared, 3 of which restore nothing"
    )
    gate = reuse_gate(cells, "reuse_trained")
    assert gate.name == "reuse_trained" and "30" not in gate.reason


def test_bundles_that_do_not_belong_together_and_contexts_without_room_are_refused(
    exports,
):
    decoder = trained.decoder(exports, "tiny-llama")
    batch = trained.decoder(exports, "tiny-qwen2", trained.BATCH)
    with refused("differs only in --batch"):
        check_reuse(decoder, batch, lengths=(20,))
    with refused("one of batch 1"):
        check_reuse(
            trained.decoder(exports, "tiny-llama", trained.BATCH), lengths=(20,)
        )
    for lengths in ((20, trained.S), ()):
        with refused("2 to 124 tokens"):
            check_reuse(decoder, lengths=lengths)


@pytest.mark.slow("exports two bundles and hands caches on")
@pytest.mark.matrix(1, wide=9)
@pytest.mark.parametrize("name", FAULTS_BY_SLUG)
def test_every_fault_turns_the_gate_red(name, exports, monkeypatch):
    fault = FAULTS_BY_SLUG[name]
    decoders = pair(exports, fault.checkpoint)
    fault.plant(monkeypatch, *decoders)
    assert reuse_gate(check_reuse(*decoders, lengths=(20,))).verdict == "RED"
