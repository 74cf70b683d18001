"""Compares the interface of a package with the one that the manifest states for its shard,
before anything runs."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import miltorch
from workbench.bundle import Shard
from workbench.bundle.names import POS
from workbench.errors import InputError

UNKNOWN = miltorch.Type("")  # of an output that no operation computes


@dataclass(frozen=True, repr=False)
class SizeRange:
    """The sizes of a flexible axis of an input, from `lowest` to `highest`."""

    lowest: int
    highest: float

    def __repr__(self) -> str:
        return f"({self.lowest}, {self.highest})"  # as messages print it


# of one axis of a package's tensor; None: known only when the program runs
Size = int | SizeRange | None


def check_interface(shard: Shard, program: miltorch.Program, t_max: int) -> None:
    """Compares the interface of a shard in the manifest with that of its package: the
    names and every size of inputs, outputs and states, and the dtypes of inputs (`pos`
    int32, all others floats). An axis T must take 1 to t_max tokens, or t_max alone where
    the package fixes it.

    Raises:
        InputError: names the first value that differs.
    """
    types = program.inputs | program.states
    for op in program.block.ops:
        types.update(op.outputs)
    ranges = _flexible_sizes(program)

    _check_names(shard, "inputs", shard.inputs, program.inputs)
    for name, shape in shard.inputs.items():
        subject = f"input {name!r}"
        packaged_type = types.get(name, UNKNOWN)
        _check_input_dtype(shard, subject, name, packaged_type)
        sizes: list[Size] = list(packaged_type.shape)
        if name in ranges:
            # the type has None for a size that the description gives a range
            sizes = [size or bound for size, bound in zip(sizes, ranges[name])]
        _check_shape(shard, subject, sizes, shape, t_max)

    _check_names(shard, "outputs", shard.outputs, program.outputs)
    for name, shape in shard.outputs.items():
        sizes = list(types.get(name, UNKNOWN).shape)
        # an output's size may be known only when the program runs
        _check_shape(
            shard, f"output {name!r}", sizes, shape, t_max, allows_unknown=True
        )

    states = {entry.tensor: entry.shape for entry in shard.states.values()}
    _check_names(shard, "states", states, program.states)
    for logical_name, entry in shard.states.items():
        sizes = list(types[entry.tensor].shape)
        _check_shape(shard, f"state {logical_name!r}", sizes, entry.shape, t_max)


def _flexible_sizes(program: miltorch.Program) -> dict[str, list[SizeRange]]:
    """The sizes of every axis of the inputs whose description gives ranges."""
    flexible = {}
    for value in getattr(program.description, "input", ()):
        if axes := value.type.multiArrayType.shapeRange.sizeRanges:
            flexible[value.name] = [
                # a negative upper bound stands for none
                SizeRange(
                    axis.lowerBound,
                    axis.upperBound if axis.upperBound >= 0 else math.inf,
                )
                for axis in axes
            ]
    return flexible


def _check_names(
    shard: Shard, subject: str, declared: Iterable[str], packaged: Iterable[str]
) -> None:
    if set(declared) != set(packaged):
        packaged_names = ", ".join(sorted(packaged))
        declared_names = ", ".join(sorted(declared))
        raise _disagreement(shard, subject, packaged_names, declared_names)


def _check_input_dtype(
    shard: Shard, subject: str, name: str, packaged: miltorch.Type
) -> None:
    dtypes = ("INT32",) if name == POS else ("FLOAT16", "FLOAT32")
    if packaged.dtype not in dtypes:
        raise _disagreement(shard, subject, packaged.dtype, " or ".join(dtypes))


def _check_shape(
    shard: Shard,
    subject: str,
    sizes: Sequence[Size],
    declared: Sequence[int | str],
    t_max: int,
    allows_unknown: bool = False,
) -> None:
    """Raises an InputError unless every size in the package agrees with the declared
    one; `allows_unknown`: an unknown size agrees with any."""
    agrees = len(sizes) == len(declared) and all(
        (size is None and allows_unknown) or _agrees(size, n, t_max)
        for size, n in zip(sizes, declared)
    )
    if not agrees:
        needed = f"{declared}, T from 1 to {t_max}"
        raise _disagreement(shard, subject, f"shape {sizes}", needed)


def _agrees(size: Size, declared: int | str, t_max: int) -> bool:
    """Whether a size in a package is as declared: the same one, t_max for T, or a range
    that holds every T."""
    if isinstance(size, SizeRange):
        return declared == "T" and size.lowest <= 1 and size.highest >= t_max
    return size == (t_max if declared == "T" else declared)


def _disagreement(
    shard: Shard, subject: str, packaged: object, declared: object
) -> InputError:
    return InputError(
        f"{subject} of shard {shard.name}",
        f"{packaged} in the package",
        f"{declared}, as bundle.json says",
        "export or copy the bundle again",
    )
