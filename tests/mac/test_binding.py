"""The contract of coremltools' native binding: the arrays that it accepts, those that it returns,
and the values that a state keeps. On a Mac the tests ask Core ML; elsewhere they ask the shim, which
must have the same contract because everything else is tested over it."""

import numpy as np
import pytest
import tiny

from workbench.runtime import Settings, load_shard

RUNTIMES = [
    pytest.param("coreml", marks=pytest.mark.mac),
    pytest.param("stand-in", marks=pytest.mark.shim),
]
# name → conversion of a float32 array, and whether the binding takes its result: int8
# depends on the SDK of the build, and the sources leave the order of elements open
ARRAYS = {
    "float32": (np.copy, True),
    "float64": (np.float64, True),
    "int32": (np.int32, True),
    "float16": (np.float16, False),
    "int64": (np.int64, False),
    "int16": (np.int16, False),
    "uint8": (np.uint8, False),
    "bool": (lambda array: array > 0, False),
    "read-only": (lambda array: np.broadcast_to(array, array.shape), False),
    "strided": (lambda array: np.repeat(array, 2, -1)[..., ::2], None),
    "Fortran order": (np.asfortranarray, None),
}
SPECIAL = {
    "-0": -0.0,
    "subnormal": 2.0**-24,
    "largest subnormal": 2.0**-14 - 2.0**-24,
    "smallest normal": 2.0**-14,
    "65504": 65504.0,
    "65520, which rounds to inf": 65520.0,
    "inf": np.inf,
    "-inf": -np.inf,
    "NaN": np.nan,
}


@pytest.fixture(params=RUNTIMES)
def loaded(request, llama_bundle):
    """(coremltools' model of a shard on the CPU, an MLState, its first tensor's name and
    shape, inputs of a call)."""
    shard = llama_bundle.shards("layers")[0]
    model = load_shard(
        llama_bundle, shard, Settings(request.param, compute_units="CPU_ONLY")
    )
    entry = next(iter(shard.states.values()))
    mlstate, inputs = model.make_state().mlstate, tiny.make_inputs(shard, 1, 1.0)
    loaded = model._load_function(min(model.loaded_functions))
    return loaded, mlstate, entry.tensor, entry.shape, inputs


def taken(call, values: np.ndarray, expected: bool | None) -> bool:
    """Whether the binding accepts an array; fails where this is not as expected."""
    if expected is False:
        with pytest.raises(RuntimeError, match="not convertible"):
            call(values)
        return False
    try:
        call(values)
    except RuntimeError:
        assert expected is None
        return False
    return True


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_that_a_state_takes(loaded, name):
    _, native, tensor, shape, _ = loaded
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) % 128
    change, expected = ARRAYS[name]
    if taken(lambda array: native.write_state(tensor, array), change(values), expected):
        assert np.array_equal(native.read_state(tensor), values)


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_that_a_call_takes(loaded, name):
    """coremltools itself makes float32 of float16 before the binding sees it."""
    model, native, _, _, inputs = loaded
    change, expected = ARRAYS[name]
    expected = True if name == "float16" else expected
    key = max(inputs, key=lambda name: inputs[name].size)
    call = lambda array: model.predict(inputs | {key: array}, native)  # noqa: E731
    taken(call, change(inputs[key]), expected)


@pytest.mark.parametrize("name", SPECIAL)
def test_a_state_keeps_the_fp16_bits_of_a_value(loaded, name):
    _, native, tensor, _, _ = loaded
    values = np.array(native.read_state(tensor))
    values.flat[0] = SPECIAL[name]
    native.write_state(tensor, values)
    read = native.read_state(tensor)
    with np.errstate(over="ignore"):
        wrote = np.float32(SPECIAL[name]).astype(np.float16)
    stored = read.flat[0].astype(np.float16)
    assert read.dtype == np.float32
    assert np.signbit(wrote) == np.signbit(stored) or np.isnan(wrote)
    np.testing.assert_array_equal(wrote, stored)


def test_outputs_are_contiguous_float32(loaded):
    model, native, _, _, inputs = loaded
    for output in model.predict(inputs, native).values():
        assert output.dtype == np.float32 and output.flags.c_contiguous
