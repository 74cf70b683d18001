"""What each command prints with `--json`: the documented keys, true values, and an exit code of 1
for RED."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from in_process import cli, invoke
from tiny import DATA

from workbench.check.golden import Golden
from workbench.cli.options import Prompt
from workbench.cli.output import print_and_exit
from workbench.cli.validation_text import STORED_WEIGHTS, format_validation
from workbench.explain import ranges
from workbench.runtime.portable import PortableModel

TINY = DATA / "tiny-llama"
IDS = "--prompt-ids", "1,69,142,4,100,7,30,31"
STAND_IN = "--runtime", "stand-in"
SINGLE_COPY = *STAND_IN, "--single-copy"
KEYS = {
    "doctor": "platform python macos chip memory_bytes coremltools torch coreml_available "
    "ane_available default_runtime notes",
    "export": "bundle family shards layers bytes shard_bytes embedding_bytes "
    "tokenizer_bytes calibration_bytes converted stamped tokenizer seconds peak_rss_bytes",
    "validate": "verdict quality gates worst min_cosine mean_cosine rows logits "
    "peak_rss_bytes",
    "golden": "golden tokens layers bytes peak_rss_bytes",
    "gate": "name verdict value threshold reason",
    "worst": "layer position T tensor mode cosine psnr_db max_abs",
    "logits": "top1_agreement kl_mean kl_max cosine_min",
    "explain": "verdict parts variants fits ranges",
    "part": "layer storage reauthoring quantization precision runtime total",
    "ranges": "ops first_inf first_nan min_headroom_bits worst",
    "plan": "bytes fits chips source shards predicted_misfit",
    "shard": "shard ops ane cpu gpu ane_if_disputed_hold rules eligible convolutions",
    "rule": "id effect confidence sources advice disputed names",
}


def lacks(document: dict, name: str) -> set[str]:
    """The documented keys of a part of the output, by its name in `KEYS`, that it does not have."""
    return {*KEYS[name].split()} - document.keys()


def verdicts(result: dict) -> dict[str, str]:
    return {gate["name"]: gate["verdict"] for gate in result["gates"]}


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    out = tmp_path_factory.mktemp("golden") / "g"
    invoke("golden", TINY, "--out", out, *IDS)
    return out


@pytest.fixture(scope="module")
def small(exports):
    """A checkpoint and a bundle of its own, since its folder gets a verdict."""
    checkpoint = exports.checkpoint("llama")
    return checkpoint, exports.bundle(checkpoint, max_seq_len=16)


def test_doctor_names_what_is_here():
    document = invoke("doctor")
    assert not lacks(document, "doctor")
    assert document["default_runtime"] in ("portable", "coreml")


def test_export_reports_what_it_made(tmp_path, exports):
    checkpoint, out = exports.checkpoint("llama", num_hidden_layers=1), tmp_path / "b"
    document = invoke("export", checkpoint, out, "--max-seq-len", 16, "--tokens", "1-2")
    assert not lacks(document, "export")
    assert (document["family"], document["layers"], document["shards"]) == (
        "llama",
        1,
        2,
    )
    files = [p for p in out.rglob("*") if p.is_file() and p.name != "bundle.json"]
    assert document["bytes"] == sum(path.stat().st_size for path in files)
    # the tied matrix is stored twice: in the table of embeddings and in the head
    table = out / "embedding.safetensors"
    assert document["embedding_bytes"] == table.stat().st_size
    packages = [path for path in files if ".mlpackage" in str(path)]
    assert document["shard_bytes"] == sum(path.stat().st_size for path in packages)


PART = re.compile(r"size of (\w+) +[\d,.]+ MiB +([\d,]+) bytes")


@pytest.mark.parametrize("calibrate", [False, True])
def test_the_sizes_of_an_exports_parts_add_up(tmp_path, calibrate):
    options = ["--layers-per-shard", 4]
    if calibrate:
        words = (DATA / "calibration.txt").read_text()[:2000]
        (tmp_path / "text").write_text(words)
        options += ["--compress", "int4-block32", "--calibrate", tmp_path / "text"]
    text = cli("export", TINY, tmp_path / "b", *options).stdout
    (total,) = re.findall(r"^size +[\d,.]+ MiB +([\d,]+) bytes$", text, re.MULTILINE)
    parts = {name: int(size.replace(",", "")) for name, size in PART.findall(text)}
    expected = {"shards", "embeddings", "tokenizer"}
    assert parts.keys() == expected | ({"calibration"} if calibrate else set())
    assert sum(parts.values()) == int(total.replace(",", ""))
    files = [*(tmp_path / "b").rglob("*")]
    sizes = [path.stat().st_size for path in files if path.is_file()]
    manifest = (tmp_path / "b" / "bundle.json").stat().st_size
    assert sum(parts.values()) == sum(sizes) - manifest
    assert re.search("^tokenizer +stored$", text, re.MULTILINE)


def test_validate_is_complete_with_and_without_a_golden(llama_bundle, golden):
    checked = invoke("validate", llama_bundle.root)
    assert not lacks(checked["gates"][0], "gate")
    assert (checked["verdict"], checked["quality"]) == ("not_run", "not_run")
    document = invoke("validate", llama_bundle.root, "--golden", golden)
    assert not lacks(document, "validate")
    # without the checkpoint weights, host and program are not compared
    assert (document["verdict"], document["quality"]) == ("not_run", "WITHIN")
    assert not lacks(document["worst"], "worst") and not lacks(
        document["logits"], "logits"
    )
    # at each of 8 positions: isolated, 4 T of 4 tensors of 4 layers; chained, 4 tensors of 4
    # layers; and the logits
    assert document["rows"] == 8 * (4 * 4 * 4 + 4 * 4 + 1)


def test_a_cost_above_the_limit_exits_4_and_names_the_gates_that_did_not_run(
    llama_bundle, golden
):
    limit = "--max-kl", "1e-12"
    result = cli("validate", llama_bundle.root, "--golden", golden, *limit)
    export, quality, gate, *_ = result.stdout.splitlines()
    assert result.exit_code == 4
    assert export.split(maxsplit=1) == ["export", "not run: weights, host, program"]
    assert quality.split() == ["quality", "OVER"]
    assert gate.split()[:2] == ["OVER", "max_kl"]


def test_red_exits_1_with_its_gates_first_and_withholds_the_quality(
    llama_bundle, golden, tmp_path
):
    """Planted: the bundle's own rope base, which no gate but those of values sees."""
    folder = shutil.copytree(llama_bundle.root, tmp_path / "rope")
    manifest = json.loads((folder / "bundle.json").read_text())
    manifest["rope"][0]["inv_freq"] = [
        1.02 * f for f in manifest["rope"][0]["inv_freq"]
    ]
    (folder / "bundle.json").write_text(json.dumps(manifest))
    command = "validate", folder, "--checkpoint", TINY, *IDS
    result = cli(*command)
    export, quality, gate, *_ = result.stdout.splitlines()
    assert result.exit_code == 1 and export.split() == ["export", "RED"]
    assert quality.split() == ["quality", "not", "judged"]
    assert gate.split()[0] == "RED"
    *_, step = result.stdout.splitlines()
    assert step.split(maxsplit=1) == [
        "next",
        f"workbench explain {folder} --checkpoint {TINY}",
    ]
    (limit,) = [line for line in result.stdout.splitlines() if " max_kl " in line]
    assert limit.startswith("not judged ") and "(limit 0.05)" in limit
    document = json.loads(cli(*command, "--json").stdout)
    assert (document["verdict"], document["quality"]) == ("RED", "not_run")
    assert document["cost"]["kl"]["mean"] > 0
    assert verdicts(document)["max_kl"] in ("WITHIN", "OVER")


