"""The commands: JSON keys as documented, RED exits 1, bad input exits 2 with one message and leaves
nothing behind."""

import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from workbench.check import golden
from workbench.cli.app import app
from workbench.cli.common import show
from workbench.errors import InputError

DATA = Path(__file__).parents[2] / "data"


def run(*arguments, code: int = 0) -> dict:
    """Runs a command with --json in process and returns its object."""
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def refused(*arguments) -> InputError:
    """Runs a command that must refuse its input."""
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert isinstance(result.exception, InputError), result.output
    return result.exception


@pytest.fixture(scope="session")
def llama(exports):
    return exports.bundle(DATA / "tiny-llama", max_seq_len=64)


def test_doctor_names_what_is_here():
    found = run("doctor")
    assert {
        "platform",
        "python",
        "macos",
        "chip",
        "memory_bytes",
        "coremltools",
        "torch",
        "coreml_available",
        "ane_available",
        "default_runtime",
        "notes",
    } <= found.keys()
    assert found["default_runtime"] in ("portable", "coreml")


def test_export_reports_what_it_made(tmp_path, exports):
    checkpoint = exports.checkpoint("llama", num_hidden_layers=1)
    found = run(
        "export", checkpoint, tmp_path / "b", "--max-seq-len", 16, "--tokens", "1-2"
    )
    assert {
        "bundle",
        "family",
        "shards",
        "layers",
        "bytes",
        "converted",
        "stamped",
        "seconds",
        "peak_rss_bytes",
    } <= found.keys()
    assert (found["family"], found["layers"], found["shards"]) == ("llama", 1, 2)
    assert found["bytes"] == sum(
        f.stat().st_size
        for f in (tmp_path / "b").rglob("*")
        if f.is_file() and f.name != "bundle.json"
    )


def test_validate_is_green_and_complete_with_and_without_a_golden(llama, tmp_path):
    golden = tmp_path / "g.safetensors"
    run(
        "golden",
        DATA / "tiny-llama",
        "--out",
        golden,
        "--prompt-ids",
        "1,69,142,4,100,7,30,31",
    )
    checked = run("validate", llama.root)
    assert checked["verdict"] == "GREEN"
    assert {"name", "verdict", "value", "threshold", "reason"} == checked["gates"][
        0
    ].keys()
    found = run("validate", llama.root, "--golden", golden)
    assert found["verdict"] == "GREEN"
    assert {
        "gates",
        "worst",
        "min_cosine",
        "mean_cosine",
        "rows",
        "logits",
    } <= found.keys()
    assert {
        "layer",
        "position",
        "T",
        "tensor",
        "mode",
        "cosine",
        "psnr_db",
        "max_abs",
    } == found["worst"].keys()
    assert {"top1_agreement", "kl_mean", "kl_max", "cosine_min"} == found[
        "logits"
    ].keys()
    # (T × layer × tensor isolated, those chained, logits) × position
    assert found["rows"] == (4 * 4 * 4 + 4 * 4 + 1) * 8


def test_red_exits_1_with_the_reason_first(llama, tmp_path):
    golden = tmp_path / "g.safetensors"
    run("golden", DATA / "tiny-llama", "--out", golden)
    arguments = ["validate", llama.root, "--golden", golden, "--max-kl", "1e-12"]
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 1
    assert result.stdout.splitlines()[0] == "RED" and result.stdout.splitlines()[
        1
    ].startswith("RED")


def test_decode_gives_hugging_face_s_tokens_and_all_logits(llama, tmp_path, exports):
    ids, new = [1, 4, 69, 173, 13, 4, 72], 24
    found = run(
        "generate",
        llama.root,
        "--prompt-ids",
        ",".join(map(str, ids)),
        "--max-new",
        new,
        "--precision",
        "exact",
        "--logits",
        tmp_path / "l.npy",
    )
    import torch

    with torch.inference_mode():
        wanted = exports.hf(DATA / "tiny-llama").generate(
            torch.tensor([ids]), max_new_tokens=new, do_sample=False
        )
    assert found["tokens"] == wanted[0, len(ids) :].tolist()
    assert {
        "tokens",
        "text",
        "prefill",
        "decode",
        "runtime",
        "precision",
    } <= found.keys()
    logits = np.load(tmp_path / "l.npy")
    assert (
        logits.shape == (len(found["tokens"]) + 1, 256) and logits.dtype == np.float32
    )
    assert logits[:-1].argmax(1).tolist() == found["tokens"]


