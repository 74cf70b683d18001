"""`workbench plan`, `compare`, `sweep --scheduler`: their JSON, their
messages."""

import json

import in_process
import numpy as np
import pytest
from typer.testing import CliRunner

from workbench import log, process
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


def test_placement_is_predicted_off_a_mac_with_rules_and_advice(
    llama, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    found = run("plan", llama.root)
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
    text = CliRunner().invoke(app, ["plan", str(llama.root)]).output
    assert "predicted placement" in text and "measured placement" not in text


def test_an_older_chip_breaks_more_rules(llama):
    rules = {
        chip: {
            r["id"]
            for s in run("plan", llama.root, "--chip", chip)["shards"]
            for r in s["rules"]
        }
        for chip in ("M1", "M5")
    }
    assert rules["M5"] <= rules["M1"]
    with pytest.raises(InputError, match="M9"):
        CliRunner().invoke(
            app, ["plan", str(llama.root), "--chip", "M9"], catch_exceptions=False
        )


def test_plan_tells_what_each_chip_should_reach(llama, exports):
    for source in (llama.root, exports.checkpoint("llama")):
        found = run("plan", source)
        assert {"bytes", "fits", "chips", "predicted_misfit"} <= found.keys() and found[
            "predicted_misfit"
        ] <= 0.3
        chips = {row["chip"]: row for row in found["chips"]}
        assert {"M1", "M4 Max"} <= chips.keys()
        assert chips["M1"]["weights"].endswith("streamed as fp16")
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
    found = run("log", "0-a", "0-b", "--log", tmp_path)
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


def test_a_bundle_is_swept_without_a_grid_and_ends_with_the_table(
    llama, tmp_path, monkeypatch
):
    monkeypatch.setattr(process, "call", in_process.call)
    options = ["--T", "1,2", "--depth", "0,4", "-r", "2", "--log", str(tmp_path)]
    command = ["sweep", str(llama.root), *options]
    found = CliRunner().invoke(app, command, catch_exceptions=False).stdout
    assert "cells 8, done 8, resumed 0, failed 0" in found
    rows = [line.split() for line in found.splitlines() if " 2 " in line]
    assert "tok/s" in found and len(rows) >= 4
    runs = log.load("runs", tmp_path)
    assert sorted(zip(runs["T"], runs["depth"], runs["round"])) == [
        (T, depth, round_) for T in (1, 2) for depth in (0, 4) for round_ in (0, 1)
    ]
    with pytest.raises(InputError, match="--T: found '1;2'; needs counts with commas"):
        command = ["sweep", str(llama.root), "--T", "1;2"]
        CliRunner().invoke(app, command, catch_exceptions=False)
