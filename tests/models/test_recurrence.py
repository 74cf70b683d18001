"""The parts of a recurrent layer against the recurrence itself, token by token in float64."""

import numpy as np
import pytest
import torch

from workbench.models.recurrence import add_tokens, decays, expm1, softplus, unit

B, H, K, V = 2, 3, 5, 4


def one_by_one(state, q, k, v, g, counts):
    """Outputs [B, H, T, V] and the state after each sequence's first `counts` tokens."""
    state, outputs = (
        state.double().clone(),
        torch.zeros(*q.shape[:3], v.shape[3]).double(),
    )
    for b, count in enumerate(counts):
        for t in range(count):
            state[b] *= g[b, :, t].double().exp()[..., None]
            state[b] += k[b, :, t, :, None].double() * v[b, :, t, None].double()
            outputs[b, :, t] = (q[b, :, t, None].double() @ state[b])[:, 0]
    return outputs, state


def at_once(state, q, k, v, g, order):
    d = decays(g, order)
    k = k * order.clamp(0, 1)
    own = (q * k).sum(-1, keepdim=True)
    outputs = (
        d.enter * (q @ state) + ((q @ k.transpose(2, 3)) * d.between) @ v + own * v
    )
    return outputs, state + state * expm1(d.total) + (k * d.leave).transpose(2, 3) @ v


@pytest.mark.parametrize(
    "T, counts", [(1, (1, 0)), (3, (3, 2)), (4, (0, 4)), (8, (8, 5))]
)
@pytest.mark.parametrize("slowest", [1e-4, 1.0, 200.0])
def test_tokens_at_once_are_the_recurrence(T, counts, slowest):
    """Columns beyond a sequence's count are garbage; decays run from hardly any to e^-200."""
    generator = torch.Generator().manual_seed(T)
    q, k, v = (torch.randn(B, H, T, n, generator=generator) for n in (K, K, V))
    state = torch.randn(B, H, K, V, generator=generator)
    g = -slowest * torch.rand(B, H, T, 1, generator=generator)
    order = torch.tensor(
        [[t + 1 if t < count else 0 for t in range(T)] for count in counts]
    )
    order = order[:, None, :, None].float()
    q, k, v, g = (
        torch.where(order > 0, x, 30 * torch.ones_like(x)) for x in (q, k, v, g)
    )
    expected, after = one_by_one(state, q, k, v, g, counts)
    outputs, made = at_once(state, q, k, v, g, order)
    torch.testing.assert_close(made.double(), after, atol=2e-6, rtol=2e-6)
    for b, count in enumerate(counts):
        torch.testing.assert_close(
            outputs[b, :, :count].double(), expected[b, :, :count], atol=1e-5, rtol=1e-5
        )


def test_a_slow_decay_survives_fp16():
    """Of half-life 4300 tokens: e^g is 1 in fp16, so a state that is multiplied by it never
    decays."""
    g = torch.tensor(-(0.5**12.1))
    state = torch.tensor(1.0, dtype=torch.float16)
    step = (state * expm1(g.half())).item()
    assert g.exp().half() == 1
    assert step == pytest.approx(torch.expm1(g).item(), rel=2e-3)


class Matrix:
    """A cache that holds one matrix state [B, H, K, V]."""

    def __init__(self, value):
        self.value = value

    def write(self, name, value):
        self.value = value


def added(matrix, g, k, delta):
    """What the layers compute, for a call of one token."""
    cache, order = Matrix(matrix), torch.ones_like(g)
    add_tokens(matrix, k, delta, decays(g, order), cache)
    return cache.value


def scaled(matrix, g, k, delta):
    """The recurrence as it is written."""
    return matrix * torch.exp(g) + k.transpose(2, 3) @ delta


def drift(update, half_lives, tokens, dtype):
    """DeltaNet's matrices [half-lives, 1, 32, 32], float64, after `tokens` calls of one token, each
    operation rounded to `dtype`; g and the inputs are fp16 numbers."""
    generator = torch.Generator().manual_seed(0)
    g = -np.log(2) / torch.tensor(half_lives).double().reshape(-1, 1, 1, 1)
    g = g.half().to(dtype)
    k, v = (torch.randn(tokens, 1, 1, 1, 32, generator=generator) for _ in range(2))
    k = torch.nn.functional.normalize(k, dim=-1)
    matrix = torch.zeros(len(half_lives), 1, 32, 32, dtype=dtype)
    for key, value in zip(k.half().to(dtype), v.half().to(dtype), strict=True):
        delta = (value - (key @ matrix) * torch.exp(g)) * 0.1
        matrix = update(matrix, g, key, delta)
    return matrix.double()


def test_a_matrix_that_forgets_slowly_drifts_by_little_over_rounding():
    """After 1024 tokens in fp16, relative to float64. S · e^g, which hardly ever is another fp16
    number than S, drifts at least three times as far where that matters most."""
    half_lives = [32, 512, 4096]
    exact = drift(scaled, half_lives, 1024, torch.float64)

    def errors(update):
        off = drift(update, half_lives, 1024, torch.float16) - exact
        rms = [x.square().mean((1, 2, 3)).sqrt() for x in (off, exact)]
        return rms[0] / rms[1]

    written, literal = errors(added), errors(scaled)
    assert written.max() < 6 * 2.0**-11
    assert (literal / written).max() > 3


def test_functions_are_those_of_torch():
    x = torch.linspace(-20, 20, 4001)
    torch.testing.assert_close(
        softplus(x), torch.nn.functional.softplus(x), atol=0, rtol=3e-6
    )
    torch.testing.assert_close(
        expm1(-x.abs()), torch.expm1(-x.abs()), atol=0, rtol=1e-6
    )
    rows = (
        torch.randn(7, 9, generator=torch.Generator().manual_seed(0))
        * torch.logspace(-6, 4, 7)[:, None]
    )
    expected = rows / (rows.double().square().sum(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(unit(rows, 1e-6).double(), expected, atol=0, rtol=1e-5)


def test_softplus_stays_relative_in_fp16():
    """Where the logarithm of 1 + e^x is 0."""
    x = torch.tensor([-9.5, -8.0, -6.0, -4.0], dtype=torch.float16)
    made, exact = softplus(x).double(), torch.nn.functional.softplus(x.double())
    assert torch.log(1 + torch.exp(x))[0] == 0
    torch.testing.assert_close(made, exact, atol=0, rtol=4e-3)
