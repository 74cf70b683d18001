"""The coreml runtime over the shim and a faked compute plan: the code that calls Core ML on a Mac
computes the results of the portable runtime."""

import inspect
import os
import shutil
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import tiny
from faulty_stand_ins import Plan
from refusal import refused

from miltorch import shim
from miltorch.coremltools_import import coremltools
from workbench import Decoder
from workbench.ane import placement
from workbench.runtime import Settings, coreml, load_package, load_shard, resolve

pytestmark = [pytest.mark.shim, pytest.mark.usefixtures("shimmed")]
OPTIONS = {"max_seq_len": 16, "tokens": "1-4", "compress": "int8-channel"}
COREML = Settings("coreml")


@pytest.fixture(scope="module")
def bundle(exports):
    return exports.bundle("llama", **OPTIONS)


@pytest.fixture
def shard(bundle):
    """A shard that was not compiled yet."""
    shard = bundle.shards("layers")[0]
    folder = coreml.compiled_path(bundle, shard).parent
    shutil.rmtree(folder, ignore_errors=True)
    return shard


def test_both_runtimes_generate_the_same_tokens_logits_and_states(bundle):
    decoders = [Decoder(bundle, runtime) for runtime in ("coreml", "portable")]
    streams = [decoder.stream([5, 17, 42, 3, 88], 6, stop=[]) for decoder in decoders]
    for ours, theirs in zip(*streams, strict=True):
        assert ours.token == theirs.token and np.array_equal(ours.logits, theirs.logits)
    ours, theirs = (decoder.snapshot() for decoder in decoders)
    decoders[0].begin(ours)
    for snapshot in (ours, decoders[0].snapshot()):
        for name, value in theirs.states.items():
            assert snapshot.states[name].dtype == np.float16
            assert np.array_equal(snapshot.states[name], value)


def test_core_ml_is_refused_where_neither_it_nor_the_shim_is(bundle, shard):
    assert resolve("coreml") == "coreml" and resolve() == "portable"
    shim.uninstall()
    for use in (
        lambda: resolve("coreml"),
        lambda: Decoder(bundle, "coreml"),
        lambda: load_shard(bundle, shard, COREML),
    ):
        with refused("runtime 'coreml'.*macOS 15"):
            use()


NATIVE = {  # step → the native function that fails
    "compile": (shim.Proxy, "compileModel"),
    "disk": (os, "rename"),
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
    model = load_shard(bundle, shard, COREML)
    state, (name, entry) = model.make_state(), next(iter(shard.states.items()))

    def load():
        return load_shard(bundle, shard, COREML)

    uses = {
        "compile": load,
        "disk": load,
        "load": load,
        "make_state": model.make_state,
        "predict": lambda: model.predict(tiny.make_inputs(shard), state),
        "read": lambda: state.read(name),
        "write": lambda: state.write(name, np.zeros(entry.shape, np.float16)),
    }
    text = "x × 5 failed with error code: -14"
    if step == "disk":
        error, message = OSError(text), text
    else:
        error = shim._error(f'"{text}"')
        message = f'NSLocalizedDescription = "\\"{text}\\""'
    shutil.rmtree(model.compiled_path)
    monkeypatch.setattr(*NATIVE[step], mock.Mock(side_effect=error))
    with refused(shard.name) as refusal:
        uses[step]()
    assert "\n" not in str(refusal.value)
    assert refusal.value.actual == message


# --- compiled shards ------------------------------------------------------------------------------


def test_a_shard_is_compiled_once_and_its_times_are_recorded(bundle, shard):
    with mock.patch.object(
        shim.Proxy, "compileModel", side_effect=shim.Proxy.compileModel
    ) as compile_model:
        first, second = (load_shard(bundle, shard, COREML) for _ in range(2))
    compile_model.assert_called_once()
    path = coreml.compiled_path(bundle, shard)
    assert first.compiled_path == second.compiled_path == path
    for model, cold in ((first, True), (second, False)):
        timed = {stage for stage, ms in model.loading_ms.items() if ms}
        assert timed == ({"compile", "cold_load"} if cold else {"load"})
    decoder, times = Decoder(bundle, "coreml"), []
    for ids in ([1, 2, 3], [4]):
        decoder.prefill(ids)
        times.append(
            [model.loading_ms["first_predict"] for model in decoder.layer_shards]
        )
    assert all(times[0]) and times[0] == times[1]


def test_a_load_is_cold_for_units_and_hints_that_a_compiled_shard_was_not_loaded_for(
    bundle, shard
):
    hints = {"reshapeFrequency": "Infrequent"}
    for units, unit_hints in (
        ("CPU_ONLY", {}),
        ("CPU_AND_NE", {}),
        ("CPU_AND_NE", hints),
    ):
        settings = {"compute_units": units, "hints": unit_hints}
        for cold in (True, False):
            ms = load_shard(bundle, shard, Settings("coreml", **settings)).loading_ms
            actual = ms["cold_load"] is not None, ms["load"] is None
            assert actual == (cold, cold), settings


def test_a_compiled_shard_belongs_to_its_bytes_and_to_what_compiled_it(
    bundle, shard, monkeypatch
):
    other = [f.model_copy(update={"sha256": "0" * 64}) for f in shard.files]
    changed, find = shard.model_copy(update={"files": other}), coreml.compiled_path
    paths = [find(bundle, shard), find(bundle, changed)]
    monkeypatch.setattr(coreml.platform, "mac_ver", lambda: ("26.1", (), ""))
    paths.append(find(bundle, shard))
    monkeypatch.setattr(coremltools(), "__version__", "10.0")
    assert len({*paths, find(bundle, shard)}) == 4
    folders = {path.parent.parent for path in paths}
    assert folders == {bundle.root.parent}


def test_an_interrupted_compilation_leaves_nothing_that_could_be_loaded(
    bundle, shard, monkeypatch
):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "rename", mock.Mock(side_effect=KeyboardInterrupt))
        load_shard(bundle, shard, COREML)
    folder = coreml.compiled_path(bundle, shard).parent
    assert not list(folder.glob(f"{shard.name}*"))
    load_shard(bundle, shard, COREML)


