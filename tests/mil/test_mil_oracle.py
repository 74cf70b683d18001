"""The rules of `miltorch/ops` against MIL's own evaluation.

coremltools evaluates an operation on constants with NumPy; the same operation runs on miltorch with
the same random arguments. Operations with one rounding must agree bit for bit, in fp16 too. The
others are compared in float32, because NumPy also rounds their intermediate results to fp16."""

from functools import partial

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from one_op import MIL, given, run

from miltorch.ops import HALF_OPERANDS

F16, F32, I32 = np.float16, np.float32, np.int32
SHAPES = hnp.array_shapes(min_dims=1, max_dims=4, max_side=5)
SHAPES_OF_RANK_2_UP = hnp.array_shapes(min_dims=2, max_dims=4, max_side=4)
BOOL = st.booleans()
Strategy = st.SearchStrategy


@pytest.fixture(scope="session")
def oracle(ct):
    """A function that takes a kind of operation and its arguments, and returns MIL's results, a
    list of arrays."""
    from coremltools.converters.mil.mil import Builder, Function

    def evaluate(kind, **arguments):
        with Function({}, opset_version=ct.target.iOS18), np.errstate(all="ignore"):
            result = getattr(Builder, kind)(**arguments)
        if kind == "dequantize":  # stays compressed until it is asked for
            return [result.op.materialized_val_inference()]
        results = result if isinstance(result, (tuple, list)) else [result]
        return [np.asarray(variable.val) for variable in results]

    return evaluate


# --- strategies of arguments --------------------------------------------------------------
#
# A strategy draws what an operation is called with: a dictionary of arguments by their names in MIL.


def floats(*shape: int, low=-8, high=8, dtype=F32) -> Strategy:
    """Arrays of numbers that fp16 can represent."""
    return hnp.arrays(dtype, shape, elements=st.floats(low, high, width=16))


def whole_numbers(*shape: int, low=-8, high=8, dtype=F32) -> Strategy:
    """Arrays of whole numbers, whose sums of products are exact."""
    return hnp.arrays(dtype, shape, elements=st.integers(low, high))


def arguments_of(**arguments) -> Strategy:
    """Arguments, each of which is drawn where it is a strategy and fixed where it is a value."""
    strategies = {
        name: value if isinstance(value, Strategy) else st.just(value)
        for name, value in arguments.items()
    }
    return st.fixed_dictionaries(strategies)


def unary(low=-8, high=8, dtype=F32, arrays=floats, **attributes) -> Strategy:
    """x of any shape, and other arguments."""
    x = SHAPES.flatmap(lambda shape: arrays(*shape, low=low, high=high, dtype=dtype))
    return arguments_of(x=x, **attributes)


def binary(low=-8, high=8, dtype=F32, arrays=floats) -> Strategy:
    """x and y of one shape."""
    pairs = SHAPES.flatmap(
        lambda shape: arrays(2, *shape, low=low, high=high, dtype=dtype)
    )
    return pairs.map(lambda pair: {"x": pair[0].copy(), "y": pair[1].copy()})


@st.composite
def over_axes(draw, arrays=floats, dtype=F32):
    """x of positive numbers, and one axis or two to reduce."""
    strategy = SHAPES_OF_RANK_2_UP.flatmap(
        lambda shape: arrays(*shape, low=1, high=17, dtype=dtype)
    )
    x = draw(strategy)
    axis = st.integers(-x.ndim, x.ndim - 1)
    axes = st.lists(axis, min_size=1, max_size=2, unique_by=lambda axis: axis % x.ndim)
    return {"x": x, "axes": draw(axes), "keep_dims": draw(BOOL)}


@st.composite
def along_axis(draw, **attributes):
    """x and an axis, and other arguments. No two elements of x are equal, because MIL does not
    define the order of equal ones."""
    shape = draw(SHAPES_OF_RANK_2_UP)
    elements = draw(st.permutations(range(np.prod(shape))))
    x = np.array(elements, F32).reshape(shape)
    return {"x": x, "axis": draw(st.integers(0, x.ndim - 1))} | attributes


@st.composite
def slices(draw):
    """x, and a slice of each axis that is not empty."""
    x = draw(SHAPES_OF_RANK_2_UP.flatmap(lambda shape: floats(*shape)))
    begin, end, stride, end_mask, squeeze_mask = [], [], [], [], []
    for size in x.shape:
        not_empty = st.slices(size).filter(lambda piece, n=size: range(n)[piece])
        span = range(size)[draw(not_empty)]
        counts_from_end, ignores_end, squeezes = draw(BOOL), draw(BOOL), draw(BOOL)
        begin.append(span.start - size if counts_from_end else span.start)
        end.append(span.stop)
        stride.append(span.step)
        # a negative end, to which a negative stride leads, would count from the end of the axis
        end_mask.append(ignores_end or span.stop < 0)
        squeeze_mask.append(squeezes)
    return {
        "x": x,
        "begin": begin,
        "end": end,
        "stride": stride,
        "end_mask": end_mask,
        "squeeze_mask": squeeze_mask,
    }


