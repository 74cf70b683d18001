"""A shard with one function for each fixed T, as one model: each call runs the function
of its T.

Only the smallest T is loaded from the start, the others when a call first needs them. A
state belongs to the function that made it (natively an MLState belongs to one loaded
model), so a call of another T begins by copying every state."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack

import numpy as np

import miltorch
from workbench.bundle import Bundle, Shard
from workbench.errors import InputError
from workbench.runtime.base import Model, State, attribute, check_interface


class FunctionState:
    """Raw state of one function at a time: that of the last call, until a call of
    another T."""

    def __init__(self, model: Model):
        self.model, self.state = model, model.make_state()

    def of(self, model: Model) -> State:
        """A state on which `model` can run: the current one, or a copy in a fresh state
        of that model."""
        if model is not self.model:
            state = model.make_state()
            for tensor in {entry.tensor for entry in model.shard.states.values()}:
                state.raw.write(tensor, self.state.raw.read(tensor))
            self.model, self.state = model, state
        return self.state

    def read(self, tensor: str) -> np.ndarray:
        return self.state.raw.read(tensor)

    def write(self, tensor: str, value: np.ndarray) -> None:
        self.state.raw.write(tensor, value)


class FunctionsModel:
    """The functions of one shard. Attributes that it lacks (`executable`, `plan` …) are
    read from the function that ran last.

    Args:
        load: loads the function of the name that its argument `function` is.

    Raises:
        InputError: a function that the package lacks, or whose interface is not as the
            manifest says.
    """

    predict_calls = None  # each call runs the function of its own T

    def __init__(self, bundle: Bundle, shard: Shard, load: Callable[..., Model]):
        self.shard, self.load = shard, load
        self.names = {T: name for name, T in shard.functions.items()}
        self.hook, self.is_literal = None, False
        for T, name in self.names.items():
            check_interface(shard, miltorch.read(bundle.package(shard), name), T)
        self.functions: dict[int, Model] = {}  # those that are loaded, by T
        self.last = self.function(min(self.names))

    def function(self, T: int) -> Model:
        """The function of calls of T columns, loaded if it was not yet."""
        if T not in self.names:
            shapes = ", ".join(map(str, sorted(self.names)))
            raise InputError(
                f"inputs of shard {self.shard.name}",
                f"T = {T}",
                f"T of {shapes}",
                "pad the call",
            )
        if T not in self.functions:
            self.functions[T] = self.load(function=self.names[T])
        return self.functions[T]

    @property
    def loading_ms(self) -> dict[str, float | None]:
        """Sums over the functions that are loaded."""
        totals: dict[str, float | None] = {}
        for model in self.functions.values():
            for name, ms in model.loading_ms.items():
                totals.setdefault(name)
                if ms is not None:
                    totals[name] = (totals[name] or 0) + ms
        return totals

    def make_state(self) -> State:
        return State(self.shard, FunctionState(self.last))

    def predict(
        self, inputs: dict[str, np.ndarray], state: State | None = None
    ) -> dict[str, np.ndarray]:
        model = self.last = self.function(_columns(self.shard, inputs))
        own = None
        if state:
            own = state.raw.of(model)
        with ExitStack() as contexts:
            if self.hook is not None:
                contexts.enter_context(model.hooked(self.hook))
            if self.is_literal:
                contexts.enter_context(model.literal())
            return model.predict(inputs, own)

    def hooked(self, hook) -> AbstractContextManager:
        """Context manager inside which `hook` is called after each operation of the
        function that runs."""
        return attribute(self, "hook", hook)

    def literal(self) -> AbstractContextManager:
        """Context manager inside which every function executes its literal graph."""
        return attribute(self, "is_literal", True)

    def __getattr__(self, name: str):
        if name == "last":  # not there yet: the first function could not be loaded
            raise AttributeError(name)
        return getattr(self.last, name)


def each_function(models: Iterable[Model]) -> Iterator[Model]:
    """All models; a model of several functions counts as the functions that are
    loaded."""
    for model in models:
        yield from getattr(model, "functions", {0: model}).values()


def _columns(shard: Shard, inputs: dict[str, np.ndarray]) -> int:
    """T of a call, read from the first input that has an axis T. The function's model
    checks all other sizes."""
    for name, shape in shard.inputs.items():
        if "T" in shape and np.ndim(inputs.get(name)) == len(shape):
            return inputs[name].shape[shape.index("T")]
    return min(shard.functions.values())
