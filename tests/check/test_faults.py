"""A gate exists only once a planted fault has turned it RED: every fault is caught, by the gate that is named for it.

Here each fault meets that gate alone, in fp16; `make prove` plants each in every preset and asks every bug gate.
"""

import cases
import pytest
from faults import FAULTS

from workbench.check.host import host_gate
from workbench.check.program import program_gates
from workbench.check.undo import undo_gate


@pytest.fixture(scope="module")
def prover(tmp_path_factory):
    return cases.Prover(tmp_path_factory.mktemp("faults"))


def gates_like(name: str, prover, bundle: str, plant=lambda decoder: None) -> dict[str, str]:
    """Verdicts by name of the gates that are asked together with the gate `name`, on a decoder that `plant` changed."""
    checkpoint, folder = prover.base(bundle, "fp16")
    exact, declared = cases.open_twice(folder)
    plant(exact)
    plant(declared)
    with cases.quiet():
        if name in cases.PROBES:
            found = cases.probes(declared)
        elif name == "host":
            found = [host_gate(declared, checkpoint)]
        elif name == "program":
            found = program_gates(exact, checkpoint)
        elif name == "undo":
            found = [undo_gate(declared)]
        else:
            found = cases.run_gates(declared, checkpoint)
    return {gate.name: gate.verdict for gate in found}


@pytest.mark.parametrize("bundle", sorted({fault.bundle for fault in FAULTS.values()}))
def test_gates_are_green_on_an_unharmed_bundle(bundle, prover):
    for name in ("write_address", "host", "program", "undo", "finite"):
        assert "RED" not in gates_like(name, prover, bundle).values()


def test_every_state_probe_has_a_fault():
    assert set(cases.PROBES) <= {fault.gate for fault in FAULTS.values()}


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_caught_by_the_gate_named_for_it(name, prover):
    fault = FAULTS[name]
    assert gates_like(fault.gate, prover, fault.bundle, fault.plant)[fault.gate] == "RED"
