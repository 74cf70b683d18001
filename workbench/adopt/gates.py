"""The gates of adopted packages: those that need no golden, and those that compare
keys, values and logits with Hugging Face's model on the packages' own weights."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np
import pandas as pd

from workbench.adopt import passes
from workbench.adopt.adapter import Adapter
from workbench.adopt.passes import Pass
from workbench.check import gates, metrics
from workbench.check.gates import Gate
from workbench.check.golden import Golden
from workbench.errors import InputError

# 1 − cosine of one position's keys or values. On the packages' own weights in exact
# arithmetic a sound exporter reached 5e-5 (rope tables and constants in fp16); the
# smallest fault measured in published exporters is 0.026. A device adds rounding to
# fp16, other weights add compression.
DISTANCE = {"exact": 1e-3, "declared": 1e-2, "narrow": 2e-2, "device": 2e-2}
OTHER_WEIGHTS = 0.1
# Relative RMS of K and V between functions. Functions may differ in the order of sums
# and in the rounding of constants; a prefill that attends to later positions differs by
# 0.1.
SAME_T = {"exact": 1e-3, "declared": 1e-2, "narrow": 3e-2, "device": 3e-2}
FULL = 16.0  # magnitude of the values in empty rows
SEED = 0


def tolerance(adapter: Adapter) -> str:
    """The key of `DISTANCE` and `SAME_T` for a runtime and its precision."""
    return adapter.precision if adapter.portable else "device"


def own_gates(adapter: Adapter) -> list[Gate]:
    """Gates that need no golden."""
    parts = ", ".join(part.package for part in adapter.foreign.parts)
    return [
        gates.holds("interface", True, f"foreign.yaml fits {parts}"),
        write_address(adapter),
        stale_rows(adapter),
        causality(adapter),
        reuse_gate(adapter),
        gates.not_run(
            "updates", "packages do not say which operation ends a layer: K and V tell"
        ),
    ]


def calls(adapter: Adapter) -> Iterator[tuple[int, int, str]]:
    """(T, start, functions) of calls with every tile of every function, at its first,
    last and middle position."""
    ends = {0, adapter.context}
    for part in adapter.foreign.parts:
        for f in part.functions:
            ends |= {f.first, f.until} - {None}
    for T in adapter.tiles:
        seen: dict[str, list[int]] = {}
        for start in range(adapter.context - T + 1):
            if chosen := adapter.functions(T, start):
                seen.setdefault(
                    " + ".join(f.name or "main" for f in chosen), []
                ).append(start)
        for name, starts in seen.items():
            for index in sorted({0, len(starts) // 2, len(starts) - 1}):
                yield T, starts[index], name


def _filled(adapter: Adapter, rng, start: int = 0, fill: float | None = None) -> dict:
    """A state of random rows; with `fill`, rows that are empty after `start` tokens
    have ±fill."""
    state = adapter.begin()
    values = {}
    for key, value in adapter.read(state).items():
        signs = rng.choice([-1.0, 1.0], value.shape)
        values[key] = np.float16(signs * (1 + rng.random(value.shape)))
    if fill is not None:
        for entry in adapter.foreign.states:
            axis = entry.axes.index("S")
            rows = np.moveaxis(values[entry.part, entry.name], axis, 0)
            empty = adapter.positions(entry.layers[0], len(rows), start) < 0
            rows[empty] = np.sign(rows[empty]) * fill
    adapter.write(state, values)
    return state


def write_address(adapter: Adapter) -> Gate:
    """The gate that every call writes the rows of its own positions in all heads, keeps
    the bits of earlier positions' rows, wherever they move to, and changes no other
    row."""
    rng, faults, count = np.random.default_rng(SEED), [], 0
    for T, start, name in calls(adapter):
        state = _filled(adapter, rng)
        before = {layer: adapter.kv(state, layer) for layer in adapter.layers}
        adapter.advance(state, passes.random_ids(adapter, rng, T), start)
        for layer, old in before.items():
            for tensor, was, now in zip(
                "kv", old, adapter.kv(state, layer), strict=True
            ):
                count += 1
                rows = was.shape[1]
                ends = start, start + T
                positions = (adapter.positions(layer, rows, end) for end in ends)
                if wrong := _wrong_rows(was, now, *positions, start):
                    place = f"layer {layer} {tensor}, T = {T} at {start} ({name})"
                    faults.append(f"{place}: {wrong}")
    fine = f"{count} caches after a call: its rows written, all others the same bits"
    return gates.none(
        "write_address", faults[:3], fine, f"{len(faults)} of {count}: ", "; "
    )


def _wrong_rows(was, now, before: np.ndarray, after: np.ndarray, start: int) -> str:
    """The faults of a call from `start` on cache rows [H, rows, D], in words; "" if
    there are none.

    Args:
        was, now: the rows before and after the call.
        before, after: the position in each row before and after the call, −1 in empty
            rows.
    """
    moved = np.arange(len(after))
    places = {int(p): row for row, p in enumerate(before) if p >= 0}
    new = after >= start
    for row in np.flatnonzero((after >= 0) & ~new):
        moved[row] = places[int(after[row])]
    same = (now == was[:, moved]).all((0, 2)) | new
    if (before < 0).any() and (moved != np.arange(len(after))).any():
        # where rows move up, the contents of empty rows move with them
        same |= after < 0
    written = (now != was).any(2).all(0) | ~new
    faults = []
    if unwritten := np.flatnonzero(~written).tolist():
        faults.append(f"rows {unwritten[:4]} not written")
    if changed := np.flatnonzero(~same).tolist():
        faults.append(f"rows {changed[:4]} changed")
    return " and ".join(faults)


def _bits(array: np.ndarray | None, count: int | None = None) -> bytes | None:
    return None if array is None else array[:count].tobytes()


def _changed(adapter: Adapter, start: int, calls: list, count: int) -> str:
    """The differences of two calls in the first `count` tokens' logits, and in K and V
    up to them, which must be the same bits; "" if there are none.

    Args:
        start: the position of both calls.
        calls: pairs (value of the empty rows, ids).
    """
    states, results, faults = [], [], []
    for fill, ids in calls:
        states.append(_filled(adapter, np.random.default_rng(SEED), start, fill))
        results.append(adapter.advance(states[-1], ids, start))
    for name in ("logits", "top", "value"):
        a, b = (_bits(getattr(result, name), count) for result in results)
        if a != b:
            faults = ["logits"]
    end = start + count
    for layer in adapter.layers:
        pairs = zip("kv", *(adapter.kv(state, layer) for state in states), strict=True)
        for tensor, a, b in pairs:
            positions = adapter.positions(layer, a.shape[1], end + 1)
            rows = (positions >= 0) & (positions < end)
            if a[:, rows].tobytes() != b[:, rows].tobytes():
                faults.append(f"layer {layer} {tensor}")
    return ", ".join(faults[:3])


def stale_rows(adapter: Adapter) -> Gate:
    """The gate that finite values in empty rows change no result, bit for bit."""
    faults, count = [], 0
    for T, start, name in calls(adapter):
        count += 1
        ids = passes.random_ids(adapter, np.random.default_rng(SEED), T)
        if differing := _changed(adapter, start, [(0.0, ids), (FULL, ids)], T):
            faults.append(f"{differing} at T = {T}, position {start} ({name})")
    fine = f"{count} calls: what lies in empty rows changes nothing, bit for bit"
    return gates.none(
        "stale_rows", faults[:3], fine, f"{len(faults)} of {count}: ", "; "
    )


def causality(adapter: Adapter) -> Gate:
    """The gate that the last token of a call changes no earlier row or logit, bit for
    bit."""
    faults, count = [], 0
    for T, start, name in calls(adapter):
        if T == 1:
            continue
        count += 1
        ids = passes.random_ids(adapter, np.random.default_rng(SEED), T)
        other = ids.copy()
        other[-1] = (ids[-1] + 1) % passes.vocabulary(adapter)
        if differing := _changed(adapter, start, [(0.0, ids), (0.0, other)], T - 1):
            faults.append(f"{name} at T = {T}, position {start}: {differing}")
    if not count:
        return gates.not_run("causality", "every call has one token")
    same = "earlier K, V and logits are the same bits"
    fine = f"changing a call's last token: {same} ({count} calls)"
    return gates.none(
        "causality", faults[:3], fine, "the last token changes earlier ones: ", "; "
    )


def reuse_gate(adapter: Adapter) -> Gate:
    """The gate that a restored cache continues with the same bits, in a fresh state and
    over another sequence's."""
    cells = reuse_cells(adapter)
    red = [c for c in cells if c.verdict == gates.RED]
    faults = [f"{c.cache}, {c.context} tokens: {c.reason}" for c in red]
    fine = f"{len(cells)} continuations of a restored cache are the same bits"
    return gates.none("reuse", faults, fine, sep="; ")


