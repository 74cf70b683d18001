"""Finds functions of other exporters' packages whose calls of several tokens leave other
rows in the caches than calls of one token."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

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
    """The first cache row that calls of several tokens leave otherwise than calls of one.

    Attributes:
        Ts: tokens of the calls. The row is that of the first of them; in calls of the
            others, the first wrong row is of the same function.
        function: computes the row.
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
        calls = list(_calls_of_tokens(decoder, len(golden.ids), T))
        called = {call.function for call in calls if call.count > 1}
        uncalled = [function for function in uncalled if function not in called]
        rows = compare.errors(single, multi, ("k", "v"))
        rows["error"] = rows["error"].fillna(np.inf)  # a row with NaN is wrong
        errors.append(float(rows["error"].max()))
        wrong = rows[rows["error"] > MAX_REORDER_ERROR]
        if wrong.empty:
            continue
        first = wrong.loc[wrong["position"].idxmin()]
        position = int(first["position"])
        function = calls[position].function
        if function in faults:
            earlier = faults[function]
            faults[function] = replace(earlier, Ts=(*earlier.Ts, T))
            continue
        faults[function] = CallFault(
            Ts=(T,),
            function=function,
            tensor=first["tensor"],
            layer=int(first["layer"]),
            position=position,
            error=float(first["error"]),
            is_causal=not later_tokens_matter(decoder, golden, multi, T, position),
        )
    if faults:
        reason = f"{'; '.join(map(str, faults.values()))}; {CORRECTION}"
        if len(decoder.manifest.foreign.functions) > len(faults):
            reason += REMOVAL
    elif uncalled:
        return gates.not_run(CALLS_GATE, _describe_uncalled(uncalled, golden))
    else:
        reason = "K and V of calls of T tokens against calls of one, relative RMS"
    return gates.at_most(CALLS_GATE, max(errors), MAX_REORDER_ERROR, reason)


def _functions_of_several(decoder: Decoder) -> list[Function]:
    """The functions that take more than one token."""
    functions = decoder.manifest.foreign.functions
    return [function for function in functions if function.t_max > 1]


def _calls_of_tokens(decoder: Decoder, n: int, T: int) -> Iterator[TokenCall]:
    """The packages' call of each token in chained calls of T tokens over n."""
    (model,) = decoder.layer_shards
    for planned in plan_calls(decoder.options, (1, n), T):
        start, count = int(planned.position[0]), int(planned.counts[0])
        for function, tokens in model.foreign.calls(
            start, count, ring_rows=model.ring_rows
        ):
            yield from [TokenCall(function, len(tokens))] * len(tokens)


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
