"""Grids of finished bundles: measured without their checkpoint, validated on a stored golden."""

import json
import shutil

import pytest
from refusal import refused
from tiny import DATA

from workbench import log, sweep
from workbench.check import gates, golden
from workbench.models.checkpoint import Checkpoint

IDS = [1, 4, 69, 42, 13, 4]
RUN = {"T": [1, 2], "depth": [2], "n_gen": 2, "repetitions": 1}
pytestmark = pytest.mark.usefixtures("calls_here")


@pytest.fixture(scope="module")
def stored_golden(exports, tmp_path_factory):
    """The path of a golden of `IDS`."""
    path = tmp_path_factory.mktemp("golden") / "g.safetensors"
    return golden.make_golden(Checkpoint(exports.checkpoint("llama")), IDS).save(path)


@pytest.fixture
def grid(exports, stored_golden, tmp_path):
    """A grid of two bundles that no checkout has validated."""
    source, roots = exports.checkpoint("llama"), []
    for S in (16, 24):
        bundle = exports.bundle(source, max_seq_len=S, tokens="1-2").root
        root = tmp_path / f"bundle-{S}"
        roots.append(shutil.copytree(bundle, root))
        (root / gates.VERDICT).unlink(missing_ok=True)
    return {"bundle": [*map(str, roots)], "golden": str(stored_golden), "run": RUN}


def test_bundles_are_measured_and_validated_without_their_checkpoint(
    grid, stored_golden, tmp_path, monkeypatch
):
    monkeypatch.chdir(stored_golden.parent)
    parsed = sweep.make_grid(grid | {"golden": stored_golden.name})
    assert parsed.validate_ids == IDS and parsed.golden == str(stored_golden)
    root = tmp_path / "log"
    counts = sweep.sweep(parsed, root=root, progress=False)
    assert (counts["cells"], counts["done"], counts["failed"]) == (4, 4, 0)
    rows = log.load("runs", root)
    assert rows["bundle_hash"].nunique() == 2
    # the gates that need the checkpoint are not run
    assert rows["verdict"].dropna().tolist() == ["not_run"] * 2
    assert rows["quality"].dropna().tolist() == ["WITHIN"] * 2
    assert sweep.sweep(parsed, root=root, progress=False)["resumed"] == 4
    table = sweep.configurations(parsed, root=root)
    assert len(table) == 4 and set(table["bundle"]) == set(rows["bundle"])
    assert all(name.startswith("bundle ") for name in table["name"])
    one = sweep.make_grid(grid | {"bundle": grid["bundle"][:1]})
    assert len(sweep.configurations(one, root=root)) == 2
    with refused("of different names"):
        sweep.make_grid(grid | {"bundle": one.bundle * 2})


def test_a_golden_is_what_a_checkpoint_s_bundles_are_validated_on(
    exports, stored_golden, tmp_path
):
    grid = {
        "checkpoint": str(exports.checkpoint("llama")),
        "golden": str(stored_golden),
        "export": {"max_seq_len": [16], "tokens": ["1-2"]},
        "run": RUN | {"T": [1]},
    }
    folders = {"root": tmp_path / "log", "bundles": tmp_path / "bundles"}
    counts = sweep.sweep(sweep.make_grid(grid), progress=False, **folders)
    (row,) = log.load("runs", folders["root"]).to_dict("records")
    assert counts["failed"] == 0 and row["verdict"] == "GREEN"
    assert not (tmp_path / "golden").exists()
    names = {gate["name"] for gate in json.loads(row["config"])["gates"]}
    assert names >= {"program", "budget"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"checkpoint": "data/tiny-llama"}, "either checkpoint"),
        ({"bundle": []}, "either checkpoint"),
        ({"export": {"max_seq_len": [16]}}, "either checkpoint"),
        ({"golden": None, "validate_ids": [1, 2]}, "workbench golden CHECKPOINT"),
        ({"validate_ids": [1, 2]}, "leave validate_ids out"),
        ({"golden": "no/such/golden"}, "no such file"),
        (
            {"bundle": [], "checkpoint": str(DATA / "tiny-llama")},
            "golden of a checkpoint with content hash",
        ),
        ({"bundle": ["no/such/bundle"]}, "nothing there"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_runs(grid, change, words):
    with refused(words):
        sweep.make_grid(grid | change)
