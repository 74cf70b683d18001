"""A planted fault of one operation is found by its name; a sound bundle names none."""

import in_process
import numpy as np
import pytest
import wrong
from wrong import Fault

import miltorch
from workbench import process
from workbench.explain.cut import Flow
from workbench.explain.operation import find_operation
from workbench.runtime.standin import StandInModel

IDS = np.random.default_rng(0).integers(0, 90, 9).tolist()
BIG = 1e6


@pytest.fixture
def search(exports, monkeypatch):
    """(family, shard, fault of the shard's flow) → finding, flow, fault."""
    monkeypatch.setattr(process, "call", in_process.call)

    def find(family, shard, make, units="CPU_AND_NE", **options):
        bundle = exports.bundle(exports.checkpoint(family), **options)
        package = bundle.package(bundle.manifest.shards[shard])
        flow = Flow(miltorch.read(package))
        fault = make(flow)
        monkeypatch.setattr(StandInModel, "layer", wrong.layer_of(fault))
        how = {"runtime": "stand-in", "compute_units": units, "layer": shard}
        found, _ = find_operation(bundle, IDS, **how)
        return found, flow, fault

    return find


def op_of(flow, kind, index=0):
    """The name of an operation's first result, by its kind."""
    ops = [op for op in flow.ops if op.kind == kind]
    return ops[index].outputs[0][0]


KINDS = """abs add clip conv concat matmul mul real_div reduce_max reduce_mean reduce_sum
    reshape rsqrt silu slice_by_index slice_update softmax sub transpose read_state""".split()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index", [0, -1])
def test_one_wrong_result(search, kind, index):
    found, flow, fault = search("qwen2", 0, lambda flow: Fault(op_of(flow, kind, index)))
    print(found.json(), fault.op)
    assert found.verdict == "operation"
    assert [op["value"] for op in found.ops] == [fault.op]
    assert found.packages <= 25
