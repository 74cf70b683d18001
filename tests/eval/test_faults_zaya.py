"""Every fault of ZAYA's own ingredients is caught by the gate named for it."""

import pytest
from faults_zaya import ZAYA_FAULTS
from tiny import prompt

from workbench import Decoder
from workbench.eval import golden
from workbench.eval.validate import validate


@pytest.fixture(scope="module")
def zaya(exports):
    checkpoint = exports.checkpoint("zaya")
    return exports.bundle(checkpoint), golden.make(checkpoint, prompt(109, 20))


def judge(decoder, reference) -> dict[str, str]:
    return {g.name: g.verdict for g in validate(decoder, reference, (1, 4)).gates}


def test_the_unharmed_bundle_is_green(zaya):
    assert set(judge(Decoder(zaya[0], "portable"), zaya[1]).values()) == {"GREEN"}


@pytest.mark.parametrize("name", ZAYA_FAULTS)
def test_every_fault_is_caught_by_the_gate_named_for_it(name, zaya):
    decoder = Decoder(zaya[0], "portable")
    ZAYA_FAULTS[name].plant(decoder)
    assert judge(decoder, zaya[1])[ZAYA_FAULTS[name].gate] == "RED"
