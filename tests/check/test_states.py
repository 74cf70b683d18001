"""The gates on states: which numbers of tokens their calls have, and caches that few calls fill."""

import pytest

from workbench.bundle import Options
from workbench.check.states import callable_ts, state_gates


def test_calls_are_short_as_long_as_they_may_be_and_of_every_function():
    assert callable_ts(Options(tokens="1-16")) == [1, 2, 3, 4, 15, 16]
    assert callable_ts(Options(tokens="1,8,64")) == [1, 2, 3, 4, 8, 63, 64]


@pytest.mark.parametrize("S, tokens", [(8, "4"), (4, "4"), (1, "1")])
def test_states_are_sound_where_only_a_few_whole_calls_fit(exports, S, tokens):
    options = {"max_seq_len": S, "tokens": tokens, "kv_write": "slice"}
    checkpoint = exports.checkpoint("llama", num_hidden_layers=1)
    results = state_gates(exports.decoder(checkpoint, **options))
    assert [gate.reason for gate in results if gate.verdict != "GREEN"] == []
