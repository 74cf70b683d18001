"""One cell of a sweep: its cached bundle, which is not deleted when it cannot be read and is
exported again when it is damaged, and the energy that the counters of a Mac give for its row."""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from refusal import refused
from tiny import WEIGHTS

from workbench import Bundle, sweep
from workbench.bundle import Options
from workbench.exporter import bundle_for
from workbench.models.checkpoint import Checkpoint
from workbench.models.tokens import CheckpointTokens
from workbench.sweep import run as cell_runs


def test_a_cached_bundle_that_cannot_be_read_is_not_thrown_away(
    exports, tmp_path, monkeypatch
):
    source = Checkpoint(exports.checkpoint("llama", num_hidden_layers=1))
    arguments = source, Options(max_seq_len=16), tmp_path
    bundle_for(*arguments)
    monkeypatch.setattr(CheckpointTokens, "files", lambda _: [source.path / WEIGHTS])
    with pytest.warns(UserWarning, match="another tokenizer"):
        result = bundle_for(*arguments)
    assert [Path(e.path).name for e in result.manifest.tokens.files] == [WEIGHTS]

    def deny(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("workbench.bundle.bundle.read_manifest", deny)
    with refused("Permission denied"):
        bundle_for(*arguments)
    assert (result.root / "bundle.json").is_file()


def test_a_tokenizer_that_cannot_be_read_leaves_the_cached_bundle(exports, tmp_path):
    source = tmp_path / "checkpoint"
    shutil.copytree(exports.checkpoint("llama", num_hidden_layers=1), source)
    options, folder = Options(max_seq_len=16), tmp_path / "bundles"
    cached = bundle_for(Checkpoint(source), options, folder)
    (source / "tokenizer.json").unlink(missing_ok=True)
    (source / "tokenizer.model").write_bytes(b"torn")
    with refused("no tokenizer.json"):
        bundle_for(Checkpoint(source), options, folder)
    Bundle.open(cached.root)


def test_a_sweep_makes_a_damaged_bundle_again(grid, tmp_path, calls_here):
    run = grid["run"] | {"T": [1], "rounds": 2}
    parsed = sweep.make_grid(grid | {"validate_ids": [], "run": run})
    first, second = sweep.cells(parsed)
    folders = {"bundles": tmp_path / "bundles", "root": tmp_path / "log"}
    assert cell_runs.run_cell(first, grid=parsed, **folders) == ("ok", None)
    (root,) = (path.parent for path in (tmp_path / "bundles").glob("*/bundle.json"))
    weights = next(root.rglob("weight.bin"))
    weights.write_bytes(weights.read_bytes()[:-64])
    with pytest.warns(UserWarning, match="is exported again: .*weight.bin: found .*"):
        assert cell_runs.run_cell(second, grid=parsed, **folders) == ("ok", None)
    Bundle.open(root)


@pytest.mark.parametrize(("millijoules", "joules"), [(250, 0.25), (0, None)])
def test_what_the_counters_say_of_a_measurement_is_in_its_row(
    grid, swept, monkeypatch, millijoules, joules
):
    """A library in place of zeus-apple-silicon, which a Mac alone has."""
    monitor = mock.Mock()
    monitor.end_window.return_value.ane_mj = millijoules
    library = SimpleNamespace(AppleEnergyMonitor=lambda: monitor)
    monkeypatch.setitem(sys.modules, "zeus_apple_silicon", library)
    parsed = sweep.make_grid(grid | {"validate_ids": []})
    cell, _ = sweep.cells(parsed)
    bundle = cell_runs.export_bundle(cell, swept.bundles)
    row, _ = cell_runs.measure_in_child(cell, parsed, bundle)
    monitor.end_window.assert_called_once_with(*monitor.begin_window.call_args.args)
    assert row["ane_joules"] == joules
    reason = row["config"]["energy"]  # why there is no energy
    if joules:
        assert reason is None
    else:
        assert "stayed at zero" in reason
