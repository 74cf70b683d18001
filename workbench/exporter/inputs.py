"""The inputs that linear modules read while Hugging Face's model runs: their sums of x xᵀ,
and the statistics by which `compress.py` compresses the modules' matrices."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import nn

from workbench.exporter.compress import InputStatistics

Result = TypeVar("Result")
# Inputs whose products are summed in float32 at a time. Each sum goes to float64, for which
# as many additions are needed as the matrix x xᵀ has entries: fewer inputs at a time would
# take longer to add than to multiply.
INPUTS_PER_PRODUCT = 1024
# x xᵀ is symmetric: blocks of so many columns are computed from the diagonal on.
COLUMNS_PER_PRODUCT = 512


class LastInput(Generic[Result]):
    """The result that was computed for the last input of linear modules. Modules such as q,
    k and v read one tensor in turn, for which the result is computed once."""

    def __init__(self):
        # The tensor is kept, not its address: another one at the address of a freed one
        # would be taken for it.
        self._x: torch.Tensor | None = None
        self._result: Result | None = None

    def find(self, x: torch.Tensor) -> Result | None:
        """The result for the tensor `x` itself; None: it is not the last one."""
        return self._result if x is self._x else None

    def set(self, x: torch.Tensor, result: Result) -> None:
        """Remembers a result in place of the one before."""
        self._x, self._result = x, result


class InputSum:
    """The sum of x xᵀ over the inputs x of linear modules."""

    def __init__(self):
        self.total: torch.Tensor | None = None  # float64 [C, C]
        self.squares: list[torch.Tensor] = []  # |x|² of every input

    @classmethod
    def of(cls, x: torch.Tensor) -> "InputSum":
        """The sum over inputs [.., C]."""
        total = cls()
        total.add(x)
        return total

    def add(self, x: torch.Tensor) -> None:
        """Adds inputs [.., C]."""
        width = x.shape[-1]
        if self.total is None:
            self.total = torch.zeros(width, width, dtype=torch.float64)
        for inputs in x.reshape(-1, width).split(INPUTS_PER_PRODUCT):
            for start in range(0, width, COLUMNS_PER_PRODUCT):
                stop = start + COLUMNS_PER_PRODUCT
                product = inputs[:, start:stop].T @ inputs[:, start:]
                self.total[start:stop, start:] += product  # no second one in float64
        for start in range(0, width, COLUMNS_PER_PRODUCT):
            stop = start + COLUMNS_PER_PRODUCT
            self.total[stop:, start:stop] = self.total[start:stop, stop:].T
        self.squares.append(x.square().sum(-1).flatten())

    @property
    def count(self) -> int:
        """The number of inputs."""
        return sum(map(len, self.squares))

    def compute_statistics(self) -> InputStatistics:
        """The statistics of all inputs that were added. It takes a Cholesky decomposition
        of a matrix [C, C].

        The damping is the median |x|² over the number of inputs: the sampling error of
        an ordinary input's correlations. The mean of H's diagonal would not do. An
        attention sink's input of a down projection can be hundreds of times as long as
        any other, and damping that grows with it would drown all others."""
        median = float(torch.cat(self.squares).median())
        return InputStatistics.of(self.total / self.count, median / self.count)


@contextmanager
def summed_inputs(linear: dict[str, nn.Module]) -> Iterator[dict[str, InputSum]]:
    """Context manager in which the inputs of linear modules are summed while they run.

    Args:
        linear: the modules by name.

    Yields:
        The sum of each module that was called, by the same names. Modules that read one
        tensor share a sum.
    """
    sums: dict[str, InputSum] = {}
    last_input: LastInput[InputSum] = LastInput()

    def add_input(name: str, module: nn.Module, arguments: tuple) -> None:
        x = arguments[0]
        total = last_input.find(x)
        if total is not None:  # another module has added this tensor
            sums.setdefault(name, total)
            return
        total = sums.setdefault(name, InputSum())
        total.add(x)
        last_input.set(x, total)

    with ExitStack() as hooks:
        for name, module in linear.items():
            hook = partial(add_input, name)
            hooks.enter_context(module.register_forward_pre_hook(hook))
        yield sums
