"""Rules against MIL's own NumPy evaluation: coremltools evaluates an op on constants, we run the
same op. Ops with one rounding must agree bit for bit, in fp16 too; others are compared in float32,
because NumPy rounds fp16 on the way."""

from functools import partial

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from one_op import MIL, given, run

from miltorch.ops import HALF_OPERANDS

F16, F32, I32 = np.float16, np.float32, np.int32
SHAPES = hnp.array_shapes(min_dims=1, max_dims=4, max_side=5)
RANK2 = hnp.array_shapes(min_dims=2, max_dims=4, max_side=4)
BOOL, AXIS = st.booleans(), st.integers(-2, 1)


@pytest.fixture(scope="session")
def oracle(ct):
    """op name and constant arguments → MIL's NumPy values, a list."""
    from coremltools.converters.mil.mil import Builder, Function

    def evaluate(kind, **arguments):
        with Function({}, opset_version=ct.target.iOS18), np.errstate(all="ignore"):
            result = getattr(Builder, kind)(**arguments)
        several = isinstance(result, (tuple, list))
        if kind == "dequantize":  # stays compressed until it is asked for
            return [result.op.materialized_val_inference()]
        return [np.asarray(v.val) for v in (result if several else [result])]

    return evaluate


# --- arguments: strategies of them -----------------------------------------------------------


def floats(*shape, low=-8, high=8, dtype=F32):
    return hnp.arrays(dtype, shape, elements=st.floats(low, high, width=16))


def whole(*shape, low=-8, high=8, dtype=F32):
    """Whole numbers: their sums of products are exact."""
    return hnp.arrays(dtype, shape, elements=st.integers(low, high))


def some(**arguments):
    """Keyword arguments, each a strategy or a value."""
    drawn = {
        name: value if isinstance(value, st.SearchStrategy) else st.just(value)
        for name, value in arguments.items()
    }
    return st.fixed_dictionaries(drawn)


def one(low=-8, high=8, dtype=F32, arrays=floats, **attributes):
    """x of any shape."""
    x = SHAPES.flatmap(lambda shape: arrays(*shape, low=low, high=high, dtype=dtype))
    return some(x=x, **attributes)


def two(low=-8, high=8, dtype=F32, arrays=floats):
    """x and y of one shape."""
    pairs = SHAPES.flatmap(
        lambda shape: arrays(2, *shape, low=low, high=high, dtype=dtype)
    )
    return pairs.map(lambda pair: {"x": pair[0].copy(), "y": pair[1].copy()})


@st.composite
def over_axes(draw, arrays=floats, dtype=F32):
    x = draw(RANK2.flatmap(lambda shape: arrays(*shape, low=1, high=17, dtype=dtype)))
    several = {"min_size": 1, "max_size": 2, "unique_by": lambda axis: axis % x.ndim}
    axes = draw(st.lists(st.integers(-x.ndim, x.ndim - 1), **several))
    return {"x": x, "axes": axes, "keep_dims": draw(BOOL)}


@st.composite
def along_axis(draw, **attributes):
    """x without equal elements, whose order nobody promises, and an axis."""
    size = draw(RANK2)
    x = np.array(draw(st.permutations(range(np.prod(size)))), F32).reshape(size)
    return {"x": x, "axis": draw(st.integers(0, x.ndim - 1))} | attributes


@st.composite
def sliced(draw):
    x, rows = draw(RANK2.flatmap(lambda shape: floats(*shape))), []
    for size in x.shape:
        some_of = st.slices(size).filter(lambda piece, n=size: range(n)[piece])
        span = range(size)[draw(some_of)]
        negative, opened, squeezed = draw(BOOL), draw(BOOL), draw(BOOL)
        first = span.start - size * negative
        rows.append((first, span.stop, span.step, opened or span.stop < 0, squeezed))
    names = "begin end stride end_mask squeeze_mask".split()
    return {"x": x} | dict(zip(names, map(list, zip(*rows))))


@st.composite
def updated(draw):
    spans = [
        sorted(draw(st.sets(st.integers(0, n), min_size=2, max_size=2))) for n in (4, 5)
    ]
    (begin, end), sizes = zip(*spans), [last - first for first, last in spans]
    update = draw(floats(*sizes))
    return {"x": draw(floats(4, 5)), "update": update, "begin": [*begin], "end": [*end]}


def product(k, n, flipped_x, flipped_y):
    x = whole(2, k, 3) if flipped_x else whole(2, 3, k)
    y = whole(2, n, k) if flipped_y else whole(2, k, n)
    return some(x=x, y=y, transpose_x=flipped_x, transpose_y=flipped_y)


def quantized(values, **attributes):
    """With one scale, or one for each row."""
    zeros = partial(whole, low=-9, high=9, dtype=np.int8)
    one_scale = some(scale=np.array(0.5, F32), zero_point=zeros())
    by_row = some(scale=np.array([0.5, 0.25], F32), zero_point=zeros(2), axis=0)
    arguments = st.tuples(some(input=values, **attributes), one_scale | by_row)
    return arguments.map(lambda parts: parts[0] | parts[1])


