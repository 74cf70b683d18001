"""A planted fault of one operation is found by its name; a sound bundle names none."""

import runpy
import shutil
import threading

import in_process
import numpy as np
import pytest
import tiny
import torch
import wrong
from safetensors.torch import load_file, save_file
from wrong import Fault, first_row_zero

import miltorch
from miltorch import shim
from workbench import process
from workbench.bundle import PRESETS
from workbench.errors import InputError
from workbench.explain import operation
from workbench.explain.cut import Flow
from workbench.export import export
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
            before = sorted(flow.before([chain[-1]]))
            makers = {name: i for i in before for name in flow.results(i)}
            operands = flow.ops[chain[-1]].reads()
            chain.append(next(makers[name] for name in operands if name in makers))
        first, *others = [flow.results(i)[0] for i in chain]
        return Fault(first, fused=tuple(others), **fault)

    return make


def times(factor):
    return {"change": lambda x: x.float() * factor}


HALF, INF, NAN, NONE = times(0.5), times(1e12), times(float("nan")), times(0)
PLUS = {"change": lambda x: x + 1}
ZERO = {"change": first_row_zero}
LAST = {"change": lambda x: torch.cat([x[..., :-1], x[..., -1:] * 3], -1)}
SWAP = {"change": lambda x: x.flip(1)}
ROLL = {"change": lambda x: x.roll(1, -1)}
CLIP = {"change": lambda x: x.nan_to_num(0.0, 1.0, -1.0)}
LOST, LATE, COMPILE, KILL = ({"how": h} for h in ("lost", "late", "compile", "kill"))
NE, GPU = {"units": "CPU_AND_NE"}, {"units": "CPU_AND_GPU"}
SIMPLE = (
    "conv,0 conv,2 conv,-1 softmax,0 rsqrt,0 rsqrt,-1 silu,0 sub,0 matmul,0 matmul,-1"
)
MOVES = "reshape concat slice_by_index slice_update read_state real_div reduce_mean"
# verdict → family, shard, fault
FAULTS = {
    "operation": [
        *(
            ("qwen2", 0, op_of(kind, int(index)))
            for kind, index in (each.split(",") for each in SIMPLE.split())
        ),
        *(("qwen2", 1, op_of(kind, **ZERO)) for kind in MOVES.split()),
        ("qwen2", 0, op_of("transpose", 1)),
        ("llama", 0, op_of("mul", 9, **INF)),
        ("gemma3_text", 1, op_of("gelu", **NAN)),
        ("llama", 1, op_of("abs", **NONE)),
        ("llama", 1, op_of("add", -1, T=1)),
        ("llama", 1, op_of("add", -1, T=4)),
        ("llama", 1, op_of("mul", -1, **NE)),
        ("llama", 0, op_of("conv", 5, above=200)),
        # what follows, here and below, was written after a search was frozen
        ("zaya", 0, op_of("cast", change=lambda x: 1 - x.float())),
        ("zaya", 0, op_of("sqrt", **HALF)),
        ("zaya", 1, op_of("equal", change=torch.logical_not)),
        ("zaya", 1, op_of("gelu", **PLUS)),
        ("zaya", 0, op_of("reduce_argmax", change=lambda x: 3 - x)),
        ("qwen3_5_text", 0, op_of("exp", **HALF)),
        ("qwen3_5_text", 0, op_of("matmul", 3, **PLUS)),
        ("qwen3_5_text", 1, op_of("sigmoid", **HALF)),
        ("qwen3_5_text", 2, op_of("tanh", **HALF)),
        ("granitemoehybrid", 0, op_of("relu", **PLUS)),
        ("granitemoehybrid", 0, op_of("conv", **LAST)),
        ("granitemoehybrid", 0, op_of("exp", -1, **PLUS)),
        ("granitemoehybrid", 2, op_of("matmul", -1, **NAN)),
        ("granitemoehybrid", 1, op_of("softmax", **ROLL)),
        ("lfm2", 0, op_of("mul", 4, **HALF)),
        ("lfm2", 1, op_of("silu", **INF)),
        ("gemma3_text", 0, op_of("gelu", **SWAP)),
        ("gemma3_text", 2, op_of("add", -1, **SWAP)),
        ("gemma3_text", 3, op_of("conv", **SWAP)),
        ("phi3", 0, op_of("slice_by_index", 2, **SWAP)),
        ("phi3", 1, op_of("concat", -1, **ROLL)),
        ("olmo2", 0, op_of("rsqrt", 1, **HALF)),
        ("olmo3", 1, op_of("mul", 12, **LAST)),
        ("mistral", 0, op_of("add", 8, **ZERO)),
        ("mistral", 1, op_of("matmul", 2, T=1, **ROLL)),
        ("mistral", 1, op_of("reshape", 3, T=4, **SWAP)),
        ("ministral3", 0, op_of("silu", **NE, **PLUS)),
        ("hunyuan_v1_dense", 0, op_of("conv", 4, above=300, **HALF)),
    ],
    "none": [
        ("llama", 1, op_of("mul", -1, **GPU)),
        ("ministral3", 0, op_of("silu", units="ALL", **PLUS)),
    ],
    "write": [
        ("llama", 0, state(0, **LOST)),
        ("llama", 0, state(1, **LATE)),
        ("lfm2", 0, state(0, **LOST)),
        ("qwen3_5_text", 2, state(1, **LOST)),
        ("qwen3_5_text", 0, state(0, **LATE)),
        ("smollm3", 2, state(0, **LATE)),
    ],
    "breaks": [
        ("llama", 0, op_of("softmax", **COMPILE)),
        ("llama", 0, op_of("matmul", **KILL)),
        ("llama", 1, op_of("read_state", 1, **COMPILE)),
        ("llama", 1, op_of("abs", **COMPILE)),
        ("lfm2", 0, op_of("add", -1, **COMPILE)),
        ("qwen3", 0, op_of("conv", -1, **KILL)),
    ],
    # alone, it has no axis of T: it is named with what computes its value
    "with its operand": [("smollm3", 1, state(1, T=4, **LOST))],
    "together": [
        ("llama", 0, pair("silu")),
        ("qwen3", 0, pair("softmax")),
        ("llama", 0, pair("softmax", back=2)),
        ("mistral", 0, pair("add", -1)),
        ("qwen3", 0, pair("conv", 1, **SWAP)),
        ("phi3", 0, pair("slice_update")),
        ("olmo2", 1, pair("concat", **HALF)),
    ],
}
CASES = [(verdict, case) for verdict, cases in FAULTS.items() for case in cases]


