"""Hooks see what runs, and nothing that looks into a decoder changes its own sequences,
however the looking ends."""

import numpy as np
import pytest
from tiny import prompt

from miltorch import Executable
from workbench import Decoder, InputError
from workbench.bundle.names import HIDDEN
from workbench.check import golden, run, states, validate
from workbench.explain import trace
from workbench.sweep import timing

IDS = prompt(97, 7)


@pytest.fixture(scope="module")
def looked_into(llama_bundle, tiny_llama):
    """A bundle, and a golden that validation puts in its layers' places."""
    return llama_bundle, golden.make_golden(tiny_llama, prompt(97, 6, seed=1))


LOOKS = {
    "validation": lambda decoder, reference: validate.validate(decoder, reference),
    "pass": lambda decoder, reference: run.run_golden(decoder, reference, 2),
    "states": lambda decoder, _: states.state_gates(decoder),
    "probe": lambda decoder, _: states.write_probe(
        decoder, points=[(1, 0), (2, 1), (3, 2)]
    ),
    "trace": lambda decoder, _: trace.trace_decoder(decoder, IDS),
    "profile": lambda decoder, _: timing.profile(decoder, depth=2, calls=2),
}


@pytest.mark.matrix(4, wide=4)
@pytest.mark.parametrize("calls", [None, 1])
@pytest.mark.parametrize("name", LOOKS)
def test_a_look_leaves_the_decoder_s_sequence_as_it_was(
    looked_into, monkeypatch, name, calls
):
    """Ended by Jupyter's stop button after some calls of a shard, or by itself."""
    bundle, reference = looked_into
    decoder, other = (Decoder(bundle, "portable", fast=True) for _ in range(2))
    for each in (decoder, other):
        each.prefill(IDS)
    run, done = Executable.run_calls, []

    def stopped(self, *arguments):
        outputs = run(self, *arguments)
        done.append(self)
        if len(done) == calls:
            raise KeyboardInterrupt
        return outputs

    with monkeypatch.context() as patch:
        patch.setattr(Executable, "run_calls", stopped)
        if calls is None:
            LOOKS[name](decoder, reference)
        else:
            with pytest.raises(KeyboardInterrupt):
                LOOKS[name](decoder, reference)
    assert done  # the literal graph ran
    for token in (5, 42):  # the sequence that ran goes on
        assert np.array_equal(
            decoder.decode_one_token(token), other.decode_one_token(token)
        )


def test_a_hook_sees_every_operation_of_its_call_alone(looked_into):
    decoder, seen = Decoder(looked_into[0], "portable", fast=True), []
    seqs = decoder.fresh()

    def hook(shard, op, outputs):
        seen.append(shard.name)

    hidden, _ = decoder.advance(seqs, [IDS[:3]], hook)
    assert set(seen) == {model.shard.name for model in decoder.layers}
    seen.clear()
    decoder.logits(hidden, hook=hook)
    assert set(seen) == {model.shard.name for model in decoder.heads}
    seen.clear()
    decoder.step(seqs, [IDS[3:4]])
    assert not seen


def test_what_a_hook_returns_replaces_the_value(llama_bundle):
    decoder = Decoder(llama_bundle, "portable", "exact")
    last = decoder.layers[-1].shard
    plain, _ = decoder.advance(decoder.fresh(), [[1, 2]])

    def double(shard, op, outputs):
        if shard is last and [name for name, _ in op.outputs] == [HIDDEN]:
            return [outputs[0] * 2]

    doubled, _ = decoder.advance(decoder.fresh(), [[1, 2]], double)
    assert np.array_equal(doubled, plain * np.float32(2))


def test_core_ml_has_no_hooks_and_says_so(shimmed, looked_into):
    decoder = Decoder(looked_into[0], "coreml")
    for look in (LOOKS["trace"], LOOKS["profile"]):
        with pytest.raises(InputError, match="runtime coreml.*portable"):
            look(decoder, None)
    run.run_golden(decoder, looked_into[1], 2)  # sees what Core ML shows


@pytest.mark.wide
def test_experts_that_are_loaded_within_a_call_are_hooked_too(exports):
    bundle = exports.bundle(
        exports.checkpoint("zaya", num_hidden_layers=2, num_experts=2),
        moe="routed",
        tokens="1-2",
    )
    decoder, seen = Decoder(bundle, "portable", fast=True), set()
    decoder.advance(decoder.fresh(), [[5, 6]], lambda shard, *_: seen.add(shard.kind))
    assert decoder.experts.models and seen == {"router", "expert"}
