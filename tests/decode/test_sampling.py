import numpy as np
import pytest
import torch
import trained
from hypothesis import given, settings
from hypothesis import strategies as st
from refusal import refused

from workbench.decode import Sampling


def test_greedy_takes_the_lowest_of_equals():
    assert Sampling().pick(np.array([1.0, 3.0, 3.0]), 0) == 1


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)])
@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_logits_that_are_no_numbers_choose_no_token(sampling, broken):
    with refused("logits for position 7"):
        sampling.pick(np.array([1.0, broken, 3.0]), 7)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 99),
    temperature=st.floats(0.2, 3),
    top_k=st.integers(0, 12),
    top_p=st.floats(0.05, 1),
)
def test_draws_from_the_distribution_transformers_draws_from(
    seed, temperature, top_k, top_p
):
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = np.random.default_rng(seed).normal(1000, 2, 12).astype(np.float32)
    warped = TemperatureLogitsWarper(temperature)(None, torch.from_numpy(logits[None]))
    warped = TopKLogitsWarper(top_k)(None, warped) if top_k else warped
    chances = torch.softmax(TopPLogitsWarper(top_p)(None, warped), -1)[0].numpy()
    sampling = Sampling(temperature, top_k, top_p, seed)
    picks = [sampling.pick(logits, at) for at in range(400)]
    picks = np.bincount(picks, minlength=12)
    assert not picks[chances == 0].any()
    assert np.abs(picks / 400 - chances).max() < 0.12


@pytest.mark.slow("exports a bundle")
def test_a_sampled_sequence_depends_on_seed_and_position_alone(exports):
    """Alone, after a snapshot, and in a batch with other samplings: the same tokens."""
    decoder = trained.decoder(exports, "tiny-gemma3")
    ids, chosen = list(range(10, 30)), Sampling(2.0, top_k=50, top_p=0.95, seed=3)

    def generated(sampling, ids=ids, new=8, **more):
        return decoder.generate(ids, new, stop=(), sampling=sampling, **more)

    tokens, greedy = generated(chosen), generated(Sampling())
    assert tokens == generated(chosen) != greedy
    assert tokens != generated(Sampling(2.0, 50, 0.95, 4))
    decoder.begin()
    decoder.prefill(ids + tokens[:3])
    after = decoder.snapshot()
    assert generated(chosen, tokens[3:4], 4, after=after) == tokens[4:]
    together = trained.decoder(exports, "tiny-gemma3", trained.BATCH)
    samplings = [chosen, Sampling(), Sampling(0.5, seed=9)]
    generated_together = together.generate(
        [ids, ids, ids[:9]], 8, stop=(), sampling=samplings
    )
    assert generated_together[:2] == [tokens, greedy]


@pytest.mark.parametrize(
    "wrong", [(-1,), (float("nan"),), (1, -1), (1, 0, 0), (1, 0, 1.1)]
)
def test_impossible_values_are_refused(wrong):
    """Of temperature, top_k or top_p."""
    with refused("sampling"):
        Sampling(*wrong)
