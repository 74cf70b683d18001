"""A planted fault of one operation is found by its name; a sound bundle names none."""

import runpy

import in_process
import numpy as np
import pytest
import tiny
import torch
import wrong
from wrong import Fault, first_row_zero

import miltorch
from miltorch import shim
from workbench import process
from workbench.errors import InputError
from workbench.explain import reduced
from workbench.explain.cut import Flow
from workbench.explain.operation import find_operation
from workbench.runtime.standin import StandInModel

pytestmark = pytest.mark.shim  # a stand-in for Core ML runs the cuts
IDS = np.random.default_rng(0).integers(0, 90, 9).tolist()


def op_of(kind, index=0, **fault):
    """The fault of an operation, given by its kind and place among those."""

    def make(flow):
        ops = [op for op in flow.ops if op.kind == kind]
        return Fault(ops[index].outputs[0][0], **fault)

    return make


def state(index=0, **fault):
    return lambda flow: Fault([*flow.program.states][index], **fault)


def pair(kind, index=0, back=1, **fault):
    """The fault of an operation that is right as soon as the operand before it shows."""

    def make(flow):
        ops = [i for i, op in enumerate(flow.ops) if op.kind == kind]
        chain = [ops[index]]
        for _ in range(back):
            operand = next(n for n in flow.operands[chain[-1]] if n in flow.makers)
            chain.append(flow.makers[operand])
        names = [flow.results(i)[0] for i in chain]
        return Fault(names[0], fused=tuple(names[1:]), **fault)

    return make


NAN = {"change": lambda x: x * float("nan")}
INF = {"change": lambda x: x.float() * 1e6 * 1e6}
ZERO = {"change": first_row_zero}
PLUS = {"change": lambda x: x + 1}
# family, shard, fault, verdict
FIRST = {
    **{
        f"{kind} {i}": ("qwen2", 0, op_of(kind, i), "operation")
        for kind, i in [
            ("conv", 0),
            ("conv", 2),
            ("conv", -1),
            ("softmax", 0),
            ("rsqrt", 0),
            ("rsqrt", -1),
            ("silu", 0),
            ("sub", 0),
            ("matmul", 0),
            ("matmul", -1),
            ("transpose", 1),
        ]
    },
    **{
        f"{kind} zero": ("qwen2", 1, op_of(kind, 0, **ZERO), "operation")
        for kind in "reshape concat slice_by_index slice_update read_state real_div reduce_mean".split()
    },
    "inf": ("llama", 0, op_of("mul", 9, **INF), "operation"),
    "nan": ("gemma3_text", 1, op_of("gelu", 0, **NAN), "operation"),
    "abs plus": ("llama", 1, op_of("abs", 0, change=lambda x: x * 0), "operation"),
    "one T": ("llama", 1, op_of("add", -1, T=1), "operation"),
    "other T": ("llama", 1, op_of("add", -1, T=4), "operation"),
    "one unit": ("llama", 1, op_of("mul", -1, units="CPU_AND_NE"), "operation"),
    "another unit": ("llama", 1, op_of("mul", -1, units="CPU_AND_GPU"), "none"),
    "above a size": ("llama", 0, op_of("conv", 5, above=200), "operation"),
    "lost": ("llama", 0, state(0, how="lost"), "write"),
    "late": ("llama", 0, state(1, how="late"), "write"),
    "lost tail": ("lfm2", 0, state(0, how="lost"), "write"),
    "compile": ("llama", 0, op_of("softmax", 0, how="compile"), "breaks"),
    "kill": ("llama", 0, op_of("matmul", 0, how="kill"), "breaks"),
    "fused": ("llama", 0, pair("silu"), "together"),
    "fused softmax": ("qwen3", 0, pair("softmax"), "together"),
    "fused three": ("llama", 0, pair("softmax", back=2), "together"),
}

