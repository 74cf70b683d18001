"""Rules beyond MIL's own evaluation (`test_mil_oracle`) and beyond coremltools' tests of
operations, which `tests/judge` runs: convolutions of every padding, and what MIL leaves open."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from one_op import close, given, numbers, run

from workbench.errors import InputError


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
    found = run("conv", x=x, weight=weight, bias=b, **chosen)
    x = np.pad(x, [(0, 0), (0, 0), *pairs])
    given_ = [v if v is None else torch.from_numpy(v) for v in (x, weight, b)]
    close(found, F.conv2d(*given_, strides, 0, dilations, groups).numpy(), 1e-4)


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
    with pytest.raises(InputError, match="bounds|out of range"):
        read([0, 2])
    with pytest.raises(InputError, match="a negative index"):
        read([0, -1], validate_indices=True)


def test_scatter_adds_up_what_meets_in_one_place():
    rows, updates = np.array([1, 1, 1], np.int32), np.ones((3, 1), np.float32)
    data = np.zeros((2, 1), np.float32)
    found = run("scatter", data=data, indices=rows, updates=updates, mode="add")
    assert found.tolist() == [[0], [3]]


def test_a_zero_in_a_shape_keeps_the_size_as_far_from_the_right():
    x = numbers(2, 3)
    close(run("reshape", x=x, shape=[1, 0, -1, 0]), x.reshape(1, 1, 2, 3))
    close(run("reshape", x=x, shape=[0, -1]), x)


def test_a_seed_makes_every_call_the_same():
    for kind in ("random_uniform", "random_normal", "random_bernoulli"):
        first, again = (run(kind, shape=[9, 9], seed=7) for _ in range(2))
        assert np.array_equal(first, again) and first.std() > 0
