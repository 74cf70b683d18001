"""A wrong result at T > 1 is seen, and laid at the right door: the program's, or the runtime's."""

from dataclasses import replace

import numpy as np
import pytest
from faults import FAULTS
from tiny import prompt

from workbench import Decoder
from workbench.check import fidelity, golden, rangedim
from workbench.models.checkpoint import Checkpoint

FAULT = "tokens_of_a_chunk_written_in_reverse"


def judge(decoder, golden, Ts=(1, 4)):
    return rangedim.drift_gate(
        decoder, {T: fidelity.run_golden(decoder, golden, T) for T in Ts}, golden
    )


@pytest.fixture
def device(llama_bundle):
    """What stands in for a device: it computes at T > 1 what a planted fault makes of it."""
    made = Decoder(llama_bundle, "portable")
    FAULTS[FAULT].plant(made)
    made.runtime = "coreml"
    return made


def test_every_t_agrees_on_a_clean_bundle(llama_bundle, llama_golden):
    assert (
        judge(Decoder(llama_bundle, "portable"), llama_golden, (1, 2, 3, 4)).verdict
        == "GREEN"
    )


def test_a_device_that_drifts_where_portable_does_not_is_a_wrong_runtime(
    device, llama_golden
):
    gate = judge(device, llama_golden)
    assert gate.verdict == "RED"
    assert "the runtime is wrong" in gate.reason
    assert "--functions 1," in gate.reason


def test_a_drift_that_portable_shows_too_is_a_wrong_program(
    device, llama_golden, monkeypatch
):
    class Wrong(Decoder):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            FAULTS[FAULT].plant(self)

    monkeypatch.setattr(rangedim, "Decoder", Wrong)
    assert "the program is wrong" in judge(device, llama_golden).reason


def test_portable_alone_blames_the_program(llama_bundle, llama_golden):
    decoder = Decoder(llama_bundle, "portable")
    FAULTS[FAULT].plant(decoder)
    assert "the program is wrong" in judge(decoder, llama_golden).reason


def test_without_t_above_1_it_is_not_run(llama_bundle, llama_golden):
    assert (
        judge(Decoder(llama_bundle, "portable"), llama_golden, (1,)).verdict
        == "not_run"
    )


def test_near_tied_choices_that_no_runtime_shows_are_no_drift(exports):
    """Each choice is a near tie: no update can be compared, the cache rows can."""
    path = exports.checkpoint("zaya")
    source = golden.make_golden(Checkpoint(path), prompt(109, 8))
    tied = replace(source, margin=np.zeros_like(source.margin))
    decoder = Decoder(exports.bundle(path), "portable")
    decoder.runtime = "coreml"
    assert judge(decoder, tied).verdict == "GREEN"