HALF = {"change": lambda x: x * 0.5}
LAST = {"change": lambda x: torch.cat([x[..., :-1], x[..., -1:] * 3], -1)}
SWAP = {"change": lambda x: x.flip(1)}
ROLL = {"change": lambda x: x.roll(1, -1)}
CLIP = {"change": lambda x: x.nan_to_num(0.0, 1.0, -1.0)}
# written after the search was frozen
SECOND = {
    "zaya cast": (
        "zaya",
        0,
        op_of("cast", 0, change=lambda x: 1 - x.float()),
        "operation",
    ),
    "mamba relu": ("granitemoehybrid", 0, op_of("relu", 0, **PLUS), "operation"),
    "zaya sqrt": ("zaya", 0, op_of("sqrt", 0, **HALF), "operation"),
    "zaya equal": ("zaya", 1, op_of("equal", 0, change=torch.logical_not), "operation"),
    "zaya gelu": ("zaya", 1, op_of("gelu", 0, **PLUS), "operation"),
    "zaya argmax": (
        "zaya",
        0,
        op_of("reduce_argmax", 0, change=lambda x: 3 - x),
        "operation",
    ),
    "deltanet exp": ("qwen3_5_text", 0, op_of("exp", 0, **HALF), "operation"),
    "deltanet matmul": ("qwen3_5_text", 0, op_of("matmul", 3, **PLUS), "operation"),
    "deltanet sigmoid": ("qwen3_5_text", 1, op_of("sigmoid", 0, **HALF), "operation"),
    "deltanet lost matrix": ("qwen3_5_text", 2, state(1, how="lost"), "write"),
    "deltanet late conv": ("qwen3_5_text", 0, state(0, how="late"), "write"),
    "deltanet tanh": ("qwen3_5_text", 2, op_of("tanh", **HALF), "operation"),
    "mamba conv": ("granitemoehybrid", 0, op_of("conv", 0, **LAST), "operation"),
    "mamba exp": ("granitemoehybrid", 0, op_of("exp", -1, **PLUS), "operation"),
    "mamba matmul nan": (
        "granitemoehybrid",
        2,
        op_of("matmul", -1, **NAN),
        "operation",
    ),
    "hybrid attention": ("granitemoehybrid", 1, op_of("softmax", **ROLL), "operation"),
    "short convolution": ("lfm2", 0, op_of("mul", 5, **HALF), "operation"),
    "lfm2 silu inf": ("lfm2", 1, op_of("silu", **INF), "operation"),
    "gemma tanh": ("gemma3_text", 0, op_of("gelu", 0, **SWAP), "operation"),
    "gemma last add": ("gemma3_text", 2, op_of("add", -1, **SWAP), "operation"),
    "gemma head": ("gemma3_text", 3, op_of("conv", **SWAP), "operation"),
    "phi slice": ("phi3", 0, op_of("slice_by_index", 2, **SWAP), "operation"),
    "phi concat": ("phi3", 1, op_of("concat", -1, **ROLL), "operation"),
    "olmo2 rsqrt": ("olmo2", 0, op_of("rsqrt", 1, **HALF), "operation"),
    "olmo3 mul": ("olmo3", 1, op_of("mul", 12, **LAST), "operation"),
    "mistral mask": ("mistral", 0, op_of("add", 8, **ZERO), "operation"),
    "mistral T": ("mistral", 1, op_of("matmul", 2, T=1, **ROLL), "operation"),
    "mistral T 4": ("mistral", 1, op_of("reshape", 3, T=4, **SWAP), "operation"),
    "ministral unit": (
        "ministral3",
        0,
        op_of("silu", units="CPU_AND_NE", **PLUS),
        "operation",
    ),
    "ministral other": ("ministral3", 0, op_of("silu", units="ALL", **PLUS), "none"),
    "hunyuan size": (
        "hunyuan_v1_dense",
        0,
        op_of("conv", 4, above=300, **HALF),
        "operation",
    ),
    "smollm lost": ("smollm3", 1, state(1, how="lost", T=4), "write"),
    "smollm late": ("smollm3", 2, state(0, how="late"), "write"),
    "swallowed NaN": ("llama", 0, op_of("real_div", 0, **CLIP), "none"),
    "compile read": ("llama", 1, op_of("read_state", 1, how="compile"), "breaks"),
    "compile first": ("llama", 1, op_of("abs", 0, how="compile"), "breaks"),
    "compile last": ("lfm2", 0, op_of("add", -1, how="compile"), "breaks"),
    "kill T": ("qwen3", 0, op_of("conv", -1, how="kill"), "breaks"),
    "fused add": ("mistral", 0, pair("add", -1), "together"),
    "fused conv norm": ("qwen3", 0, pair("conv", 1, **SWAP), "together"),
    "fused write": ("phi3", 0, pair("slice_update", 0, back=1), "together"),
    "fused rotation": ("olmo2", 1, pair("concat", 0, back=1, **HALF), "together"),
}


