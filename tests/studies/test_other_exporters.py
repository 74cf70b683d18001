"""Notebook 37's packages: no verdict that any finding would pass, and every style has a fault."""

from types import SimpleNamespace

import pytest

from workbench.studies import other_exporters
from workbench.studies.exporter_styles import FAULTS, STYLES


@pytest.mark.parametrize(
    ("fault", "verdict", "fits", "faults", "as_expected"),
    [
        ("", "GREEN", "as configured", [], "GREEN"),
        ("", "RED", "as configured", [], "RED"),
        ("", "GREEN", "no window", [], "RED"),
        ("one_mask", "RED", "no window", [], "GREEN"),
        ("one_mask", "GREEN", "no window", [], "RED"),
        ("one_mask", "RED", None, [], "RED"),
        ("future", "RED", "as configured", ["causality: logits"], "GREEN"),
        ("future", "RED", "as configured", ["same_for_every_T: layer 1"], "RED"),
        (None, "GREEN", "as configured", [], "GREEN"),
        (None, "RED", "no window", [], "RED"),
    ],
)
def test_a_planted_fault_must_be_red_with_its_cause_named(
    fault, verdict, fits, faults, as_expected
):
    finding = other_exporters.Finding(
        SimpleNamespace(verdict=verdict),
        SimpleNamespace(fits=fits, faults=faults),
        fault,
        "no window" if fault == "one_mask" else "as configured",
    )
    (gate,) = other_exporters.finding_gates({"packages": finding})
    assert gate.verdict == as_expected


def test_every_fault_is_planted_in_a_style():
    assert {style.fault for style in STYLES.values()} == set(FAULTS)
