"""Distances against independent formulas, and at the corners where formulas break."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.special import rel_entr, softmax

from workbench.check import compare
from workbench.check.trace import LayerTrace, Trace

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
    assert nats >= 0


def test_the_kl_of_almost_equal_distributions_is_not_below_0():
    rng = np.random.default_rng(0)
    logits = 10 * np.float32(rng.standard_normal((256, 9)))
    nudged = logits + np.float32(1e-7)
    nats = compare.kl(logits, nudged)
    assert (nats >= 0).all() and nats.max() < 1e-12
    assert np.isnan(compare.kl(np.float32([[1, np.nan]]), np.float32([[1, 2]]))).all()


def test_updates_of_other_experts_are_not_compared():
    """Position 0: the budget picks another expert; without its own choice, a close one."""

    def routed(expert=None, margin=None):
        """A layer that adds ones."""
        layer = LayerTrace(np.zeros((3, 8)), np.ones((3, 8)))
        if expert is not None:
            layer.expert = np.float32([[expert], [1], [1]])
        return Trace([replace(layer, margin=margin)], T=np.ones(3, int))

    def ties(*traces):
        rows = compare.errors(*traces[:2], ["update"])
        return compare.with_ties(rows, *traces)["routing_tie"]

    reference = routed(0, np.float32([[1], [0.01], [1]]))
    assert not ties(reference, routed(0), reference).any()
    tied = ties(reference, routed(0), routed(1))
    assert tied.tolist() == [True, False, False]
    assert ties(reference, routed()).tolist() == [False, True, False]
    rows = compare.errors(reference, routed(), ["update"])
    rows = compare.with_ties(rows, reference, routed())
    assert len(compare.judged_rows(rows.assign(mode="isolated"))) == 2
