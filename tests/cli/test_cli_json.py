"""What each command prints with `--json`: the documented keys, true values, and an exit code of 1
for RED."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import in_process
import numpy as np
import pytest
from in_process import cli, invoke

from workbench import process
from workbench.check import golden as goldens
from workbench.cli.common import show
from workbench.explain import trace
from workbench.runtime import COMPUTE_UNITS
from workbench.runtime.portable import PortableModel

TINY = Path(__file__).parents[2] / "data" / "tiny-llama"
IDS = "--prompt-ids", "1,69,142,4,100,7,30,31"
ALONE = "--runtime", "stand-in", "--alone"
KEYS = {
    "doctor": "platform python macos chip memory_bytes coremltools torch coreml_available "
    "ane_available default_runtime notes",
    "export": "bundle family shards layers bytes converted stamped seconds peak_rss_bytes",
    "validate": "verdict gates worst min_cosine mean_cosine rows logits",
    "gate": "name verdict value threshold reason",
    "worst": "layer position T tensor mode cosine psnr_db max_abs",
    "logits": "top1_agreement kl_mean kl_max cosine_min",
    "explain": "verdict parts variants fits ranges",
    "part": "layer storage reauthoring quantization precision runtime total",
    "ranges": "ops first_inf first_nan min_headroom_bits worst",
    "plan": "bytes fits chips source shards predicted_misfit",
    "shard": "shard ops ane cpu gpu rules eligible convolutions",
    "rule": "id effect confidence sources advice disputed names",
}


def lacks(found: dict, name: str) -> set[str]:
    return {*KEYS[name].split()} - found.keys()


def verdicts(result: dict) -> dict[str, str]:
    return {gate["name"]: gate["verdict"] for gate in result["gates"]}


@pytest.fixture(scope="module")
def llama(exports):
    return exports.bundle(TINY, max_seq_len=64).root


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    out = tmp_path_factory.mktemp("golden") / "g"
    invoke("golden", TINY, "--out", out, *IDS)
    return out


@pytest.fixture(scope="module")
def small(exports):
    """A checkpoint and a bundle of its own, since its folder gets a verdict."""
    checkpoint = exports.checkpoint("llama")
    return checkpoint, exports.bundle(checkpoint, max_seq_len=24)


@pytest.fixture
def no_portable(monkeypatch):
    """Any shard that is loaded as portable ends the test."""
    refuse = pytest.fail
    monkeypatch.setattr(PortableModel, "__init__", lambda *_, **__: refuse("portable"))


def test_doctor_names_what_is_here():
    found = invoke("doctor")
    assert not lacks(found, "doctor")
    assert found["default_runtime"] in ("portable", "coreml")


def test_export_reports_what_it_made(tmp_path, exports):
    checkpoint, out = exports.checkpoint("llama", num_hidden_layers=1), tmp_path / "b"
    found = invoke("export", checkpoint, out, "--max-seq-len", 16, "--tokens", "1-2")
    assert not lacks(found, "export")
    assert (found["family"], found["layers"], found["shards"]) == ("llama", 1, 2)
    files = [p for p in out.rglob("*") if p.is_file() and p.name != "bundle.json"]
    assert found["bytes"] == sum(path.stat().st_size for path in files)


@pytest.mark.slow("an export is interrupted while it runs in a process of its own")
def test_an_interrupted_export_leaves_nothing(tmp_path, forked):
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from workbench.cli import main; main()"
    export = "export", TINY.with_name("tiny-zaya"), tmp_path / "b", "--json"
    command = [sys.executable, "-c", code, *export]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.glob(".b.partial/*.mlpackage")):
        assert running.poll() is None
        time.sleep(0.02)
    running.send_signal(signal.SIGINT)
    _, told = running.communicate(timeout=60)
    assert running.returncode == 130 and "Traceback" not in told
    assert not list(tmp_path.iterdir())


def test_validate_is_complete_with_and_without_a_golden(llama, golden):
    checked = invoke("validate", llama)
    assert checked["verdict"] == "GREEN" and not lacks(checked["gates"][0], "gate")
    found = invoke("validate", llama, "--golden", golden)
    assert found["verdict"] == "GREEN" and not lacks(found, "validate")
    assert not lacks(found["worst"], "worst") and not lacks(found["logits"], "logits")
    # (T × layer × tensor isolated, those chained, logits) × position
    assert found["rows"] == (4 * 4 * 4 + 4 * 4 + 1) * 8


def test_red_exits_1_with_its_gates_first(llama, golden):
    result = cli("validate", llama, "--golden", golden, "--max-kl", "1e-12")
    first, second, *_ = result.stdout.splitlines()
    assert result.exit_code == 1 and first == "RED" and second.startswith("RED")


@pytest.mark.shim
def test_a_machine_with_one_copy_of_the_bundle_reads_what_golden_wrote(
    small, tmp_path, request
):
    checkpoint, bundle = small
    out, alone = tmp_path / "g", tmp_path / "alone"
    prompt = "--prompt-ids", "1,69,42,4,30,7"
    invoke("golden", checkpoint, "--out", alone, *prompt)
    written = invoke("golden", checkpoint, "--out", out, *prompt, "--for", bundle.root)
    assert written["verdict"] == "GREEN" and (bundle.root / "verdict.json").is_file()
    assert (tmp_path / Path(written["reference"]).name).is_file()
    request.getfixturevalue("no_portable")
    for where in (ALONE, ALONE[:2]):
        found = verdicts(invoke("validate", bundle.root, "--golden", out, *where))
        gates = {found[name] for name in ("device", "program", "weights", "host")}
        assert gates == {"GREEN"}
    found = invoke("validate", bundle.root, "--golden", alone, *ALONE)
    gates = {gate["name"]: gate for gate in found["gates"]}
    assert gates["device"]["verdict"] == "not_run"
    assert "workbench golden CHECKPOINT --out G --for" in gates["device"]["reason"]


@pytest.mark.shim
def test_each_unit_alone_leaves_the_portable_arithmetics_out(
    llama, golden, monkeypatch
):
    monkeypatch.setattr(process, "call", in_process.call)
    found = invoke("validate", llama, "--golden", golden, *ALONE, "--each-unit")
    assert [unit["unit"] for unit in found["units"]] == [*COMPUTE_UNITS]
    for unit in found["units"]:
        assert unit["verdict"] == "GREEN"
        assert unit["kl_portable"] is None and unit["blame"] is None


def test_each_unit_names_every_arithmetic_and_what_was_not_measured(
    llama, golden, monkeypatch
):
    monkeypatch.setattr(process, "call", in_process.call)
    found = invoke("validate", llama, "--golden", golden, "--each-unit")
    assert (found["verdict"], found["device_measured"]) == ("GREEN", False)
    declared, exact, narrow = found["units"]
    assert (declared["unit"], narrow["unit"]) == (
        "portable declared",
        "portable narrow",
    )
    assert exact["min_cosine"] > 0.99999
    assert exact["kl_portable"] > declared["kl_portable"] == 0


def test_explain_splits_every_layer_names_the_variant_and_the_ranges_on_one_page(
    exports,
):
    checkpoint = exports.checkpoint("llama")
    root = exports.bundle(checkpoint, compress="int8-tensor").root
    arguments = "explain", root, "--checkpoint", checkpoint, "--prompt-ids", "1,2,3,4"
    found = invoke(*arguments)
    assert found["verdict"] == "GREEN" and not lacks(found, "explain")
    first, second = found["parts"]
    assert not lacks(first, "part") and (first["layer"], second["layer"]) == (0, 1)
    assert first["runtime"] is None and first["quantization"] > 0
    assert found["fits"] == "as configured"
    assert found["variants"][0].keys() >= {"name", "relative_rms"}
    assert not lacks(found["ranges"], "ranges") and found["ranges"]["first_inf"] is None


@pytest.mark.shim
def test_explain_measures_the_runtime_s_part(small):
    checkpoint, bundle = small
    only = "--checkpoint", checkpoint, "--prompt-ids", "1,2,3", "--only", "parts"
    device = invoke("explain", bundle.root, *only, "--runtime", "stand-in")["parts"]
    own = invoke("explain", bundle.root, *only)["parts"]
    assert all(row["runtime"] is not None for row in device)
    assert all(row["quantization"] == 0 for row in own)  # it is not compressed
    totals = [row["total"] for row in device]
    assert [row["total"] for row in own] == pytest.approx(totals, rel=1e-3)


def test_ranges_take_bundles_and_packages_and_an_overflow_is_red(small, monkeypatch):
    _, bundle = small
    package = bundle.root / bundle.manifest.shards[0].path
    for source in (bundle.root, package):
        found = invoke("explain", source, "--only", "ranges")["ranges"]
        assert not lacks(found, "ranges") and found["first_inf"] is None
        assert found["ops"] > 20 and found["min_headroom_bits"] > 0
        assert found["worst"][0].keys() >= {"op", "module", "max_abs"}
    inputs = trace.random_inputs

    def overflowing(*arguments):
        made = inputs(*arguments)
        return made | {"rope_cos": np.full_like(made["rope_cos"], 6e4)}

    monkeypatch.setattr(trace, "random_inputs", overflowing)
    result = cli("explain", package)
    first, second, *_ = result.stdout.splitlines()
    assert (result.exit_code, first) == (1, "RED") and "first inf at" in second


def test_plan_of_a_checkpoint_and_of_its_bundle_agree(llama):
    predicted = invoke("plan", TINY, "--max-seq-len", 64)
    measured = invoke("plan", llama)
    for found in (predicted, measured):
        assert not lacks(found, "plan") and found["predicted_misfit"] <= 0.3
        chips = {row["chip"]: row for row in found["chips"]}
        assert chips["M1"]["weights"].endswith("streamed as fp16")
        assert chips["M1"]["streamed_mib"] > 0 and "M4 Max" in chips
    predicted, measured = predicted["bytes"], measured["bytes"]
    assert predicted["kv"] == measured["kv"] == 2 * 4 * 2 * 64 * 32 * 2
    # program and alignment come on top
    assert abs(predicted["weights"] / measured["weights"] - 1) < 0.2


def test_placement_is_predicted_off_a_mac_with_rules_and_advice(llama):
    chips = {chip: invoke("plan", llama, "--chip", chip) for chip in ("M1", "M5")}
    assert chips["M1"]["source"] == "predicted"
    rules = {}
    for chip, found in chips.items():
        for shard in found["shards"]:
            assert not lacks(shard, "shard")
            assert shard["ane"] + shard["cpu"] == shard["ops"]
            assert shard["eligible"] >= shard["ane"]
            assert not any(lacks(rule, "rule") for rule in shard["rules"])
        rules[chip] = {r["id"] for s in found["shards"] for r in s["rules"]}
    assert rules["M5"] <= rules["M1"]
    text = cli("plan", llama).output
    assert "predicted placement" in text and "measured placement" not in text


def never(name):
    raise AssertionError(f"{name} is not JSON")


def test_json_names_numbers_that_json_lacks(llama, tmp_path, capsys):
    nan = {"cosine": np.float64("nan"), "at": [1.0, (float("-inf"),)]}
    show({"worst": nan, "n": 3}, True)
    found = json.loads(capsys.readouterr().out, parse_constant=never)
    assert found == {"worst": {"cosine": "nan", "at": [1.0, ["-inf"]]}, "n": 3}
    made = goldens.make_golden(TINY, [1, 69, 142])
    values = made.values | {"logits": made["logits"] * np.nan}
    replace(made, values=values).save(tmp_path / "g")
    result = cli("validate", llama, "--golden", tmp_path / "g", "--json")
    found = json.loads(result.stdout, parse_constant=never)
    assert (result.exit_code, found["verdict"]) == (1, "RED")
    assert found["logits"]["kl_max"] == "nan"
