"""Finds the operation of a bundle, or of any package, that a runtime computes wrongly.

`record_calls` runs a prompt on the portable runtime and keeps what every package was
called with; `search.Search` gives these calls to the runtime that is tested."""

import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from workbench.bundle import Bundle, Shard
from workbench.bundle.names import X
from workbench.check.states import default_ts
from workbench.decode import Decoder
from workbench.decode.shards import ShardCall
from workbench.errors import InputError
from workbench.explain.reduced import reduce
from workbench.explain.running import Arrays, Runner
from workbench.explain.search import CallPlace, Finding, PackageCall, Search
from workbench.runtime import Model, State, check_compute_units, is_device, resolve

# About how many packages a search runs inside a wrong shard, beside the shard itself.
EXTRA_PACKAGES = 20
# Until a new process has loaded and run a small package.
SECONDS_PER_PACKAGE = 6.0


@dataclass
class RecordedCalls:
    """The calls of one function of a package.

    Attributes:
        function: its name; None for the package's default.
        modules: value of the program → source module.
    """

    package: Path
    function: str | None
    modules: dict[str, str]
    calls: list[PackageCall] = field(default_factory=list)


@dataclass
class PromptCall:
    """One call of the layers over a prompt.

    Attributes:
        start: position of its first token.
        width: columns, those without a token included.
        counts: [B] tokens of each sequence.
        inputs: what the next shard reads; every shard of layers replaces it.
    """

    start: int
    width: int
    counts: np.ndarray
    inputs: Arrays

    def contains(self, position: int | None) -> bool:
        """Whether a column is that of the position; None: any position."""
        return position is None or self.start <= position < self.start + self.width


def prompt_calls(decoder: Decoder, ids: Sequence[int], T: int) -> Iterator[PromptCall]:
    """The calls of at most T tokens over a prompt that every sequence of the batch
    runs."""
    B = decoder.options.batch
    for start, end in decoder.options.tiling.calls(len(ids), T):
        width = decoder.options.tiling.width(end - start)
        chunk = [list(ids[start:end])] * B
        inputs = decoder.inputs(np.full(B, start), chunk, width)
        yield PromptCall(start, width, np.full(B, end - start), inputs)


def record_calls(
    decoder: Decoder,
    ids: Sequence[int],
    Ts: Sequence[int],
    layer: int | None = None,
    position: int | None = None,
) -> Iterator[RecordedCalls]:
    """Runs a prompt in calls of each T and yields the calls of every function of a
    package, experts and the parts of another exporter's shard included. The calls of
    one shard are in memory at a time.

    Args:
        layer: record the shards of this layer alone, and no head.
        position: record the calls that contain this position alone.
    """
    # the outer loop is over shards, so that the calls of one are in memory at a time
    calls_of_each_T = [list(prompt_calls(decoder, ids, T)) for T in Ts]
    for model in (*decoder.layer_shards, *decoder.heads):
        shard = model.shard
        is_wanted = layer is None or layer in shard.layer_range
        recorded: dict[tuple[Path, str | None], RecordedCalls] = {}
        for calls in calls_of_each_T:
            state = model.make_state()
            for call in calls:
                on_call = None
                if is_wanted and call.contains(position):
                    on_call = partial(record_call, recorded, shard, call)
                if shard.kind != "head":
                    call.inputs = run_shard(decoder, model, call, state, on_call)
                elif on_call:
                    # every head slice reads the last hidden state; its logits are not
                    # needed
                    on_call(model, {X: call.inputs[X]}, None)
        yield from recorded.values()
        # an expert belongs to one layer: its weights are not needed again
        decoder.experts.models.clear()


def run_shard(
    decoder: Decoder,
    model: Model,
    call: PromptCall,
    state: State,
    on_call: Callable | None,
) -> Arrays:
    """What the shard after `model` reads in a call: `Decoder.run_calls` for one call.

    Args:
        on_call: called before every call of a package, see `record_call`.
    """
    shard_call = ShardCall(call.inputs, call.counts, state)
    (values,) = decoder.run_calls(model, [shard_call], on_call)
    return values


