"""Finds the operation that a runtime computes wrongly, from packages that show chosen
inner values.

A value is outside when it is further from portable arithmetic than fp16 rounding
explains, by the rule of gate `device`. Bisection finds the earliest such value whose
operands are inside. An operation is named only if its own result, recomputed from the
operands that the runtime itself showed, is outside too: inherited errors are not."""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

import miltorch
from workbench import process
from workbench.bundle import Bundle
from workbench.check import metrics
from workbench.check.compare import HALF_ULP
from workbench.check.device import DEVICE_FACTOR
from workbench.check.run import default_ts
from workbench.decode import Decoder
from workbench.errors import InputError
from workbench.explain.cut import SHOWN, Flow, cut, values
from workbench.runtime import check_compute_units, open_model, resolve

WIDTH = 8  # values that a package shows beside its own outputs
NEAR = 5  # steps back from a wrong value within which its cause is looked for
SMALLEST = 2.0**-25  # half of the smallest fp16 number
# package, function, calls → of each call the outputs and then the states
Run = Callable[[Path, str | None, list], process.Outcome]


@dataclass(frozen=True)
class Call:
    """One call: inputs and, by tensor, the states before it."""

    inputs: dict[str, np.ndarray]
    states: dict[str, np.ndarray]
    where: dict = field(default_factory=dict)


@dataclass
class Finding:
    """What a search found.

    Attributes:
        verdict: `none` (nothing is outside), `operation`, `together` (operations that
            are wrong as long as no value between them is shown), `breaks` (no package
            with the operation compiles or runs), `uncertain`.
        ops: the operations, earliest first: op (its name), kind, module, value, shard.
        times: the error over what rounding explains, inf where one side is finite.
        packages, seconds: what was compiled and run.
    """

    verdict: str
    reason: str
    ops: list[dict] = field(default_factory=list)
    times: float | None = None
    where: dict = field(default_factory=dict)
    packages: int = 0
    seconds: float = 0.0
    # for `reduce`: indices of the operations, the wrong value, what the runtime showed
    region: tuple = ()

    def json(self) -> dict:
        found = asdict(self)
        del found["region"]
        return found


def predict(runtime: str, units: str, package: Path, function, calls: list) -> list:
    """Runs calls on one loaded package; an importable function for `process.call`.

    Raises:
        InputError: a package that the runtime does not compile, load or run on `units`.
    """
    model = open_model(package, runtime, compute_units=units, function=function)
    results = []
    for call in calls:
        state = model.make_state()
        for name in model.program.states:
            state.write(name, call.states[name])
        inputs = {name: call.inputs[name] for name in model.program.inputs}
        outputs = model.predict(inputs, state)
        states = {name: state.read(name) for name in model.program.states}
        results.append(outputs | states)
    if refused := process.invalidating(process.core_ml_messages()):
        raise InputError(
            f"package {package.name}", refused[0], units, "try other --compute-units"
        )
    return results


def runner(runtime: str, units: str) -> Run:
    """Runs each package in a process of its own."""

    def run(package, function, calls):
        return process.call(predict, runtime, units, package, function, calls)

    return run


def beyond(base: np.ndarray, other: np.ndarray, value: np.ndarray) -> float:
    """RMS of value − base in units of base − other, or of half an ulp: the distance of
    gate `device`. Inf where one is finite and the other is not."""
    if base.dtype.kind != "f":
        near = (value == base) | (value == other)
        return 0.0 if near.all() else np.inf
    finite = np.isfinite(base)
    if not np.array_equal(base[~finite], value[~finite], equal_nan=True):
        return np.inf
    if not np.isfinite(value[finite]).all():
        return np.inf
    base, value, other = (np.float64(x[finite]) for x in (base, value, other))
    other = np.where(np.isfinite(other), other, base)
    if not len(base):
        return 0.0
    limit = max(metrics.rms(base, other), HALF_ULP * metrics.rms(base))
    return float(metrics.over(metrics.rms(base, value), limit))


