"""Finds multi-token calls whose caches differ from those of one-token calls."""

from dataclasses import replace

from workbench.check import compare
from workbench.check.golden import Golden
from workbench.check.run import trace_bundle
from workbench.check.states import default_ts
from workbench.check.trace import Trace
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
        position = int(first["position"])
        fault = (
            f"calls of T = {T} differ from calls of one token, first at position "
            f"{position}: {first['tensor']}.{first['layer']} by {first['error']:.2g} "
            "(relative RMS)"
        )
        if later_tokens_matter(decoder, golden, multi, T, position):
            fault += "; they are not causal: later tokens change earlier rows"
        faults.append(fault)
    return faults


def later_tokens_matter(
    decoder: Decoder, golden: Golden, trace: Trace, T: int, position: int
) -> bool:
    """Whether other tokens after a position change the keys or values up to it, in calls
    of T tokens.

    Args:
        trace: of the golden's tokens in such calls.
    """
    end = position + 1
    ids = golden.ids.copy()
    ids[end:] = (ids[end:] + 1) % decoder.manifest.dims.V
    changed = replace(golden, ids=ids)
    (other,) = trace_bundle(decoder, changed, (T, "chained"))
    rows = compare.errors(trace, other, ("k", "v"))
    return bool(rows[rows["position"] < end]["error"].any())
