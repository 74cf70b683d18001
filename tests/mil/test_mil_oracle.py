"""Rules against MIL's own NumPy evaluation: coremltools evaluates an op on constants, we run the
same op. Ops with one rounding must agree bit for bit, in fp16 too; others are compared in float32,
because NumPy rounds fp16 on the way."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from one_op import MIL, given, run

FINITE = st.floats(-8, 8, width=16)
WHOLE = st.integers(-8, 8).map(float)  # sums of products are exact
SHAPES = hnp.array_shapes(min_dims=1, max_dims=4, max_side=5)
RANK2 = hnp.array_shapes(min_dims=2, max_dims=4, max_side=4)
F32 = np.float32


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


def of(*names, size=SHAPES, dtype=np.float16, elements=FINITE, **attributes):
    """Arrays of one size, and attributes as they are."""

    def build(draw):
        arrays = hnp.arrays(
            dtype, size if isinstance(size, tuple) else draw(size), elements=elements
        )
        return {name: draw(arrays) for name in names} | attributes

    return build


def over_axes(draw):
    x = draw(hnp.arrays(F32, RANK2, elements=st.floats(1, 17, width=16)))
    axes = st.lists(
        st.integers(-x.ndim, x.ndim - 1),
        min_size=1,
        max_size=2,
        unique_by=lambda a: a % x.ndim,
    )
    return {"x": x, "axes": draw(axes), "keep_dims": draw(st.booleans())}


def along_axis(**attributes):
    """x without equal elements, whose order nobody promises, and an axis."""

    def build(draw):
        size = draw(RANK2)
        order = draw(st.permutations(range(int(np.prod(size)))))
        x = np.array(order, F32).reshape(size)
        return {"x": x, "axis": draw(st.integers(0, x.ndim - 1))} | attributes

    return build


def sliced(draw):
    x = draw(hnp.arrays(F32, RANK2, elements=FINITE))
    rows = []
    for size in x.shape:
        first = draw(st.integers(0, size - 1))
        back, squeezed, negative = (draw(st.booleans()) for _ in range(3))
        last = (
            draw(st.integers(0, first)) - 1
            if back
            else draw(st.integers(first + 1, size))
        )
        step = draw(st.integers(1, 2)) * (-1 if back else 1)
        opened = last < 0 or draw(st.booleans())
        rows.append((first - size * negative, last, step, False, opened, squeezed))
    names = "begin end stride begin_mask end_mask squeeze_mask".split()
    return {"x": x} | dict(zip(names, map(list, zip(*rows))))


def updated(draw):
    ends = [
        sorted(draw(st.sets(st.integers(0, n), min_size=2, max_size=2))) for n in (4, 5)
    ]
    begin, end = map(list, zip(*ends))
    sizes = [b - a for a, b in ends]
    x, update = (
        draw(hnp.arrays(F32, size, elements=FINITE)) for size in ([4, 5], sizes)
    )
    return {"x": x, "update": update, "begin": begin, "end": end}


def product(draw):
    m, k, n = (draw(st.integers(1, 6)) for _ in "mkn")
    flip_x, flip_y = draw(st.booleans()), draw(st.booleans())
    shapes = (2, k, m) if flip_x else (2, m, k), (2, n, k) if flip_y else (2, k, n)
    x, y = (draw(hnp.arrays(F32, shape, elements=WHOLE)) for shape in shapes)
    return {"x": x, "y": y, "transpose_x": flip_x, "transpose_y": flip_y}


def floats(**shapes):
    return lambda draw: {
        n: draw(hnp.arrays(F32, s, elements=WHOLE)) for n, s in shapes.items()
    }


def attention(draw):
    L, S = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    found = floats(query=(2, L, 4), key=(2, S, 4), value=(2, S, 4))(draw)
    kind = draw(st.sampled_from([None, bool, F32]))
    if kind:
        mask = draw(hnp.arrays(np.int8, (2, L, S), elements=st.integers(0, 1)))
        mask[..., 0] = 1  # every query sees something
        found["attn_mask"] = mask.astype(kind)
    return found


def rows_of(kind):
    def build(draw):
        axis = draw(st.integers(-2, 1))
        x = draw(hnp.arrays(F32, (3, 4), elements=FINITE))
        shape = (2, 2) if kind == "gather" else (2, 4) if axis % 2 == 0 else (3, 2)
        indices = hnp.arrays(
            np.int32, shape, elements=st.integers(0, x.shape[axis] - 1)
        )
        return {"x": x, "indices": draw(indices), "axis": axis}

    return build


def einsum(draw):
    found = floats(x=(2, 3, 2, 4), y=(2, 4, 2, 3))(draw)
    return {"values": list(found.values()), "equation": "nchw,nwhu->nchu"}


def quantized(name, dtype, **attributes):
    def build(draw):
        values = hnp.arrays(dtype, (2, 4), elements=st.integers(-40, 40))
        zero, found = draw(st.integers(-9, 9)), {name: draw(values)} | attributes
        if draw(st.booleans()):
            scale, shift = np.array([0.5, 0.25], F32), np.array([zero, -zero], np.int8)
            return found | {"scale": scale, "zero_point": shift, "axis": 0}
        return found | {
            "scale": np.array(0.5, F32),
            "zero_point": np.array(zero, np.int8),
        }

    return build


def joined(draw):
    values = [draw(hnp.arrays(F32, (2, 4), elements=FINITE)) for _ in "xy"]
    return {"values": values, "axis": draw(st.integers(-2, 1))}


def selected(draw):
    found = floats(a=(2, 3), b=(2, 3))(draw)
    return found | {"cond": draw(hnp.arrays(bool, (2, 3)))}


def normed(draw):
    x = np.array(draw(st.permutations(range(10))), F32).reshape(2, 5)
    weights = floats(gamma=(5,), beta=(5,))(draw)
    return weights | {"x": x, "axes": [1], "epsilon": F32(1e-5)}


INTEGERS = dict(dtype=np.int32, elements=st.integers(1, 50))
WIDE = dict(dtype=F32)
POSITIVE = dict(dtype=F32, elements=st.floats(0.25, 8, width=16))
FLAGS = dict(dtype=bool, elements=st.booleans())
GELU = ("EXACT", "TANH_APPROXIMATION", "SIGMOID_APPROXIMATION")
SMALL = dict(dtype=F32, elements=st.floats(-0.75, 0.75, width=16))
# ops, their arguments; results agree bit for bit
EXACT = [
    ("add sub mul maximum minimum", of("x", "y")),
    ("real_div", of("x", "y", elements=st.floats(0.25, 8, width=16))),
    (
        "equal not_equal less less_equal greater greater_equal",
        of("x", "y", elements=st.integers(-2, 2).map(float)),
    ),
    ("add sub mul maximum minimum floor_div mod", of("x", "y", **INTEGERS)),
    ("logical_and logical_or logical_xor", of("x", "y", **FLAGS)),
    ("logical_not", of("x", **FLAGS)),
    ("abs ceil floor relu round sign square shape", of("x")),
    ("sqrt", of("x", elements=st.floats(0, 8, width=16))),
    ("reduce_argmax reduce_argmin", along_axis(keep_dims=True)),
    ("reduce_max reduce_min", over_axes),
    ("argsort", along_axis(ascending=True)),
    ("topk", along_axis(k=1, ascending=False)),
    ("cumsum", along_axis()),
    ("transpose", of("x", size=(2, 3, 4), perm=[2, 0, 1])),
    ("reverse expand_dims", of("x", size=(2, 3, 4), axes=[1])),
    ("tile", of("x", size=(2, 3), reps=[2, 1])),
    ("reshape", of("x", size=(2, 6), shape=[-1, 3])),
    ("band_part", of("x", size=(4, 5), lower=1, upper=0)),
    ("concat stack", joined),
    ("split", of("x", size=(2, 4), axis=1, split_sizes=[1, 3])),
    ("split", of("x", size=(2, 4), axis=1, num_splits=2)),
    ("slice_by_index", sliced),
    ("slice_update", updated),
    ("gather", rows_of("gather")),
    ("gather_along_axis", rows_of("gather_along_axis")),
    ("select", selected),
    ("quantize", quantized("input", F32, output_dtype="int8")),
    ("dequantize", quantized("input", np.int8)),
]
# results agree within a few units of float32
CLOSE = [
    ("acos asin atanh tan", of("x", **SMALL)),
    ("atan cos cosh erf exp exp2 sin sinh tanh", of("x", **WIDE)),
    ("sigmoid softplus softsign", of("x", **WIDE)),
    ("pow", of("x", "y", **POSITIVE)),
    ("rsqrt inverse log", of("x", epsilon=F32(0.5), **POSITIVE)),
    ("elu leaky_relu thresholded_relu threshold", of("x", alpha=F32(0.5), **WIDE)),
    ("clip", of("x", alpha=F32(-1.5), beta=F32(2), **WIDE)),
    (
        "linear_activation clamped_relu scaled_tanh sigmoid_hard",
        of("x", alpha=F32(0.5), beta=F32(2), **WIDE),
    ),
    *(("gelu", of("x", mode=mode, **WIDE)) for mode in GELU),
    ("reduce_sum reduce_mean reduce_prod reduce_l1_norm reduce_l2_norm", over_axes),
    ("reduce_sum_square reduce_log_sum reduce_log_sum_exp", over_axes),
    ("softmax", along_axis()),
    ("layer_norm", normed),
    ("matmul", product),
    ("einsum", einsum),
    ("linear", floats(x=(3, 4), weight=(5, 4), bias=(5,))),
    ("scaled_dot_product_attention", attention),
]


def cases(table: list) -> list:
    return [
        pytest.param(kind, build, id=kind)
        for kinds, build in table
        for kind in kinds.split()
    ]


def both(oracle, kind, arguments) -> tuple[list, list]:
    """(what the rule computes, MIL's values) of the same arguments."""
    expected = oracle(kind, **arguments)
    dtypes = [MIL.get(value.dtype, "FLOAT32") for value in expected]
    constant = {n: v for n, v in arguments.items() if isinstance(v, np.generic)}
    found = run(
        kind, out=dtypes, **arguments | {n: v.item() for n, v in constant.items()}
    )
    assert [value.shape for value in found] == [value.shape for value in expected]
    return found, expected


@pytest.mark.matrix(20, wide=200)
@pytest.mark.parametrize("kind, build", cases(EXACT))
@given(data=st.data())
def test_operations_that_round_once(oracle, kind, build, data):
    for found, expected in zip(*both(oracle, kind, build(data.draw))):
        np.testing.assert_array_equal(found.astype(expected.dtype), expected)


@pytest.mark.matrix(12, wide=200)
@pytest.mark.parametrize("kind, build", cases(CLOSE))
@given(data=st.data())
def test_operations_that_round_on_the_way(oracle, kind, build, data):
    for found, expected in zip(*both(oracle, kind, build(data.draw))):
        np.testing.assert_allclose(found, expected, rtol=5e-6, atol=5e-6)


@given(
    x=hnp.arrays(np.int32, (2, 3), elements=st.integers(-9, 9)), seed=st.integers(0, 9)
)
def test_integers_meet_floats_in_products(x, seed):
    y = np.random.default_rng(seed).integers(-8, 8, (3, 4)).astype(F32)
    np.testing.assert_array_equal(run("matmul", x=x, y=y), x @ y)
    np.testing.assert_array_equal(run("linear", x=y.T.copy(), weight=x), y.T @ x.T)


@given(
    x=hnp.arrays(F32, SHAPES, elements=st.floats(-120, 120, width=16)),
    dtype=st.sampled_from(["int32", "int8", "bool", "fp32"]),
)
def test_cast(oracle, x, dtype):
    (found,), (expected,) = both(oracle, "cast", {"x": x, "dtype": dtype})
    np.testing.assert_array_equal(found, expected)
