"""The coreml runtime over the shim and a faked compute plan: the code that talks to Core ML on a
Mac, and the same results as portable. Whatever is faked has the signature that the installed
coremltools expects."""

import inspect
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
from workbench.runtime import coreml, load_shard, resolve
from workbench.runtime.base import typed

pytestmark = [pytest.mark.shim, pytest.mark.usefixtures("shimmed")]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny.random(
        tmp_path_factory.mktemp("coreml") / "source",
        "llama",
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=2,
        tie_word_embeddings=False,
    )


@pytest.fixture(scope="module")
def bundle(source):
    from workbench.export import export

    return export(
        source,
        source.parent / "bundle",
        max_seq_len=16,
        tokens="1-4",
        compress="int8-channel",
    )


@pytest.fixture
def shard(bundle):
    return bundle.shards("layers")[0]


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
    inputs = {
        name: np.broadcast_to(0.1, [2 if n == "T" else n for n in shape])
        for name, shape in shard.inputs.items()
    }
    model.predict(inputs, state)
    assert all((x == np.float32(0.1)).all() for x in typed(inputs).values())


# --- gates through the binding
# ---------------------------------------------------------------------------------------


def test_cold_warm_and_hot_caches_hold_through_the_binding(source, bundle, tmp_path):
    from workbench.export import export

    batch = export(
        source,
        tmp_path / "batch",
        max_seq_len=16,
        tokens="1-4",
        compress="int8-channel",
        batch=2,
    )
    found = check_reuse(
        Decoder(bundle, "coreml"), Decoder(batch, "coreml"), lengths=(4, 9), max_new=3
    )
    assert reuse_gate(found).verdict == "GREEN", reuse_gate(found).reason


# --- errors of Core ML
# -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "step", ["compile", "load", "make_state", "predict", "read", "write"]
)
def test_an_error_of_core_ml_is_one_message_of_one_line(
    bundle, shard, monkeypatch, step
):
    model = load_shard(bundle, shard, "coreml")
    state, (name, entry) = model.make_state(), next(iter(shard.states.items()))
    forget(bundle, shard)
    steps = {
        "compile": (
            shim.Proxy,
            "compileModel",
            lambda: load_shard(bundle, shard, "coreml"),
        ),
        "load": (shim.Proxy, "__init__", lambda: load_shard(bundle, shard, "coreml")),
        "make_state": (shim.Proxy, "newState", model.make_state),
        "predict": (
            shim.Proxy,
            "predict",
            lambda: model.predict(
                {
                    n: np.zeros([1 if a == "T" else a for a in s], np.float32)
                    for n, s in shard.inputs.items()
                },
                state,
            ),
        ),
        "read": (shim.StateProxy, "read_state", lambda: state.read(name)),
        "write": (
            shim.StateProxy,
            "write_state",
            lambda: state.write(name, np.zeros(entry.shape, np.float16)),
        ),
    }
    owner, native, use = steps[step]

    def fail(*_):
        raise shim._error('"x" × 5 failed with error code: -14')

    monkeypatch.setattr(owner, native, fail)
    with pytest.raises(InputError) as refused:
        use()
    assert shard.name in str(refused.value) and "\n" not in str(refused.value)
    assert (
        refused.value.actual
        == 'NSLocalizedDescription = "\\"x\\" × 5 failed with error code: -14"'
    )


# --- compiled shards
# ------------------------------------------------------------------------------------------------


@pytest.fixture
def compilations(monkeypatch):
    """Paths that Core ML was asked to compile."""
    made, compile_ = [], shim.Proxy.compileModel
    monkeypatch.setattr(
        shim.Proxy,
        "compileModel",
        staticmethod(lambda path: made.append(path) or compile_(path)),
    )
    return made


def forget(bundle, shard):
    import shutil

    shutil.rmtree(coreml.compiled_path(bundle, shard).parent, ignore_errors=True)


