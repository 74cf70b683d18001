"""What a validation measured is kept as one file beside the verdict: of these files and these
gates alone, whole or not at all."""

import json
import multiprocessing
import os
import shutil
import signal

import pandas as pd
import pyarrow.parquet as pq
import pytest
from in_process import cli, invoke
from refusal import refused

from workbench import Bundle, files
from workbench.check import record
from workbench.check.record import RECORD, load_record

PROMPT = "--prompt-ids", "1,2,3,4"


@pytest.fixture
def validated(exports, tmp_path):
    """A checkpoint, a bundle that was validated with it, and what was printed."""
    checkpoint = exports.checkpoint("llama")
    exported = exports.bundle(checkpoint, max_seq_len=20).root
    root = shutil.copytree(exported, tmp_path / "bundle")
    (root / RECORD).unlink(missing_ok=True)
    output = invoke("validate", root, "--checkpoint", checkpoint, *PROMPT)
    return checkpoint, root, output


def test_a_record_has_the_rows_the_results_and_the_setup(validated):
    checkpoint, root, output = validated
    measured = load_record(Bundle.open(root))
    assert (
        measured.is_noted and measured.results.verdict == output["verdict"] == "GREEN"
    )
    assert [gate.json() for gate in measured.results.gates] == output["gates"]
    assert len(measured.rows) == output["rows"] and len(measured.tokens) == 4
    worst = measured.rows.loc[measured.rows["over_rounding"].idxmax()]
    assert worst["over_rounding"] == output["worst"]["over_rounding"]
    assert measured.results.cost.kl.mean == output["cost"]["kl"]["mean"]
    assert measured.setup.command[:4] == ["--checkpoint", "CHECKPOINT", *PROMPT]
    assert measured.setup.execution == {"runtime": "portable", "precision": "declared"}
    text = (root / RECORD).read_bytes()
    assert str(checkpoint).encode() not in text and str(root).encode() not in text


def test_a_command_that_shows_a_stored_verdict_keeps_the_measurements(validated):
    _, root, _ = validated
    before = (root / RECORD).read_bytes()
    invoke("validate", root)
    assert (root / RECORD).read_bytes() == before
    invoke("validate", root, "--fresh")
    measured = load_record(Bundle.open(root))
    assert measured.results.verdict == "not_run" and measured.rows.empty


def test_a_stored_verdict_does_not_count_with_fresh(validated, tmp_path):
    checkpoint, root, _ = validated
    golden = tmp_path / "golden"
    invoke("golden", checkpoint, "--out", golden, "--for", root, *PROMPT)
    for options in ([], ["--golden", golden]):
        assert invoke("validate", root, *options)["verdict"] == "GREEN"
        fresh = invoke("validate", root, "--fresh", *options)
        assert fresh["verdict"] == "not_run"
        reasons = {g["name"]: g["reason"] for g in fresh["gates"]}
        assert "does not count with --fresh" in reasons["weights"]