def record_call(
    recorded: dict[tuple[Path, str | None], RecordedCalls],
    shard: Shard,
    call: PromptCall,
    model: Model,
    inputs: Arrays,
    state: State | None,
) -> None:
    """Adds a call of a package to `recorded`: the `on_call` of `Decoder.run_calls`."""
    key = model.path, model.function_name(inputs)
    if key not in recorded:
        # the packages of another exporter are parts of one shard
        modules = (model.shard or shard).modules
        recorded[key] = RecordedCalls(*key, modules)
    before = {name: state.read_tensor(name) for name in model.program.states}
    layers = list(shard.layer_range)
    place = CallPlace(model.path.stem, call.start, call.width, layers)
    recorded[key].calls.append(PackageCall(inputs | before, place))


def estimate_cost(bundle: Bundle, layer: int | None = None) -> tuple[int, float]:
    """How many packages a search of a sound bundle runs, and about how many seconds
    that takes on a device. A wrong shard adds about `EXTRA_PACKAGES`."""
    count = 0
    for shard in bundle.manifest.shards:
        if layer is not None and layer not in shard.layer_range:
            continue
        if shard.foreign:
            parts = shard.foreign.parts
            count += sum(len(shard.foreign.functions_of(part)) for part in parts)
        else:
            count += len(shard.functions) or 1
    return count, SECONDS_PER_PACKAGE * count


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
    report: Callable[[int], None] | None = None,
) -> Finding:
    """The first shard, call and operation that `runtime` computes wrongly over `ids`.
    The portable runtime's `declared` arithmetic is compared with `exact`, any other
    runtime with `declared`.

    Args:
        layer: search the shards of this layer alone.
        position: search the calls that contain this position alone.
        T: search calls of this many tokens alone.
        out: a folder for the smallest package that shows the fault.
        stop: an event; once it is set, the search is cancelled.
        report: called after every package with the number of packages so far (see
            `estimate_cost`).

    Raises:
        InputError: no such runtime or compute units, no such cell, programs of another
            target.
        process.Cancelled: `stop` was set.
    """
    runtime = resolve(runtime)
    check_compute_units(compute_units)
    precision = "declared" if is_device(runtime) else "exact"
    runner = Runner(runtime, compute_units, stop, report)
    decoder = Decoder(bundle, "portable", precision)
    Ts = [T] if T else default_ts(decoder.options)
    finding = None
    with tempfile.TemporaryDirectory() as folder:
        for recorded in record_calls(decoder, ids, Ts, layer, position):
            search = Search(
                recorded.package,
                recorded.function,
                recorded.modules,
                runner,
                precision,
                folder,
            )
            finding, proof = search.find(recorded.calls)
            if finding.verdict != "none":
                break
        if not finding:
            actual = f"layer {layer}, position {position}, T {T}"
            needed = "a layer of the bundle, and a position and T of the prompt's calls"
            raise InputError("calls to search", actual, needed, "choose others")
        finding.packages = runner.packages
        if out and proof:
            finding.reduced = reduce(search, finding, proof, out)
    return finding


def find_in_package(package: Path, inputs: Arrays) -> Finding:
    """The operation of any package that `declared` arithmetic computes wrongly in one
    call from a state of zeros; see `find`."""
    runner = Runner("portable", "CPU_AND_NE")
    with tempfile.TemporaryDirectory() as folder:
        search = Search(package, None, {}, runner, "exact", folder)
        zeros = {}
        for name, kind in search.flow.program.states.items():
            zeros[name] = np.zeros(kind.shape, np.float32)
        finding, _ = search.find([PackageCall(inputs | zeros)])
    finding.packages = runner.packages
    return finding
