"""Calls of several tokens whose caches are not those of calls of one, and why."""

from collections.abc import Sequence

import numpy as np

from workbench.bundle.names import is_cache
from workbench.check import metrics
from workbench.check.run import default_ts
from workbench.decode import Decoder, Snapshot
from workbench.decode.snapshot import take

SAME = 1e-3  # relative RMS that sums in another order, and other functions, explain


def call_faults(decoder: Decoder, ids: Sequence[int]) -> list[str]:
    """What is wrong with calls of each T > 1 over `ids`, in a sentence for the first
    such call of each T; nothing where keys and values are those of calls of one token.

    Args:
        decoder: of batch 1, in `exact` arithmetic.
    """
    faults = []
    for T in default_ts(decoder.options):
        one, many = decoder.fresh(), decoder.fresh()
        for start in range(0, len(ids) if T > 1 else 0, T):
            before, tokens = take(many), list(ids[start : start + T])
            for token in tokens:
                decoder.advance(one, [[token]])
            decoder.advance(many, [tokens])
            error, name = _difference(take(one), take(many))
            if error > SAME:
                fault = (
                    f"calls of T = {T} differ from calls of one token, first at position "
                    f"{start}: {name} by {error:.2g} (relative RMS)"
                )
                seen = _sees_the_future(decoder, before, tokens)
                if seen is not None:
                    fault += (
                        f"; they see the future: token {start + seen} changes the rows of "
                        "earlier ones"
                    )
                faults.append(fault)
                break
    return faults


def _difference(reference: Snapshot, actual: Snapshot) -> tuple[float, str]:
    """The largest relative RMS between two caches of the same tokens, and its cache."""
    errors = {}
    for name, value in filter(lambda item: is_cache(item[0]), reference.states.items()):
        pair = np.float32(value), np.float32(actual.states[name])
        errors[name] = float(np.nan_to_num(metrics.relative_rms(*pair), nan=np.inf))
    worst = max(errors, key=errors.get)
    return errors[worst], worst


def _sees_the_future(
    decoder: Decoder, before: Snapshot, tokens: list[int]
) -> int | None:
    """The first token of a call, by its place in it, that changes rows of earlier
    tokens; None: no token does."""
    whole = _caches(decoder, before, tokens)
    for changed in range(1, len(tokens)):
        others = list(tokens)
        others[changed] = (tokens[changed] + 1) % decoder.manifest.dims.V
        for name, value in _caches(decoder, before, others).items():
            behind = len(tokens) - changed
            a, b = whole[name][:, :-behind], value[:, :-behind]
            if a.tobytes() != b.tobytes():
                return changed
    return None


def _caches(
    decoder: Decoder, before: Snapshot, tokens: list[int]
) -> dict[str, np.ndarray]:
    """Keys and values after a call that continues a snapshot, in the order of
    tokens."""
    seqs = decoder.fresh(before)
    decoder.advance(seqs, [tokens])
    return {n: value for n, value in take(seqs).states.items() if is_cache(n)}
