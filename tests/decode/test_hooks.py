"""Hooks see every operation, and functions that inspect a decoder leave its own sequences as they
were, however the inspection ends."""

from contextlib import nullcontext

import numpy as np
import pytest
from refusal import refused
from tiny import prompt

from workbench import Decoder
from workbench.bundle.names import HIDDEN
from workbench.check import run, validate
from workbench.explain import ranges
from workbench.runtime import portable
from workbench.sweep import timing

IDS = prompt(97, 7)
INSPECTIONS = {
    "validation": validate.validate,
    "ranges": lambda decoder, _: ranges.measure_decoder(decoder, IDS),
    "profile": lambda decoder, _: timing.profile(decoder, depth=2, calls=2),
}


@pytest.mark.matrix(4, wide=4)
@pytest.mark.parametrize("calls", [None, 1])
@pytest.mark.parametrize("name", INSPECTIONS)
def test_an_inspection_leaves_the_decoder_s_sequence_as_it_was(
    llama_bundle, llama_golden, monkeypatch, name, calls
):
    """Interrupted after some calls of a shard, as by Jupyter's stop button, or run to its end."""
    decoder, other = (Decoder(llama_bundle, "portable", fast=True) for _ in range(2))
    for one in (decoder, other):
        one.prefill(IDS)
    run_calls, executables_that_ran = portable.run_calls, []

    def run_until_stopped(executable, *arguments):
        outputs = run_calls(executable, *arguments)
        executables_that_ran.append(executable)
        if len(executables_that_ran) == calls:
            raise KeyboardInterrupt
        return outputs

    ends = pytest.raises(KeyboardInterrupt) if calls else nullcontext()
    with monkeypatch.context() as patch, ends:
        patch.setattr(portable, "run_calls", run_until_stopped)
        INSPECTIONS[name](decoder, llama_golden)
    assert executables_that_ran  # the literal graph ran
    for token in (5, 42):  # the earlier sequence continues
        logits = [one.decode_one_token(token) for one in (decoder, other)]
        assert np.array_equal(*logits)


def test_a_hook_sees_every_operation_of_its_call_alone_and_replaces_values(
    llama_bundle,
):
    decoder, seen = Decoder(llama_bundle, "portable", "exact"), set()
    last = decoder.layer_shards[-1].shard

    def hook(shard, op, outputs):
        seen.add(shard.name)
        if shard is last and [name for name, _ in op.outputs] == [HIDDEN]:
            return [outputs[0] * 2]

    doubled, _ = decoder.new_sequences().advance([IDS[:3]], hook)
    assert seen == {model.shard.name for model in decoder.layer_shards}
    seen.clear()
    plain, _ = decoder.new_sequences().advance([IDS[:3]])
    assert np.array_equal(doubled, plain * np.float32(2)) and not seen
    decoder.logits(plain, hook=hook)
    assert seen == {model.shard.name for model in decoder.heads}


def test_core_ml_has_no_hooks_and_says_so(shimmed, llama_bundle, llama_golden):
    decoder = Decoder(llama_bundle, "coreml")
    for inspect in (INSPECTIONS["ranges"], INSPECTIONS["profile"]):
        with refused("runtime coreml.*portable"):
            inspect(decoder, None)
    run.trace_bundle(decoder, llama_golden, (2, "isolated"))  # sees what Core ML shows