def test_memory_of_a_checkpoint_and_of_its_bundle_agree(llama):
    predicted = run("plan", DATA / "tiny-llama", "--max-seq-len", 64)
    measured = run("plan", llama.root)
    predicted, measured = predicted["bytes"], measured["bytes"]
    assert predicted["kv"] == measured["kv"] == 2 * 4 * 2 * 64 * 32 * 2
    # program and alignment come on top
    assert abs(predicted["weights"] / measured["weights"] - 1) < 0.2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("export", "nowhere", "out"), "no folder"),
        (("export", DATA / "tiny-llama", "out", "--max-seq-len", "0"), "max_seq_len"),
        (("export", DATA / "tiny-llama", "out", "--compress", "int3"), "int3"),
        (("validate", "nowhere", "--checkpoint", DATA / "tiny-llama"), "bundle.json"),
        (("generate", "nowhere", "--prompt-ids", "1"), "bundle.json"),
        (("sweep", "nowhere.yaml"), "grid"),
        (("report", "99"), "99"),
        (("plan", DATA / "tiny-llama", "--memory", "lots"), "lots"),
        (("plan", DATA / "tiny-llama", "--memory", "0"), "above zero"),
        (("plan", DATA / "tiny-llama", "--memory", "-1G"), "above zero"),
        (("plan", DATA / "tiny-llama", "--memory", "infG"), "above zero"),
        (("plan", DATA / "tiny-llama", "--memory", ""), "above zero"),
        (("golden", DATA / "tiny-llama", "--out", "."), "--out"),
        (("golden", DATA / "tiny-llama", "--out", "/proc/x/g"), "--out"),
        (
            ("golden", DATA / "tiny-llama", "--out", "new/g", "--prompt-ids", ""),
            "--prompt-ids",
        ),
        (
            ("golden", DATA / "tiny-llama", "--out", "new/g", "--prompt-ids", "1,256"),
            "from 0 to 255",
        ),
        (("run", "34", "--set", "DAY=2026-13-45"), "DAY"),
        (("plan", DATA / "tiny-llama", "--tokens", "4-1"), "tokens"),
    ],
)
def test_bad_input_is_refused_by_name(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert words in str(refused(*arguments))
    assert not list(tmp_path.iterdir())


def test_prompts_are_checked(llama):
    assert "max_seq_len" in str(
        refused("generate", llama.root, "--prompt-ids", "1," * 64 + "1")
    )
    assert "ids from 0 to 255" in str(
        refused("generate", llama.root, "--prompt-ids", "256")
    )
    assert "one of them" in str(refused("generate", llama.root))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            (
                "validate",
                "--golden",
                DATA / "README.md",
                "--tasks",
                DATA / "tasks" / "heldout.jsonl",
            ),
            "--checkpoint",
        ),
        (
            ("validate", "--checkpoint", DATA / "tiny-llama", "--prompt-ids", ""),
            "--prompt-ids",
        ),
        (("plan", "--memory", "0"), "above zero"),
        (("validate", "--alone"), "--alone"),
        (("validate", "--prompt-ids", "1"), "--golden"),
        (("explain",), "--checkpoint"),
        (("explain", "--only", "parts"), "--checkpoint"),
        (("explain", "--only", "part"), "one of parts"),
        (("explain", "--only", "ranges", "--prompt-ids", "1,2,400"), "from 0 to 255"),
        (("explain", "--only", "ranges", "--prompt-ids", ""), "--prompt-ids"),
    ],
)
def test_bad_input_about_a_bundle_is_refused(llama, arguments, words):
    command, *rest = arguments
    assert words in str(refused(command, llama.root, *rest))


def test_too_few_new_tokens_are_refused(llama):
    arguments = "generate", llama.root, "--prompt-ids", "1", "--max-new", -3
    assert "new tokens" in str(refused(*arguments))


def never(name):
    raise AssertionError(f"{name} is not JSON")


def test_json_names_numbers_that_json_lacks(capsys):
    show(
        {"worst": {"cosine": np.float64("nan"), "at": [1.0, (float("-inf"),)]}, "n": 3},
        True,
        [],
    )
    found = json.loads(capsys.readouterr().out, parse_constant=never)
    assert found == {"worst": {"cosine": "nan", "at": [1.0, ["-inf"]]}, "n": 3}


