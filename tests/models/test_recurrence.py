"""The functions of a recurrent layer keep their precision in fp16."""

import pytest
import torch

from workbench.models.recurrence import expm1, softplus


def test_a_slow_decay_survives_fp16():
    """Of half-life 4300 tokens: e^g is 1 in fp16, so a state that is multiplied by it never
    decays."""
    g = torch.tensor(-(0.5**12.1))
    state = torch.tensor(1.0, dtype=torch.float16)
    step = (state * expm1(g.half())).item()
    assert g.exp().half() == 1
    assert step == pytest.approx(torch.expm1(g).item(), rel=2e-3)


def test_softplus_stays_relative_in_fp16():
    """Where the logarithm of 1 + e^x is 0."""
    x = torch.tensor([-9.5, -8.0, -6.0, -4.0], dtype=torch.float16)
    actual, exact = softplus(x).double(), torch.nn.functional.softplus(x.double())
    assert torch.log(1 + torch.exp(x))[0] == 0
    torch.testing.assert_close(actual, exact, atol=0, rtol=4e-3)
