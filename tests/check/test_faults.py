"""A gate exists only once a planted fault has turned it RED: every fault is caught, by the gate
that is named for it.

Here each fault meets that gate alone, in fp16; `make prove` plants each in every preset and asks
every bug gate.
"""

import cases
import pytest
from circle import all_wide
from copies import Copy
from faults import FAULTS
from planted import PLANTED

from workbench.check.validate import BUG_GATES


@pytest.fixture(scope="module")
def prover(shared):
    return cases.Prover(shared / "prove")


def faulty(prover, bundle: str, plant=None) -> cases.Faulty:
    """A bundle whose decoders `plant` changes when they are opened."""
    checkpoint, folder = prover.base(bundle, "fp16")
    return cases.Faulty(folder, checkpoint, plant)


def gates_like(name: str, opened: cases.Faulty) -> dict[str, str]:
    """Verdicts by name of the gates that are asked together with the gate `name`."""
    (step,) = (step for step in cases.STEPS if name in step)
    with cases.quiet():
        return {gate.name: gate.verdict for gate in cases.STEPS[step](opened)}


BUNDLES = sorted({fault.bundle for fault in FAULTS.values()} - {"llama"})


@pytest.mark.parametrize("bundle", ["llama", *all_wide(*BUNDLES)])
def test_gates_are_green_on_an_unharmed_bundle(bundle, prover):
    opened = faulty(prover, bundle)
    for name in ("write_address", "host", "program", "budget"):
        assert "RED" not in gates_like(name, opened).values()


def test_every_gate_has_a_fault():
    faults = [*FAULTS.values(), *PLANTED.values()]
    assert {*BUG_GATES, "budget"} <= {fault.gate for fault in faults}


@pytest.mark.matrix(20, wide=300)
@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_caught_by_the_gate_named_for_it(name, prover):
    fault = FAULTS[name]
    opened = faulty(prover, fault.bundle, fault.plant)
    assert gates_like(fault.gate, opened)[fault.gate] == "RED"


@pytest.mark.matrix(8, wide=300)
@pytest.mark.parametrize("name", PLANTED)
def test_every_fault_in_files_is_caught_by_the_gate_named_for_it(
    name, prover, tmp_path
):
    fault = PLANTED[name]
    checkpoint, source = prover.base(fault.bundle, "fp16")
    copy = Copy(source, tmp_path / "copy")
    fault.plant(copy)
    opened = cases.Faulty(copy.seal(), checkpoint)
    assert gates_like(fault.gate, opened)[fault.gate] == "RED"
