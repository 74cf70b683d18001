"""Rules against MIL's own NumPy evaluation: coremltools evaluates an op on constants, we run the
same op.

In fp16, ops with one rounding must agree bit for bit. Where NumPy would round on the way (softmax,
norms, products, sigmoid) it gets float32, and our one rounding must be within 2 units in the last
place.
"""

import numpy as np
import pytest
from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from one_op import given, run

FINITE = st.floats(-8, 8, width=16)
SHAPES = hnp.array_shapes(min_dims=1, max_dims=4, max_side=5)


def arrays(shape=SHAPES, dtype=np.float16, elements=None):
    return hnp.arrays(dtype, shape, elements=FINITE if elements is None else elements)


@pytest.fixture(scope="session")
def oracle(ct):
    """op name and constant arguments → MIL's NumPy value(s), None where MIL has none."""
    from coremltools.converters.mil.mil import Builder, Function

    def evaluate(kind, **arguments):
        with Function({}, opset_version=ct.target.iOS18), np.errstate(all="ignore"):
            result = getattr(Builder, kind)(**arguments)
        return (
            [np.asarray(v.val) for v in result]
            if isinstance(result, (tuple, list))
            else np.asarray(result.val)
        )

    return evaluate


def same(found, expected):
    assert found.shape == expected.shape
    assert np.array_equal(found.astype(expected.dtype), expected, equal_nan=True)


def near(found, expected, ulps=2):
    """Within `ulps` fp16 steps of the expected value, or of 1/16 of the largest one where terms
    cancel."""
    assert found.shape == expected.shape
    scale = np.maximum(np.abs(expected), np.abs(expected).max(initial=0) / 16).astype(
        np.float16
    )
    assert np.all(
        np.abs(found.astype(np.float64) - expected)
        <= ulps * np.spacing(scale).astype(np.float64)
    )


ONE_ROUNDING = ("add", "sub", "mul", "real_div", "maximum", "minimum")


@pytest.mark.matrix(4, wide=40)
@pytest.mark.parametrize("kind", ONE_ROUNDING)
@given(data=st.data())
def test_arithmetic_rounds_once(oracle, kind, data):
    shape = data.draw(SHAPES)
    x, y = data.draw(arrays(shape)), data.draw(arrays(shape))
    y = np.where(y == 0, np.float16(1), y) if kind == "real_div" else y
    same(run(kind, out="FLOAT16", x=x, y=y), oracle(kind, x=x, y=y))


@pytest.mark.matrix(4, wide=40)
@pytest.mark.parametrize(
    "kind", ["equal", "not_equal", "less", "less_equal", "greater", "greater_equal"]
)
@given(data=st.data())
def test_comparison(oracle, kind, data):
    shape = data.draw(SHAPES)
    x, y = (
        data.draw(arrays(shape, elements=st.integers(-2, 2).map(float))) for _ in "xy"
    )
    same(run(kind, out="BOOL", x=x, y=y), oracle(kind, x=x, y=y))


@pytest.mark.matrix(4, wide=40)
@pytest.mark.parametrize(
    "kind", ["add", "sub", "mul", "maximum", "minimum", "floor_div", "mod"]
)
@given(data=st.data())
def test_integer_arithmetic(oracle, kind, data):
    shape = data.draw(SHAPES)
    x = data.draw(hnp.arrays(np.int32, shape, elements=st.integers(-50, 50)))
    y = data.draw(hnp.arrays(np.int32, shape, elements=st.integers(1, 9)))
    same(run(kind, out="INT32", x=x, y=y), oracle(kind, x=x, y=y))


@pytest.mark.matrix(4, wide=40)
@pytest.mark.parametrize("kind", ["logical_and", "logical_or", "logical_xor"])
@given(data=st.data())
def test_logic(oracle, kind, data):
    shape = data.draw(SHAPES)
    x, y = (data.draw(hnp.arrays(np.bool_, shape)) for _ in "xy")
    same(run(kind, out="BOOL", x=x, y=y), oracle(kind, x=x, y=y))
    same(run("logical_not", out="BOOL", x=x), oracle("logical_not", x=x))


