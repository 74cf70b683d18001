"""Patterns of operations in a program: see `Pattern`."""

from dataclasses import dataclass

from miltorch.constants import Constants, python_value
from miltorch.graph import Graph
from miltorch.ops import OPERATIONS
from miltorch.program import Argument, Op, Ref

# a list attribute with elements that the program computes
MIXED = object()


class Pattern:
    """The form of an argument of an operation, written as the formula that computes it.

    ```
    a, b, cos, sin = Value(), Value(), Value(), Value()
    axis = Value(int)
    rotated = operation("concat", [a * cos - b * sin, b * cos + a * sin], axis=axis)
    match = matcher.match(rotated, op)  # a `Match`
    ```
    `op` matches if it is a `concat` whose first two values are the results of `sub` and
    `add`, whose operands are four products, and if `a`, `b`, `cos` and `sin` are each
    the same value in both. `match` is None if it does not; otherwise it has the thing that
    every pattern stands for: `match.argument(cos)` is a `Ref` or a literal,
    `match.attribute(axis)` a Python number, `match.operation(rotated)` the `Op`.

    | pattern | argument |
    |---|---|
    | `Value()` | any; the same one wherever this object stands |
    | `Value(int, Ref)` | an attribute of one of these types, `Ref` if it is computed |
    | `x + y`, `x - y`, `x * y`, `x / y` | the result of `add`, `sub`, `mul`, `real_div` |
    | `operation(kind, *operands, **attributes)` | the result of an operation of this kind |
    | `one_of(-1, 3)` | an attribute that equals one of these |
    | `1` | a constant of one element, of this value; an attribute that equals it |
    | `[x, y]` | a list that begins with these |
    | `Scaled(x)` | x times any constants of one element; `match.factor` is their product |
    | `OrFirstOperand(x)` | the result of the operation x, or what its first operand stands for |

    Operands stand in the order of the operation's rule in `miltorch.ops`; a pattern may
    leave out the last ones. Attributes that a pattern of an operation does not name have
    the values that MIL gives them by default, unless the pattern is `resembling(kind,
    *operands)`. An operation matches only if all its results are fp16, and if MIL knows
    all its arguments. A pattern that stands twice in another one stands for one
    operation."""

    def __add__(self, other: "Pattern") -> "OperationPattern":
        return operation("add", self, other)

    def __sub__(self, other: "Pattern") -> "OperationPattern":
        return operation("sub", self, other)

    def __rsub__(self, other: float) -> "OperationPattern":
        return operation("sub", other, self)

    def __mul__(self, other: "Pattern") -> "OperationPattern":
        return operation("mul", self, other)

    def __truediv__(self, other: "Pattern") -> "OperationPattern":
        return operation("real_div", self, other)


@dataclass(frozen=True, eq=False)
class OperationPattern(Pattern):
    """`attributes` are None where any are allowed."""

    kind: str
    operands: tuple
    attributes: dict[str, object] | None


def operation(kind: str, *operands, **attributes) -> OperationPattern:
    """The pattern of an operation, see `Pattern`."""
    return OperationPattern(kind, operands, attributes)


def resembling(kind: str, *operands) -> OperationPattern:
    """The pattern of an operation with any attributes."""
    return OperationPattern(kind, operands, None)


class Value(Pattern):
    """Any argument, or an attribute of one of `types`."""

    def __init__(self, *types: type):
        self.types = types or (object,)


@dataclass(frozen=True, eq=False)
class OneOf(Pattern):
    """See `one_of`."""

    values: tuple


def one_of(*values) -> OneOf:
    """The pattern of an attribute that equals one of `values`."""
    return OneOf(values)


@dataclass(frozen=True, eq=False)
class Scaled(Pattern):
    """A pattern times any number of constants of one element."""

    pattern: Pattern


@dataclass(frozen=True, eq=False)
class OrFirstOperand(Pattern):
    """The result of an operation, or what its first operand stands for where the
    operation is missing."""

    operation: OperationPattern


