"""Programs of one operation, made by hand: what tests of rules need, without protobuf or
conversion."""

from pathlib import Path

import hypothesis
import numpy as np
import torch

from miltorch import Executable, Program, Type
from miltorch.program import Block, Op, Ref

MIL = {
    np.dtype(np.float16): "FLOAT16",
    np.dtype(np.float32): "FLOAT32",
    np.dtype(np.int32): "INT32",
    np.dtype(np.int8): "INT8",
    np.dtype(np.uint8): "UINT8",
    np.dtype(np.bool_): "BOOL",
}
UNKNOWN = (None,)  # a shape of no known size: results of any rank pass


def given(*arguments, **named):
    """hypothesis' `given`: few examples, always the same ones, no clock."""
    chosen = hypothesis.settings(max_examples=12, derandomize=True, deadline=None)
    return lambda test: chosen(hypothesis.given(*arguments, **named)(test))


def program(
    ops: list[Op],
    inputs: dict[str, Type],
    outputs: list[str],
    states: dict[str, Type] | None = None,
) -> Program:
    block = Block([], ops, outputs)
    return Program(
        Path("test.mlpackage"), "main", inputs, states or {}, outputs, block, None
    )


def literal(value):
    """A Python value as the reader hands it over: numbers as arrays of MIL's defaults, strings as
    they are."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and isinstance(value[0], str):
        return value
    array = np.asarray(value)
    return array.astype(
        {"f": np.float32, "i": np.int32, "b": np.bool_}[array.dtype.kind]
    )


def tensor(array: np.ndarray) -> torch.Tensor:
    """An array as the runtime gives it to a program: fp16 in float32."""
    return torch.from_numpy(
        array.astype(np.float32) if array.dtype == np.float16 else np.array(array)
    )


def run(kind: str, *, out="FLOAT32", precision="declared", **arguments):
    """Runs one op: NumPy arrays (and lists of them) are inputs at run time, all else is constant,
    None is left out.

    Args:
        out: declared dtype of the result, or a list of them for several results.

    Returns:
        NumPy array(s), as the interpreter leaves them (fp16 values in float32).
    """
    inputs, values, bound = {}, {}, {}

    def bind(name, array):
        inputs[name], values[name] = Type(MIL[array.dtype], array.shape), tensor(array)
        return Ref(name)

    for name, value in arguments.items():
        if isinstance(value, np.ndarray):
            bound[name] = bind(name, value)
        elif isinstance(value, list) and value and isinstance(value[0], np.ndarray):
            bound[name] = [bind(f"{name}.{i}", v) for i, v in enumerate(value)]
        elif value is not None:
            bound[name] = literal(value)
    declared = [out] if isinstance(out, str) else out
    outputs = [(f"y{i}", Type(dtype, UNKNOWN)) for i, dtype in enumerate(declared)]
    one_op = program(
        [Op(kind, kind, bound, outputs)], inputs, [name for name, _ in outputs]
    )
    results = [
        v.numpy() for v in Executable(one_op, precision).run(values, {}).values()
    ]
    return results[0] if isinstance(out, str) else results


def numbers(*shape, seed=0) -> np.ndarray:
    """Seeded normal draws, float32."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def close(actual, expected, tolerance=1e-5):
    assert actual.shape == tuple(np.shape(expected))
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)
