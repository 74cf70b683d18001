"""Compares the program of a wrong shard with that of a right one which was written from
the same template, operation by operation.

Shards of one kind of layer differ in their weights alone. Where gate `program` is RED for
one of them only, the first difference of the two programs is the fault, or leads to it.
Weights are left out: gate `weights` compares them with the checkpoint."""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

import miltorch
from miltorch.program import Op, Program, Ref
from workbench.bundle import Bundle, Manifest, Shard
from workbench.bundle.manifest import Layer

MAX_DIFFERENCES = 3  # that a sentence lists
MAX_NUMBERS = 4  # of a constant that a sentence lists
# A difference counts as one of the same template if at most this share of the operations
# differ. Programs of two kinds of layers differ in most of them.
LARGEST_SHARE = 0.25
LAYER_IN_NAME = re.compile(r"(layers?[._])\d+")


@dataclass(frozen=True)
class ProgramDifference:
    """The first place in which an operation differs from its counterpart.

    Attributes:
        shard, sibling: names of the wrong shard and of the right one.
        function: that has the operation; None: the package has `main` alone.
        operation: name of its first result, or its own name where it has none.
        clause: the difference in words, which begin with "operation NAME" or
            "constant NAME".
        module: the source module of the operation, or of the one that reads the constant;
            "" where the manifest names none.
    """

    shard: str
    sibling: str
    function: str | None
    operation: str
    clause: str
    module: str = ""

    def __str__(self) -> str:
        module = f", in module {self.module}" if self.module else ""
        function = f", in function {self.function}" if self.function else ""
        return f"{self.clause}{module}{function}"


def compare_with_sibling(
    bundle: Bundle, wrong_layers: Collection[int]
) -> list[ProgramDifference]:
    """The differences between the first wrong shard, in the order of layers, that has a
    right sibling, and the sibling that differs least; none where there is no such pair or
    where the two programs are equal.

    Args:
        wrong_layers: those for which a gate is RED.
    """
    if bundle.manifest.foreign:
        # adopted packages are parts of one shard, and not all their weights are listed
        return []
    shards = [s for s in bundle.manifest.shards if s.kind in ("layers", "router")]
    wrong = [s for s in shards if not {*s.layer_range}.isdisjoint(wrong_layers)]
    right = [s for s in shards if {*s.layer_range}.isdisjoint(wrong_layers)]
    for shard in wrong:
        siblings = [s for s in right if _is_sibling(bundle.manifest, shard, s)]
        # an exporter that converts every layer names each shard as its own template
        of_template = [s for s in siblings if s.template == shard.template]
        candidates = [
            differences
            for sibling in of_template or siblings
            if (differences := _compare_shards(bundle, shard, sibling)) is not None
        ]
        # a sibling without a difference shows that the programs are not the cause
        if candidates and (least := min(candidates, key=len)):
            return least
    return []


def describe_differences(differences: list[ProgramDifference]) -> str:
    """A sentence with the first differences; "" where there is none."""
    if not differences:
        return ""
    first = differences[0]
    listed = "; ".join(map(str, differences[:MAX_DIFFERENCES]))
    rest = len(differences) - MAX_DIFFERENCES
    more = f"; and {rest} more differences" if rest > 0 else ""
    return (
        f"The program of {first.shard} differs from that of {first.sibling}, which has "
        f"the same structure: {listed}{more}."
    )


def _is_sibling(manifest: Manifest, shard: Shard, sibling: Shard) -> bool:
    """Whether the two shards have layers of one kind: with the same windows, rope tables
    and heads, and of one template or with the same inputs."""

    def layers_of(part: Shard) -> list[Layer]:
        entries = [manifest.layers[i] for i in part.layer_range]
        return [entry.model_copy(update={"source": None}) for entry in entries]

    return (
        shard.kind == sibling.kind
        and shard.functions == sibling.functions
        and layers_of(shard) == layers_of(sibling)
        and (shard.template == sibling.template or shard.inputs == sibling.inputs)
    )


def _compare_shards(
    bundle: Bundle, shard: Shard, sibling: Shard
) -> list[ProgramDifference] | None:
    """All differences; None where so many operations differ that the two are programs of
    two kinds."""
    differences = []
    for function in sorted(shard.functions) or [None]:
        actual = _CanonicalProgram.read(bundle, shard, function)
        expected = _CanonicalProgram.read(bundle, sibling, function)
        pairs = [*_differing_operations(actual, expected)]
        if len(pairs) > LARGEST_SHARE * len(expected.operations):
            return None
        place = _name_place(sibling)
        for name, clause in pairs:
            text = clause.replace("SIBLING", place)
            module = actual.find_module(name, shard)
            difference = ProgramDifference(
                shard.name, sibling.name, function, name, text, module
            )
            differences.append(difference)
    return differences


def _name_place(shard: Shard) -> str:
    """The layers of a shard in words."""
    first, stop = shard.layers
    if stop - first == 1:
        return f"layer {first}"
    return f"layers {first} to {stop - 1}"


