"""Grids of finished bundles: measured without their checkpoint, validated on a stored golden, sent
by hash to the workers of a cluster."""

import json

import in_process
import pytest

from workbench import log, process, sweep
from workbench.check import golden
from workbench.errors import InputError
from workbench.models.checkpoint import Checkpoint

IDS = [1, 4, 69, 42, 13, 4]
RUN = {"T": [1, 2], "depth": [2], "n_gen": 2, "repetitions": 1}


@pytest.fixture(scope="module")
def bundles(exports):
    checkpoint = exports.checkpoint("llama")
    sizes = (16, 24)
    return checkpoint, [
        exports.bundle(checkpoint, max_seq_len=S, tokens="1-2") for S in sizes
    ]


@pytest.fixture(scope="module")
def stored(bundles, tmp_path_factory):
    path = tmp_path_factory.mktemp("golden") / "g.safetensors"
    return golden.make_golden(Checkpoint(bundles[0]), IDS).save(path)


@pytest.fixture
def grid(bundles, stored):
    return {
        "bundle": [str(bundle.root) for bundle in bundles[1]],
        "golden": str(stored),
        "run": RUN,
    }


def measured(root) -> dict[str, dict]:
    rows = log.load("runs", root=root)
    return {f"{row['bundle']}, T {row['T']}": row for row in rows.to_dict("records")}


def test_bundles_are_measured_and_validated_without_their_checkpoint(
    grid, bundles, tmp_path, monkeypatch
):
    monkeypatch.setattr(process, "call", in_process.call)
    made, root = sweep.make_grid(grid), tmp_path / "log"
    assert made.validate_ids == IDS
    counts = sweep.sweep(made, root=root, progress=False)
    assert (counts["cells"], counts["done"], counts["failed"]) == (4, 4, 0)
    rows = measured(root)
    assert {row["bundle_hash"] for row in rows.values()} == {
        b.identity for b in bundles[1]
    }
    assert [row["verdict"] for row in rows.values()].count("GREEN") == 2
    assert sweep.sweep(made, root=root, progress=False)["resumed"] == 4
    table = sweep.configurations(made, root=root)
    assert len(table) == 4 and set(table["bundle"]) == {b.root.name for b in bundles[1]}
    assert all(name.startswith("bundle ") for name in table["name"])
    one = sweep.make_grid(grid | {"bundle": grid["bundle"][:1]})
    assert len(sweep.configurations(one, root=root)) == 2


def test_a_golden_is_what_a_checkpoint_s_bundles_are_validated_on(
    bundles, stored, tmp_path, monkeypatch
):
    monkeypatch.setattr(process, "call", in_process.call)
    small = {"max_seq_len": [16], "tokens": ["1-2"]}
    grid = {"checkpoint": str(bundles[0]), "golden": str(stored), "export": small}
    grid["run"] = RUN | {"T": [1]}
    made = sweep.make_grid(grid)
    counts = sweep.sweep(
        made, root=tmp_path / "log", bundles=tmp_path / "bundles", progress=False
    )
    (row,) = measured(tmp_path / "log").values()
    assert counts["failed"] == 0 and row["verdict"] == "GREEN"
    assert not (tmp_path / "golden").exists()
    assert {g["name"] for g in json.loads(row["config"])["gates"]} >= {
        "program",
        "budget",
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"checkpoint": "data/tiny-llama"}, "leave one of them out"),
        ({"bundle": []}, "leave one of them out"),
        ({"export": {"max_seq_len": [16]}}, "leave one of them out"),
        ({"golden": None, "validate_ids": [1, 2]}, "workbench golden CHECKPOINT"),
        ({"validate_ids": [1, 2]}, "leave validate_ids out"),
        ({"golden": "no/such/golden"}, "no such file"),
        ({"bundle": ["no/such/bundle"]}, "nothing there"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_runs(grid, change, words):
    with pytest.raises(InputError, match=words):
        sweep.make_grid(grid | change)
