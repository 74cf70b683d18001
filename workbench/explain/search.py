"""Searches a package for the operation that a runtime computes wrongly.

In the first call whose outputs are wrong, packages of the program's first operations
locate the first wrong value by bisection. A value is wrong if its distance from
portable arithmetic is larger than fp16 rounding explains, by the rule of gate `device`,
or if the package does not run. The operation that computes this value is named only if
a package of this operation alone, fed with portable values, is wrong as well. If that
package is right, operations before it are added until the fault shows, and then as many
as possible are left out again."""

import shutil
import tempfile
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

import miltorch
from workbench.bundle.names import MASKED
from workbench.check import compare
from workbench.check.device import DEVICE_FACTOR, device_unit
from workbench.explain.cut import Flow, cut
from workbench.explain.ranges import OperationPlace
from workbench.explain.running import Arrays, Runner, evaluate_every_value
from workbench.runtime import Model, Settings, load_package

NO_WRONG_OPERATION = (
    "No operation computes a wrong value here: all results are those that the program "
    "asks for, within the rounding of fp16."
)
MAX_OPS = 10  # in the largest package that is tried as an explanation


@dataclass(frozen=True)
class CallPlace:
    """Where a call of a package stands in the run of a prompt.

    Attributes:
        shard: the package's file without its suffix.
        position: of the call's first token.
        T: columns of the call.
        layers: all layers of the shard.
    """

    shard: str
    position: int
    T: int
    layers: list[int]


@dataclass(frozen=True)
class PackageCall:
    """One call of a package: `arrays`, its inputs and its states before the call, by
    their names in the package; `place`, None for a call that belongs to no prompt."""

    arrays: Arrays
    place: CallPlace | None = None


@dataclass(frozen=True)
class WrongOperation(OperationPlace):
    """An operation that is wrong, and the name of its first result, `value`."""

    value: str


@dataclass
class Finding:
    """The result of a search.

    Attributes:
        verdict: `none` (every value is within rounding), `operation` (one is wrong),
            `together` (operations that are wrong in one package, and right if any of
            them is left out), `breaks` (no package with the operation compiles or
            runs), `uncertain`.
        ops: the operations, earliest first.
        rounding_ratio: the error over what rounding explains; inf where only one side
            is finite.
        where: the call.
        packages: how many were compiled and run.
        reduced: the result of `reduced.reduce`.
    """

    verdict: str
    reason: str
    ops: list[WrongOperation] = field(default_factory=list)
    rounding_ratio: float | None = None
    where: CallPlace | None = None
    packages: int = 0
    reduced: dict | None = None

    def json(self) -> dict:
        """The finding as `workbench explain` prints it."""
        fields = asdict(self)
        fields["where"] = asdict(self.where) if self.where else {}
        fields["times"] = fields.pop("rounding_ratio")  # its name in JSON
        return fields

    @property
    def summary(self) -> str:
        """The conclusion in one line."""
        if self.verdict == "none":
            return NO_WRONG_OPERATION
        ops = ", ".join(map(str, self.ops)) or "no operation"
        sentence = f"{self.verdict}: {ops}; {self.reason}"
        if self.where:
            place = asdict(self.where).items()
            sentence += f" ({', '.join(f'{name} {value}' for name, value in place)})"
        return sentence


@dataclass
class Proof:
    """A package that shows a fault.

    Attributes:
        indices: of its operations in the program.
        arrays: what it was called with.
        expected: its values in portable arithmetic.
        wrong: values that rounding does not explain (see `beyond_rounding`); empty
            where the package does not run.
        failure: why it does not run.
    """

    package: Path
    indices: list[int]
    arrays: Arrays
    expected: Arrays
    wrong: dict[str, float]
    failure: str

    @property
    def rounding_ratio(self) -> float:
        """The largest ratio in `wrong`; inf where the package does not run."""
        return max(self.wrong.values(), default=np.inf)


class SearchResult(NamedTuple):
    """A finding, and the package that shows it; None unless the verdict is `operation`,
    `together` or `breaks`."""

    finding: Finding
    proof: Proof | None