@dataclass(frozen=True, eq=False)
class _CanonicalProgram:
    """The operations of one function by canonical names, in order, without weights.

    Attributes:
        operations: name → operation. Numbers of layers in names are replaced, so that
            two layers have the same names.
        constants: name → value of a constant that is no weight.
    """

    operations: dict[str, Op]
    constants: dict[str, object]

    @classmethod
    def read(
        cls, bundle: Bundle, shard: Shard, function: str | None
    ) -> "_CanonicalProgram":
        """Reads a function of a shard's package."""
        program = miltorch.read(bundle.package(shard), function)
        weights = _weight_names(shard, program)
        operations, constants = {}, {}
        without_result = 0
        for op in program.block.walk():
            if op.outputs:
                key = op.outputs[0][0]
            else:
                key = f"{op.kind} number {without_result} without a result"
                without_result += 1
            if key in weights or op.kind.startswith("constexpr_"):
                continue
            if op.kind == "const":
                constants[_canonical(key)] = op.inputs.get("val")
            else:
                operations[_canonical(key)] = op
        return cls(operations, constants)

    def find_module(self, name: str, shard: Shard) -> str:
        """The source module of an operation, or of the first one that reads a constant;
        "" where the manifest of its shard names none."""
        op = self.operations.get(name)
        if name in self.constants:
            readers = self.operations.values()
            op = next((r for r in readers if name in map(_canonical, r.reads())), None)
        if op is None or not op.outputs:
            return ""
        return shard.modules.get(op.outputs[0][0], "")


def _canonical(name: str) -> str:
    return LAYER_IN_NAME.sub(r"\1N", name)


def _weight_names(shard: Shard, program: Program) -> set[str]:
    """Names of the constants that hold weights, and of their parts."""
    names = set()
    for constant in shard.weights.values():
        names.update([constant] if isinstance(constant, str) else constant)
    for op in program.block.walk():
        if op.kind.startswith("constexpr_"):
            names.update(op.reads())
    return names


def _differing_operations(
    actual: _CanonicalProgram, expected: _CanonicalProgram
) -> Iterator[tuple[str, str]]:
    """The name and a clause of each difference: constants and operations in the order of
    the program. The word SIBLING stands for the right shard's layer."""
    for name, value in actual.constants.items():
        other = expected.constants.get(name)
        if name in expected.constants and not _is_equal(value, other):
            yield (
                name,
                f"constant {name} is {_describe(value, other)} where SIBLING has "
                f"{_describe(other, value)}",
            )
    for name, op in actual.operations.items():
        other = expected.operations.get(name)
        if other is None:
            yield name, f"operation {name} ({op.kind}) is not in SIBLING's program"
        elif op.kind != other.kind:
            yield (
                name,
                f"operation {name} ({op.kind}) where SIBLING's program has {other.kind}",
            )
        elif clause := _differing_input(op, other, actual, expected):
            yield name, f"operation {name} ({op.kind}) {clause}"
    for name, op in expected.operations.items():
        if name not in actual.operations:
            yield name, f"operation {name} ({op.kind}) of SIBLING's program is missing"


def _differing_input(
    op: Op, other: Op, actual: _CanonicalProgram, expected: _CanonicalProgram
) -> str:
    """The first parameter in which two operations of one kind differ, in words; "" where
    they are equal."""
    for parameter in dict.fromkeys([*op.inputs, *other.inputs]):
        value = _plain(op.inputs.get(parameter))
        counterpart = _plain(other.inputs.get(parameter))
        # a constant of the same name is compared by itself
        if not _is_equal(value, counterpart):
            first = _resolve(value, actual)
            second = _resolve(counterpart, expected)
            if not _is_equal(first, second):
                return (
                    f"has {_describe(first, second)} as {parameter} where SIBLING's "
                    f"has {_describe(second, first)}"
                )
    return ""


def _plain(value):
    """An argument with canonical names in place of references."""
    if isinstance(value, Ref):
        return _canonical(value.name)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


def _resolve(value, program: _CanonicalProgram):
    """An argument of `_plain` by value where it names a constant."""
    is_constant = isinstance(value, str) and value in program.constants
    return program.constants[value] if is_constant else value


def _is_equal(first, second) -> bool:
    """Whether two arguments are equal by value; NaN equals itself."""
    if isinstance(first, dict) or isinstance(second, dict):
        return repr(first) == repr(second)
    if first is None or second is None:
        return first is second
    left, right = np.asarray(first), np.asarray(second)
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return bool(np.array_equal(left, right, equal_nan=left.dtype.kind == "f"))


def _describe(value, other) -> str:
    """An argument in words; of a large array the first number that differs from those of
    `other`."""
    if value is None:
        return "nothing"
    array = np.asarray(value)
    if array.dtype.kind not in "fiub":
        return str(value)
    if array.size == 1:
        return _number(array.ravel()[0])
    if array.size <= MAX_NUMBERS:
        return "[" + ", ".join(map(_number, array.ravel())) + "]"
    others = np.asarray(other)
    if others.shape != array.shape or others.dtype.kind not in "fiub":
        return f"an array of shape {array.shape}"
    index = int(np.argmax(array.ravel() != others.ravel()))
    return f"{_number(array.ravel()[index])} at element {index}"


def _number(value) -> str:
    return str(value) if isinstance(value, np.bool_) else f"{float(value):.6g}"
