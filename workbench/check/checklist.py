"""Chapter 5's checklist, gate by gate, on a bundle alone: interface, state lifetime, write addresses, stale rows.

Nothing here needs a golden: each gate states a property that the program must have whatever its weights are.
"""

from collections.abc import Iterable

import numpy as np

import miltorch
from workbench.ane import memory
from workbench.bundle import Bundle
from workbench.bundle.manifest import BASE, HIDDEN, V_STATE, is_cache
from workbench.check import fidelity, gates
from workbench.check.gates import Gate
from workbench.check.golden import Golden
from workbench.decode import Decoder
from workbench.errors import InputError

SMALL_STATE = 32  # up to this S every (T, pos) is probed
STALE_FACTOR = 16


def check_bundle(decoder: Decoder, *, golden: Golden | None = None, machine: int | None = None, progress: bool = False) -> list[Gate]:
    """Runs every gate; see each one's reason for what was judged.

    Args:
        golden: also judge what the written rows hold.
        machine: bytes of memory of the target machine (default: this one's).
    """
    rng = np.random.default_rng(0)
    contents = [fidelity.of_this_checkpoint(decoder, golden)] if golden else []
    with decoder.set_aside():
        probes = write_probe(decoder, rng, progress=progress)
        return [*interface_gates(decoder.bundle), *lifetime(decoder, rng), _addresses(probes), *contents, cache_contents(decoder, golden),
                stale_rows(decoder), nan_is_noticed(decoder, rng), overflow_raises(decoder), fits(decoder.bundle, machine)]  # fmt: skip


def interface_gates(bundle: Bundle) -> list[Gate]:
    """State shapes and dtype as declared in the package; K and V are states, never inputs or outputs."""
    d, o = bundle.manifest.dims, bundle.manifest.options
    shapes, leaks = [], []
    for shard in bundle.shards("layers"):
        program = miltorch.read(bundle.package(shard))
        for name, state in shard.states.items():
            found = program.states.get(state.tensor)
            if found is None or found.dtype != "FLOAT16":
                shapes.append(f"{shard.name}: {name} is {'absent' if found is None else found.dtype}")
            elif state.part is None and list(found.shape) != state.shape:
                shapes.append(f"{shard.name}: {name} is {list(found.shape)}, not {state.shape}")
            elif is_cache(name) and state.ring is None and state.shape != [o.batch, d.H_kv, o.max_seq_len, d.D]:
                shapes.append(f"{shard.name}: {name} is {state.shape}, not [B, H_kv, S, D]")
        caches = {f"layers.{i}.{n}" for i in range(*shard.layers) for n in ("k_state", "v_state")}
        if missing := caches - shard.states.keys():
            leaks.append(f"{shard.name}: {', '.join(sorted(missing))} no state")
        leaks += [f"{shard.name}: input {name} has the shape of a cache" for name, kind in program.inputs.items()
                  if list(kind.shape[1:]) == [d.H_kv, o.max_seq_len, d.D]]  # fmt: skip
    return [
        gates.holds("state_shapes", not shapes, "; ".join(shapes) or "every state is fp16 and as declared, [B, H_kv, S, D]"),
        gates.holds("kv_are_states", not leaks, "; ".join(leaks) or "K and V are states of every layer, not inputs or outputs"),
    ]


def lifetime(decoder: Decoder, rng) -> list[Gate]:
    """One make_state per sequence: a state carries over calls, a fresh one is zeros and forgets, two do not mix."""
    stuck, mute, mixed, dirty = [], [], [], []
    for model in decoder.layers:
        first, other = (_inputs(decoder, model.shard, rng, 0, 1) for _ in range(2))
        second = _inputs(decoder, model.shard, rng, 1, 1)

        def after(*calls, model=model):
            state = model.make_state()
            return [_stream(model.predict(call, state)) for call in calls][-1]

        if any(np.any(model.make_state().read(n)) for n in model.shard.states):
            dirty.append(model.shard.name)
        alone = after(first, second)
        if np.array_equal(alone, after(second), equal_nan=True):
            (mute if _mute(decoder, model.shard) else stuck).append(model.shard.name)
        a, b = model.make_state(), model.make_state()
        model.predict(first, a)
        model.predict(other, b)
        if not np.array_equal(_stream(model.predict(second, a)), alone):
            mixed.append(model.shard.name)
    return [
        _used(stuck, mute, len(decoder.layers)),
        gates.holds("fresh_state_is_zero", not dirty, f"not zeros: {', '.join(dirty)}" if dirty else "make_state gives zeros"),
        gates.holds("states_are_independent", not mixed, f"interleaved states differ in: {', '.join(mixed)}" if mixed
                    else "two states on one model, used in turn, give what each gives alone, bit for bit"),
    ]  # fmt: skip


