import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench import InputError
from workbench.decode import Snapshot
from workbench.prompt_cache import formats

SOME = settings(max_examples=30, deadline=None)


def rows(seed, heads=2, n=5, D=64, scale=1.0, dtype=np.float16):
    """Random rows, each channel around a mean of its own."""
    rng = np.random.default_rng(seed)
    return (
        scale
        * (rng.standard_normal((heads, 1, D)) + rng.standard_normal((heads, n, D)))
    ).astype(dtype)


def snapshot(seed=0, n=5, **chosen) -> Snapshot:
    states = {
        "layers.0.k_state": rows(seed, n=n, **chosen),
        "layers.0.v_state": rows(seed + 1, n=n, **chosen),
        "layers.0.conv_state": rows(seed + 2, n=1, **chosen)[0],
    }
    return Snapshot(tuple(range(n)), "identity", states, n)


@SOME
@given(
    seed=st.integers(0, 99),
    n=st.integers(0, 40),
    dtype=st.sampled_from([np.float16, np.float32]),
)
def test_fp16_keeps_every_bit_and_shares_nothing(seed, n, dtype):
    given_ = snapshot(seed, n, dtype=dtype)
    encoded = formats.encode_rows(given_)
    for found in (formats.decode_rows(encoded), formats.decode_rows(encoded)):
        assert (found.ids, found.identity) == (
            given_.ids,
            given_.identity,
        ) and found.states.keys() == given_.states.keys()
        for name, value in found.states.items():
            assert value.dtype == dtype and np.array_equal(value, given_.states[name])
            assert not any(
                np.shares_memory(value, other)
                for other in (given_.states[name], *encoded.tensors.values())
            )


@SOME
@given(
    seed=st.integers(0, 99),
    D=st.sampled_from([2, 32, 40, 64, 96, 128, 192, 256]),
    scale=st.sampled_from([1e-6, 1e-3, 1.0, 300.0]),
    dtype=st.sampled_from([np.float16, np.float32]),
)
def test_q4_is_within_half_a_step_of_its_own_group(seed, D, scale, dtype):
    given_ = rows(seed, D=D, scale=scale, dtype=dtype)
    codes, steps, low = formats.quantize_groups(given_)
    found = formats.dequantize_groups(codes, steps, low)
    width = formats.group(D)
    assert (
        width <= 64
        and D % width == 0
        and codes.nbytes * 2 == given_.size
        and steps.shape[-1] == D // width
    )
    error = np.abs(found - given_.astype(np.float32)).reshape(2, 5, -1, width)
    assert (
        error
        <= steps[..., None].astype(np.float32) * 0.5001
        + np.finfo(np.float16).tiny * 1e-3
    ).all()


def test_q4_says_what_it_costs():
    given_ = snapshot(n=64, D=64)
    encoded = formats.encode_rows(given_, "q4")
    caches = sum(
        v.nbytes
        for n, v in encoded.tensors.items()
        if n.startswith(("layers.0.k_state", "layers.0.v_state"))
    )
    assert caches == 0.28125 * 2 * given_.states["layers.0.k_state"].nbytes
    assert set(encoded.errors) == {"layers.0.k_state", "layers.0.v_state"} and all(
        0.05 < e < 0.15 for e in encoded.errors.values()
    )
    found = formats.decode_rows(encoded)
    for name in encoded.errors:
        quantized = formats.dequantize_groups(
            *formats.quantize_groups(given_.states[name])
        ).astype(np.float16)
        assert np.array_equal(found.states[name], quantized)
    assert np.array_equal(
        found.states["layers.0.conv_state"], given_.states["layers.0.conv_state"]
    )


def test_a_group_of_equal_values_is_exact():
    for value in (0.0, 1.5, -65504.0, 6e-8):
        equal = np.full((1, 3, 64), value, np.float16)
        assert np.array_equal(
            formats.dequantize_groups(*formats.quantize_groups(equal)), equal
        )


@SOME
@given(seed=st.integers(0, 99), n=st.integers(1, 130), data=st.data())
def test_any_slice_of_tokens_is_the_quantized_slice(seed, n, data):
    given_ = rows(seed, n=n, D=32)
    start = data.draw(st.integers(0, n - 1))
    stop = data.draw(st.integers(start + 1, n))
    whole = [part[:, start:stop] for part in formats.quantize_groups(given_)]
    assert all(
        np.array_equal(a, b)
        for a, b in zip(
            whole, formats.quantize_groups(given_[:, start:stop]), strict=True
        )
    )


def test_a_tensor_with_a_few_huge_channels_stays_as_it_is():
    given_ = snapshot(n=40)
    given_.states["layers.0.k_state"][..., 3] += 90
    encoded = formats.encode_rows(given_, "q4")
    assert (
        encoded.errors["layers.0.k_state"]
        > formats.OUTLIER
        > encoded.errors["layers.0.v_state"]
    )
    assert np.array_equal(
        formats.decode_rows(encoded).states["layers.0.k_state"],
        given_.states["layers.0.k_state"],
    )


def test_q4_refuses_what_it_cannot_hold():
    for bad in (
        np.full((1, 2, 64), np.nan, np.float16),
        np.full((1, 2, 64), np.inf, np.float16),
        np.zeros((1, 2, 3), np.float16),
    ):
        with pytest.raises(InputError, match="q4"):
            formats.quantize_groups(bad)
    with pytest.raises(InputError, match="one of fp16, q4"):
        formats.encode_rows(snapshot(), "q8")
