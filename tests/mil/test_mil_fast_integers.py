"""Products in integer arithmetic against NumPy: the weights that the program declares, sums as
close as those of float32."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import strategies as st
from one_op import given

from miltorch.fast import integers
from miltorch.fast.integers import ROUNDING

needs_integers = pytest.mark.skipif(
    not integers.AVAILABLE, reason="a processor without AVX-512 VNNI and VBMI"
)


def test_the_table_rounds_every_product_as_fp16_does():
    codes, m = np.arange(-128, 128), np.arange(1024, 2048)[:, None]
    rests = ROUNDING.astype(np.int64) - 64
    expected = ((m / 1024).astype(np.float16) * codes.astype(np.float16)).astype(float)
    np.testing.assert_array_equal((m * codes + rests) / 1024, expected)


def int8_weight(rows: int, columns: int, rng):
    """A weight as the decode path stores it, and as the program declares it."""
    weight = rng.integers(-128, 128, (rows, columns)).astype(np.int8)
    scale = rng.choice([-1, 1], rows) * 2 ** rng.uniform(-13, 8, rows)
    scale = scale.astype(np.float16).astype(np.float32)
    scale[rng.random(rows) < 0.1] = 0
    return weight, scale, (weight * scale[:, None]).astype(np.float16).astype(float)


def product(weight, scale, table, x, out) -> bool:
    """out [B, R, T] of the first B · T of x, in two parts; False where x has no
    digits."""
    N, rows = len(out) * out.shape[2], len(weight)
    memory = np.empty(integers.size(N, x.shape[1]) + 64, np.uint8)
    start = memory.ctypes.data + -memory.ctypes.data % 64
    if not integers.write_digits(x, N, start):
        return False
    for first, last in ((0, rows // 2), (rows // 2, rows)):
        integers.rows(weight, scale, table, start, first, last, out)
    return True


def vectors(count: int, columns: int, outlier: float, rng) -> np.ndarray:
    x = rng.normal(size=(count, columns))
    x[:, rng.integers(columns)] *= outlier
    return x.astype(np.float16).astype(np.float32)


def bound(x: np.ndarray, dense: np.ndarray) -> np.ndarray:
    """Of the error of x [N, K] by dense [R, K]: some roundings of float32, and what the
    digits lose, 2^-24 of the largest of a vector."""
    x, dense = abs(x.astype(float)), abs(dense).T
    return 2**-22 * x @ dense + 2**-24 * x.max(1)[:, None] * dense.sum(0)


@needs_integers
@given(
    rows=st.integers(1, 150),
    steps=st.integers(1, 9),
    batch=st.integers(1, 2),
    count=st.integers(1, 5),
    outlier=st.sampled_from([1.0, 1e3]),
    seed=st.integers(0, 99),
)
def test_an_int8_product_is_that_of_the_declared_weights(
    rows, steps, batch, count, outlier, seed
):
    rng, K, N = np.random.default_rng(seed), 64 * steps, batch * count
    weight, scale, dense = int8_weight(rows, K, rng)
    x = np.full((N + 3, K), np.nan, np.float32)  # what is behind counts not
    x[:N] = vectors(N, K, outlier, rng)
    table = integers.table(weight.shape, scale)
    out = np.empty((batch, rows, count), np.float32)
    assert product(weight, scale, table, x, out)
    expected = (x[:N].astype(float) @ dense.T).reshape(batch, count, rows)
    limit = bound(x[:N], dense).reshape(expected.shape)
    assert (abs(out.transpose(0, 2, 1) - expected) <= limit).all()


@needs_integers
def test_weights_that_are_not_rounded_are_beyond_the_bound():
    rng = np.random.default_rng(0)
    weight, scale, dense = int8_weight(200, 128, rng)
    x, out = vectors(1, 128, 1.0, rng), np.empty((1, 200, 1), np.float32)
    plain = np.full((1024, 256), 64, np.uint8)
    assert product(weight, scale, plain, x, out)
    error = abs(out[0, :, 0] - x.astype(float) @ dense.T) / bound(x, dense).clip(1e-30)
    assert np.median(error) > 10


@needs_integers
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_activations_that_are_not_finite_are_left_to_other_kernels(value):
    rng = np.random.default_rng(0)
    weight, scale, _ = int8_weight(5, 128, rng)
    x, out = vectors(2, 128, 1.0, rng), np.full((1, 5, 2), 7, np.float32)
    x[1, 77] = value
    assert not product(weight, scale, ROUNDING, x, out)
    assert (out == 7).all()


@needs_integers
def test_vectors_that_leave_the_cache_are_left_to_other_kernels():
    K = 64 * (integers.CACHE // 3 // 64)
    weight, scale = np.ones((2, K), np.int8), np.ones(2, np.float32)
    for count, done in ((1, True), (2, False)):
        x, out = np.ones((count, K), np.float32), np.zeros((1, 2, count), np.float32)
        assert product(weight, scale, ROUNDING, x, out) == done
        assert (out == (K if done else 0)).all()


@pytest.mark.parametrize("scale", [6e-8, 6.1e-5, 512.0, np.inf, np.nan])
def test_scales_that_fp16_rounds_otherwise_have_no_table(scale):
    assert integers.table((2, 64), np.array([1e-3, scale], np.float32)) is None


@needs_integers
def test_rows_that_fill_no_vector_have_no_table():
    scale = np.ones(2, np.float32)
    found = [integers.table((2, K), scale) is not None for K in (63, 64, 100)]
    assert found == [False, True, False]


ELSEWHERE = """
from llvmlite import binding

host = binding.get_host_cpu_features()
features = {name: has and "512" not in name for name, has in host.items()}
binding.get_host_cpu_features = lambda: features

from miltorch.fast import integers, linear

assert not integers.AVAILABLE
linear.prepare.compile("boolean(int64[::1], int64)")
linear.compute.compile("none(int64[::1], int64, boolean, int64, int64)")
"""


@needs_integers
def test_a_processor_without_the_instructions_compiles_none_of_them(tmp_path):
    """LLVM ends the process where it finds no instruction for a function."""
    target = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+f16c,+fma,+avx2"}
    environment = os.environ | target | {"NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", ELSEWHERE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
