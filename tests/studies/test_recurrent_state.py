"""Drift of a matrix by form, with its planted faults; sizes of states against their formula."""

import pytest

from workbench.studies import recurrent_state as study

HALF_LIVES, TOKENS = [32, 4096], [64, 1024]


@pytest.fixture(scope="module")
def errors():
    return study.drift(HALF_LIVES, TOKENS, 2)


def test_each_form_keeps_more_of_a_slow_matrix(errors):
    table = study.drift_table(errors)
    slow = table["4096 tokens"]
    assert slow[study.SCALED] > 3 * slow[study.ADDED] > 9 * slow[study.PAIR]
    assert {gate.verdict for gate in study.drift_gates(errors)} == {"GREEN"}


def test_a_pair_without_its_remainder_is_red(monkeypatch):
    """Planted: the remainder is dropped; S · exp in the place of S + S · expm1."""
    monkeypatch.setitem(study.FORMS, study.PAIR, study._added)
    found = study.drift_gates(study.drift(HALF_LIVES, TOKENS, 1))
    gates = {gate.name: gate.verdict for gate in found}
    assert gates["pair_keeps_the_matrix"] == gates["pair_errs_least"] == "RED"


def test_decays_by_exp_are_red(monkeypatch):
    monkeypatch.setitem(study.FORMS, study.ADDED, study._scaled)
    found = study.drift_gates(study.drift(HALF_LIVES, TOKENS, 1))
    gates = {gate.name: gate.verdict for gate in found}
    assert gates["expm1_keeps_slow_decays"] == "RED"


def test_states_of_qwen_are_those_of_its_dimensions():
    """Three of four layers keep a matrix for each head, and three inputs of a convolution; a cache
    has two rows of H_kv · D numbers a token."""
    sizes = study.crossover([512], "int8-tensor", "M4 Max")
    config = study._config("qwen3_5_text", "linear_attention", study.RECURRENT, {})
    L, row = (
        config.num_hidden_layers,
        2 * 2 * config.num_key_value_heads * config.head_dim,
    )
    heads, keys = config.linear_num_value_heads, config.linear_num_key_heads
    D_k, D_v = config.linear_key_head_dim, config.linear_value_head_dim
    tail = 2 * (config.linear_conv_kernel_dim - 1) * (2 * keys * D_k + heads * D_v)
    own, other = (
        sizes.query("model == 'Qwen 3.5' and layers == @kind")["state_bytes"].item()
        for kind in (study.RECURRENT, study.ATTENTION)
    )
    assert other == L * 512 * row
    assert own == L // 4 * 512 * row + 3 * L // 4 * (2 * heads * D_k * D_v + tail)
