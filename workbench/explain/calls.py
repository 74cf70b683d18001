"""Finds functions of other exporters' packages whose calls of several tokens leave other
rows in the caches than calls of one token."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from workbench.bundle.foreign import Function
from workbench.check import compare, gates
from workbench.check.golden import Golden
from workbench.check.run import plan_calls, trace_bundle
from workbench.check.states import default_ts
from workbench.check.trace import Trace
from workbench.decode import Decoder

CALLS_GATE = "multi_token_calls"
# Largest relative RMS of a row that rounding explains: another function of a package, or
# another number of columns, adds up the same terms in another order.
MAX_REORDER_ERROR = 1e-3
CORRECTION = "correct it in its exporter"
REMOVAL = ", or remove it from functions in bundle.json, so that other functions take its tokens"


@dataclass(frozen=True)
class CallFault:
    """A function that writes other cache rows in calls of several tokens than in calls of
    one, and the first row that differs.

    Attributes:
        Ts: the numbers of tokens in a call with which this function computes the first
            wrong row. The attributes below are those of the row with the first of them.
        tensor: k or v.
        error: relative RMS of the row; inf where it is not finite.
        is_causal: False if later tokens change the rows up to this one.
    """

    Ts: tuple[int, ...]
    function: Function
    tensor: str
    layer: int
    position: int
    error: float
    is_causal: bool

    def __str__(self) -> str:
        sizes = ", ".join(map(str, self.Ts))
        text = (
            f"{self.function.label} is wrong in calls of T = {sizes}: first "
            f"{self.tensor.upper()} of layer {self.layer} at position {self.position}, "
            f"relative RMS {self.error:.2g} from calls of one token"
        )
        if not self.is_causal:
            text += "; not causal: later tokens change earlier rows"
        return text


class TokenCall(NamedTuple):
    """The call of a package that computes a token.

    Attributes:
        count: the tokens of the call.
    """

    function: Function
    count: int


def calls_gate(decoder: Decoder, golden: Golden) -> gates.Gate:
    """Gate `multi_token_calls`: for every T > 1, calls of T tokens leave the keys and
    values in the caches that calls of one token leave. The value is the largest relative
    RMS of a row.

    It is not_run if no function takes several tokens, or if one that does was never
    called on so short a prompt.

    Args:
        decoder: of batch 1, in `exact` arithmetic, of another exporter's packages.
        golden: the tokens to run.
    """
    uncalled = _functions_of_several(decoder)
    if not uncalled:
        reason = "no function takes several tokens"
        return gates.not_run(CALLS_GATE, reason, applies=False)
    (single,) = trace_bundle(decoder, golden, (1, "chained"))
    errors = []
    faults: dict[Function, CallFault] = {}
    for T in sorted({*default_ts(decoder.options)} - {1}):
        (multi,) = trace_bundle(decoder, golden, (T, "chained"))
        call_of_token = _plan_token_calls(decoder, len(golden.ids), T)
        called = {call.function for call in call_of_token if call.count > 1}
        uncalled = [function for function in uncalled if function not in called]
        rows = compare.errors(single, multi, ("k", "v"))
        rows["error"] = rows["error"].fillna(np.inf)  # a row with NaN is wrong
        errors.append(float(rows["error"].max()))
        wrong = rows[rows["error"] > MAX_REORDER_ERROR]
        if wrong.empty:
            continue
        first = wrong.loc[wrong["position"].idxmin()]
        function = call_of_token[int(first["position"])].function
        if function in faults:
            fault = faults[function]
            faults[function] = replace(fault, Ts=(*fault.Ts, T))
        else:
            faults[function] = _examine_row(decoder, golden, multi, T, function, first)
    if faults:
        reason = f"{'; '.join(map(str, faults.values()))}; {CORRECTION}"
        if len(decoder.manifest.foreign.functions) > len(faults):
            reason += REMOVAL
    elif uncalled:
        return gates.not_run(CALLS_GATE, _describe_uncalled(uncalled, golden))
    else:
        reason = "K and V of calls of T tokens against calls of one, relative RMS"
    return gates.at_most(CALLS_GATE, max(errors), MAX_REORDER_ERROR, reason)


def _examine_row(
    decoder: Decoder,
    golden: Golden,
    trace: Trace,
    T: int,
    function: Function,
    row: pd.Series,
) -> CallFault:
    """The fault of a function that computed a wrong cache row.

    Args:
        trace: of the golden's tokens in calls of T tokens.
        row: the wrong one, as `compare.errors` gives it.
    """
    position = int(row["position"])
    return CallFault(
        Ts=(T,),
        function=function,
        tensor=row["tensor"],
        layer=int(row["layer"]),
        position=position,
        error=float(row["error"]),
        is_causal=not later_tokens_matter(decoder, golden, trace, T, position),
    )


def _functions_of_several(decoder: Decoder) -> list[Function]:
    """The functions that take more than one token."""
    functions = decoder.manifest.foreign.functions
    return [function for function in functions if function.t_max > 1]


def _plan_token_calls(decoder: Decoder, n: int, T: int) -> list[TokenCall]:
    """For each of n tokens the package call that computes it, if the bundle is called with
    T tokens at a time. The packages may split such a call further."""
    (model,) = decoder.layer_shards
    token_calls = []
    for planned in plan_calls(decoder.options, (1, n), T):
        start, count = int(planned.position[0]), int(planned.counts[0])
        package_calls = model.foreign.calls(start, count, ring_rows=model.ring_rows)
        for function, tokens in package_calls:
            token_calls += [TokenCall(function, len(tokens))] * len(tokens)
    return token_calls


def _describe_uncalled(functions: Sequence[Function], golden: Golden) -> str:
    """Why functions were not called with several tokens, and what calls them."""
    names = ", ".join(function.label for function in functions)
    # the last token of a call goes through a function that gives logits
    count = max(f.first + max(f.t_min, 2) + (not f.logits) for f in functions)
    return (
        f"{names} did not run on {len(golden.ids)} tokens: give a longer prompt (--text), "
        f"of at least {count}"
    )


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
