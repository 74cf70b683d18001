"""Targets, runtimes and commands of other packages: chosen by name, asked for what they can."""

from types import SimpleNamespace

from in_process import invoke
from refusal import refused

from workbench import Decoder, InputError, plugins
from workbench.ane import memory
from workbench.exporter import export, make_options


def test_a_target_that_nothing_offers_is_refused_by_name(tmp_path, tiny_llama):
    with refused("target 'elsewhere'.*install the plug-in"):
        export(tiny_llama.path, tmp_path / "b", target="elsewhere")
    assert not (tmp_path / "b").exists()


def test_a_bundle_says_nothing_of_targets_and_runs_on_no_plug_in(
    llama_bundle, other_target
):
    assert "target" not in (llama_bundle.root / "bundle.json").read_text()
    with refused("portable.*leave out --runtime"):
        Decoder(llama_bundle, "other")


def test_a_target_decides_runtime_dtype_and_options(other_target):
    chosen = make_options(target="other")
    assert (chosen.interpreter, chosen.program_dtype) == ("other", "fp32")
    assert (make_options().interpreter, make_options().program_dtype) == (
        "portable",
        "fp16",
    )
    other_target.check = lambda options: refuse()
    with refused("kv_write"):
        make_options(target="other")


def test_states_and_buffers_of_fp32_programs_count_twice(tiny_llama, other_target):
    half = memory.process_bytes(tiny_llama, make_options())
    whole = memory.process_bytes(tiny_llama, make_options(target="other"))
    for name in ("kv", "buffers"):
        assert whole[name] == 2 * half[name]
    assert whole["weights"] == half["weights"]  # as they are stored


def refuse():
    raise InputError("target other", "kv_write = slice", "kv_write = mask", "leave it")


def test_doctor_names_installed_plug_ins(monkeypatch):
    package = SimpleNamespace(name="workbench-other", version="1.2")
    entries = {"other": SimpleNamespace(dist=package)}
    monkeypatch.setattr(plugins, "find_plugins", lambda kind: entries)
    monkeypatch.setattr("workbench.doctor.runtime.resolve", lambda: "portable")
    assert invoke("doctor")["plugins"] == {"workbench-other": "1.2"}