def test_what_is_missing_stale_or_damaged_is_refused_with_the_command(
    validated, monkeypatch
):
    _, root, _ = validated
    command = f"run: workbench validate {root} --checkpoint CHECKPOINT"

    def refusal() -> str:
        ended = cli("report", root)
        assert ended.exit_code == 2 and not ended.stdout and command in ended.stderr
        return ended.stderr

    with monkeypatch.context() as edited:
        edited.setattr(record, "gates_version", lambda: "0" * 64)
        assert "gates of another version" in refusal()
    contents = (root / RECORD).read_bytes()
    for damaged in (contents[: len(contents) // 2], b"PAR1", b""):
        (root / RECORD).write_bytes(damaged)
        assert "damaged" in refusal()
    (root / RECORD).unlink()
    assert "none in its folder" in refusal()
    (root / RECORD).write_bytes(contents)
    manifest = json.loads((root / "bundle.json").read_text())
    manifest["tokens"]["eos"] = [5]
    (root / "bundle.json").write_text(json.dumps(manifest))
    assert "another bundle" in refusal()


def test_a_changed_file_of_the_bundle_is_refused(validated):
    _, root, _ = validated
    blob = next(root.rglob("weight.bin"))
    contents = bytearray(blob.read_bytes())
    contents[-1] ^= 1
    blob.write_bytes(contents)
    with refused("SHA-256"):
        load_record(Bundle.open(root))


def rewrite(root, **changes) -> None:
    """Changes the JSON in a record as a stranger can."""
    table = pq.read_table(root / RECORD)
    fields = json.loads(table.schema.metadata[record.KEY]) | changes
    metadata = {record.KEY: json.dumps(fields).encode()}
    pq.write_table(table.replace_schema_metadata(metadata), root / RECORD)


def test_a_record_of_a_stranger_is_stated_and_never_a_pass(validated, tmp_path):
    _, root, _ = validated
    fields = json.loads(pq.read_table(root / RECORD).schema.metadata[record.KEY])
    results = fields["results"]
    results["gates"][0]["reason"] = "trust me"
    rewrite(root, results=results)
    page = tmp_path / "page.html"
    written = invoke("report", root, "--html", page)
    assert (written["verdict"], written["quality"]) == ("not_run", "not_run")
    assert written["stated"]["verdict"] == "GREEN"
    text = cli("report", root).stdout
    assert "**Export not checked here, quality not checked here**" in text
    assert "stated: GREEN" in text and "✓" not in text + page.read_text()
    for faulty in (
        {"results": results | {"verdict": "PERFECT"}},
        {"results": {"verdict": "GREEN"}},
        {"tokens": ["a"]},
        {"setup": []},
    ):
        rewrite(root, **faulty)
        assert cli("report", root).exit_code == 2


@pytest.mark.parametrize("kind", ["svg", "pdf", "png"])
def test_a_figure_is_drawn_from_what_a_validation_kept(validated, tmp_path, kind):
    _, root, _ = validated
    path = tmp_path / f"errors.{kind}"
    written = invoke("report", root, "--figure", path)
    assert written["figure"] == str(path) and "markdown" not in written
    first = path.read_bytes()
    assert first.startswith({"svg": b"<?xml", "pdf": b"%PDF", "png": b"\x89PNG"}[kind])
    invoke("report", root, "--figure", path)
    assert path.read_bytes() == first


def test_a_figure_of_a_stranger_says_so_and_a_stale_one_is_refused(validated, tmp_path):
    _, root, _ = validated
    path = tmp_path / "errors.svg"
    with refused("a file errors.jpg"):
        cli("report", root, "--figure", tmp_path / "errors.jpg", raises=True)
    with refused("a bundle"):
        cli("report", "05", "--figure", path, raises=True)
    rewrite(root, tokens=[*"abcd"])
    invoke("report", root, "--figure", path)
    assert "stated by the bundle, not checked here" in path.read_text()
    rewrite(root, version="0")
    with refused("gates of another version"):
        cli("report", root, "--figure", path, raises=True)
    invoke("validate", root, "--fresh")
    with refused("no errors"):
        cli("report", root, "--figure", path, raises=True)


def test_a_note_beside_the_bundle_does_not_make_a_record_count(
    validated, monkeypatch, tmp_path
):
    _, root, _ = validated
    monkeypatch.setattr(files, "__file__", str(tmp_path / "files.py"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert not load_record(Bundle.open(root)).is_noted


def save_for_ever(root) -> None:
    """Saves one record after another."""
    bundle = Bundle.open(root)
    measured = load_record(bundle)
    results = {"verdict": "RED", "quality": "not_run", "gates": []}
    rows = pd.concat([measured.rows] * 200)
    while True:
        record.save_record(bundle, results, measured.setup, measured.tokens, rows)


@pytest.mark.slow("processes are killed")
def test_a_killed_validation_leaves_one_record_whole(validated):
    _, root, _ = validated
    fork = multiprocessing.get_context("fork")
    for delay in (0.05, 0.1, 0.2):
        process = fork.Process(target=save_for_ever, args=(root,))
        process.start()
        process.join(delay)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        measured = load_record(Bundle.open(root))
        assert measured.results.verdict in ("GREEN", "RED") and len(measured.rows)


def test_a_bundle_whose_folder_cannot_be_written_is_validated_all_the_same(
    validated, monkeypatch, tmp_path
):
    checkpoint, root, _ = validated
    golden = tmp_path / "golden"
    invoke("golden", checkpoint, "--out", golden, "--for", root, *PROMPT)
    before = (root / RECORD).read_bytes()

    def refuse(path, write):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(record, "write_whole", refuse)
    with pytest.warns(UserWarning, match="not kept"):
        assert invoke("validate", root, "--golden", golden)["verdict"] == "GREEN"
    assert (root / RECORD).read_bytes() == before


def test_a_bundle_that_no_runtime_opens_has_a_record_and_a_page(validated):
    """Planted: an input of the manifest that the program lacks."""
    checkpoint, root, _ = validated
    manifest = json.loads((root / "bundle.json").read_text())
    inputs = manifest["shards"][0]["inputs"]
    inputs["other"] = inputs["x"]
    (root / "bundle.json").write_text(json.dumps(manifest))
    output = invoke("validate", root, "--checkpoint", checkpoint, *PROMPT)
    assert output["verdict"] == "RED" and output["rows"] == 0
    measured = load_record(Bundle.open(root))
    assert measured.rows.empty and measured.setup.execution == {}
    text = cli("report", root).stdout
    assert "**Export RED, quality not judged**" in text
    assert "no runtime opened the bundle" in text
