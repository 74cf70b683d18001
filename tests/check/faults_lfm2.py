"""Faults of short convolutions and of the tail that their layers keep: see `faults`."""

from functools import partial

import numpy as np
import torch
from faults import around, changed, constant, fault, host
from faults_zaya import forget

fault = partial(fault, bundle="lfm2")
CONVOLUTIONS = 0, 2  # layers


@fault("program")
def tail_of_a_convolution_not_carried(decoder):
    forget(decoder, "conv_state", CONVOLUTIONS)


@fault("program")
def tail_ends_one_column_early(decoder):
    host(
        decoder,
        lambda made, *_: made.update(tail_select=np.roll(made["tail_select"], -1, 2)),
    )


@fault("program")
def dummy_columns_enter_the_tail(decoder):
    def last(made, offsets, counts, T):
        every = np.eye(T)[-made["tail_select"].shape[1] :]
        made["tail_select"][:, -len(every) :] = every

    host(decoder, last)


@fault("program")
def old_columns_of_a_tail_stay_where_they_are(decoder):
    def still(predict, inputs, state):
        keep = inputs["tail_keep"]
        kept = np.broadcast_to(np.eye(keep.shape[1], dtype=np.float32), keep.shape)
        return predict(inputs | {"tail_keep": kept}, state)

    for layer in CONVOLUTIONS:
        around(decoder.layers[layer], still)


@fault("program")
def what_enters_the_convolution_and_what_gates_it_exchanged(decoder):
    def exchange(w):
        before, behind, x = w.chunk(3)
        return torch.cat([behind, before, x])

    constant(decoder, 2, "conv.in_proj.weight", exchange)


changed(
    "taps_of_a_short_convolution_in_reverse",
    0,
    "conv.conv.weight",
    lambda w: w.flip(-1),
    "lfm2",
)
