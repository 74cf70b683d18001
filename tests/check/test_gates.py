"""A verdict is RED if a gate is. verdict.json holds what the checkpoint's gates said, for one
identity of a bundle and one source of the gates, and nothing for another."""

import json
import shutil
import socket

import numpy as np
from in_process import invoke

from workbench import Bundle, Decoder, files
from workbench.check import gates
from workbench.check.bug_gates import BUG_GATES, load_or_run_gates
from workbench.check.states import STATE_GATES
from workbench.files import sha256

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


def test_an_export_is_green_only_where_every_required_gate_ran():
    ran = [gates.holds(name, True, "") for name in gates.REQUIRED]
    assert set(BUG_GATES) == set(gates.REQUIRED)
    assert gates.verdict(ran) == "GREEN"
    for place, name in enumerate(gates.REQUIRED):
        idle = [*ran[:place], gates.not_run(name, ""), *ran[place + 1 :]]
        assert (gates.verdict(idle), gates.missing_gates(idle)) == ("not_run", [name])
        absent = [*ran[:place], gates.not_run(name, "", applies=False)]
        assert gates.verdict(absent + ran[place + 1 :]) == "GREEN"


def test_quality_is_the_user_s_limits_and_a_red_export_withholds_it():
    green, red = gates.holds("program", True, ""), gates.holds("program", False, "")
    within, over = (gates.quality_at_most("max_kl", x, 0.05, "") for x in (0.01, 0.06))
    few = gates.quality_at_least("answers", 0.5, 0.7, "")
    assert gates.quality_at_most("max_kl", np.nan, 0.05, "").verdict == "OVER"
    assert gates.quality([green]) == "not_run"
    assert gates.quality([green, within]) == "WITHIN"
    assert gates.quality([green, within, few]) == gates.quality([over]) == "OVER"
    assert gates.verdict([green, over]) == "GREEN"
    withheld = [red, over]
    assert gates.quality(withheld) == "not_run"
    assert gates.describe_quality(withheld) == "not judged"


def test_a_verdict_is_read_again_for_the_bundle_and_by_the_gates_that_gave_it(bundle):
    assert gates.stored_verdict(bundle) is None
    gates.save_verdict(bundle, GATES)
    again = gates.stored_verdict(Bundle.open(bundle.root))
    assert again.counts
    assert [g.json() for g in again.gates] == [g.json() for g in GATES]
    path = bundle.root / gates.VERDICT
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
    results = load_or_run_gates(Decoder(bundle, "portable"))
    monkeypatch.undo()
    gates.gates_version.cache_clear()
    reasons = {g.reason for g in results if g.verdict == "not_run"}
    other = "the bundle's verdict.json is of another bundle or by other gates"
    assert reasons == {f"needs --checkpoint: {other}"}
    assert gates.stored_verdict(bundle) is not None


def forge_verdict(bundle) -> None:
    """Zeroes weights of a bundle as a stranger can: the manifest has the hashes of the new files,
    and verdict.json states that every gate is GREEN on them."""
    gates.save_verdict(bundle, [gates.holds(n, True, "trust me") for n in BUG_GATES])
    blob = next(bundle.root.rglob("weight.bin"))
    record = np.fromfile(blob, np.uint8)
    record[-64:] = 0
    record.tofile(blob)
    manifest = json.loads((bundle.root / "bundle.json").read_text())
    for shard in manifest["shards"]:
        for entry in shard["files"]:
            entry["sha256"] = sha256(bundle.root / entry["path"])
    (bundle.root / "bundle.json").write_text(json.dumps(manifest))
    path = bundle.root / gates.VERDICT
    fields = json.loads(path.read_text()) | {
        "bundle": Bundle.open(bundle.root).identity
    }
    path.write_text(json.dumps(fields))


def test_a_verdict_that_only_the_bundle_states_is_no_pass(bundle):
    forge_verdict(bundle)
    validation = invoke("validate", bundle.root)
    assert validation["verdict"] == "not_run" and "trust me" not in str(validation)
    checks = {gate["name"]: gate for gate in validation["gates"]}
    assert {checks[n]["verdict"] for n in ("interface", *STATE_GATES)} == {"GREEN"}
    for name in ("weights", "host", "program"):
        assert checks[name]["verdict"] == "not_run"
        assert "stated by the bundle, not checked here: GREEN" in checks[name]["reason"]
        assert "workbench validate" in checks[name]["reason"]
        assert "--checkpoint" in checks[name]["reason"]


def test_a_note_beside_the_bundle_or_below_the_working_directory_does_not_count(
    bundle, monkeypatch, tmp_path
):
    forge_verdict(bundle)
    digest = sha256(bundle.root / gates.VERDICT)
    facts = {"bundle": Bundle.open(bundle.root).identity, "verdict": digest}
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(files, "__file__", str(tmp_path / "workbench" / "files.py"))
        (tmp_path / "pyproject.toml").write_text('name = "workbench"\n')
        files.note_verified(gates.NOTES, facts)
        assert files.was_verified(gates.NOTES, facts)
    (noted,) = (tmp_path / "build" / gates.NOTES).iterdir()
    shutil.copytree(tmp_path / "build", bundle.root / "build")
    for folder in (tmp_path, bundle.root):
        monkeypatch.chdir(folder)
        assert not gates.stored_verdict(Bundle.open(bundle.root)).counts
    assert not {str(tmp_path), socket.gethostname()} & {*noted.read_text().split('"')}


def test_the_golden_that_the_user_names_carries_the_verdict_to_another_checkout(
    bundle, tiny_llama, tmp_path, monkeypatch
):
    out = tmp_path / "g"
    prompt = "--prompt-ids", "1,2,3"
    invoke("golden", tiny_llama.path, "--out", out, "--for", bundle.root, *prompt)
    monkeypatch.setattr(files, "__file__", str(tmp_path / "files.py"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    stated = invoke("validate", bundle.root)
    assert stated["verdict"] == "not_run"
    validation = invoke("validate", bundle.root, "--golden", out)
    named = {gate["name"]: gate["verdict"] for gate in validation["gates"]}
    assert {named[name] for name in BUG_GATES} == {"GREEN"}
    shutil.copy(out, bundle.root / "golden")
    assert invoke("validate", bundle.root)["verdict"] == "not_run"
