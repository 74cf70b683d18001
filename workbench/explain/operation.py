"""Finds the operation of a bundle, or of any package, that a runtime computes wrongly;
see `search`."""

import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from workbench.bundle import Bundle
from workbench.bundle.names import X
from workbench.check.golden import Golden
from workbench.check.hf import Values
from workbench.check.run import Pass
from workbench.check.states import default_ts
from workbench.decode import Decoder
from workbench.errors import InputError
from workbench.explain.reduced import reduce
from workbench.explain.running import Runner
from workbench.explain.search import Call, Finding, Search
from workbench.explain.trace import packages
from workbench.runtime import Model, check_compute_units, is_device, resolve

MORE = 20  # packages, about, that a wrong shard needs beside its own
SECONDS = 6.0  # that a process takes until it has loaded a small package


def questions(
    decoder: Decoder,
    ids: Sequence[int],
    Ts: Sequence[int],
    layer: int | None = None,
    position: int | None = None,
) -> Iterator[tuple[Path, str | None, dict, list[Call]]]:
    """(package, function, source modules by value, calls) of every package that a
    prompt in calls of each T runs, experts and the parts of foreign shards included;
    one shard's calls are in memory at a time."""
    goldens = [Golden(np.array(ids), {}, {})] * decoder.options.batch
    steps = []
    for T in Ts:
        chunks = Pass(decoder, goldens, T, isolated=False)
        steps += zip(chunks.calls, chunks.ios)
    found: dict[tuple, tuple[dict, list[Call]]] = {}
    where: dict = {}

    def keep(own, run, calls, states, hooks):
        start = where["position"]
        (inputs,), (state,) = calls, states
        asked = layer is None or layer in range(*shard.layers)
        if asked and (position is None or start <= position < start + where["T"]):
            key = own.package, own.functions[own.T_of(inputs)]
            before = {name: state.read_tensor(name) for name in own.program.states}
            about = {"shard": own.package.stem} | where
            modules = (own.shard or shard).modules
            found.setdefault(key, (modules, []))[1].append((inputs | before, about))
        return run(calls, states, hooks)

    def watched(own: Model) -> Model:
        own.predict_calls = partial(keep, own, own.predict_calls)
        return own

    experts = decoder.experts
    load = experts.load
    experts.load = lambda shard: watched(load(shard))
    for model in (*decoder.layers, *decoder.heads):
        shard = model.shard
        for own in packages(model):
            watched(own)
        for call, io in steps:
            start = int(call.position[0])
            where |= {"position": start, "T": call.width}
            where["layers"] = [*range(*shard.layers)]
            if not start:
                state = model.make_state()
            if shard.kind == "head":  # every one reads the same
                model.predict({X: io[X]})
            else:
                run = decoder.run_calls
                io |= run(model, [io], [call.counts], [state], [None])[0]
        yield from ((*key, *about) for key, about in found.items())
        found.clear()
        experts.models.clear()


def cost(bundle: Bundle, layer: int | None = None) -> tuple[int, float]:
    """Packages that a search of a sound bundle runs, and about how many seconds on a
    device; a wrong shard takes about `MORE` packages beside them."""
    count = 0
    for shard in bundle.manifest.shards:
        if layer is None or layer in range(*shard.layers):
            functions = len(shard.functions) or 1
            if foreign := shard.foreign:
                functions = sum(len(foreign.functions_of(p)) for p in foreign.parts)
            count += functions
    return count, SECONDS * count


def find(
    bundle: Bundle,
    ids: Sequence[int],
    *,
    runtime: str = "auto",
    compute_units: str = "CPU_AND_NE",
    layer: int | None = None,
    position: int | None = None,
    T: int | None = None,
    out: Path | None = None,
    stop: threading.Event | None = None,
    report: Callable[[int], None] = lambda count: None,
) -> Finding:
    """The first shard, call and operation that `runtime` computes wrongly over `ids`.
    The portable runtime's `declared` arithmetic is compared with `exact`, any other
    runtime with `declared`.

    Args:
        layer: searches the shards of this layer alone.
        position: searches the calls of this position alone.
        T: searches calls of so many tokens alone.
        out: a folder for the smallest package that shows the fault.
        stop: an event; once it is set, the search is cancelled.
        report: called after every package with the number so far (see `cost`).

    Raises:
        InputError: no such runtime or units, no such cell, programs of another target.
        process.Cancelled: `stop` was set.
    """
    runtime = resolve(runtime)
    check_compute_units(compute_units)
    base = "declared" if is_device(runtime) else "exact"
    run = Runner(runtime, compute_units, stop, report)
    decoder = Decoder(bundle, "portable", base)
    cell = [T] if T else default_ts(decoder.options), layer, position
    found = None
    with tempfile.TemporaryDirectory() as folder:
        for *program, calls in questions(decoder, ids, *cell):
            search = Search(*program, run, base, folder)
            found = search.find(calls)
            if found.verdict != "none":
                break
        if not found:
            actual = f"layer {layer}, position {position}, T {T}"
            needed = "one of the bundle and the prompt"
            raise InputError("cell", actual, needed, "see --help")
        found.packages = run.packages
        if out and search.proof:
            found.reduced = reduce(search, found, out)
    return found


def find_in_package(package: Path, inputs: Values) -> Finding:
    """The operation of any package that `declared` arithmetic computes wrongly in one
    call from an empty state; see `find`."""
    run = Runner("portable", "CPU_AND_NE")
    with tempfile.TemporaryDirectory() as folder:
        search = Search(package, None, {}, run, "exact", folder)
        states = search.flow.program.states.items()
        empty = {name: np.zeros(kind.shape, np.float32) for name, kind in states}
        found = search.find([(inputs | empty, {})])
    found.packages = run.packages
    return found