@pytest.fixture
def search(exports, monkeypatch):
    """(family or bundle, shard, fault of the shard's flow) → finding, fault."""
    monkeypatch.setattr(process, "call", in_process.call)

    def find(source, shard, make, units="CPU_AND_NE", out=None):
        bundle = source
        if isinstance(source, str):
            bundle = exports.bundle(exports.checkpoint(source))
        package = bundle.package(bundle.manifest.shards[shard])
        flow = Flow(miltorch.read(package))
        fault = make(flow)
        monkeypatch.setattr(StandInModel, "layer", wrong.layer_of(fault))
        how = {"runtime": "stand-in", "compute_units": units, "out": out}
        if bundle.manifest.shards[shard].kind != "head":
            how["layer"] = shard
        return operation.find(bundle, IDS, **how), fault

    return find


@pytest.mark.matrix(6)
@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_fault_is_found_and_reduced(search, number, tmp_path, capsys):
    verdict, (family, shard, make) = CASES[number]
    found, fault = search(family, shard, make, out=tmp_path)
    print(found, fault)
    verdicts = {"write": "operation", "with its operand": "together"}
    assert found.verdict == verdicts.get(verdict, verdict)
    assert found.packages <= 25
    if verdict == "none":
        return
    named = {op["value"] for op in found.ops}
    if verdict == "with its operand":
        assert fault.op in named and len(named) == 2
    else:
        assert named == {fault.op, *fault.fused}
    assert verdict != "write" or found.ops[0]["kind"] == "write_state"
    made = found.reduced
    assert len(made["ops"]) <= 10 and made["bytes"] <= 1 << 20
    capsys.readouterr()
    with shim.replaced(wrong.layer_of(fault)):
        show = runpy.run_path(str(tmp_path / "show.py"))["main"]
        if verdict == "breaks":
            with pytest.raises((RuntimeError, RuntimeWarning)):
                show("CPU_AND_NE")
            return
        show("CPU_AND_NE")
    said = capsys.readouterr().out
    assert "largest difference" in said and "difference 0.0\n" not in said


