"""The def-use index of a program: which operation computes a value, which ones read it,
its type, its literal value."""

from collections import defaultdict

import numpy as np

from miltorch.program import Argument, Op, Program, Ref


class Graph:
    """Producers and readers of every value of a program, nested blocks included.

    Attributes:
        ops: the operations that compute at run time, in order; constants and compressed
            weights are left out.
        producers: value name → the operation that computes it, constants and compressed
            weights included.
        types: declared types of inputs, states and results by name.
    """

    def __init__(self, program: Program):
        all_ops = list(program.block.walk())
        self.program = program
        self.ops = [op for op in all_ops if not op.is_constant]
        self.producers = {name: op for op in all_ops for name, _ in op.outputs}
        self.types = program.inputs | program.states
        for op in all_ops:
            self.types.update(op.outputs)
        self._readers: dict[str, list[Op]] | None = None

    def producer(self, argument: Argument | None) -> Op | None:
        """The operation that computes an argument; None for inputs, states, literals
        and absent arguments."""
        if isinstance(argument, Ref):
            return self.producers.get(argument.name)
        return None

    def readers(self, name: str) -> list[Op]:
        """Every operation of `ops` that reads a value or state, in order."""
        if self._readers is None:
            self._readers = defaultdict(list)
            for op in self.ops:
                for value in set(op.reads()):
                    self._readers[value].append(op)
        return self._readers.get(name, [])

    def literal(self, argument: Argument | None) -> Argument | None:
        """An argument as the program states it, inline or as a plain constant; None for
        one that has to be computed."""
        if not isinstance(argument, Ref):
            return argument
        op = self.producers.get(argument.name)
        if op is None or op.kind != "const":
            return None
        return op.inputs["val"]

    def shape_of(self, argument: Argument) -> tuple[int | None, ...]:
        """The shape of an argument, None for sizes that are known only at run time."""
        if isinstance(argument, Ref):
            return self.types[argument.name].shape
        return np.shape(argument)