def test_a_shard_is_compiled_once_and_its_times_are_told(bundle, shard, compilations):
    forget(bundle, shard)
    first, second = (
        load_shard(bundle, shard, "coreml"),
        load_shard(bundle, shard, "coreml"),
    )
    assert len(
        compilations
    ) == 1 and first.compiled == second.compiled == coreml.compiled_path(bundle, shard)
    assert first.loading_ms["compile"] > 0 and second.loading_ms["compile"] is None
    assert first.loading_ms["cold_load"] > 0 and first.loading_ms["load"] is None
    assert second.loading_ms["cold_load"] is None and second.loading_ms["load"] > 0
    assert first.loading_ms["first_predict"] is None
    decoder = Decoder(bundle, "coreml")
    decoder.prefill([1, 2, 3])
    told = [model.loading_ms["first_predict"] for model in decoder.layers]
    decoder.prefill([4])
    assert all(told) and told == [
        model.loading_ms["first_predict"] for model in decoder.layers
    ]


def test_a_load_is_cold_for_units_and_hints_that_a_compiled_shard_was_not_loaded_for(
    bundle, shard
):
    forget(bundle, shard)
    for how in (
        {"compute_units": "CPU_ONLY"},
        {"compute_units": "CPU_AND_NE"},
        {"compute_units": "CPU_AND_NE", "hints": {"reshapeFrequency": "Infrequent"}},
    ):
        for cold in (True, False):
            ms = load_shard(bundle, shard, "coreml", **how).loading_ms
            assert (ms["cold_load"] is not None, ms["load"] is None) == (cold, cold), (
                how
            )


@pytest.mark.parametrize("changed", ["weights", "macOS", "coremltools"])
def test_a_compiled_shard_belongs_to_its_bytes_and_to_what_compiled_it(
    bundle, shard, monkeypatch, changed
):
    before = coreml.compiled_path(bundle, shard)
    assert before.parent.parent == bundle.root.parent and not before.is_relative_to(
        bundle.root
    )
    if changed == "weights":
        shard = shard.model_copy(
            update={
                "files": [
                    f.model_copy(update={"sha256": "0" * 64}) for f in shard.files
                ]
            }
        )
    elif changed == "macOS":
        monkeypatch.setattr(coreml.platform, "mac_ver", lambda: ("26.1", (), ""))
    else:
        monkeypatch.setattr(coremltools(), "__version__", "10.0")
    assert coreml.compiled_path(bundle, shard) != before