# --- options --------------------------------------------------------------------------------------


def test_units_hints_and_function_reach_core_ml(bundle, shard):
    hints = {
        "reshapeFrequency": "Infrequent",
        "specializationStrategy": "FastPrediction",
        "allowLowPrecisionAccumulationOnGPU": True,
    }
    with mock.patch.object(
        shim.Proxy, "__init__", autospec=True, side_effect=shim.Proxy.__init__
    ) as loaded:
        load_package(bundle.package(shard), COREML, "main")
        Decoder(bundle, "coreml", compute_units="CPU_ONLY", hints=hints)
    texts = {name: str(value) for name, value in hints.items()}
    package, *others = (call.args[2:5] for call in loaded.call_args_list)
    assert package[1] == "main" and len(others) == len(bundle.manifest.shards)
    assert all(arguments[::2] == ("CPU_ONLY", texts) for arguments in others)
    for wrong in ({"speed": "fast"}, {"reshapeFrequency": "Often"}):
        with refused("speed|Often"):
            load_shard(bundle, shard, Settings("coreml", hints=wrong))


# --- compute plan, faked --------------------------------------------------------------------------


def test_the_plan_counts_every_compute_operation_and_no_constant(
    bundle, shard, monkeypatch
):
    operations = [
        ("const", None),
        ("ios18.constexpr_blockwise_shift_scale", None),
        ("ios18.conv", "ane"),
        ("ios18.conv", "gpu"),
        ("ios16.cond", "cpu", [("ios18.add", "cpu")]),
        ("ios18.mul", None),
    ]
    requests, plans = [], coremltools().models.compute_plan

    def get_compute_plan(*arguments):
        requests.append(arguments)
        return Plan(main=operations)

    native = SimpleNamespace(get_compute_plan=get_compute_plan)
    monkeypatch.setattr(plans, "_MLModelProxy", native)
    compiled = coreml.compiled_path(bundle, shard)
    plan = coreml.compute_plan(bundle.package(shard), compiled, "CPU_AND_NE")
    counted = placement.count_units(shard.name, plan)
    assert (
        requests == [(str(compiled), "CPU_AND_NE")] and compiled.suffix == ".mlmodelc"
    )
    counts = counted.ops, counted.ane, counted.gpu, counted.cpu, counted.eligible
    assert counts == (5, 1, 1, 2, 1) and counted.source == "measured"
    assert counted.convolutions == (1, 2) and not counted.findings


def test_the_fake_plan_has_the_method_of_the_installed_coremltools():
    """A change of coremltools' API fails here, not on someone's Mac. Every other fake is called by
    coremltools' own code."""
    plan = coremltools().models.compute_plan.MLComputePlan
    name = "get_compute_device_usage_for_mlprogram_operation"
    ours, theirs = (inspect.signature(getattr(of, name)) for of in (Plan, plan))
    assert [*ours.parameters] == [*theirs.parameters]
