"""Bundles that are kept for later: a damaged one is made again, one that is named stays."""

import json
import os
import sys
import warnings
from types import SimpleNamespace

import in_process
import pandas as pd
import pytest

from workbench import Bundle, InputError, log, process, sweep
from workbench.bundle import Options
from workbench.export import bundle_for
from workbench.models.checkpoint import Checkpoint
from workbench.sweep import energy, run


def truncated(root):
    weights = next(root.rglob("weight.bin"))
    weights.write_bytes(weights.read_bytes()[:-64])


def rewritten(root):  # as a tool may leave it that writes the file in another form
    manifest = next(root.rglob("Manifest.json"))
    manifest.write_text(manifest.read_text() + " ")


@pytest.mark.matrix(2, wide=2)
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

    def closed(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("workbench.bundle.bundle.read_manifest", closed)
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


@pytest.fixture
def measured(exports, tmp_path):
    """A function that measures a cell here and returns its row."""

    def measure(**changes):
        source = exports.checkpoint("llama", num_hidden_layers=1)
        how = {"n_gen": 2, "repetitions": 1, "runtime": ["portable"]} | changes
        grid = {"checkpoint": str(source), "export": {"max_seq_len": [16]}, "run": how}
        made = sweep.make_grid(grid)
        (only,) = sweep.cells(made)
        bundle = exports.bundle(source, max_seq_len=16)
        run.measure(only, made, bundle.root, tmp_path / "log")
        (row,) = log.load("runs", tmp_path / "log").to_dict("records")
        return row

    return measure


@pytest.mark.parametrize(("millijoules", "joules"), [(250, 0.25), (0, None)])
def test_what_the_counters_say_of_a_measurement_is_in_its_row(
    measured, monkeypatch, millijoules, joules
):
    """A library in place of zeus-apple-silicon, which a Mac alone has."""

    class Monitor:
        def begin_window(self, label):
            self.label = label

        def end_window(self, label):
            assert label == self.label
            return SimpleNamespace(ane_mj=millijoules)

    library = SimpleNamespace(AppleEnergyMonitor=Monitor)
    monkeypatch.setitem(sys.modules, "zeus_apple_silicon", library)
    row = measured()
    said = json.loads(row["config"]).get("energy")
    if joules:
        assert row["ane_joules"] == joules and said is None
    else:
        assert pd.isna(row["ane_joules"]) and "stayed at zero" in said


def test_without_the_library_energy_is_null_and_nothing_fails():
    with energy.metered() as used:
        pass
    assert used["ane_joules"] is None and "zeus" in used["reason"]


@pytest.mark.parametrize("reads", ["used", "all"])
def test_a_row_says_which_rows_of_the_cache_attention_reads(measured, reads):
    assert measured(reads=[reads])["reads"] == reads