def _used(stuck: list[str], mute: list[str], count: int) -> Gate:
    if stuck:
        return gates.holds("state_is_used", False, f"the first token leaves no trace in: {', '.join(stuck)}")
    apart = f"{', '.join(mute)}, whose own weights keep attention from the output" if mute else ""
    if len(mute) == count:
        return gates.not_run("state_is_used", f"nothing to ask {apart}")
    reason = "every shard's second token depends on its first through the state"
    return gates.holds("state_is_used", True, reason + (f"; not asked of {apart}" if apart else ""))


def _mute(decoder: Decoder, shard) -> bool:
    """Whether the shard's own weights keep its attention from its output: every layer has a v_proj or o_proj of zeros, as
    pruned layers and layers added as identities do."""
    program = miltorch.Executable(miltorch.read(decoder.bundle.package(shard)), "exact")
    silent = {tensor.split("layers.")[1].split(".")[0] for tensor, name in shard.weights.items()
              if tensor.endswith(("v_proj.weight", "o_proj.weight")) and not program.constant(name).any()}  # fmt: skip
    return len(silent) == shard.layers[1] - shard.layers[0]


def probe_points(S: int, t_max: int, whole: bool = False) -> list[tuple[int, int]]:
    """(T, pos) pairs: all of them on a small cache, else the ends, the middle and powers of two ± 1; `whole`: T = t_max
    alone."""
    Ts = [t_max] if whole else range(1, t_max + 1) if t_max <= 4 else sorted({1, 2, 3, 4, t_max // 2, t_max - 1, t_max})
    if S <= SMALL_STATE:
        return [(T, pos) for T in Ts for pos in range(S - T + 1)]
    near = {p + d for p in (0, *(2**i for i in range(3, S.bit_length())), S // 2) for d in (-1, 0, 1)}
    return [(T, pos) for T in Ts for pos in sorted({*near, S - T, S - T - 1}) if 0 <= pos <= S - T]


def write_probe(decoder: Decoder, rng=None, points: Iterable[tuple[int, int]] | None = None, progress: bool = False) -> list[dict]:
    """Which cache rows each call of T valid tokens at `pos` changed, on caches full of random rows.

    Returns:
        One record per (layer, state, T, pos): `changed` and `expected`, sorted lists of slots.
    """
    from tqdm.auto import tqdm

    o, records, rng = decoder.options, [], rng or np.random.default_rng(0)
    points = list(points or probe_points(o.max_seq_len, o.t_max, o.t == "fixed" and o.kv_write == "slice"))
    with decoder.set_aside():
        for model in tqdm(decoder.layers, desc="write addresses", unit="shard", disable=not progress):
            full = {n: rng.standard_normal(s.shape).astype(np.float16) for n, s in model.shard.states.items()}
            state = model.make_state()
            for T, pos in points:
                for name, value in full.items():
                    state.write(name, value)
                model.predict(_inputs(decoder, model.shard, rng, pos, T), state)
                for name, value in full.items():
                    if is_cache(name):
                        records.append(_changed(name, model.shard.states[name], value, state.read(name), T, pos))
    return records


def _changed(name: str, entry, before: np.ndarray, after: np.ndarray, T: int, pos: int) -> dict:
    differs = before.astype(np.float32) != np.asarray(after, np.float32)
    rows = np.flatnonzero(differs.any(axis=(0, 1, 3)))
    whole = np.flatnonzero(differs.any(axis=3).all(axis=(0, 1)))  # rows written in every head of every sequence
    expected = sorted({p % entry.ring if entry.ring else p for p in range(pos, pos + T)})
    return {"layer": int(name.split(".")[1]), "state": name.split(".")[-1], "T": T, "pos": pos,
            "changed": rows.tolist(), "expected": expected, "right": rows.tolist() == expected == whole.tolist()}  # fmt: skip


def _addresses(records: list[dict]) -> Gate:
    wrong = [r for r in records if not r["right"]]
    Ts = sorted({r["T"] for r in wrong or records})
    if not wrong:
        return gates.holds("write_address", True, f"exactly rows pos … pos + T − 1 changed, every other row bit-identical: "
                           f"{len(records)} calls, T in {Ts}, {len({r['pos'] for r in records})} positions")  # fmt: skip
    r = wrong[0]
    return gates.holds("write_address", False, f"{len(wrong)} of {len(records)} calls (T in {Ts}); first: layer {r['layer']} "
                       f"{r['state']}, T = {r['T']}, pos = {r['pos']}: rows {r['changed']} changed, expected {r['expected']}")  # fmt: skip


def cache_contents(decoder: Decoder, golden: Golden | None) -> Gate:
    """The rows written at T = 1 and at t_max hold the golden's K and V."""
    if golden is None:
        return gates.not_run("cache_contents", "needs --golden")
    limit, worst, at = gates.LIMITS[decoder.options.compress].kv_cosine, 1.0, "every row"
    for T in sorted({1, decoder.options.t_max}):
        rows = fidelity.compare_pass(fidelity.run_golden(decoder, golden, T), golden)
        rows = rows[rows["tensor"].isin(["k", "v"])]
        row = rows.loc[rows["cosine"].fillna(-2).idxmin()]
        if not row["cosine"] >= worst:
            worst, at = row["cosine"], f"layer {row['layer']} {row['tensor']}, position {row['position']}, T = {T}"
    return gates.at_least("cache_contents", worst, limit, f"worst cache row against the golden's: {at}")


def stale_rows(decoder: Decoder) -> Gate:
    """What lies in unwritten rows must not matter as long as it is finite: zeros against ±16 · max|K|."""
    worst = ""
    for model in decoder.layers:
        results = []
        for fill in (0.0, STALE_FACTOR):
            state, local = model.make_state(), np.random.default_rng(1)
            for name, entry in model.shard.states.items():
                if is_cache(name):
                    state.write(name, (fill * local.choice([-1.0, 1.0], entry.shape)).astype(np.float16))
            for call in range(2):  # two tokens, so that there is a real cache to be confused with
                out = _stream(model.predict(_inputs(decoder, model.shard, np.random.default_rng(2 + call), call, 1), state))
            results.append(out)
        if not np.array_equal(*results):
            worst = worst or f"{model.shard.name}: max |Δ| = {np.abs(results[0] - results[1]).max():.3g}"
    return gates.holds("stale_rows", not worst, worst or "finite values in unwritten rows change nothing, bit for bit")


def nan_is_noticed(decoder: Decoder, rng) -> Gate:
    """A NaN left in a cache row must surface in the output: an additive mask cannot hide it (0 · NaN)."""
    hidden = []
    for model in decoder.layers:
        state = model.make_state()
        name = next(n for n in model.shard.states if n.endswith(f".{V_STATE}"))
        value = np.zeros(model.shard.states[name].shape, np.float16)
        value[..., -1, :] = np.nan
        state.write(name, value)
        if np.isfinite(_stream(model.predict(_inputs(decoder, model.shard, rng, 0, 1), state))).all():
            hidden.append(model.shard.name)
    return gates.holds("nan_in_state_is_noticed", not hidden, f"swallowed by: {', '.join(hidden)}" if hidden
                       else "a NaN in an unwritten row reaches the output, where the finite gate sees it")  # fmt: skip


def overflow_raises(decoder: Decoder) -> Gate:
    """A token at position max_seq_len is refused before any state changes; experiment 30's runtime clamps and overwrites."""
    with decoder.set_aside():
        decoder.begin()
        decoder.offsets[:] = decoder.options.max_seq_len
        try:
            decoder.advance([[0]] * decoder.options.batch, 1)
            raised = False
        except InputError:
            raised = True
        touched = any(
            np.any(state.read(n))
            for m, state in zip(decoder.layers, decoder.states, strict=True)
            for n in m.shard.states
        )
    return gates.holds("overflow_raises", raised and not touched, "a token past max_seq_len is refused, no state touched"
                       if raised and not touched else "a token past max_seq_len was written")  # fmt: skip


def fits(bundle: Bundle, machine: int | None = None) -> Gate:
    """max_seq_len fits: weights, caches, embedding and buffers against the machine's memory."""
    budget = memory.budget_of_bundle(bundle, machine or memory.machine_bytes())
    reason = f"{budget.total / 2**20:.1f} MiB (caches {budget.kv / 2**20:.1f}) of {budget.machine / 2**30:.1f} GiB"
    return gates.at_most("memory", budget.total, budget.machine, reason)


def _stream(outputs: dict[str, np.ndarray]) -> np.ndarray:
    """The residual stream a shard hands on: its hidden output, or a router shard's base."""
    return outputs[HIDDEN] if HIDDEN in outputs else outputs[BASE]


def _inputs(decoder: Decoder, shard, rng, pos: int, T: int) -> dict[str, np.ndarray]:
    """Inputs of one shard for a call of T tokens at `pos` in every slot: real masks and tables, random activations."""
    B = decoder.options.batch
    width = decoder.options.t_max if decoder.options.t == "fixed" else T
    io = decoder.host.inputs(np.full(B, pos), np.full(B, T), width)
    return {name: io[name] if name in io else rng.standard_normal([width if n == "T" else n for n in shape]).astype(np.float32)
            for name, shape in shard.inputs.items()}  # fmt: skip
