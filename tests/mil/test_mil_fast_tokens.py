"""Kernels of a few tokens against NumPy: tiles of products, attention of the queries of one group,
loops over strides."""

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from one_op import Op, Ref, Type, given, program

from miltorch import Executable
from miltorch.fast import attention, kernels, machine, tiles
from miltorch.fast.program import FastProgram
from miltorch.ops import OPERATIONS


@pytest.mark.parametrize("form", ["half", "int8", "float"])
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 70),
    batch=st.integers(1, 3),
    count=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_a_product_of_few_vectors_is_that_of_numpy(
    form, rows, columns, batch, count, seed
):
    rng, N = np.random.default_rng(seed), batch * count
    scale = rng.uniform(1e-3, 1e-1, rows).astype(np.float16).astype(np.float32)
    weight = rng.normal(size=(rows, columns)).astype(np.float16)
    dense, stored = weight.astype(float), weight.view(np.uint16)
    if form == "int8":
        stored = rng.integers(-128, 128, (rows, columns)).astype(np.int8)
        dense = (stored * scale[:, None]).astype(np.float16).astype(float)
    if form == "float":
        stored = weight.astype(np.float32)
    # what fills a tile counts not
    x = np.full((tiles.whole_tiles(N), columns), np.nan, np.float32)
    x[:N] = rng.normal(size=(N, columns)).astype(np.float16)
    out = np.empty((batch, rows, count), np.float32)
    tiles.few(stored, scale, x, out, seed % 2 > 0)
    expected = (
        (x[:N].astype(float) @ dense.T).reshape(batch, count, rows).transpose(0, 2, 1)
    )
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("N", [2, 6, 13, 64])
@pytest.mark.parametrize("rows, columns", [(101, 2087), (1033, 64)])
def test_threads_and_spans_of_terms_divide_a_product_without_a_trace(rows, columns, N):
    rng = np.random.default_rng(N)
    weight = rng.normal(size=(rows, columns)).astype(np.float16)
    x = torch.from_numpy(rng.normal(size=(N, columns)).astype(np.float32))
    bits, ones = weight.view(np.uint16), np.ones(rows, np.float32)
    products = tiles.product(bits, ones, x).numpy()
    expected = x.numpy().astype(float) @ weight.T.astype(float)
    np.testing.assert_allclose(products, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("B, T", [(1, 1), (1, 40), (2, 3), (3, 9)])
def test_a_convolution_of_the_literal_graph_is_that_of_numpy(
    B, T, compiled, monkeypatch
):
    """fp16 weights are read as they are, or become float32 without the kernels."""
    if not compiled:
        monkeypatch.setattr(kernels, "available", lambda: False)
    rng = np.random.default_rng(T)
    weight = rng.normal(size=(21, 70, 1, 1)).astype(np.float16)
    bias, x = rng.normal(size=21), rng.normal(size=(B, 70, T, 1))
    bias, x = bias.astype(np.float32), x.astype(np.float32)
    operands = map(torch.from_numpy, (x, weight, bias))
    outputs = OPERATIONS["conv"].function(*operands)
    expected = np.einsum("rk,bktn->brtn", np.float64(weight[:, :, 0, 0]), x)
    expected += bias[:, None, None]
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-4)


def attention_operands(B, groups, heads, T, D, scale):
    """Random queries [B, groups, heads · T, D], keys and values of 70 places, and a mask
    [B, T, 70]; and what the formula gives, with the declared roundings."""
    rng, S, N = np.random.default_rng(T), 70, heads * T
    q, key, value = (
        torch.from_numpy((rng.normal(size=shape) * s).astype(np.float16))
        for shape, s in (
            ((B, groups, N, D), scale),
            ((B, groups, S, D), 1),
            ((B, groups, S, D), 1),
        )
    )
    mask = torch.full((B, T, S), -1e4).half()
    for b in range(B):
        for t in range(T):
            mask[b, t, 2 + b : 9 + 3 * b + t] = 0
    scores = (q.float() @ key.float().mT).half().view(B, groups, heads, T, S)
    weights = torch.softmax((scores + mask[:, None, None]).float(), -1).half().float()
    expected = weights.view(B, groups, N, S) @ value.float()
    return (q, key.float(), value.float(), mask), expected


@pytest.mark.parametrize("scale", [1.0, 60.0])
@pytest.mark.parametrize(
    "B, groups, heads, T, D", [(1, 1, 4, 3, 32), (2, 2, 1, 1, 20), (3, 1, 7, 2, 64)]
)
def test_attention_of_several_queries_is_the_formula(B, groups, heads, T, D, scale):
    operands, expected = attention_operands(B, groups, heads, T, D, scale)
    outputs = machine.attend(*operands).half().float()
    np.testing.assert_allclose(outputs, expected, atol=4e-3)


