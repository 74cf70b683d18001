"""Runs `.aimodel` shards with Apple's Core AI: its CPU interpreter on Linux and macOS
before 27, the system's own runtime from macOS 27 on, which may use devices. Nothing
here was run on a Mac."""

import asyncio
import os
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from miltorch.execute import Hook
from miltorch.program import Op, Type
from miltorch.quiet import quiet
from workbench.bundle import Bundle, Shard
from workbench.errors import InputError, one_line
from workbench.runtime.base import Model, State, check_interface, check_outputs
from workbench_coreai.aimodel import NUMPY, apple

_loading = threading.Lock()  # the standard error of the process is replaced meanwhile


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """An event loop in a thread of its own, because callers such as Jupyter may already
    run one."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="core-ai", daemon=True).start()
    return loop


def wait(coroutine):
    """Runs a coroutine of Core AI to its end and returns its result."""
    return asyncio.run_coroutine_threadsafe(coroutine, _loop()).result()


@contextmanager
def no_stderr() -> Iterator[None]:
    """Context manager that drops what native code writes to the standard error of the
    process."""
    sys.stderr.flush()
    with _loading, open(os.devnull, "w") as null:
        stderr = os.dup(2)
        os.dup2(null.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


class Arrays:
    """Raw state: one array per state tensor, which calls change in place."""

    def __init__(self, shapes: dict[str, list[int]], dtype: type):
        self.dtype, self.arrays = dtype, {}
        for tensor, shape in shapes.items():
            self.write(tensor, np.zeros(shape))

    def read(self, tensor: str) -> np.ndarray:
        return self.arrays[tensor].numpy()

    def write(self, tensor: str, value: np.ndarray) -> None:
        self.arrays[tensor] = apple("coreai.runtime").NDArray(
            np.array(value, self.dtype)
        )


class CoreAIModel(Model):
    """One shard as a Core AI function. Inputs, states and results have the program's
    dtype.

    Raises:
        InputError: Apple's packages are missing, the asset does not load, or its
            interface is not as the manifest says.
    """

    def __init__(self, bundle: Bundle, shard: Shard):
        self.shard, self.package = shard, bundle.package(shard)
        options = bundle.manifest.options
        self.t_max, self.dtype = options.t_max, NUMPY[options.program_dtype]
        with quiet():
            apple("coreai_torch"), apple("coreai.authoring")
        start = time.perf_counter()
        with no_stderr(), self._one_message():
            self.function = wait(_load(self.package))
        self.program = interface(self.function.desc, self.t_max)
        check_interface(shard, self.program, self.t_max)
        self.shapes = {
            name: list(kind.shape) for name, kind in self.program.states.items()
        }
        load_ms = (time.perf_counter() - start) * 1e3
        self.loading_ms = {"compile": None, "load": load_ms, "first_predict": None}

    def make_state(self) -> State:
        return State(self.shard, Arrays(self.shapes, self.dtype))

    def predict(
        self,
        inputs: dict[str, np.ndarray],
        state: State | None = None,
        hook: Hook | None = None,
    ) -> dict[str, np.ndarray]:
        """Runs the shard once; `hook` is called after the call with every value that
        the runtime logged, in the order of their operations, and replaces none."""
        for name, shape in self.shard.inputs.items():
            found = [*inputs[name].shape]
            # the runtime itself takes any T
            if "T" in shape and found[shape.index("T")] > self.t_max:
                subject, needed = f"input {name!r}", f"T from 1 to {self.t_max}"
                step = "export with more --tokens, or give fewer tokens a call"
                raise InputError(subject, f"shape {found}", needed, step)
        function = self.function if hook is None else self.logged.function
        array = apple("coreai.runtime").NDArray
        given = {n: array(np.array(value, self.dtype)) for n, value in inputs.items()}
        with self._one_message():
            results = wait(_call(function, given, state.raw.arrays if state else {}))
        outputs = {n: np.array(v.numpy(), np.float32) for n, v in results.items()}
        if hook is not None:
            self.logged.replay(hook)
        check_outputs(self.shard, inputs, outputs)
        return outputs

    @cached_property
    def logged(self) -> "Logged":
        with no_stderr(), self._one_message():
            return Logged(self.package, self.shard)

    @contextmanager
    def _one_message(self) -> Iterator[None]:
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


def interface(described, t_max: int) -> SimpleNamespace:
    """A function's inputs, states and outputs as `check_interface` reads those of a
    Core ML program."""

    def kinds(names: list[str], descriptor, free) -> dict[str, Type]:
        types = {}
        for name in names:
            kind = descriptor(name)
            sizes = tuple(free if n < 0 else n for n in kind.shape)
            types[name] = Type(kind.dtype.upper(), sizes)
        return types

    outputs = kinds(described.output_names, described.output_descriptor, None)
    return SimpleNamespace(
        inputs=kinds(described.input_names, described.input_descriptor, (1, t_max)),
        states=kinds(described.state_names, described.state_descriptor, None),
        outputs=list(outputs),
        block=SimpleNamespace(ops=[SimpleNamespace(outputs=list(outputs.items()))]),
        description=None,
    )


class Logged:
    """The function again, with Apple's IntermediateLogger; `replay` hands on what it
    has logged.

    Apple's own inspector takes no states, so its parts are put together here.
    """

    def __init__(self, package: Path, shard: Shard):
        runtime = apple("coreai.runtime")
        module = apple("coreai_torch.debugging.inspector")
        self.modules, self.values = shard.modules, defaultdict(dict)
        asset = apple("coreai.authoring").AIModelAsset.load(package)
        # as long as the function
        self.folder = tempfile.TemporaryDirectory(suffix=".aimodelx")
        asset._write_odix(Path(self.folder.name), enable_debug_info=True)
        self.model = wait(_load_model(runtime, self.folder.name))
        # reads the debug infos, before the function
        inspector = module.CoreAIInspector(self.model)
        numbers = sorted({number for number, _ in inspector._compile_map})
        sources, requested = inspector._build_mapping_and_compile_ids(numbers)
        callback = inspector._create_capture_callback(self.values, sources)
        logger = runtime.IntermediateLogger(requested, callback, True)
        self.function = self.model.load_function("main", intermediate_logger=logger)

    def replay(self, hook: Hook) -> None:
        """Calls the hook with each logged value, named by the id of its Core AI
        operation."""
        for number in sorted(self.values):
            for index, value in self.values[number].items():
                name = f"{number}"
                if index:
                    name += f".{index}"
                kind = Type(str(value.dtype).upper(), value.shape)
                op = Op("coreai", name, {}, [(name, kind)])
                hook(op, [torch.from_numpy(np.array(value))])
        self.values.clear()


async def _load_model(runtime, folder: str):
    return await runtime.AIModel.load(path=folder)
