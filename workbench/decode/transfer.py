"""Moving sequences between bundles of one checkpoint: a runtime's state works only with the model that made it."""

from dataclasses import replace

from workbench.decode.decoder import Decoder
from workbench.errors import InputError


def copy_state(source: Decoder, target: Decoder) -> None:
    """Continues `source`'s sequences in `target`, whatever the two bundles' shards, T, cache sizes and packing.

    Typically a prefill bundle of large fixed T hands over to a decode bundle of T = 1.

    Raises:
        InputError: another checkpoint, another batch, or fewer positions than the sequences already have.
    """
    a, b = source.manifest, target.manifest
    if a.checkpoint["sha256"] != b.checkpoint["sha256"] or a.options.batch != b.options.batch:
        raise InputError(
            "bundle to continue in",
            f"checkpoint {b.checkpoint['name']}, batch {b.options.batch}",
            f"checkpoint {a.checkpoint['name']}, batch {a.options.batch}",
            "export both bundles from one checkpoint with one --batch",
        )
    if source.offsets.max() > b.options.max_seq_len:
        raise InputError(
            "bundle to continue in",
            f"max_seq_len = {b.options.max_seq_len}",
            f"room for {source.offsets.max()} tokens",
            "export it with a larger --max-seq-len",
        )
    target.begin(
        [replace(source.snapshot(seq), identity=target.identity) for seq in range(a.options.batch)]
    )
