"""Registers and loops of a `Bytecode`: how tensors with strides become the operands of
instructions."""

import torch

from miltorch.fast import machine

LONGEST = 4096  # instructions of a program; a longer one is no layer


class NotCompiled(Exception):
    """A call that no instruction stands for."""


class Recorder:
    """Registers of a program, and its instructions so far.

    Args:
        program: a `FastProgram`.
        values: its registers after a call.
    """

    def __init__(self, program, values: list):
        self.constants, self.values, self.wide = program.values, values, program.wide
        self.registers: dict[int, torch.Tensor] = {}
        self.known: set[int] = set()  # registers that shapes alone decide
        self.arrays: list = []  # what instructions address, alive as long as they are
        # of what stands for an array of the call: its name
        self.outer: dict[int, int] = {}
        self.code, self.width = [], 0  # width: bytes of the longest row

    def _fixed(self, register: int) -> bool:
        return register in self.known or isinstance(
            self.constants[register], torch.Tensor
        )

    def _value(self, register: int) -> torch.Tensor:
        """A register; one that no instruction writes is a constant."""
        if register in self.registers:
            return self.registers[register]
        constants = self.constants
        if register in self.known:
            constants = self.values
        constant = constants[register]
        need_instruction(isinstance(constant, torch.Tensor))
        if register in self.known:
            value = self._keep(constant.float())
        else:
            value = self.wide.setdefault(register, constant.float().contiguous())
        self.registers[register] = value
        return value

    def _new(self, register: int, dtype=torch.float16, kind: str = "") -> torch.Tensor:
        """Memory for a register that holds values of this dtype."""
        need_instruction(
            self.values[register].dtype == dtype or kind == "reduce_argmax"
        )
        self.registers[register] = self._keep(torch.empty(self.values[register].shape))
        return self.registers[register]

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that lives as long as the bytecode."""
        self.arrays.append(tensor)
        return tensor

    def _dense(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_contiguous():
            return x
        copy = self._keep(torch.empty(x.shape))
        self._strided(machine.COPY, copy, x)
        return copy

    def _flat(self, x: torch.Tensor, axis: int) -> torch.Tensor:
        """x with the axes from `axis` on as one; dense where those are no one axis."""
        flat = x.flatten(axis)
        if shared(flat, x):
            return flat
        return self._dense(x).flatten(axis)

    def _address(self, tensor: torch.Tensor) -> int:
        return self.outer.get(tensor.data_ptr(), tensor.data_ptr())

    def _strided(self, kind: int, out: torch.Tensor, *operands: torch.Tensor) -> None:
        """An operation on every element of `out`; operands are spread over it. The
        longest axis is the innermost."""
        shapes = [x.shape for x in operands]
        need_instruction(torch.broadcast_shapes(*shapes) == out.shape)
        tensors = [out]
        for x in operands:
            tensors.append(self._spread(x, out.shape))
        shape, steps = _merged(out.shape, [tensor.stride() for tensor in tensors])
        axes = sorted(range(len(shape)), key=shape.__getitem__)
        shape, steps = _in_order(shape, axes), [_in_order(step, axes) for step in steps]
        self._loop(kind, shape, steps, list(map(self._address, tensors)))

    def _spread(self, x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """x expanded to a shape; a constant of several numbers is stored so, which
        makes the loop over it a long one."""
        spread = x.expand(shape)
        if x.numel() > 1 and any(x is each for each in self.wide.values()):
            return self._keep(spread.contiguous())
        return spread

    def _rows(
        self, kind: int, out: torch.Tensor, x: torch.Tensor, *others, number: int = 0
    ) -> None:
        """An operation along the last axis of x; the operands' other axes are spread
        over those of `out`."""
        need_instruction(out.shape[:-1] == x.shape[:-1])
        tensors = [out, x]
        for y in others:
            tensors.append(y.expand(*x.shape[:-1], y.shape[-1]))
        strides = [tensor.stride() for tensor in tensors]
        shape, steps = _merged(x.shape[:-1], [stride[:-1] for stride in strides])
        for i, stride in enumerate(strides):
            steps[i] += stride[-1:]
        addresses = list(map(self._address, tensors))
        self._loop(kind, (*shape, x.shape[-1]), steps, addresses, number)

    def _loop(self, kind, shape, steps, addresses, number=0) -> None:
        """One instruction, or several where `shape` has more than four axes."""
        if len(shape) > 4:
            # axes of one element are none: there are several, and addresses to move
            need_instruction(min(addresses) >= 0)
            inner = [step[1:] for step in steps]
            for i in range(shape[0]):
                starts = []
                for address, step in zip(addresses, steps, strict=True):
                    starts.append(address + 4 * i * step[0])
                self._loop(kind, shape[1:], inner, starts, number)
            return
        self.width = max(self.width, 4 * shape[-1] if shape else 4)
        missing, operands = 4 - len(shape), []
        for address, step in zip(addresses, steps, strict=True):
            operands += [address, *[0] * missing, *(4 * s for s in step)]
        operands += [0] * (20 - len(operands))
        self._add(kind, *[1] * missing, *shape, *operands, number)

    def _add(self, *fields: int) -> None:
        need_instruction(len(self.code) < LONGEST)
        self.code.append(fields + (0,) * (machine.FIELDS - len(fields)))


def need_instruction(holds: bool) -> None:
    if not holds:
        raise NotCompiled


def shared(view: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a tensor lies in the memory of another one."""
    return view.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()


def _in_order(values: tuple, axes: list[int]) -> tuple:
    return tuple([values[axis] for axis in axes])


def _merged(shape, steps: list) -> tuple[tuple, list[tuple]]:
    """Axes that every operand runs through as one become one, and those of one element
    none: (sizes, strides of each)."""
    sizes, strides = [], []
    for axis, size in enumerate(shape):
        if size == 1:
            continue
        own = [step[axis] for step in steps]
        if sizes and strides[-1] == [size * step for step in own]:
            size *= sizes.pop()
            strides.pop()
        sizes.append(size)
        strides.append(own)
    if not sizes:
        return (), [()] * len(steps)
    return tuple(sizes), list(zip(*strides))
