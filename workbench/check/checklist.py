"""The checklist of chapter 5 (see README, "The course") as gates on a bundle alone:
interface, state lifetime, write addresses, stale rows. No golden is needed: each gate
checks a property that the program must have for any weights."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np

import miltorch
from miltorch import Program
from workbench.ane import memory
from workbench.bundle import Bundle, Manifest, Options, Shard
from workbench.bundle.names import BASE, HIDDEN, K_STATE, V_STATE, is_cache, split_layer
from workbench.check import fidelity, gates, interface, metrics
from workbench.check.gates import Gate
from workbench.check.golden import Golden, constants
from workbench.decode import Decoder
from workbench.errors import InputError
from workbench.runtime import Model, State, load_shard

# weights that make a layer add nothing where they are zeros
SILENCING = (
    "v_proj.weight",
    "o_proj.weight",
    "self_attn.out_proj.weight",
    ".conv.out_proj.weight",
    "linear_attn.out_proj.weight",
    "mamba.out_proj.weight",
)
SMALL_STATE = 32  # up to this S every (T, pos) is probed
STALE_FACTOR = 16
DTYPES = {"fp16": "FLOAT16", "fp32": "FLOAT32"}
SMALLEST_NORMAL = 2.0**-14  # of float16


def check_bundle(
    decoder: Decoder,
    *,
    golden: Golden | None = None,
    machine: int | None = None,
    progress: bool = False,
) -> list[Gate]:
    """Runs every gate of the checklist; each reason says what was compared.

    Args:
        golden: also compares the written rows with it.
        machine: bytes of memory of the target machine (default: this one's).
    """
    contents = [fidelity.of_this_checkpoint(decoder, golden)] if golden else []
    with decoder.set_aside():
        addresses = _addresses(write_probe(decoder, progress=progress))
        return [
            *interface_gates(decoder.bundle),
            *lifetime(decoder),
            addresses,
            *contents,
            cache_contents(decoder, golden),
            stale_rows(decoder),
            nan_is_noticed(decoder),
            subnormals_are_kept(decoder),
            overflow_raises(decoder),
            fits(decoder.bundle, machine),
        ]


def interface_gates(bundle: Bundle) -> list[Gate]:
    """State shapes and dtype as declared in the package; K and V are states, never
    inputs or outputs."""
    manifest = bundle.manifest
    shapes = []
    leaks = []
    for shard, program in _programs(bundle):
        for name in shard.states:
            if fault := _state_fault(manifest, shard, name, program):
                shapes.append(f"{shard.name}: {name} is {fault}")
        leaks += [
            f"{shard.name}: {fault}" for fault in _leaks(manifest, shard, program)
        ]
    dtype = manifest.options.program_dtype
    as_declared = f"every state is {dtype} and as declared, [B, H_kv, S, D]"
    are_states = "K and V are states of every layer, not inputs or outputs"
    return [
        gates.none("state_shapes", shapes, as_declared, sep="; "),
        gates.none("kv_are_states", leaks, are_states, sep="; "),
    ]


def _state_fault(
    manifest: Manifest, shard: Shard, name: str, program: Program
) -> str | None:
    """What the state `name` of a shard wrongly is; None where it is as declared."""
    d = manifest.dims
    o = manifest.options
    entry = shard.states[name]
    state = program.states.get(entry.tensor)
    if state is None:
        return "absent"
    if state.dtype != DTYPES[o.program_dtype]:
        return state.dtype
    if entry.part is None and list(state.shape) != entry.shape:
        return f"{list(state.shape)}, not {entry.shape}"
    expected = [o.batch, d.H_kv, o.max_seq_len, d.D]
    if is_cache(name) and entry.ring is None and entry.shape != expected:
        return f"{entry.shape}, not [B, H_kv, S, D]"
    return None


def _leaks(manifest: Manifest, shard: Shard, program: Program) -> Iterator[str]:
    """Caches of a shard that are no states, and inputs that look like caches."""
    attending = [i for i in range(*shard.layers) if manifest.layers[i].attends]
    caches = {f"layers.{i}.{n}" for i in attending for n in (K_STATE, V_STATE)}
    if missing := caches - shard.states.keys():
        yield f"{', '.join(sorted(missing))} no state"
    d = manifest.dims
    S = manifest.options.max_seq_len
    for name, kind in program.inputs.items():
        if list(kind.shape[1:]) == [d.H_kv, S, d.D]:
            yield f"input {name} has the shape of a cache"


def _programs(bundle: Bundle) -> Iterator[tuple[Shard, Program]]:
    """Each shard of layers with its program's interface, once for each of its
    functions."""
    for shard in bundle.shards("layers"):
        if bundle.manifest.options.target == "coreai":
            yield shard, load_shard(bundle, shard).program
        else:
            for function in shard.functions or [None]:
                yield shard, miltorch.read(bundle.package(shard), function)


def lifetime(decoder: Decoder) -> list[Gate]:
    """One make_state per sequence: a state carries over calls, a fresh one is zeros and
    forgets, two do not mix."""
    shards = {"dirty": [], "unused": [], "mute": [], "mixed": []}
    for model in decoder.layers:
        for fault in _lifetime_fault(decoder, model):
            shards[fault].append(model.shard.name)
    mute = [f"{shard} has all-zero attention weights" for shard in shards["mute"]]
    skipped = f"skipped: {', '.join(mute)}"
    used = "every shard's second token depends on its first through the state"
    if mute:
        used += f"; {skipped}"
    no_trace = "the first token leaves no trace in: "
    is_used = gates.none("state_is_used", shards["unused"], used, no_trace)
    if len(mute) == len(decoder.layers):
        is_used = gates.not_run("state_is_used", skipped)
    zeros = "make_state gives zeros"
    independent = (
        "two states on one model, used in turn, give what each gives alone, bit for bit"
    )
    differ = "interleaved states differ in: "
    return [
        is_used,
        gates.none("fresh_state_is_zero", shards["dirty"], zeros, "not zeros: "),
        gates.none("states_are_independent", shards["mixed"], independent, differ),
    ]


def _lifetime_fault(decoder: Decoder, model) -> set[str]:
    """What one shard does wrong: a fresh state is `dirty`; the second token's output
    does not depend on the first, since the state is `unused` or attention is `mute`;
    two states used in turn are `mixed`."""
    faults, (alone, fresh, a, b) = set(), (model.make_state() for _ in range(4))
    if any(np.any(fresh.read(name)) for name in model.shard.states):
        faults.add("dirty")
    _call(decoder, model, alone, 0)
    second = _call(decoder, model, alone, 1)
    if np.array_equal(second, _call(decoder, model, fresh, 1), equal_nan=True):
        faults.add("mute" if _mute(decoder, model.shard) else "unused")
    _call(decoder, model, a, 0)
    _call(decoder, model, b, 0, seed=1)
    if not np.array_equal(_call(decoder, model, a, 1), second):
        faults.add("mixed")
    return faults


def _mute(decoder: Decoder, shard) -> bool:
    """Whether every layer of a shard has a v_proj or o_proj of zeros, as pruned layers
    and layers added as identities do."""
    values_of = constants(decoder.bundle, shard)
    silent = {
        split_layer(tensor)[0]
        for tensor, name in shard.weights.items()
        if tensor.endswith(SILENCING) and not values_of(name).any()
    }
    return len(silent) == len(range(*shard.layers))


def probe_points(options: Options) -> list[tuple[int, int]]:
    """(T, pos) pairs: all of a small cache, else the ends, the middle and powers of two
    ± 1."""
    S = options.max_seq_len
    Ts = fidelity.callable_ts(options)
    if not options.shapes or options.kv_write == "mask":
        Ts = sorted({*Ts, options.t_max // 2 or 1})
    places = {*range(S)}
    if S > SMALL_STATE:
        marks = np.array([0, S // 2, *(2 ** np.arange(3, S.bit_length()))])
        places = {*np.add.outer(marks, (-1, 0, 1)).ravel().tolist()}
    points = []
    for T in Ts:
        last = S - T
        near = (places | {last - 1, last}) & {*range(last + 1)}
        points += [(T, pos) for pos in sorted(near)]
    return points


def write_probe(
    decoder: Decoder,
    points: Iterable[tuple[int, int]] | None = None,
    progress: bool = False,
) -> list[dict]:
    """Which cache rows each call of T valid tokens at `pos` changed, on caches full of
    random rows.

    Returns:
        One record per (layer, state, T, pos): `changed` and `expected`, sorted lists of
        rows.
    """
    from tqdm.auto import tqdm

    records = []
    rng = np.random.default_rng(0)
    points = list(points or probe_points(decoder.options))
    with decoder.set_aside():
        for model in tqdm(
            decoder.layers, desc="write addresses", unit="shard", disable=not progress
        ):
            entries = model.shard.states
            state = model.make_state()
            full = {
                n: _normal(rng.standard_normal(s.shape)) for n, s in entries.items()
            }
            for T, pos in points:
                for name, value in full.items():
                    state.write(name, value)
                _call(decoder, model, state, pos, T)
                for name in filter(is_cache, full):
                    values = full[name], state.read(name)
                    records.append(_changed(name, entries[name], *values, T, pos))
    return records


def _normal(values: np.ndarray) -> np.ndarray:
    """Values as float16, the smallest of them normal numbers: a device may make 0 of
    subnormal ones."""
    values = values.astype(np.float16)
    small = np.abs(values) < SMALLEST_NORMAL
    return np.where(small, np.float16(SMALLEST_NORMAL), values)


def _changed(
    name: str, entry, before: np.ndarray, after: np.ndarray, T: int, pos: int
) -> dict:
    differs = before.astype(np.float32) != np.asarray(after, np.float32)
    rows = np.flatnonzero(differs.any(axis=(0, 1, 3))).tolist()
    # rows written in every head of every sequence
    whole = np.flatnonzero(differs.any(axis=3).all(axis=(0, 1))).tolist()
    positions = np.arange(pos, pos + T)
    if entry.ring:
        positions %= entry.ring
    expected = np.unique(positions).tolist()
    _, layer, state = name.split(".")
    return {
        "layer": int(layer),
        "state": state,
        "T": T,
        "pos": pos,
        "changed": rows,
        "expected": expected,
        "right": rows == expected == whole,
    }


def _addresses(records: list[dict]) -> Gate:
    wrong = [r for r in records if not r["right"]]
    Ts = sorted({r["T"] for r in wrong or records})
    reason = (
        f"exactly rows pos … pos + T − 1 changed, every other row bit-identical: "
        f"{len(records)} calls, T in {Ts}, {len({r['pos'] for r in records})} positions"
    )
    if wrong:
        first = "layer {layer} {state}, T = {T}, pos = {pos}: rows {changed} changed"
        first = (first + ", expected {expected}").format(**wrong[0])
        reason = f"{len(wrong)} of {len(records)} calls (T in {Ts}); first: {first}"
    return gates.holds("write_address", not wrong, reason)


def cache_contents(decoder: Decoder, golden: Golden | None) -> Gate:
    """The rows written at T = 1 and at t_max, or by every function, are the golden's K
    and V of their own positions.

    The value is the worst layer's distance from them over its distance from the
    golden's rows of the nearest shift, each row beside another position's: compression
    moves rows, but none to the place of another."""
    if golden is None:
        return gates.not_run("cache_contents", "needs --golden")
    ratios = []
    for T in decoder.options.functions or sorted({1, decoder.options.t_max}):
        trace = fidelity.run_golden(decoder, golden, T)
        tensors = ("k", trace.k, golden.k), ("v", trace.v, golden.v)
        for name, caches, reference in tensors:
            for layer, cache in caches.items():
                rows = trace.cached[layer]
                ratio = _own_over_shifted(reference[layer][:, rows], cache[:, rows])
                ratios.append((ratio, f"layer {layer} {name}, T = {T}"))
    reason = "distance from the golden's rows over that from rows of other positions: "
    return gates.all_at_most("cache_contents", ratios, 1.0, reason)


def _own_over_shifted(reference: np.ndarray, rows: np.ndarray) -> float:
    """Distance of `rows` [H_kv, n, D] from `reference` over the smallest one from
    `reference` shifted by 1 … n − 1 rows."""
    own = np.linalg.norm(reference - rows)
    shifted = [
        np.linalg.norm(np.roll(reference, by, axis=1) - rows)
        for by in range(1, rows.shape[1])
    ]
    return float(metrics.over(own, min(shifted, default=np.inf)))


def stale_rows(decoder: Decoder) -> Gate:
    """Finite values in unwritten rows must not change the output: zeros are compared with ±16 ·
    max|K|."""
    differing = []
    for model in decoder.layers:
        streams = []
        for fill in (0.0, STALE_FACTOR):
            state = _filled(model, fill, seed=1)
            _call(decoder, model, state, 0)
            # the second token reads a cache row
            streams.append(_call(decoder, model, state, 1))
        if not np.array_equal(*streams):
            largest = np.abs(np.subtract(*streams)).max()
            differing.append(f"{model.shard.name}: max |Δ| = {largest:.3g}")
    fine = "finite values in unwritten rows change nothing, bit for bit"
    return gates.none("stale_rows", differing[:1], fine)


def _filled(model: Model, magnitude: float, seed: int) -> State:
    """A state whose caches hold ± `magnitude` in every row."""
    state = model.make_state()
    rng = np.random.default_rng(seed)
    for name, entry in model.shard.states.items():
        if is_cache(name):
            signs = rng.choice([-1.0, 1.0], entry.shape)
            state.write(name, (magnitude * signs).astype(np.float16))
    return state


def nan_is_noticed(decoder: Decoder) -> Gate:
    """A NaN in a cache row must reach the output, because an additive mask does not
    remove it (0 · NaN)."""

    def swallows(model) -> bool:
        state = model.make_state()
        name = next(n for n in model.shard.states if n.endswith(f".{V_STATE}"))
        value = np.zeros(model.shard.states[name].shape, np.float16)
        value[..., -1, :] = np.nan
        state.write(name, value)
        return bool(np.isfinite(_call(decoder, model, state, 0)).all())

    fine = "a NaN in an unwritten row reaches the output, where the finite gate sees it"
    return _on_portable(
        decoder, "nan_in_state_is_noticed", swallows, fine, "swallowed by: "
    )


def subnormals_are_kept(decoder: Decoder) -> Gate:
    """Subnormal numbers in unwritten cache rows stay as they are over a call."""

    def flushes(model) -> bool:
        state = _filled(model, SMALLEST_NORMAL / 2, seed=2)
        _call(decoder, model, state, 0)
        caches = (name for name in model.shard.states if is_cache(name))
        last = (np.abs(state.read(name)[..., -1, :]) for name in caches)
        return any((rows != SMALLEST_NORMAL / 2).any() for rows in last)

    fine = "subnormal numbers in unwritten rows are unchanged"
    return _on_portable(
        decoder, "subnormals_in_state_are_kept", flushes, fine, "changed by: "
    )


def _on_portable(
    decoder: Decoder, name: str, fails: Callable[[Model], bool], fine: str, lead: str
) -> Gate:
    """A gate that the program must pass in portable arithmetic, a Core AI program in
    its own. Devices are known to treat NaN and subnormal numbers differently; their
    result is part of the reason and does not decide the verdict."""

    def failing(models: Iterable[Model]) -> list[str]:
        return [model.shard.name for model in models if fails(model)]

    models = [m for m in decoder.layers if any(map(is_cache, m.shard.states))]
    own = failing(models)
    if decoder.runtime in ("portable", "coreai"):
        return gates.none(name, own, fine, lead)
    on_portable = failing(
        load_shard(decoder.bundle, model.shard, "portable") for model in models
    )
    note = "the same"
    if own != on_portable:
        note = lead + (", ".join(own) or "none")
    gate = gates.none(name, on_portable, fine, lead)
    device = f"{decoder.runtime} on {decoder.compute_units}"
    return replace(gate, reason=f"{gate.reason}; {device}: {note}")


def overflow_raises(decoder: Decoder) -> Gate:
    """A token at position max_seq_len is refused before any state changes; experiment
    30's runtime clamps and overwrites."""
    faults = ["a token past max_seq_len was written"]
    with decoder.set_aside():
        decoder.begin()
        decoder.offsets[:] = decoder.options.max_seq_len
        try:
            decoder.advance([[0]] * decoder.options.batch, 1)
        except InputError:
            if not any(np.any(s.read(name)) for s, name in decoder.named_states):
                faults = []
    fine = "a token past max_seq_len is refused, no state touched"
    return gates.none("overflow_raises", faults, fine)


def fits(bundle: Bundle, machine: int | None = None) -> Gate:
    """Compares the bytes of weights, caches, embedding and buffers with the machine's
    memory (70% of it on a Mac)."""
    budget = memory.budget_of_bundle(bundle, machine or memory.machine_bytes())
    reason = f"{budget.total / 2**20:.1f} MiB (caches {budget.kv / 2**20:.1f})"
    reason += f" of {budget.machine / 2**30:.1f} GiB"
    return gates.at_most(
        "memory", budget.total, memory.usable_bytes(budget.machine), reason
    )


def _call(
    decoder: Decoder, model, state, pos: int, T: int = 1, seed: int = 0
) -> np.ndarray:
    """The residual stream (hidden, or a router shard's base) after one call of T tokens
    at `pos` in every sequence, on real masks and tables and random activations, the
    same for the same pos and seed."""
    B = decoder.options.batch
    width = decoder.options.width(T)
    io = decoder.host.inputs(np.full(B, pos), np.full(B, T), width)
    rng = np.random.default_rng((seed, pos))
    inputs = {}
    for name, shape in model.shard.inputs.items():
        inputs[name] = io.get(name)
        if name not in io:
            activations = rng.standard_normal(interface.sizes(shape, width))
            inputs[name] = activations.astype(np.float32)
    outputs = model.predict(inputs, state)
    return outputs[HIDDEN] if HIDDEN in outputs else outputs[BASE]
