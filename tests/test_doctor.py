"""The doctor tries Core ML instead of concluding from a version, in processes that may die."""

from types import SimpleNamespace

import in_process
import pytest
from refusal import refused

from miltorch.coremltools_import import coremltools
from workbench import doctor, process
from workbench.ane import memory


def test_off_a_mac_nothing_is_tried(monkeypatch):
    monkeypatch.setattr(process, "call", None)
    result = doctor.examine()
    assert result["compute_devices"] is result["stateful_predict"] is None
    assert not result["coreml_available"] and not result["ane_available"]


@pytest.mark.shim
@pytest.mark.parametrize(
    ("fault", "cpu", "engine"),
    [
        ("", "ok", "ok"),
        ("-load14", "ok", "error code: -14"),
        ("-kill", "killed by SIGKILL", "killed by SIGKILL"),
    ],
)
def test_a_model_with_a_state_is_tried_on_each_unit(
    fault, cpu, engine, monkeypatch, forked
):
    if fault != "-kill":
        monkeypatch.setattr(process, "call", in_process.call)
    result = doctor.examine("stand-in" + fault)
    tried = result["stateful_predict"]
    assert list(tried) == ["CPU_ONLY", "CPU_AND_NE"]
    assert cpu in tried["CPU_ONLY"] and engine in tried["CPU_AND_NE"]
    assert result["coreml_available"] == (cpu == "ok")
    notes = " ".join(result["notes"])
    assert ("did not run on CPU_AND_NE" in notes) == (engine != "ok")
    assert ("did not run on CPU_ONLY" in notes) == (cpu != "ok")


def test_a_mac_has_the_devices_that_core_ml_lists(monkeypatch):
    devices = [{"kind": "cpu", "cores": None}, {"kind": "ane", "cores": 16}]

    def call(function, *_, **__):
        return process.Outcome(devices if function is doctor.compute_devices else None)

    monkeypatch.setattr(doctor.runtime, "coreml_available", lambda: True)
    monkeypatch.setattr(process, "call", call)
    result = doctor.examine()
    assert result["compute_devices"] == devices and result["ane_available"]
    assert result["stateful_predict"] == {"CPU_ONLY": "ok", "CPU_AND_NE": "ok"}
    devices.pop()
    assert not doctor.examine()["ane_available"]


def test_devices_are_listed_by_kind_with_the_cores_of_the_engine(monkeypatch):
    kinds = coremltools().models.compute_device
    engine = type("MLNeuralEngineComputeDevice", (), {"total_core_count": 16})
    graphics = type("MLGPUComputeDevice", (), {})
    monkeypatch.setattr(
        kinds.MLComputeDevice, "get_all_compute_devices", lambda: [graphics(), engine()]
    )
    monkeypatch.setattr(doctor, "check_native_layer", lambda: None)
    assert doctor.compute_devices() == [
        {"kind": "gpu", "cores": None},
        {"kind": "ane", "cores": 16},
    ]
    assert hasattr(kinds.MLNeuralEngineComputeDevice, "total_core_count")
    assert set(doctor.DEVICE_UNITS) <= set(vars(kinds))


def test_a_coremltools_without_its_native_layer_says_so():
    with refused("no native layer.*Python 3.11 to 3.13"):
        doctor.stateful_predict("coreml", "CPU_ONLY")


@pytest.mark.shim
def test_a_state_that_does_not_count_is_refused(monkeypatch):
    from miltorch import shim

    predict = shim.Proxy.predict
    monkeypatch.setattr(
        shim.Proxy, "predict", lambda self, data, state=None: predict(self, data)
    )
    with refused("state"):
        doctor.stateful_predict("stand-in", "CPU_ONLY")


@pytest.mark.parametrize(("platform", "usable"), [("linux", 1000), ("darwin", 700)])
def test_a_mac_leaves_seven_tenths_of_its_memory(monkeypatch, platform, usable):
    monkeypatch.setattr(memory, "sys", SimpleNamespace(platform=platform))
    for total in (700, 701, 1000, 1001):
        fits = {"fits": total <= usable, "fits_mac": total <= 700}
        assert memory.fits(total, 1000) == fits
