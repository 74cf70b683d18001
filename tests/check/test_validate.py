"""The verdict: bug gates with a checkpoint, the stored ones without, and a bundle that no decoder
runs is still RED."""

import json
import shutil
from dataclasses import replace

import pytest
from tiny import as_device
from typer.testing import CliRunner

from workbench import Bundle, Decoder
from workbench.check import gates, golden, verdict
from workbench.check.validate import BUG_GATES, bug_gates, validate
from workbench.cli.app import app
from workbench.errors import InputError

IDS = "1,69,142,4,100,7"


def run(*arguments):
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    return result.exit_code, json.loads(result.stdout), result.stderr


@pytest.fixture
def bundle(llama_bundle, tmp_path):
    return Bundle.open(shutil.copytree(llama_bundle.root, tmp_path / "b"))


@pytest.fixture
def misdeclared(bundle):
    """A bundle whose manifest promises calls of eight tokens, which its programs do not take."""
    path = bundle.root / "bundle.json"
    contents = json.loads(path.read_text())
    contents["options"]["tokens"] = "1-8"
    path.write_text(json.dumps(contents))
    return Bundle.open(bundle.root)


def test_the_bug_gates_have_an_order_and_do_not_ask_about_compression(
    llama_bundle, tiny_llama
):
    found = bug_gates(llama_bundle, tiny_llama)
    assert [g.name for g in found] == list(BUG_GATES)
    assert {g.verdict for g in found} == {"GREEN"}


def test_a_bundle_that_no_decoder_runs_is_red_with_the_reason(misdeclared, tiny_llama):
    found = {g.name: g for g in bug_gates(misdeclared, tiny_llama)}
    assert found["interface"].verdict == "RED"
    assert found["program"].verdict == found["undo"].verdict == "not_run"
    assert "cannot be run" in found["program"].reason


def test_a_program_that_stops_with_an_error_is_red(llama_bundle, tiny_llama):
    def stop(**_):
        raise ValueError("planted")

    exact = Decoder(llama_bundle, "portable", "exact")
    exact.layers[1].executable.body.steps[3].function = stop
    results = {g.name: g for g in bug_gates(llama_bundle, tiny_llama, exact=exact)}
    assert (
        results["program"].verdict == gates.RED
        and "planted" in results["program"].reason
    )
    assert results["undo"].verdict == gates.NOT_RUN


@pytest.mark.parametrize("source", ["checkpoint", "golden"])
def test_the_command_says_so_too_and_exits_1(
    misdeclared, tiny_llama, llama_golden, source
):
    path = tiny_llama.path
    if source == "golden":
        path = llama_golden.save(misdeclared.root.parent / "g.safetensors")
    code, found, _ = run("validate", misdeclared.root, f"--{source}", path)
    assert (code, found["verdict"], found["worst"], found["rows"]) == (
        1,
        "RED",
        None,
        0,
    )
    assert {g["name"] for g in found["gates"]} == set(BUG_GATES)


def test_bad_input_about_a_bundle_that_runs_stays_an_error(bundle, tiny_llama):
    ids = ",".join(["1"] * 40)
    result = CliRunner().invoke(
        app,
        [
            "validate",
            str(bundle.root),
            "--checkpoint",
            str(tiny_llama.path),
            "--prompt-ids",
            ids,
        ],
    )
    assert "max_seq_len" in str(result.exception)


def test_a_checkpoint_leaves_a_verdict_that_a_golden_shows(
    bundle, tiny_llama, llama_golden
):
    golden_path = llama_golden.save(bundle.root.parent / "g.safetensors")
    _, alone, _ = run("validate", bundle.root, "--golden", golden_path)
    missing = {g["name"] for g in alone["gates"] if g["verdict"] == "not_run"}
    assert missing == {"weights", "host", "program", "device", "budget"}
    code, found, _ = run(
        "validate", bundle.root, "--checkpoint", tiny_llama.path, "--prompt-ids", IDS
    )
    assert (code, found["verdict"]) == (0, "GREEN")
    stored = {g.name: g.json() for g in verdict.load(bundle)}
    assert list(stored) == list(BUG_GATES)
    code, again, _ = run("validate", bundle.root, "--golden", golden_path)
    assert (code, [g for g in again["gates"] if g["name"] in stored]) == (
        0,
        list(stored.values()),
    )


def test_the_price_and_the_user_s_limit_are_in_the_json(
    bundle, tiny_llama, llama_golden
):
    path = llama_golden.save(bundle.root.parent / "g.safetensors")
    code, found, _ = run("validate", bundle.root, "--golden", path, "--max-kl", "1e-9")
    (limit,) = (g for g in found["gates"] if g["name"] == "max_kl")
    assert (code, limit["verdict"], limit["threshold"]) == (1, "RED", 1e-9)
    assert "--max-kl sets" in limit["reason"]
    assert found["price"].keys() == {"kl", "same_top", "budget"}
    assert found["price"]["kl"]["mean"] == limit["value"]


def test_a_verdict_is_not_written_from_another_checkpoint(bundle, exports):
    foreign = exports.checkpoint(
        "llama", num_hidden_layers=4, hidden_size=128, vocab_size=256
    )
    arguments = ["validate", bundle.root, "--checkpoint", foreign, "--prompt-ids", IDS]
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert "was exported from" in str(result.exception)
    assert isinstance(result.exception, InputError)
    assert verdict.load(bundle) is None


def test_a_golden_of_another_checkpoint_is_refused(llama_bundle, llama_golden):
    other = replace(llama_golden, meta=llama_golden.meta | {"checkpoint": "0" * 64})
    with pytest.raises(InputError, match="one of checkpoint 000000000000"):
        validate(Decoder(llama_bundle, "portable"), other, (1,))


def test_a_limit_below_zero_is_refused(bundle, tiny_llama):
    arguments = ["validate", str(bundle.root), "--checkpoint", str(tiny_llama.path)]
    result = CliRunner().invoke(app, [*arguments, "--max-kl", "-1"])
    assert "0 or more nats" in str(result.exception)


def test_the_command_s_runtime_is_compared_with_the_portable_one(
    llama_bundle, llama_golden
):
    decoder = Decoder(llama_bundle, "portable")
    assert {g.name: g.verdict for g in validate(decoder, llama_golden, (1,)).gates}[
        "device"
    ] == gates.NOT_RUN
    as_device(decoder)  # what a device shows, in portable arithmetic
    found = {g.name: g for g in validate(decoder, llama_golden, (1,)).gates}
    assert (found["device"].verdict, found["device"].value) == ("GREEN", 0)
    assert golden.Golden is type(llama_golden)
