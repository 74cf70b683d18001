"""Several bytecodes in a single compiled call, each fed by those before it: what
dispatching them one by one costs is spent once."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from operator import is_not

import numpy as np
import torch

from miltorch.fast import kernels, machine
from miltorch.fast.bytecode import Bytecode
from miltorch.fast.program import FastProgram
from miltorch.ops.state import StateCell


class Chain:
    """Bytecodes that run one after another, each on states of its own.

    Args:
        bytecodes: inputs of one name are one array for all of them.
        links: by the name of an output, the input that it is of the bytecodes behind.

    Attributes:
        inputs: by name, the float32 array from which every run reads an input.
        outputs: of each bytecode, by name, the array to which every run writes it.
    """

    def __init__(self, bytecodes: Sequence[Bytecode], links: Mapping[str, str]):
        self.bytecodes = bytecodes  # own the memory that the code addresses
        self.inputs: dict[str, np.ndarray] = {}
        self.outputs: list[dict[str, np.ndarray]] = []
        self.states: list[tuple[int, str, tuple]] = []  # (bytecode, name, shape)
        # [bytecodes + 1, 2, 2]: seconds and nanoseconds of both clocks at each boundary
        self.clocks = np.zeros((len(bytecodes) + 1, 2, 2), np.int64)
        arrays: dict[str, np.ndarray] = {}
        codes, masks = [self._clock(0)], []
        for number, bytecode in enumerate(bytecodes):
            for name, shape in bytecode.inputs.items():
                if name not in arrays:
                    arrays[name] = self.inputs[name] = np.empty(shape, np.float32)
            addresses = [arrays[name].ctypes.data for name in bytecode.inputs]
            for name, shape in bytecode.states.items():
                self.states.append((number, name, shape))
                addresses.append(-len(self.states))
            outputs = {}
            for name, shape in bytecode.outputs.items():
                outputs[name] = np.empty(shape, np.float32)
                addresses.append(outputs[name].ctypes.data)
                if name in links:
                    arrays[links[name]] = outputs[name]
            self.outputs.append(outputs)
            codes += [_placed(bytecode.code, addresses), self._clock(number + 1)]
            masks.append(_placed(bytecode.masks, addresses))
        self.code, self.masks = np.concatenate(codes), np.concatenate(masks)
        # what the states were in the last run, and their addresses
        self.values: list[Callable] = [lambda: None] * len(self.states)
        self.addresses = np.zeros(len(self.states), np.int64)
        self.width = max(bytecode.width for bytecode in bytecodes)
        self.scratch = torch.empty(self.width)

    def run(
        self,
        inputs: Mapping[str, np.ndarray],
        states: Sequence[Mapping[str, StateCell]],
    ) -> bool:
        """Computes `outputs` and advances the states, those of each bytecode.

        Returns:
            False, with nothing done, where a bytecode would not run: see
            `Bytecode.run`.
        """
        for name, array in self.inputs.items():
            array[...] = inputs[name]
        values = [states[number][name].value for number, name, _ in self.states]
        addressed = [value() for value in self.values]
        if any(map(is_not, values, addressed)) and not self._bind(values):
            return False
        return kernels.on_threads(
            machine.execute,
            self.code,
            self.addresses,
            self.masks,
            self.scratch.data_ptr(),
            self.width,
            torch.get_num_threads(),
        )

    def _bind(self, values: list[torch.Tensor]) -> bool:
        """Takes the addresses of states; False where one is laid out otherwise."""
        for value, (*_, shape) in zip(values, self.states, strict=True):
            if value.shape != shape or value.dtype is not torch.float32:
                return False
            if not value.is_contiguous():
                return False
        # states belong to their sequences: a dropped one gives its memory back at once
        self.values = [weakref.ref(value) for value in values]
        self.addresses[:] = [value.data_ptr() for value in values]
        return True

    def ms(self) -> tuple[list[float], list[float]]:
        """Wall time of every bytecode in the last run, and CPU time of the calling
        thread in it."""
        times = self.clocks[1:] - self.clocks[:-1]
        wall, cpu = (times @ (1e3, 1e-6)).T.tolist()
        return wall, cpu

    def _clock(self, boundary: int) -> np.ndarray:
        """The instruction that reads the clocks at a boundary of bytecodes."""
        code = np.zeros((1, machine.FIELDS), np.int64)
        code[0, :2] = machine.CLOCK, self.clocks[boundary].ctypes.data
        return code


def _placed(fields: np.ndarray, addresses: list[int]) -> np.ndarray:
    """Fields of a bytecode in which addresses replace the elements of its `outer`,
    whose numbers are its only negative fields."""
    outer, placed = fields < 0, fields.copy()
    placed[outer] = np.array(addresses, np.int64)[-1 - fields[outer]]
    return placed


def linked(
    programs: Sequence[FastProgram],
    shapes: Mapping[str, tuple],
    links: Mapping[str, str],
) -> Chain | None:
    """The chain of programs whose inputs have these shapes; None unless each of them
    has run such a call and has a bytecode for it."""
    shapes, bytecodes = dict(shapes), []
    for program in programs:
        key = tuple([shapes.get(name) for name in program.inputs])
        bytecode = program.bytecodes.get(key)
        if not isinstance(bytecode, Bytecode):
            return None
        bytecodes.append(bytecode)
        for output, name in links.items():
            if output in bytecode.outputs:
                shapes[name] = bytecode.outputs[output]
    return Chain(bytecodes, links)
