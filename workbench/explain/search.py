"""Searches a package for the operation that a runtime computes wrongly.

Packages of its first operations show where the first wrong value is: one further from
portable arithmetic than fp16 rounding explains, by the rule of gate `device`, or none
because the package does not run. Values that earlier packages showed to be right take
part, so that no error is inherited. The operation found is named only if a package of
it alone is wrong as well. Where that one is right, operations before it are added
until the fault shows, and all that can be are left out again."""

import tempfile
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile
from pathlib import Path

import numpy as np

import miltorch
from workbench.bundle.names import MASKED
from workbench.check import compare
from workbench.check.hf import Values
from workbench.check.validate import DEVICE_FACTOR, device_room
from workbench.explain.cut import Flow, alone, first, reads
from workbench.explain.running import Call, Runner, recompute
from workbench.explain.trace import place
from workbench.runtime import Model, open_model

MAX_OPS = 10  # that are taken together


@dataclass
class Finding:
    """What a search found.

    Attributes:
        verdict: `none` (nothing is outside), `operation`, `together` (operations that
            are wrong in one package, and right without any of them), `breaks` (no
            package with the operation compiles or runs), `uncertain`.
        ops: the operations, earliest first: op (its name), kind, module, value, shard.
        times: the error over what rounding explains, inf where one side is finite.
        where: the call: shard, layer, position, T.
        packages: compiled and run.
        reduced: what `reduced.reduce` wrote.
    """

    verdict: str
    reason: str
    ops: list[dict] = field(default_factory=list)
    times: float | None = None
    where: dict = field(default_factory=dict)
    packages: int = 0
    reduced: dict | None = None

    @property
    def words(self) -> str:
        """The conclusion in one line."""
        ops = ", ".join(map(place, self.ops)) or "no operation"
        where = ", ".join(f"{name} {value}" for name, value in self.where.items())
        return f"{self.verdict}: {ops}; {self.reason} {where and f'({where})'}".strip()


@dataclass
class Proof:
    """A package of operations alone, from `arrays`, whose values `wrong` are outside
    (see `outside`); none are where it does not run, which `failure` says."""

    package: Path
    ops: list[int]
    arrays: Values
    expected: Values
    wrong: dict[str, float]
    failure: str

    @property
    def times(self) -> float:
        return max(self.wrong.values(), default=np.inf)


