"""Metrics against independent formulas, and at the corners where formulas break."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.special import rel_entr, softmax

from workbench.check import gates, metrics

vectors = hnp.arrays(np.float32, 9, elements=st.floats(-100, 100, width=32))


@given(vectors, vectors)
def test_cosine_is_symmetric_and_blind_to_scale(a, b):
    one = metrics.cosine(a, b)
    assert np.isclose(one, metrics.cosine(b, a))
    assert np.isclose(one, metrics.cosine(a * 2, b * 4))
    assert -1 - 1e-9 <= one <= 1 + 1e-9


def test_corners():
    zero, one = np.zeros(4), np.ones(4)
    assert metrics.cosine(zero, zero) == 1 and metrics.cosine(one, zero) == 0
    assert np.isnan(metrics.cosine(one, np.array([1, np.nan, 1, 1])))
    assert np.isinf(metrics.psnr_db(one, one))
    assert (
        metrics.relative_rms(zero, zero) == 0 and metrics.relative_rms(zero, one) == 1
    )
    assert (
        gates.at_least("g", np.nan, 0.5, "").verdict
        == gates.at_most("g", np.nan, 0.5, "").verdict
        == "RED"
    )


@given(vectors, vectors)
def test_kl_is_scipy_s(a, b):
    expected = rel_entr(
        softmax(a.astype(np.float64)), softmax(b.astype(np.float64))
    ).sum()
    assert np.isclose(metrics.kl(a, b), expected, rtol=1e-6, atol=1e-9)


def test_psnr_by_hand():
    assert np.isclose(
        metrics.psnr_db(np.array([2.0, 0]), np.array([2.0, 0.2])),
        10 * np.log10(4 / 0.02),
    )


def test_verdicts():
    green, red, idle = (
        gates.holds("a", True, ""),
        gates.holds("b", False, ""),
        gates.not_run("c", ""),
    )
    assert (
        gates.verdict([green, idle]) == "GREEN"
        and gates.verdict([green, red]) == "RED"
        and gates.verdict([idle]) == "not_run"
    )
