"""Faults of taking tokens back: see `faults`."""

from functools import partial

import numpy as np
from faults import fault

fault = partial(fault, "undo")


@fault(bundle="undo")
def undo_that_forgets_the_tail(decoder):
    original = decoder.host.inputs
    decoder.host.inputs = lambda offsets, counts, T, *_: original(offsets, counts, T)


@fault(bundle="undo")
def undone_columns_stay_in_the_tail(decoder):
    """Read from the right place, kept from the wrong one: a later token reads them."""
    original = decoder.host.inputs

    def inputs(offsets, counts, T, *rest):
        kept = original(offsets, counts, T)["tail_keep"]
        return original(offsets, counts, T, *rest) | {"tail_keep": kept}

    decoder.host.inputs = inputs


@fault(bundle="undo")
def tail_undone_beyond_its_rows(decoder):
    deeper(decoder)


@fault(bundle="ring")
def ring_trimmed_beyond_its_depth(decoder):
    deeper(decoder)


def deeper(decoder) -> None:
    """Lets a decoder go back to any token."""
    decoder.undo.floor = lambda before, after: np.zeros_like(after)


@fault(bundle="llama")
def undo_of_one_token_too_few(decoder):
    trim = decoder.trim
    decoder.trim = lambda count, seq=0: trim(max(0, count - 1), seq)
