"""A gate exists only once a planted fault has turned it RED: every fault is caught, by the gate that is named for it."""

import warnings

import pytest
from faults import FAULTS

from workbench import Decoder
from workbench.eval import checklist
from workbench.eval.validate import validate


def judge(decoder: Decoder, golden) -> dict[str, str]:
    """Every gate by name, on an unharmed or harmed decoder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # faults divide by zero and overflow on purpose
        found = [*checklist.check(decoder, golden=golden), *validate(decoder, golden, (1, 2, 4)).gates]
    return {g.name: g.verdict for g in found}


def test_the_unharmed_bundle_is_green(llama_bundle, llama_golden):
    assert set(judge(Decoder(llama_bundle, "portable"), llama_golden).values()) == {"GREEN"}


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_caught_by_the_gate_named_for_it(name, llama_bundle, llama_golden):
    decoder = Decoder(llama_bundle, "portable")
    FAULTS[name].plant(decoder)
    assert judge(decoder, llama_golden)[FAULTS[name].gate] == "RED"


def test_every_gate_has_a_fault(llama_bundle, llama_golden):
    proved_elsewhere = {"state_shapes", "kv_are_states", "memory", "cache_contents", "golden_is_of_this_checkpoint", "logits_top1"}
    gates = judge(Decoder(llama_bundle, "portable"), llama_golden).keys()
    assert gates - proved_elsewhere == {f.gate for f in FAULTS.values()}
