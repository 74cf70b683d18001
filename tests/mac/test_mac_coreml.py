"""What a Mac alone can show: the contract of Core ML's Python binding as the shim has it, states
and results on each compute unit, what compiling prints, and the compute plan of a compiled
model."""

import json
import subprocess
import sys

import numpy as np
import pytest

from workbench import Decoder
from workbench.check import device
from workbench.runtime import COMPUTE_UNITS, load_shard
from workbench.runtime.coreml import compute_plan

pytestmark = pytest.mark.mac


@pytest.fixture
def state(llama_bundle):
    """(coremltools' own state of a shard on the CPU, the name and the shape of its first
    tensor)."""
    shard = llama_bundle.shards("layers")[0]
    model = load_shard(llama_bundle, shard, "coreml", compute_units="CPU_ONLY")
    entry = next(iter(shard.states.values()))
    return model.make_state().raw.mlstate, entry.tensor, entry.shape


@pytest.mark.parametrize("dtype", [np.float16, np.int64, np.int16, np.uint8, np.bool_])
def test_the_binding_refuses_arrays_of_other_types(state, dtype):
    native, name, shape = state
    with pytest.raises(RuntimeError, match="not convertible"):
        native.write_state(name, np.zeros(shape, dtype))


def test_the_binding_refuses_read_only_arrays(state):
    native, name, shape = state
    value = np.zeros(shape, np.float32)
    value.flags.writeable = False
    with pytest.raises(RuntimeError, match="not convertible"):
        native.write_state(name, value)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_state_holds_fp16_and_is_read_as_float32(state, dtype):
    native, name, shape = state
    values = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    native.write_state(name, values)
    again = native.read_state(name)
    assert again.dtype == np.float32
    assert np.array_equal(again, values.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("units", COMPUTE_UNITS)
def test_a_stateful_call_on_each_compute_unit_is_portable_s(
    units, llama_bundle, llama_golden
):
    decoder = Decoder(llama_bundle, "coreml", compute_units=units)
    reference = device.make_reference(llama_bundle, llama_golden)
    gate = device.device_gate(decoder, llama_golden, reference)
    assert gate.verdict == "GREEN", gate.reason
    assert all(model.last_native_ms > 0 for model in decoder.layers)


def test_what_compiling_prints_stays_out_of_the_output(exports, tiny_llama, tmp_path):
    # nothing has compiled it yet
    bundle = exports.bundle(tiny_llama.path, max_seq_len=24)
    command = [
        sys.executable,
        "-m",
        "workbench.cli",
        "generate",
        str(bundle.root),
        "--json",
    ]
    command += ["--prompt-ids", "1,4", "--max-new", "1", "--runtime", "coreml"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert json.loads(output)["runtime"] == "coreml"


def test_a_compiled_model_has_a_compute_plan(llama_bundle):
    shard = llama_bundle.shards("layers")[0]
    placed = compute_plan(llama_bundle, shard, "CPU_ONLY")
    assert placed and {op.preferred for op in placed} <= {"cpu", None}