def test_an_interrupted_compilation_leaves_nothing_that_could_be_loaded(
    bundle, shard, monkeypatch
):
    forget(bundle, shard)
    with monkeypatch.context() as patch:
        patch.setattr(
            coreml.os, "rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            load_shard(bundle, shard, "coreml")
    assert not [
        p
        for p in coreml.compiled_path(bundle, shard).parent.iterdir()
        if p.name.startswith(shard.name)
    ]
    load_shard(bundle, shard, "coreml")


# --- options
# ------------------------------------------------------------------------------------------------


def test_units_hints_and_function_reach_core_ml(bundle, shard, monkeypatch):
    seen, init = {}, shim.Proxy.__init__

    def spy(self, path, compute_units, function_name="", hints=None, asset=None):
        seen.update(units=compute_units, function=function_name, hints=hints)
        init(self, path, compute_units, function_name, hints, asset)

    monkeypatch.setattr(shim.Proxy, "__init__", spy)
    hints = {
        "reshapeFrequency": "Infrequent",
        "specializationStrategy": "FastPrediction",
        "allowLowPrecisionAccumulationOnGPU": True,
    }
    load_shard(
        bundle, shard, "coreml", compute_units="CPU_ONLY", hints=hints, function="main"
    )
    assert seen == {
        "units": "CPU_ONLY",
        "function": "main",
        "hints": {k: str(v) for k, v in hints.items()},
    }


@pytest.mark.parametrize(
    ("hints", "words"),
    [({"speed": "fast"}, "speed"), ({"reshapeFrequency": "Often"}, "Often")],
)
def test_unknown_hints_are_refused(bundle, shard, hints, words):
    with pytest.raises(InputError, match=words):
        load_shard(bundle, shard, "coreml", hints=hints)


# --- compute plan, faked
# ---------------------------------------------------------------------------------------------


def devices(ct):
    """One object of each of coremltools' device classes, past the checks for native proxies."""
    kinds = ct.models.compute_device
    return {
        name: object.__new__(kind)
        for name, kind in (
            ("ane", kinds.MLNeuralEngineComputeDevice),
            ("gpu", kinds.MLGPUComputeDevice),
            ("cpu", kinds.MLCPUComputeDevice),
        )
    }


@pytest.fixture
def plan(monkeypatch):
    """Puts a plan under coremltools' own `MLComputePlan`: operations as (name, preferred, cost),
    nested in a `cond`."""
    ct = coremltools()
    plans, unit = ct.models.compute_plan, devices(ct)

    def op(name, preferred=None, cost=None, blocks=()):
        made = plans.MLModelStructureProgramOperation(
            inputs={},
            operator_name=name,
            outputs=[
                plans.MLModelStructureProgramNamedValueType(
                    name=f"{name}_out", type=None
                )
            ],
            blocks=[
                plans.MLModelStructureProgramBlock(
                    inputs=[], operations=list(b), output_names=[]
                )
                for b in blocks
            ],
            __proxy__=SimpleNamespace(preferred=preferred, cost=cost),
        )
        return made

    class Proxy:
        def __init__(self, ops):
            block = plans.MLModelStructureProgramBlock(
                inputs=[], operations=ops, output_names=[]
            )
            function = plans.MLModelStructureProgramFunction(inputs=[], block=block)
            program = plans.MLModelStructureProgram(functions={"main": function})
            self.model_structure = plans.MLModelStructure(
                neuralnetwork=None, program=program, pipeline=None
            )

        def get_compute_device_usage_for_mlprogram_operation(self, operation):
            preferred = operation.__proxy__.preferred
            return preferred and plans.MLComputePlanDeviceUsage(
                preferred_compute_device=unit[preferred],
                supported_compute_devices=[unit["cpu"], unit[preferred]],
            )

        def get_estimated_cost_for_mlprogram_operation(self, operation):
            cost = operation.__proxy__.cost
            return None if cost is None else plans.MLComputePlanCost(weight=cost)

    def install(ops):
        asked = []
        native = SimpleNamespace(
            get_compute_plan=lambda path, units: (
                asked.append((path, units)) or plans.MLComputePlan(Proxy(ops))
            )
        )
        monkeypatch.setattr(plans, "_MLComputePlanProxy", Proxy)
        monkeypatch.setattr(plans, "_MLModelProxy", native)
        return asked

    return SimpleNamespace(op=op, install=install)


def test_the_plan_counts_every_compute_operation_and_no_constant(bundle, shard, plan):
    inner = plan.op("ios18.add", "cpu", 0.1)
    asked = plan.install(
        [
            plan.op("const"),
            plan.op("ios18.constexpr_blockwise_shift_scale"),
            plan.op("ios18.conv", "ane", 0.5),
            plan.op("ios18.conv", "gpu", 0.2),
            plan.op("ios16.cond", "cpu", 0.0, [[inner]]),
            plan.op("ios18.mul"),
        ]
    )
    compiled = coreml.compiled_path(bundle, shard)
    found = placement.count_units(
        shard.name, coreml.compute_plan(bundle, shard, "CPU_AND_NE")
    )
    assert asked == [(str(compiled), "CPU_AND_NE")] and compiled.suffix == ".mlmodelc"
    assert (found.source, found.ops, found.ane, found.gpu, found.cpu) == (
        "measured",
        5,
        1,
        1,
        2,
    )
    assert (
        found.convolutions == (1, 2)
        and found.eligible == 1
        and found.cost_ane == pytest.approx(0.5 / 0.8)
    )
    assert not found.rules


def test_the_fakes_have_the_signatures_of_the_installed_coremltools():
    """An API that drifts fails here, not on someone's Mac."""
    ct = coremltools()
    plans, models = ct.models.compute_plan, ct.models

    def names(function):
        return list(inspect.signature(function).parameters)

    assert names(plans.MLComputePlan.load_from_path) == ["path", "compute_units"]
    for method in (
        "get_compute_device_usage_for_mlprogram_operation",
        "get_estimated_cost_for_mlprogram_operation",
    ):
        assert names(getattr(plans.MLComputePlan, method)) == ["self", "operation"]
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


# --- the whole path, in children
# -------------------------------------------------------------------------------------
