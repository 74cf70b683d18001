"""`--golden`, `--alone` and `golden --for`: what one machine with the checkpoint writes, a machine
with one copy of the bundle and no checkpoint reads."""

import json

import pytest
from typer.testing import CliRunner

from workbench.cli.app import app
from workbench.errors import InputError
from workbench.runtime.portable import PortableModel

IDS = "1,69,42,4,30,7"
ALONE = "--runtime", "stand-in", "--alone"


def call(*arguments) -> tuple[int, dict]:
    result = CliRunner().invoke(
        app, [*map(str, arguments), "--json"], catch_exceptions=False
    )
    return result.exit_code, json.loads(result.stdout.splitlines()[-1])


def verdicts(result: dict) -> dict[str, str]:
    return {gate["name"]: gate["verdict"] for gate in result["gates"]}


@pytest.fixture(scope="module")
def llama(exports):
    """A bundle of its own, since its folder gets a verdict."""
    checkpoint = exports.checkpoint("llama")
    return checkpoint, exports.bundle(checkpoint, max_seq_len=24)


@pytest.fixture(scope="module")
def golden(llama, tmp_path_factory):
    """A golden alone: neither a verdict nor a reference was written for the bundle."""
    out = tmp_path_factory.mktemp("golden") / "llama.golden"
    code, _ = call("golden", llama[0], "--out", out, "--prompt-ids", IDS)
    assert code == 0
    return out


@pytest.fixture
def no_portable(monkeypatch):
    """Any shard that is loaded as portable ends the test."""

    def refuse(*_, **__):
        raise AssertionError("a second copy of the bundle, as portable")

    monkeypatch.setattr(PortableModel, "__init__", refuse)


@pytest.mark.shim
def test_alone_without_a_reference_says_what_is_lacking(llama, golden, no_portable):
    code, result = call("validate", llama[1].root, "--golden", golden, *ALONE)
    gates = {gate["name"]: gate for gate in result["gates"]}
    assert code == 0 and gates["device"]["verdict"] == "not_run"
    assert "workbench golden CHECKPOINT --out G --for" in gates["device"]["reason"]
    assert gates["program"]["verdict"] == "not_run"


@pytest.mark.shim
def test_what_golden_writes_for_a_bundle_is_all_that_a_validation_needs(
    llama, tmp_path, monkeypatch, request
):
    out = tmp_path / "llama.golden"
    arguments = ["golden", llama[0], "--out", out, "--prompt-ids", IDS]
    code, result = call(*arguments, "--for", llama[1].root)
    assert (code, result["verdict"]) == (0, "GREEN")
    reference = tmp_path / result["reference"].rpartition("/")[2]
    assert reference.is_file() and (llama[1].root / "verdict.json").is_file()
    request.getfixturevalue("no_portable")
    for where in (ALONE, ["--runtime", "stand-in"]):
        code, result = call("validate", llama[1].root, "--golden", out, *where)
        assert (code, result["verdict"]) == (0, "GREEN")
        gates = verdicts(result)
        assert {gates[name] for name in ("device", "program", "weights", "host")} == {
            "GREEN"
        }


def test_a_golden_for_another_checkpoint_s_bundle_is_refused(exports, llama, tmp_path):
    other = exports.checkpoint("llama", num_hidden_layers=1)
    arguments = ["golden", other, "--out", tmp_path / "g", "--for", llama[1].root]
    with pytest.raises(InputError, match="exported from"):
        CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert not (tmp_path / "g").exists()


@pytest.mark.parametrize("how", [[], ["--each-unit"]])
def test_the_portable_runtime_is_never_alone(how, llama, golden):
    arguments = ["validate", llama[1].root, "--golden", golden, *how, "--alone"]
    with pytest.raises(InputError, match="leave --alone out"):
        CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)


@pytest.mark.shim
def test_one_unit_alone_leaves_the_portable_arithmetics_out(llama, golden, forked):
    arguments = "--golden", golden, *ALONE, "--compute-units", "CPU_ONLY"
    code, result = call("validate", llama[1].root, *arguments, "--each-unit")
    (unit,) = result["units"]
    assert (code, unit["unit"], unit["verdict"]) == (0, "CPU_ONLY", "GREEN")
    assert unit["kl_portable"] is None and unit["blame"] is None


@pytest.mark.shim
def test_explain_measures_the_runtime_s_part(llama):
    arguments = "--checkpoint", llama[0], "--prompt-ids", IDS, "--only", "parts"
    root = llama[1].root
    code, result = call("explain", root, *arguments, "--runtime", "stand-in")
    assert code == 0 and all(row["runtime"] is not None for row in result["parts"])
    _, own = call("explain", root, *arguments)
    assert [row["total"] for row in own["parts"]] == pytest.approx(
        [row["total"] for row in result["parts"]], rel=1e-3
    )