def test_a_line_of_a_gate_has_the_limit_wherever_it_has_a_value(llama_bundle, golden):
    limit = "--golden", golden, "--max-kl", "0.5"
    lines = cli("validate", llama_bundle.root, *limit).stdout.splitlines()
    document = invoke("validate", llama_bundle.root, *limit)
    values = {gate["name"]: gate["value"] for gate in document["gates"]}
    assert values["undo"] == 1 and values["max_kl"] > 0 and values["host"] is None
    for name, value in values.items():
        (line,) = (line for line in lines if line[12:].startswith(f"{name} "))
        assert (" (limit " in line) == (value is not None), line
    assert "(limit 0.5)" in next(line for line in lines if " max_kl " in line)


# an identifier with an underscore, alone among words
KEY = re.compile(r"(?<![\w.])[a-z0-9]+(_[a-z0-9]+)+(?![\w.])")


def test_the_text_of_a_validation_has_words_with_units_and_the_command_of_its_page(
    small,
):
    checkpoint, bundle = small
    options = bundle.root, "--checkpoint", checkpoint, "--prompt-ids", "1,69,42,4"
    document = invoke("validate", *options)
    assert (document["verdict"], document["quality"]) == ("GREEN", "WITHIN")
    lines = cli("validate", *options).stdout.splitlines()
    figures = [
        line for line in lines if not line.startswith(("GREEN", "WITHIN", "not_"))
    ]
    step = figures.pop()
    page = bundle.root.with_name(f"{bundle.root.name}.html")
    command = f"workbench report {bundle.root} --html {page}"
    assert step.split(maxsplit=1) == ["next", command]
    text = "\n".join(figures)
    assert not KEY.findall(text)
    assert f"peak signal-to-noise ratio {document['worst']['psnr_db']:.1f} dB" in text
    assert f"{document['rows']:,} tensors" in text
    assert f"mean KL {document['logits']['kl_mean']:.4g} nats" in text
    times = document["worst"]["over_rounding"]
    assert f"{times:.4g} times what rounding causes" in text
    (weights,) = (line for line in lines if line[12:].startswith("weights "))
    assert "halves of" not in weights


