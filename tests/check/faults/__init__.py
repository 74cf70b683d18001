"""Planted faults: what goes wrong in the wild, each with the gate that must be RED.

To plant another fault, add a row to `FAULTS` of the module that it belongs to:

    host, states, model, undo    in a loaded decoder of any family; `decoders` has edits of it
    zaya, hybrids                in a loaded decoder of the families with states beside the cache
    gemma4                       in a loaded decoder of the family that shares rows between layers
    weights, tables, manifest    in a copy of a bundle's files; `copies` has edits of it
    programs, descriptions       in the packages of such a copy

The `plant` of a row is a function of the decoder or of the copy. Either the row names the function
(`plant=clamp_position`), or another function makes it (`plant=edit_input(MASK, block_last_row)`);
functions that make plants are annotated with `-> Plant` or `-> LayerPlant`.

`python -m tests.prove SLUG` runs every gate on a fault; SLUG is its name in lower case with
underscores. `reuse` has the faults of caches that are stored, restored and batched, which take two
decoders and are a table of their own.

Bugs that others reported and that concern one sequence, and the fault that stands for each
(data/sources/README.md lists the chapter and experiment 30; tables there call the book `ane-book`):

    chapter 5, flexible T addresses the state wrongly              write address off by one at T above 1
    coremltools 2188, y[:, pos] = v is silently lost               state never written
    mlx-lm, tokens dropped when capacity is short                  tokens dropped when the chunk is long
    mlx-lm 1806, rope uses the offset after the update             rope uses the offset after the update
    mlx-examples 977, padding saved as content                     padding written as content
    mlx-swift-lm 443, side state not kept, positions wrong         convolution state not carried, delayed value not carried
    Rapid-MLX 1874, two users of one state                         all states of a model are one
    transformers 30400, the result depends on the cache's length   future left visible
    experiment 30, a position past the cache is clamped            position past the cache is clamped
    experiment 26 of the Neural Engine book, heads and tokens      heads and tokens permuted in the output

Journals 72 and 100 of that book report a wrong rope that golden and shard share. No row stands for
it, since no comparison with the golden shows it: it has a test in test_faults.py.
"""

from faults import (
    descriptions,
    gemma4,
    host,
    hybrids,
    manifest,
    model,
    programs,
    states,
    tables,
    undo,
    weights,
    zaya,
)
from faults.fault import Fault, slug

IN_MEMORY: list[Fault] = [
    *host.FAULTS,
    *states.FAULTS,
    *hybrids.FAULTS,
    *model.FAULTS,
    *undo.FAULTS,
    *zaya.FAULTS,
    *gemma4.FAULTS,
]
ON_DISK: list[Fault] = [
    *weights.FAULTS,
    *tables.FAULTS,
    *manifest.FAULTS,
    *programs.FAULTS,
    *descriptions.FAULTS,
]
# place/slug → fault
FAULTS = {f"memory/{fault.slug}": fault for fault in IN_MEMORY}
FAULTS |= {f"disk/{fault.slug}": fault for fault in ON_DISK}
assert len(FAULTS) == len(IN_MEMORY) + len(ON_DISK), "two faults have one name"


def find_fault(place: str, name: str) -> Fault:
    """The fault of `IN_MEMORY` (place "memory") or `ON_DISK` ("disk") with the name in its row."""
    return FAULTS[f"{place}/{slug(name)}"]
