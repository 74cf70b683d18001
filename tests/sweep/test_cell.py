"""Bundles that are kept for later: a damaged one is made again, one that is named stays."""

import json
import os
import warnings
from contextlib import contextmanager

import in_process
import pytest

from workbench import Bundle, InputError, log, sweep
from workbench.bundle import Options
from workbench.models.checkpoint import Checkpoint
from workbench.sweep import cell, execute, ioreport, process
from workbench.sweep.cell import bundle_for


def truncated(root):
    weights = next(root.rglob("weight.bin"))
    weights.write_bytes(weights.read_bytes()[:-64])


def rewritten(root):  # as a tool may leave it that writes the file in another form
    manifest = next(root.rglob("Manifest.json"))
    manifest.write_text(manifest.read_text() + " ")


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (truncated, "weight.bin: found .* bytes"),
        (rewritten, "Manifest.json: found"),
        (lambda root: (root / "bundle.json").unlink(), "no bundle.json"),
        (lambda root: (root / "bundle.json").write_text("{"), "bundle.json: found"),
    ],
)
def test_a_damaged_cached_bundle_is_exported_again_and_a_warning_says_why(
    exports, tmp_path, damage, why
):
    source, options = (
        Checkpoint(exports.checkpoint("llama", num_hidden_layers=1)),
        Options(max_seq_len=16),
    )
    first = bundle_for(source, options, tmp_path)
    damage(first.root)
    with pytest.raises(InputError, match=why):
        Bundle.open(first.root)  # whoever names it is told, and nothing is thrown away
    with pytest.warns(UserWarning, match=f"is exported again: .*{why}"):
        again = bundle_for(source, options, tmp_path)
    assert (again.root, again.identity) == (first.root, first.identity)
    assert not [
        path
        for path in tmp_path.iterdir()
        if path.name.endswith((".damaged", ".partial"))
    ]
    with warnings.catch_warnings(action="error"):
        assert bundle_for(source, options, tmp_path).identity == first.identity


def test_a_cached_bundle_that_cannot_be_read_is_not_thrown_away(
    exports, tmp_path, monkeypatch
):
    source, options = (
        Checkpoint(exports.checkpoint("llama", num_hidden_layers=1)),
        Options(max_seq_len=16),
    )
    made = bundle_for(source, options, tmp_path)
    (tmp_path / f".{made.root.name}.checked").unlink()

    def closed(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("workbench.bundle.bundle.sha256", closed)
    with pytest.raises(InputError, match="Permission denied"):
        bundle_for(source, options, tmp_path)
    assert (made.root / "bundle.json").is_file()


def test_a_link_in_the_cache_goes_without_what_it_leads_to(exports, tmp_path):
    source, options = (
        Checkpoint(exports.checkpoint("llama", num_hidden_layers=1)),
        Options(max_seq_len=16),
    )
    made = bundle_for(source, options, tmp_path / "cache")
    elsewhere = tmp_path / "elsewhere"
    os.rename(made.root, elsewhere)
    made.root.symlink_to(elsewhere)
    truncated(elsewhere)
    with pytest.warns(UserWarning, match="is exported again"):
        bundle_for(source, options, tmp_path / "cache")
    assert (elsewhere / "bundle.json").is_file() and not made.root.is_symlink()


def test_a_sweep_makes_a_damaged_bundle_again(grid, tmp_path, monkeypatch):
    monkeypatch.setattr(process, "call", in_process.call)
    one = sweep.make_grid(grid | {"validate_ids": [], "run": grid["run"] | {"T": [1]}})
    sweep.sweep(
        one, root=tmp_path / "log", bundles=tmp_path / "bundles", progress=False
    )
    (root,) = (path.parent for path in (tmp_path / "bundles").glob("*/bundle.json"))
    truncated(root)
    with pytest.warns(UserWarning, match="is exported again"):
        counts = sweep.sweep(
            one, root=tmp_path / "log2", bundles=tmp_path / "bundles", progress=False
        )
    assert counts["failed"] == 0 and counts["done"] == 1
    Bundle.open(root)


@pytest.mark.parametrize("reason", [None, "no energy channel"])
def test_what_the_counters_say_of_a_measurement_is_in_its_row(
    exports, tmp_path, monkeypatch, reason
):
    @contextmanager
    def metered():
        figures = {"ane_joules": None, "ane_active_ms": None, "reason": "not ended"}
        yield figures
        figures |= {"ane_joules": 0.25, "ane_active_ms": 12.0, "reason": reason}

    monkeypatch.setattr(ioreport, "metered", metered)
    source = exports.checkpoint("llama", num_hidden_layers=1)
    run = {"n_gen": 2, "repetitions": 1, "runtime": ["portable"]}
    grid = sweep.make_grid(
        {"checkpoint": str(source), "export": {"max_seq_len": [16]}, "run": run}
    )
    (only,) = sweep.cells(grid)
    job = execute._job(
        only, grid, execute._source(grid, None, tmp_path), tmp_path / "bundles"
    )
    job |= {"root": str(tmp_path / "log"), "worker": 0, "started": 0.0}
    cell.prepare(job)
    cell.measure_cell(job)
    (row,) = log.load("runs", tmp_path / "log").to_dict("records")
    assert (row["ane_joules"], row["ane_active_ms"]) == (0.25, 12.0)
    assert json.loads(row["config"]).get("energy") == (
        reason and f"not measured: {reason}"
    )
    assert row["swap_bytes_before"] >= 0
