"""Bundles that are kept for later: a damaged one is made again, one that is named stays."""

import sys
from types import SimpleNamespace

import in_process
import pytest

from workbench import Bundle, InputError, process, sweep
from workbench.bundle import Options
from workbench.export import bundle_for
from workbench.models.checkpoint import Checkpoint
from workbench.sweep import energy
from workbench.sweep import run as sweeping


def truncated(root):
    weights = next(root.rglob("weight.bin"))
    weights.write_bytes(weights.read_bytes()[:-64])


OPTIONS = Options(max_seq_len=16)


@pytest.fixture
def source(exports):
    return Checkpoint(exports.checkpoint("llama", num_hidden_layers=1))


def test_a_cached_bundle_that_cannot_be_read_is_not_thrown_away(
    source, tmp_path, monkeypatch
):
    made = bundle_for(source, OPTIONS, tmp_path)

    def closed(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("workbench.bundle.bundle.read_manifest", closed)
    with pytest.raises(InputError, match="Permission denied"):
        bundle_for(source, OPTIONS, tmp_path)
    assert (made.root / "bundle.json").is_file()


def test_a_sweep_makes_a_damaged_bundle_again(grid, tmp_path, monkeypatch):
    monkeypatch.setattr(process, "call", in_process.call)
    run = grid["run"] | {"T": [1], "rounds": 2}
    made = sweep.make_grid(grid | {"validate_ids": [], "run": run})
    first, second = sweep.cells(made)
    how = {"grid": made, "bundles": tmp_path / "bundles", "root": tmp_path / "log"}
    assert sweeping.run_cell(first, **how) == ("ok", None)
    (root,) = (path.parent for path in (tmp_path / "bundles").glob("*/bundle.json"))
    truncated(root)
    with pytest.warns(
        UserWarning, match="is exported again: .*weight.bin: found .* bytes"
    ):
        assert sweeping.run_cell(second, **how) == ("ok", None)
    Bundle.open(root)


@pytest.fixture
def measured(exports):
    """A function that measures a cell here and returns its row."""

    def measure(**changes):
        source = exports.checkpoint("llama", num_hidden_layers=1)
        how = {"n_gen": 2, "repetitions": 1, "runtime": ["portable"]} | changes
        grid = {"checkpoint": str(source), "export": {"max_seq_len": [16]}, "run": how}
        made = sweep.make_grid(grid)
        (only,) = sweep.cells(made)
        bundle = exports.bundle(source, max_seq_len=16)
        return sweeping.measure(only, made, bundle.root)[0]

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
    assert row["ane_joules"] == joules
    said = row["config"]["energy"]
    assert said is None if joules else "stayed at zero" in said


def test_without_the_library_energy_is_null_and_nothing_fails():
    with energy.metered() as used:
        pass
    assert used["ane_joules"] is None and "zeus" in used["reason"]
