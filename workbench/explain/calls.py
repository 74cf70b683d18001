"""Calls of several tokens whose caches are not those of calls of one, and why."""

from dataclasses import replace

from workbench.check import compare
from workbench.check.golden import Golden
from workbench.check.run import run_golden
from workbench.check.states import default_ts
from workbench.decode import Decoder

SAME = 1e-3  # relative RMS that sums in another order, and other functions, explain


def call_faults(decoder: Decoder, golden: Golden) -> list[str]:
    """What is wrong with calls of each T > 1 over the golden's tokens, in a sentence
    for the first such call of each T; nothing where keys and values are those of calls
    of one token.

    Args:
        decoder: of batch 1, in `exact` arithmetic.
    """
    faults = []
    (one,) = run_golden(decoder, golden, (1, "chained"))
    for T in sorted({*default_ts(decoder.options)} - {1}):
        (many,) = run_golden(decoder, golden, (T, "chained"))
        rows = compare.compare(one, many, tensors=("k", "v"), similar=False)
        wrong = rows[~(rows["error"] <= SAME)]
        if wrong.empty:
            continue
        first = wrong.loc[wrong["position"].idxmin()]
        fault = (
            "calls of T = {} differ from calls of one token, first at position "
            "{position}: {tensor}.{layer} by {error:.2g} (relative RMS)"
        ).format(T, **first)
        later, ids = int(first["position"]) + 1, golden.ids.copy()
        ids[later:] = (ids[later:] + 1) % decoder.manifest.dims.V
        changed = replace(golden, ids=ids)
        (other,) = run_golden(decoder, changed, (T, "chained"))
        rows = compare.compare(many, other, tensors=("k", "v"), similar=False)
        if rows[rows["position"] < later]["error"].any():
            fault += "; they see the future: later tokens change earlier rows"
        faults.append(fault)
    return faults