@st.composite
def slice_updates(draw):
    """x [4, 5], and an update of a part of it that is not empty."""
    begin, end = [], []
    for size in (4, 5):
        bounds = draw(st.sets(st.integers(0, size), min_size=2, max_size=2))
        begin.append(min(bounds))
        end.append(max(bounds))
    sizes = [stop - start for start, stop in zip(begin, end)]
    update = draw(floats(*sizes))
    return {"x": draw(floats(4, 5)), "update": update, "begin": begin, "end": end}


def products(k: int, n: int, transpose_x: bool, transpose_y: bool) -> Strategy:
    """x [2, 3, k] and y [2, k, n], with exact products."""
    x = whole_numbers(2, k, 3) if transpose_x else whole_numbers(2, 3, k)
    y = whole_numbers(2, n, k) if transpose_y else whole_numbers(2, k, n)
    return arguments_of(x=x, y=y, transpose_x=transpose_x, transpose_y=transpose_y)


def with_scales(values: Strategy, **attributes) -> Strategy:
    """An input of two rows that `values` draws, with one scale or with one for each row."""
    zero_points = partial(whole_numbers, low=-9, high=9, dtype=np.int8)
    one_scale = arguments_of(scale=np.array(0.5, F32), zero_point=zero_points())
    scale_of_row = arguments_of(
        scale=np.array([0.5, 0.25], F32), zero_point=zero_points(2), axis=0
    )
    parts = st.tuples(
        arguments_of(input=values, **attributes), one_scale | scale_of_row
    )
    return parts.map(lambda drawn: drawn[0] | drawn[1])


# --- operations ---------------------------------------------------------------------------

INTEGERS = whole_numbers(3, 4, low=-50, high=50, dtype=I32)
POSITIVE_INTEGERS = INTEGERS.map(lambda y: abs(y) + 1)
QUANTIZABLE = whole_numbers(2, 4, low=-40, high=40)
QUANTIZED = whole_numbers(2, 4, low=-40, high=40, dtype=np.int8)
PAIR = st.lists(floats(2, 4), min_size=2, max_size=2)
INDICES = hnp.arrays(I32, (3, 3), elements=st.integers(0, 2))
CONDITION = hnp.arrays(bool, (2, 3))
AXIS = st.integers(-2, 1)
DTYPES = st.sampled_from(["int32", "int8", "bool", "fp32"])
GELU_MODES = st.sampled_from(["EXACT", "TANH_APPROXIMATION", "SIGMOID_APPROXIMATION"])
# kinds of operations, and a strategy of their arguments; results agree bit for bit
EXACT = [
    ("add sub mul maximum minimum", binary(dtype=F16)),
    ("real_div", binary(0.25, 8, F16)),
    (
        "equal not_equal less less_equal greater greater_equal",
        binary(-2, 2, F16, whole_numbers),
    ),
    ("add sub mul maximum minimum", binary(-50, 50, I32, whole_numbers)),
    ("floor_div mod", arguments_of(x=INTEGERS, y=POSITIVE_INTEGERS)),
    ("logical_and logical_or logical_xor", binary(0, 1, bool, whole_numbers)),
    ("logical_not", unary(0, 1, bool, whole_numbers)),
    ("cast", arguments_of(x=floats(2, 3, low=-120, high=120), dtype=DTYPES)),
    ("abs ceil floor relu round sign square shape identity", unary(dtype=F16)),
    ("sqrt", unary(0, 8, F16)),
    ("reduce_argmax reduce_argmin", along_axis(keep_dims=True)),
    ("reduce_max reduce_min", over_axes()),
    ("reduce_sum reduce_mean reduce_l2_norm", over_axes(whole_numbers, I32)),
    ("argsort", along_axis(ascending=True)),
    ("topk", along_axis(k=1, ascending=False)),
    ("cumsum", along_axis()),
    ("transpose", arguments_of(x=floats(2, 3, 4), perm=st.permutations(range(3)))),
    ("reverse expand_dims", arguments_of(x=floats(2, 3, 4), axes=[1])),
    ("squeeze", arguments_of(x=floats(2, 1, 4), axes=[1])),
    ("tile", arguments_of(x=floats(2, 3), reps=[2, 1])),
    ("reshape", arguments_of(x=floats(2, 6), shape=[-1, 3])),
    ("band_part", arguments_of(x=floats(4, 5), lower=1, upper=0)),
    ("concat stack", arguments_of(values=PAIR, axis=AXIS)),
    ("split", arguments_of(x=floats(2, 4), axis=1, split_sizes=[1, 3])),
    ("split", arguments_of(x=floats(2, 4), axis=1, num_splits=2)),
    ("slice_by_index", slices()),
    ("slice_update", slice_updates()),
    (
        "gather gather_along_axis",
        arguments_of(x=floats(3, 3), indices=INDICES, axis=AXIS),
    ),
    ("select", arguments_of(a=floats(2, 3), b=floats(2, 3), cond=CONDITION)),
    ("quantize", with_scales(QUANTIZABLE, output_dtype="int8")),
    ("dequantize", with_scales(QUANTIZED)),
]
# the same; results agree within a few units of float32
CLOSE = [
    ("acos asin atanh tan", unary(-0.75, 0.75)),
    ("atan cos cosh erf exp exp2 sin sinh tanh sigmoid softplus softsign", unary()),
    ("pow", binary(0.25)),
    ("rsqrt inverse log", unary(0.25, epsilon=F32(0.5))),
    ("elu leaky_relu thresholded_relu threshold", unary(alpha=F32(0.5))),
    ("clip", unary(alpha=F32(-1.5), beta=F32(2))),
    (
        "linear_activation clamped_relu scaled_tanh sigmoid_hard",
        unary(alpha=F32(0.5), beta=F32(2)),
    ),
    ("gelu", unary(mode=GELU_MODES)),
    ("reduce_sum reduce_mean reduce_prod reduce_l1_norm reduce_l2_norm", over_axes()),
    ("reduce_sum_square reduce_log_sum reduce_log_sum_exp", over_axes()),
    ("softmax", along_axis()),
    ("matmul", products(k=1, n=1, transpose_x=False, transpose_y=False)),
    ("matmul", products(k=1, n=4, transpose_x=False, transpose_y=True)),
    ("matmul", products(k=4, n=1, transpose_x=True, transpose_y=False)),
    ("matmul", products(k=4, n=4, transpose_x=True, transpose_y=True)),
    (
        "linear",
        arguments_of(
            x=whole_numbers(3, 4), weight=whole_numbers(5, 4), bias=whole_numbers(5)
        ),
    ),
]