def sharply(base: np.ndarray, other: np.ndarray, value: np.ndarray) -> float:
    """As `beyond`, for results of the same operands: the worst element, in half ulps of
    its own or the largest |base − other|."""
    times = beyond(base, other, value)
    if base.dtype.kind != "f" or not np.isfinite(times):
        return times
    finite = np.isfinite(base) & np.isfinite(other)
    base, value, other = (np.float64(x[finite]) for x in (base, value, other))
    rounding = np.maximum(HALF_ULP * np.abs(base), SMALLEST)
    sums = np.abs(base - other).max(initial=0.0)
    return float((np.abs(value - base) / np.maximum(rounding, sums)).max(initial=0.0))


class Search:
    """Searches one function of a package.

    Args:
        run: what computes it.
        base: precision of the portable arithmetic that it is compared with.
        modules: value → source module.
        report: called after every package with the number so far.
    """

    def __init__(
        self,
        package: Path,
        function: str | None,
        run: Run,
        base: str = "declared",
        modules: dict[str, str] | None = None,
        report: Callable[[int], None] = lambda count: None,
    ):
        self.package, self.function, self.modules = package, function, modules or {}
        self.flow = Flow(miltorch.read(package, function))
        self.run, self.report, self.packages = run, report, 0
        self.precisions = base, "narrow"
        self.whole = self._executables(self.flow.program)
        self.dark: set[str] = set()  # values that no package shows

    def find(self, calls: Sequence[Call]) -> Finding:
        """The earliest operation that is wrong in the first call that has one."""
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            self.folder = Path(folder)
            found = self._find(calls)
        found.packages = self.packages
        if found.verdict != "none":
            found.where = self.call.where
        found.seconds = time.monotonic() - start
        return found

    def _find(self, calls: Sequence[Call]) -> Finding:
        self.call = calls[0]
        outcome = self._run(self.package, calls)
        if outcome.failure:
            return self._breaking(outcome.failure, calls)
        for self.call, shown in zip(calls, outcome.value, strict=True):
            whole = self.call.inputs, self.call.states
            self.expected = [values(each, *whole) for each in self.whole]
            if wrong := self._outside(shown, self.flow.outputs):
                return self._cause(self._earliest(wrong[0]))
        return Finding("none", "every output and state is within fp16 rounding")

    def _executables(self, program) -> list[miltorch.Executable]:
        return [miltorch.Executable(program, each) for each in self.precisions]

    def _run(self, package: Path, calls: Sequence[Call] = ()) -> process.Outcome:
        self.packages += 1
        outcome = self.run(package, self.function, list(calls or [self.call]))
        self.report(self.packages)
        return outcome

    def _shown(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """What the runtime computes for `names`, its outputs and states; without those
        values with which no package runs, or none has the fault."""
        target = self.folder / f"{self.packages}.mlpackage"
        outcome = self._run(cut(self.flow, target, names))
        if not outcome.failure and self._outside(outcome.value[0], self.flow.outputs):
            found = outcome.value[0]
            return {name.removesuffix(SHOWN): value for name, value in found.items()}
        if len(names) > 1:
            half = len(names) // 2
            return self._shown(names[:half]) | self._shown(names[half:])
        self.dark.update(names)
        return {}

    def _outside(self, shown: dict, names: Sequence[str]) -> list[str]:
        """Those of the values that rounding does not explain, earliest first."""
        base, other = self.expected
        found = []
        for name in sorted(names, key=self.flow.makers.get):
            if name in shown:
                value = shown[name].reshape(base[name].shape)
                if beyond(base[name], other[name], value) > DEVICE_FACTOR:
                    found.append(name)
        return found

    def _earliest(self, wrong: str) -> str:
        """The earliest value found outside from which `wrong` is computed."""
        inside: set[str] = set()
        while names := self._between(wrong, inside):
            count = min(WIDTH, len(names))
            places = [(i + 1) * len(names) // (count + 1) for i in range(count)]
            chosen = [names[i] for i in dict.fromkeys(places)]
            outside = self._outside(self._shown(chosen), chosen)
            wrong = outside[0] if outside else wrong
            inside.update(set(chosen) - set(outside))
        return wrong

    def _between(self, wrong: str, inside: set[str]) -> list[str]:
        """Values from which `wrong` is computed, without those inside and what only they
        are computed from; in order."""
        flow, found = self.flow, set()
        waiting = [*flow.operands[flow.makers[wrong]]]
        while waiting:
            name = waiting.pop()
            if name not in found | inside and name in flow.makers:
                found.add(name)
                waiting += flow.operands[flow.makers[name]]
        names = [n for n in found if self._can_show(n)]
        return sorted(names, key=flow.makers.get)

    def _can_show(self, name: str) -> bool:
        return self.flow.showable(name) and name not in self.dark

    def _cause(self, wrong: str) -> Finding:
        """The operation that is wrong by itself, or the nearest ones that are together,
        among those that `wrong` is computed from."""
        for steps in range(NEAR):
            known = -1
            while known < len(self.dark):
                known = len(self.dark)
                region = self._region(wrong, steps)
                inner = {n for index in region for n in self.flow.results(index)}
                names = {*inner, *self._boundary(region)}
                shown = self._shown([*filter(self._can_show, names)])
            for index in region:
                alone = self._closed({index})
                for name in self.flow.results(index):
                    times = self._error(alone, name, shown)
                    if times > DEVICE_FACTOR:
                        return self._named(alone, name, times, shown)
        reason = f"{wrong} is outside, and each operation near it is within rounding"
        return Finding("uncertain", reason, self._described(region[-1:]))

    def _region(self, wrong: str, steps: int) -> list[int]:
        """Operations that compute `wrong`, up to so many steps back, in order."""
        flow, found = self.flow, {self.flow.makers[wrong]}
        for _ in range(steps):
            operands = {n for index in found for n in flow.operands[index]}
            found |= {flow.makers[n] for n in operands if n in flow.makers}
        return self._closed(found)

    def _closed(self, region: set[int]) -> list[int]:
        """With the operations whose results no package shows."""
        flow, found = self.flow, set(region)
        while names := [
            n
            for index in found
            for n in flow.operands[index]
            if flow.makers.get(n, index) not in found and not self._can_show(n)
        ]:
            found.update(flow.makers[n] for n in names)
        return sorted(found)

    def _boundary(self, region: Sequence[int]) -> list[str]:
        """The values that a region reads and does not make."""
        flow = self.flow
        names = dict.fromkeys(n for index in region for n in flow.operands[index])
        return [n for n in names if flow.makers.get(n, -1) not in {*region, -1}]

    def _error(self, region: Sequence[int], wrong: str, shown: dict) -> float:
        """The error of a value against its computation from the region's operands as
        the runtime showed them."""
        given = {n: shown[n] for n in self._boundary(region) if n in shown}
        if len(given) < len(self._boundary(region)) or wrong not in shown:
            return 0.0
        inputs = dict(self.call.inputs)
        for name, value in given.items():
            inputs[name] = value.reshape(self.expected[0][name].shape)
        pair = [
            values(each, inputs, self.call.states)[wrong]
            for each in self._executables(self.flow.part([wrong], inputs))
        ]
        return sharply(*pair, shown[wrong].reshape(pair[0].shape))

    def _named(self, region, wrong: str, times: float, shown: dict) -> Finding:
        ops = self._described(region)
        verdict = "operation"
        reason = (
            f"from its operands as shown, {wrong} is {times:.3g} times off rounding"
        )
        if len(region) > 1:
            verdict = "together"
            reason += "; no package that shows a value between these has the fault"
        return Finding(verdict, reason, ops, times, region=(region, wrong, shown))

    def _described(self, region: Sequence[int]) -> list[dict]:
        found = []
        for index in region:
            op, (name, *_) = self.flow.ops[index], self.flow.results(index) or [""]
            at = {"op": op.name, "kind": op.kind, "module": self.modules.get(name, "")}
            found.append(at | {"value": name, "shard": self.package.stem})
        return found

    def _breaking(self, failure: str, calls: Sequence[Call]) -> Finding:
        """The first operation with which a package that ends there fails."""
        flow = self.flow
        low, high = 0, len(flow.computed) - 1
        while low < high:
            middle = (low + high) // 2
            outcome = self._run(self._ending(middle), calls)
            if outcome.failure:
                high, failure = middle, outcome.failure
            else:
                low = middle + 1
        if self._run(self._ending(low), calls).failure is None:
            reason = f"the package fails as a whole, and no part of it does: {failure}"
            return Finding("uncertain", reason)
        reason = f"packages fail from this operation on: {failure}"
        return Finding("breaks", reason, self._described([flow.computed[low]]))

    def _ending(self, last: int) -> Path:
        """A package of the operations up to one, which shows what none of them reads."""
        flow, kept = self.flow, self.flow.computed[: last + 1]
        read = {name for index in kept for name in flow.operands[index]}
        made = [name for index in kept for name in flow.results(index)]
        states, last = flow.program.states, [n for n in made if flow.showable(n)][-1:]
        names = [n for n in made if n not in read or n in last]
        names = [n for n in names if flow.showable(n) or n in states]
        target = self.folder / f"{self.packages}.mlpackage"
        return cut(flow, target, names, whole=False)


def calls_of(decoder: Decoder, ids: Sequence[int], T: int) -> Iterator[tuple]:
    """(model, call) of every shard that a prompt in calls of T tokens runs."""
    seqs, options = decoder.fresh(), decoder.options
    for start in range(0, len(ids) - T + 1, T):
        chunk = [list(ids[start : start + T])] * options.batch
        counts = np.full(options.batch, T)
        io = decoder.inputs(seqs.offsets, chunk, T)
        for model, state in zip(decoder.layers, seqs.states, strict=True):
            yield _call(model, io, state, start, T)
            io = decoder.run_layer(model, state, io, counts)
        seqs.append(chunk)
        for model in decoder.heads:
            yield _call(model, io, None, start, T)


def _call(model, io: dict, state, position: int, T: int) -> tuple:
    shard, states = model.shard, {}
    where = {"shard": shard.name, "position": position, "T": T}
    if state:
        states = {s.tensor: state.raw.read(s.tensor) for s in shard.states.values()}
        where["layer"] = shard.layers[0]
    inputs = {name: np.asarray(io[name]) for name in shard.inputs}
    return model, Call(inputs, states, where)


def find_operation(
    bundle: Bundle,
    ids: Sequence[int],
    *,
    runtime: str = "auto",
    compute_units: str = "CPU_AND_NE",
    layer: int | None = None,
    position: int | None = None,
    report: Callable[[int], None] = lambda count: None,
) -> tuple[Finding, Search]:
    """The first shard, call and operation that `runtime` computes wrongly over `ids`,
    and the search that found it. The portable runtime's `declared` arithmetic is
    compared with `exact`, any other with `declared`.

    Args:
        layer: searches the shard of this layer alone.
        position: searches the calls of this position alone.
    """
    runtime = resolve(runtime)
    check_compute_units(compute_units)
    base = "exact" if runtime == "portable" else "declared"
    decoder, calls = Decoder(bundle, "portable", base), {}
    for T in default_ts(decoder.options):
        for model, call in calls_of(decoder, ids, T):
            start = call.where["position"]
            layers = range(*model.shard.layers)
            if layer is not None and layer not in layers:
                continue
            if position is None or start <= position < start + T:
                key = model.shard.name, model.functions.get(T)
                calls.setdefault(key, (model.shard, []))[1].append(call)
    if not calls:
        raise InputError(
            "cell",
            f"layer {layer}, position {position}",
            "one of the prompt",
            "see --help",
        )
    run = runner(runtime, compute_units)
    for (_, function), (shard, own) in calls.items():
        about = base, shard.modules, report
        search = Search(bundle.package(shard), function, run, *about)
        found = search.find(own)
        if found.verdict != "none":
            break
    return found, search