WHOLE = whole(3, 4, low=-50, high=50, dtype=I32)
BYTES = {"low": -40, "high": 40}
PAIR = st.lists(floats(2, 4), min_size=2, max_size=2)
ROWS = hnp.arrays(I32, (3, 3), elements=st.integers(0, 2))
DTYPES = st.sampled_from(["int32", "int8", "bool", "fp32"])
GELU = ("EXACT", "TANH_APPROXIMATION", "SIGMOID_APPROXIMATION")
# ops, their arguments; results agree bit for bit
EXACT = [
    ("add sub mul maximum minimum", two(dtype=F16)),
    ("real_div", two(0.25, 8, F16)),
    ("equal not_equal less less_equal greater greater_equal", two(-2, 2, F16, whole)),
    ("add sub mul maximum minimum", two(-50, 50, I32, whole)),
    ("floor_div mod", some(x=WHOLE, y=WHOLE.map(lambda y: abs(y) + 1))),
    ("logical_and logical_or logical_xor", two(0, 1, bool, whole)),
    ("logical_not", one(0, 1, bool, whole)),
    ("cast", some(x=floats(2, 3, low=-120, high=120), dtype=DTYPES)),
    ("abs ceil floor relu round sign square shape identity", one(dtype=F16)),
    ("sqrt", one(0, 8, F16)),
    ("reduce_argmax reduce_argmin", along_axis(keep_dims=True)),
    ("reduce_max reduce_min", over_axes()),
    ("reduce_sum reduce_mean reduce_l2_norm", over_axes(whole, I32)),
    ("argsort", along_axis(ascending=True)),
    ("topk", along_axis(k=1, ascending=False)),
    ("cumsum", along_axis()),
    ("transpose", some(x=floats(2, 3, 4), perm=st.permutations(range(3)))),
    ("reverse expand_dims", some(x=floats(2, 3, 4), axes=[1])),
    ("squeeze", some(x=floats(2, 1, 4), axes=[1])),
    ("tile", some(x=floats(2, 3), reps=[2, 1])),
    ("reshape", some(x=floats(2, 6), shape=[-1, 3])),
    ("band_part", some(x=floats(4, 5), lower=1, upper=0)),
    ("concat stack", some(values=PAIR, axis=AXIS)),
    ("split", some(x=floats(2, 4), axis=1, split_sizes=[1, 3])),
    ("split", some(x=floats(2, 4), axis=1, num_splits=2)),
    ("slice_by_index", sliced()),
    ("slice_update", updated()),
    ("gather gather_along_axis", some(x=floats(3, 3), indices=ROWS, axis=AXIS)),
    ("select", some(a=floats(2, 3), b=floats(2, 3), cond=hnp.arrays(bool, (2, 3)))),
    ("quantize", quantized(whole(2, 4, **BYTES), output_dtype="int8")),
    ("dequantize", quantized(whole(2, 4, **BYTES, dtype=np.int8))),
]
# results agree within a few units of float32
CLOSE = [
    ("acos asin atanh tan", one(-0.75, 0.75)),
    ("atan cos cosh erf exp exp2 sin sinh tanh sigmoid softplus softsign", one()),
    ("pow", two(0.25)),
    ("rsqrt inverse log", one(0.25, epsilon=F32(0.5))),
    ("elu leaky_relu thresholded_relu threshold", one(alpha=F32(0.5))),
    ("clip", one(alpha=F32(-1.5), beta=F32(2))),
    (
        "linear_activation clamped_relu scaled_tanh sigmoid_hard",
        one(alpha=F32(0.5), beta=F32(2)),
    ),
    ("gelu", one(mode=st.sampled_from(GELU))),
    ("reduce_sum reduce_mean reduce_prod reduce_l1_norm reduce_l2_norm", over_axes()),
    ("reduce_sum_square reduce_log_sum reduce_log_sum_exp", over_axes()),
    ("softmax", along_axis()),
    *(("matmul", product(k, n, k > 2, n > 2)) for k in (1, 4) for n in (1, 4)),
    ("linear", some(x=whole(3, 4), weight=whole(5, 4), bias=whole(5))),
]


def cases(table: list, tolerance: float) -> list:
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


# vectorised, so not bit-equal, but within a unit in the last place
ULPS = "exp sin cos sigmoid silu tanh softmax".split()
MORE = [("silu", one()), ("cast", some(x=floats(2, 3), dtype="fp16"))]
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
    for name, value in drawn.items():
        values = value if isinstance(value, list) else [value]
        if getattr(values[0], "dtype", None) in (F16, F32):
            halves = [F16(operand * F32(scale)) for operand in values]
            drawn[name] = halves if isinstance(value, list) else halves[0]
    modes = "declared", "exact"
    results = [run(kind, out=dtypes, precision=mode, **drawn) for mode in modes]
    with np.errstate(over="ignore"):
        for once, wide in zip(*(map(F16, outputs) for outputs in results)):
            ulps = 1 if kind in ULPS else 0
            np.testing.assert_array_max_ulp(once, wide, ulps)


@given(x=whole(2, 3, dtype=I32), y=whole(3, 4))
def test_integers_meet_floats_in_products(x, y):
    np.testing.assert_array_equal(run("matmul", x=x, y=y), x @ y)
    np.testing.assert_array_equal(run("linear", x=y.T.copy(), weight=x), y.T @ x.T)
