"""Rules beyond MIL's own evaluation (`test_mil_oracle`) and beyond coremltools' tests of
operations, which `tests/judge` runs: convolutions of every padding, and what MIL leaves open."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from one_op import close, given, numbers, program, run
from refusal import refused

from miltorch import Executable, Type
from miltorch.program import Op, Ref


def pads(size, taps, stride, dilation, kind):
    """(before, after) of one axis, from MIL's description of pad_type."""
    reach = (taps - 1) * dilation + 1
    total = max((int(np.ceil(size / stride)) - 1) * stride + reach - size, 0)
    return {
        "valid": (0, 0),
        "custom": (1, 2),
        "same": (total // 2, total - total // 2),
        "same_lower": (total - total // 2, total // 2),
    }[kind]


@given(
    taps=st.tuples(*[st.integers(1, 3)] * 2),
    strides=st.tuples(*[st.integers(1, 3)] * 2),
    dilations=st.tuples(*[st.integers(1, 2)] * 2),
    kind=st.sampled_from(["valid", "same", "same_lower", "custom"]),
    groups=st.sampled_from([1, 2]),
    bias=st.booleans(),
)
def test_conv(taps, strides, dilations, kind, groups, bias):
    sizes = 6, 5
    x, weight = numbers(1, 4, *sizes), numbers(6, 4 // groups, *taps, seed=1)
    b = numbers(6, seed=2) if bias else None
    pairs = [pads(*axis, kind) for axis in zip(sizes, taps, strides, dilations)]
    chosen = dict(pad_type=kind, pad=[1, 2, 1, 2], groups=groups)
    chosen |= dict(strides=[*strides], dilations=[*dilations])
    y = run("conv", x=x, weight=weight, bias=b, **chosen)
    x = np.pad(x, [(0, 0), (0, 0), *pairs])
    tensors = [v if v is None else torch.from_numpy(v) for v in (x, weight, b)]
    close(y, F.conv2d(*tensors, strides, 0, dilations, groups).numpy(), 1e-4)


@pytest.mark.parametrize(
    "kind",
    [
        f"{name}{end}"
        for name in ("gather", "scatter")
        for end in ("", "_along_axis", "_nd")
    ],
)
def test_indices_past_the_end_are_refused_and_negative_ones_where_they_are_checked(
    kind,
):
    def read(rows, **checked):
        indices, x = np.array(rows, np.int32)[:, None], numbers(2, 1)
        if kind.startswith("gather"):
            return run(kind, x=x, indices=indices, **checked)
        indices = indices[:, 0] if kind == "scatter" else indices
        shared = dict(data=x, updates=numbers(2, 1), mode="update")
        return run(kind, indices=indices, **shared, **checked)

    close(read([0, -1]), read([0, 1]))
    with refused("bounds|out of range"):
        read([0, 2])
    with refused("a negative index"):
        read([0, -1], validate_indices=True)


LINE, TWICE = np.array([[[1, 2, np.inf]]], np.float32), np.ones(2, np.int32)
MEETING = {"data": LINE[0, 0], "indices": TWICE, "updates": LINE[0, 0, :2]}
LAST, THIRD = {"x": LINE, "begin": [0, 0, 2], "end": [1, 1, 3]}, [False, False, True]


@pytest.mark.parametrize(
    "kind, arguments, expected",
    [
        ("scatter", MEETING, [1, 5, np.inf]),
        # a zero keeps the size as far from the right
        ("reshape", {"x": LINE, "shape": [1, 1, 0, -1, 0]}, LINE[None, None]),
        ("reshape", {"x": LINE, "shape": [0, 0, -1]}, LINE),
        ("cumsum", {"x": LINE, "axis": -1, "exclusive": True}, [[[0, 1, 3]]]),
        ("reduce_sum", {"x": LINE, "axes": []}, LINE),
        ("slice_by_index", LAST | {"begin_mask": THIRD, "squeeze_mask": THIRD}, [[1]]),
        (
            "max_pool",
            {"x": LINE, "kernel_sizes": [2], "pad_type": "VALID"},
            [[[2, np.inf]]],
        ),
        (
            "conv_transpose",
            {"x": LINE, "weight": LINE[:, :, :1], "strides": [3], "pad_type": "same"},
            [[[1, 0, 0, 2, 0, 0, np.inf, 0, 0]]],
        ),
    ],
)
def test_special_arguments(kind, arguments, expected):
    close(run(kind, **arguments), expected)


def test_a_seed_makes_every_call_the_same():
    for kind in ("random_uniform", "random_normal", "random_bernoulli"):
        first, again = (run(kind, shape=[9, 9], seed=7) for _ in range(2))
        assert np.array_equal(first, again) and first.std() > 0


@pytest.mark.parametrize(
    "dtype, inside, outside",
    [
        ("INT16", [-32768, 32767], [5, 40000]),
        ("INT8", [-128, 127], [-129, 0]),
        ("UINT8", [0, 255], [-1, 3]),
        ("UINT16", [0, 65535], [0, 70000]),
    ],
)
def test_a_cast_that_changes_a_value_warns_once_with_its_name_and_the_range(
    dtype, inside, outside
):
    """MIL wraps 40000 to -25536 in int16, a Mac has been seen to keep it."""
    op = Op("cast", "to_few", {"x": Ref("x"), "dtype": dtype.lower()}, [])
    op.outputs.append(("y", Type(dtype, (2,))))
    executable = Executable(program([op], {"x": Type("INT32", (2,))}, ["y"]))

    def cast(values):
        return executable.run({"x": torch.tensor(values, dtype=torch.int32)}, {})["y"]

    assert cast(inside).tolist() == inside
    low, high = outside
    words = f"cast 'to_few' of test.mlpackage: values from {low} to {high} .*{dtype}"
    with pytest.warns(RuntimeWarning, match=words):
        cast(outside)
    cast(outside)  # no second warning, which would be an error
