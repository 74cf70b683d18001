"""A gate exists only once a planted fault has turned it RED: every fault is caught, by the gate that is named for it."""

import warnings

import faults_model  # noqa: F401  (registers its faults)
import faults_zaya  # noqa: F401
import pytest
from faults import FAULTS
from tiny import prompt

from workbench import Decoder
from workbench.check import checklist, golden
from workbench.check.validate import validate

CHECKED = {
    "golden_is_of_this_checkpoint",
    "state_shapes",
    "kv_are_states",
    "state_is_used",
    "fresh_state_is_zero",
    "states_are_independent",
    "write_address",
    "cache_contents",
    "stale_rows",
    "nan_in_state_is_noticed",
    "subnormals_in_state_are_kept",
    "overflow_raises",
    "memory",
}
PROVED_ELSEWHERE = {
    "state_shapes",
    "kv_are_states",
    "memory",
    "cache_contents",
    "golden_is_of_this_checkpoint",
    "logits_top1",
}


@pytest.fixture(scope="module")
def planted(exports, tiny_llama, llama_bundle, llama_golden):
    """Bundles that faults are planted in, each with its golden."""
    zaya = exports.checkpoint("zaya")
    fixed = exports.bundle(tiny_llama.path, max_seq_len=32, t="fixed")
    return {
        "llama": (llama_bundle, llama_golden),
        "fixed": (fixed, llama_golden),
        "zaya": (exports.bundle(zaya), golden.make_golden(zaya, prompt(109, 20))),
    }


def judge(decoder: Decoder, reference, checks: bool) -> dict[str, str]:
    """Verdicts by name, on an unharmed or harmed decoder: those of the checklist, or those of the validation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # faults divide by zero and overflow on purpose
        if checks:
            found = checklist.check_bundle(decoder, golden=reference)
        else:
            found = validate(
                decoder, reference, (1, 4) if decoder.options.t == "range" else None
            ).gates
    return {g.name: g.verdict for g in found}


@pytest.mark.parametrize("name", ["llama", "fixed", "zaya"])
def test_the_unharmed_bundle_is_green_and_every_gate_has_a_fault(name, planted):
    bundle, reference = planted[name]
    checked = judge(Decoder(bundle, "portable"), reference, checks=True)
    compared = judge(Decoder(bundle, "portable"), reference, checks=False)
    assert set(checked.values()) == {"GREEN"}
    assert set(compared.values()) <= {
        "GREEN",
        "not_run",
    }  # a fixed T has nothing to compare T = 1 with
    assert checked.keys() == CHECKED
    assert checked.keys() | compared.keys() <= PROVED_ELSEWHERE | {f.gate for f in FAULTS.values()}


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_caught_by_the_gate_named_for_it(name, planted):
    fault = FAULTS[name]
    bundle, reference = planted[fault.bundle]
    decoder = Decoder(bundle, "portable")
    fault.plant(decoder)
    assert judge(decoder, reference, fault.gate in CHECKED)[fault.gate] == "RED"