@pytest.mark.parametrize("scale", [1.0, 60.0])
@pytest.mark.parametrize(
    "B, groups, heads, T, D",
    [(1, 2, 3, 16, 64), (2, 1, 7, 13, 20), (1, 1, 5, 40, 80), (1, 2, 1, 63, 32)],
)
def test_attention_of_a_prompt_is_the_formula(B, groups, heads, T, D, scale):
    """Over all columns, and over those from the first visible one on."""
    (q, key, value, mask), expected = attention_operands(B, groups, heads, T, D, scale)
    for first in (0, 2):
        lanes = attention.lanes_of(mask[..., first:])
        outputs, extreme = attention.attend_prompt(q, key, value, lanes, first, T)
        np.testing.assert_allclose(outputs.half().float(), expected, atol=4e-3)
        scores = q.float() @ key[:, :, first:].mT
        assert extreme == pytest.approx(float(scores.abs().max()), rel=1e-4)


UNARY = [
    "abs",
    "relu",
    "sqrt",
    "exp",
    "tanh",
    "sigmoid",
    "silu",
    "gelu",
    "rsqrt",
    "clip",
    "softmax",
]
BINARY = ["add", "sub", "mul", "real_div", "maximum", "minimum"]
REDUCED = ["reduce_sum", "reduce_mean", "reduce_max", "reduce_min"]
ATTRIBUTES = {
    "gelu": {"mode": "TANH_APPROXIMATION"},
    "rsqrt": {"epsilon": 0.5},
    "clip": {"alpha": -1.0, "beta": 0.5},
    "softmax": {"axis": 1},
    **{kind: {"axes": [1, 2], "keep_dims": True} for kind in REDUCED},
}


@pytest.mark.parametrize("kind", UNARY + BINARY + REDUCED)
@pytest.mark.parametrize(
    "shapes", [((2, 5, 3, 4), (2, 5, 3, 4)), ((2, 5, 3, 4), (1, 5, 1, 1))]
)
def test_an_instruction_means_its_operation_on_transposed_and_spread_operands(
    kind, shapes
):
    """Within two units in the last place, of which one is the exponential's; NaN where the
    operation gives NaN."""
    attributes = {
        name: np.asarray(value) if not isinstance(value, str) else value
        for name, value in ATTRIBUTES.get(kind, {}).items()
    }
    names = ["x", "y"][: 2 if kind in BINARY else 1]
    flexible = Type("FLOAT16", (None,) * 4)
    turned = Op(
        "transpose",
        "turned",
        {"x": Ref("x"), "perm": np.array([0, 1, 3, 2])},
        [("turned", flexible)],
    )
    op = Op(
        kind,
        kind,
        {"x": Ref("turned")} | {n: Ref(n) for n in names[1:]} | attributes,
        [("out", flexible)],
    )
    first, second = shapes
    first = first[:2] + first[:1:-1]
    types = {n: Type("FLOAT16", shape) for n, shape in zip(names, (first, second))}
    made = program([turned, op], types, ["out"])
    rng, fast = np.random.default_rng(0), FastProgram(made)
    for round_ in range(3):
        values = {
            n: rng.normal(size=t.shape).astype(np.float16) for n, t in types.items()
        }
        if kind in ("sqrt", "rsqrt"):
            values["x"] = np.abs(values["x"])
        elif round_ == 2 and kind not in ("reduce_sum", "reduce_mean", "softmax"):
            values["x"][0, 1, 2, 1] = np.nan
        io = {n: torch.from_numpy(value).float() for n, value in values.items()}
        wanted, found = (
            Executable(made).run(dict(io), {})["out"],
            fast.run(dict(io), {})["out"],
        )
        assert torch.equal(wanted.isnan(), found.isnan())
        bits = (
            (v.nan_to_num().half() + 0).view(torch.int16).int() for v in (wanted, found)
        )
        assert int(torch.sub(*bits).abs().max()) <= 2
    assert all(fast.bytecodes.values())


def test_a_sum_of_thousands_of_terms_is_as_exact_as_blas():
    """A float32 sum in one register loses more with every term: long ones are made of parts."""
    rng = np.random.default_rng(0)
    weight, x = (
        rng.standard_normal((64, 4864)).astype(np.float16),
        rng.standard_normal((4, 4864)),
    )
    found = tiles.product(
        weight.view(np.uint16),
        np.ones(64, np.float32),
        torch.from_numpy(x.astype(np.float32)),
    )
    wanted = x.astype(np.float32).astype(np.float64) @ weight.astype(np.float64).T
    error = np.sqrt(np.mean((found.numpy() - wanted) ** 2) / np.mean(wanted**2))
    assert error < 2.2e-7


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 8, 20])
@pytest.mark.parametrize("exponent", [-24, -14, -3, 0, 7])
def test_each_int8_weight_is_rounded_as_fp16_rounds(exponent, count):
    """Every mantissa of a scale by every weight, met by vectors that are 0 but for one place; scales
    of 2^-24 are subnormal."""
    weight = np.tile(np.arange(-128, 128).astype(np.int8), (1024, 1))
    scale = (np.arange(1024, 2048) / 1024 * 2.0**exponent).astype(np.float16)
    scale[::7] *= -1
    places = np.random.default_rng(count).permutation(256)[:count]
    x = torch.zeros(count, 256)
    x[range(count), places] = 1
    found = tiles.product(weight, scale.astype(np.float32), x).numpy()
    wanted = weight[:, places] * scale[:, None]
    np.testing.assert_array_equal(found, wanted.T.astype(np.float32))