@pytest.fixture
def search(exports, monkeypatch):
    """(family, shard, fault of the shard's flow) → finding, search, fault."""
    monkeypatch.setattr(process, "call", in_process.call)

    def find(family, shard, make, units="CPU_AND_NE", **options):
        bundle = exports.bundle(exports.checkpoint(family), **options)
        package = bundle.package(bundle.manifest.shards[shard])
        flow = Flow(miltorch.read(package))
        fault = make(flow)
        monkeypatch.setattr(StandInModel, "layer", wrong.layer_of(fault))
        how = {"runtime": "stand-in", "compute_units": units}
        if bundle.manifest.shards[shard].kind != "head":
            how["layer"] = shard
        return *find_operation(bundle, IDS, **how), fault

    return find


def check(search, case, folder):
    family, shard, make, verdict = case
    found, searched, fault = search(family, shard, make)
    print(found.json(), fault.op, fault.fused)
    if verdict == "none":
        assert found.verdict == "none"
        return
    names = [op["value"] for op in found.ops]
    if verdict == "together":
        assert found.verdict == verdict
        assert set(names) == {fault.op, *fault.fused}
    elif verdict == "write":
        assert found.verdict == "operation"
        assert found.ops[0]["kind"] == "write_state" and names == [fault.op]
    else:
        assert found.verdict == verdict
        assert names == [fault.op]
    assert found.packages <= 25
    if verdict == "breaks":
        return
    made = reduced.reduce(searched, found, folder, "CPU_AND_NE")
    print(made)
    assert len(made["ops"]) <= 10 and made["bytes"] <= 1 << 20
    with shim.replaced(wrong.layer_of(fault)):
        module = runpy.run_path(str(folder / "show.py"))
        module["main"]("CPU_AND_NE")


@pytest.mark.matrix(6)
@pytest.mark.parametrize("name", [*FIRST, *SECOND])
def test_a_fault_is_found_and_reduced(search, name, tmp_path, capsys):
    case = (FIRST | SECOND)[name]
    check(search, case, tmp_path / "out")
    said = capsys.readouterr().out
    print(said)
    assert case[-1] in ("none", "breaks") or "difference 0.0\n" not in said


def test_the_command_names_the_operation_and_writes_its_package(
    search, exports, tmp_path
):
    _, _, fault = search("qwen2", 1, op_of("silu"))
    bundle = exports.bundle(exports.checkpoint("qwen2"))
    arguments = "--op", "--runtime", "stand-in", "--prompt-ids", "1,2,3,4"
    out = tmp_path / "out"
    found = in_process.invoke("explain", bundle.root, *arguments, "--reduce", out)
    assert found["verdict"] == "RED"
    assert found["operation"]["where"] | {"position": 0} == {
        "shard": "layers_00_00",
        "layer": 0,
        "position": 0,
        "T": 1,
    }
    (op,) = found["operation"]["ops"]
    assert (op["value"], op["kind"]) == (fault.op, "silu")
    assert found["reduced"]["ops"] == ["silu"]
    made = {path.name for path in out.iterdir()}
    arrays = {f"{name}.npz" for name in ("inputs", "states", "expected")}
    assert made == {"reduced.mlpackage", "show.py", "report.txt"} | arrays


def test_a_cell_that_is_not_there_is_refused(search, exports):
    bundle = exports.bundle(exports.checkpoint("qwen2"))
    for cell in ({"layer": 9}, {"position": 99}, {"compute_units": "NPU"}):
        with pytest.raises(InputError):
            find_operation(bundle, IDS, runtime="stand-in", **cell)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("compress", ["fp16", "int8-tensor", "lut4"])
@pytest.mark.parametrize("family", sorted(tiny.DIMS))
def test_a_sound_bundle_names_no_operation(exports, monkeypatch, family, compress):
    monkeypatch.setattr(process, "call", in_process.call)
    bundle = exports.bundle(exports.checkpoint(family), compress=compress)
    for runtime in ("stand-in", "portable"):
        found, _ = find_operation(bundle, IDS, runtime=runtime)
        assert found.verdict == "none"
