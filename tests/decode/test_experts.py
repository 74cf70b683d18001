"""The host's part of a routed mixture, with experts that are plain functions."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.bundle import Options
from workbench.bundle.names import (
    ACC,
    BASE,
    EXPERT_IN,
    EXPERT_WEIGHT,
    HIDDEN,
    ROUTER_PROBS,
    ROUTER_SCORES,
)
from workbench.decode.experts import RoutedExperts

C, E = 3, 4


class Expert:
    """Expert e multiplies by e + 1; counts its calls and their columns."""

    last_native_ms = None

    def __init__(self, shard, calls):
        self.factor, self.calls = shard.rows[0] + 1, calls

    def predict(self, io, state, hook):
        self.calls.append((self.factor - 1, io[EXPERT_IN].shape[2]))
        return {HIDDEN: io[ACC] + self.factor * io[EXPERT_IN] * io[EXPERT_WEIGHT]}


def experts(tokens: str, calls: list) -> RoutedExperts:
    shards = [
        SimpleNamespace(layers=(layer, layer + 1), rows=(e, e + 1))
        for layer in (0, 1)
        for e in range(E)
    ]
    bundle = SimpleNamespace(
        manifest=SimpleNamespace(options=Options(tokens=tokens)),
        shards=lambda kind: shards,
    )
    return RoutedExperts(
        bundle, lambda shard: Expert(shard, calls), lambda x: x[..., None]
    )


def routed(rng, B: int, T: int) -> dict:
    probabilities = rng.dirichlet(np.ones(E + 1), (B, T)).transpose(0, 2, 1)
    scores = probabilities + 0.3 * rng.standard_normal((1, E + 1, 1))
    planes = {
        BASE: rng.standard_normal((B, C, T)),
        EXPERT_IN: rng.standard_normal((B, C, T)),
        ROUTER_PROBS: probabilities,
        ROUTER_SCORES: scores,
    }
    return {name: value[..., None] for name, value in planes.items()}


@pytest.mark.parametrize("tokens", ["1-6", "6"])
@given(
    seed=st.integers(0, 999), B=st.integers(1, 3), T=st.integers(1, 6), data=st.data()
)
def test_each_valid_token_gets_its_one_expert_and_each_expert_runs_once(
    tokens, seed, B, T, data
):
    out, calls = routed(np.random.default_rng(seed), B, T), []
    counts = np.array([data.draw(st.integers(0, T)) for _ in range(B)])
    hidden = experts(tokens, calls).run(1, out, counts)
    expected, wanted = out[BASE].copy(), {}
    for b in range(B):
        for column in range(counts[b]):
            e = int(out[ROUTER_SCORES][b, :, column, 0].argmax())
            if e < E:
                expected[b, :, column] += (
                    (e + 1)
                    * out[ROUTER_PROBS][b, e, column]
                    * out[EXPERT_IN][b, :, column]
                )
                wanted.setdefault(e, set()).add(column)
    np.testing.assert_allclose(hidden, expected, atol=1e-12)
    assert sorted(calls) == sorted(
        (e, T if tokens == "6" else len(columns)) for e, columns in wanted.items()
    )


def test_an_expert_is_loaded_when_it_is_first_picked_and_once():
    loaded = []
    run = experts("1-6", [])
    run.load = lambda shard: (
        loaded.append((shard.layers[0], shard.rows[0])),
        Expert(shard, []),
    )[1]
    out = routed(np.random.default_rng(0), 1, 1)
    out[ROUTER_SCORES][:] = np.arange(E + 1)[None, :, None, None] == 2
    for _ in range(3):
        run.run(0, out, np.array([1]))
    assert loaded == [(0, 2)]
