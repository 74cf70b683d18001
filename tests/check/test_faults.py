"""A gate exists only once a planted fault has turned it RED: every fault is caught, by the gate
that is named for it.

Here each fault meets that gate alone, in fp16; `make prove` plants each in every preset and asks
every gate.
"""

import cases
import prove
import pytest
from circle import all_wide
from faults import FAULTS
from planted import PLANTED

from workbench.check.validate import BUG_GATES


def verdict_of(name: str, *bundle) -> dict[str, str]:
    """Verdicts by name of the gates that are asked together with the gate `name`."""
    opened = cases.Faulty(*bundle)
    (step,) = (step for step in cases.STEPS if name in step)
    with cases.quiet():
        return {gate.name: gate.verdict for gate in cases.STEPS[step](opened)}


def unharmed(prover, bundle: str):
    checkpoint, folder = prover.base(bundle, "fp16")
    return folder, checkpoint


BUNDLES = sorted({fault.bundle for fault in FAULTS.values()} - {"llama"})


@pytest.mark.parametrize("bundle", ["llama", *all_wide(*BUNDLES)])
def test_gates_are_green_on_an_unharmed_bundle(bundle, prover):
    for name in ("write_address", "host", "program", "budget"):
        assert "RED" not in verdict_of(name, *unharmed(prover, bundle)).values()


def test_every_gate_has_a_fault():
    faults = [*FAULTS.values(), *PLANTED.values()]
    assert {*BUG_GATES, "budget"} <= {fault.gate for fault in faults}


def test_a_fault_that_one_gate_alone_shows_is_planted_for_that_gate():
    """So that the tests below name each with its gate; those that `make prove` found."""
    rows = prove.TABLES.read_text().splitlines()
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    alone = {
        (row[1], row[0].replace(" ", "_")): row[4].strip("`")
        for row in rows
        if len(row) == 5 and row[1] in ("files", "memory") and "," not in row[4]
    }
    planted = {("files", name): fault.gate for name, fault in PLANTED.items()}
    planted |= {("memory", name): fault.gate for name, fault in FAULTS.items()}
    others = {name: gate for name, gate in alone.items() if planted[name] != gate}
    assert alone and not others


@pytest.mark.matrix(20, wide=60)
@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_caught_by_the_gate_named_for_it(name, prover):
    fault = FAULTS[name]
    bundle = unharmed(prover, fault.bundle)
    assert verdict_of(fault.gate, *bundle, fault.plant)[fault.gate] == "RED"


@pytest.mark.matrix(12, wide=40)
@pytest.mark.parametrize("name", PLANTED)
def test_every_fault_in_files_is_caught_by_the_gate_named_for_it(name, broken):
    gate = PLANTED[name].gate
    assert verdict_of(gate, *broken(name))[gate] == "RED"