@dataclass
class Search:
    """Searches one function of a package.

    Args:
        modules: value of the program → source module.
        runner: runs packages on the runtime that is tested.
        reference_precision: of the portable arithmetic that the runtime is compared
            with.
        folder: for the packages that the search writes.

    Attributes:
        has_run: whether any package has run.
    """

    package: Path
    function: str | None
    modules: Mapping[str, str]
    runner: Runner
    reference_precision: str
    folder: str
    has_run: bool = False

    def __post_init__(self):
        self.flow = Flow(miltorch.read(self.package, self.function))

    def find(self, calls: Sequence[PackageCall]) -> SearchResult:
        """The earliest operation that is wrong in the first call with a wrong value."""
        call = self.first_wrong_call(calls)
        if not call:
            reason = "it runs as the program says, within fp16 rounding"
            return SearchResult(Finding("none", reason), None)
        models = self._load_portable(self.package, self.function)
        computed = evaluate_every_value(models.expected, call.arrays)
        return WrongCall(self, call, computed | call.arrays).find()

    def first_wrong_call(self, calls: Sequence[PackageCall]) -> PackageCall | None:
        """The first call for which the package does not run or gives a wrong value."""
        arrays = [call.arrays for call in calls]
        run = self.runner.run(self.package, self.function, arrays)
        if run.failure:
            # which call failed is not known: each runs once more, by itself
            for call in calls:
                single = [call.arrays]
                if self.runner.run(self.package, self.function, single).failure:
                    return call
            return calls[0]
        self.has_run = True
        models = self._load_portable(self.package, self.function)
        for call, values in zip(calls, run.values):
            if beyond_rounding(models.evaluate(call.arrays), values):
                return call
        return None

    def prove_wrong(self, indices: Sequence[int], arrays: Arrays) -> Proof | None:
        """Builds a package of operations and runs it in portable arithmetic and on the
        runtime that is tested. Returns the proof that the runtime is wrong; None if it is
        right. None, too, if coremltools cannot build the package or PyTorch cannot run
        it: that is no evidence against the runtime.

        Args:
            indices: of the operations.
            arrays: the package's inputs and states.
        """
        target = Path(tempfile.mkdtemp(dir=self.folder)) / "cut.mlpackage"
        try:
            package = cut(self.flow, indices, arrays, target)
            portable = self._load_portable(package).evaluate(arrays)
        except Exception:  # of coremltools or PyTorch: arrays do not fit
            return None
        run = self.runner.run(package, None, [arrays])
        wrong = {}
        if not run.failure:
            wrong = beyond_rounding(portable, run.values[0])
            self.has_run = True
        if wrong or run.failure:
            return Proof(
                package, indices, arrays, portable.expected, wrong, run.failure
            )
        shutil.rmtree(target)
        return None

    def _load_portable(
        self, package: Path, function: str | None = None
    ) -> "PortableModels":
        """A package in both portable arithmetics."""
        expected, narrow = (
            load_package(package, Settings("portable", precision), function)
            for precision in (self.reference_precision, "narrow")
        )
        return PortableModels(expected, narrow)

    def describe(self, indices: Sequence[int]) -> list[WrongOperation]:
        """The operations of these indices in words."""
        places = []
        for index in indices:
            op, value = self.flow.ops[index], self.flow.results(index)[0]
            module = self.modules.get(value, "")
            shard = self.package.stem
            places.append(WrongOperation(shard, op.name, op.kind, module, value))
        return places