def test_the_text_of_a_transcript_has_words_with_units():
    row = {"prompt": "a", "agreed": 1.0, "ties": 0, "first_difference": 3}
    transcript = {"agreed": 0.5, "interval": [0.25, 0.75], "ties": 2, "sigma": 0.125}
    transcript |= {"error": 1.5, "prompts": [row | {"cause": "the weights"}]}
    stop = {"ends": 4, "bundle_ends": 3, "end_tokens": None, "contradiction": None}
    result = {"verdict": "GREEN", "quality": "OVER", "gates": [], "logits": None}
    lines = format_validation(result | {"transcript": transcript, "stop": stop}, None)
    text = "\n".join(lines)
    assert "50.00% (95% interval 25.00% to 75.00%)" in text
    assert "by 0.125 (RMS)" in text and "1.5 times what rounding to fp16" in text
    assert "3 of these" in text and not KEY.findall(text)


@pytest.mark.parametrize("verdict", ["RED", "GREEN"])
def test_the_place_of_wrong_weights_is_the_tensor_and_no_layer(verdict):
    clauses = (
        "layers_01_01: model.layers.1.v_proj.weight: 9 times; host: norm.weight: 8"
    )
    gate = {"name": "weights", "verdict": verdict, "reason": clauses}
    place = {"tensor": "k", "layer": 0, "position": 1, "T": 1, "ratio": 2.0}
    figures = {"error": 0.1, "over_rounding": 2.0, "cosine": 1.0}
    figures |= {"psnr_db": 40.0, "max_abs": 0.1}
    kl = dict.fromkeys(("mean", "median", "p99", "max"), 0.1)
    cost = {"kl": kl, "same_top": 1.0, "budget": {"kl": kl, "worst": place}}
    result = {
        "verdict": verdict,
        "quality": "not_run",
        "gates": [gate | {"value": 9.0, "threshold": 1.0}],
        "worst": place | figures,
        "logits": None,
        "cost": cost,
    }
    lines = format_validation(result, None)
    text = "\n".join(lines)
    is_wrong = verdict == "RED"
    assert text.count("2 times what rounding causes") == (1 if is_wrong else 2)
    of_stored = f"2 times what rounding causes{STORED_WEIGHTS}"
    assert text.count(of_stored) == int(is_wrong)
    assert any(line.startswith("worst layer ") for line in lines) != is_wrong
    places = [line for line in lines if line.startswith("place of the fault ")]
    assert len(places) == int(is_wrong)
    if is_wrong:
        assert "gate weights: model.layers.1.v_proj.weight, norm.weight." in places[0]
    assert ("the cost of compression" in text) == (verdict == "GREEN")


