"""Distances against independent formulas, and at the corners where formulas break."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.special import rel_entr, softmax

from workbench.check import compare

vectors = hnp.arrays(np.float32, 9, elements=st.floats(-100, 100, width=32))


@given(vectors, vectors)
def test_cosine_is_symmetric_and_blind_to_scale(a, b):
    one = compare.cosine(a, b)
    assert np.isclose(one, compare.cosine(b, a))
    assert np.isclose(one, compare.cosine(a * 2, b * 4))
    assert -1 - 1e-9 <= one <= 1 + 1e-9


def test_corners():
    zero, one = np.zeros(4), np.ones(4)
    assert compare.cosine(zero, zero) == 1 and compare.cosine(one, zero) == 0
    assert np.isnan(compare.cosine(one, np.array([1, np.nan, 1, 1])))
    assert np.isinf(compare.similarity(one, one)["psnr_db"])
    assert compare.relative_rms(zero, zero) == 0
    assert np.isinf(compare.relative_rms(zero, one))


@given(vectors, vectors)
def test_kl_is_scipy_s(a, b):
    p, q = softmax(np.float64(a)), softmax(np.float64(b))
    (nats,) = compare.kl(a[None], b[None])
    assert np.isclose(nats, rel_entr(p, q).sum(), rtol=1e-6, atol=1e-9)


def test_updates_of_other_experts_are_not_compared():
    """Position 0: the budget picks another expert; without its own choice, a close one."""
    n = {"update.0": np.ones((3, 8)), "T": np.ones(3)}
    experts = [np.float32([[a], [1], [1]]) for a in (0, 1)]
    reference = n | {"expert.0": experts[0], "margin.0": np.float32([[1], [0.01], [1]])}
    shown = compare.compare(reference, n | {"expert.0": experts[0]}, n | reference)
    assert not shown["routing_tie"].any()
    other = n | {"expert.0": experts[1]}
    rows = compare.compare(reference, n | {"expert.0": experts[0]}, other)
    assert rows["routing_tie"].tolist() == [True, False, False]
    rows = compare.compare(reference, n)
    assert rows["routing_tie"].tolist() == [False, True, False]
    assert len(compare.compared(rows.assign(mode="isolated"))) == 2
