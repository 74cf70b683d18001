"""Tests that need a Mac: states and results on each compute unit, the output of the compiler, and
the compute plan of a compiled model. `test_binding` has the contract of Core ML's Python binding."""

import json
import subprocess
import sys

import pytest

from workbench import Decoder
from workbench.check import device
from workbench.runtime import COMPUTE_UNITS
from workbench.runtime.coreml import compiled_path, compute_plan

pytestmark = pytest.mark.mac


@pytest.mark.parametrize("units", COMPUTE_UNITS)
def test_a_stateful_call_on_each_compute_unit_is_portable_s(
    units, llama_bundle, llama_golden
):
    decoder = Decoder(llama_bundle, "coreml", compute_units=units)
    reference = device.device_reference(llama_bundle, llama_golden)
    gate = device.device_gate(decoder, llama_golden, reference)
    assert gate.verdict == "GREEN", gate.reason
    assert all(model.last_native_ms > 0 for model in decoder.layer_shards)


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
    package, compiled = llama_bundle.package(shard), compiled_path(llama_bundle, shard)
    placed = compute_plan(package, compiled, "CPU_ONLY")
    assert placed and {op.preferred for op in placed} <= {"cpu", None}