def test_what_makes_a_bundle_ends_with_the_command_that_validates_it(tmp_path, exports):
    checkpoint = exports.checkpoint("llama", num_hidden_layers=1)
    out = tmp_path / "a bundle"
    *_, step = cli("export", checkpoint, out, "--max-seq-len", 16).stdout.splitlines()
    assert step.split(maxsplit=1) == [
        "next",
        f"workbench validate '{out}' --checkpoint {checkpoint}",
    ]


def test_more_layers_per_shard_than_there_are_layers_is_said(tmp_path, exports):
    checkpoint = exports.checkpoint("llama", num_hidden_layers=1)
    remark = "One shard has every decoder layer: the checkpoint has 1, fewer than"
    for count in (1, 2):
        sizes = "--max-seq-len", 16, "--layers-per-shard", count
        lines = cli("export", checkpoint, tmp_path / f"{count}", *sizes).stdout
        assert (f"{remark} --layers-per-shard {count}." in lines) == (count > 1)


@pytest.mark.shim
def test_a_machine_with_one_copy_of_the_bundle_reads_what_golden_wrote(
    small, tmp_path, monkeypatch
):
    checkpoint, bundle = small
    out, without_device = tmp_path / "g", tmp_path / "without_device"
    prompt = "--prompt-ids", "1,69,42,4,30,7"
    invoke("golden", checkpoint, "--out", without_device, *prompt)
    written = invoke("golden", checkpoint, "--out", out, "--for", bundle.root)
    assert Golden.load(out).ids.tolist() == Prompt().token_ids(bundle)
    assert not lacks(written, "golden")
    assert written["verdict"] == "GREEN" and (bundle.root / "verdict.json").is_file()
    assert (tmp_path / Path(written["reference"]).name).is_file()
    # the machine with one copy runs no second one in the portable runtime
    monkeypatch.setattr(
        PortableModel, "__init__", lambda *_, **__: pytest.fail("loaded")
    )
    for options in (SINGLE_COPY, STAND_IN):
        result = invoke("validate", bundle.root, "--golden", out, *options)
        for name in ("device", "program", "weights", "host"):
            assert verdicts(result)[name] == "GREEN"
    golden = "--golden", without_device
    result = invoke("validate", bundle.root, *golden, *SINGLE_COPY)
    (device,) = [gate for gate in result["gates"] if gate["name"] == "device"]
    assert device["verdict"] == "not_run"
    assert "workbench golden CHECKPOINT --out G --for" in device["reason"]


@pytest.mark.wide
def test_each_unit_asks_every_gate_and_the_limit_that_is_given(exports, calls_here):
    checkpoint = exports.checkpoint("llama")
    bundle = exports.bundle(checkpoint, max_seq_len=20)
    (bundle.root / "verdict.json").unlink(missing_ok=True)
    options = "--checkpoint", checkpoint, "--max-kl", "1e-12"
    document = invoke("validate", "units", bundle.root, *options)
    assert (document["verdict"], document["quality"]) == ("GREEN", "OVER")
    assert document["device_measured"] is False
    assert document["units"][0]["reason"].startswith("max_kl")
    stored = json.loads((bundle.root / "verdict.json").read_text())["gates"]
    assert {gate["verdict"] for gate in stored} == {"GREEN"}


