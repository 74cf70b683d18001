"""The export benchmark: every side in a process of its own, raw samples kept, bytes compared."""

import os

import numpy as np
import pytest
import tiny

from workbench import InputError
from workbench.ane import memory
from workbench.benchmarks import export
from workbench.benchmarks.export_runs import export_layers, export_once


def test_what_is_measured_runs_in_a_process_of_its_own():
    assert export.apart(os.getpid) != os.getpid()


@pytest.fixture
def here(monkeypatch):
    """Spares the tests the imports of three processes."""
    monkeypatch.setattr(export, "apart", lambda work, *arguments: work(*arguments))


def test_rows_name_their_peers_and_say_whether_the_bytes_are_the_same(tmp_path, here):
    source = tiny.random(tmp_path / "c", "llama", num_hidden_layers=2)
    found = export.compare_exports(
        export_once,
        export_layers,
        source,
        tmp_path / "work",
        1,
        {"compress": "int8-tensor"},
    )
    assert (
        found["same_bytes"] is True
        and found["stamped"] == 1
        and not (tmp_path / "work").exists()
    )
    assert [
        (r["name"].removeprefix("export_int8-tensor_"), r["peer"])
        for r in found["rows"]
    ] == [
        ("seconds_over_templates", "disk"),
        ("seconds", "plain"),
        ("layer_seconds", "plain"),
    ]
    assert all(
        len(r["samples"]) == r["n"] > 0 and r["peer_samples"] for r in found["rows"]
    )
    assert (
        set(found["split"][0]) == {"template", "read", "compress", "write"}
        and min(found["split"][0].values()) > 0
    )
    assert found["peak_rss_bytes"]["stamped"][0] > 1 << 27


def test_peak_memory_is_that_of_the_process_alone():
    held = np.ones(600 << 20, np.uint8)
    assert memory.peak_rss() > held.nbytes
    # the child of a large process
    assert 0 < export.apart(memory.peak_rss) < held.nbytes


def test_other_bytes_are_reported(tmp_path, here):
    source = tiny.random(tmp_path / "c", "llama", num_hidden_layers=1)
    run = {
        "seconds": 1.0,
        "split": {"template": 0.5},
        "peak_rss_bytes": 1,
        "bytes": 10,
        "shards": 1,
        "stamped": 1,
    }
    found = export.compare_exports(
        lambda checkpoint, target, plain, chosen: run | {"identity": str(plain)},
        lambda *_: {"plain": [2.0], "stamped": [1.0]},
        source,
        tmp_path / "work",
        1,
        {},
    )
    assert found["same_bytes"] is False


def test_an_unknown_family_is_refused():
    with pytest.raises(InputError, match="one of qwen2, zaya"):
        export.model("gpt")
