"""Recurrent layers against torch's modules of random sizes and weights."""

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from one_op import close, given, numbers, run

# steps, batch, width, hidden
SIZES = st.tuples(
    st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4)
)


def gates(weights, order):
    """Rows of torch's stacked gates in MIL's order."""
    parts = weights.detach().numpy().reshape(len(order), -1, *weights.shape[1:])
    return np.concatenate([parts[i] for i in order])


def both(first, second, order):
    return gates(first, order) + gates(second, order)


@pytest.mark.parametrize("kind, order", [("RNN", [0]), ("LSTM", [0, 1, 3, 2])])
@given(sizes=SIZES, direction=st.sampled_from(["forward", "reverse"]))
def test_recurrent_layers_against_torch(kind, order, sizes, direction):
    torch.manual_seed(0)
    steps, batch, width, hidden = sizes
    module, x = getattr(torch.nn, kind)(width, hidden), numbers(steps, batch, width)
    states = [
        numbers(1, batch, hidden, seed=i) for i in range(1, 3 if kind == "LSTM" else 2)
    ]
    given_x = (
        torch.from_numpy(x).flip(0) if direction == "reverse" else torch.from_numpy(x)
    )
    hx = tuple(map(torch.from_numpy, states))
    with torch.no_grad():
        sequence, final = module(given_x, hx if kind == "LSTM" else hx[0])
    weights = dict(
        weight_ih=gates(module.weight_ih_l0, order),
        weight_hh=gates(module.weight_hh_l0, order),
        bias=both(module.bias_ih_l0, module.bias_hh_l0, order),
    )
    initial = {f"initial_{name}": state[0] for name, state in zip("hc", states)}
    found = run(
        kind.lower(),
        out=["FLOAT32"] * (1 + len(states)),
        x=x,
        **initial,
        **weights,
        direction=direction,
        output_sequence=True,
    )
    close(found[0], sequence.numpy())
    for state, expected in zip(found[1:], final if kind == "LSTM" else [final]):
        close(state, expected[0].numpy())
    last = run(
        kind.lower(),
        out=["FLOAT32"] * (1 + len(states)),
        x=x,
        **initial,
        **weights,
        direction=direction,
    )
    close(last[0], found[0][-1:])


@given(sizes=SIZES)
def test_gru_resets_after_the_product_as_torch_does(sizes):
    torch.manual_seed(0)
    steps, batch, width, hidden = sizes
    module, x, h = (
        torch.nn.GRU(width, hidden),
        numbers(steps, batch, width),
        numbers(1, batch, hidden, seed=1),
    )
    order = [0, 2, 1]  # torch: reset, update, new
    with torch.no_grad():
        sequence, final = module(torch.from_numpy(x), torch.from_numpy(h))
    arguments = dict(
        x=x,
        initial_h=h[0],
        weight_ih=gates(module.weight_ih_l0, order),
        weight_hh=gates(module.weight_hh_l0, order),
        input_bias=gates(module.bias_ih_l0, order),
        bias=gates(module.bias_hh_l0, order),
    )
    found = run(
        "gru", out=["FLOAT32"] * 2, output_sequence=True, reset_after=True, **arguments
    )
    close(found[0], sequence.numpy())
    close(found[1], final[0].numpy())
    before = run("gru", out=["FLOAT32"] * 2, output_sequence=True, **arguments)
    assert not np.allclose(before[0], found[0])


@given(sizes=SIZES)
def test_bidirectional_lstm_against_torch(sizes):
    torch.manual_seed(0)
    steps, batch, width, hidden = sizes
    module, x = (
        torch.nn.LSTM(width, hidden, bidirectional=True),
        numbers(steps, batch, width),
    )
    h, c, order = (
        numbers(2, batch, hidden, seed=1),
        numbers(2, batch, hidden, seed=2),
        [0, 1, 3, 2],
    )
    with torch.no_grad():
        sequence, (final_h, final_c) = module(
            *map(torch.from_numpy, (x,)), tuple(map(torch.from_numpy, (h, c)))
        )
    side = lambda v: np.concatenate(list(v), -1)  # noqa: E731
    weights = {}
    for end, back in (("", ""), ("_reverse", "_back")):
        named = {
            n: getattr(module, f"{n}_l0{end}")
            for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        }
        weights |= {
            f"weight_ih{back}": gates(named["weight_ih"], order),
            f"weight_hh{back}": gates(named["weight_hh"], order),
            f"bias{back}": both(named["bias_ih"], named["bias_hh"], order),
        }
    found = run(
        "lstm",
        out=["FLOAT32"] * 3,
        x=x,
        initial_h=side(h),
        initial_c=side(c),
        direction="bidirectional",
        output_sequence=True,
        **weights,
    )
    for value, expected in zip(
        found, (sequence.numpy(), side(final_h.numpy()), side(final_c.numpy()))
    ):
        close(value, expected)
