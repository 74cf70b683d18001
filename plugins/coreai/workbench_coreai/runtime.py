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
from workbench_coreai.aimodel import NUMPY, fixed_t, import_apple

# a thread for Core AI's event loop, because the caller's thread may run one, as in Jupyter
EVENT_LOOP_THREAD = ThreadPoolExecutor(1, "core-ai")
STDERR_LOCK = Lock()  # the process has one standard error
FREE_AXIS = -1  # Core AI's size of an axis that is not fixed


def wait(coroutine):
    """Runs a coroutine of Core AI to its end and returns its result."""
    return EVENT_LOOP_THREAD.submit(asyncio.run, coroutine).result()


@contextmanager
def no_stderr() -> Iterator[None]:
    """Context manager that drops what native code writes to the standard error of the
    process: a line for each function that it loads. Calls write nothing."""
    with STDERR_LOCK, open(os.devnull, "w") as null:
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
        self.dtype = dtype
        self.arrays = {}  # state tensor → Core AI's array
        for entry in shard.states.values():
            self.write_tensor(entry.tensor, np.zeros(entry.shape))

    def read_tensor(self, tensor: str) -> np.ndarray:
        return self.arrays[tensor].numpy()

    def write_tensor(self, tensor: str, value: np.ndarray) -> None:
        self.arrays[tensor] = ndarray(value, self.dtype)


def ndarray(value: np.ndarray, dtype: type):
    """A copy of an array as Core AI's."""
    return import_apple("coreai.runtime").NDArray(np.array(value, dtype))


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
        self.t_max = options.t_max
        self.dtype = NUMPY[options.program_dtype]
        # before the clock starts; where they are missing, the error names them
        import_apple("coreai_torch")
        import_apple("coreai.authoring")
        start = time.perf_counter()
        with no_stderr(), self._core_ai_errors():
            self.function = wait(load_function(self.path))
        self._check_interface(self.function.desc, fixed_t(options) or FREE_AXIS)
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
        self._check_inputs(inputs)
        arguments = {
            name: ndarray(inputs[name], self.dtype) for name in self.shard.inputs
        }
        state_arrays = state.arrays if state else {}
        with self._core_ai_errors():
            results = wait(call_function(self.function, arguments, state_arrays))
        outputs = {
            name: np.array(result.numpy(), np.float32)
            for name, result in results.items()
        }
        check_outputs(self.shard, inputs, outputs)
        return outputs

    def _check_inputs(self, inputs: dict[str, np.ndarray]) -> None:
        """Checks the shapes of inputs. The runtime itself accepts any T, and its messages name
        no input."""
        for name, shape in self.shard.inputs.items():
            actual = list(inputs[name].shape) if name in inputs else []
            sizes_fit = all(
                1 <= size <= self.t_max if declared == "T" else size == declared
                for size, declared in zip(actual, shape)
            )
            if len(actual) == len(shape) and sizes_fit:
                continue
            needed = f"{shape}, T from 1 to {self.t_max}"
            step = "give it so; for more tokens a call, export with more --tokens"
            raise InputError(f"input {name!r}", actual or "nothing", needed, step)

    def _check_interface(self, descriptor, T: int) -> None:
        """Compares the interface of a Core AI function with the manifest: the shapes of
        inputs and states, and the names of outputs alone, because every call checks
        their shapes.

        Args:
            T: what Core AI calls the size of the axis T.
        """
        actual = {
            name: [*descriptor.input_descriptor(name).shape]
            for name in descriptor.input_names
        }
        for name in descriptor.state_names:
            actual[name] = [*descriptor.state_descriptor(name).shape]
        actual |= {name: None for name in descriptor.output_names}

        declared = dict(self.shard.inputs)
        declared |= {state.tensor: state.shape for state in self.shard.states.values()}
        needed = {
            name: [T if size == "T" else size for size in shape]
            for name, shape in declared.items()
        }
        needed |= {name: None for name in self.shard.outputs}
        if actual != needed:
            subject = f"interface of shard {self.shard.name}"
            raise InputError(subject, actual, needed, "export the bundle again")

    @contextmanager
    def _core_ai_errors(self) -> Iterator[None]:
        """Context manager that turns errors of Core AI into one InputError."""
        try:
            yield
        except (RuntimeError, TypeError, ValueError) as problem:
            needed, step = "a program that Core AI runs", "export the bundle again"
            subject = f"shard {self.shard.name}"
            raise InputError(subject, one_line(problem), needed, step) from problem


async def call_function(function, inputs: dict, state: dict) -> dict:
    return await function(inputs, state=state)


async def load_function(package: Path):
    """The function `main` of an asset; the files that it is compiled to are
    temporary."""
    asset = import_apple("coreai.authoring").AIModelAsset.load(package)
    async with asset.executable() as model:
        return model.load_function("main")
