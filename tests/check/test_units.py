"""Every compute unit gets a verdict, a child that dies included, and the blame falls where the
portable modes say."""

import numpy as np
import pandas as pd
import pytest

from workbench import process
from workbench.check import units

# how a child ends that answers → the verdict and the quality of its row
ANSWERS = {
    "GREEN": ("GREEN", "WITHIN"),
    "OVER": ("GREEN", "OVER"),
    "RED": ("RED", "not_run"),
}


@pytest.fixture
def validate_units(llama_bundle, llama_golden, monkeypatch):
    """`units.validate_units` of a bundle, where no child runs.

    Args:
        outcomes: unit, or portable mode → a key of `ANSWERS`, or the reason why the child died.
            Other children end GREEN.
        logits: unit → logits [n, V] of its child.
    """

    def validate(outcomes, runtime="coreml", logits=None):
        logits = logits or {}

        def call(function, root, golden, source, runtime, unit, options, timeout_s):
            outcome = outcomes.get(unit, "GREEN")
            if outcome not in ANSWERS:
                return process.Outcome(failure=outcome)
            verdict, quality = ANSWERS[outcome]
            row = {"verdict": verdict, "quality": quality}
            row |= {"min_cosine": 0.9, "kl_max": 0.1}
            row |= {"reason": f"{unit} is {outcome}", "logits": logits.get(unit)}
            return process.Outcome(row)

        monkeypatch.setattr(process, "call", call)
        return units.validate_units(llama_bundle, llama_golden, runtime=runtime)

    return validate


NARROW_SUMS = "the unit's arithmetic, within what narrow sums would do"


@pytest.mark.parametrize(
    ("outcomes", "unit", "blame", "verdict"),
    [
        ({"CPU_ONLY": "RED"}, "CPU_ONLY", "runtime", "RED"),
        ({"exact": "RED", "CPU_ONLY": "RED"}, "CPU_ONLY", "program or weights", "RED"),
        ({"declared": "RED"}, "portable declared", "precision", "RED"),
        # `narrow` bounds the errors of units and is none itself
        ({"narrow": "RED"}, "portable narrow", "precision", "GREEN"),
        ({"narrow": "RED", "CPU_ONLY": "RED"}, "CPU_ONLY", NARROW_SUMS, "RED"),
    ],
)
def test_blame_follows_the_portable_modes(
    validate_units, outcomes, unit, blame, verdict
):
    results = validate_units(outcomes)
    assert units.units_verdict(results) == verdict
    rows = results.set_index("unit")
    assert len(rows) == 7
    assert rows.loc[unit, "blame"] == blame
    assert rows["verdict"].ne("GREEN").sum() == len(outcomes)
    assert rows.loc[unit, "reason"] == f"{unit.removeprefix('portable ')} is RED"


def test_a_unit_whose_child_dies_has_a_row_with_the_reason(validate_units):
    results = validate_units({"CPU_AND_NE": "killed by SIGSEGV"})
    assert units.units_verdict(results) == "DIED"
    rows = results.set_index("unit")
    assert len(rows) == 7 and rows["verdict"].ne("GREEN").sum() == 1
    dead = rows.loc["CPU_AND_NE"]
    assert (dead["verdict"], dead["blame"]) == ("DIED", "runtime")
    assert dead["reason"].startswith("killed by SIGSEGV")


def test_off_a_mac_only_portable_modes_run_and_say_so(validate_units):
    results = validate_units({}, runtime="portable")
    modes = ["portable declared", "portable exact", "portable narrow"]
    assert list(results["unit"]) == modes
    assert results["blame"].isna().all() and units.units_verdict(results) == "GREEN"


def test_a_unit_is_compared_with_the_portable_runtime_too(validate_units):
    rng = np.random.default_rng(0)
    logits = {name: rng.standard_normal((4, 9)) for name in ("declared", "CPU_ONLY")}
    nats = validate_units({}, logits=logits).set_index("unit")["kl_portable"]
    assert nats["portable declared"] == 0
    assert nats["CPU_ONLY"] > 0.1
    assert np.isnan(nats["ALL"])


def test_a_cost_above_the_user_s_limit_is_blamed_on_nothing(validate_units):
    """A sound export in every arithmetic, whose cost is above the limit."""
    over = dict.fromkeys(("declared", "exact", "narrow"), "OVER")
    results = validate_units(over, runtime="portable")
    assert set(results["verdict"]) == {"GREEN"} == {units.units_verdict(results)}
    assert set(results["quality"]) == {"OVER"} == {units.units_quality(results)}
    assert results["blame"].isna().all()
    faulty = validate_units(over | {"CPU_ONLY": "RED"})
    blame = faulty.set_index("unit")["blame"]
    assert blame["CPU_ONLY"] == "runtime" and pd.isna(blame["portable exact"])
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
