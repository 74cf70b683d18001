"""Rules of `miltorch/ops` beyond those that `test_mil_oracle.py` compares with MIL's own evaluation
and that `tests/judge` runs coremltools' tests on: convolutions of every padding, arguments at the
edge of what MIL defines, and casts."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from one_op import close, given, numbers, program, run
from refusal import refused

from miltorch import Executable, Type
from miltorch.program import Op, Ref


def pads(
    size: int, taps: int, stride: int, dilation: int, kind: str
) -> tuple[int, int]:
    """How many zeros MIL's `pad_type` puts before and behind an axis. `custom`: those that
    `test_conv` asks for."""
    if kind == "valid":
        return 0, 0
    if kind == "custom":
        return 1, 2
    # `same`: as many as give ceil(size / stride) results; an odd one goes behind, for
    # `same_lower` before
    reach = (taps - 1) * dilation + 1
    results = int(np.ceil(size / stride))
    total = max((results - 1) * stride + reach - size, 0)
    smaller, larger = total // 2, total - total // 2
    return (smaller, larger) if kind == "same" else (larger, smaller)


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
    # the zeros before and behind each axis
    pairs = [pads(*axis, kind) for axis in zip(sizes, taps, strides, dilations)]
    chosen = dict(pad_type=kind, pad=[1, 2, 1, 2], groups=groups)
    chosen |= dict(strides=[*strides], dilations=[*dilations])
    y = run("conv", x=x, weight=weight, bias=b, **chosen)
    # torch has no `same_lower`, so that it gets x with the zeros and pads nothing
    x = np.pad(x, [(0, 0), (0, 0), *pairs])
    tensors = [v if v is None else torch.from_numpy(v) for v in (x, weight, b)]
    close(y, F.conv2d(*tensors, strides, 0, dilations, groups).numpy(), 1e-4)


def gather(kind: str, rows: list[int], **attributes) -> np.ndarray:
    """Reads `rows` of a fixed x [2, 1]."""
    indices = np.array(rows, np.int32)[:, None]
    return run(kind, x=numbers(2, 1), indices=indices, **attributes)


def scatter(kind: str, rows: list[int], **attributes) -> np.ndarray:
    """Writes to `rows` of an array [2, 1]."""
    indices = np.array(rows, np.int32)
    if kind != "scatter":
        indices = indices[:, None]
    data = updates = numbers(2, 1)
    operands = {"data": data, "updates": updates, "indices": indices}
    return run(kind, **operands, mode="update", **attributes)


@pytest.mark.parametrize(
    "access, kind",
    [
        (gather, "gather"),
        (gather, "gather_along_axis"),
        (gather, "gather_nd"),
        (scatter, "scatter"),
        (scatter, "scatter_along_axis"),
        (scatter, "scatter_nd"),
    ],
)
def test_negative_indices_count_from_the_end_unless_checked_and_none_may_be_past_it(
    access, kind
):
    close(access(kind, [0, -1]), access(kind, [0, 1]))
    with refused("bounds|out of range"):
        access(kind, [0, 2])
    with refused("a negative index"):
        access(kind, [0, -1], validate_indices=True)


@dataclass(frozen=True)
class SpecialCase:
    """Arguments at the edge of what MIL defines; `name` says what the result must show."""

    name: str
    kind: str
    arguments: dict
    expected: object


LINE = np.array([[[1, 2, np.inf]]], np.float32)  # [1, 1, 3]
THIRD_AXIS = [False, False, True]
SPECIAL_CASES = [
    SpecialCase(
        "updates of one index add up",
        "scatter",
        {
            "data": LINE[0, 0],
            "indices": np.array([1, 1], np.int32),
            "updates": LINE[0, 0, :2],
        },
        [1, 5, np.inf],
    ),
    SpecialCase(
        "a zero in a longer shape keeps the size as far from the right",
        "reshape",
        {"x": LINE, "shape": [1, 1, 0, -1, 0]},
        LINE[None, None],
    ),
    SpecialCase(
        "a zero in a shape of the same rank keeps the size",
        "reshape",
        {"x": LINE, "shape": [0, 0, -1]},
        LINE,
    ),
    SpecialCase(
        "an exclusive sum does not contain its own element",
        "cumsum",
        {"x": LINE, "axis": -1, "exclusive": True},
        [[[0, 1, 3]]],
    ),
    SpecialCase(
        "a sum over no axes changes nothing",
        "reduce_sum",
        {"x": LINE, "axes": []},
        LINE,
    ),
    SpecialCase(
        "a squeezed axis has its first element where begin is masked",
        "slice_by_index",
        {
            "x": LINE,
            "begin": [0, 0, 2],
            "end": [1, 1, 3],
            "begin_mask": THIRD_AXIS,
            "squeeze_mask": THIRD_AXIS,
        },
        [[1]],
    ),
    SpecialCase(
        "a pad type may be in capitals",
        "max_pool",
        {"x": LINE, "kernel_sizes": [2], "pad_type": "VALID"},
        [[[2, np.inf]]],
    ),
    SpecialCase(
        "same padding grows a transposed convolution to stride times its size",
        "conv_transpose",
        {"x": LINE, "weight": LINE[:, :, :1], "strides": [3], "pad_type": "same"},
        [[[1, 0, 0, 2, 0, 0, np.inf, 0, 0]]],
    ),
]


@pytest.mark.parametrize("case", SPECIAL_CASES, ids=lambda case: case.name)
def test_arguments_at_the_edge_of_what_mil_defines(case):
    close(run(case.kind, **case.arguments), case.expected)


@pytest.mark.parametrize(
    "kind", ["random_uniform", "random_normal", "random_bernoulli"]
)
def test_random_operations_with_a_seed_give_the_same_in_every_call(kind):
    first, second = run(kind, shape=[9, 9], seed=7), run(kind, shape=[9, 9], seed=7)
    assert np.array_equal(first, second)
    assert first.std() > 0


@pytest.mark.parametrize(
    "dtype, in_range, out_of_range",
    [
        ("INT16", [-32768, 32767], [5, 40000]),
        ("INT8", [-128, 127], [-129, 0]),
        ("UINT8", [0, 255], [-1, 3]),
        ("UINT16", [0, 65535], [0, 70000]),
    ],
)
def test_a_cast_that_changes_a_value_warns_once_with_its_name_and_the_range(
    dtype, in_range, out_of_range
):
    """MIL wraps 40000 to -25536 in int16, a Mac has been seen to keep it."""
    operands = {"x": Ref("x"), "dtype": dtype.lower()}
    op = Op("cast", "to_few", operands, [("y", Type(dtype, (2,)))])
    executable = Executable(program([op], {"x": Type("INT32", (2,))}, ["y"]))

    def cast(values: list[int]) -> torch.Tensor:
        return executable.run({"x": torch.tensor(values, dtype=torch.int32)}, {})["y"]

    assert cast(in_range).tolist() == in_range
    low, high = out_of_range
    words = f"cast 'to_few' of test.mlpackage: values from {low} to {high} .*{dtype}"
    with pytest.warns(RuntimeWarning, match=words):
        cast(out_of_range)
    cast(out_of_range)  # pytest makes an error of a second warning