def test_a_validation_against_nan_is_red_in_json(llama, tmp_path):
    made = golden.make_golden(DATA / "tiny-llama", [1, 69, 142])
    values = made.values | {"logits": made["logits"] * np.nan}
    replace(made, values=values).save(tmp_path / "g")
    result = CliRunner().invoke(
        app, ["validate", str(llama.root), "--golden", str(tmp_path / "g"), "--json"]
    )
    found = json.loads(result.stdout, parse_constant=never)
    assert (result.exit_code, found["verdict"], found["logits"]["kl_max"]) == (
        1,
        "RED",
        "nan",
    )


def test_an_interrupted_export_leaves_nothing(tmp_path, forked):
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from workbench.cli import main; main()"
    command = [
        sys.executable,
        "-c",
        code,
        "export",
        DATA / "tiny-zaya",
        tmp_path / "b",
        "--json",
    ]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.glob(".b.partial/*.mlpackage")):
        assert running.poll() is None
        time.sleep(0.02)
    running.send_signal(signal.SIGINT)
    _, told = running.communicate(timeout=60)
    assert running.returncode == 130 and told.startswith("workbench: interrupted")
    assert not list(tmp_path.iterdir())


def test_text_needs_a_tokenizer(exports):
    bundle = exports.bundle(exports.checkpoint("llama"))
    assert "tokenizer" in str(refused("generate", bundle.root, "--prompt", "hello"))


def test_a_model_type_without_a_family_is_refused(tmp_path):
    folder = tmp_path / "gpt2"
    shutil.copytree(DATA / "tiny-llama", folder)
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "gpt2"}
    (folder / "config.json").write_text(json.dumps(config))
    assert "gpt2" in str(refused("export", folder, tmp_path / "out"))


def damage_truncate(bundle):
    weights = next(bundle.rglob("weight.bin"))
    weights.write_bytes(weights.read_bytes()[:-64])


def damage_flip(bundle):
    weights = next(bundle.rglob("weight.bin"))
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)


def damage_lfs(bundle):
    next(bundle.rglob("weight.bin")).write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    )


def damage_path(bundle):
    manifest = bundle / "bundle.json"
    manifest.write_text(
        manifest.read_text()
        .replace('"path":"head_00.mlpackage"', '"path":"../head_00.mlpackage"')
        .replace('"path": "head_00.mlpackage"', '"path": "../head_00.mlpackage"')
    )


def damage_version(bundle):
    manifest = bundle / "bundle.json"
    manifest.write_text(manifest.read_text().replace('"version": 2', '"version": 1'))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damage_truncate, "bytes"),
        (damage_lfs, "Git LFS"),
        (damage_path, "inside the bundle"),
        (damage_version, "export again"),
    ],
)
def test_a_damaged_bundle_is_refused(llama, tmp_path, damage, words):
    copy = tmp_path / "copy"
    shutil.copytree(llama.root, copy)
    damage(copy)
    assert words in str(refused("generate", copy, "--prompt-ids", "1,2"))


def test_a_flipped_byte_is_refused_by_validate(llama, tmp_path):
    copy = shutil.copytree(llama.root, tmp_path / "copy")
    damage_flip(copy)
    checkpoint = ("--checkpoint", DATA / "tiny-llama")
    assert "SHA-256" in str(
        refused("validate", copy, *checkpoint, "--prompt-ids", "1,2")
    )


@pytest.mark.wide
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen2"])
def test_sixty_four_greedy_tokens_are_hugging_face_s(name, exports):
    """`exact` gives the same tokens; `declared` the same up to a first near-tie."""
    import torch

    from workbench.check import tasks

    prompt = tasks.load_tasks(DATA / "tasks" / "heldout.jsonl")[3]["prompt"]
    ids = tasks.load_tokenizer(DATA / name).encode(prompt)[:40]
    model = exports.hf(DATA / name)
    with torch.inference_mode():
        made = model.generate(
            torch.tensor([ids]),
            min_new_tokens=64,
            max_new_tokens=64,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
    wanted = made.sequences[0, len(ids) :].tolist()
    bundle = exports.bundle(DATA / name, max_seq_len=128)
    from workbench import Decoder

    assert Decoder(bundle, "portable", "exact").generate(ids, 64, stop=()) == wanted
    for record, token, logits in zip(
        Decoder(bundle, "portable", fast=True).stream(ids, 64, stop=()),
        wanted,
        made.logits,
        strict=True,
    ):
        if record.token != token:
            for row, other in (
                (logits[0].numpy(), record.token),
                (record.logits, token),
            ):
                assert row.max() - row[other] <= 0.5  # nats: a near tie
            break
