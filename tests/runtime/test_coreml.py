"""The coreml runtime over the shim and a faked compute plan: the code that talks to Core ML on a
Mac, and the same results as portable. Whatever is faked has the signature that the installed
coremltools expects."""

import inspect
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import tiny

from miltorch import shim
from miltorch.quiet import coremltools
from workbench import Decoder
from workbench.ane import placement
from workbench.check.reuse import check_reuse, reuse_gate
from workbench.errors import InputError
from workbench.export import export
from workbench.runtime import coreml, load_shard, resolve
from workbench.runtime.base import typed

pytestmark = [pytest.mark.shim, pytest.mark.usefixtures("shimmed")]
OPTIONS = {"max_seq_len": 16, "tokens": "1-4", "compress": "int8-channel"}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder, heads = tmp_path_factory.mktemp("coreml"), "num_attention_heads"
    dims = {heads: 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
    return tiny.random(folder / "source", "llama", tie_word_embeddings=False, **dims)


@pytest.fixture(scope="module")
def bundle(source):
    return export(source, source.parent / "bundle", **OPTIONS)


@pytest.fixture
def shard(bundle):
    """A shard that was not compiled yet."""
    shard = bundle.shards("layers")[0]
    folder = coreml.compiled_path(bundle, shard).parent
    shutil.rmtree(folder, ignore_errors=True)
    return shard


def zeros(shard, T: int = 1) -> dict[str, np.ndarray]:
    return {
        name: np.zeros([T if n == "T" else n for n in shape], np.float32)
        for name, shape in shard.inputs.items()
    }


def test_both_runtimes_generate_the_same_tokens_logits_and_states(bundle):
    decoders = [Decoder(bundle, runtime) for runtime in ("coreml", "portable")]
    streams = [decoder.stream([5, 17, 42, 3, 88], 6, stop=[]) for decoder in decoders]
    for ours, theirs in zip(*streams, strict=True):
        assert ours.token == theirs.token and np.array_equal(ours.logits, theirs.logits)
    ours, theirs = (decoder.snapshot() for decoder in decoders)
    decoders[0].begin(ours)
    for kept in (ours, decoders[0].snapshot()):
        for name, value in theirs.states.items():
            assert kept.states[name].dtype == np.float16
            assert np.array_equal(kept.states[name], value)


def test_core_ml_is_refused_where_neither_it_nor_the_shim_is(bundle, shard):
    assert resolve("coreml") == "coreml" and resolve() == "portable"
    shim.uninstall()
    for use in (
        lambda: resolve("coreml"),
        lambda: Decoder(bundle, "coreml"),
        lambda: load_shard(bundle, shard, "coreml"),
    ):
        with pytest.raises(InputError, match="runtime 'coreml'.*macOS 15"):
            use()


def test_the_binding_takes_what_it_is_given_and_rounds_it_once(bundle, shard):
    """The shim refuses float16 and read-only arrays as the binding does."""
    model = load_shard(bundle, shard, "coreml")
    state = model.make_state()
    for name, entry in shard.states.items():
        state.write(name, np.broadcast_to(np.float16(3), entry.shape))
        assert state.read(name).dtype == np.float16 and (state.read(name) == 3).all()
    inputs = {n: np.broadcast_to(0.1, x.shape) for n, x in zeros(shard, 2).items()}
    model.predict(inputs, state)
    assert all((x == np.float32(0.1)).all() for x in typed(inputs).values())


def test_cold_warm_and_hot_caches_hold_through_the_binding(source, bundle, tmp_path):
    batch = export(source, tmp_path / "batch", batch=2, **OPTIONS)
    decoders = (Decoder(each, "coreml") for each in (bundle, batch))
    found = reuse_gate(check_reuse(*decoders, lengths=(4, 9), max_new=3))
    assert found.verdict == "GREEN", found.reason


NATIVE = {  # step → the native function that fails
    "compile": (shim.Proxy, "compileModel"),
    "load": (shim.Proxy, "__init__"),
    "make_state": (shim.Proxy, "newState"),
    "predict": (shim.Proxy, "predict"),
    "read": (shim.StateProxy, "read_state"),
    "write": (shim.StateProxy, "write_state"),
}


@pytest.mark.parametrize("step", NATIVE)
def test_an_error_of_core_ml_is_one_message_of_one_line(
    bundle, shard, monkeypatch, step
):
    model = load_shard(bundle, shard, "coreml")
    state, (name, entry) = model.make_state(), next(iter(shard.states.items()))
    uses = {
        "make_state": model.make_state,
        "predict": lambda: model.predict(zeros(shard), state),
        "read": lambda: state.read(name),
        "write": lambda: state.write(name, np.zeros(entry.shape, np.float16)),
    }

    def fail(*_):
        raise shim._error('"x" × 5 failed with error code: -14')

    shutil.rmtree(model.compiled)
    monkeypatch.setattr(*NATIVE[step], fail)
    with pytest.raises(InputError) as refused:
        uses.get(step, lambda: load_shard(bundle, shard, "coreml"))()
    assert shard.name in str(refused.value) and "\n" not in str(refused.value)
    words = 'NSLocalizedDescription = "\\"x\\" × 5 failed with error code: -14"'
    assert refused.value.actual == words


# --- compiled shards ------------------------------------------------------------------------------


def test_a_shard_is_compiled_once_and_its_times_are_told(bundle, shard, monkeypatch):
    made, compile_ = [], shim.Proxy.compileModel

    def counted(path):
        made.append(path)
        return compile_(path)

    monkeypatch.setattr(shim.Proxy, "compileModel", staticmethod(counted))
    first, second = (load_shard(bundle, shard, "coreml") for _ in range(2))
    path = coreml.compiled_path(bundle, shard)
    assert len(made) == 1 and first.compiled == second.compiled == path
    told = [m.loading_ms[n] for m in (first, second) for n in ("compile", "cold_load")]
    assert all(told[:2]) and told[2:] == [None, None]
    assert first.loading_ms["load"] is None and second.loading_ms["load"] > 0
    assert first.loading_ms["first_predict"] is None
    decoder = Decoder(bundle, "coreml")
    for ids in ([1, 2, 3], [4]):
        decoder.prefill(ids)
        told.append([model.loading_ms["first_predict"] for model in decoder.layers])
    assert all(told[-1]) and told[-1] == told[-2]


def test_a_load_is_cold_for_units_and_hints_that_a_compiled_shard_was_not_loaded_for(
    bundle, shard
):
    hints = {"reshapeFrequency": "Infrequent"}
    for units, own in (("CPU_ONLY", {}), ("CPU_AND_NE", {}), ("CPU_AND_NE", hints)):
        how = {"compute_units": units, "hints": own}
        for cold in (True, False):
            ms = load_shard(bundle, shard, "coreml", **how).loading_ms
            found = ms["cold_load"] is not None, ms["load"] is None
            assert found == (cold, cold), how


@pytest.mark.parametrize("changed", ["weights", "macOS", "coremltools"])
def test_a_compiled_shard_belongs_to_its_bytes_and_to_what_compiled_it(
    bundle, shard, monkeypatch, changed
):
    before = coreml.compiled_path(bundle, shard)
    assert before.parent.parent == bundle.root.parent
    assert not before.is_relative_to(bundle.root)
    if changed == "weights":
        other = {"sha256": "0" * 64}
        files = [file.model_copy(update=other) for file in shard.files]
        shard = shard.model_copy(update={"files": files})
    elif changed == "macOS":
        monkeypatch.setattr(coreml.platform, "mac_ver", lambda: ("26.1", (), ""))
    else:
        monkeypatch.setattr(coremltools(), "__version__", "10.0")
    assert coreml.compiled_path(bundle, shard) != before


def test_an_interrupted_compilation_leaves_nothing_that_could_be_loaded(
    bundle, shard, monkeypatch
):
    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(coreml.os, "rename", stop)
        with pytest.raises(KeyboardInterrupt):
            load_shard(bundle, shard, "coreml")
    folder = coreml.compiled_path(bundle, shard).parent
    assert not list(folder.glob(f"{shard.name}*"))
    load_shard(bundle, shard, "coreml")


# --- options --------------------------------------------------------------------------------------


def test_units_hints_and_function_reach_core_ml(bundle, shard, monkeypatch):
    seen, init = [], shim.Proxy.__init__

    def spy(self, path, *options):
        seen.append(options)
        init(self, path, *options)

    monkeypatch.setattr(shim.Proxy, "__init__", spy)
    hints = {
        "reshapeFrequency": "Infrequent",
        "specializationStrategy": "FastPrediction",
        "allowLowPrecisionAccumulationOnGPU": True,
    }
    how = {"compute_units": "CPU_ONLY", "hints": hints, "function": "main"}
    load_shard(bundle, shard, "coreml", **how)
    texts = {name: str(value) for name, value in hints.items()}
    assert seen[-1][:3] == ("CPU_ONLY", "main", texts)
    for wrong in ({"speed": "fast"}, {"reshapeFrequency": "Often"}):
        with pytest.raises(InputError, match="speed|Often"):
            load_shard(bundle, shard, "coreml", hints=wrong)


# --- compute plan, faked --------------------------------------------------------------------------


class Plan:
    """A compute plan of operations as (name, preferred device, operations inside)."""

    def __init__(self, *ops):
        functions = {"main": SimpleNamespace(block=self.block(ops))}
        program = SimpleNamespace(functions=functions)
        self.model_structure = SimpleNamespace(program=program)

    def block(self, ops):
        made = [
            SimpleNamespace(
                operator_name=name,
                outputs=[SimpleNamespace(name=f"{name}_out")],
                blocks=[self.block(inside)] if inside else [],
                device=device,
            )
            for name, device, *inside in ops
        ]
        return SimpleNamespace(operations=made)

    def get_compute_device_usage_for_mlprogram_operation(self, operation):
        kinds, device = coremltools().models.compute_device, operation.device
        # past the checks for native proxies
        unit = device and object.__new__(getattr(kinds, f"ML{device}ComputeDevice"))
        return unit and SimpleNamespace(
            preferred_compute_device=unit, supported_compute_devices=[unit]
        )


def test_the_plan_counts_every_compute_operation_and_no_constant(
    bundle, shard, monkeypatch
):
    made = Plan(
        ("const", None),
        ("ios18.constexpr_blockwise_shift_scale", None),
        ("ios18.conv", "NeuralEngine"),
        ("ios18.conv", "GPU"),
        ("ios16.cond", "CPU", ("ios18.add", "CPU")),
        ("ios18.mul", None),
    )
    asked, plans = [], coremltools().models.compute_plan

    def get_compute_plan(*arguments):
        asked.append(arguments)
        return made

    native = SimpleNamespace(get_compute_plan=get_compute_plan)
    monkeypatch.setattr(plans, "_MLModelProxy", native)
    plan = coreml.compute_plan(bundle, shard, "CPU_AND_NE")
    found = placement.count_units(shard.name, plan)
    compiled = coreml.compiled_path(bundle, shard)
    assert asked == [(str(compiled), "CPU_AND_NE")] and compiled.suffix == ".mlmodelc"
    counts = found.ops, found.ane, found.gpu, found.cpu, found.eligible
    assert counts == (5, 1, 1, 2, 1) and found.source == "measured"
    assert found.convolutions == (1, 2) and not found.rules


def test_the_fakes_have_the_signatures_of_the_installed_coremltools():
    """An API that drifts fails here, not on someone's Mac."""
    ct = coremltools()
    plans, models = ct.models.compute_plan, ct.models

    def names(function):
        return list(inspect.signature(function).parameters)

    assert names(plans.MLComputePlan.load_from_path) == ["path", "compute_units"]
    usage = plans.MLComputePlan.get_compute_device_usage_for_mlprogram_operation
    assert names(usage) == ["self", "operation"]
    assert names(models.CompiledMLModel.__init__)[1:5] == [
        "path",
        "compute_units",
        "function_name",
        "optimization_hints",
    ]
    assert names(models.CompiledMLModel.predict) == ["self", "data", "state"]
    assert names(models.CompiledMLModel.make_state) == ["self"]
    assert names(models.utils.compile_model) == ["model", "destination_path"]
    state = (
        inspect.signature(models.model.MLState.write_state).parameters,
        inspect.signature(models.model.MLState.read_state).parameters,
    )
    assert [list(p)[:2] for p in state] == [["self", "name"], ["self", "name"]]
    calls = (
        inspect.getsource(models._compiled_model)
        + inspect.getsource(models.compute_plan)
        + inspect.getsource(models.utils)
    )
    for native in (
        "_MLModelProxy(",
        "_proxy.newState()",
        ".get_compute_plan(path, compute_units.name)",
        "_MLModelProxy.compileModel(",
    ):
        assert native in calls
    assert {
        "reshapeFrequency",
        "specializationStrategy",
        "allowLowPrecisionAccumulationOnGPU",
    } == set(coreml.HINTS)
    assert all(hasattr(ct, kind) for kind in coreml.HINTS.values() if kind)
