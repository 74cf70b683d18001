"""Notebook 37's packages: refused for other families, and no verdict that any finding would pass."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from workbench.errors import InputError
from workbench.models.checkpoint import Checkpoint
from workbench.studies import other_exporters


def test_a_checkpoint_of_another_family_is_refused_before_anything_is_made(tmp_path):
    llama = Checkpoint(Path(__file__).parents[2] / "data" / "tiny-llama")
    with pytest.raises(InputError, match="llama.*PACKAGES"):
        other_exporters.findings(llama, 16, ["one mask"], [], tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "verdict", "fits", "as_expected"),
    [
        ("sound", "GREEN", "as configured", "GREEN"),
        ("sound", "RED", "as configured", "RED"),
        ("one mask", "RED", "no window", "GREEN"),
        ("one mask", "GREEN", "no window", "RED"),
        ("norm order", "RED", None, "RED"),
        ("yours", "GREEN", "as configured", "GREEN"),
        ("yours", "RED", "no window", "RED"),
    ],
)
def test_a_planted_fault_must_be_red_with_its_cause_named(name, verdict, fits, as_expected):
    finding = SimpleNamespace(
        validation=SimpleNamespace(verdict=verdict), cause=SimpleNamespace(fits=fits)
    )
    (gate,) = other_exporters.finding_gates({name: finding})
    assert gate.verdict == as_expected