class Match:
    """What each pattern within a pattern stands for. Parts of an operation that is missing
    (see `OrFirstOperand`) stand for nothing: None."""

    def __init__(self):
        self.bound: dict[Pattern, object] = {}

    def argument(self, pattern: Value) -> Argument | None:
        """The argument of an operation that `Value()` stands for."""
        return self.bound.get(pattern)

    def attribute(self, pattern: Value):
        """The attribute that `Value(types)` stands for: a Python number, bool, string or
        list, or a `Ref` where it is computed."""
        return self.bound.get(pattern)

    def operation(self, pattern: OperationPattern) -> Op | None:
        """The operation that `operation(...)` or a formula stands for."""
        return self.bound.get(pattern)

    def factor(self, pattern: Scaled) -> float:
        """The product of the constants in `Scaled`."""
        return self.bound[pattern]


class Matcher:
    """Matches patterns with the operations of a program."""

    def __init__(self, graph: Graph, constants: Constants):
        self.graph = graph
        self.constants = constants

    def match(self, pattern: OperationPattern, op: Op) -> Match | None:
        """What every pattern within `pattern` stands for; None if `op` does not match."""
        match = Match()
        return match if self._binds_operation(pattern, op, match.bound) else None

    def computed(self, argument: Argument | None, kind: str) -> Op | None:
        """The operation of a kind that computes an argument at run time, if all its
        results are fp16."""
        op = self.graph.producer(argument)
        if op is None or op.kind != kind or op.is_constant:
            return None
        is_half = all(declared.dtype == "FLOAT16" for _, declared in op.outputs)
        return op if is_half else None

    def _binds(self, pattern, argument: Argument | None, bound: dict) -> bool:
        """Whether an argument fits a pattern, given the bindings so far; adds its own to
        `bound`."""
        match pattern:
            case Value():
                first = bound.setdefault(pattern, argument)
                return first is argument or (
                    isinstance(argument, Ref) and first == argument
                )
            case OperationPattern(kind):
                op = self.computed(argument, kind)
                return op is not None and self._binds_operation(pattern, op, bound)
            case OrFirstOperand(inner):
                if self.computed(argument, inner.kind) is None:
                    return self._binds(inner.operands[0], argument, bound)
                return self._binds(inner, argument, bound)
            case Scaled(inner):
                argument, bound[pattern] = self._unscaled(argument)
                return self._binds(inner, argument, bound)
            case list():
                return self._binds_list(pattern, argument, bound)
        return self.constants.scalar(argument) == pattern

    def _binds_list(self, patterns: list, arguments, bound: dict) -> bool:
        if not isinstance(arguments, list) or len(arguments) < len(patterns):
            return False
        pairs = zip(patterns, arguments)
        return all(self._binds(pattern, argument, bound) for pattern, argument in pairs)

    def _binds_operation(self, pattern: OperationPattern, op: Op, bound: dict) -> bool:
        if op.kind != pattern.kind or bound.setdefault(pattern, op) is not op:
            return False
        rule = OPERATIONS[op.kind]
        if not op.inputs.keys() <= {*rule.operands, *rule.attributes}:
            return False
        if pattern.attributes is not None:
            for name, default in rule.attributes.items():
                value = self.attribute(op, name, default)
                expected = pattern.attributes.get(name, default)
                if not _binds_attribute(expected, value, bound):
                    return False
        arguments = [op.inputs.get(name) for name in rule.operands]
        return self._binds_list([*pattern.operands], arguments, bound)

    def attribute(self, op: Op, name: str, default):
        """An attribute as a Python value; a `Ref` where it is computed at run time."""
        if name not in op.inputs:
            return default
        argument = op.inputs[name]
        value = self.constants.value_or_none(argument)
        if value is not None:
            return python_value(value)
        return argument if isinstance(argument, Ref) else MIXED

    def _unscaled(self, argument: Argument | None) -> tuple[Argument | None, float]:
        """An argument without the constant scalars that multiply it one after another,
        and their product."""
        factor = 1.0
        while (product := self.computed(argument, "mul")) is not None:
            scalar = self.constants.scalar(product.inputs.get("y"))
            if scalar is None:
                break
            factor *= scalar
            argument = product.inputs.get("x")
        return argument, factor


def _binds_attribute(pattern, value, bound: dict) -> bool:
    match pattern:
        case Value():
            first = bound.setdefault(pattern, value)
            return isinstance(value, pattern.types) and first == value
        case OneOf(values):
            return value in values
    return value == pattern