@given(
    x=arrays((2, 3), elements=st.floats(0.25, 8, width=16)),
    y=arrays((2, 3), elements=st.floats(-2, 2, width=16)),
)
def test_power(oracle, x, y):
    near(
        run("pow", out="FLOAT16", x=x, y=y),
        oracle("pow", x=x.astype(np.float32), y=y.astype(np.float32)),
    )


@pytest.mark.matrix(4, wide=40)
@pytest.mark.parametrize(
    "kind",
    [
        "abs",
        "ceil",
        "floor",
        "relu",
        "relu6",
        "round",
        "sign",
        "sqrt",
        "square",
        "identity",
    ],
)
@given(x=arrays())
def test_unary_rounds_once(oracle, kind, x):
    x = np.abs(x) if kind == "sqrt" else x
    if kind in ("relu6", "identity"):  # MIL has no value for these
        expected = np.clip(x, 0, 6) if kind == "relu6" else x
    else:
        expected = oracle(kind, x=x)
    same(run(kind, out="FLOAT16", x=x), expected)


@pytest.mark.matrix(4, wide=40)
@pytest.mark.parametrize(
    "kind, low, high",
    [
        ("acos", -1, 1),
        ("asin", -1, 1),
        ("atan", -8, 8),
        ("atanh", -0.75, 0.75),
        ("cos", -8, 8),
        ("cosh", -8, 8),
        ("erf", -8, 8),
        ("exp", -8, 8),
        ("exp2", -8, 8),
        ("sin", -8, 8),
        ("sinh", -8, 8),
        ("tan", -1, 1),
        ("tanh", -8, 8),
        ("sigmoid", -8, 8),
        ("softplus", -8, 8),
        ("softsign", -8, 8),
    ],
)
@given(data=st.data())
def test_transcendental(oracle, kind, low, high, data):
    x = data.draw(arrays(elements=st.floats(low, high, width=16)))
    found, expected = (
        run(kind, out="FLOAT16", x=x),
        oracle(kind, x=x.astype(np.float32)),
    )
    ulp = np.spacing(np.abs(expected).astype(np.float16)).astype(np.float32)
    assert np.all(np.abs(found - expected) <= 2 * ulp)


@pytest.mark.matrix(4, wide=40)
@pytest.mark.parametrize(
    "kind, arguments",
    [
        ("rsqrt", {"epsilon": 0.5}),
        ("inverse", {"epsilon": 0.25}),
        ("log", {"epsilon": 0.5}),
        ("elu", {"alpha": 0.5}),
        ("leaky_relu", {"alpha": 0.25}),
        ("clip", {"alpha": -1.5, "beta": 2.0}),
        ("threshold", {"alpha": 0.5}),
        ("thresholded_relu", {"alpha": 0.5}),
        ("linear_activation", {"alpha": 0.5, "beta": 2.0}),
        ("clamped_relu", {"alpha": 0.5, "beta": 2.0}),
        ("scaled_tanh", {"alpha": 2.0, "beta": 0.5}),
        ("sigmoid_hard", {"alpha": 0.25, "beta": 0.5}),
        ("gelu", {"mode": "EXACT"}),
        ("gelu", {"mode": "TANH_APPROXIMATION"}),
        ("gelu", {"mode": "SIGMOID_APPROXIMATION"}),
    ],
)
@given(x=arrays(dtype=np.float32, elements=st.floats(-8, 8, width=16)))
def test_activations_with_attributes(oracle, kind, arguments, x):
    x = np.abs(x) + 0.125 if kind in ("rsqrt", "inverse", "log") else x
    expected = oracle(
        kind,
        x=x,
        **{
            k: np.float32(v) if isinstance(v, float) else v
            for k, v in arguments.items()
        },
    )
    np.testing.assert_allclose(
        run(kind, x=x, **arguments), expected, rtol=2e-6, atol=2e-6
    )


