"""Finds the operation of a bundle, or of any package, that a runtime computes wrongly;
see `search`."""

import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from workbench.bundle import Bundle
from workbench.bundle.names import X
from workbench.check.run import default_ts
from workbench.decode import Decoder
from workbench.errors import InputError
from workbench.explain.reduced import reduce
from workbench.explain.running import Call, Runner
from workbench.explain.search import Finding, Search
from workbench.runtime import Model, check_compute_units, is_device, resolve

MORE = 10  # packages, about, that a wrong shard needs beside its own
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
    options = decoder.options
    steps = []
    for T in Ts:
        start = 0
        while start < len(ids):
            count = options.taken(min(T, len(ids) - start))
            chunk = [list(ids[start : start + count])] * options.batch
            width = options.width(count)
            io = decoder.inputs(np.full(len(chunk), start), chunk, width)
            where = {"position": start, "T": width}
            steps.append((where, np.full(len(chunk), count), io))
            start += count
    found: dict[tuple, tuple[dict, list[Call]]] = {}
    where: dict[str, int] = {}

    def keep(model: Model, modules: dict, run: Callable, calls, states, hooks):
        start = where["position"]
        (inputs,), (state,) = calls, states
        if position is None or start <= position < start + where["T"]:
            key = model.package, model.functions[model.of_call(inputs)]
            before = {name: state.raw.read(name) for name in model.program.states}
            call = Call(inputs, before, {"shard": model.package.stem} | where)
            found.setdefault(key, (modules, []))[1].append(call)
        return run(calls, states, hooks)

    for model in (*decoder.layers, *decoder.heads):
        shard = model.shard
        if layer is None or layer in range(*shard.layers):
            for own in _packages(decoder, model):
                modules = (own.shard or shard).modules
                own.predict_calls = partial(keep, own, modules, own.predict_calls)
        for at, counts, io in steps:
            if at["position"] == 0:
                state = model.make_state()
            where |= at
            if shard.kind == "head":  # every one reads the same
                where.pop("layer", None)
                model.predict({X: io[X]})
            else:
                where["layer"] = shard.layers[0]
                io |= decoder.run_calls(model, [io], [counts], [state], [None])[0]
        yield from ((*key, *about) for key, about in found.items())
        found.clear()
        decoder.experts.models.clear()


def _packages(decoder: Decoder, model: Model) -> Iterator[Model]:
    """The model of each package that a shard runs."""
    if hasattr(model, "models"):  # packages of another exporter
        for functions in model.models:
            yield from functions.values()
        return
    yield model
    if model.shard.kind == "router":
        for layer, expert in decoder.experts.shards:
            if layer == model.shard.layers[0]:
                yield decoder.experts.model(layer, expert)


def cost(bundle: Bundle, layer: int | None = None) -> tuple[int, float]:
    """Packages that a search of a sound bundle runs, and about how many seconds on a
    device; a wrong shard takes about `MORE` packages beside them."""
    packages = 0
    for shard in bundle.manifest.shards:
        if layer is None or layer in range(*shard.layers):
            functions = len(shard.functions) or 1
            if foreign := shard.foreign:
                functions = sum(len(foreign.functions_of(p)) for p in foreign.parts)
            packages += functions
    return packages, SECONDS * packages


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

    Answers of packages lie beside the bundle until the search ends, so that one that
    was cancelled goes on where it was.

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
    store = bundle.root.with_name(f".{bundle.root.name}.cuts-{bundle.identity[:10]}")
    run = Runner(runtime, compute_units, store, stop, report)
    decoder = Decoder(bundle, "portable", base)
    cell = ids, [T] if T else default_ts(decoder.options), layer, position
    found = None
    with tempfile.TemporaryDirectory() as folder:
        for package, function, modules, calls in questions(decoder, *cell):
            search = Search(package, function, run, folder, base, modules)
            found = search.find(calls)
            if found.verdict != "none":
                break
        if not found:
            cell = f"layer {layer}, position {position}, T {T}"
            needed = "one of the bundle and the prompt"
            raise InputError("cell", cell, needed, "see --help")
        found.packages = run.packages
        if out and search.proof:
            found.reduced = reduce(search, found, out)
    shutil.rmtree(store, ignore_errors=True)
    return found


def find_in_package(package: Path, inputs: dict[str, np.ndarray]) -> Finding:
    """The operation of any package that `declared` arithmetic computes wrongly in one
    call from an empty state; see `find`."""
    with tempfile.TemporaryDirectory() as folder:
        run = Runner("portable", "CPU_AND_NE", Path(folder))
        search = Search(package, None, run, folder, "exact", {})
        states = search.flow.program.states.items()
        empty = {name: np.zeros(kind.shape, np.float32) for name, kind in states}
        found = search.find([Call(inputs, empty)])
        found.packages = run.packages
        return found
