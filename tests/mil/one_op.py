"""Programs of one operation, built in Python: what tests of rules need, without protobuf or
conversion. `run("add", x=array, y=array)` builds such a program, runs it, and returns the result.

A *rule* is the function of `miltorch/ops` that computes one kind of operation."""

from collections.abc import Callable
from pathlib import Path

import hypothesis
import numpy as np
import torch

from miltorch import Executable, Program, Type
from miltorch.program import Block, Op, Ref

# NumPy's dtype → MIL's name of it
MIL = {
    np.dtype(np.float16): "FLOAT16",
    np.dtype(np.float32): "FLOAT32",
    np.dtype(np.int32): "INT32",
    np.dtype(np.int8): "INT8",
    np.dtype(np.uint8): "UINT8",
    np.dtype(np.bool_): "BOOL",
}
# kind of NumPy's dtypes → the dtype of MIL's literals
LITERAL_DTYPES = {"f": np.float32, "i": np.int32, "b": np.bool_}
UNKNOWN = (None,)  # a shape without a known size, which results of any rank pass


def given(*arguments, **named) -> Callable:
    """hypothesis' `given` with few examples, the same in every run as long as the test's text
    and its id stay the same, and without a limit of time."""
    settings = hypothesis.settings(max_examples=12, derandomize=True, deadline=None)
    return lambda test: settings(hypothesis.given(*arguments, **named)(test))


def program(
    ops: list[Op],
    inputs: dict[str, Type],
    outputs: list[str],
    states: dict[str, Type] | None = None,
) -> Program:
    """A program of these operations, as the reader returns it for a package."""
    return Program(
        package=Path("test.mlpackage"),
        function="main",
        inputs=inputs,
        states=states or {},
        outputs=outputs,
        block=Block([], ops, outputs),
        description=None,
    )


def literal(value):
    """A Python value as the reader gives it to an operation: a number, or a list of numbers, as an
    array of the dtype that MIL gives literals; a string, or a list of strings, as it is."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and isinstance(value[0], str):
        return value
    array = np.asarray(value)
    return array.astype(LITERAL_DTYPES[array.dtype.kind])


def tensor(array: np.ndarray) -> torch.Tensor:
    """An array as the runtime gives it to a program: a copy, fp16 as float32."""
    if array.dtype == np.float16:
        return torch.from_numpy(array.astype(np.float32))
    return torch.from_numpy(np.array(array))


def is_list_of_arrays(value) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], np.ndarray)


def run(
    kind: str, *, out: str | list[str] = "FLOAT32", precision="declared", **arguments
):
    """Runs one operation.

    Args:
        kind: of the operation.
        out: declared dtype of the result, or a list of them for several results.
        precision: mode of the executor.
        arguments: by MIL's names of the parameters. Arrays and lists of arrays become inputs of
            the program, None is left out, and all else becomes a constant.

    Returns:
        The result as an array in the dtype that the executor computes in (fp16 values in
        float32), or a list of them where `out` is a list.
    """
    inputs: dict[str, Type] = {}
    values: dict[str, torch.Tensor] = {}

    def add_input(name: str, array: np.ndarray) -> Ref:
        inputs[name] = Type(MIL[array.dtype], array.shape)
        values[name] = tensor(array)
        return Ref(name)

    operands = {}
    for name, value in arguments.items():
        if isinstance(value, np.ndarray):
            operands[name] = add_input(name, value)
        elif is_list_of_arrays(value):
            operands[name] = [
                add_input(f"{name}.{i}", array) for i, array in enumerate(value)
            ]
        elif value is not None:
            operands[name] = literal(value)
    dtypes = [out] if isinstance(out, str) else out
    outputs = [(f"y{i}", Type(dtype, UNKNOWN)) for i, dtype in enumerate(dtypes)]
    op = Op(kind, kind, operands, outputs)
    one_op = program([op], inputs, [name for name, _ in outputs])
    tensors = Executable(one_op, precision).run(values, {})
    results = [result.numpy() for result in tensors.values()]
    return results[0] if isinstance(out, str) else results


def numbers(*shape, seed=0) -> np.ndarray:
    """Seeded normal draws, float32."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def close(actual: np.ndarray, expected, tolerance=1e-5) -> None:
    """Asserts that shapes are equal and values agree within an absolute plus a relative
    tolerance."""
    assert actual.shape == tuple(np.shape(expected))
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)
