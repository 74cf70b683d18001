"""Sweeps: every cell logged once, resumed without loss, refused before anything runs when the grid is wrong."""

from pathlib import Path

import pytest
import yaml

from workbench import log, sweep
from workbench.errors import InputError

DATA = Path(__file__).parents[1] / "data"
GRID = {"checkpoint": str(DATA / "tiny-llama"), "experiment": "34", "validate_ids": [1, 4, 69, 173, 13, 4],
        "export": {"max_seq_len": [16, 32], "t_max": [2]},
        "run": {"T": [1, 2], "n_gen": 4, "repetitions": 2}}  # fmt: skip


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    counts = sweep.sweep(sweep.make_grid(GRID), root=folder / "log", bundles=folder / "bundles", progress=False)
    return folder, counts


def test_every_cell_is_logged_with_raw_samples(swept):
    folder, counts = swept
    assert (counts["cells"], counts["done"], counts["failed"]) == (4, 4, 0)
    runs = log.load("runs", root=folder / "log")
    assert sorted(zip(runs["max_seq_len"], runs["T"], strict=True)) == [(16, 1), (16, 2), (32, 1), (32, 2)]
    samples = log.load("samples", root=folder / "log")
    timed = samples[(samples["phase"] == "call") & ~samples["warmup"]]
    assert timed.groupby("run_id").size().tolist() == [8, 4, 8, 4] or sorted(timed.groupby("run_id").size()) == [4, 4, 8, 8]
    layers = log.load("layers", root=folder / "log")
    assert set(layers["layer"]) == {0, 1, 2, 3} and (layers["layer_ms"] > 0).all()


def test_each_bundle_is_validated_once(swept):
    folder, _ = swept
    runs = log.load("runs", root=folder / "log")
    assert runs.groupby("max_seq_len")["verdict"].count().tolist() == [1, 1]
    assert set(runs["verdict"].dropna()) == {"GREEN"}


def test_nothing_claims_placement_off_a_mac(swept):
    runs = log.load("runs", root=swept[0] / "log")
    assert runs["placement"].isna().all() and runs["placement_source"].isna().all() and runs["compute_units"].isna().all()


def test_a_second_run_resumes_everything(swept):
    folder, _ = swept
    counts = sweep.sweep(sweep.make_grid(GRID), root=folder / "log", bundles=folder / "bundles", progress=False)
    assert (counts["done"], counts["resumed"]) == (0, 4)
    assert len(log.load("runs", root=folder / "log")) == 4


def test_cells_of_another_machine_are_run_again(swept, monkeypatch):
    root = swept[0] / "log"
    assert len(sweep.done_cells(root)) == 4
    elsewhere = log.environment() | {"chip": "another chip"}
    monkeypatch.setattr(log, "environment", lambda: elsewhere)
    assert sweep.done_cells(root) == set()


def test_a_cell_that_cannot_run_is_a_failed_row(swept, tmp_path):
    grid = sweep.make_grid(GRID | {"run": {"T": [1, 4], "n_gen": 4, "repetitions": 1}, "export": {"max_seq_len": [16], "t_max": [2]},
                                   "validate_ids": []})  # fmt: skip
    counts = sweep.sweep(grid, root=tmp_path / "log", bundles=swept[0] / "bundles", progress=False)
    assert (counts["done"], counts["failed"]) == (1, 1)
    failed = log.load("runs", root=tmp_path / "log", where={"status": "failed"})
    assert "t_max" in failed["reason"].iloc[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"exprot": {}}, "exprot"),
        ({"export": {"max_sequence": [1]}}, "max_sequence"),
        ({"export": {"compress": ["int3"]}}, "compress"),
        ({"run": {"T": []}}, "run.T"),
        ({"run": {"deep": [1]}}, "run.deep"),
        ({"run": {"runtime": ["cuda"]}}, "run.runtime"),
    ],
)
def test_unknown_keys_and_values_are_refused(change, words, tmp_path):
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(GRID | change))
    with pytest.raises(InputError, match=words):
        sweep.load_grid(tmp_path / "grid.yaml")
