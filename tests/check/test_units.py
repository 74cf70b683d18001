"""Every compute unit gets a verdict, a child that dies included, and the blame falls where the
portable modes say."""

import numpy as np
import pandas as pd
import pytest

from workbench import process
from workbench.check import units


@pytest.fixture
def table(llama_bundle, llama_golden, monkeypatch):
    """Rows of children that end as `outcomes` says by unit: GREEN (the default), RED, or dead for
    a reason; with these logits."""

    def rows(outcomes, runtime="coreml", logits=()):
        def call(function, root, golden, source, runtime, unit, options, timeout_s):
            outcome = outcomes.get(unit, "GREEN")
            if outcome not in ("GREEN", "RED", "LIMIT"):
                return process.Outcome(failure=outcome)
            verdict = "RED" if outcome == "RED" else "GREEN"
            quality = {"RED": "not_run", "GREEN": "WITHIN", "LIMIT": "OVER"}[outcome]
            row = {"verdict": verdict, "quality": quality}
            row |= {"min_cosine": 0.9, "kl_max": 0.1}
            row["reason"] = f"{unit} is {outcome}"
            return process.Outcome(row | {"logits": dict(logits).get(unit)})

        monkeypatch.setattr(process, "call", call)
        return units.validate_units(llama_bundle, llama_golden, runtime=runtime)

    return rows


BOUND = "the unit's arithmetic, within what narrow sums would do"
DEAD = {"CPU_AND_NE": "killed by SIGSEGV"}


@pytest.mark.parametrize(
    ("outcomes", "unit", "blame", "verdict"),
    [
        ({"CPU_ONLY": "RED"}, "CPU_ONLY", "runtime", "RED"),
        ({"exact": "RED", "CPU_ONLY": "RED"}, "CPU_ONLY", "program or weights", "RED"),
        ({"declared": "RED"}, "portable declared", "precision", "RED"),
        # the bound is no unit
        ({"narrow": "RED"}, "portable narrow", "precision", "GREEN"),
        ({"narrow": "RED", "CPU_ONLY": "RED"}, "CPU_ONLY", BOUND, "RED"),
        (DEAD, "CPU_AND_NE", "runtime", "DIED"),
    ],
)
def test_blame_follows_the_portable_modes(table, outcomes, unit, blame, verdict):
    results = table(outcomes)
    assert units.units_verdict(results) == verdict
    rows = results.set_index("unit")
    assert rows.loc[unit, "blame"] == blame
    assert rows["verdict"].ne("GREEN").sum() == len(outcomes)
    died = outcomes is DEAD
    assert rows.loc[unit, "verdict"] == "DIED" or not died
    assert rows.loc[unit, "reason"].startswith("killed by SIGSEGV") == died
    assert len(rows) == 7


def test_off_a_mac_only_portable_modes_run_and_say_so(table):
    results = table({}, runtime="portable")
    modes = ["portable declared", "portable exact", "portable narrow"]
    assert list(results["unit"]) == modes
    assert results["blame"].isna().all() and units.units_verdict(results) == "GREEN"


def test_a_unit_is_held_against_portable_too(table):
    rng = np.random.default_rng(0)
    logits = {name: rng.standard_normal((4, 9)) for name in ("declared", "CPU_ONLY")}
    units = table({}, logits=logits).set_index("unit")["kl_portable"]
    assert units["portable declared"] == 0
    assert units["CPU_ONLY"] > 0.1
    assert np.isnan(units["ALL"])


def test_a_cost_above_the_user_s_limit_is_blamed_on_nothing(table):
    """A sound export in every arithmetic, whose cost is above the limit."""
    names = ("declared", "exact", "narrow")
    results = table(dict.fromkeys(names, "LIMIT"), runtime="portable")
    assert set(results["verdict"]) == {"GREEN"} == {units.units_verdict(results)}
    assert set(results["quality"]) == {"OVER"} == {units.units_quality(results)}
    assert results["blame"].isna().all()
    faulty = table(dict.fromkeys(names, "LIMIT") | {"CPU_ONLY": "RED"})
    rows = faulty.set_index("unit")["blame"]
    assert rows["CPU_ONLY"] == "runtime" and pd.isna(rows["portable exact"])
    assert units.units_quality(faulty) == "not_run"


def test_a_unit_s_first_reason_is_a_fault_before_a_limit(
    llama_bundle, llama_golden, tmp_path
):
    path = llama_golden.save(tmp_path / "golden.safetensors")
    options = {"single_copy": False, "Ts": (1,), "max_kl": 0.0}
    row = units.validate_unit(
        llama_bundle.root, path, None, "portable", "declared", options
    )
    # without a checkpoint three required gates do not run
    assert (row["verdict"], row["quality"]) == ("not_run", "OVER")
    assert row["reason"].startswith("max_kl: ") and "--" not in row["reason"]
    assert row["kl_mean"] > 0 and row["over_rounding"] > 0
