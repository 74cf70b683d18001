"""A verdict is RED if a gate is. verdict.json holds what the checkpoint's gates said, for one
identity of a bundle and one source of the gates, and nothing for another."""

import json
import shutil

import numpy as np

from workbench import Bundle, Decoder
from workbench.check import gates
from workbench.check.validate import stored_gates

GATES = [
    gates.at_most("weights", 0.9, 1.05, "worst tensor"),
    gates.at_most("program", float("nan"), 1e-5, "not a number"),
    gates.not_run("host", "no decoder"),
]


def test_a_verdict_is_red_if_a_gate_is_and_a_value_that_is_no_number_is():
    green, idle = gates.holds("a", True, ""), gates.not_run("c", "")
    assert gates.verdict([green, idle]) == "GREEN"
    assert gates.verdict([idle]) == "not_run"
    for limited in (gates.at_least, gates.at_most):
        red = limited("g", np.nan, 0.5, "")
        assert gates.verdict([green, red]) == red.verdict == "RED"


def test_a_verdict_is_read_again_for_the_bundle_and_by_the_gates_that_gave_it(bundle):
    assert gates.stored_verdict(bundle) is None
    path = gates.save_verdict(bundle, GATES)
    again = gates.stored_verdict(Bundle.open(bundle.root))
    assert [g.json() for g in again] == [g.json() for g in GATES]
    written = json.loads(path.read_text())
    for change in ({"bundle": "0" * 64}, {"version": "0" * 64}, {"gates": [{}]}):
        path.write_text(json.dumps(written | change))
        assert gates.stored_verdict(bundle) is None


def test_a_verdict_ends_with_the_gates_that_gave_it(bundle, tmp_path, monkeypatch):
    """Planted: one limit of one gate's source is another one."""
    gates.save_verdict(bundle, GATES)
    source = shutil.copytree(gates.SOURCE, tmp_path / "check")
    monkeypatch.setattr(gates, "SOURCE", source)
    gates.gates_version.cache_clear()
    assert gates.stored_verdict(bundle) is not None
    program = source / "program.py"
    program.write_text(program.read_text().replace("LIMIT = 1e-5", "LIMIT = 1e-4"))
    gates.gates_version.cache_clear()
    found = stored_gates(Decoder(bundle, "portable"))
    monkeypatch.undo()
    gates.gates_version.cache_clear()
    reasons = {g.reason for g in found if g.verdict == "not_run"}
    other = "the bundle's verdict.json is of another bundle or by other gates"
    assert reasons == {f"needs --checkpoint: {other}"}
    assert gates.stored_verdict(bundle) is not None
