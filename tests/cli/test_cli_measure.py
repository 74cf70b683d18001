"""`workbench residency`, `compare`, `memory`, `sweep --scheduler`, `bench log`: their JSON, their
messages."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from workbench import log
from workbench.cli.app import app
from workbench.errors import InputError


@pytest.fixture(scope="module")
def llama(exports):
    return exports.bundle(exports.checkpoint("llama"))


def run(*arguments) -> dict:
    result = CliRunner().invoke(
        app, [*map(str, arguments), "--json"], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_residency_is_predicted_off_a_mac_with_rules_and_advice(
    llama, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    found = run("residency", llama.root, "--record")
    assert found["source"] == "predicted" and len(found["shards"]) == len(
        llama.manifest.shards
    )
    shard = found["shards"][0]
    assert {
        "shard",
        "ops",
        "ane",
        "cpu",
        "gpu",
        "rules",
        "eligible",
        "convolutions",
    } <= shard.keys()
    assert (
        shard["ane"] + shard["cpu"] == shard["ops"]
        and shard["eligible"] >= shard["ane"]
    )
    assert all(
        {"id", "effect", "confidence", "sources", "advice", "disputed", "names"}
        <= rule.keys()
        for rule in shard["rules"]
    )
    row = log.load("runs").iloc[0]
    assert row["placement_source"] == "predicted" and set(
        json.loads(row["placement"])
    ) == {s["shard"] for s in found["shards"]}
    text = CliRunner().invoke(app, ["residency", str(llama.root)]).output
    assert text.startswith("predicted placement") and "measured placement" not in text


def test_an_older_chip_breaks_more_rules(llama):
    rules = {
        chip: {
            r["id"]
            for s in run("residency", llama.root, "--chip", chip)["shards"]
            for r in s["rules"]
        }
        for chip in ("M1", "M5")
    }
    assert rules["M5"] <= rules["M1"]
    with pytest.raises(InputError, match="M9"):
        CliRunner().invoke(
            app, ["residency", str(llama.root), "--chip", "M9"], catch_exceptions=False
        )


def test_memory_tells_what_each_chip_should_reach(llama, exports):
    for source in (llama.root, exports.checkpoint("llama")):
        found = run("memory", source)
        assert {
            "weights",
            "kv",
            "fits",
            "predicted",
            "predicted_misfit",
        } <= found.keys() and found["predicted_misfit"] <= 0.3
        chips = {row["chip"]: row for row in found["predicted"]}
        assert {"M1", "M4 Max"} <= chips.keys()
        assert (
            chips["M1"]["weights"].endswith("streamed as fp16")
            and not chips["M1"]["spills"]
        )
        assert chips["M1"]["streamed_mib"] > 0


def test_compare_names_what_differs_and_by_how_much(tmp_path):
    for round_ in range(4):
        for side, ms in (("a", 10.0), ("b", 15.0)):
            run_id = f"{round_}-{side}"
            log.append(
                "runs",
                {
                    "status": "ok",
                    "setting": side,
                    "round": round_,
                    "T": 1 + (side == "b"),
                },
                tmp_path,
                run_id,
            )
            values = ms * np.random.default_rng(round_).normal(1, 0.01, 5)
            log.append(
                "samples",
                [
                    {"phase": "call", "unit": "ms", "repetition": i, "value": v}
                    for i, v in enumerate(values)
                ],
                tmp_path,
                run_id,
            )
    found = run("compare", "0-a", "0-b", "--log", tmp_path)
    assert {s["setting"]: (s["a"], s["b"]) for s in found["settings"]} == {
        "T": (1, 2),
        "setting": ("a", "b"),
    }
    (row,) = found["measures"]
    assert row["low"] < 1.5 < row["high"] and (
        row["n_a"],
        row["n_b"],
        found["hidden"],
    ) == (4, 4, 0)


def test_a_sweep_without_its_scheduler_is_refused_before_anything_runs(
    grid, tmp_path, monkeypatch
):
    from workbench.sweep import cluster

    monkeypatch.setattr(cluster, "CONNECT_S", 1)
    (tmp_path / "grid.json").write_text(json.dumps(grid))  # JSON is YAML
    with pytest.raises(InputError, match="scheduler"):
        CliRunner().invoke(
            app,
            [
                "sweep",
                str(tmp_path / "grid.json"),
                "--log",
                str(tmp_path / "log"),
                "--scheduler",
                "tcp://127.0.0.1:1",
            ],
            catch_exceptions=False,
        )
    assert not (tmp_path / "log").exists()


def test_bench_log_has_its_peer_in_the_same_run(tmp_path):
    rows = {
        r["name"]: r
        for r in run("bench", "log", "--runs", 80, "--rounds", 2, "--folder", tmp_path)[
            "rows"
        ]
    }
    assert rows.keys() == {"log_load_first", "log_load"} and all(
        r["n"] == 2 and r["peer_value"] > 0 for r in rows.values()
    )