def test_the_command_names_the_operation_and_writes_its_package(
    search, exports, tmp_path
):
    _, fault = search("qwen2", 1, op_of("silu"))
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


def test_a_cell_that_is_not_there_is_refused(exports):
    bundle = exports.bundle(exports.checkpoint("qwen2"))
    for cell in ({"layer": 9}, {"position": 99}, {"compute_units": "NPU"}):
        with pytest.raises(InputError):
            operation.find(bundle, IDS, runtime="stand-in", **cell)


def test_a_search_is_cancelled_after_any_package(search, exports):
    search("qwen2", 0, op_of("silu"))
    bundle = exports.bundle(exports.checkpoint("qwen2"))
    how, stop, asked = {"runtime": "stand-in", "layer": 0}, threading.Event(), []
    with pytest.raises(process.Cancelled):
        operation.find(
            bundle,
            IDS,
            **how,
            stop=stop,
            report=lambda n: asked.append(n) or n < 3 or stop.set(),
        )
    assert asked == [1, 2, 3]
    assert operation.cost(bundle)[0] == len(bundle.manifest.shards)


def test_an_expert_of_a_routed_bundle_is_searched(exports, monkeypatch):
    monkeypatch.setattr(process, "call", in_process.call)
    bundle = exports.bundle(exports.checkpoint("zaya"), moe="routed")
    shard = next(s for s in bundle.manifest.shards if s.kind == "expert")
    fault = op_of("silu")(Flow(miltorch.read(bundle.package(shard))))
    monkeypatch.setattr(StandInModel, "layer", wrong.layer_of(fault))
    found = operation.find(bundle, IDS, runtime="stand-in")
    assert found.ops[0]["value"] == fault.op
    assert found.ops[0]["shard"].startswith("expert")


def test_a_nan_that_a_unit_swallows_is_found(exports, search, tmp_path):
    """Scores of keys and queries with large biases are infinite in fp16, whatever is
    scaled first; the softmax of an infinite row is NaN."""
    source = tmp_path / "large"
    shutil.copytree(exports.checkpoint("qwen2"), source)
    tensors = load_file(source / "model.safetensors")
    for name in tensors:
        if name.endswith(("q_proj.bias", "k_proj.bias")):
            tensors[name] = torch.full_like(tensors[name], 6e3)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    bundle = export(source, tmp_path / "bundle", max_seq_len=16)
    overflow = operation.find(bundle, IDS, runtime="portable", layer=0)
    assert (overflow.ops[0]["kind"], overflow.times) == ("matmul", np.inf)
    found, fault = search(bundle, 0, op_of("softmax", 0, **CLIP))
    assert [op["value"] for op in found.ops] == [fault.op]
    assert found.times == np.inf


def dies(function, *args, **options):
    return process.Outcome(failure="killed by SIGKILL")


@pytest.mark.parametrize("call", [in_process.call, dies])
def test_a_runtime_that_runs_nothing_names_no_operation(exports, monkeypatch, call):
    monkeypatch.setattr(process, "call", call)
    bundle = exports.bundle(exports.checkpoint("llama"))
    how = {"runtime": "stand-in-load14-range", "layer": 0, "T": 1}
    found = operation.find(bundle, IDS[:2], **how)
    assert (found.verdict, found.ops) == ("uncertain", [])


@pytest.mark.matrix(2)
@pytest.mark.parametrize("compress", PRESETS)
@pytest.mark.parametrize("family", sorted(tiny.DIMS))
def test_a_sound_bundle_names_no_operation(exports, monkeypatch, family, compress):
    monkeypatch.setattr(process, "call", in_process.call)
    bundle = exports.bundle(exports.checkpoint(family), compress=compress)
    for runtime in ("stand-in", "portable"):
        assert operation.find(bundle, IDS, runtime=runtime).verdict == "none"
