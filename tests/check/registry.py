"""Planted faults by their names: "disk/NAME" in a copy of a bundle's files, "memory/NAME" in a
loaded decoder."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial


@dataclass(frozen=True)
class Fault:
    """`gate` is made for this kind of fault and must be RED once it is planted; others may be as
    well. `bundle`: where it is planted (see `cases.BASES`)."""

    gate: str
    plant: Callable
    bundle: str


FAULTS: dict[str, Fault] = {}


def fault(kind: str, gate: str, bundle: str = "llama", **named: tuple) -> Callable:
    """Decorates a function that plants the fault of its name or, with each of the arguments
    `named`, the fault of that name."""

    def register(function):
        for name, arguments in (named or {function.__name__: ()}).items():
            assert f"{kind}/{name}" not in FAULTS, name

            def plant(target, arguments=arguments):
                function(target, *arguments)

            FAULTS[f"{kind}/{name}"] = Fault(gate, plant, bundle)
        return function

    return register


on_disk, in_memory = partial(fault, "disk"), partial(fault, "memory")
