"""Calls of several tokens whose caches are not those of calls of one, and why."""

from dataclasses import replace

import numpy as np

from workbench.check import compare
from workbench.check.golden import Golden
from workbench.check.hf import Values
from workbench.check.run import default_ts, run_golden
from workbench.decode import Decoder

SAME = 1e-3  # relative RMS that sums in another order, and other functions, explain


def call_faults(decoder: Decoder, golden: Golden) -> list[str]:
    """What is wrong with calls of each T > 1 over the golden's tokens, in a sentence
    for the first such call of each T; nothing where keys and values are those of calls
    of one token.

    Args:
        decoder: of batch 1, in `exact` arithmetic.
    """

    n = len(golden.ids)

    def caches(T: int, ids: np.ndarray = golden.ids) -> Values:
        values = run_golden(decoder, replace(golden, ids=ids), T, "chained")
        return {name: x for name, x in values.items() if name.startswith(("k.", "v."))}

    faults = []
    one = caches(1)
    for T in default_ts(decoder.options):
        many = caches(T)
        wrong = []
        for name, rows in many.items():
            error = compare.over(compare.rms(one[name], rows), compare.rms(one[name]))
            for row in np.flatnonzero(~(error <= SAME)):
                wrong.append((n - len(rows) + int(row), name, float(error[row])))
        if not wrong:
            continue
        position, name, error = min(wrong)
        fault = (
            f"calls of T = {T} differ from calls of one token, first at position "
            f"{position}: {name} by {error:.2g} (relative RMS)"
        )
        end = min(n, position - position % T + T)
        for token in range(position + 1, end):
            ids = golden.ids.copy()
            ids[token] = (ids[token] + 1) % decoder.manifest.dims.V
            changed = caches(T, ids)
            if any(
                not np.array_equal(x[: token - n], changed[name][: token - n])
                for name, x in many.items()
            ):
                fault += f"; they see the future: token {token} changes the rows of"
                fault += " earlier ones"
                break
        faults.append(fault)
    return faults
