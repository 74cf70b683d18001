"""Searches a package for the operation that a runtime computes wrongly.

In the first call whose outputs are wrong, packages of its first operations show where
the first wrong value is: one further from portable arithmetic than fp16 rounding
explains, by the rule of gate `device`, or none because the package does not run. That
operation is named only if a package of it alone, fed with portable values, is wrong as
well. Where it is right, operations before it are added until the fault shows, and all
that can be are left out again."""

import shutil
import tempfile
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import miltorch
from workbench.bundle.names import MASKED
from workbench.check import compare
from workbench.check.hf import Values
from workbench.check.validate import DEVICE_FACTOR, device_room
from workbench.explain.cut import Flow, cut
from workbench.explain.running import Runner, every_value
from workbench.explain.trace import place
from workbench.runtime import Settings, load_package

MAX_OPS = 10  # that are taken together
Call = tuple[Values, dict]  # inputs and states; see `Finding.where`


@dataclass
class Finding:
    """What a search found.

    Attributes:
        verdict: `none` (nothing is outside), `operation`, `together` (operations that
            are wrong in one package, and right without any of them), `breaks` (no
            package with the operation compiles or runs), `uncertain`.
        ops: the operations, earliest first: op (its name), kind, module, value, shard.
        times: the error over what rounding explains, inf where one side is finite.
        where: the call: shard, all its layers, position, T.
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
    """A package of operations, from `arrays`, whose values `wrong` are outside (see
    `outside`); none are where it does not run, which `failure` says."""

    package: Path
    ops: list[int]
    arrays: Values
    expected: Values
    wrong: dict[str, float]
    failure: str

    @property
    def times(self) -> float:
        return max(self.wrong.values(), default=np.inf)


@dataclass
class Search:
    """Searches one function of a package.

    Args:
        modules: value → source module.
        base: precision of the portable arithmetic that the runtime is compared with.
        folder: for the packages that are made.

    Attributes:
        proof: of what `find` found.
    """

    package: Path
    function: str | None
    modules: Mapping[str, str]
    run: Runner
    base: str
    folder: str
    has_run: bool = False  # any package
    proof: Proof | None = None

    def __post_init__(self):
        self.flow = Flow(miltorch.read(self.package, self.function))

    def find(self, calls: Sequence[Call]) -> Finding:
        """The earliest operation that is wrong in the first call that has one."""
        call = self.wrong_call(calls)
        if not call:
            return Finding("none", "it runs as the program says, within fp16 rounding")
        arrays, where = call
        model = self._models(self.package, self.function)[0]
        self.values = every_value(model, arrays) | arrays
        count = len(self.flow.ops)

        def is_wrong(end: int) -> bool:
            return bool(self.test(range(end + 1)))

        end = bisect_left(range(count), True, key=is_wrong)
        if end == count:
            reason = "packages of its operations are right"
            return Finding("uncertain", reason, where=where)
        while not (proof := self._smallest({end})):
            # an operand is wrong where another value that shows hides it
            wrong = next(filter(is_wrong, sorted(self.flow.before({end}))), None)
            if wrong is None:
                break
            end = bisect_left(range(wrong), True, key=is_wrong)
        failure = proof.failure if proof else ""
        if failure and not self.has_run and self.test([count - 1]):
            reason = f"no package runs: {failure}"
            return Finding("uncertain", reason, where=where)
        if not proof:
            ops = self._ops([end])
            reason = "values are outside from here on; alone it is right"
            return Finding("uncertain", reason, ops, None, where)
        self.proof = proof
        verdict = "together" if len(proof.ops) > 1 else "operation"
        reason = f"alone, it is {proof.times:.3g} times off rounding"
        if failure:
            verdict = "breaks"
            reason = f"alone, it fails: {failure}"
        return Finding(verdict, reason, self._ops(proof.ops), proof.times, where)

    def wrong_call(self, calls: Sequence[Call]) -> Call | None:
        """The first call for which the package does not run or shows a value outside."""
        whole = self.package, self.function
        shown, failure = self.run(*whole, [arrays for arrays, _ in calls])
        if failure:  # of any of them
            fails = (call for call in calls if self.run(*whole, [call[0]])[1])
            return next(fails, calls[0])
        self.has_run = True
        models = self._models(*whole)
        for call, values in zip(calls, shown):
            if outside([every_value(model, call[0]) for model in models], values):
                return call
        return None

    def _smallest(self, ops: set[int]) -> Proof | None:
        """Of as few operations as show the fault, these or some before them."""
        while not (proof := self.test(sorted(ops))):
            more = ops | self.flow.before(ops)
            if more == ops or len(more) > MAX_OPS:
                return None
            ops = more
        for index in sorted(ops):
            rest = sorted({*proof.ops} - {index})
            proof = (rest and self.test(rest)) or proof
        return proof

    def test(self, ops: Sequence[int], arrays: Values | None = None) -> Proof | None:
        """The proof that a package of operations is wrong, if it is.

        Args:
            arrays: what they read, if it is not as in the call.
        """
        operands = self.flow.operands(ops)
        values = {n: self.values.get(self.flow.held(n, ops)) for n in operands}
        arrays = arrays or {n: x for n, x in values.items() if np.ndim(x)}
        target = Path(tempfile.mkdtemp(dir=self.folder)) / "cut.mlpackage"
        try:
            package = cut(self.flow, ops, arrays, target)
            pair = [every_value(model, arrays) for model in self._models(package)]
        except Exception:  # of coremltools or PyTorch: arrays do not fit
            return None
        shown, failure = self.run(package, None, [arrays])
        wrong = {} if failure else outside(pair, shown[0])
        self.has_run |= not failure
        if wrong or failure:
            return Proof(package, ops, arrays, pair[0], wrong, failure)
        shutil.rmtree(target)
        return None

    def _models(self, package: Path, function: str | None = None) -> list:
        return [
            load_package(package, Settings("portable", precision), function)
            for precision in (self.base, "narrow")
        ]

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
    an error of the others is small. Inf where one side alone is finite, or where the
    shapes differ."""
    found = {}
    for name, value in shown.items():
        if value.shape != pair[0][name].shape:
            found[name] = np.inf
            continue
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