@pytest.mark.matrix(4, wide=40)
@pytest.mark.parametrize(
    "kind",
    [
        "reduce_sum",
        "reduce_mean",
        "reduce_max",
        "reduce_min",
        "reduce_prod",
        "reduce_l1_norm",
        "reduce_l2_norm",
        "reduce_sum_square",
        "reduce_log_sum",
        "reduce_log_sum_exp",
    ],
)
@given(data=st.data())
def test_reductions(oracle, kind, data):
    x = data.draw(
        arrays(hnp.array_shapes(min_dims=2, max_dims=4, max_side=4), np.float32)
    ) + np.float32(9)
    axes = data.draw(
        st.lists(
            st.integers(-x.ndim, x.ndim - 1),
            min_size=1,
            max_size=2,
            unique_by=lambda a: a % x.ndim,
        )
    )
    keep_dims = data.draw(st.booleans())
    expected = oracle(kind, x=x, axes=axes, keep_dims=keep_dims)
    np.testing.assert_allclose(
        run(kind, x=x, axes=axes, keep_dims=keep_dims), expected, rtol=3e-6
    )


@pytest.mark.matrix(4, wide=40)
@pytest.mark.parametrize("kind", ["reduce_argmax", "reduce_argmin"])
@given(data=st.data())
def test_argument_of_extreme(oracle, kind, data):
    x = data.draw(arrays(hnp.array_shapes(min_dims=2, max_dims=3, max_side=4)))
    axis, keep_dims = (
        data.draw(st.integers(-x.ndim, x.ndim - 1)),
        data.draw(st.booleans()),
    )
    same(
        run(kind, out="INT32", x=x, axis=axis, keep_dims=keep_dims),
        oracle(kind, x=x, axis=axis, keep_dims=keep_dims),
    )


@given(x=arrays(hnp.array_shapes(min_dims=1, max_dims=4, max_side=6)), data=st.data())
def test_softmax(oracle, x, data):
    axis = data.draw(st.integers(-x.ndim, x.ndim - 1))
    near(
        run("softmax", out="FLOAT16", x=x, axis=axis),
        oracle("softmax", x=x.astype(np.float32), axis=axis),
    )


@given(x=arrays(st.tuples(st.integers(1, 3), st.integers(2, 12))))
def test_layer_norm(oracle, x):
    assume(x.astype(np.float32).std(-1).min() > 0.25)
    gamma, beta = (
        np.linspace(0.5, 1.5, x.shape[1], dtype=np.float32),
        np.linspace(-1, 1, x.shape[1], dtype=np.float32),
    )
    wide = x.astype(np.float32)
    arguments = {"axes": [1], "epsilon": np.float32(1e-5)}
    expected = oracle("layer_norm", x=wide, gamma=gamma, beta=beta, **arguments)
    near(
        run(
            "layer_norm",
            out="FLOAT16",
            x=x,
            gamma=gamma,
            beta=beta,
            axes=[1],
            epsilon=1e-5,
        ),
        expected,
    )


@given(data=st.data())
def test_matmul(oracle, data):
    m, k, n = (data.draw(st.integers(1, 6)) for _ in "mkn")
    flip_x, flip_y = data.draw(st.booleans()), data.draw(st.booleans())
    x, y = (
        data.draw(arrays((2, k, m) if flip_x else (2, m, k))),
        data.draw(arrays((2, n, k) if flip_y else (2, k, n))),
    )
    arguments = dict(x=x, y=y, transpose_x=flip_x, transpose_y=flip_y)
    wide = oracle(
        "matmul", **arguments | {"x": x.astype(np.float32), "y": y.astype(np.float32)}
    )
    near(run("matmul", out="FLOAT16", **arguments), wide)


@given(x=hnp.arrays(np.int32, (2, 3), elements=st.integers(-9, 9)), y=arrays((3, 4)))
def test_integers_meet_floats_in_products(x, y):
    near(
        run("matmul", out="FLOAT16", x=x, y=y),
        (x.astype(np.float32) @ y.astype(np.float32)),
    )
    near(
        run("linear", out="FLOAT16", x=np.ascontiguousarray(y.T), weight=x),
        y.T.astype(np.float32) @ x.T,
    )


