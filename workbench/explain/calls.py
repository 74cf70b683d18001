"""Finds multi-token calls whose caches differ from those of one-token calls."""

from dataclasses import replace

from workbench.check import compare
from workbench.check.golden import Golden
from workbench.check.run import trace_bundle
from workbench.check.states import default_ts
from workbench.decode import Decoder

# Largest relative RMS of a difference that rounding explains: another function of a
# package, or another number of columns, adds up the same terms in another order.
SUMMATION_ORDER = 1e-3


def find_call_faults(decoder: Decoder, golden: Golden) -> list[str]:
    """One sentence for every T > 1 whose calls leave other keys or values in the caches
    than one-token calls: where they first differ, and whether attention is not causal.

    Args:
        decoder: of batch 1, in `exact` arithmetic.
        golden: the tokens to run.
    """
    faults = []
    (single,) = trace_bundle(decoder, golden, (1, "chained"))
    for T in sorted({*default_ts(decoder.options)} - {1}):
        (multi,) = trace_bundle(decoder, golden, (T, "chained"))
        rows = compare.errors(single, multi, ("k", "v"))
        wrong = rows[~(rows["error"] <= SUMMATION_ORDER)]
        if wrong.empty:
            continue
        first = wrong.loc[wrong["position"].idxmin()]
        fault = (
            "calls of T = {} differ from calls of one token, first at position "
            "{position}: {tensor}.{layer} by {error:.2g} (relative RMS)"
        ).format(T, **first)
        # rows up to the first wrong one must not depend on the tokens after it
        end = int(first["position"]) + 1
        ids = golden.ids.copy()
        ids[end:] = (ids[end:] + 1) % decoder.manifest.dims.V
        changed = replace(golden, ids=ids)
        (other,) = trace_bundle(decoder, changed, (T, "chained"))
        rows = compare.errors(multi, other, ("k", "v"))
        if rows[rows["position"] < end]["error"].any():
            fault += "; they are not causal: later tokens change earlier rows"
        faults.append(fault)
    return faults
