"""Faults of the tables that a bundle's host reads: rotary frequencies, windows, the embedding."""

from collections.abc import Callable

import numpy as np

from faults.copies import ArrayChange, Plant
from faults.fault import Fault


def edit_frequencies(change: ArrayChange) -> Plant:
    """Changes the inverse frequencies of every rotary table."""

    def plant(copy):
        for rope in copy.manifest["rope"]:
            inv_freq = change(np.array(rope["inv_freq"]))
            rope["inv_freq"] = [float(value) for value in inv_freq]

    return plant


def round_to_bf16(inv_freq):
    bits = inv_freq.astype(np.float32).view(np.uint32)
    return (bits & 0xFFFF0000).view(np.float32)


def zero_slowest_quarter(inv_freq):
    return inv_freq * (np.arange(len(inv_freq)) < 3 * len(inv_freq) / 4)


def scale_one_frequency(inv_freq):
    return inv_freq * np.where(np.arange(len(inv_freq)) == 3, 1.01, 1)


def ignore_scaling(inv_freq):
    return 500000.0 ** (-np.arange(len(inv_freq)) / len(inv_freq))


def use_long_table(inv_freq):
    """The two tables of longrope divide by 1 + i / 8 and by 2 + i."""
    i = np.arange(12)
    return inv_freq * (1 + i / 8) / (2.0 + i)


def set_rope_scale(scale: float) -> Plant:
    """Changes the factor of cos and sin."""

    def plant(copy):
        copy.manifest["rope"][0]["scale"] = scale

    return plant


def halve_yarn_factor(copy):
    import tiny
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    dims = tiny.DIMS["ministral3"]
    rope = dims["rope_parameters"] | {"factor": 2.0}
    config = transformers.AutoConfig.for_model(
        "ministral3", **(dims | {"rope_parameters": rope})
    )
    inv_freq, _ = ROPE_INIT_FUNCTIONS["yarn"](config, None)
    edit_frequencies(lambda _: inv_freq.numpy())(copy)


def edit_windows(change: Callable[[int | None], int | None]) -> Plant:
    """Changes the window of every layer; None attends to all rows."""

    def plant(copy):
        for layer in copy.manifest["layers"]:
            layer["window"] = change(layer["window"])

    return plant


def widen_by_one_token(window):
    return None if window is None else window + 1


def exchange_frequencies(copy):
    a, b = copy.manifest["rope"]
    a["inv_freq"], b["inv_freq"] = b["inv_freq"], a["inv_freq"]


def edit_embedding(change: ArrayChange, name: str = "weight") -> Plant:
    """Changes a table of embeddings: `weight` [V, C] or `per_layer` [V, L·P]."""
    return lambda copy: copy.edit_embedding(change, name)


def exchange_rows_240_and_241(table):
    table[[240, 241]] = table[[241, 240]]
    return table


def scale_channel_17(table):
    return table * np.where(np.arange(table.shape[1]) == 17, 1.02, 1)


def zero_last_row(table):
    return table * (np.arange(len(table)) < len(table) - 1)[:, None]


FAULTS = [
    Fault("inv_freq rounded to fp16", gate="host", plant=edit_frequencies(np.float16)),
    Fault(
        "inv_freq rounded to bf16", gate="host", plant=edit_frequencies(round_to_bf16)
    ),
    Fault(
        "slowest quarter of rope is zero",
        gate="host",
        plant=edit_frequencies(zero_slowest_quarter),
    ),
    Fault(
        "one frequency off by a hundredth",
        gate="host",
        plant=edit_frequencies(scale_one_frequency),
    ),
    Fault(
        "rope scaling of the configuration ignored",
        gate="host",
        plant=edit_frequencies(ignore_scaling),
    ),
    Fault(
        "rope of another base",
        gate="host",
        plant=edit_frequencies(lambda inv_freq: inv_freq**1.02),
    ),
    Fault(
        "long table of longrope below the original length",
        gate="host",
        bundle="phi3",
        plant=edit_frequencies(use_long_table),
    ),
    Fault(
        "factor of yarn on cos and sin left out",
        gate="host",
        bundle="ministral3",
        plant=set_rope_scale(1.0),
    ),
    Fault("rope scale of 1.01", gate="host", plant=set_rope_scale(1.01)),
    Fault(
        "factor of yarn halved",
        gate="host",
        bundle="ministral3",
        plant=halve_yarn_factor,
    ),
    Fault(
        "window one token too wide",
        gate="host",
        bundle="gemma",
        plant=edit_windows(widen_by_one_token),
    ),
    Fault(
        "window forgotten",
        gate="host",
        bundle="gemma",
        plant=edit_windows(lambda _: None),
    ),
    Fault(
        "attention limited to the last 40 rows",
        gate="host",
        plant=edit_windows(lambda _: 40),
    ),
    Fault(
        "local and global frequencies exchanged",
        gate="host",
        bundle="gemma",
        plant=exchange_frequencies,
    ),
    Fault(
        "two embedding rows exchanged",
        gate="weights",
        plant=edit_embedding(exchange_rows_240_and_241),
    ),
    Fault(
        "one channel of the embedding times 1.02",
        gate="weights",
        plant=edit_embedding(scale_channel_17),
    ),
    Fault(
        "last embedding row zero", gate="weights", plant=edit_embedding(zero_last_row)
    ),
    Fault(
        "embedding rows moved by one",
        gate="weights",
        plant=edit_embedding(lambda table: np.roll(table, 1, axis=0)),
    ),
    Fault(
        "second embeddings of other tokens",
        gate="weights",
        bundle="gemma4",
        plant=edit_embedding(lambda table: np.roll(table, 1, axis=0), "per_layer"),
    ),
]
