"""Recurrent layers over x [s, b, I]: one Python step per time step, states in float32.

Direction `reverse` reads x from its end and gives the sequence in the order it was
computed; only the backward half of `bidirectional` is put back in the order of x.

Every function without an underscore is a rule, see `registry`.
"""

import math

import torch

from miltorch.ops.elementwise import TABLE as _RULES

NO_BIAS = torch.zeros(())  # for all gates
NO_BIASES = torch.zeros(3)  # for each of three gates

_OTHERS = {"linear": _RULES["identity"], "hard_sigmoid": _RULES["sigmoid_hard"]}
_ACTIVATION = _RULES | _OTHERS


def _scan(step, inputs, states, direction: str, output_sequence: bool):
    """Runs `states = step(input, *states)` along time. Returns the first state of every time
    step, or of the last alone without `output_sequence`, stacked; then the final states."""
    sequence = []
    if direction == "reverse":
        inputs = inputs.flip(0)
    for row in inputs:
        states = step(row, *states)
        sequence.append(states[0])
    if not output_sequence:
        sequence = sequence[-1:]
    return torch.stack(sequence), *states


def rnn(
    x,
    initial_h,
    weight_ih,
    weight_hh,
    bias=NO_BIAS,
    *,
    direction="forward",
    output_sequence=False,
    activation="tanh",
):
    act = _ACTIVATION[activation]

    def step(row, h):
        return (act(row + h @ weight_hh.T),)

    inputs = x @ weight_ih.T + bias
    return _scan(step, inputs, (initial_h,), direction, output_sequence)


def gru(
    x,
    initial_h,
    weight_ih,
    weight_hh,
    bias=NO_BIASES,
    input_bias=NO_BIAS,
    *,
    direction="forward",
    output_sequence=False,
    recurrent_activation="sigmoid",
    activation="tanh",
    reset_after=False,
):
    """Gates in MIL's order: reset, new, update."""
    gate = _ACTIVATION[recurrent_activation]
    act = _ACTIVATION[activation]
    inputs = x @ weight_ih.T + input_bias
    (w_r, w_o, w_z), (b_r, b_o, b_z) = weight_hh.chunk(3), bias.chunk(3)

    def step(row, h):
        r, o, z = row.chunk(3, -1)
        r = gate(r + h @ w_r.T + b_r)
        z = gate(z + h @ w_z.T + b_z)
        if reset_after:
            o = act(o + r * (h @ w_o.T + b_o))
        else:
            o = act(o + (r * h) @ w_o.T + b_o)
        return ((1 - z) * o + z * h,)

    return _scan(step, inputs, (initial_h,), direction, output_sequence)


def lstm(
    x,
    initial_h,
    initial_c,
    weight_ih,
    weight_hh,
    bias=NO_BIAS,
    peephole=NO_BIASES,
    weight_ih_back=None,
    weight_hh_back=None,
    bias_back=NO_BIAS,
    peephole_back=NO_BIASES,
    *,
    direction="forward",
    output_sequence=False,
    recurrent_activation="sigmoid",
    cell_activation="tanh",
    activation="tanh",
    clip=math.inf,
):
    names = recurrent_activation, cell_activation, activation
    gate, cell, act = (_ACTIVATION[name] for name in names)

    def layer(direction, states, weight_ih, weight_hh, bias, peephole):
        """One direction; gates in MIL's order: input, forget, output, cell."""
        p_i, p_f, p_o = peephole.chunk(3)

        def step(row, h, c):
            i, f, o, z = (row + h @ weight_hh.T).chunk(4, -1)
            c = gate(f + p_f * c) * c + gate(i + p_i * c) * cell(z)
            c = c.clamp(-clip, clip)
            return gate(o + p_o * c) * act(c), c

        inputs = x @ weight_ih.T + bias
        return _scan(step, inputs, states, direction, output_sequence)

    weights = weight_ih, weight_hh, bias, peephole
    if direction != "bidirectional":
        return layer(direction, (initial_h, initial_c), *weights)
    first, second = zip(initial_h.chunk(2, -1), initial_c.chunk(2, -1))
    ahead = layer("forward", first, *weights)
    weights = weight_ih_back, weight_hh_back, bias_back, peephole_back
    sequence, *states = layer("reverse", second, *weights)
    pairs = zip(ahead, (sequence.flip(0), *states), strict=True)
    return tuple(torch.cat(pair, -1) for pair in pairs)