@given(
    x=arrays(st.tuples(st.integers(1, 3), st.just(4))),
    weight=arrays((5, 4)),
    bias=arrays((5,)),
)
def test_linear(oracle, x, weight, bias):
    wide = {
        k: v.astype(np.float32) for k, v in dict(x=x, weight=weight, bias=bias).items()
    }
    near(
        run("linear", out="FLOAT16", x=x, weight=weight, bias=bias),
        oracle("linear", **wide),
    )


@given(data=st.data(), mask=st.sampled_from(["none", "bool", "float"]))
def test_attention(oracle, data, mask):
    length, source = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    query, key, value = (
        data.draw(arrays((2, n, 4), np.float32)) for n in (length, source, source)
    )
    arguments = dict(query=query, key=key, value=value)
    if mask == "bool":
        arguments["attn_mask"] = data.draw(
            hnp.arrays(np.bool_, (2, length, source))
        ) | (np.arange(source) == 0)
    elif mask == "float":
        arguments["attn_mask"] = data.draw(arrays((2, length, source), np.float32))
    expected = oracle("scaled_dot_product_attention", **arguments)
    np.testing.assert_allclose(
        run("scaled_dot_product_attention", **arguments), expected, rtol=1e-4, atol=1e-5
    )


@given(
    x=arrays(hnp.array_shapes(min_dims=2, max_dims=4, max_side=4), np.float32),
    data=st.data(),
)
def test_slices(oracle, x, data):
    begin, end, stride, masks = (
        [],
        [],
        [],
        {"begin_mask": [], "end_mask": [], "squeeze_mask": []},
    )
    for size in x.shape:
        first = data.draw(st.integers(0, size - 1))
        squeezed, backwards = data.draw(st.booleans()), data.draw(st.booleans())
        begin.append(first if data.draw(st.booleans()) else first - size)
        last = (
            data.draw(st.integers(0, first)) - 1
            if backwards
            else data.draw(st.integers(first + 1, size))
        )
        open_end = last < 0 or data.draw(st.booleans())
        (
            end.append(last),
            stride.append((-1 if backwards else 1) * data.draw(st.integers(1, 2))),
        )
        (
            masks["begin_mask"].append(False),
            masks["end_mask"].append(open_end),
            masks["squeeze_mask"].append(squeezed),
        )
    expected = oracle(
        "slice_by_index", x=x, begin=begin, end=end, stride=stride, **masks
    )
    same(
        run("slice_by_index", x=x, begin=begin, end=end, stride=stride, **masks),
        expected,
    )


@given(data=st.data())
def test_slice_update(oracle, data):
    x = data.draw(arrays((4, 5)))
    (a, b), (c, d) = (
        sorted(
            data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True))
        )
        for n in (4, 5)
    )
    arguments = dict(
        x=x, update=data.draw(arrays((b - a, d - c))), begin=[a, c], end=[b, d]
    )
    same(
        run("slice_update", out="FLOAT16", **arguments),
        oracle("slice_update", **arguments),
    )


@given(x=arrays(hnp.array_shapes(min_dims=2, max_dims=3, max_side=4)), data=st.data())
def test_moving_data(oracle, x, data):
    perm, axis = (
        data.draw(st.permutations(range(x.ndim))),
        data.draw(st.integers(0, x.ndim - 1)),
    )
    cases = {
        "transpose": {"perm": list(perm)},
        "reverse": {"axes": [axis]},
        "expand_dims": {"axes": [axis]},
        "tile": {"reps": [2] * x.ndim},
        "reshape": {"shape": [-1, x.shape[-1]]},
        "cumsum": {"axis": axis},
        "shape": {},
        "band_part": {"lower": 1, "upper": 0},
        "argsort": {"axis": axis, "ascending": True},
    }
    if len(set(x.ravel())) < x.size:
        del cases["argsort"]  # the order of equals is nobody's promise
    for kind, arguments in cases.items():
        out = (
            "INT32"
            if kind in ("shape", "argsort")
            else "FLOAT32"
            if kind == "cumsum"
            else "FLOAT16"
        )
        given_x = x.astype(np.float32) if kind == "cumsum" else x
        found, expected = (
            run(kind, out=out, x=given_x, **arguments),
            oracle(kind, x=given_x, **arguments),
        )
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6, err_msg=kind)


