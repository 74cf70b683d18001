"""Compressed weights made dense, against MIL's own decompression in NumPy: bit for bit."""

import numpy as np
import pytest
from hypothesis import strategies as st
from one_op import MIL, UNKNOWN, Executable, Op, Type, given, literal, program


@pytest.fixture(scope="module")
def mil(ct):
    from coremltools.converters.mil.mil.ops.defs.iOS16 import constexpr_ops
    from coremltools.converters.mil.mil.ops.defs.iOS18 import compression

    return {"iOS16": constexpr_ops, "iOS18": compression}


def agree(mil, opset, kind, *attributes, **arguments):
    """The rule and MIL's `decompress` of the same operands agree; `attributes` are those MIL takes
    by position."""
    expected = getattr(mil[opset], kind).decompress(
        *[arguments.get(name) for name in attributes]
    )
    expected = expected if isinstance(expected, tuple) else (expected,)
    bound = {
        k: v if isinstance(v, np.ndarray) else literal(v)
        for k, v in arguments.items()
        if v is not None
    }
    outputs = [
        (f"y{i}", Type(MIL[value.dtype], UNKNOWN)) for i, value in enumerate(expected)
    ]
    names = [name for name, _ in outputs]
    made = Executable(program([Op(kind, kind, bound, outputs)], {}, names))
    for name, value in zip(names, expected, strict=True):
        found = made.constants[name].numpy()
        assert found.shape == value.shape and np.array_equal(
            found.astype(value.dtype), value
        )


@st.composite
def weights(draw):
    """(generator, shape [rows, columns], blocks along each axis)."""
    blocks = [draw(st.integers(1, 3)) for _ in range(2)]
    shape = tuple(n * draw(st.integers(1, 4)) for n in blocks)
    return np.random.default_rng(draw(st.integers(0, 99))), shape, blocks


@given(
    weight=weights(),
    dtype=st.sampled_from([np.int8, np.uint8]),
    shifted=st.booleans(),
    half=st.booleans(),
)
def test_blockwise_scales_and_offsets(mil, weight, dtype, shifted, half):
    rng, shape, blocks = weight
    data, offset = (
        rng.integers(0, 100, size).astype(dtype) for size in (shape, blocks)
    )
    scale = rng.uniform(0.01, 2, blocks).astype(np.float16 if half else np.float32)
    shared = dict(scale=scale, offset=offset if shifted else None)
    agree(
        mil,
        "iOS18",
        "constexpr_blockwise_shift_scale",
        "data",
        "scale",
        "offset",
        data=data,
        **shared,
    )
    mask = rng.integers(0, 2, shape).astype(np.uint8)
    agree(
        mil,
        "iOS18",
        "constexpr_sparse_blockwise_shift_scale",
        "data_mask",
        "nonzero_data",
        "scale",
        "offset",
        data_mask=mask,
        nonzero_data=data[mask != 0],
        **shared,
    )


@given(
    weight=weights(),
    bits=st.sampled_from([1, 2, 3, 4, 6, 8]),
    width=st.sampled_from([1, 2, 4]),
    axis=st.integers(0, 1),
)
def test_lookup_tables_by_block_and_vector(mil, weight, bits, width, axis):
    rng, shape, blocks = weight
    lut = rng.normal(size=(*blocks, 1 << bits, width)).astype(np.float16)
    indices = rng.integers(0, 1 << bits, shape).astype(np.uint8)
    along = dict(lut=lut, vector_axis=axis if width > 1 else None)
    agree(
        mil,
        "iOS18",
        "constexpr_lut_to_dense",
        "indices",
        "lut",
        "vector_axis",
        indices=indices,
        **along,
    )
    mask = rng.integers(0, 2, shape).astype(np.uint8)
    agree(
        mil,
        "iOS18",
        "constexpr_lut_to_sparse",
        "indices_mask",
        "indices_nonzero_data",
        "lut",
        "vector_axis",
        indices_mask=mask,
        indices_nonzero_data=indices[mask != 0],
        **along,
    )


@given(weight=weights())
def test_sparse_weights(mil, weight):
    rng, shape, _ = weight
    mask = rng.integers(0, 2, shape).astype(np.uint8)
    nonzero = rng.normal(size=int(mask.sum())).astype(np.float16)
    agree(
        mil,
        "iOS18",
        "constexpr_sparse_to_dense",
        "nonzero_data",
        "mask",
        nonzero_data=nonzero,
        mask=mask,
    )
    bits = np.packbits(mask, bitorder="little")
    agree(
        mil,
        "iOS16",
        "constexpr_sparse_to_dense",
        "nonzero_data",
        "mask",
        "shape",
        nonzero_data=nonzero,
        mask=bits,
        shape=np.array(shape, np.uint32),
    )


@given(weight=weights(), bits=st.sampled_from([1, 2, 4, 6, 8]), axis=st.integers(0, 1))
def test_weights_of_ios_16(mil, weight, bits, axis):
    rng, shape, _ = weight
    fields = rng.integers(0, 1 << bits, shape).astype(np.uint8).reshape(-1, 1)
    packed = np.packbits(
        np.unpackbits(fields, axis=1, bitorder="little")[:, :bits], bitorder="little"
    )
    agree(
        mil,
        "iOS16",
        "constexpr_lut_to_dense",
        "lut",
        "indices",
        "shape",
        indices=packed,
        lut=rng.normal(size=1 << bits).astype(np.float16),
        shape=np.array(shape, np.uint32),
    )
    scale = rng.uniform(0.01, 2, shape[axis]).astype(np.float32)
    agree(
        mil,
        "iOS16",
        "constexpr_affine_dequantize",
        "quantized_data",
        "zero_point",
        "scale",
        "axis",
        axis=np.int32(axis),
        quantized_data=rng.integers(-99, 99, shape).astype(np.int8),
        zero_point=np.int8(3),
        scale=scale,
    )


@given(weight=weights())
def test_stored_halves_are_cast_to_floats(weight):
    rng, shape, _ = weight
    stored = rng.normal(size=shape).astype(np.float16)
    op = Op(
        "constexpr_cast",
        "cast",
        {"source_val": stored, "output_dtype": "fp32"},
        [("y", Type("FLOAT32", shape))],
    )
    assert np.array_equal(
        Executable(program([op], {}, ["y"])).constants["y"], stored.astype(np.float32)
    )