def cases(table: list[tuple[str, Strategy]], tolerance: float) -> list:
    """A case for every kind of every row."""
    return [
        pytest.param(kind, arguments, tolerance, id=kind)
        for kinds, arguments in table
        for kind in kinds.split()
    ]


OPERATIONS = cases(EXACT, 0) + cases(CLOSE, 5e-6)


@pytest.mark.matrix(30, wide=400)
@pytest.mark.parametrize("kind, arguments, tolerance", OPERATIONS)
@given(data=st.data())
def test_operations_are_those_of_mil(oracle, kind, arguments, tolerance, data):
    """Results have MIL's shapes and dtypes, and equal bits where the tolerance is 0."""
    drawn = data.draw(arguments)
    expected = oracle(kind, **drawn)
    dtypes = [MIL.get(value.dtype, "FLOAT32") for value in expected]
    for ours, theirs in zip(run(kind, out=dtypes, **drawn), expected, strict=True):
        assert ours.shape == theirs.shape
        near = {"rtol": tolerance, "atol": tolerance}
        np.testing.assert_allclose(ours.astype(theirs.dtype), theirs, **near)


# torch's vectorised functions on fp16 are not bit-equal, but within a unit in the last place
ULPS = "exp sin cos sigmoid silu tanh softmax".split()
# what the tables above lack; only dtypes are taken from MIL's results
MORE = [("silu", unary()), ("cast", arguments_of(x=floats(2, 3), dtype="fp16"))]
HALVES = [case for case in OPERATIONS if case.id in HALF_OPERANDS] + cases(MORE, 0)


@pytest.mark.matrix(20, wide=200)
@pytest.mark.parametrize("kind, arguments, tolerance", HALVES)
@given(data=st.data(), scale=st.sampled_from([1e-4, 1.0, 40.0]))
def test_operations_on_fp16_are_those_in_float32_rounded_once(
    oracle, kind, arguments, tolerance, data, scale
):
    drawn = data.draw(arguments)
    results = oracle(kind, **drawn)
    dtypes = ["BOOL" if result.dtype == bool else "FLOAT16" for result in results]
    # every argument of floats, scaled and rounded to fp16
    for name, value in drawn.items():
        values = value if isinstance(value, list) else [value]
        if getattr(values[0], "dtype", None) in (F16, F32):
            halves = [F16(operand * F32(scale)) for operand in values]
            drawn[name] = halves if isinstance(value, list) else halves[0]
    # `declared` computes on fp16 as it is, `exact` in float32 without rounding
    modes = "declared", "exact"
    results = [run(kind, out=dtypes, precision=mode, **drawn) for mode in modes]
    with np.errstate(over="ignore"):
        for once, wide in zip(*(map(F16, outputs) for outputs in results)):
            ulps = 1 if kind in ULPS else 0
            np.testing.assert_array_max_ulp(once, wide, ulps)


@given(x=whole_numbers(2, 3, dtype=I32), y=whole_numbers(3, 4))
def test_integers_meet_floats_in_products(x, y):
    np.testing.assert_array_equal(run("matmul", x=x, y=y), x @ y)
    np.testing.assert_array_equal(run("linear", x=y.T.copy(), weight=x), y.T @ x.T)
