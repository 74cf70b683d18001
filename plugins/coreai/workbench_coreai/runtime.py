"""Runs `.aimodel` shards with Apple's Core AI: its CPU interpreter on Linux and macOS
before 27, the system's own runtime from macOS 27 on, which may use devices. Nothing
here was run on a Mac."""

import asyncio
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

import numpy as np

from miltorch.execute import Hook
from workbench.bundle import Bundle, Shard
from workbench.errors import InputError, one_line
from workbench.runtime.base import Model, State, check_outputs
from workbench_coreai.aimodel import NUMPY, apple, size_of_t

# of its own, because callers such as Jupyter may already run an event loop
THREAD = ThreadPoolExecutor(1, "core-ai")
LOADING = Lock()  # the standard error of the process is replaced meanwhile


def wait(coroutine):
    """Runs a coroutine of Core AI to its end and returns its result."""
    return THREAD.submit(asyncio.run, coroutine).result()


@contextmanager
def no_stderr() -> Iterator[None]:
    """Context manager that drops what native code writes to the standard error of the
    process."""
    with LOADING, open(os.devnull, "w") as null:
        stderr = os.dup(2)
        os.dup2(null.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


class CoreAIState(State):
    """One array per state tensor, which calls change in place."""

    def __init__(self, shard: Shard, dtype: type):
        super().__init__(shard)
        self.dtype, self.arrays = dtype, {}
        for entry in shard.states.values():
            self.write_tensor(entry.tensor, np.zeros(entry.shape))

    def read_tensor(self, tensor: str) -> np.ndarray:
        return self.arrays[tensor].numpy()

    def write_tensor(self, tensor: str, value: np.ndarray) -> None:
        self.arrays[tensor] = ndarray(value, self.dtype)


def ndarray(value: np.ndarray, dtype: type):
    return apple("coreai.runtime").NDArray(np.array(value, dtype))


class CoreAIModel(Model):
    """One shard as a Core AI function. Inputs, states and results have the program's
    dtype.

    Raises:
        InputError: Apple's packages are missing, the asset does not load, or its
            interface is not as the manifest says.
    """

    def __init__(self, bundle: Bundle, shard: Shard):
        self.shard = shard
        self.path = bundle.package(shard)
        options = bundle.manifest.options
        self.t_max, self.dtype = options.t_max, NUMPY[options.program_dtype]
        self.states = {entry.tensor: entry.shape for entry in shard.states.values()}
        apple("coreai_torch"), apple("coreai.authoring")
        start = time.perf_counter()
        with no_stderr(), self._core_ai_errors():
            self.function = wait(_load(self.path))
        self._check_interface(self.function.desc, size_of_t(options))
        load_ms = (time.perf_counter() - start) * 1e3
        self.loading_ms = {"compile": None, "load": load_ms, "first_predict": None}

    def make_state(self) -> CoreAIState:
        return CoreAIState(self.shard, self.dtype)

    def predict(
        self,
        inputs: dict[str, np.ndarray],
        state: CoreAIState | None = None,
        hook: Hook | None = None,
    ) -> dict[str, np.ndarray]:
        """Runs the shard once.

        Raises:
            InputError: an input that is missing, of another shape or of more tokens than
                the bundle takes; a hook.
        """
        if hook:
            needed = "the Core ML bundle of the same checkpoint"
            raise InputError(
                "hook", "a Core AI program", needed, "run that on portable"
            )
        self._check(inputs)
        given = {name: ndarray(inputs[name], self.dtype) for name in self.shard.inputs}
        arrays = state.arrays if state else {}
        with self._core_ai_errors():
            results = wait(_call(self.function, given, arrays))
        outputs = {n: np.array(v.numpy(), np.float32) for n, v in results.items()}
        check_outputs(self.shard, inputs, outputs)
        return outputs

    def _check(self, inputs: dict[str, np.ndarray]) -> None:
        """Checks the shapes of inputs. The runtime itself accepts any T, and its messages name
        no input."""
        for name, shape in self.shard.inputs.items():
            actual = list(inputs[name].shape) if name in inputs else []
            fits = [
                1 <= size <= self.t_max if n == "T" else size == n
                for size, n in zip(actual, shape)
            ]
            if len(actual) != len(shape) or not all(fits):
                subject, needed = (
                    f"input {name!r}",
                    f"{shape}, T from 1 to {self.t_max}",
                )
                step = "give it so; for more tokens a call, export with more --tokens"
                raise InputError(subject, actual or "nothing", needed, step)

    def _check_interface(self, described, T: int) -> None:
        """Compares the shapes of inputs and states with the manifest. Compares outputs by name
        alone, because every call checks their shapes."""
        tensors = {n: described.input_descriptor(n) for n in described.input_names}
        tensors |= {n: described.state_descriptor(n) for n in described.state_names}
        shapes = {name: [*tensor.shape] for name, tensor in tensors.items()}
        shapes |= dict.fromkeys(described.output_names)
        declared = {
            name: [T if n == "T" else n for n in shape]
            for name, shape in (self.shard.inputs | self.states).items()
        }
        declared |= dict.fromkeys(self.shard.outputs)
        if shapes != declared:
            subject = f"interface of shard {self.shard.name}"
            raise InputError(subject, shapes, declared, "export the bundle again")

    @contextmanager
    def _core_ai_errors(self) -> Iterator[None]:
        """Context manager that turns errors of Core AI into one InputError."""
        try:
            yield
        except (RuntimeError, TypeError, ValueError) as problem:
            needed, step = "a program that Core AI runs", "export the bundle again"
            subject = f"shard {self.shard.name}"
            raise InputError(subject, one_line(problem), needed, step) from problem


async def _call(function, inputs: dict, state: dict) -> dict:
    return await function(inputs, state=state)


async def _load(package: Path):
    """The function `main` of an asset; the files that it is compiled to are
    temporary."""
    asset = apple("coreai.authoring").AIModelAsset.load(package)
    async with asset.executable() as model:
        return model.load_function("main")