@dataclass
class WrongCall:
    """The search within the first call that has a wrong value.

    Attributes:
        search: of the function; it builds and runs the packages.
        values: every value of the call, in portable arithmetic, and its inputs and
            states.
    """

    search: Search
    call: PackageCall
    values: Arrays

    def find(self) -> SearchResult:
        """The earliest operation that is wrong in the call."""
        end, proof = self._locate()
        return self._conclude(end, proof)

    def _locate(self) -> tuple[int | None, Proof | None]:
        """The index of the operation from which on packages of the first operations are
        wrong (None: none is), and the proof that it is wrong alone or with few others."""
        count = len(self.search.flow.ops)
        end = self._first_wrong_prefix(count)
        if end == count:
            return None, None
        proof = self._find_smallest({end})
        while not proof:
            # Bisection has passed the fault by: a longer prefix may be right again. A
            # package outputs only values that none of its operations reads, so that a
            # later operation can hide the fault. Then the search goes on from the
            # operations that compute this one's operands. `end` falls every time, so
            # that the loop ends.
            producers = sorted(self.search.flow.producers_of({end}))
            wrong = next(filter(self._is_prefix_wrong, producers), None)
            if wrong is None:
                break
            end = self._first_wrong_prefix(wrong)
            proof = self._find_smallest({end})
        return end, proof

    def _first_wrong_prefix(self, stop: int) -> int:
        """The index of the last operation in the shortest wrong prefix of the program, of
        those that end before `stop`; `stop` if bisection finds none. Bisection would be
        certain only if every prefix stayed wrong as it grows."""
        return bisect_left(range(stop), True, key=self._is_prefix_wrong)

    def _is_prefix_wrong(self, end: int) -> bool:
        """Whether the package of all operations up to the one at index `end` is wrong."""
        return bool(self._prove_wrong_in_call(range(end + 1)))

    def _conclude(self, end: int | None, proof: Proof | None) -> SearchResult:
        """The finding.

        Args:
            end, proof: of `_locate`.
        """
        if end is None:
            reason = "packages of its operations are right"
            finding = Finding("uncertain", reason, where=self.call.place)
            return SearchResult(finding, None)
        if not proof:
            reason = "wrong from this operation on; correct in isolation"
            ops = self.search.describe([end])
            finding = Finding("uncertain", reason, ops, None, self.call.place)
            return SearchResult(finding, None)
        if proof.failure and self._nothing_runs():
            reason = f"no package runs: {proof.failure}"
            finding = Finding("uncertain", reason, where=self.call.place)
            return SearchResult(finding, None)
        ops = self.search.describe(proof.indices)
        if proof.failure:
            verdict, reason = "breaks", f"alone, it fails: {proof.failure}"
        else:
            verdict = "together" if len(ops) > 1 else "operation"
            error = f"{proof.rounding_ratio:.3g} times what rounding explains"
            reason = f"alone, its error is {error}"
        finding = Finding(verdict, reason, ops, proof.rounding_ratio, self.call.place)
        return SearchResult(finding, proof)

    def _nothing_runs(self) -> bool:
        """Whether no package has run so far, and the program's last operation alone,
        which is tried now, fails as well."""
        last = len(self.search.flow.ops) - 1
        return not self.search.has_run and bool(self._prove_wrong_in_call([last]))

    def _find_smallest(self, indices: set[int]) -> Proof | None:
        """The proof with the fewest operations: some of these or, if a package of these
        alone is right, of these and the operations that produce their inputs."""
        while not (proof := self._prove_wrong_in_call(sorted(indices))):
            with_producers = indices | self.search.flow.producers_of(indices)
            if with_producers == indices or len(with_producers) > MAX_OPS:
                return None
            indices = with_producers
        for index in sorted(indices):
            without_one = sorted({*proof.indices} - {index})
            if not without_one:
                continue
            smaller = self._prove_wrong_in_call(without_one)
            if smaller:
                proof = smaller
        return proof

    def _prove_wrong_in_call(self, indices: Sequence[int]) -> Proof | None:
        """`Search.prove_wrong` with the arrays that the operations read in this call."""
        return self.search.prove_wrong(indices, self._recorded_operands(indices))

    def _recorded_operands(self, indices: Sequence[int]) -> Arrays:
        """The values in this call of what operations read and do not compute;
        constants and scalars, which stay in the package, are left out."""
        arrays = {}
        for operand in self.search.flow.operands(indices):
            value = self.values.get(self.search.flow.recorded_name(operand, indices))
            if np.ndim(value):
                arrays[operand] = value
        return arrays


class PortableValues(NamedTuple):
    """Every value of a call in two portable arithmetics.

    Attributes:
        expected: in the arithmetic that the tested runtime is compared with.
        narrow: in `narrow`; rounding explains their distance from `expected`.
    """

    expected: Arrays
    narrow: Arrays


class PortableModels(NamedTuple):
    """A package loaded in both arithmetics of `PortableValues`."""

    expected: Model
    narrow: Model

    def evaluate(self, arrays: Arrays) -> PortableValues:
        """Every value of a call with these inputs and states."""
        return PortableValues(*(evaluate_every_value(model, arrays) for model in self))


def beyond_rounding(portable: PortableValues, actual: Arrays) -> dict[str, float]:
    """The values in `actual` that rounding does not explain, each with its distance from
    the expected one over the distance that rounding explains.

    Rounding explains the RMS distance of the two arithmetics, and at least half a unit
    of an fp16 result. Masked scores are compared separately, because they are so large
    that an error of the other scores would be small beside them. The ratio is inf where
    only one side is finite, or where the shapes differ."""
    wrong = {}
    for name, value in actual.items():
        expected, narrow = portable.expected[name], portable.narrow[name]
        if value.shape != expected.shape:
            wrong[name] = np.inf
        elif value.size:
            ratio = _rounding_ratio(expected.ravel(), narrow.ravel(), value.ravel())
            if ratio > DEVICE_FACTOR:
                wrong[name] = ratio
    return wrong


def _rounding_ratio(
    expected: np.ndarray, narrow: np.ndarray, actual: np.ndarray
) -> float:
    """The distance of a value [n] from the expected one over what rounding explains, see
    `beyond_rounding`."""
    finite = np.isfinite(expected)
    if not np.array_equal(expected[~finite], actual[~finite], equal_nan=True):
        return np.inf
    # an overflow of `narrow` alone explains nothing
    narrow = np.where(np.isfinite(narrow), narrow, expected)
    masked = finite & (expected < MASKED / 2)
    largest = 0.0
    for part in (masked, finite & ~masked):
        if not part.any():
            continue
        # integers are not rounded
        is_integer = expected.dtype.kind != "f"
        size = 0.0 if is_integer else compare.rms(expected[part])
        rounding = compare.rms(expected[part], narrow[part])
        distance = compare.rms(expected[part], actual[part])
        ratio = compare.safe_ratio(distance, device_unit(rounding, size))
        ratio = np.nan_to_num(ratio, nan=np.inf, posinf=np.inf)
        largest = max(largest, float(ratio))
    return largest