def test_explain_splits_every_layer_names_the_variant_and_the_ranges_on_one_page(
    exports,
):
    checkpoint = exports.checkpoint("llama")
    root = exports.bundle(checkpoint, compress="int8-tensor").root
    arguments = "explain", root, "--checkpoint", checkpoint, "--prompt-ids", "1,2,3,4"
    document = invoke(*arguments)
    assert document["verdict"] == "GREEN" and not lacks(document, "explain")
    first, second = document["parts"]
    assert not lacks(first, "part") and (first["layer"], second["layer"]) == (0, 1)
    assert first["runtime"] is None and first["quantization"] > 0
    assert document["fits"] == "as configured"
    assert document["variants"][0].keys() >= {"name", "relative_rms"}
    assert (
        not lacks(document["ranges"], "ranges")
        and document["ranges"]["first_inf"] is None
    )


@pytest.mark.shim
def test_explain_measures_the_runtime_s_part(small):
    checkpoint, bundle = small
    command = "explain", "parts", bundle.root, "--checkpoint", checkpoint
    command += "--prompt-ids", "1,2,3"
    device = invoke(*command, "--runtime", "stand-in")["parts"]
    portable = invoke(*command)["parts"]
    assert all(row["runtime"] is not None for row in device)
    assert all(row["quantization"] == 0 for row in portable)  # it is not compressed


def test_ranges_take_bundles_and_packages_and_an_overflow_is_red(small, monkeypatch):
    _, bundle = small
    package = bundle.root / bundle.manifest.shards[0].path
    for source in (bundle.root, package):
        document = invoke("explain", "ranges", source)["ranges"]
        assert not lacks(document, "ranges") and document["first_inf"] is None
        assert document["worst"][0].keys() >= {"op", "module", "max_abs"}
    inputs = ranges.random_inputs

    def overflowing(*arguments):
        values = inputs(*arguments)
        return values | {"rope_cos": np.full_like(values["rope_cos"], 6e4)}

    monkeypatch.setattr(ranges, "random_inputs", overflowing)
    result = cli("explain", package)
    first, second, *_ = result.stdout.splitlines()
    assert (result.exit_code, first.split()) == (1, ["export", "RED"])
    assert "first inf at" in second


def test_a_checkpoint_is_planned_and_so_is_its_bundle_with_placement(llama_bundle):
    """tests/ane/test_work.py compares the two."""
    of_checkpoint = invoke("plan", TINY, "--max-seq-len", 32)
    of_bundle = invoke("plan", llama_bundle.root)
    for plan in (of_checkpoint, of_bundle):
        assert not lacks(plan, "plan") and plan["predicted_misfit"] <= 0.3
        assert {"M1", "M4 Max"} <= {row["chip"] for row in plan["chips"]}
        assert plan["bytes"]["kv"] == 2 * 4 * 2 * 32 * 32 * 2
    assert of_bundle["source"] == "predicted"
    for shard in of_bundle["shards"]:
        assert not lacks(shard, "shard")
        assert shard["ane"] + shard["cpu"] == shard["ops"]
        assert not any(lacks(rule, "rule") for rule in shard["rules"])
    assert "predicted placement" in cli("plan", llama_bundle.root).output


def test_a_plan_for_one_chip_speaks_of_that_chip_alone(llama_bundle):
    plan = invoke("plan", llama_bundle.root, "--chip", "M1")
    assert [row["chip"] for row in plan["chips"]] == ["M1"] and plan["chip"] == "M1"
    assert "M3 Max" not in cli("plan", llama_bundle.root, "--chip", "M1").output


def refuse_constant(name):
    raise AssertionError(f"{name} is not JSON")


def test_json_names_numbers_that_json_lacks(capsys):
    nan = {"cosine": np.float64("nan"), "at": [1.0, (float("-inf"),)]}
    print_and_exit({"worst": nan, "n": 3}, True)
    document = json.loads(capsys.readouterr().out, parse_constant=refuse_constant)
    assert document == {"worst": {"cosine": "nan", "at": [1.0, ["-inf"]]}, "n": 3}
