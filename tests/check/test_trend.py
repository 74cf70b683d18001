"""Error that changes with the position of a cache row is a fault of the cache; compression errs alike everywhere."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench import Decoder
from workbench.check import fidelity
from workbench.check.validate import trend


def rows(error: np.ndarray, tensor: str = "k") -> pd.DataFrame:
    """Fidelity rows of one layer whose relative errors by position are `error`."""
    return pd.DataFrame(
        {
            "mode": "chained",
            "tensor": tensor,
            "T": 1,
            "layer": 0,
            "position": np.arange(len(error)),
            "cosine": 1 - error**2 / 2,
        }
    )


@given(seed=st.integers(0, 10_000), level=st.floats(1e-4, 0.1))
def test_noise_of_any_size_is_flat(seed, level):
    noise = np.exp(0.1 * np.random.default_rng(seed).standard_normal(40))
    assert trend(rows(level * noise)).verdict == "GREEN"


@given(seed=st.integers(0, 10_000), factor=st.floats(3, 100), rising=st.booleans())
def test_errors_that_rise_or_fall_along_the_cache_are_a_fault(seed, factor, rising):
    noise = np.exp(0.1 * np.random.default_rng(seed).standard_normal(40))
    ramp = factor ** np.linspace(0, 1, 40)
    gate = trend(rows(1e-3 * noise * (ramp if rising else ramp[::-1])))
    assert gate.verdict == "RED"
    assert (gate.value > 0) == rising


@given(seed=st.integers(0, 10_000), factor=st.floats(2.5, 3.5))
def test_tokens_that_become_harder_are_no_fault(seed, factor):
    rng = np.random.default_rng(seed)
    noise, ramp = np.exp(0.1 * rng.standard_normal((2, 40))), factor ** np.linspace(0, 1, 40)
    both = [rows(1e-3 * ramp * noise[0]), rows(3e-4 * ramp * noise[1], "hidden")]
    assert trend(pd.concat(both)).verdict == "GREEN"
    assert trend(both[0]).verdict == "RED"  # the same rows, but nothing that explains them


def test_a_steady_but_small_rise_is_no_fault():
    assert trend(rows(1e-3 * 1.2 ** np.linspace(0, 1, 40))).verdict == "GREEN"


def test_few_positions_say_nothing():
    assert trend(rows(np.full(8, 1e-3))).verdict == "not_run"


@pytest.mark.parametrize("compress", ["int8-tensor", "int4-block32", "lut4"])
def test_compression_is_flat(exports, tiny_llama, llama_golden, compress):
    decoder = Decoder(
        exports.bundle(tiny_llama.path, max_seq_len=32, compress=compress), "portable"
    )
    found = fidelity.compare_pass(
        fidelity.run_golden(decoder, llama_golden, 4, "chained"), llama_golden, T=4, mode="chained"
    )
    assert trend(found).verdict == "GREEN"
