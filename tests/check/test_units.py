"""Every compute unit gets a verdict, a child that dies included, and the blame falls where the
portable modes say."""

import json
import subprocess

import numpy as np
import pytest

from workbench.check import units

GATES = [{"name": "update", "verdict": "RED", "reason": "layer 3"}]


def start(outcomes: dict[str, str]):
    """Children that end as `outcomes` says by unit: GREEN (the default), RED, or a signal's
    number."""

    def child(command: list[str]) -> subprocess.CompletedProcess:
        outcome = outcomes.get(command[6], "GREEN")
        if outcome.isdigit():
            return subprocess.CompletedProcess(
                command, -int(outcome), "", "loading\nSegmentation fault"
            )
        found = {
            "verdict": outcome,
            "gates": GATES if outcome == "RED" else [],
            "min_cosine": 0.9,
            "logits": {"kl_max": 0.1},
        }
        return subprocess.CompletedProcess(command, 0, json.dumps(found), "")

    return child


def table(llama_bundle, llama_golden, outcomes, runtime="coreml"):
    return units.validate_units(
        llama_bundle, llama_golden, runtime=runtime, start=start(outcomes)
    ).set_index("unit")


@pytest.mark.parametrize(
    ("outcomes", "unit", "blame"),
    [
        ({"CPU_ONLY": "RED"}, "CPU_ONLY", "runtime"),
        (
            {"exact": "RED", "declared": "RED", "CPU_ONLY": "RED"},
            "CPU_ONLY",
            "program or weights",
        ),
        ({"declared": "RED"}, "portable declared", "precision"),
        (
            {"narrow": "RED", "CPU_ONLY": "RED"},
            "CPU_ONLY",
            "the unit's arithmetic, within what narrow sums would do",
        ),
        ({"ALL": "11"}, "ALL", "runtime"),
    ],
)
def test_blame_follows_the_portable_modes(
    llama_bundle, llama_golden, outcomes, unit, blame
):
    found = table(llama_bundle, llama_golden, outcomes)
    assert found.loc[unit, "blame"] == blame
    assert found["verdict"].ne("GREEN").sum() == len(outcomes)


def test_a_child_that_dies_is_a_row_and_the_others_go_on(llama_bundle, llama_golden):
    found = table(llama_bundle, llama_golden, {"CPU_AND_NE": "11"})
    assert found.loc["CPU_AND_NE", "verdict"] == "DIED"
    assert found.loc["CPU_AND_NE", "reason"] == "signal 11: Segmentation fault"
    assert len(found) == 7


def test_a_child_that_ends_in_an_error_of_core_ml_says_which(
    llama_bundle, llama_golden
):
    said = 'Traceback (most recent call last):\n  File x\nRuntimeError: {\n    NSLocalizedDescription = "error code: -14.";\n}\n'
    found = units.validate_units(
        llama_bundle,
        llama_golden,
        runtime="portable",
        start=lambda command: subprocess.CompletedProcess(command, 1, "", said),
    )
    assert found["reason"].unique() == [
        'exit code 1: RuntimeError: NSLocalizedDescription = "error code: -14."'
    ]


def test_the_reason_of_a_red_unit_is_its_gate(llama_bundle, llama_golden):
    assert (
        table(llama_bundle, llama_golden, {"ALL": "RED"}).loc["ALL", "reason"]
        == "update: layer 3"
    )


def test_off_a_mac_only_portable_modes_run_and_say_so(llama_bundle, llama_golden):
    found = table(llama_bundle, llama_golden, {}, runtime="portable")
    assert list(found.index) == [
        "portable declared",
        "portable exact",
        "portable narrow",
    ]
    assert found["blame"].isna().all()


def test_a_unit_is_held_against_portable_too(llama_bundle, llama_golden):
    rng = np.random.default_rng(0)
    logits = {
        "declared": rng.standard_normal((4, 9)),
        "CPU_ONLY": rng.standard_normal((4, 9)),
    }

    def child(command):
        unit, out = command[6:8]
        if unit in logits:
            np.save(out, logits[unit])
        return start({})(command)

    found = units.validate_units(
        llama_bundle, llama_golden, runtime="coreml", start=child
    ).set_index("unit")["kl_portable"]
    assert found["portable declared"] == 0
    assert found["CPU_ONLY"] > 0.1
    assert np.isnan(found["ALL"])


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        ({}, "GREEN"),
        ({"narrow": "RED"}, "GREEN"),
        ({"exact": "RED"}, "RED"),
        ({"ALL": "11"}, "RED"),
    ],
)
def test_the_verdict_is_of_units_and_not_of_the_bound(
    llama_bundle, llama_golden, outcomes, verdict
):
    assert (
        units.units_verdict(table(llama_bundle, llama_golden, outcomes).reset_index())
        == verdict
    )


def test_a_real_child_validates_and_one_that_hangs_is_killed(
    llama_bundle, llama_golden, tmp_path, monkeypatch
):
    path = llama_golden.save(tmp_path / "golden.safetensors")
    row = units.unit_row(llama_bundle, path, "portable", "exact", [1], units.launch)
    assert row["verdict"] == "GREEN"
    assert row["logits"].shape == llama_golden.logits.shape
    assert row["min_cosine"] > 0.99999
    monkeypatch.setattr(units, "SECONDS", 0.1)
    assert units.launch(["sleep", "5"]).returncode == -9