@given(data=st.data(), axis=st.integers(-2, 1))
def test_joining_and_parting(oracle, data, axis):
    x, y = data.draw(arrays((2, 4))), data.draw(arrays((2, 4)))
    for kind in ("concat", "stack"):
        same(
            run(kind, out="FLOAT16", values=[x, y], axis=axis),
            oracle(kind, values=[x, y], axis=axis),
        )
    for arguments in ({"num_splits": 2, "axis": 1}, {"split_sizes": [1, 3], "axis": 1}):
        for part, expected in zip(
            run("split", out=["FLOAT16"] * 2, x=x, **arguments),
            oracle("split", x=x, **arguments),
        ):
            same(part, expected)


@given(data=st.data(), axis=st.integers(-2, 1))
def test_gather(oracle, data, axis):
    x = data.draw(arrays((3, 4)))
    rows = data.draw(
        hnp.arrays(np.int32, (2, 2), elements=st.integers(0, x.shape[axis] - 1))
    )
    same(
        run("gather", out="FLOAT16", x=x, indices=rows, axis=axis),
        oracle("gather", x=x, indices=rows, axis=axis),
    )
    shape = (2, 4) if axis % 2 == 0 else (3, 2)
    along = data.draw(
        hnp.arrays(np.int32, shape, elements=st.integers(0, x.shape[axis] - 1))
    )
    arguments = dict(x=x, indices=along, axis=axis)
    same(
        run("gather_along_axis", out="FLOAT16", **arguments),
        oracle("gather_along_axis", **arguments),
    )


@given(
    rows=st.lists(st.permutations(range(6)), min_size=1, max_size=3),
    k=st.integers(1, 6),
    ascending=st.booleans(),
)
def test_topk(oracle, rows, k, ascending):
    x = np.array(rows, np.float16)
    arguments = dict(x=x, k=k, axis=1, ascending=ascending)
    for found, expected in zip(
        run("topk", out=["FLOAT16", "INT32"], **arguments), oracle("topk", **arguments)
    ):
        same(found, expected)


@given(
    x=arrays(elements=st.floats(-120, 120, width=16)),
    dtype=st.sampled_from(["int32", "int8", "bool", "fp32"]),
)
def test_cast(oracle, x, dtype):
    out = {"int32": "INT32", "int8": "INT8", "bool": "BOOL", "fp32": "FLOAT32"}[dtype]
    same(run("cast", out=out, x=x, dtype=dtype), oracle("cast", x=x, dtype=dtype))


@given(x=arrays((2, 3)), y=arrays((2, 3)), cond=hnp.arrays(np.bool_, (2, 3)))
def test_select(oracle, x, y, cond):
    same(
        run("select", out="FLOAT16", cond=cond, a=x, b=y),
        oracle("select", cond=cond, a=x, b=y),
    )


@given(
    x=arrays((2, 4), np.float32, st.floats(-40, 40, width=16)),
    zero=st.integers(-9, 9),
    by_row=st.booleans(),
)
def test_quantize_and_back(oracle, x, zero, by_row):
    scale = np.array([0.5, 0.25], np.float32) if by_row else np.float32(0.5)
    shift = np.array([zero, -zero], np.int8) if by_row else np.int8(zero)
    axis = {"axis": 0} if by_row else {}
    stored = oracle(
        "quantize", input=x, scale=scale, zero_point=shift, output_dtype="int8", **axis
    )
    scale, shift = np.asarray(scale), np.asarray(shift)
    same(
        run(
            "quantize",
            out="INT8",
            input=x,
            scale=scale,
            zero_point=shift,
            output_dtype="int8",
            **axis,
        ),
        stored,
    )
    found = run("dequantize", input=stored, scale=scale, zero_point=shift, **axis)
    near(
        found, (stored.astype(np.float32) - shift.reshape(-1, 1)) * scale.reshape(-1, 1)
    )