class Search:
    """Searches one function of a package.

    Args:
        folder: for packages that only this search needs.
        base: precision of the portable arithmetic that the runtime is compared with.
        modules: value → source module.
    """

    def __init__(
        self,
        package: Path,
        function: str | None,
        run: Runner,
        folder: str,
        base: str,
        modules: Mapping[str, str],
    ):
        self.package = package
        self.function = function
        self.run = run
        self.folder = folder
        self.precisions = base, "narrow"
        self.modules = modules
        self.flow = Flow(miltorch.read(package, function))

    def find(self, calls: Sequence[Call]) -> Finding:
        """The earliest operation that is wrong in the first call that has one."""
        # each with the values that were right
        self.calls: list[tuple[Call, Values]] = [(call, {}) for call in calls]
        self.failure = ""  # of a package of first operations
        self.proof: Proof | None = None
        if not self.is_wrong(self.package, self.function):
            return Finding("none", "every output and state is within fp16 rounding")
        flow = self.flow
        ends = [*dropwhile(lambda index: not flow.showable(index), flow.computed)]
        low = bisect_left(ends, True, hi=len(ends) - 1, key=self.is_wrong_until)
        while not (proof := self._proof_at(ends[low])):
            # an operand is wrong where another value that shows hides it
            makers = sorted(flow.before({ends[low]}).intersection(ends))
            wrong = next(filter(self.is_wrong_until, makers), None)
            if wrong is None:
                break
            high = ends.index(wrong)
            low = bisect_left(ends, True, hi=high, key=self.is_wrong_until)
        call = self.calls[0][0]
        if self.failure and not low and (not proof or self.alone({ends[-1]})):
            reason = f"no package of these inputs runs: {self.failure}"
            return Finding("uncertain", reason, where=call.where)
        self.proof = proof
        if not proof:
            reason = "values are outside from here on; alone it is right"
            return Finding(
                "uncertain", reason, self._ops([ends[low]]), None, call.where
            )
        verdict = "together" if len(proof.ops) > 1 else "operation"
        reason = f"alone, it is {proof.times:.3g} times off rounding"
        if proof.failure:
            verdict = "breaks"
            reason = f"alone, it fails: {proof.failure}"
        ops = self._ops(proof.ops)
        return Finding(verdict, reason, ops, proof.times, call.where)

    def is_wrong_until(self, last: int) -> bool:
        return self.is_wrong(first(self.flow, last, self._target()))

    def is_wrong(self, package: Path, function: str | None = None) -> bool:
        """Whether a package of the program's inputs does not run, or shows a value
        outside in one of the calls, which is then the only one left."""
        shown, failure = self.run(package, function, [call for call, _ in self.calls])
        if failure:
            self.failure = failure
            return True
        models = self._models(package, function)
        for given, values in zip(self.calls, shown):
            if outside([recompute(model, *given) for model in models], values):
                self.calls = [given]
                return True
        for (_, known), values in zip(self.calls, shown):
            known |= values
        return False

    def _proof_at(self, index: int) -> Proof | None:
        """The proof of an operation, from the values that were right before it."""
        call, known = self.calls[0]
        model = self._models(self.package, self.function)[0]
        values = recompute(model, call, known) | known
        self.values = values | call.inputs | call.states
        return self._proof({index})

    def _proof(self, ops: set[int]) -> Proof | None:
        """Of as few operations as show the fault, these or some before them."""
        while not (proof := self.alone(ops)):
            more = ops | self.flow.before(ops)
            if more == ops or len(more) > MAX_OPS:
                return None
            ops = more
        for index in sorted(ops):
            rest = {*proof.ops} - {index}
            proof = (rest and self.alone(rest)) or proof
        return proof

    def alone(self, ops: Collection[int], arrays: Values | None = None) -> Proof | None:
        """The proof that operations alone are wrong, if they are. `arrays`: what they
        read, if it is not as in the call."""
        ops = sorted(ops)
        arrays = arrays or operands(self.flow, ops, self.values)
        call = Call(arrays, arrays)
        package = self._target()
        try:
            alone(self.flow, ops, arrays, package)
            pair = [recompute(model, call, {}) for model in self._models(package)]
        except Exception:  # of coremltools or PyTorch: arrays do not fit
            return None
        (shown,), failure = self.run(package, None, [call])
        wrong = outside(pair, shown)
        if wrong or failure:
            return Proof(package, ops, arrays, pair[0], wrong, failure)
        return None

    def _models(self, package: Path, function: str | None = None) -> list[Model]:
        how = {"runtime": "portable", "function": function}
        return [open_model(package, precision=p, **how) for p in self.precisions]

    def _target(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.folder)) / "cut.mlpackage"

    def _ops(self, ops: Sequence[int]) -> list[dict]:
        found = []
        for index in ops:
            op = self.flow.ops[index]
            name = self.flow.results(index)[0]
            at = {"op": op.name, "kind": op.kind, "module": self.modules.get(name, "")}
            found.append(at | {"value": name, "shard": self.package.stem})
        return found


def outside(pair: Sequence[Values], shown: Values) -> dict[str, float]:
    """Shown values that rounding does not explain, and how far each is from the first
    of a pair, over what rounding explains: the distance of the pair, at least half a
    unit of an fp16 result, as RMS. Masked scores are judged apart, since beside them
    an error of the others is small. Inf where one side alone is finite."""
    found = {}
    for name, value in shown.items():
        base, other, value = map(np.ravel, (*(of[name] for of in pair), value))
        finite = np.isfinite(base)
        masked = finite & (base < MASKED / 2)
        times = 0.0
        if not np.array_equal(base[~finite], value[~finite], equal_nan=True):
            times = np.inf
        for part in filter(np.any, (masked, finite & ~masked)):
            right, moved = base[part], other[part]
            moved = np.where(np.isfinite(moved), moved, right)
            scale = compare.rms(right) * (base.dtype.kind == "f")
            room = device_room(compare.rms(right, moved), scale)
            off = compare.over(compare.rms(right, value[part]), room)
            times = max(times, np.nan_to_num(off, nan=np.inf, posinf=np.inf))
        if value.size and times > DEVICE_FACTOR:
            found[name] = float(times)
    return found


def operands(flow: Flow, ops: Sequence[int], values: Values) -> Values:
    """What operations read and do not make, constants that are no scalars too, in
    float32 or int32."""
    read = {name for index in ops for name in reads(flow.ops[index])}
    made = {name for index in ops for name, _ in flow.ops[index].outputs}
    arrays = {}
    for name in sorted(read - made):
        is_constant = name in flow.constants.ops
        value = flow.constants[name] if is_constant else values.get(name)
        if np.ndim(value):
            value = np.asarray(value)
            dtype = np.float32 if value.dtype.kind == "f" else np.int32
            arrays[name] = value.astype(dtype)
    return arrays
