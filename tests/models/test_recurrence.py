"""The functions of a recurrent layer keep their precision in fp16."""

import pytest
import torch

from workbench.models.recurrence import expm1, softplus


def test_a_slow_decay_survives_fp16():
    """The half-life is 4300 tokens. e^g rounds to 1 in fp16, so that a state that is multiplied by
    e^g never decays; e^g − 1 keeps its precision."""
    g = torch.tensor(-(0.5**12.1))
    state = torch.tensor(1.0, dtype=torch.float16)
    step = (state * expm1(g.half())).item()
    assert g.exp().half() == 1
    assert step == pytest.approx(torch.expm1(g).item(), rel=2e-3)


def test_softplus_stays_relative_in_fp16():
    """Also where the logarithm of 1 + e^x, computed as written, is 0."""
    x = torch.tensor([-9.5, -8.0, -6.0, -4.0], dtype=torch.float16)
    actual, exact = softplus(x).double(), torch.nn.functional.softplus(x.double())
    assert torch.log(1 + torch.exp(x))[0] == 0
    torch.testing.assert_close(actual, exact, atol=0, rtol=4e-3)
