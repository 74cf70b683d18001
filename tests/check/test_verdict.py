"""verdict.json holds what the checkpoint's gates said, for one identity of a bundle, and nothing
for another."""

import json
import shutil

import pytest

from workbench import Bundle, Decoder
from workbench.check import gates, validate, verdict

GATES = [
    gates.at_most("weights", 0.9, 1.05, "worst tensor"),
    gates.at_most("program", float("nan"), 1e-5, "not a number"),
    gates.not_run("host", "no decoder"),
]


@pytest.fixture
def bundle(llama_bundle, tmp_path):
    return Bundle.open(shutil.copytree(llama_bundle.root, tmp_path / "b"))


def test_what_is_written_is_read_again(bundle):
    assert verdict.load(bundle) is None
    verdict.save(bundle, GATES)
    again = verdict.load(Bundle.open(bundle.root))
    assert [g.json() for g in again] == [g.json() for g in GATES]
    assert again[1].value != again[1].value


@pytest.mark.parametrize(
    "change", [{"bundle": "0" * 64}, {"version": "0" * 64}, {"gates": [{}]}]
)
def test_a_verdict_of_something_else_is_none(bundle, change):
    path = verdict.save(bundle, GATES)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert verdict.load(bundle) is None


def test_a_verdict_ends_with_the_gates_that_gave_it(bundle, tmp_path, monkeypatch):
    """Planted: one limit of one gate's source is another one."""
    verdict.save(bundle, GATES)
    source = shutil.copytree(verdict.GATES, tmp_path / "check")
    monkeypatch.setattr(verdict, "GATES", source)
    verdict.gates_version.cache_clear()
    assert verdict.load(bundle) is not None
    program = source / "program.py"
    program.write_text(program.read_text().replace("LIMIT = 1e-5", "LIMIT = 1e-4"))
    verdict.gates_version.cache_clear()
    assert verdict.load(bundle) is None
    reasons = {
        g.reason
        for g in validate.stored_gates(Decoder(bundle, "portable"))
        if g.verdict == "not_run"
    }
    assert reasons == {
        "needs --checkpoint: the bundle's verdict.json is of another bundle or by other gates"
    }
    monkeypatch.undo()
    verdict.gates_version.cache_clear()
    assert verdict.load(bundle) is not None


def test_a_verdict_ends_with_the_bundle_it_was_of(bundle):
    verdict.save(bundle, GATES)
    path = bundle.root / "bundle.json"
    contents = json.loads(path.read_text())
    contents["tokens"]["eos"] = [5]
    path.write_text(json.dumps(contents))
    assert verdict.load(Bundle.open(bundle.root)) is None


def test_without_the_checkpoint_the_stored_verdict_is_shown(bundle, llama_golden):
    def found():
        decoder = Decoder(bundle, "portable")
        return {g.name: g for g in validate.validate(decoder, llama_golden, (1,)).gates}

    alone = found()
    missing = {name: alone[name].verdict for name in ("weights", "host", "program")}
    assert (
        set(missing.values()) == {"not_run"}
        and "--checkpoint" in alone["weights"].reason
    )
    verdict.save(bundle, GATES)
    shown = found()
    assert (shown["weights"].value, shown["program"].verdict) == (0.9, "RED")