@dataclass
class ReuseCell:
    """A continuation of a restored cache by the rest of a prompt and `tokens` more;
    `cache` is `warm` in a fresh state, `hot` over another sequence."""

    cache: str
    context: int
    tokens: list[int]
    verdict: str
    reason: str
    batch: int = 1
    streaming: bool = True
    format: str = "fp16"

    json = asdict


def reuse_cells(adapter: Adapter, max_new: int = 6) -> list[ReuseCell]:
    """Copies prefixes of several lengths of a prompt out, restores each and continues
    it by the rest of the prompt and `max_new` tokens in the smallest calls.

    Raises:
        InputError: the context has no room for them.
    """
    rng = np.random.default_rng(SEED)
    cells = []
    T = max(adapter.tiles)
    step = min(adapter.tiles)
    new = -(-max_new // step) * step
    length = min(adapter.context - new, 3 * T + 5) // step * step
    if length < 2 * step:
        most = f"at most {adapter.context - 2 * step} behind a prompt of {2 * step}"
        raise InputError("--max-new", f"{max_new} tokens", most, "ask for fewer")
    ids, others = (passes.random_ids(adapter, rng, length + new) for _ in range(2))

    def continued(state: dict, prefix: int) -> list[Pass]:
        rest = passes.run(adapter, ids[prefix:length], T, state, prefix)
        return [rest, passes.run(adapter, ids[length:], step, state, length)]

    for prefix in sorted(
        {step, length // 2 // step * step, max(step, length - 2 * step)}
    ):
        state = adapter.begin()
        passes.run(adapter, ids[:prefix], T, state)
        copy = adapter.read(state)
        expected = continued(state, prefix)
        for cache in ("warm", "hot"):
            restored = adapter.begin()
            if cache == "hot":
                passes.run(adapter, others, T, restored)
            adapter.write(restored, copy)
            faults = set()
            for a, b in zip(expected, continued(restored, prefix), strict=True):
                for name in ("k", "v", "logits", "top"):
                    if _bits(getattr(a, name)) != _bits(getattr(b, name)):
                        faults.add(name)
            verdict, reason = gates.GREEN, "the same bits"
            if faults:
                verdict = gates.RED
                reason = f"{', '.join(sorted(faults))} differ"
            cells.append(ReuseCell(cache, prefix, [new], verdict, reason))
    return cells


def same_for_every_T(adapter: Adapter, by_T: dict[int, Pass]) -> Gate:
    """The gate on the relative RMS of K and V of calls of T tokens against the smallest
    T."""
    first, *others = sorted(by_T)
    if not others:
        return gates.not_run("same_for_every_T", f"only T = {first} can be called")
    limit = SAME_T[tolerance(adapter)]
    errors = {}
    for T in others:
        for layer in range(len(by_T[T].k)):
            for name in "kv":
                a, b = (p.vectors(name, layer) for p in (by_T[first], by_T[T]))
                there = np.isfinite(a).all(1) & np.isfinite(b).all(1)
                errors[f"layer {layer} {name}, T = {T}"] = metrics.relative_rms(
                    a[there], b[there]
                )
    worst = max(errors, key=errors.get)
    reason = f"relative RMS of K and V against T = {first}: {worst}"
    return gates.at_most("same_for_every_T", errors[worst], limit, reason)


def golden_gates(adapter: Adapter, by_T: dict[int, Pass], golden: Golden, weights: str):
    """The gates of K, V and logits against a golden, and the rows of all comparisons.

    `weights` is a note on the golden's weights, "" if they are those of the packages.
    """
    frames = []
    for T, own in by_T.items():
        frames.append(passes.compare(own, golden).assign(tile=T))
    rows = pd.concat(frames, ignore_index=True)
    limit = OTHER_WEIGHTS if weights else DISTANCE[tolerance(adapter)]
    of_logits = rows["tensor"] == "logits"
    checks = [_distance("keys_and_values", rows[~of_logits], limit, weights)]
    if of_logits.any():
        checks.append(_distance("logits", rows[of_logits], limit, weights))
    else:
        reason = "no package puts them out: the argmax is inside"
        checks.append(gates.not_run("logits", reason))
        checks.append(_top_values(by_T, golden, limit))
    checks.append(_top_tokens(by_T, golden))
    return checks, rows


def _distance(name: str, rows: pd.DataFrame, limit: float, weights: str) -> Gate:
    """The gate of the worst position; its reason also names the first bad one."""
    worst = rows.loc[rows["distance"].idxmax()]
    bad = rows[~(rows["distance"] <= limit)].sort_values(
        ["layer", "position"], kind="stable"
    )
    reason = f"1 − cosine, worst: {_place(worst)}"
    if len(bad):
        reason += f"; first bad: {_place(bad.iloc[0])}; {len(bad)} of {len(rows)} are"
    return gates.at_most(name, float(worst["distance"]), limit, reason + weights)


def _place(row: pd.Series) -> str:
    layer = "" if row["layer"] < 0 else f"layer {row['layer']}, "
    call = f"T = {row['T']} ({row['function']})"
    return f"{layer}position {row['position']}, {row['tensor']}, {call}"


def _top_values(by_T: dict[int, Pass], golden: Golden, limit: float) -> Gate:
    """The gate of the logits that packages give for their top tokens: relative RMS,
    whose square is about twice a 1 − cosine."""
    values = np.concatenate([own.value for own in by_T.values()])
    largest = np.tile(golden.logits.max(-1), len(by_T))
    there = np.isfinite(values)
    if not there.any():
        return gates.not_run("top_values", "no package puts them out")
    error = metrics.relative_rms(largest[there], values[there])
    reason = f"relative RMS of {there.sum()} largest logits"
    return gates.at_most("top_values", error, (2 * limit) ** 0.5, reason)


def _top_tokens(by_T: dict[int, Pass], golden: Golden) -> Gate:
    """The gate that every top token is the golden's, except for near-ties."""
    wrong, count = [], 0
    for T, own in by_T.items():
        if own.logits is None:
            tops = own.top
            there = own.top >= 0
        else:
            tops = np.nan_to_num(own.logits, nan=-np.inf).argmax(-1)
            there = np.isfinite(own.logits).all(-1)
        for position in np.flatnonzero(there):
            logits, count = golden.logits[position], count + 1
            if logits.max() - logits[tops[position]] > metrics.NEAR_TIE_NATS:
                wrong.append(f"position {position}, T = {T}")
    if not count:
        return gates.not_run("top_tokens", "no call gives logits or a top token")
    reason = f"{len(wrong)} of {count} differ"
    if wrong:
        reason += f", first: {wrong[0]}"
    return gates.at_least("top_tokens", 1 - len(wrong) / count, 1.0, reason)
