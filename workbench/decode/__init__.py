"""Decoding a bundle token by token or chunk by chunk, from the start or from a
snapshot. Nothing here uses a golden.

Token ids become tokens in this order; each file imports those before it:

    checks.py     checks of the ids, counts and indices that a caller gives
    inputs.py     masks, write addresses and rotary tables of a call
    hooks.py      the hook on every operation of a shard
    experts.py    routed experts: which run, and the sum of their outputs
    snapshot.py   a detached copy of one sequence, and how far a sequence can be trimmed
    shards.py     the loaded shards: one call of a layer shard, and of the head
    sequences.py  token ids and states of a batch: prefill, step, trim, snapshot
    sampling.py   a token from logits
    decoder.py    `Decoder`: the loaded shards and the sequences that they currently run

`times.py` has the times of a call, `store.py` writes snapshots to files, `tokenizer.py`
turns text into ids and back, and `timed.py` is what `workbench generate` calls."""

from workbench.decode.decoder import Decoder, Record
from workbench.decode.inputs import HostInputs
from workbench.decode.sampling import Sampling
from workbench.decode.sequences import Sequences
from workbench.decode.snapshot import Snapshot
from workbench.decode.times import Times

__all__ = [
    "Decoder",
    "HostInputs",
    "Record",
    "Sampling",
    "Sequences",
    "Snapshot",
    "Times",
]
