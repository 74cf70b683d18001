"""Every compute unit gets a verdict, a child that dies included, and the blame falls where the
portable modes say."""

import numpy as np
import pytest

from workbench import process
from workbench.check import units


@pytest.fixture
def table(llama_bundle, llama_golden, monkeypatch):
    """Rows of children that end as `outcomes` says by unit: GREEN (the default), RED, or dead for
    a reason; with these logits."""

    def rows(outcomes, runtime="coreml", logits=()):
        def call(function, root, golden, runtime, unit, alone, Ts, timeout_s):
            outcome = outcomes.get(unit, "GREEN")
            if outcome not in ("GREEN", "RED"):
                return process.Outcome(failure=outcome)
            row = {"verdict": outcome, "min_cosine": 0.9, "kl_max": 0.1}
            row["reason"] = (
                "update: layer 3" if outcome == "RED" else "every gate passes"
            )
            return process.Outcome(row | {"logits": dict(logits).get(unit)})

        monkeypatch.setattr(process, "call", call)
        found = units.validate_units(llama_bundle, llama_golden, runtime=runtime)
        return found.set_index("unit")

    return rows


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
        ({"ALL": "killed by SIGSEGV"}, "ALL", "runtime"),
    ],
)
def test_blame_follows_the_portable_modes(table, outcomes, unit, blame):
    found = table(outcomes)
    assert found.loc[unit, "blame"] == blame
    assert found["verdict"].ne("GREEN").sum() == len(outcomes)


def test_a_child_that_dies_is_a_row_and_the_others_go_on(table):
    found = table({"CPU_AND_NE": "killed by SIGSEGV", "ALL": "RED"})
    assert found.loc["CPU_AND_NE", "verdict"] == "DIED"
    assert found.loc["CPU_AND_NE", "reason"] == "killed by SIGSEGV"
    assert found.loc["ALL", "reason"] == "update: layer 3"
    assert len(found) == 7


def test_off_a_mac_only_portable_modes_run_and_say_so(table):
    found = table({}, runtime="portable")
    modes = ["portable declared", "portable exact", "portable narrow"]
    assert list(found.index) == modes
    assert found["blame"].isna().all()


def test_a_unit_is_held_against_portable_too(table):
    rng = np.random.default_rng(0)
    logits = {name: rng.standard_normal((4, 9)) for name in ("declared", "CPU_ONLY")}
    found = table({}, logits=logits)["kl_portable"]
    assert found["portable declared"] == 0
    assert found["CPU_ONLY"] > 0.1
    assert np.isnan(found["ALL"])


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        ({}, "GREEN"),
        ({"narrow": "RED"}, "GREEN"),
        ({"exact": "RED"}, "RED"),
        ({"ALL": "killed by SIGSEGV"}, "RED"),
    ],
)
def test_the_verdict_is_of_units_and_not_of_the_bound(table, outcomes, verdict):
    assert units.units_verdict(table(outcomes).reset_index()) == verdict


@pytest.mark.wide
def test_a_real_child_validates(llama_bundle, llama_golden, tmp_path):
    path = llama_golden.save(tmp_path / "golden.safetensors")
    how = llama_bundle.root, path, "portable", "exact", False, [1]
    found = process.call(units.validate_unit, *how).value
    assert found["verdict"] == "GREEN"
    assert found["logits"].shape == llama_golden["logits"].shape
    assert found["min_cosine"] > 0.99999
