"""Moves sequences between bundles of one checkpoint, by copying states; a runtime's own
state works only with the model that made it."""

from dataclasses import replace

import numpy as np

from workbench.decode.decoder import Decoder
from workbench.errors import InputError


def copy_state(source: Decoder, target: Decoder) -> None:
    """Continues `source`'s sequences in `target`, whatever the two bundles' shards, T,
    cache sizes and packing.

    Typically a prefill bundle of large fixed T hands over to a decode bundle of T = 1.

    Raises:
        InputError: another checkpoint, another batch, or fewer positions than the
            sequences already have.
    """
    check_pair(source, target)
    a, b = source.manifest, target.manifest
    if source.offsets.max() > b.options.max_seq_len:
        raise InputError(
            "bundle to continue in",
            f"max_seq_len = {b.options.max_seq_len}",
            f"room for {source.offsets.max()} tokens",
            "export it with a larger --max-seq-len",
        )
    snapshots = [source.snapshot(seq) for seq in range(a.options.batch)]
    target.begin([replace(each, identity=target.identity) for each in snapshots])


def check_pair(source: Decoder, target: Decoder) -> None:
    """Raises an InputError for two bundles of different checkpoints or batches, between
    which no sequence can move."""
    a, b = source.manifest, target.manifest
    same = a.checkpoint["sha256"] == b.checkpoint["sha256"]
    if not same or a.options.batch != b.options.batch:
        raise InputError(
            "bundle to continue in",
            f"checkpoint {b.checkpoint['name']}, batch {b.options.batch}",
            f"checkpoint {a.checkpoint['name']}, batch {a.options.batch}",
            "export both bundles from one checkpoint with one --batch",
        )


def prefill_by(source: Decoder, target: Decoder, ids) -> np.ndarray:
    """Runs prompts in `source` from an empty cache and moves the sequences to `target`,
    once, behind their last token.

    Args:
        ids: as for `Decoder.prefill`.

    Returns:
        The logits of `source` after the last token: [V], or [B, V] when batch > 1.

    Raises:
        InputError: bundles that do not belong together, before anything runs.
    """
    check_pair(source, target)
    source.begin()
    logits = source.prefill(ids)
    copy_state(source, target)
    return logits
